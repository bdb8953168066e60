"""The preflight: settings of folders, refusals, identity of samples, regularisation, warm starts.

What each layout of a folder means is in dataset_layouts.toml; odd images are in `reliability/test_img`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.common.memo import HashMemo
from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset.records import Dataset
from lora_trainer.dataset.scan import DatasetMemo, scan

LENIENT = DataSettings(max_bad_fraction=0.9)


def draw(path: Path, colour: Any = "red", size: tuple[int, int] = (40, 30)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)
    return path


def fill(folder: Path, count: int) -> None:
    """Write `count` different images p00.png ... with captions."""
    for index in range(count):
        draw(folder / f"p{index:02}.png", (index, 100, 200))
        (folder / f"p{index:02}.txt").write_text(f"image {index}")


def scanned(folder: Path, settings: DataSettings = LENIENT) -> Dataset:
    return scan(folder, settings=settings)


def of_kind(dataset: Dataset, kind: str) -> list[Any]:
    return [finding for finding in dataset.findings if finding.kind == kind]


def test_neighbours_are_read_at_once_and_stay_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is new often has neighbouring names; 50 images are handed over in parts."""
    fill(tmp_path, 50)
    together, usual = threading.Barrier(2, timeout=20), HashMemo.sha256

    def sha256(self: HashMemo, path: str) -> str:
        if path.endswith(("p00.png", "p01.png")):
            together.wait()
        return usual(self, path)

    monkeypatch.setattr(HashMemo, "sha256", sha256)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    names = [record.name for record in scanned(tmp_path).records]
    assert names == [f"p{index:02}.png" for index in range(50)]


def test_folders_have_repeats_triggers_and_captions_of_their_own(tmp_path: Path) -> None:
    for folder in ("10_zibbo cat", "more", "."):
        draw(tmp_path / folder / "a.png")
        (tmp_path / folder / "a.txt").write_text("first {x|y}\nsecond ||| z")
    folders = {
        "10_zibbo cat": {"repeats": 4, "trigger": "zibbo", "caption_lines": "one"},
        ".": {"repeats": 7, "wildcards": True, "keep_tokens_separator": "|||"},
    }
    settings = DataSettings.model_validate({"repeats": 2, "trigger": "all", "folders": folders})
    dataset = scanned(tmp_path, settings)
    by_folder = {record.folder: record for record in dataset.records}
    repeats = {name: record.repeats for name, record in by_folder.items()}
    assert repeats == {"10_zibbo cat": 4, "more": 2, ".": 7}
    assert {name: record.caption for name, record in by_folder.items()} == {
        "10_zibbo cat": "zibbo, first {x|y}",
        "more": "all, first {x|y} second ||| z",
        ".": "all, first x second, z",
    }
    assert by_folder["10_zibbo cat"].written == ("first {x|y}", "second ||| z")
    notes = [finding.what for finding in of_kind(dataset, "unread-marks")]
    assert len(notes) == 2 and all("(2): 10_zibbo cat/a.png, more/a.png" in note for note in notes)


# --- what is refused


@pytest.mark.parametrize(("suffix", "code"), [(".png", "IMG-09"), (".txt", "CAP-02")])
def test_a_file_that_cannot_be_read_is_named(
    suffix: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, 2)
    usual = HashMemo.sha256

    def refuse(self: HashMemo, path: str) -> str:
        if path.endswith(f"p01{suffix}"):
            raise PermissionError(13, "Permission denied")
        return usual(self, path)

    monkeypatch.setattr(HashMemo, "sha256", refuse)
    (finding,) = (one for one in scanned(tmp_path).findings if one.file == f"p01{suffix}")
    assert finding.code == code
    assert finding.what == "cannot be read (Permission denied)"


def test_more_bad_images_than_allowed_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, 50)
    for index in range(29):  # int(0.58 * 50) is 28
        (tmp_path / f"p{index:02}.png").write_bytes(b"")
    allowed = DataSettings(max_bad_fraction=0.58)
    assert len(scanned(tmp_path, allowed).records) == 21
    (tmp_path / "p29.png").write_bytes(b"")
    monkeypatch.setattr("lora_trainer.dataset.scan.MAX_REASONS", 28)
    with pytest.raises(InputError, match=r"^30 of 50 images in .* allows 29: p00\.png") as caught:
        scanned(tmp_path, allowed)
    assert all(f"p{index:02}.png is empty (0 bytes): replace it" in str(caught.value)
               for index in range(28)), "all at once, each with its fix"  # fmt: skip
    assert "; and 2 more" in str(caught.value) and "p28" not in str(caught.value)
    for path in tmp_path.glob("p[1-4]*.png"):
        path.unlink()
    with pytest.raises(InputError, match="10 of 10 images"):
        scanned(tmp_path, DataSettings(max_bad_fraction=1.0))
    with pytest.raises(InputError, match="is not a folder"):
        scanned(tmp_path / "p00.png")


