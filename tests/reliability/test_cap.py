"""CAP-01 to CAP-05: captions that are missing, unreadable, endless, hostile, or edited during a run."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open

from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset.records import Dataset
from lora_trainer.dataset.scan import scan
from lora_trainer.training import loop
from tests.fakes.runs import QUIET, events, toy, trajectory

Figure = Callable[..., None]


def draw(path: Path, seed: int | str) -> None:
    path.parent.mkdir(exist_ok=True)
    Image.frombytes("RGB", (40, 40), random.Random(seed).randbytes(40 * 40 * 3)).save(path, "PNG")


def scanned(folder: Path, **settings: Any) -> Dataset:
    chosen = DataSettings().model_copy(update=settings)
    return scan(folder, settings=chosen)


# ---- CAP-01

EMPTY = {
    "nothing": b"",
    "spaces": b" \t ",
    "newlines": b"\r\n\n",
    "mark": b"\xef\xbb\xbf",
    "mark 16": b"\xff\xfe",
    "mark and spaces": b"\xef\xbb\xbf \n",
    "nul": b"\0\0",
    "missing": None,
}


@pytest.mark.parametrize(("folder", "trigger"), [("", None), ("3_red fox", "sks")])
def test_cap_01_what_is_empty_is_the_folders_name_or_the_trigger_and_counted(
    folder: str, trigger: str | None, tmp_path: Path, figure: Figure
) -> None:
    for name, data in EMPTY.items():
        draw(tmp_path / folder / f"{name}.png", name)
        if data is not None:
            (tmp_path / folder / f"{name}.txt").write_bytes(data)
    dataset = scanned(tmp_path, trigger=trigger)
    words = [word for word in (trigger, "red fox" if folder else None) if word]
    assert {record.caption for record in dataset.records} == {", ".join(words)}
    (counted,) = [finding for finding in dataset.findings if finding.code == "CAP-01"]
    assert counted.what.startswith(f"{len(EMPTY)} of {len(EMPTY)} images have no caption but")
    figure("bad_inputs", tried=len(EMPTY), handled=len(EMPTY), crashes=0, hangs=0)


# ---- CAP-02

ENCODED = {
    "smart quote": ("the cat\x92s toy".encode("latin-1"), "the cat’s toy", "byte 7 (0x92)"),
    "accent": ("un café noir".encode("cp1252"), "un café noir", "byte 6 (0xe9)"),
    "gbk": ("一只黑猫".encode("gbk"), None, "byte 4 (0xba) is not UTF-8"),
    "shift jis": ("猫の絵".encode("shift_jis"), None, "byte 0 (0x94) is not UTF-8"),
    "big5 in the middle": (b"a cat " + "貓".encode("big5"), None, "byte 6 (0xbf) is not UTF-8"),
    "utf-16 of half a sign": (b"\xff\xfea\0b", None, "is not UTF-16-LE"),
    "nul": (b"a\0 cat\0", "a cat", "byte 1 is NUL; 2 such characters"),
}


def test_cap_02_other_encodings_are_read_by_their_mark_or_named_with_the_byte(
    tmp_path: Path, figure: Figure
) -> None:
    for name, (data, *_) in ENCODED.items():
        draw(tmp_path / f"{name}.png", name)
        (tmp_path / f"{name}.txt").write_bytes(data)
    dataset = scanned(tmp_path)
    captions = {record.name.removesuffix(".png"): record.caption for record in dataset.records}
    said = {finding.file: finding.what for finding in dataset.findings if finding.code == "CAP-02"}
    assert set(said) == {f"{name}.txt" for name in ENCODED}
    for name, (_, text, what) in ENCODED.items():
        assert what in said[f"{name}.txt"], name
        assert text in (None, captions[name])
        assert captions[name]
    figure("bad_inputs", tried=len(ENCODED), handled=len(ENCODED), crashes=0, hangs=0)


# ---- CAP-03


def test_cap_03_a_megabyte_is_cut_and_the_count_of_what_is_lost_told(tmp_path: Path) -> None:
    """What is too long for a caption altogether is none."""
    for name in "ab":
        draw(tmp_path / f"{name}.png", name)
    (tmp_path / "a.txt").write_text("cat, " * 200_000)
    with (tmp_path / "b.txt").open("wb") as file:
        file.truncate((16 << 20) + 1)
    dataset = scanned(tmp_path)
    assert [len(record.caption) for record in dataset.records] == [9_999, 0]
    assert [row.what for row in dataset.findings if row.code == "CAP-02"] == [
        "has 999,999 characters; the last 989,999 are left out",
        "is 16,777,217 bytes long, too long for a caption",
    ]


# ---- CAP-04

HOSTILE = "<script>alert(1)</script>, {a|b}, %s%n, [red]x[/red], \x1b[31mred\x1b[0m\a, \u202eabc"


def test_cap_04_hostile_texts_are_kept_as_text_and_shown_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = toy(tmp_path).with_base()
    for path in place.dataset.glob("*.txt"):
        path.write_text(HOSTILE, encoding="utf-8")
    draw(place.dataset / "<img src=x onerror=alert(2)>\x1b[31m.png", 9)
    draw(place.dataset / "2_x" / "a.png", 10)
    capsys.readouterr()
    settings = {"logging__trackers": [], "sampling__prompts": [], "data__validation_fraction": 0.0}
    assert place.train(**settings) == 0
    shown = capsys.readouterr()
    for raw in ("\x1b", "\a", "\u202e"):
        assert raw not in shown.out + shown.err
    page = (place.run / "report.html").read_text(encoding="utf-8")
    for raw in ("<script>alert(1)", "<img src=x", "\x1b", "\u202e"):
        assert raw not in page
    assert "&lt;script&gt;alert(1)" in page
    prompts = {image["prompt"] for row in events(place.run, "sample") for image in row["images"]}
    assert HOSTILE in prompts
    with safe_open(place.run / "toy.safetensors", framework="numpy") as file:
        header = file.metadata()
    folders = {"1_toy": {"n_repeats": 1, "img_count": 7}, "2_toy": {"n_repeats": 2, "img_count": 1}}
    assert json.loads(header["ss_dataset_dirs"]) == folders
    tags = json.loads(header["ss_tag_frequency"])
    assert any("<script>alert(1)</script>" in counts for counts in tags.values())


# ---- CAP-05


def test_cap_05_a_run_goes_on_with_its_snapshot_and_the_next_encodes_what_changed(
    tmp_path: Path,
) -> None:
    mine = toy(tmp_path).with_base()
    real, steps = loop.judge_step, 0
    picture = mine.dataset / "p0.png"

    def edit(*args: Any, **options: Any) -> Any:
        nonlocal steps
        steps += 1
        if steps == 3:
            stat, data = picture.stat(), picture.read_bytes()
            swapped = Image.fromarray(np.asarray(Image.open(picture))[::-1])
            swapped.save(picture, compress_level=0)
            assert picture.read_bytes() != data
            os.utime(picture, ns=(stat.st_atime_ns, stat.st_mtime_ns))
            (mine.dataset / "p1.txt").write_text("edited")
            (mine.dataset / "p2.txt").unlink()
        return real(*args, **options)

    line = {**QUIET, "data__validation_fraction": 0.0}
    assert mine.train("--name", "undisturbed", **line) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "judge_step", edit)
        assert mine.train(**line) == 0
    assert trajectory(mine.run) == trajectory(mine.runs / "undisturbed")
    assert mine.train("--name", "next", **line) == 0
    (cached,) = events(mine.runs / "next", "cached")
    assert (cached["latents"], cached["texts"]) == (1, 1), "the empty caption was there"
