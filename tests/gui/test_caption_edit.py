"""Captions are read as the trainer reads them and written to where they were read from, byte by byte."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lora_trainer.gui.caption_edit import Caption, Edit, caption_changes, caption_of
from lora_trainer.gui.changes import FileChange, LinesChange
from PIL import Image

from lora_trainer.common.errors import InputError
from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset.captions import read_caption_file
from lora_trainer.dataset.listing import ImageFile, list_dataset
from lora_trainer.dataset.scan import scan

EXTENSIONS = (".txt", ".caption")


def draw(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (16, 16), (len(path.name) * 20 % 255, 10, 10)).save(path)
    return path


def pictures(root: Path) -> dict[str, ImageFile]:
    listing = list_dataset(root, settings=DataSettings())
    return {picture.name: picture for picture in listing.pictures}


def caption(root: Path, name: str) -> Caption:
    return caption_of(pictures(root)[name], root=root, extensions=EXTENSIONS)


def write(root: Path, **texts: str) -> None:
    """Write captions, by the stem of their pictures."""
    found = pictures(root)
    edits = [
        Edit(picture=picture, caption=caption(root, name), text=texts[picture.path.stem])
        for name, picture in found.items()
        if picture.path.stem in texts
    ]
    for change in caption_changes(edits, root=root, extensions=EXTENSIONS):
        assert change.is_at(root, "before")
        change.bring(root, "after")
        assert change.is_at(root, "after")


def trained(root: Path) -> dict[str, str]:
    """Return the captions that the trainer reads."""
    dataset = scan(root, settings=DataSettings())
    return {record.name: record.caption for record in dataset.records}


def test_a_picture_without_a_caption_gets_a_file(tmp_path: Path) -> None:
    draw(tmp_path / "cat.png")
    assert caption(tmp_path, "cat.png") == Caption(text="", file="cat.txt")
    write(tmp_path, cat="a cat")
    assert (tmp_path / "cat.txt").read_bytes() == b"a cat"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cat.png", "cat.txt"]


def test_the_file_that_the_trainer_reads_is_edited(tmp_path: Path) -> None:
    draw(tmp_path / "cat.png")
    (tmp_path / "Cat.CAPTION").write_text("a cat")
    write(tmp_path, cat="a dog")
    assert (tmp_path / "Cat.CAPTION").read_text() == "a dog"
    assert not (tmp_path / "cat.txt").exists()
    assert trained(tmp_path) == {"cat.png": "a dog"}


@pytest.mark.parametrize(
    ("before", "shown", "after"),
    [
        (b"one\r\ntwo\r\n", "one\ntwo", b"one\r\ntwo!\r\n"),
        (b"one\ntwo", "one\ntwo", b"one\ntwo!"),
        (b"one\ntwo\n\n", "one\ntwo\n", b"one\ntwo\n!\n"),
        (b"\xef\xbb\xbfone\n", "one", b"\xef\xbb\xbfone!\n"),
        ("caf\u00e9".encode("cp1252"), "caf\u00e9", "caf\u00e9!".encode()),
        ("\ufeffcaf\u00e9\r\n".encode("utf-16-le"), "caf\u00e9", "caf\u00e9!\r\n".encode()),
        (b"", "", b"!"),
    ],
)
def test_what_is_around_the_text_is_kept(
    tmp_path: Path, before: bytes, shown: str, after: bytes
) -> None:
    draw(tmp_path / "cat.png")
    (tmp_path / "cat.txt").write_bytes(before)
    assert caption(tmp_path, "cat.png").text == shown
    write(tmp_path, cat=f"{shown}!")
    assert (tmp_path / "cat.txt").read_bytes() == after


@given(data=st.binary(max_size=60), text=st.text(max_size=20))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_file_is_left_alone_or_read_back_as_typed(
    tmp_path: Path, data: bytes, text: str
) -> None:
    draw(tmp_path / "cat.png")
    (tmp_path / "cat.txt").write_bytes(data)
    shown = caption(tmp_path, "cat.png").text
    write(tmp_path, cat=shown)
    assert (tmp_path / "cat.txt").read_bytes() == data, "nothing was typed, nothing is written"
    write(tmp_path, cat=text)
    written = (tmp_path / "cat.txt").read_bytes()
    if written != data:
        written.decode()  # what was edited is UTF-8
    assert (
        read_caption_file("a.txt", written).text == read_caption_file("a.txt", text.encode()).text
    )


def test_metadata_lines_are_edited_in_their_file(tmp_path: Path) -> None:
    draw(tmp_path / "a.png")
    draw(tmp_path / "B.png")
    lines = [
        '{"file_name":"a.png","text":"one \\u00e9","more":[1, 2]}',
        "no json",
        '{"file_name": "b.PNG", "caption": "two \u00e9"}\r',
        "",
    ]
    file = tmp_path / "metadata.jsonl"
    file.write_bytes("\n".join(lines).encode())
    assert caption(tmp_path, "a.png").place == "line"
    write(tmp_path, a="other \u00e8", B="drei")
    changed = file.read_bytes().decode().split("\n")
    assert json.loads(changed[0]) == {"file_name": "a.png", "text": "other \u00e8", "more": [1, 2]}
    assert changed[1:] == [lines[1], '{"file_name": "b.PNG", "caption": "drei"}\r', ""]
    assert trained(tmp_path) == {"a.png": "other \u00e8", "B.png": "drei"}


def test_a_line_stays_in_its_style(tmp_path: Path) -> None:
    draw(tmp_path / "a.png")
    file = tmp_path / "metadata.jsonl"
    file.write_text('{"file_name":"a.png","text":"\\u00e9"}\n')
    write(tmp_path, a="\u00e8")
    assert file.read_text() == '{"file_name":"a.png","text":"\\u00e8"}\n'


def test_all_lines_of_a_file_are_one_change(tmp_path: Path) -> None:
    rows = []
    for index in range(5):
        draw(tmp_path / f"p{index}.png")
        rows.append(json.dumps({"file_name": f"p{index}.png", "text": f"was {index}"}))
    (tmp_path / "metadata.jsonl").write_text("\n".join(rows))
    found = pictures(tmp_path)
    edits = [
        Edit(picture=picture, caption=caption(tmp_path, name), text=f"is {name}")
        for name, picture in found.items()
    ]
    (change,) = caption_changes(edits, root=tmp_path, extensions=EXTENSIONS)
    assert isinstance(change, LinesChange)
    assert len(change.rows) == 5
    change.bring(tmp_path, "after")
    assert trained(tmp_path) == {name: f"is {name}" for name in found}
    change.bring(tmp_path, "before")
    assert (tmp_path / "metadata.jsonl").read_text() == "\n".join(rows)


def test_metadata_of_a_subfolder_is_edited_there(tmp_path: Path) -> None:
    draw(tmp_path / "3_cat" / "a.png")
    draw(tmp_path / "b.png")
    (tmp_path / "3_cat" / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "x"}')
    assert caption(tmp_path, "3_cat/a.png").file == "3_cat/metadata.jsonl"
    write(tmp_path, a="y")
    assert trained(tmp_path) == {"3_cat/a.png": "y", "b.png": ""}


def test_metadata_that_is_no_utf8_is_not_rewritten(tmp_path: Path) -> None:
    draw(tmp_path / "a.png")
    old = b'{"file_name": "b.png", "text": "caf\xe9"}\n{"file_name": "a.png", "text": "x"}\n'
    (tmp_path / "metadata.jsonl").write_bytes(old)
    write(tmp_path, a="y")
    assert (tmp_path / "metadata.jsonl").read_bytes() == old
    assert (tmp_path / "a.txt").read_text() == "y"
    assert trained(tmp_path) == {"a.png": "y"}


def test_a_caption_file_beats_metadata_unless_it_is_empty(tmp_path: Path) -> None:
    draw(tmp_path / "a.png")
    (tmp_path / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "line"}')
    (tmp_path / "a.txt").write_text("file")
    assert caption(tmp_path, "a.png") == Caption(text="file", file="a.txt", stand_in="line")
    write(tmp_path, a="")
    assert (tmp_path / "a.txt").read_text() == ""
    assert caption(tmp_path, "a.png") == Caption(text="line", file="metadata.jsonl", place="line")
    assert trained(tmp_path) == {"a.png": "line"}


def test_the_name_of_a_folder_stands_in_and_is_no_text_to_edit(tmp_path: Path) -> None:
    draw(tmp_path / "3_tabby cat" / "a.png")
    found = caption(tmp_path, "3_tabby cat/a.png")
    assert found == Caption(text="", file="3_tabby cat/a.txt", stand_in="tabby cat")


def test_pictures_that_share_a_file_are_written_once(tmp_path: Path) -> None:
    draw(tmp_path / "a.png")
    draw(tmp_path / "a.jpg")
    (tmp_path / "a.txt").write_text("both")
    found = pictures(tmp_path)
    edits = [
        Edit(picture=picture, caption=caption(tmp_path, name), text="x, both")
        for name, picture in found.items()
    ]
    (change,) = caption_changes(edits, root=tmp_path, extensions=EXTENSIONS)
    assert change == FileChange(file="a.txt", before="both", after="x, both")


def test_a_very_long_file_is_not_edited(tmp_path: Path) -> None:
    draw(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("x" * 70_000)
    assert "too long" in caption(tmp_path, "a.png").locked
    with pytest.raises(InputError, match="too long"):
        write(tmp_path, a="short")
    assert (tmp_path / "a.txt").stat().st_size == 70_000


def test_a_link_out_of_the_folder_is_not_written_through(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "set", tmp_path / "secret.txt"
    draw(root / "a.png")
    elsewhere.write_text("theirs")
    (root / "a.txt").symlink_to(elsewhere)
    with pytest.raises(InputError, match="leads out of the dataset folder"):
        write(root, a="mine")
    assert elsewhere.read_text() == "theirs"
    assert (root / "a.txt").is_symlink()


def test_a_link_inside_is_written_through_and_modes_are_kept(tmp_path: Path) -> None:
    draw(tmp_path / "a.png")
    real = tmp_path / "real.txt"
    real.write_text("old")
    real.chmod(0o600)
    (tmp_path / "a.txt").symlink_to(real.name)
    write(tmp_path, a="new")
    assert real.read_text() == "new"
    assert (tmp_path / "a.txt").is_symlink()
    assert real.stat().st_mode & 0o777 == 0o600


def test_names_that_are_no_utf8_keep_their_captions(tmp_path: Path) -> None:
    path = Path(f"{tmp_path}/caf\udce9.png")
    draw(path)
    (name,) = pictures(tmp_path)
    assert caption(tmp_path, name).text == ""
    found = pictures(tmp_path)[name]
    edit = Edit(picture=found, caption=caption(tmp_path, name), text="x")
    (change,) = caption_changes([edit], root=tmp_path, extensions=EXTENSIONS)
    change.bring(tmp_path, "after")
    assert path.with_suffix(".txt").read_text() == "x"


def test_a_list_of_captions_is_not_edited(tmp_path: Path) -> None:
    """It would come back as one text."""
    draw(tmp_path / "a.png")
    row = json.dumps({"file_name": "a.png", "text": ["one", "two"]})
    (tmp_path / "metadata.jsonl").write_text(row)
    found = caption(tmp_path, "a.png")
    assert found.text == "one two"
    assert found.locked == "metadata.jsonl gives 2 captions for it in a list"