def test_a_caption_saved_while_it_is_read_is_the_one_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path, 1)
    usual, memo = HashMemo.sha256, DatasetMemo()

    def edited_after(self: HashMemo, path: str) -> str:
        digest = usual(self, path)
        if path.endswith(".txt"):
            Path(path).write_text("new words")
        return digest

    monkeypatch.setattr(HashMemo, "sha256", edited_after)
    for _ in range(2):
        dataset = scan(tmp_path, settings=LENIENT, memo=memo)
        assert dataset.records[0].caption == "new words" and not dataset.findings
    (tmp_path / "p00.txt").write_text("image 0")
    monkeypatch.undo()
    assert scan(tmp_path, settings=LENIENT, memo=memo).records[0].caption == "image 0"


# --- identity


def test_identical_files_are_reported_and_stay_apart(tmp_path: Path) -> None:
    fill(tmp_path, 2)
    for name in ("a.png", "z.png"):
        (tmp_path / name).write_bytes((tmp_path / "p01.png").read_bytes())
        (tmp_path / name).with_suffix(".txt").write_text(name)
    dataset = scanned(tmp_path, DataSettings(repeats=3))
    copies = [(record.name, record.copy_index) for record in dataset.records]
    assert copies == [("a.png", 0), ("p00.png", 0), ("p01.png", 1), ("z.png", 2)]
    assert [(finding.file, finding.what) for finding in of_kind(dataset, "duplicate")] == [
        ("p01.png", "is the same file as a.png"),
        ("z.png", "is the same file as a.png"),
    ]
    ids = [sample for record in dataset.records for sample in record.sample_ids()]
    assert len(ids) == len(set(ids)) == 12
    first = dataset.records[0]
    assert first.sample_ids() == [f"{first.content_hash[:32]}-{repeat}" for repeat in range(3)]
    assert dataset.records[2].sample_ids()[0] == f"{first.content_hash[:32]}-1000"
    most = replace(first, repeats=1000)
    assert not set(most.sample_ids()) & set(replace(most, copy_index=1).sample_ids())


def test_the_fingerprint_is_the_hash_of_rows_of_json(tmp_path: Path) -> None:
    """Runs on disk have it: made row by row it is what it was as one text."""
    fill(tmp_path, 3)
    text = 'a "cat"\\ \u00e9\u2028x, \U0001f408\n{more|less}'
    (tmp_path / "p01.txt").write_text(text, encoding="utf-8")
    Image.new("L", (40, 30), 255).save(tmp_path / "p02-masklabel.png")
    dataset = scanned(tmp_path, DataSettings(masks="files", caption_lines="one", repeats=2))
    rows = sorted(
        (one.content_hash, one.copy_index, one.caption, one.repeats, *one.written,
         *([one.mask.content_hash] if one.mask else ()))
        for one in dataset.records
    )  # fmt: skip
    assert sorted(map(len, rows)) == [5, 6, 7], "plain, with a mask, of three lines"
    text = json.dumps(rows, indent=2, ensure_ascii=False) + "\n"
    assert dataset.fingerprint == hashlib.sha256(text.encode()).hexdigest()


# --- regularisation


