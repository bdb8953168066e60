"""The preflight: layouts, captions, odd files, duplicates, refusals, warm starts."""

from __future__ import annotations

import json
import os
import signal
import socket
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
from lora_trainer.dataset.decode_memo import DatasetMemo
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


def test_the_order_of_extensions_decides(tmp_path: Path) -> None:
    draw(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "a.caption").write_text("caption")
    assert captions(scanned(tmp_path)) == {"a.png": "text"}
    settings = DataSettings(caption_extensions=("caption", "txt"))
    dataset = scanned(tmp_path, settings)
    assert captions(dataset) == {"a.png": "caption"}
    (finding,) = dataset.findings
    assert (finding.kind, "a.png (a.caption, not a.txt)" in finding.what) == ("two-captions", True)


def test_repeats_folders_and_plain_subfolders(tmp_path: Path) -> None:
    draw(tmp_path / "10_zibbo cat" / "a.png", "red")
    draw(tmp_path / "10_zibbo cat" / "b.png", "blue")
    (tmp_path / "10_zibbo cat" / "b.txt").write_text("own caption")
    draw(tmp_path / "more" / "c.png", "green")
    (tmp_path / "more" / "c.txt").write_text("green")
    dataset = scanned(tmp_path, DataSettings(repeats=2))
    assert captions(dataset) == {
        "10_zibbo cat/a.png": "zibbo cat",
        "10_zibbo cat/b.png": "own caption",
        "more/c.png": "green",
    }
    assert [record.repeats for record in dataset.records] == [10, 10, 2]
    assert dataset.records[0].caption_source == "folder name"
    assert {finding.file for finding in found(dataset, "subfolder")} == {"10_zibbo cat/", "more/"}
    (named,) = found(dataset, "no-caption")
    assert (named.severity, named.code) == ("note", "CAP-01")
    assert "1 of 3 images have no caption but their folder's name" in named.what


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


def test_settings_for_a_folder_that_is_none_are_refused(tmp_path: Path) -> None:
    draw(tmp_path / "more" / "a.png")
    settings = DataSettings.model_validate({"folders": {"moer": {"repeats": 2}}})
    with pytest.raises(RequestError, match="'moer', which is no subfolder. Did you mean 'more'?"):
        scanned(tmp_path, settings)


@pytest.mark.parametrize("name", ["0_cat", "1001_cat", "2023_holiday"])
def test_repeats_out_of_range_are_refused(tmp_path: Path, name: str) -> None:
    draw(tmp_path / name / "a.png")
    with pytest.raises(InputError, match=rf"folder {name} means .* allowed: 1 to 1000"):
        scanned(tmp_path)


@pytest.mark.parametrize("name", ["_excluded", "_Excluded"])
def test_what_was_taken_out_is_not_read(tmp_path: Path, name: str) -> None:
    fill(tmp_path, 2)
    fill(tmp_path / name, 3)
    fill(tmp_path / name / "3_cat", 2)
    dataset = scanned(tmp_path)
    assert [record.name for record in dataset.records] == ["p00.png", "p01.png"]
    (finding,) = dataset.findings
    assert (finding.kind, finding.severity, finding.file) == ("excluded", "note", f"{name}/")


def test_a_metadata_line_without_a_picture_is_named_unless_that_was_taken_out(
    tmp_path: Path,
) -> None:
    fill(tmp_path, 1)
    lines = [json.dumps({"file_name": f"{name}.png", "text": "x"}) for name in ("gone", "out")]
    (tmp_path / "metadata.jsonl").write_text("\n".join(lines))
    draw(tmp_path / "_excluded" / "out.png")
    (finding,) = found(scanned(tmp_path), "unused-caption")
    assert finding.what == "captions without an image (1): gone.png"


def test_two_levels_of_folders_are_read(tmp_path: Path) -> None:
    for index, name in enumerate(("a.png", "10_x/b.png", "10_x/deep/c.png", "10_x/deep/er/d.png")):
        draw(tmp_path / name, (index, 0, 0))
    dataset = scanned(tmp_path)
    read = {record.name: record.repeats for record in dataset.records}
    assert read == {"a.png": 1, "10_x/b.png": 10, "10_x/deep/c.png": 10}
    (finding,) = found(dataset, "deep-folder")
    assert (finding.severity, finding.file) == ("warning", "10_x/deep/er")


