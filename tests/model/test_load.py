"""From what the user wrote to a layout, its facts and identities; refusals say what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_trainer import families
from lora_trainer.common.errors import (
    InputError,
    LoraTrainError,
    MachineError,
    RequestError,
)
from lora_trainer.common.memo import HashMemo
from lora_trainer.config.inputs import BaseSettings
from lora_trainer.families import locate as families_locate
from lora_trainer.families.base import Layout
from lora_trainer.families.locate import (
    EMBEDDED,
    EMBEDDED_FOLDER,
    describe,
    identified,
    locate,
    with_choices,
)
from tests.fakes.family_bases import base_of, copy_of
from tests.fakes.tiny_base import copy_base
from tests.fakes.training import tiny_base

HUB_ID = "stable-diffusion-v1-5/stable-diffusion-v1-5"


def base(model: str | Path, **settings: Any) -> BaseSettings:
    return BaseSettings(model=str(model), **settings)


def memo() -> HashMemo:
    return HashMemo()


# ---- folders and Hub ids


def test_a_folder_is_found_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert describe(base(tiny_base())).layout == Layout(folder=tiny_base())
    assert describe(base(EMBEDDED)).layout == Layout(folder=EMBEDDED_FOLDER)
    copy_base(tiny_base(), tmp_path / "owner" / "name")
    monkeypatch.chdir(tmp_path)
    relative = describe(base("owner/name")).layout
    assert relative == Layout(folder=Path("owner/name")), "a folder wins over a Hub id"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert describe(base("~/owner/name")).located.folder == tmp_path / "owner" / "name"


@pytest.mark.parametrize("suffix", [".ckpt", ".pt", ".pth", ".bin", ".pkl"])
def test_a_pickle_is_refused_without_opening_it(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"model{suffix}"
    file.write_bytes(b"cos\nsystem\n(S'touch x'\ntR.")
    with pytest.raises(InputError, match=f"model{suffix} is a pickle") as caught:
        describe(base(file))
    assert "safetensors" in caught.value.fix


@pytest.mark.parametrize("source", ["/no/such/folder", "./nowhere", "~/nowhere", "a/b/c", "word"])
def test_a_path_that_is_not_there_is_named(source: str) -> None:
    with pytest.raises(InputError, match="does not exist"):
        describe(base(source))


def test_a_known_hub_id_is_described_without_a_download() -> None:
    facts = describe(base(HUB_ID))
    assert (facts.family, facts.layout, facts.resolution_px) == ("sd15", None, 512)
    assert facts.download_bytes > 1e9


def test_an_unknown_hub_id_cannot_be_described_here() -> None:
    with pytest.raises(MachineError, match="not on this machine"):
        describe(base("nobody/nothing"))


@pytest.mark.filterwarnings("ignore")
def test_without_a_connection_the_download_says_so() -> None:
    with pytest.raises(MachineError, match="no connection, or offline mode"):
        locate(base("nobody/nothing"))


def test_a_hub_base_is_downloaded_and_an_interrupted_download_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half = copy_of("sd15", tmp_path / "half")
    (half / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    asked = []

    def download(source: str, *, revision: str | None, without: frozenset[str], **_: Any) -> Path:
        asked.append((source, revision, without))
        return base_of("sd15")

    monkeypatch.setattr(families_locate, "download", download)
    monkeypatch.setattr(families_locate, "cached_snapshot", lambda source, *, revision: None)
    assert locate(base("owner/name", revision="v2")).located.folder == base_of("sd15")
    monkeypatch.setattr(families_locate, "cached_snapshot", lambda source, *, revision: half)
    assert locate(base("owner/name")).located.folder == base_of("sd15")
    monkeypatch.setattr(
        families_locate, "cached_snapshot", lambda source, *, revision: base_of("sd15")
    )
    locate(base("owner/name"))
    assert asked == [("owner/name", "v2", frozenset()), ("owner/name", None, frozenset())]


def test_a_broken_local_folder_is_no_reason_to_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = copy_of("sd15", tmp_path / "broken")
    (broken / "unet" / "config.json").unlink()
    monkeypatch.setattr(
        families_locate, "download", lambda *_, **__: pytest.fail("went to the Hub")
    )
    with pytest.raises(InputError, match="unet"):
        locate(base(broken))


# ---- single files


def fake_checkpoint(file: Path, names: dict[str, tuple[int, ...]]) -> Path:
    save_file({name: torch.zeros(shape) for name, shape in names.items()}, file)
    return file


def test_a_lora_given_as_base_is_called_a_lora(tmp_path: Path) -> None:
    names = {"lora_unet_mid.lora_down.weight": (4, 8), "lora_unet_mid.lora_up.weight": (8, 4)}
    file = fake_checkpoint(tmp_path / "style.safetensors", names)
    with pytest.raises(InputError, match="style.safetensors is a LoRA, not a base") as caught:
        describe(base(file))
    assert "train.init_from" in caught.value.fix and caught.value.exit_code == 3


def test_a_file_of_nothing_known_says_what_it_holds(tmp_path: Path) -> None:
    file = fake_checkpoint(tmp_path / "thing.safetensors", {"some.weight": (2, 2)})
    with pytest.raises(InputError, match="1 tensors such as 'some.weight'"):
        describe(base(file))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        b"\xff" * 64,
        (1 << 62).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (40).to_bytes(8, "little") + b'{"a":{"dtype":"F32","shape":[2],"data_of',
        (60).to_bytes(8, "little")
        + b'{"a":{"dtype":"F32","shape":[9],"data_offsets":[0,36]}}     ',
        (3000).to_bytes(8, "little") + b"[" * 3000,
    ],
    ids=["empty", "short", "noise", "huge", "list", "cut", "truncated", "deep"],
)
def test_a_hostile_or_cut_file_is_one_line(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(InputError, match="model.safetensors") as caught:
        describe(base(file))
    assert "\n" not in str(caught.value) and caught.value.exit_code == 3


def test_a_file_that_is_not_there_or_of_another_kind_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        describe(base(tmp_path / "no.safetensors"))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(InputError, match="model.gguf is not a whole GGUF file"):
        describe(base(file))


@pytest.fixture
def single(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that the registry takes for a checkpoint of sd15 with denoiser and VAE."""
    monkeypatch.setattr(
        families,
        "detect_file",
        lambda header: (families.family("sd15"), frozenset({"denoiser", "vae"})),
    )
    return fake_checkpoint(tmp_path / "single.safetensors", {"model.x": (2, 2)})