def test_images_for_regularisation_are_told_apart(tmp_path: Path) -> None:
    folder, other = tmp_path / "data", tmp_path / "other"
    for where, count in ((folder, 3), (folder / "2_toy", 2), (other, 2)):
        for index in range(count):
            draw(where / f"p{index}.png", (index, len(where.name) * 20, 9))
            (where / f"p{index}.txt").write_text(f"a toy {index}")
    shutil.copy(folder / "p0.png", other / "p0.png")
    shutil.copy(folder / "p0.png", folder / "2_toy" / "p0.png")
    draw(other / "broken.png").write_bytes(b"no image")

    def told_apart(**settings: Any) -> Dataset:
        values = {"trigger": "zwx", "max_bad_fraction": 0.5, **settings}
        return scanned(folder, DataSettings.model_validate(values))

    marked = {"folders": {"2_toy": {"regularisation": True}}}
    elsewhere = {"regularisation_dir": str(other)}
    dataset = told_apart(**marked, **elsewhere)
    assert all(record.caption.startswith("zwx, a toy") for record in dataset.records)
    assert sorted((one.name, one.caption, one.repeats) for one in dataset.regularisation) == [
        ("2_toy/p0.png", "a toy 0", 2),
        ("2_toy/p1.png", "a toy 1", 2),
        ("regularisation:p0.png", "a toy 0", 1),
        ("regularisation:p1.png", "a toy 1", 1),
    ]
    records = (*dataset.records, *dataset.regularisation)
    ids = [sample for record in records for sample in record.sample_ids()]
    assert len(ids) == len(set(ids)) == 3 + 4 + 2
    twice = {finding.file for finding in of_kind(dataset, "regularisation")}
    assert twice == {"2_toy/p0.png", "regularisation:p0.png"}
    assert [one.file for one in of_kind(dataset, "unusable")] == ["regularisation:broken.png"]
    unmarked = {sample for one in told_apart().records for sample in one.sample_ids()}
    assert {ids[0], ids[1], ids[2]} <= unmarked, "samples keep their ids when a folder is marked"
    prints = {told_apart(**one).fingerprint for one in ({}, marked, elsewhere)}
    (other / "p1.txt").write_text("another toy")
    assert len(prints | {told_apart(**elsewhere).fingerprint}) == 4
    with pytest.raises(
        RequestError, match=r"is inside the dataset folder.*--set data.folders.2_toy"
    ):
        told_apart(regularisation_dir=str(folder / "2_toy"))


# --- warm starts


@contextmanager
def opened_in(folder: Path) -> Iterator[set[str]]:
    """Collect the names of the files that are opened in a folder, by other threads than this one."""
    names: set[str] = set()
    active = True

    def hear(event: str, arguments: tuple[Any, ...]) -> None:
        if active and event == "open" and str(arguments[0]).startswith(f"{folder}/"):
            names.add(os.path.basename(arguments[0]))  # noqa: PTH119 - a Path would open nothing either
            assert threading.current_thread() is not threading.main_thread(), "one at a time"

    sys.addaudithook(hear)
    try:
        yield names
    finally:
        active = False


def test_a_warm_scan_says_the_same_and_opens_only_what_changed(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    fill(folder, 6)
    fill(folder / "5_sub", 3)
    Image.new("RGBA", (20, 20)).save(folder / "alpha.png")
    (folder / "bad.png").write_bytes(b"")
    Image.new("L", (40, 30), 255).save(folder / "p01-masklabel.png")
    for path in folder.rglob("*"):  # younger files may still change unseen
        os.utime(path, (1_000_000_000, 1_000_000_000))
    update = {"masks": "files", "caption_fallback": "metadata", "max_bad_fraction": 0.95}
    settings = LENIENT.model_copy(update=update)

    def with_memo(settings: DataSettings = settings, folder: Path = folder) -> Dataset:
        memo = DatasetMemo(tmp_path / "cache")
        dataset = scan(folder, settings=settings, memo=memo)
        memo.save()
        return dataset

    cold = with_memo()
    assert cold == scanned(folder, settings) and len(cold.findings) > 3
    with opened_in(folder) as opened:
        assert with_memo() == cold
    assert opened == {"bad.png"}, "a bad one is looked at again"
    for change in ({"alpha_background": "black"}, {"max_megapixels": 0.0005}):
        other = settings.model_copy(update=change)
        with opened_in(folder) as opened:
            warm = with_memo(other)
        assert warm == scanned(folder, other) != cold
        if "alpha_background" in change:
            assert opened == {"bad.png", "alpha.png"}, "opaque ones stay as they are"
    old = (folder / "p03.png").stat()
    draw(folder / "p03.png", (99, 100, 200))
    os.utime(folder / "p03.png", ns=(old.st_atime_ns, old.st_mtime_ns))
    assert (folder / "p03.png").stat().st_size == old.st_size, "seen by another time alone"
    (folder / "p04.txt").write_text("edited")
    with opened_in(folder) as opened:
        warm = with_memo()
    assert opened - {"bad.png"} == {"p03.png", "p04.txt"}
    assert warm == scanned(folder, settings)
