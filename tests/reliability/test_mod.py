"""MOD: base models and adapters that are hostile, damaged, of another kind, or cannot be fetched."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_trainer import families
from lora_trainer.common.errors import InputError, LoraTrainError
from lora_trainer.config.inputs import BaseSettings
from lora_trainer.families.base.facts import BaseFacts
from lora_trainer.families.files.locate import locate
from lora_trainer.lora_file.inspect import inspect_file
from tests.fakes.family_bases import base_of
from tests.fakes.hub_server import hub_in_process
from tests.fakes.runs import Toy, events, python, run_cli, toy

Figure = Callable[..., None]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return toy(tmp_path_factory.mktemp("mod")).with_base()


# ---- MOD-01


class Payload:
    """A pickle that makes a file when it is opened."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.marker,))


def write_payload(file: Path, marker: Path, *, zipped: bool) -> None:
    if zipped:
        torch.save({"state_dict": Payload(marker)}, file)
    else:
        file.write_bytes(pickle.dumps(Payload(marker)))


@pytest.mark.parametrize(("name", "zipped"), [("model.ckpt", True), ("model.safetensors", False)])
def test_mod_01_a_pickle_is_refused_wherever_it_is_given_and_never_run(
    name: str, zipped: bool, place: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, marker = tmp_path / name, tmp_path / "marker"
    write_payload(file, marker, zipped=zipped)
    line = place.arguments("--dry-run")
    base = line.index("--base")
    asked = [
        [*line[:base], "--base", str(file), *line[base + 2 :]],
        [*line, "--set", f"base.vae={file}"],
        [*line[:-1], "--set", f"train.init_from={file}"],
        ["inspect", str(file)],
        ["convert", str(file), "--format", "kohya", "--output", str(tmp_path / "out.safetensors")],
    ]
    for words in asked:
        capsys.readouterr()
        code = run_cli(words)
        said = [row for row in capsys.readouterr().err.splitlines() if row.startswith("error: ")]
        assert (code, len(said)) == (3, 1), (words, said)
        assert "Fix: " in said[0]
    assert not marker.exists()
    assert not (tmp_path / "out.safetensors").exists()


# ---- MOD-02


def with_header(header: bytes, body: bytes = b"", *, length: int | None = None) -> bytes:
    size = len(header) if length is None else length
    return size.to_bytes(8, "little") + header + body


def entry(shape: Any = (2,), offsets: Any = (0, 8), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def one(value: Any) -> bytes:
    return with_header(json.dumps({"a": value}).encode(), bytes(8))


HOSTILE: Mapping[str, Callable[[], bytes]] = {
    "a length of 99 MB": lambda: with_header(b"{}", length=99_000_000),
    "not UTF-8": lambda: with_header(b'{"\xff": 1}'),
    "nested objects": lambda: with_header(b'{"a":' * 100_000),
    "an unknown dtype": lambda: one(entry(dtype="F33")),
    "a shape of 2^64": lambda: one(entry(shape=[2**63, 2])),
    "many dimensions": lambda: one(entry(shape=[10**9] * 60_000)),
    "offsets backwards": lambda: one(entry(offsets=[8, 0])),
    "offsets behind the end": lambda: one(entry(shape=[20], offsets=[0, 80])),
    "an entry that is a list": lambda: one(["F32", [2], [0, 8]]),
    "metadata that is a number": lambda: with_header(b'{"__metadata__": 5}'),
    "270,000 tensors": lambda: with_header(
        b"{"
        + b",".join(b'"%d":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}' % k for k in range(270_000))
        + b"}"
    ),
    "millions of dimensions": lambda: with_header(
        b'{"a":{"dtype":"F32","shape":[' + b"0," * 7_900_000 + b'0],"data_offsets":[0,0]}}'
    ),
    "millions of lists": lambda: with_header(b"[" + b"[]," * 5_000_000 + b"[]]"),
    "a key of 15 MB": lambda: with_header(b'{"' + b"a" * 15_000_000 + b'":1}'),
}  # fmt: skip


READ = """
import json, sys, time
from pathlib import Path
from lora_trainer.common.errors import InputError
from lora_trainer.families.files.weight_files import read_header
from lora_trainer.lora_file.inspect import inspect_file
def peak_kib():
    # ru_maxrss would be that of the process that started this one, where that was larger.
    status = Path("/proc/self/status")
    return int(status.read_text().partition("VmHWM:")[2].split()[0]) if status.exists() else 0
for name in sys.argv[1:]:
    for read in (read_header, inspect_file):
        before_kib, began_s = peak_kib(), time.process_time()
        try:
            read(Path(name))
        except InputError as error:
            print(json.dumps([peak_kib() - before_kib, time.process_time() - began_s, str(error)]))
"""


def test_mod_02_a_hostile_header_is_one_line_in_little_time_and_memory(
    tmp_path: Path, figure: Figure
) -> None:
    """Memory of the process, where /proc tells it: `tracemalloc` does not see what safetensors allocates.

    More kinds of damage are drawn in test_fuzz.py.
    """
    files = [tmp_path / f"{number}.safetensors" for number in range(len(HOSTILE))]
    for file, hostile in zip(files, HOSTILE.values(), strict=True):
        file.write_bytes(hostile())
    rows = [json.loads(row) for row in python(READ, *map(str, files)).stdout.splitlines()]
    assert len(rows) == 2 * len(HOSTILE)
    slow = sum(spent_s > 10.0 for _, spent_s, _ in rows)
    figure("fuzz", cases=len(rows), crashes=0, over_limit=slow)
    assert not slow and all("\n" not in said and len(said) < 1_000 for _, _, said in rows)
    for reader in (0, 1):
        assert sum(grown_kib for grown_kib, _, _ in rows[reader::2]) < 100_000, rows


def test_mod_02_what_is_right_is_still_read(tmp_path: Path) -> None:
    file = tmp_path / "many.safetensors"
    save_file({f"block.{k}.weight": torch.zeros(1, 2) for k in range(20_000)}, file)
    with pytest.raises(InputError, match="holds 20,000 tensors such as"):
        inspect_file(file)


# ---- MOD-03


def test_mod_03_one_flipped_bit_of_the_base_is_told_by_a_resume(tmp_path: Path) -> None:
    """The hash of each part is in run.json, so weights that changed are no longer EXACT, nor are captions."""
    place = toy(tmp_path).with_base()
    quiet = {"sampling__every_steps": 0, "train__validate_every_steps": 0, "logging__trackers": []}
    quiet["output__save_every_steps"] = 0
    assert place.train(steps=1, **quiet) == 0
    file = place.base / "unet" / "diffusion_pytorch_model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert place.train("--resume", steps=1, **quiet) == 0
    (place.dataset / "p0.txt").write_text("another caption")
    assert place.train("--resume", steps=1, **quiet) == 0
    rows = [(row["exactness"], row["differences"]) for row in events(place.run, "resumed")]
    assert rows == [
        ("CHANGED", ["base: the denoiser has other weights"]),
        ("CHANGED", ["dataset: images or captions changed"]),
    ]


# ---- MOD-05


def test_mod_05_a_vae_that_overflows_in_fp16_gives_finite_latents(tmp_path: Path) -> None:
    """It always runs in fp32, so there is nothing to repeat."""
    folder = Path(shutil.copytree(base_of("sd15"), tmp_path / "base"))
    (file,) = (folder / "vae").glob("*.safetensors")
    tensors = load_file(file)
    tensors["quant_conv.weight"] = tensors["quant_conv.weight"] * 1e6
    save_file(tensors, file, metadata={"format": "pt"})
    facts: BaseFacts = locate(BaseSettings(model=str(folder)))
    encoder = families.family(facts.family).latents.encoder(facts, device=CPU)
    (latent,) = encoder.encode_images(torch.rand(1, 3, 32, 32) * 2 - 1)
    assert latent.mean.isfinite().all()
    assert latent.mean.abs().max() > 65504, "it would have overflowed"


# ---- MOD-06


REFUSALS = {
    "a/403-GatedRepo": (4, "is gated.*hf auth login"),
    "a/404-RepoNotFound": (3, "the Hub has no model 'a/404-RepoNotFound' .*local folder"),
    "a/404-RevisionNotFound": (3, r"no revision 'v9'.*check base\.revision"),
    "a/401": (4, "the Hub answers 401"),
    "a/403": (4, "the Hub answers 403"),
    "a/429": (4, "could not be downloaded .the Hub answers 429.*connect once.*--base embedded"),
    "a/500": (4, "the Hub answers 500"),
    "a/200": (4, "the server that answers is not the Hub"),
}
"""Repository -> exit code, what is said."""


def test_mod_06_a_hub_that_refuses_is_one_line_and_no_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_SECRETSECRETSECRET")
    monkeypatch.setattr("time.sleep", lambda _: None)  # between tries
    with hub_in_process(monkeypatch) as hub:
        for source, (exit_code, said) in REFUSALS.items():
            status, _, error = source.removeprefix("a/").partition("-")
            hub.answers[source] = (int(status), error)
            with pytest.raises(LoraTrainError, match=said) as caught:
                locate(BaseSettings(model=source, revision="v9"))
            assert caught.value.exit_code == exit_code and caught.value.fix, source
            assert "\n" not in str(caught.value) and "SECRET" not in str(caught.value)
        monkeypatch.setenv("HF_TOKEN", "hf_\u043aSECRET")
        fault = "the Hub token has a character that no token has, at place 4"
        with pytest.raises(LoraTrainError, match=fault) as caught:
            locate(BaseSettings(model="a/b", revision="v9"))
        assert "SECRET" not in str(caught.value) and "HF_TOKEN" in caught.value.fix
        monkeypatch.setenv("HF_TOKEN", "hf_SECRETSECRETSECRET")
    with pytest.raises(
        LoraTrainError, match=r"could not be downloaded .*: no connection"
    ) as caught:
        locate(BaseSettings(model="a/gone", revision="v9"))
    assert caught.value.exit_code == 4 and caught.value.fix