def test_a_single_file_takes_the_rest_from_its_companion(
    single: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    monkeypatch.setattr(
        type(families.family("sd15")),
        "facts",
        lambda self, layout, *, source: seen.append((layout, source)),
    )
    describe(base(single, companion=str(base_of("sd15"))))
    files = {"denoiser": single, "vae": single}
    assert seen == [(Layout(folder=base_of("sd15"), files=files), str(single))]


def test_without_its_companion_a_single_file_is_described_by_its_family(
    single: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = describe(base(single))
    assert (facts.family, facts.source, facts.layout) == ("sd15", str(single), None)
    asked = []

    def download(source: str, *, revision: str | None, without: frozenset[str], **_: Any) -> Path:
        asked.append((source, without))
        raise MachineError("no connection", fix="connect")

    monkeypatch.setattr(families_locate, "download", download)
    with pytest.raises(MachineError):
        locate(base(single))
    default = next(iter(families.family("sd15").releases))
    assert asked == [(default, frozenset({"denoiser", "vae"}))], "only what the file lacks"


def test_a_companion_of_another_family_is_refused(single: Path) -> None:
    with pytest.raises(InputError, match="is of family sdxl, single.safetensors is sd15"):
        describe(base(single, companion=str(base_of("sdxl"))))


# ---- another VAE


def test_another_vae_folder_stands_in_for_the_base_s(tmp_path: Path) -> None:
    other = copy_of("sd15", tmp_path / "other") / "vae"
    file = other / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, file, metadata={"format": "pt"})
    plain = identified(describe(base(tiny_base())), memo())
    for named in (other, other.parent):
        changed = identified(describe(base(tiny_base(), vae=str(named))), memo())
        assert changed.located.files == {"vae": other}
        different = [part for part in plain.parts if plain.parts[part] != changed.parts[part]]
        assert different == ["vae"]


@pytest.mark.parametrize(
    ("vae", "kind", "said"),
    [
        ("nobody/no-vae", MachineError, "base.vae nobody/no-vae is not on this machine"),
        ("./nowhere", InputError, "does not exist"),
        ("vae.pt", InputError, "does not exist|pickle"),
    ],
)
def test_a_vae_that_is_not_there_is_named(vae: str, kind: type[LoraTrainError], said: str) -> None:
    with pytest.raises(kind, match=said):
        describe(base(tiny_base(), vae=vae))


def test_a_vae_that_is_none_is_refused(tmp_path: Path) -> None:
    file = fake_checkpoint(tmp_path / "thing.safetensors", {"some.weight": (2, 2)})
    with pytest.raises(InputError, match="thing.safetensors holds no VAE of family sd15"):
        describe(base(tiny_base(), vae=str(file)))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="has no config.json"):
        describe(base(tiny_base(), vae=str(tmp_path / "empty")))


