"""Captions: where they are read and written, edits of many, and those that a model writes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lora_trainer.gui import caption_job, jobs
from lora_trainer.gui.bulk import KINDS, BulkEdit, tags_of, without_tag
from lora_trainer.gui.caption_edit import Caption, Edit, caption_changes, caption_of
from lora_trainer.gui.changes import FileChange, LinesChange
from lora_trainer.gui.jobs import Job
from lora_trainer.gui.launch import Answer
from lora_trainer.gui.workplace import Workplace
from PIL import Image

from lora_trainer.cli.main import main
from lora_trainer.common.errors import InputError, RequestError
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


@pytest.mark.parametrize(
    ("kind", "values", "before", "after"),
    [
        ("prepend", {}, "a cat", "word, a cat"),
        ("prepend", {"joint": " "}, "a cat", "word a cat"),
        ("prepend", {"joint": ""}, "a cat", "worda cat"),
        ("prepend", {}, "", "word"),
        ("append", {}, "a cat", "a cat, word"),
        ("append", {}, "", "word"),
        ("replace", {"replacement": "dog"}, "word, sword", "dog, sdog"),
        ("replace", {"replacement": ""}, "a word.", "a ."),
        ("replace", {"replacement": "$1 \\1"}, "word", "$1 \\1"),
        ("remove_tag", {}, "a cat,  WORD ,big, word", "a cat, big"),
        ("remove_tag", {}, "a cat,  sword ,big", "a cat,  sword ,big"),
        ("remove_tag", {}, "word", ""),
        ("trigger", {}, "a cat", "word, a cat"),
        ("trigger", {}, "a Word of a cat", "a Word of a cat"),
        ("trigger", {}, "a [trigger] cat", "a word cat"),
    ],
)
def test_an_edit(kind: Any, values: dict[str, Any], before: str, after: str) -> None:
    assert BulkEdit(kind=kind, text="word", **values).apply(before) == after


@pytest.mark.parametrize("kind", KINDS)
def test_no_words_are_refused(kind: Any) -> None:
    with pytest.raises(RequestError, match="nothing is typed"):
        BulkEdit(kind=kind, text="")


def test_a_space_can_be_replaced() -> None:
    assert BulkEdit(kind="replace", text="  ", replacement=" ").apply("a  b") == "a b"


@given(caption=st.text(), tag=st.text())
def test_a_removed_tag_is_gone_and_the_others_stay(caption: str, tag: str) -> None:
    before, after = tags_of(caption), tags_of(without_tag(caption, tag))
    wanted = [found for found in before if found.casefold() != tag.strip().casefold()]
    assert after == wanted


EXAMPLE = Path(__file__).resolve().parents[2] / "datasets" / "example"


@pytest.fixture
def work(tmp_path: Path) -> Workplace:
    return Workplace(runs=tmp_path / "runs")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The command lines that would have been started."""
    lines: list[list[str]] = []

    def start(work: Workplace, *, kind: str, argv: list[str], about: Any) -> None:
        lines.append(argv)

    monkeypatch.setattr(jobs, "start", start)
    return lines


def job(tmp_path: Path, *rows: object, state: Any = "running", code: int | None = None) -> Job:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (tmp_path / jobs.LOG_FILE).write_text("\n".join(lines))
    return Job(
        id="0" * 12, folder=tmp_path, kind="caption", argv=(), about={}, state=state, exit_code=code
    )


def test_the_command_takes_what_is_asked_for(
    work: Workplace,
    started: list[list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its own parser is asked, with a model folder that is not there in place of a download."""
    root = tmp_path / "set"
    shutil.copytree(EXAMPLE, root)
    files = ["zibbo_01.png", "zibbo_02.jpg"]
    model = str(tmp_path / "no model")
    caption_job.start(work, root, model=model, files=files, trigger="-x", replace=True)
    (line,) = started
    words = line[line.index("caption") :]
    assert {"--overwrite", "--trigger=-x", *(f"--images={name}" for name in files)} < set(words)
    with pytest.raises(SystemExit):
        main([*words, "--dry-run"])
    captured = capsys.readouterr()
    assert "no model" in captured.err, captured.err
    assert not list(root.glob(".captions-before/*"))


def test_a_folder_is_captioned_once_at_a_time(
    work: Workplace, started: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = job(tmp_path)
    monkeypatch.setattr(caption_job, "of_folder", lambda work, root: running)
    with pytest.raises(RequestError, match="already"):
        caption_job.start(work, tmp_path, model="blip", files=(), trigger="", replace=False)
    assert started == []


@pytest.mark.parametrize(
    ("rows", "state", "said", "done"),
    [
        ([], "running", "loading the model", 0),
        ([{"event": "downloading", "model": "a/b", "gigabytes": 1.6}], "running",
         "downloading a/b, about 1.6 GB", 0),
        ([{"event": "caption", "index": 3, "count": 9}, "a word of a library", '{"event": "capt'],
         "running", "3 of 9 captions written", 3),
        ([{"event": "caption", "index": 9, "count": 9},
          {"event": "captioned", "written": 8, "failed": 1, "had_one": 0}], "finished",
         "8 captions written, 1 images without", 9),
        (["error: no such model. Fix: x"], "failed", "error: no such model. Fix: x", 0),
    ],
)  # fmt: skip
def test_how_far_it_is(rows: list[Any], state: str, said: str, done: int, tmp_path: Path) -> None:
    found = caption_job.state(job(tmp_path, *rows, state=state))
    assert (found["state"], found["said"], found["done"]) == (state, said, done)


def test_images_without_a_caption_are_named(tmp_path: Path) -> None:
    problem = {"event": "problem", "file": "a.png", "what": "is damaged", "fix": "remove it"}
    found = caption_job.state(job(tmp_path, problem))
    assert found["problems"] == ["a.png is damaged. remove it"]


def test_no_captioning_yet() -> None:
    assert caption_job.state(None)["state"] == "none"


def test_what_was_taken_back_is_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    values = {"event": "undone", "removed": ["a", "b"], "restored": ["c"], "kept": []}
    monkeypatch.setattr(caption_job.launch, "ask", lambda words: Answer(values=values))
    assert caption_job.take_back(tmp_path) == "2 captions removed, 1 put back"
    refused = Answer(values=None, error="error: nothing to take back")
    monkeypatch.setattr(caption_job.launch, "ask", lambda words: refused)
    with pytest.raises(InputError, match="nothing to take back"):
        caption_job.take_back(tmp_path)