def test_metadata_lines_give_captions(tmp_path: Path) -> None:
    for name in ("a.png", "b.png", "train/c.png", "train/d.png"):
        draw(tmp_path / name, (len(name), ord(name[-5]), 0))
    rows = [
        {"file_name": "a.png", "text": "from text"},
        {"file_name": "b.png", "caption": "from caption"},
        {"file_name": "train/c.png", "prompt": "from the root"},
        {"file_name": "gone.png", "text": "nobody"},
        {"file_name": "../../etc/passwd", "text": "nobody"},
    ]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "train" / "metadata.jsonl").write_text('{"file_name": "d.png", "text": "inside"}')
    dataset = scanned(tmp_path)
    assert captions(dataset) == {
        "a.png": "from text",
        "b.png": "from caption",
        "train/c.png": "from the root",
        "train/d.png": "inside",
    }
    assert dataset.records[0].caption_source == "metadata.jsonl"
    assert dataset.records[3].caption_source == "train/metadata.jsonl"
    (finding,) = found(dataset, "unused-caption")
    assert finding.what == "captions without an image (2): ../../etc/passwd, gone.png"


def test_metadata_names_differing_in_case_or_composition_are_found(tmp_path: Path) -> None:
    for name, colour in (("A.PNG", "red"), ("cafe\u0301.png", "blue"), ("b.png", "green")):
        draw(tmp_path / name, colour)
    rows = [{"file_name": name, "text": name} for name in ("a.png", "caf\u00e9.png", "b.png")]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    dataset = scanned(tmp_path)
    assert captions(dataset) == {
        "A.PNG": "a.png",
        "b.png": "b.png",
        "cafe\u0301.png": "caf\u00e9.png",
    }
    assert dataset.findings == ()
    draw(tmp_path / "a.png", "white")
    (finding,) = scanned(tmp_path).findings
    assert (finding.kind, finding.file) == ("ambiguous-caption", "a.png")
    rows.append({"file_name": "A.PNG", "text": "its own"})
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    dataset = scanned(tmp_path)
    assert captions(dataset)["A.PNG"] == "its own"
    assert captions(dataset)["a.png"] == "a.png"
    assert dataset.findings == ()


def test_a_caption_file_wins_over_metadata_and_a_conflict_is_named(tmp_path: Path) -> None:
    for name in ("a", "b"):
        draw(tmp_path / f"{name}.png", (ord(name), 0, 0))
        (tmp_path / f"{name}.txt").write_text("a cat")
    rows = ['{"file_name": "a.png", "text": "a dog"}', '{"file_name": "b.png", "text": "a cat"}']
    (tmp_path / "metadata.jsonl").write_text("\n".join(rows))
    dataset = scanned(tmp_path)
    assert captions(dataset) == {"a.png": "a cat", "b.png": "a cat"}
    (finding,) = found(dataset, "two-captions")
    assert finding.file == "a.png"
    assert finding.what == "has two captions; a.txt is used, metadata.jsonl is not"


def test_bad_metadata_lines_are_named(tmp_path: Path) -> None:
    draw(tmp_path / "a.png")
    (tmp_path / "metadata.jsonl").write_bytes(b'{"file_name": "a.png", "text": "x"}\n{oops\n')
    dataset = scanned(tmp_path)
    assert captions(dataset) == {"a.png": "x"}
    (finding,) = found(dataset, "metadata")
    assert (finding.severity, finding.file) == ("warning", "metadata.jsonl")
    assert finding.what.startswith("line 2: not JSON")


