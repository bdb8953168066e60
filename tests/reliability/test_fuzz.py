"""Fuzzing: whatever a file, a name or an argument holds, the answer is right or one line that says why not.

Mutations are seeded, so that a crash is found again by its number; what hypothesis draws comes on
top. A case is over the limit with more than two seconds of processor time, a kind of file with more
than 200 MB of memory beside what the first cases took (MOD-02 in docs/reliability.md).
"""

from __future__ import annotations

import io
import json
import os
import random
import resource
import shutil
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from lora_trainer import families
from lora_trainer.common.errors import InputError, LoraTrainError, RequestError
from lora_trainer.common.events import read_jsonl
from lora_trainer.config.config import build_config, flatten, parse_assignment, setting_keys
from lora_trainer.config.inputs import BaseSettings, DataSettings
from lora_trainer.config.layers import read_settings_file
from lora_trainer.config.running import Config
from lora_trainer.dataset.captions import read_caption_file
from lora_trainer.dataset.images import decode
from lora_trainer.dataset.scan import scan
from lora_trainer.families.files.locate import describe
from lora_trainer.lora_file.inspect import inspect_file
from lora_trainer.reporting.history import read_history
from lora_trainer.reporting.report import write_report
from lora_trainer.run import run_folder
from tests.checkpoint_files.cases import Case as WeightFile
from tests.checkpoint_files.files import gguf, safetensors
from tests.fakes.family_bases import base_of
from tests.fakes.run_folder import fake_run
from tests.reliability.conftest import CASES

Figure = Callable[..., None]
Case = Callable[[random.Random], None]
CPU_LIMIT_S = 2.0
MEMORY_LIMIT_KIB = 200_000


