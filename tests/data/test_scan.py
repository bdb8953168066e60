"""The preflight: layouts, captions, odd files, duplicates, refusals, warm starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.common.events import Finding
from lora_trainer.common.files import json_bytes, sha256_bytes
from lora_trainer.common.memo import HashMemo
from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset import inspect_image as examine_module
from lora_trainer.dataset.inspect_image import DatasetMemo
from lora_trainer.dataset.records import Dataset
from lora_trainer.dataset.scan import scan

EXAMPLE = Path(__file__).resolve().parents[2] / "datasets" / "example"
LENIENT = DataSettings(max_bad_fraction=0.9)


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    """A pipe that is opened would block for ever."""
    signal.alarm(20)
    yield
    signal.alarm(0)


def draw(path: Path, colour: Any = "red", size: tuple[int, int] = (40, 30)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)
    return path


def fill(folder: Path, count: int, *, captions: bool = True) -> None:
    """Write `count` different images p00.png ... with captions."""
    for index in range(count):
        draw(folder / f"p{index:02}.png", (index, 100, 200))
        if captions:
            (folder / f"p{index:02}.txt").write_text(f"image {index}")


def scanned(folder: Path, settings: DataSettings = LENIENT) -> Dataset:
    return scan(folder, settings=settings)


def captions(dataset: Dataset) -> dict[str, str]:
    return {record.name: record.caption for record in dataset.records}


def found(dataset: Dataset, kind: str) -> list[Finding]:
    return [finding for finding in dataset.findings if finding.kind == kind]


def contents(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in folder.rglob("*")
        if path.is_file()
    }


# --- layouts


def test_the_example_dataset_needs_no_word(tmp_path: Path) -> None:
    before = contents(EXAMPLE)
    dataset = scanned(EXAMPLE, DataSettings(trigger="zibbo"))
    assert len(dataset.records) == 16
    assert dataset.findings == ()
    assert all(record.caption.startswith("zibbo, ") for record in dataset.records)
    assert {record.caption_source for record in dataset.records} == {
        f"zibbo_{number:02}.txt" for number in range(1, 17)
    }
    assert contents(EXAMPLE) == before


def test_a_flat_folder(tmp_path: Path) -> None:
    draw(tmp_path / "b.JPG", "blue", (50, 60))
    draw(tmp_path / "a.png", "red", (40, 30))
    (tmp_path / "a.txt").write_text("a red\nimage\n")
    (tmp_path / "b.caption").write_text("a blue image")
    dataset = scanned(tmp_path, DataSettings(repeats=3, trigger="zibbo"))
    first, second = dataset.records
    assert (first.name, first.path) == ("a.png", tmp_path / "a.png")
    assert (first.width_px, first.height_px) == (40, 30)
    assert first.caption == "zibbo, a red image"
    assert first.caption_source == "a.txt"
    assert (first.repeats, first.copy_index, first.transparent) == (3, 0, False)
    assert first.measures is not None
    assert second.caption == "zibbo, a blue image"
    assert second.caption_source == "b.caption"
    assert dataset.findings == ()


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
    assert {name: record.repeats for name, record in by_folder.items()} == {
        "10_zibbo cat": 4, "more": 2, ".": 7,
    }  # fmt: skip
    assert {name: record.caption for name, record in by_folder.items()} == {
        "10_zibbo cat": "zibbo, first {x|y}",
        "more": "all, first {x|y} second ||| z",
        ".": "all, first x second, z",
    }
    assert by_folder["10_zibbo cat"].written == ("first {x|y}", "second ||| z")
    assert by_folder["more"].written == ("first {x|y} second ||| z",)
    notes = [finding.what for finding in found(dataset, "unread-marks")]
    assert len(notes) == 2 and all("(2): 10_zibbo cat/a.png, more/a.png" in note for note in notes)
    assert scanned(tmp_path).fingerprint != dataset.fingerprint


def test_the_fingerprint_counts_what_only_some_variants_show(tmp_path: Path) -> None:
    draw(tmp_path / "a.png")
    settings = DataSettings(wildcards=True)
    prints = set()
    for text in ("a {x|y}", "a {x|z}", "a x"):
        (tmp_path / "a.txt").write_text(text)
        prints.add(scanned(tmp_path, settings).fingerprint)
    assert len(prints) == 3


# --- captions


def test_a_caption_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("x")
    usual = HashMemo.sha256

    def refuse(self: HashMemo, path: Path) -> str:
        if path.suffix == ".txt":
            raise PermissionError(13, "Permission denied")
        return usual(self, path)

    monkeypatch.setattr(HashMemo, "sha256", refuse)
    dataset = scanned(tmp_path)
    assert captions(dataset) == {"a.png": ""}
    (finding,) = found(dataset, "caption-text")
    assert (finding.file, finding.what) == ("a.txt", "cannot be read (Permission denied)")


# --- images that cannot be used


def test_more_bad_pictures_than_allowed_are_refused(tmp_path: Path) -> None:
    fill(tmp_path, 20)
    for index in range(7):
        (tmp_path / f"p{index:02}.png").write_bytes(b"")
    with pytest.raises(InputError) as caught:
        scanned(tmp_path, DataSettings(max_bad_fraction=0.3))
    message = str(caught.value)
    assert message.startswith("7 of 20 images in ")
    assert "data.max_bad_fraction=0.3 allows 6" in message
    named = [f"p{index:02}.png is empty (0 bytes): replace it with" for index in range(7)]
    assert all(part in message for part in named), "all at once, each with its fix"
    (tmp_path / "p00.png").unlink()
    draw(tmp_path / "p00.png", "white")
    assert len(scanned(tmp_path, DataSettings(max_bad_fraction=0.3)).records) == 14


def test_of_very_many_bad_pictures_a_hundred_are_named(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    for index in range(103):
        (tmp_path / f"bad{index:03}.png").write_bytes(b"")
    with pytest.raises(InputError, match=r"bad099\.png is empty.*; and 3 more") as caught:
        scanned(tmp_path, DataSettings())
    assert "bad100" not in str(caught.value)


def test_the_share_allowed_is_not_rounded_away(tmp_path: Path) -> None:
    assert int(0.58 * 50) == 28  # as floats go
    fill(tmp_path, 50)
    for index in range(29):
        (tmp_path / f"p{index:02}.png").write_bytes(b"")
    assert len(scanned(tmp_path, DataSettings(max_bad_fraction=0.58)).records) == 21


def test_nothing_usable_is_refused_whatever_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"")
    with pytest.raises(InputError, match=r"1 of 1 images .* a\.png is empty"):
        scanned(tmp_path, DataSettings(max_bad_fraction=1.0))


def test_a_link_to_the_dataset_itself_is_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    fill(folder, 2)
    (folder / "again").symlink_to(folder)
    (folder / "above").symlink_to(tmp_path)
    other = tmp_path / "other"
    draw(other / "x.png", "white")
    (folder / "linked").symlink_to(other)
    dataset = scanned(folder)
    assert [record.name for record in dataset.records] == ["linked/x.png", "p00.png", "p01.png"]
    assert {finding.file for finding in found(dataset, "not-a-file")} == {"above/", "again/"}
    assert {finding.file for finding in found(dataset, "outside-link")} == {"above", "linked"}


def test_an_unreadable_picture_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, 3)
    usual = HashMemo.sha256

    def refuse(self: HashMemo, path: Path) -> str:
        if path.name == "p01.png":
            raise PermissionError(13, "Permission denied")
        return usual(self, path)

    monkeypatch.setattr(HashMemo, "sha256", refuse)
    (finding,) = scanned(tmp_path).findings
    assert (finding.file, finding.code) == ("p01.png", "IMG-09")
    assert finding.what == "cannot be read (Permission denied)"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.write_text("x"), "is not a folder"),
        (lambda path: path.mkdir(), "no images in"),
    ],
)
def test_no_dataset(tmp_path: Path, make: Any, message: str) -> None:
    make(tmp_path / "data")
    with pytest.raises(InputError, match=message):
        scanned(tmp_path / "data")


def test_a_colour_that_is_none_is_refused_before_the_folder_is_read(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="alpha_background"):
        scanned(tmp_path / "none", DataSettings(alpha_background="whit"))


def test_odd_names(tmp_path: Path) -> None:
    names = ["sp ace.png", "\u732b.png", "a'b\"c.png", "x" * 240 + ".png", "%s {a|b}.png", "_.png"]
    for index, name in enumerate(names):
        draw(tmp_path / name, (index, 0, 0))
        (tmp_path / name).with_suffix(".txt").write_text("x")
    undecodable = os.fsdecode(b"caf\xe9.png")
    draw(tmp_path / undecodable, "white")
    dataset = scanned(tmp_path)
    assert {record.name for record in dataset.records} == {*names, "caf\\xe9.png"}
    assert json.dumps([record.name for record in dataset.records], ensure_ascii=False).encode()
    assert [finding.kind for finding in dataset.findings] == ["no-caption"]


# --- identity


def test_identical_files_are_reported_and_stay_apart(tmp_path: Path) -> None:
    fill(tmp_path, 2)
    for name in ("a.png", "z.png"):
        (tmp_path / name).write_bytes((tmp_path / "p01.png").read_bytes())
        (tmp_path / name).with_suffix(".txt").write_text(name)
    dataset = scanned(tmp_path, DataSettings(repeats=3))
    copies = [(record.name, record.copy_index) for record in dataset.records]
    assert copies == [("a.png", 0), ("p00.png", 0), ("p01.png", 1), ("z.png", 2)]
    assert [(finding.file, finding.what) for finding in found(dataset, "duplicate")] == [
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


def test_sample_ids_do_not_depend_on_names_or_order(tmp_path: Path) -> None:
    fill(tmp_path / "one", 4)
    before = {record.caption: record.sample_ids() for record in scanned(tmp_path / "one").records}
    for index, target in enumerate("dbca"):
        for suffix in (".png", ".txt"):
            source = tmp_path / "one" / f"p{index:02}{suffix}"
            (tmp_path / "two").mkdir(exist_ok=True)
            (tmp_path / "two" / f"{target}{suffix}").write_bytes(source.read_bytes())
    other = scanned(tmp_path / "two")
    assert {record.caption: record.sample_ids() for record in other.records} == before
    assert other.fingerprint == scanned(tmp_path / "one").fingerprint


def test_the_fingerprint_is_the_hash_of_rows_of_json(tmp_path: Path) -> None:
    """Runs on disk have it: made row by row it is what it was as one text."""
    fill(tmp_path, 3)
    (tmp_path / "p01.txt").write_text('a "cat"\\ \u00e9\u2028x, \U0001f408', encoding="utf-8")
    dataset = scanned(tmp_path)
    rows = sorted(
        (one.content_hash, one.copy_index, one.caption, one.repeats, *one.written)
        for one in dataset.records
    )
    assert dataset.fingerprint == sha256_bytes(json_bytes(rows))


def test_the_fingerprint_is_of_what_is_trained(tmp_path: Path) -> None:
    fill(tmp_path, 3)
    before = scanned(tmp_path).fingerprint
    assert len(before) == 64
    assert scanned(tmp_path).fingerprint == before
    assert scanned(tmp_path, DataSettings(repeats=2)).fingerprint != before
    assert scanned(tmp_path, DataSettings(trigger="zibbo")).fingerprint != before
    (tmp_path / "notes.md").write_text("x")
    assert scanned(tmp_path).fingerprint == before
    (tmp_path / "p00.txt").write_text("edited")
    edited = scanned(tmp_path).fingerprint
    draw(tmp_path / "p01.png", "white")
    assert len({before, edited, scanned(tmp_path).fingerprint}) == 3


# --- warm starts and side effects


class Watch:
    """Counts the stats of, and opens in, a folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = str(folder)
        self.opened: Counter[str] = Counter()
        self.stats: Counter[str] = Counter()
        self.active = False
        sys.addaudithook(self._hear)
        usual = os.stat

        def counted(path: Any, *args: Any, **options: Any) -> os.stat_result:
            if self.active and str(path).startswith(self.folder):
                self.stats[os.path.basename(path)] += 1  # noqa: PTH119 - a Path would count itself
            return usual(path, *args, **options)

        monkeypatch.setattr(os, "stat", counted)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.active and event == "open" and str(arguments[0]).startswith(self.folder):
            self.opened[os.path.basename(arguments[0])] += 1  # noqa: PTH119 - a Path would count itself

    def __enter__(self) -> Watch:
        self.opened.clear()
        self.stats.clear()
        self.active = True
        return self

    def __exit__(self, *error: object) -> None:
        self.active = False