def test_documents_and_hidden_files_are_passed_over(tmp_path: Path) -> None:
    draw(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("x")
    for name in (".hidden.png", "._a.png", "README.md", "readme.txt", "LICENSE", "Thumbs.db"):
        (tmp_path / name).write_bytes(b"not a picture")
    (tmp_path / "__MACOSX").mkdir()
    (tmp_path / "__MACOSX" / "x.png").write_bytes(b"no")
    dataset = scanned(tmp_path)
    assert [record.name for record in dataset.records] == ["a.png"]
    assert dataset.findings == ()


def test_unknown_files_are_counted_once(tmp_path: Path) -> None:
    draw(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("x")
    for name in ("a.npz", "b.npz", "c.ZIP", "sub/d.npz", "noext"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    (finding,) = scanned(tmp_path).findings
    assert finding.severity == "note"
    assert finding.what.endswith("are ignored: 3 .npz, 1 .zip, 1 without extension")


# --- captions


def test_missing_and_empty_captions_are_counted(tmp_path: Path) -> None:
    fill(tmp_path, 4)
    (tmp_path / "p00.txt").unlink()
    (tmp_path / "p01.txt").write_bytes(b"\xef\xbb\xbf \r\n")
    dataset = scanned(tmp_path)
    assert captions(dataset)["p00.png"] == captions(dataset)["p01.png"] == ""
    assert dataset.records[0].caption_source is None
    (finding,) = dataset.findings
    assert (finding.kind, finding.severity, finding.code) == ("no-caption", "warning", "CAP-01")
    assert finding.what.startswith("2 of 4 images have no caption")
    assert finding.what.endswith(": p00.png, p01.png")
    assert captions(scanned(tmp_path, DataSettings(trigger="zibbo")))["p01.png"] == "zibbo"


def test_an_empty_caption_in_a_repeats_folder_takes_the_folders_name(tmp_path: Path) -> None:
    draw(tmp_path / "3_cat" / "a.png")
    (tmp_path / "3_cat" / "a.txt").write_text(" ")
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "3_cat/a.png", "text": ""}')
    dataset = scanned(tmp_path)
    assert captions(dataset) == {"3_cat/a.png": "cat"}
    assert {finding.kind for finding in dataset.findings} == {"subfolder", "no-caption"}


def test_odd_bytes_in_a_caption_are_named_with_their_place(tmp_path: Path) -> None:
    draw(tmp_path / "a.png")
    (tmp_path / "a.txt").write_bytes(b"it\x92s a cat")
    dataset = scanned(tmp_path)
    assert captions(dataset) == {"a.png": "it\u2019s a cat"}
    (finding,) = dataset.findings
    assert (finding.file, finding.code, finding.severity) == ("a.txt", "CAP-02", "warning")
    assert finding.what == "byte 2 (0x92) is not UTF-8; read as Windows-1252"


def test_a_caption_shared_by_two_pictures_is_reported(tmp_path: Path) -> None:
    draw(tmp_path / "a.png", "red")
    draw(tmp_path / "a.jpg", "blue")
    draw(tmp_path / "A.PNG", "green")
    (tmp_path / "a.txt").write_text("which?")
    dataset = scanned(tmp_path)
    assert set(captions(dataset).values()) == {"which?"}
    (finding,) = dataset.findings
    assert (finding.kind, finding.file, finding.code) == ("ambiguous-caption", "a.txt", "IMG-08")
    assert finding.what == "is the caption of 3 images: A.PNG, a.jpg, a.png"
    assert len({record.content_hash for record in dataset.records}) == 3


def test_names_composed_differently_find_their_own_captions(tmp_path: Path) -> None:
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    for name, colour in ((composed, "red"), (decomposed, "blue")):
        draw(tmp_path / f"{name}.png", colour)
        (tmp_path / f"{name}.txt").write_text(colour)
    dataset = scanned(tmp_path)
    assert captions(dataset) == {f"{composed}.png": "red", f"{decomposed}.png": "blue"}
    assert dataset.findings == ()
    (tmp_path / f"{decomposed}.txt").unlink()
    dataset = scanned(tmp_path)
    assert captions(dataset)[f"{decomposed}.png"] == "red"
    assert [finding.kind for finding in dataset.findings] == ["ambiguous-caption"]


def test_captions_without_a_picture_are_named(tmp_path: Path) -> None:
    draw(tmp_path / "a.png")
    for name in ("a.txt", "a.caption", "b.txt", "c.caption"):
        (tmp_path / name).write_text("x")
    (finding,) = scanned(tmp_path).findings
    assert (finding.kind, finding.severity) == ("unused-caption", "warning")
    assert finding.what == "captions without an image (2): b.txt, c.caption"


def test_a_placeholder_without_a_trigger_is_named(tmp_path: Path) -> None:
    draw(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("[trigger] in a tree")
    (finding,) = scanned(tmp_path).findings
    assert (finding.kind, finding.file) == ("no-trigger", "a.png")
    dataset = scanned(tmp_path, DataSettings(trigger="zibbo"))
    assert captions(dataset) == {"a.png": "zibbo in a tree"}
    assert dataset.findings == ()


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


def test_a_few_bad_pictures_are_left_out_and_named(tmp_path: Path) -> None:
    fill(tmp_path, 10)
    (tmp_path / "p03.png").write_bytes(b"<html>")
    dataset = scanned(tmp_path, DataSettings())
    assert len(dataset.records) == 9
    (finding,) = dataset.findings
    assert (finding.severity, finding.file, finding.code) == ("error", "p03.png", "IMG-02")
    assert finding.what == "is not an image (looks like HTML)"
    assert finding.advice == "download it again"


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


def test_every_irregular_file_is_named_and_none_opened(tmp_path: Path) -> None:
    folder, outside = tmp_path / "data", tmp_path / "outside"
    fill(folder, 3)
    draw(outside / "real.png", "white")
    (folder / "dangling.png").symlink_to(tmp_path / "nowhere.png")
    (folder / "loop.png").symlink_to(folder / "loop.png")
    (folder / "outside.png").symlink_to(outside / "real.png")
    (folder / "outside.txt").write_text("from elsewhere")
    (folder / "inside.png").symlink_to(folder / "p00.png")
    (folder / "inside.txt").write_text("a second look")
    (folder / "folder.png").mkdir()
    os.mkfifo(folder / "pipe.png")
    os.mkfifo(folder / "p00.caption")
    with socket.socket(socket.AF_UNIX) as listener:
        here = Path.cwd()
        os.chdir(folder)  # socket paths are short
        listener.bind("socket.png")
        os.chdir(here)
        dataset = scanned(folder)
    errors = {finding.file: finding for finding in dataset.findings if finding.severity == "error"}
    assert {file: finding.what for file, finding in errors.items()} == {
        "dangling.png": "is a link to no file, not a regular file",
        "loop.png": "is a link to no file, not a regular file",
        "folder.png": "is a folder, not a regular file",
        "pipe.png": "is a pipe, socket or device, not a regular file",
        "socket.png": "is a pipe, socket or device, not a regular file",
    }
    assert {finding.code for finding in errors.values()} == {"IMG-09"}
    (pipe,) = found(dataset, "not-a-file")
    assert (pipe.file, pipe.severity) == ("p00.caption", "warning")
    (link,) = found(dataset, "outside-link")
    assert (link.file, link.severity) == ("outside.png", "note")
    names = [record.name for record in dataset.records]
    assert names == ["inside.png", "outside.png", "p00.png", "p01.png", "p02.png"]


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


def test_a_folder_without_pictures_says_what_is_in_it(tmp_path: Path) -> None:
    (tmp_path / "pictures.zip").write_bytes(b"")
    (tmp_path / "sub" / "x" / "deep").mkdir(parents=True)
    with pytest.raises(InputError, match=r"sub/x/deep is not read.*1 \.zip.*\.jpg"):
        scanned(tmp_path)


def test_a_colour_that_is_none_is_refused_before_the_folder_is_read(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="alpha_background"):
        scanned(tmp_path / "none", DataSettings(alpha_background="whit"))


def test_what_decoding_had_to_do_is_reported(tmp_path: Path) -> None:
    Image.new("RGBA", (20, 20), (1, 2, 3, 100)).save(tmp_path / "alpha.png")
    Image.new("CMYK", (20, 20)).save(tmp_path / "cmyk.tif")
    Image.new("I;16", (20, 20)).save(tmp_path / "deep.png")
    frames = [Image.new("RGB", (20, 20), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "frames.gif", save_all=True, append_images=frames[1:])
    exif = Image.Exif()
    exif[274] = 99
    Image.new("RGB", (20, 20)).save(tmp_path / "turned.png", exif=exif)
    dataset = scanned(tmp_path)
    rows = {
        (finding.file, finding.kind, finding.severity, finding.code)
        for finding in dataset.findings
        if finding.file
    }
    assert rows == {
        ("alpha.png", "alpha", "note", "IMG-04"),
        ("cmyk.tif", "cmyk-profile", "warning", "IMG-05"),
        ("deep.png", "depth", "note", "IMG-05"),
        ("frames.gif", "animated", "warning", "IMG-06"),
        ("turned.png", "exif", "note", "IMG-03"),
    }
    assert [record.name for record in dataset.records if record.transparent] == ["alpha.png"]
    severities = [finding.severity for finding in dataset.findings]
    assert severities == sorted(severities, key=["error", "warning", "note"].index)


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