pytestmark = pytest.mark.timeout(300 + CASES // 5)


@pytest.fixture
def fuzz(request: pytest.FixtureRequest, figure: Figure) -> Callable[..., None]:
    """Return a function that tries CASES seeded cases, or `times` as many.

    One error is expected, of one line, with a fix.
    """

    def run(expected: type[LoraTrainError], case: Case, *, times: int = 1) -> None:
        crashes, slow, memory_kib = list[str](), 0, 0
        for number in range(times * CASES):
            draw = random.Random(f"{request.node.name}-{number}")
            began_s = time.process_time()
            try:
                case(draw)
            except expected as error:
                assert "\n" not in str(error) and error.fix, str(error)
            except Exception as error:  # noqa: BLE001 - a crash is what is counted
                crashes.append(f"{number}: {type(error).__name__}: {str(error)[:200]}")
            slow += time.process_time() - began_s > CPU_LIMIT_S
            if number == 20:  # whatever is loaded once has been
                memory_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_kib
        over = slow + (grown_kib > MEMORY_LIMIT_KIB)
        figure("fuzz", cases=times * CASES, crashes=len(crashes), over_limit=over)
        assert not crashes, f"{len(crashes)} of {times * CASES}: " + "; ".join(crashes[:5])
        assert not over, f"{slow} slow cases, {grown_kib:,} KiB more memory"

    return run


def of_a_file(file: Path, data: bytes) -> Path:
    file.write_bytes(data)
    return file


# ---- damage: bytes flipped, cut, doubled and swapped, JSON made deep, huge and strange


TOKENS = (
    b"[" * 3_000, b'{"a":' * 3_000, b"[" * 100_000, b"NaN", b"-Infinity", b"1e999", b"9" * 5_000, b"-1",
    b"18446744073709551616", b"null", b"true", b'"', b"\\u0000", b"\\ud800", b"\xef\xbb\xbf", b"\x00",
    b"\xff\xfe", b"\xe2\x80\xa8", b"\r", b"\n", b",", b"}", b"]", b"{}", b"../../etc/passwd",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 2**63, 2**64, 10**400, 1e308, float("nan"), float("inf"), "", "\0",
    "\ud800", "../..", "auto", "x" * 70_000, [], [[]], {}, {"value": 1}, [1, 2], [-1, 5], [0, 2**70],
    ["a"], {"": {}}, [None],
)  # fmt: skip


def mutated(data: bytes, draw: random.Random) -> bytes:
    """Return `data` after one to four accidents."""
    for _ in range(draw.choice((1, 1, 2, 4))):
        data = _accident(data, draw)
    return data


def _accident(data: bytes, draw: random.Random) -> bytes:
    at, end = sorted((draw.randint(0, len(data)), draw.randint(0, len(data))))
    match draw.randrange(7):
        case 0:
            flipped = bytearray(data)
            for _ in range(min(len(data), draw.choice((1, 1, 8)))):
                flipped[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            return bytes(flipped)
        case 1:
            return data[:at]
        case 2:
            return data[:at] + data[end:]
        case 3:
            return data[:end] + data[at:end] + data[end:]
        case 4:
            return data[:at] + bytes(end - at) + data[end:]
        case 5:
            return data[:at] + draw.randbytes(draw.randint(1, 40)) + data[at:]
        case _:
            return data[:at] + draw.choice(TOKENS) + data[at:]


def mutated_json(value: Any, draw: random.Random) -> Any:
    """Return a JSON value in which something, somewhere, is missing, of another kind or doubled."""
    if isinstance(value, dict) and value and draw.random() < 0.8:
        key = draw.choice(list(value))
        rest = {name: inner for name, inner in value.items() if name != key}
        match draw.randrange(4):
            case 0:
                return rest
            case 1:
                return {**rest, draw.choice(("", "\0", key.upper(), key + "x", "é")): value[key]}
            case _:
                return {**value, key: mutated_json(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.7:
        at = draw.randrange(len(value))
        match draw.randrange(3):
            case 0:
                return value[:at] + value[at + 1 :]
            case 1:
                return value[: at + 1] + value[at:]
            case _:
                return [*value[:at], mutated_json(value[at], draw), *value[at + 1 :]]
    return draw.choice(VALUES)


def damaged_json(value: Any, draw: random.Random) -> bytes:
    """Return a JSON file with damage to its values, to its bytes, or both."""
    for _ in range(draw.choice((0, 1, 2))):
        value = mutated_json(value, draw)
    data = json.dumps(value, ensure_ascii=draw.random() < 0.5).encode("utf-8", "surrogatepass")
    return mutated(data, draw) if draw.random() < 0.5 else data


def damaged_header(file: bytes, draw: random.Random) -> bytes:
    """Return a safetensors file with another header, its length mostly right."""
    length = int.from_bytes(file[:8], "little")
    header = damaged_json(json.loads(file[8 : 8 + length]), draw)
    stated = draw.choice((len(header),) * 6 + (0, 1, len(header) + 1, 1 << 30, (1 << 64) - 1))
    body = file[8 + length :]
    if draw.random() < 0.2:
        body = mutated(body, draw)
    return stated.to_bytes(8, "little") + header + body


# ---- settings


def some_settings(draw: random.Random) -> dict[str, Any]:
    """Return a settings file as a person writes it, nested or flat."""
    flat = flatten(Config())
    chosen = {key: flat[key] for key in draw.sample(setting_keys(), draw.randint(1, 12))}
    if draw.random() < 0.5:
        return chosen
    nested: dict[str, Any] = {}
    for key, value in chosen.items():
        section, _, name = key.partition(".")
        nested.setdefault(section, {})[name] = value
    return {"settings": nested} if draw.random() < 0.3 else nested


def assert_a_config(values: dict[str, Any]) -> None:
    """The values are settings, and the same ones after they were written down."""
    config = build_config(values)
    assert build_config(json.loads(json.dumps(flatten(config), allow_nan=False))) == config


@pytest.mark.parametrize("kind", ["json", "toml"])
def test_cfg_01_02_fuzz_settings_files(kind: str, tmp_path: Path, fuzz: Any) -> None:
    def case(draw: random.Random) -> None:
        chosen = some_settings(draw)
        if kind == "json":
            data = damaged_json(chosen, draw)
        else:
            rows = [f"{key} = {json.dumps(value)}" for key, value in chosen.items() if "." in key]
            data = mutated("\n".join(rows).encode(), draw)
        file = of_a_file(tmp_path / f"a.{kind}", data)
        assert_a_config(dict(read_settings_file(file).values))

    fuzz(RequestError, case)


ASSIGNMENTS = st.one_of(
    st.text(max_size=60),
    st.builds(
        "{}={}".format,
        st.sampled_from(setting_keys()),
        st.one_of(
            st.text(max_size=40),
            st.integers().map(str),
            st.floats().map(str),
            st.recursive(
                st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
                lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=9), inner),
                max_leaves=8,
            ).map(json.dumps),
            st.sampled_from(("[" * 100_000, "9" * 5_000, "\0", "\ud800", '"\\ud800"')),
        ),
    ),
)


def test_cfg_01_02_fuzz_assignments(figure: Figure) -> None:
    @settings(max_examples=CASES, deadline=None)
    @given(ASSIGNMENTS)
    def each(text: str) -> None:
        with suppress(RequestError):
            key, value = parse_assignment(text)
            assert_a_config({key: value})

    each()
    figure("fuzz", cases=CASES, crashes=0, over_limit=0)


def test_cfg_05_fuzz_run_json(tmp_path: Path, fuzz: Any) -> None:
    """What a resume reads of the run it goes on with."""
    fake_run(tmp_path / "run", steps=12).write()
    written = json.loads((tmp_path / "run" / "run.json").read_bytes())

    def case(draw: random.Random) -> None:
        of_a_file(tmp_path / "run" / "run.json", damaged_json(written, draw))
        run = run_folder.read_run(tmp_path / "run")
        assert isinstance(run.base.source, str)
        build_config(run.settings)

    fuzz(RequestError, case)


# ---- captions and names


def test_cap_fuzz_captions(fuzz: Any) -> None:
    text = "zorble, a small toy, d\u00fcnn \u2018quoted\u2019 \u5c0f\u3055\u3044 \U0001f600"
    encodings = ["utf-8", "utf-8-sig", "utf-16", "utf-32", "gb18030", "shift_jis", "cp1252"]

    def case(draw: random.Random) -> None:
        data = mutated(text.encode(draw.choice(encodings), "ignore"), draw)
        found = read_caption_file("a.txt", data).text
        assert found == " ".join(found.split())
        assert "\0" not in found
        found.encode()

    fuzz(InputError, case)


NAMES = st.text(
    st.characters(exclude_characters="/\0", exclude_categories=()), min_size=1, max_size=60
).filter(lambda name: name not in (".", ".."))


def picture_bytes(kind: str = "PNG", side_px: int = 32) -> bytes:
    buffer = io.BytesIO()
    noise = random.Random(kind).randbytes(side_px * side_px * 3)
    Image.frombytes("RGB", (side_px, side_px), noise).save(buffer, kind)
    return buffer.getvalue()


def test_env_01_fuzz_file_names(tmp_path: Path, figure: Figure) -> None:
    """Every image with any name is trained on or named; names go into files that are UTF-8."""
    picture = picture_bytes()
    count = max(1, CASES // 4)

    @settings(max_examples=count, deadline=None)
    @given(st.lists(NAMES, min_size=1, max_size=4, unique=True))
    def each(names: list[str]) -> None:
        folder = tmp_path / "set"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        written = 0
        for name in names:
            with suppress(OSError, UnicodeEncodeError):  # what the disk has no name for
                (folder / f"{name}.png").write_bytes(picture)
                written += 1
                (folder / f"{name}.txt").write_text("a toy", encoding="utf-8")
        (folder / "plain.png").write_bytes(picture)
        found = scan(folder, settings=DataSettings(max_bad_fraction=1.0))
        hidden = sum(path.name.startswith(".") for path in folder.glob("*.png"))
        assert len(found.records) >= len(list(folder.glob("*.png"))) - hidden
        json.dumps(
            [record.name for record in found.records] + [row.what for row in found.findings],
            ensure_ascii=False,
        ).encode()

    each()
    figure("fuzz", cases=count, crashes=0, over_limit=0)


def test_env_01_sec_03_fuzz_run_names(tmp_path: Path, figure: Figure) -> None:
    """A run is one folder right inside the output folder, or it is not begun."""
    parent = tmp_path / "runs"
    given_names = st.text(st.characters(exclude_categories=()), max_size=60)
    odd = st.sampled_from(
        ("", ".", "..", "../x", str(tmp_path / "out"), "a/../../x", "\0", "~", "a\nb", "\ud800")
    )

    @settings(max_examples=CASES, deadline=None)
    @given(given_names | odd)
    def each(name: str) -> None:
        with suppress(RequestError):
            with run_folder.create(parent, name) as folder:
                assert folder.resolve().parent == parent.resolve()
                assert folder.name.startswith(name)
                folder.name.encode()
            shutil.rmtree(folder)
        assert not parent.exists() or not list(parent.iterdir())
        assert sorted(path.name for path in tmp_path.iterdir()) in ([], ["runs"])

    each()
    figure("fuzz", cases=CASES, crashes=0, over_limit=0)


# ---- records of a run


def test_trn_05_fuzz_event_logs(tmp_path: Path, fuzz: Any) -> None:
    """Damage to a line costs that line; the report is written and a resume cuts the log."""
    run = fake_run(tmp_path / "run", steps=12)
    run.write()
    lines = (run.folder / "events.jsonl").read_bytes().splitlines()[:80]

    def case(draw: random.Random) -> None:
        at = draw.randrange(len(lines))
        rest = [json.loads(line) for line in (*lines[:at], *lines[at + 1 :])]
        damaged = damaged_json(json.loads(lines[at]), draw)
        log = b"\n".join([*lines[:at], damaged, *lines[at + 1 :]])
        file = of_a_file(run.folder / "events.jsonl", log)
        rows = iter(read_jsonl(file))
        if b"\n" not in damaged:
            assert all(any(row == wanted for row in rows) for wanted in rest)
        read_history(run.folder)
        if draw.random() < 0.1:
            write_report(run.folder)
        with run_folder.claim(run.folder) as folder:
            run_folder.last_step(folder)
            run_folder.cut_events(folder, step=6)
        assert run_folder.last_step(folder) <= 6

    fuzz(LoraTrainError, case)


# ---- models and adapters


@pytest.mark.parametrize("name", ["sd15", "flux"])
def test_mod_04_fuzz_configurations_of_base_models(name: str, tmp_path: Path, fuzz: Any) -> None:
    folder = tmp_path / "base"
    shutil.copytree(base_of(name), folder)
    files = {
        file: file.read_bytes()
        for file in sorted(folder.rglob("*.json"))
        if "tokenizer" not in file.parent.name
    }

    def case(draw: random.Random) -> None:
        file = draw.choice(sorted(files))
        of_a_file(file, damaged_json(json.loads(files[file]), draw))
        try:
            facts = describe(BaseSettings(model=str(folder)))
            assert facts.family in families.NAMES
        finally:
            file.write_bytes(files[file])

    fuzz(LoraTrainError, case)


# ---- headers of checkpoints and adapters


HEADERS = json.loads(Path(__file__).with_name("headers.json").read_text(encoding="utf-8"))
"""Names and shapes by which files of bases and adapters are told."""


@pytest.mark.parametrize("kind", ["base", "gguf", "lora"])
def test_mod_02_fuzz_headers(kind: str, tmp_path: Path, fuzz: Any) -> None:
    def case(draw: random.Random) -> None:
        whole = WeightFile("damaged", draw.choice(HEADERS["lora" if kind == "lora" else "base"]))
        header, body_bytes = (gguf if kind == "gguf" else safetensors)(whole)
        data = mutated(header, draw) if kind == "gguf" else damaged_header(header, draw)
        suffix = "gguf" if kind == "gguf" else "safetensors"
        file = of_a_file(tmp_path / f"damaged.{suffix}", data)
        os.truncate(file, len(data) + body_bytes)
        inspect_file(file) if kind == "lora" else describe(BaseSettings(model=str(file)))

    fuzz(InputError, case, times=10)


@pytest.mark.parametrize("counts", [(2**60, 0), (0, 2**60), (900_000, 900_000)])
def test_mod_02_a_gguf_that_promises_more_than_it_holds_is_refused_at_once(
    counts: tuple[int, int], tmp_path: Path
) -> None:
    file = of_a_file(tmp_path / "a.gguf", b"GGUF" + struct.pack("<IQQ", 3, *counts))
    with pytest.raises(InputError, match="not a whole GGUF"):
        describe(BaseSettings(model=str(file)))


# ---- images


def test_img_fuzz_images(tmp_path: Path, fuzz: Any) -> None:
    whole = [picture_bytes(kind) for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")]

    def case(draw: random.Random) -> None:
        file = of_a_file(tmp_path / "a.png", mutated(draw.choice(whole), draw))
        found = decode(file, settings=DataSettings()).image
        assert found.mode == "RGB" and min(found.size) > 0

    fuzz(InputError, case)