def age(folder: Path) -> None:
    """Make files old enough to be remembered (younger ones may still change unseen)."""
    for path in folder.rglob("*"):
        os.utime(path, (1_000_000_000, 1_000_000_000))


def test_a_warm_scan_asks_the_memo_once_for_each_file_and_opens_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One look at a file's stat is the memo's; the scan itself adds none."""
    folder = tmp_path / "data"
    fill(folder, 6)
    fill(folder / "5_sub", 3)
    Image.new("RGBA", (20, 20)).save(folder / "alpha.png")
    age(folder)
    memo = DatasetMemo(tmp_path / "cache")
    watch = Watch(folder, monkeypatch)
    with watch:
        cold = scan(folder, settings=LENIENT, memo=memo)
    assert watch.opened["p05.png"] >= 1
    memo.save()
    reloaded = DatasetMemo(tmp_path / "cache")
    with watch:
        warm = scan(folder, settings=LENIENT, memo=reloaded)
    assert warm == cold
    assert len(cold.findings) > 2
    scanned_stats = Counter(watch.stats)
    assert not watch.opened
    files = [path for path in folder.rglob("*") if path.is_file()]
    with watch:
        for path in files:
            reloaded.hashes.sha256(path)
    del scanned_stats[folder.name]
    assert scanned_stats == watch.stats
    assert len(scanned_stats) == len({path.name for path in files})


def test_only_what_changed_is_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "data"
    fill(folder, 5)
    age(folder)
    memo = DatasetMemo()
    scan(folder, settings=LENIENT, memo=memo)
    old = (folder / "p03.png").stat()
    draw(folder / "p03.png", "white")
    os.utime(folder / "p03.png", ns=(old.st_atime_ns, old.st_mtime_ns))
    (folder / "p04.txt").write_text("edited")
    watch = Watch(folder, monkeypatch)
    with watch:
        warm = scan(folder, settings=LENIENT, memo=memo)
    assert set(watch.opened) == {"p03.png", "p04.txt"}
    assert captions(warm)["p04.png"] == "edited"
    assert warm == scanned(folder)


def test_renamed_pictures_are_not_decoded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(tmp_path / "data", 3)
    memo = DatasetMemo()
    scan(tmp_path / "data", settings=LENIENT, memo=memo)
    (tmp_path / "data").rename(tmp_path / "moved")

    def refuse(*args: object, **options: object) -> None:
        raise AssertionError("decoded again")

    monkeypatch.setattr(examine_module, "verify", refuse)
    dataset = scan(tmp_path / "moved", settings=LENIENT, memo=memo)
    assert len(dataset.records) == 3


def test_the_dataset_folder_is_never_written_to(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    fill(folder, 4)
    (folder / "p03.png").write_bytes(b"")
    before = contents(folder)
    folders = {path: path.stat().st_mtime_ns for path in (tmp_path, folder)}
    memo = DatasetMemo()
    scan(folder, settings=LENIENT, memo=memo)
    assert contents(folder) == before
    assert {path: path.stat().st_mtime_ns for path in folders} == folders


def test_the_data_layer_needs_no_torch() -> None:
    modules = (
        "dataset.scan",
        "dataset.captions",
        "dataset.buckets",
        "dataset.quality",
        "cache.store",
    )
    imports = "; ".join(f"import lora_trainer.{module}" for module in modules)
    code = f"{imports}; import sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=EXAMPLE.parents[1])