# ---- what the user knows better


def test_prediction_and_terminal_snr_can_be_said() -> None:
    facts = describe(base(tiny_base()))
    assert with_choices(facts, base("x"), zero_terminal_snr=None) == facts
    said = base("x", prediction="v_prediction")
    chosen = with_choices(facts, said, zero_terminal_snr=True)
    assert (chosen.prediction, chosen.zero_terminal_snr) == ("v_prediction", True)


@pytest.mark.parametrize(
    ("name", "settings", "zero", "said"),
    [
        ("sd15", {}, True, "pure noise says nothing"),
        ("sd15", {"prediction": "flow"}, None, "base.prediction=flow"),
        ("flux", {"prediction": "epsilon"}, None, "base.prediction=epsilon"),
        ("flux", {}, True, "flow matching starts at pure noise"),
    ],
)
def test_impossible_choices_are_refused(
    name: str, settings: dict[str, Any], zero: bool | None, said: str
) -> None:
    facts = describe(base(base_of(name)))
    with pytest.raises(RequestError, match=said):
        with_choices(facts, base("x", **settings), zero_terminal_snr=zero)


# ---- identities


def test_a_local_base_is_described_without_hashing() -> None:
    facts = describe(base(tiny_base()))
    assert (facts.family, facts.source) == ("sd15", str(tiny_base()))
    assert {part.identity for part in facts.parts.values()} == {""}


def test_identities_are_per_part_and_by_content(tmp_path: Path) -> None:
    facts = identified(describe(base(tiny_base())), memo())
    same = identified(describe(base(copy_base(tiny_base(), tmp_path / "copy"))), memo())
    assert len({part.identity for part in facts.parts.values()}) == 3
    assert all(len(part.identity) == 64 for part in facts.parts.values())
    assert same.parts == facts.parts, "where a base lies does not matter"


@pytest.mark.parametrize(
    ("file", "part"),
    [
        ("unet/config.json", "denoiser"),
        ("unet/diffusion_pytorch_model.safetensors", "denoiser"),
        ("vae/config.json", "vae"),
        ("vae/diffusion_pytorch_model.safetensors", "vae"),
        ("text_encoder/config.json", "text_encoder"),
        ("text_encoder/model.safetensors", "text_encoder"),
        ("tokenizer/tokenizer.json", "text_encoder"),
        ("scheduler/scheduler_config.json", None),
    ],
)
def test_any_change_of_a_part_changes_its_identity_alone(
    tmp_path: Path, file: str, part: str | None
) -> None:
    before = describe(base(tiny_base()))
    copied = copy_base(tiny_base(), tmp_path / "changed")
    data = bytearray((copied / file).read_bytes())
    # The last value of a weight, or white space before the end of a JSON object.
    (copied / file).write_bytes(
        data[:-1] + bytes([data[-1] ^ 1]) if file.endswith("tensors") else b" " + data
    )
    old, new = identified(before, memo()).parts, identified(describe(base(copied)), memo()).parts
    assert [name for name in old if old[name] != new[name]] == ([part] if part else [])
