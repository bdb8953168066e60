"""IMG and CAP: more than a hundred bad files, each named or used as it should be; none ends a scan.

Kinds of damage are made here by the dozen; what each odd file must become is in `tests/data`.
"""

from __future__ import annotations

import io
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from PIL import Image

from lora_trainer.common.errors import InputError
from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset.records import Dataset
from lora_trainer.dataset.scan import scan
from tests.fakes.runs import Toy, contents, events, run_cli, toy

Figure = Callable[..., None]
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    signal.alarm(100)
    yield
    signal.alarm(0)


def encoded(kind: str, *, size: tuple[int, int] = (60, 44)) -> bytes:
    buffer = io.BytesIO()
    noise = random.Random(kind).randbytes(size[0] * size[1] * 3)
    Image.frombytes("RGB", size, noise).save(buffer, kind)
    return buffer.getvalue()


def damaged() -> dict[str, bytes]:
    """Return files that cannot be used, by name: cut, zeroed, emptied, of another kind."""
    found: dict[str, bytes] = {}
    for kind in FORMATS:
        data = encoded(kind)
        cuts = {0, 1, 4, 12, 20, len(data) // 4, len(data) // 2}
        for cut in sorted(cuts):
            found[f"{kind.lower()} cut at {cut}"] = data[:cut]
        found[f"{kind.lower()} of zeros"] = bytes(len(data))
        found[f"{kind.lower()} without its first bytes"] = data[8:]
        found[f"{kind.lower()} backwards"] = data[::-1]
        found[f"{kind.lower()} as text"] = data.hex().encode()
    texts = {
        "html": b"<!DOCTYPE html><html><body>please log in</body></html>",
        "svg": b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>',
        "pdf": b"%PDF-1.7\n" + bytes(range(256)),
        "zip": b"PK\x03\x04" + bytes(60),
        "gzip": b"\x1f\x8b" + bytes(60),
        "mp4": b"\x00\x00\x00\x20ftypisom" + bytes(60),
        "heic": b"\x00\x00\x00\x20ftypheic" + bytes(60),
        "lfs pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
        "json": b'{"error": "not found"}',
        "pickle": b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00.",
        "elf": b"\x7fELF" + bytes(60),
        "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n(x) run\n",
    }
    return found | texts


def spotted() -> dict[str, bytes]:
    """Return files with a few changed bytes: some can be used, none may be a surprise."""
    found, draw = {}, random.Random(5)
    for kind in FORMATS:
        for number in range(8):
            data = bytearray(encoded(kind))
            for _ in range(draw.randint(1, 6)):
                data[draw.randrange(len(data))] = draw.randrange(256)
            found[f"{kind.lower()} spotted {number}"] = bytes(data)
    return found


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        (folder / f"{name}.png").write_bytes(data)
        (folder / f"{name}.txt").write_text("a caption")


def scanned(folder: Path, *, max_bad_fraction: float) -> Dataset:
    settings = DataSettings(max_bad_fraction=max_bad_fraction)
    return scan(folder, settings=settings)


def test_img_01_02_every_damaged_file_is_named_with_a_fix_and_left_out(
    tmp_path: Path, figure: Figure
) -> None:
    files = damaged()
    place = toy(tmp_path)
    write_files(place.dataset, files)
    before = contents(place.dataset)
    dataset = scanned(place.dataset, max_bad_fraction=1.0)
    bad = {row.file: row for row in dataset.findings if row.severity == "error"}
    assert set(bad) == {f"{name}.png" for name in files}
    assert all(row.advice and row.code.startswith("IMG-0") for row in bad.values())
    assert len(dataset.records) == 6
    assert contents(place.dataset) == before, "a scan only reads"
    figure("bad_inputs", tried=len(files), handled=len(bad), crashes=0, hangs=0)


def test_img_01_02_files_with_changed_bytes_are_used_or_named(
    tmp_path: Path, figure: Figure
) -> None:
    files = spotted()
    place = toy(tmp_path)
    write_files(place.dataset, files)
    dataset = scanned(place.dataset, max_bad_fraction=1.0)
    used = {record.name for record in dataset.records}
    bad = {row.file for row in dataset.findings if row.severity == "error"}
    assert not used & bad
    assert len(used | bad) == len(files) + 6
    figure("bad_inputs", tried=len(files), handled=len(files), crashes=0, hangs=0)


def test_img_01_too_many_are_refused_before_training_all_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = toy(tmp_path)
    write_files(place.dataset, dict(list(damaged().items())[:9]))
    with pytest.raises(InputError, match="9 of 15 images") as refused:
        scanned(place.dataset, max_bad_fraction=0.1)
    assert str(refused.value).count(".png ") == 9
    assert run_cli(place.arguments()) == 3
    assert capsys.readouterr().err.count("\n") == 1
    assert not place.runs.exists()


def test_img_01_a_few_are_left_out_and_the_run_goes_on(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    place: Toy = toy(tmp_path_factory.mktemp("few"), images=18).with_base()
    write_files(place.dataset, dict(list(damaged().items())[3:5]))
    quiet = {
        "sampling__every_steps": 0,
        "train__validate_every_steps": 0,
        "output__save_every_steps": 0,
    }
    assert place.train(steps=1, logging__trackers=[], **quiet) == 0
    (started,) = events(place.run, "run_started")
    assert started["images"] + started["validation_images"] == 18
    problems = (place.run / "problems.jsonl").read_text(encoding="utf-8")
    assert problems.count('"severity": "error"') == 2


# ---- captions


def captions() -> dict[str, bytes]:
    """Return caption files nobody wrote on purpose, by name."""
    text = "a cat, naïve — “smart”"
    found = {
        "empty": b"",
        "spaces": b" \r\n\t ",
        "only a mark": b"\xef\xbb\xbf",
        "nul": b"a\x00cat",
        "smart quote": b"the cat\x92s toy",
        "gbk": "一只黑猫".encode("gbk"),  # without the third letter it would be valid UTF-8
        "shift jis": "猫の絵".encode("shift_jis"),
        "big5": "貓".encode("big5"),
        "utf-16": text.encode("utf-16"),
        "utf-16 without a mark": text.encode("utf-16-le"),
        "utf-32": text.encode("utf-32"),
        "half a character": "ä".encode()[:1],
        "overlong": b"\xc0\xaf\xc0\xaf",
        "surrogate": b"\xed\xa0\x80",
        "a megabyte": b"cat, " * 200_000,
        "seventeen megabytes": b"x" * (17 << 20),
        "script": b"<script>alert(1)</script>",
        "format": b"%s%s%n {0.__class__} {a|b}",
        "escape": b"\x1b[31mred\x1b[0m\x07",
        "rtl": "abc‮cba".encode(),
        "newlines": "a\u2028b\u0085c\x0bd".encode(),
        "many lines": b"cat\n" * 1000,
        "an image": encoded("PNG"),
        "json": b'{"caption": "a cat"}',
        "path": b"../../etc/passwd",
    }
    draw = random.Random(9)
    return found | {f"noise {n}": draw.randbytes(draw.randint(1, 300)) for n in range(25)}


def test_cap_01_02_03_04_every_caption_is_one_clean_line_and_odd_ones_are_named(
    tmp_path: Path, figure: Figure
) -> None:
    files = captions()
    place = toy(tmp_path, images=1)
    for index, (name, data) in enumerate(files.items()):
        noise = random.Random(index).randbytes(40 * 40 * 3)
        Image.frombytes("RGB", (40, 40), noise).save(place.dataset / f"{name}.png")
        (place.dataset / f"{name}.txt").write_bytes(data)
    dataset = scanned(place.dataset, max_bad_fraction=0.0)
    assert len(dataset.records) == len(files) + 1
    for record in dataset.records:
        assert record.caption == " ".join(record.caption.split())
        assert len(record.caption) <= 10_000
    named = {row.file for row in dataset.findings if row.file}
    text = " ".join(row.what for row in dataset.findings)
    for name in ("smart quote", "gbk", "a megabyte", "seventeen megabytes", "half a character"):
        assert f"{name}.txt" in named or f"{name}.png" in named or f"{name}." in text, name
    figure("bad_inputs", tried=len(files), handled=len(files), crashes=0, hangs=0)
