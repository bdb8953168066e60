"""The page Datasets: what its script can ask for and what it writes; captions, masks, images left out."""

from __future__ import annotations

import base64
import io
import json
import re
import sys
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lora_trainer.gui import command_lines, drafts
from lora_trainer.gui.clock import day_text
from lora_trainer.gui.datasets import caption_job, requests
from lora_trainer.gui.datasets.api import DatasetApi
from lora_trainer.gui.datasets.name_captions import caption_from_names
from lora_trainer.gui.datasets.routes import routes
from lora_trainer.gui.datasets.view import summary
from lora_trainer.gui.server.language import ENGLISH
from lora_trainer.gui.server.translation import words
from lora_trainer.gui.settings.api import Api as SettingsApi
from lora_trainer.gui.settings.requests import Change
from lora_trainer.gui.train import view as train_view
from lora_trainer.gui.train.report import report as report_on
from lora_trainer.gui.workplace import Workplace
from PIL import Image
from pydantic import ValidationError
from starlette.routing import Router

from lora_trainer.cli.main import main
from lora_trainer.common.errors import InputError, LoraTrainError, RequestError
from lora_trainer.config.config import build_config
from lora_trainer.dataset.captions import read_caption_file
from lora_trainer.dataset.records import finding
from lora_trainer.dataset.scan import scan
from tests.fakes.runs import ROOT
from tests.gui.conftest import answered as answered_by
from tests.gui.conftest import tree

BODIES = {
    "undo": requests.Undo,
    "look": requests.Look,
    "save": requests.Save,
    "preview": requests.Preview,
    "apply": requests.Apply,
    "exclude": requests.Pictures,
    "keep_one": requests.KeepOne,
    "put_back": requests.Pictures,
    "closer": requests.Picture,
    "subject": requests.Picture,
    "mask": requests.Mask,
    "caption": requests.Caption,
}
BULK = {"kind": "prepend", "text": "word", "replacement": "", "joint": ", "}


@pytest.fixture
def api(work: Workplace) -> DatasetApi:
    return DatasetApi(work=work)


@pytest.fixture
def folder(root: Path) -> Path:
    """Return a folder of three images, two of them with captions."""
    for index, caption in enumerate(("a cat", "a dog, big", None)):
        add(root, f"p{index}.png", caption, shade=index * 90)
    return root


def add(root: Path, name: str, caption: str | None = None, *, shade: int = 0) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (32, 24), (shade, 0, 0)).save(path)
    if caption is not None:
        path.with_suffix(".txt").write_text(caption)


def ask(api: DatasetApi, name: str, folder: Path, **values: Any) -> dict[str, Any]:
    body = BODIES.get(name, requests.Folder)
    values = {key: value for key, value in values.items() if key in body.model_fields}
    answer: dict[str, Any] = getattr(api, name)(body(folder=str(folder), **values))
    json.dumps(answer, allow_nan=False)
    return answer


def card(api: DatasetApi, folder: Path, file: str) -> dict[str, Any]:
    (found,) = [each for each in ask(api, "look", folder)["pictures"] if each["file"] == file]
    return dict(found)


def save(api: DatasetApi, folder: Path, file: str, text: str, seen: str | None = None) -> Any:
    """Write a caption in place of `seen`, else of the one that is shown."""
    seen = card(api, folder, file)["caption"] if seen is None else seen
    return ask(api, "save", folder, file=file, text=text, seen=seen, group="")


def badges(answer: dict[str, Any], file: str) -> list[str]:
    (picture,) = [picture for picture in answer["pictures"] if picture["file"] == file]
    return [badge["text"] for badge in picture["badges"]]


def trained(root: Path, **keys: Any) -> dict[str, Any]:
    """Return the captions that the trainer reads."""
    records = scan(root, settings=build_config(keys).data).records
    return {record.name: record.caption for record in records}


def test_all_cards_and_the_file_that_the_trainer_reads_is_edited(
    api: DatasetApi, folder: Path
) -> None:
    (folder / "p0.txt").rename(folder / "P0.CAPTION")
    answer = ask(api, "look", folder)
    captions = {picture["file"]: picture["caption"] for picture in answer["pictures"]}
    assert captions == {"p0.png": "a cat", "p1.png": "a dog, big", "p2.png": ""}
    assert badges(answer, "p2.png") == ["no caption"]
    assert (answer["undo"], answer["redo"], answer["excluded"]) == ("", "", [])
    assert not answer["check"]["fresh"]
    assert save(api, folder, "p0.png", "a cat", "something older")["saved"]
    assert ask(api, "look", folder)["undo"] == "", "saving what is there is not a step"
    save(api, folder, "p0.png", "a bird")
    save(api, folder, "p2.png", "new")
    assert (folder / "P0.CAPTION").read_text() == "a bird" and not (folder / "p0.txt").exists()
    assert trained(folder) == {"p0.png": "a bird", "p1.png": "a dog, big", "p2.png": "new"}
    # Pictures that share a file show it both, and it is written once.
    add(folder, "p0.jpg")
    both = {"p0.png": "both", "p0.jpg": "both"}
    cards = save(api, folder, "p0.png", "both")["cards"]
    assert {each["file"]: each["caption"] for each in cards} == both
    assert len(ask(api, "preview", folder, files=list(both), **BULK)["rows"]) == 1
    ask(api, "apply", folder, seen=both, **BULK)
    assert (folder / "P0.CAPTION").read_text() == "word, both"


def test_a_trigger_word_set_for_all_images_is_that_of_the_check_and_of_the_trainings(
    api: DatasetApi, work: Workplace, folder: Path
) -> None:
    draft = drafts.new(work, dataset=str(folder))
    edit = {"kind": "trigger", "text": " muggo ", "replacement": "", "joint": ", "}
    seen = {"p0.png": "a cat", "p1.png": "a dog, big"}
    assert ask(api, "apply", folder, seen=seen, **edit)["trigger"] == "", "p2.png lacks it"
    assert "data.trigger" not in drafts.read(work, draft.id).settings
    assert ask(api, "apply", folder, seen={"p2.png": ""}, **edit)["trigger"] == "muggo"
    assert drafts.read(work, draft.id).settings["data.trigger"] == "muggo"
    another = train_view.wanted(work, {"draft": "new", "folder": str(folder)})
    assert another.id != draft.id and another.settings["data.trigger"] == "muggo"
    with pytest.raises(RequestError, match="at most 100 characters, not 101"):
        ask(api, "apply", folder, seen={}, **{**edit, "text": "m" * 101})


def test_undo_of_a_trigger_word_that_was_set_takes_it_from_its_fields_too(
    api: DatasetApi, folder: Path, work: Workplace
) -> None:
    draft = drafts.new(work, dataset=str(folder))
    edit = {"kind": "trigger", "text": "muggo", "replacement": "", "joint": ", "}

    def word(answer: dict[str, Any]) -> tuple[str, object]:
        return answer["trigger"], drafts.read(work, draft.id).settings.get("data.trigger")

    seen = {row["file"]: row["caption"] for row in ask(api, "look", folder)["pictures"]}
    assert word(ask(api, "apply", folder, seen=seen, **edit)) == ("muggo", "muggo")
    assert word(ask(api, "undo", folder)) == ("", None)
    assert word(ask(api, "redo", folder)) == ("muggo", "muggo")
    seen = {row["file"]: row["caption"] for row in ask(api, "look", folder)["pictures"]}
    again = {**edit, "text": "zumok"}
    assert word(ask(api, "apply", folder, seen=seen, **again)) == ("zumok", "zumok")
    assert word(ask(api, "undo", folder)) == ("muggo", "muggo")
    assert word(ask(api, "undo", folder)) == ("", None), "the word that was set before goes too"
    assert word(ask(api, "redo", folder)) == ("muggo", "muggo")
    ask(api, "look", folder, trigger="other", resolution="")
    assert word(ask(api, "undo", folder))[0] == "other", "which was chosen since"


def test_what_is_around_the_text_is_kept(api: DatasetApi, folder: Path) -> None:
    for before, shown, after in (
        (b"one\r\ntwo\r\n", "one\ntwo", b"one\r\ntwo!\r\n"),
        (b"one\ntwo\n\n", "one\ntwo\n", b"one\ntwo\n!\n"),
        (b"\xef\xbb\xbfone\n", "one", b"\xef\xbb\xbfone!\n"),
        ("caf\u00e9".encode("cp1252"), "caf\u00e9", "caf\u00e9!".encode()),
        ("\ufeffcaf\u00e9\r\n".encode("utf-16-le"), "caf\u00e9", "caf\u00e9!\r\n".encode()),
    ):
        (folder / "p0.txt").write_bytes(before)
        assert card(api, folder, "p0.png")["caption"] == shown
        save(api, folder, "p0.png", f"{shown}!")
        assert (folder / "p0.txt").read_bytes() == after


@given(data=st.binary(max_size=60), text=st.text(max_size=20))
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_file_is_left_alone_or_read_back_as_typed(
    api: DatasetApi, root: Path, data: bytes, text: str
) -> None:
    add(root, "cat.png")
    file = root / "cat.txt"
    file.write_bytes(data)
    save(api, root, "cat.png", card(api, root, "cat.png")["caption"])
    assert file.read_bytes() == data, "nothing was typed, nothing is written"
    save(api, root, "cat.png", text)
    written = file.read_bytes()
    if written != data:
        written.decode()  # what was edited is UTF-8
    wanted = read_caption_file("a.txt", text.encode()).text
    assert read_caption_file("a.txt", written).text == wanted


def test_metadata_lines_are_edited_in_their_file_and_style(api: DatasetApi, root: Path) -> None:
    for name in ("a.png", "B.png", "3_cat/c.png", "3_tabby cat/d.png"):
        add(root, name)
    lines = [
        '{"file_name":"a.png","text":"one \\u00e9","more":[1, 2]}',
        "no json",
        '{"file_name": "b.PNG", "caption": "two \u00e9"}\r',
        "",
    ]
    file, deeper = root / "metadata.jsonl", root / "3_cat" / "metadata.jsonl"
    file.write_bytes("\n".join(lines).encode())
    deeper.write_text('{"file_name":"c.png","text":"\\u00e9"}\n')
    before = tree(root)
    seen = {"a.png": "one \u00e9", "B.png": "two \u00e9", "3_cat/c.png": "\u00e9"}
    ask(api, "apply", root, seen=seen, **BULK)
    changed = file.read_bytes().decode().split("\n")
    assert json.loads(changed[0]) == {**json.loads(lines[0]), "text": "word, one \u00e9"}
    assert changed[1:] == [lines[1], '{"file_name": "b.PNG", "caption": "word, two \u00e9"}\r', ""]
    assert deeper.read_text() == '{"file_name":"c.png","text":"word, \\u00e9"}\n'
    given = {name: f"word, {text}" for name, text in seen.items()}
    assert trained(root) == {**given, "3_tabby cat/d.png": "tabby cat"}
    assert card(api, root, "3_tabby cat/d.png")["stand_in"] == "tabby cat", "no text to edit"
    ask(api, "undo", root)
    assert tree(root) == before
    (root / "a.txt").write_text("file")
    assert card(api, root, "a.png")["stand_in"] == "one \u00e9", "a file beats a line"
    save(api, root, "a.png", "")
    assert (root / "a.txt").read_text() == ""
    assert card(api, root, "a.png")["where"] == "metadata.jsonl", "unless it is empty"
    old = b'{"file_name": "B.png", "text": "caf\xe9"}\n{"file_name": "a.png", "text": "x"}\n'
    file.write_bytes(old)
    (root / "a.txt").unlink()
    save(api, root, "a.png", "y")
    assert file.read_bytes() == old, "what is not UTF-8 is not rewritten"
    assert (root / "a.txt").read_text() == "y"


def test_what_cannot_be_edited_is_locked_and_says_why(
    api: DatasetApi, folder: Path, tmp_path: Path
) -> None:
    (folder / "p0.txt").write_bytes(b"x" * 70_000)
    assert "too long" in card(api, folder, "p0.png")["locked"]
    secret = tmp_path / "secret.txt"
    secret.write_text("theirs")
    (folder / "p1.txt").unlink()
    (folder / "p1.txt").symlink_to(secret)
    row = json.dumps({"file_name": "p2.png", "text": ["one", "two"]})
    (folder / "metadata.jsonl").write_text(row)
    locked = card(api, folder, "p2.png")["locked"]
    assert locked == "metadata.jsonl gives 2 captions for it in a list"
    for file, why in (("p0", "too long"), ("p1", "leads out"), ("p2", "in a list")):
        with pytest.raises(InputError, match=why):
            save(api, folder, f"{file}.png", "mine")
    assert (folder / "p0.txt").stat().st_size == 70_000 and secret.read_text() == "theirs"
    # A link inside is written through, and modes are kept.
    real = folder / "real.caption"
    real.write_text("old")
    real.chmod(0o600)
    (folder / "p0.txt").unlink()
    (folder / "p0.txt").symlink_to(real.name)
    save(api, folder, "p0.png", "new")
    assert real.read_text() == "new" and (folder / "p0.txt").is_symlink()
    assert real.stat().st_mode & 0o777 == 0o600


def test_an_edit_of_many_captions_leaves_alone_what_changed_since_the_preview(
    api: DatasetApi, folder: Path
) -> None:
    for values, before, after in (
        ({"kind": "prepend"}, "a cat", "word, a cat"),
        ({"kind": "prepend", "joint": ""}, "a cat", "worda cat"),
        ({"kind": "append"}, "a cat", "a cat, word"),
        ({"kind": "replace", "replacement": "$1 \\1"}, "word, sword", "$1 \\1, s$1 \\1"),
        ({"kind": "replace", "text": "  ", "replacement": " "}, "a  b", "a b"),
        ({"kind": "remove_tag"}, "a cat,  WORD ,big, word", "a cat, big"),
        ({"kind": "remove_tag"}, "a cat,  sword ,big", "a cat,  sword ,big"),
        ({"kind": "trigger"}, "a cat", "word, a cat"),
        ({"kind": "trigger"}, "a Word of a cat", "a Word of a cat"),
        ({"kind": "trigger"}, "a [trigger] cat", "a word cat"),
    ):
        (folder / "p0.txt").write_text(before)
        posted = {**BULK, **values}
        rows = ask(api, "preview", folder, files=["p0.png"], **posted)["rows"]
        shown = {"file": "p0.png", "before": before, "after": after}
        assert ask(api, "preview", folder, files=["p0.png"], **posted)["have"] == (
            before == after and posted["kind"] == "trigger"
        )
        assert rows == ([] if before == after else [shown])
        ask(api, "apply", folder, seen={"p0.png": before}, **posted)
        assert (folder / "p0.txt").read_text() == after
        with pytest.raises(RequestError, match="nothing is typed"):
            ask(api, "preview", folder, files=["p0.png"], **{**posted, "text": ""})
    (folder / "p0.txt").write_text("theirs")
    seen = {"p0.png": "a cat", "p1.png": "a dog, big", "p2.png": ""}
    answer = ask(api, "apply", folder, seen=seen, **BULK)
    texts = [(folder / f"p{index}.txt").read_text() for index in range(3)]
    assert texts == ["theirs", "word, a dog, big", "word"]
    (left,) = answer["left"]
    assert "p0.png has another caption" in left
    assert save(api, folder, "p0.png", "mine", "a cat")["newer"] == "theirs"
    assert (folder / "p0.txt").read_text() == "theirs"


def test_other_pictures_values_of_another_kind_and_folders_outside_are_refused(
    api: DatasetApi, folder: Path, tmp_path: Path
) -> None:
    for file in ("../other/x.png", "/etc/passwd", "_excluded/p0.png", "p0.txt", "P0.PNG", "", "\0"):
        values = {"files": [file], "seen": {file: ""}, "file": file, "mask": "", **BULK}
        for act in ("preview", "apply", "exclude", "put_back", "mask", "save"):
            values |= {"seen": "", "group": ""} if act == "save" else {}
            with pytest.raises(RequestError, match="the folder has no picture"):
                ask(api, act, folder, **values)
    whole = {"folder": str(folder), "file": "p0.png", "text": "x", "seen": "a cat", "group": ""}
    for key, values in {
        "folder": (3, "x" * 5_000),
        "text": ("x" * 30_000, "\ud800", None),
        "seen": ({},),
        "group": (["a"],),
        "file": ({"a": 1},),
    }.items():
        for value in values:
            with pytest.raises((LoraTrainError, ValidationError)):
                api.save(requests.Save.model_validate({**whole, key: value}))
    bounded = DatasetApi(work=Workplace(runs=tmp_path / "r", roots=(tmp_path / "datasets",)))
    with pytest.raises(InputError, match="outside"):
        ask(bounded, "look", folder)
    assert (folder / "p0.txt").read_text() == "a cat" and not (tmp_path / "r").exists()


def test_the_trigger_is_looked_for_and_remembered_and_a_draft_says_how_it_is_trained(
    api: DatasetApi, folder: Path, work: Workplace, tmp_path: Path
) -> None:
    draft = drafts.new(work, dataset=str(folder)).with_setting("data.trigger", "zibbo")
    drafts.save(work, draft.with_setting("data.resolution", 640))
    answer = ask(api, "look", folder)
    assert answer["trigger"] == "zibbo" and "640 px" in answer["trained_as"]
    answer = ask(api, "look", folder, trigger=" cat ", resolution="768")
    assert (badges(answer, "p0.png"), badges(answer, "p1.png")) == ([], ["trigger missing"])
    again = ask(DatasetApi(work=work), "look", folder)
    assert (again["trigger"], again["resolution"]) == ("cat", "768")
    assert badges(again, "p1.png") == ["trigger missing"]
    other, gone = tmp_path / "other", tmp_path / "gone"
    for path in (other, gone):
        path.mkdir()
        drafts.new(work, dataset=str(path))
    gone.rmdir()
    assert api.recent(requests.Recent())["recent"] == [str(folder), str(other)]


def test_a_folder_has_a_card_with_images_that_can_be_shown_and_says_how_many_lack_a_caption(
    api: DatasetApi, folder: Path, work: Workplace
) -> None:
    for index in range(3, 9):
        add(folder, f"p{index}.png")
    ask(api, "look", folder)
    glance = ask(api, "glance", folder)
    assert (glance["name"], glance["uploaded"]) == (folder.name, False)
    assert (glance["images"], glance["without_caption"]) == (9, 7)
    assert glance["shown"] == ["p0.png", "p2.png", "p4.png", "p6.png"]
    assert glance["used"] == day_text(time.time())
    # An upload that came without a name is called by its trigger word, as soon as it has one.
    for name, called in (("dataset-2", "mukbot"), ("my robots", "my robots")):
        upload = work.own / "uploads" / name
        add(upload, "a.png")
        add(upload, "b.png")
        glance = ask(api, "glance", upload)
        assert (glance["name"], glance["others"]) == (
            ("a", 1) if name == "dataset-2" else (name, 0)
        )
        ask(api, "look", upload, trigger="mukbot")
        assert ask(api, "glance", upload)["name"] == called


def check_answer(**changes: Any) -> dict[str, Any]:
    picture = {"file": "p0.png", "width_px": 32, "height_px": 24, "bucket": "16x16"}
    picture |= {"kept": [0.1, 0, 0.9, 1], "cropped_fraction": 0.2}
    found = {"severity": "warning", "what": "looks like x", "file": None}
    findings = [
        {**found, "kind": "blurred", "file": "p0.png"},
        {**found, "kind": "near-duplicate", "file": "p1.png"},
        {**found, "kind": "no-caption"},  # told by the text itself
        {**found, "kind": "ignored-files", "severity": "note"},
    ]
    whole = {"score": 0.7, "buckets": {"16x16": 3}, "pictures": [picture], "findings": findings}
    return {**whole, **changes}


def answered(monkeypatch: pytest.MonkeyPatch, values: Any, error: str = "") -> list[Any]:
    """Let `lora-train check` answer; return the list that its command lines go to."""
    asked: list[Any] = []

    def stand_in(words: Any) -> Any:
        asked.append(words)
        return SimpleNamespace(values=values, error=error)

    monkeypatch.setattr("lora_trainer.gui.datasets.check.ask", stand_in)
    return asked


def test_a_file_that_cannot_be_read_gets_neither_caption_nor_mask_and_says_why(
    api: DatasetApi, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heic = {"severity": "warning", "kind": "unusable", "file": "p1.png"}
    heic |= {"what": "is a HEIC image", "advice": "`pip install pillow-heif`, or convert it"}
    broken = {**heic, "file": "p2.png", "what": "is cut off", "advice": "replace it"}
    answer = check_answer(findings=[heic, broken], images=1)
    answered(monkeypatch, answer)
    ask(api, "check", folder)
    shown = ask(api, "look", folder)["pictures"]
    assert [row["unreadable"] for row in shown] == [False, True, True]
    edit = {"kind": "prepend", "text": "zorble", "replacement": "", "joint": ", "}
    rows = ask(api, "preview", folder, files=["p0.png", "p1.png", "p2.png"], **edit)["rows"]
    assert [row["file"] for row in rows] == ["p0.png"]
    report, is_good = report_on(answer, words(ENGLISH))
    text = " ".join(re.sub("<[^>]*>", " ", report).split())
    assert not is_good and text.startswith("1 image usable, with weak points")
    assert "2 more files that cannot be read" in text
    assert "Is a HEIC image. What to do: pip install pillow-heif , or convert it." in text
    assert "Is cut off. What to do: Replace it." in text and "2 files cannot be read" not in text


def test_a_remark_with_the_name_of_its_file_is_said_in_the_language() -> None:
    from lora_trainer.gui.datasets.findings import remarks
    from lora_trainer.gui.server.translation import words

    twice = {"kind": "of-no-words", "severity": "warning", "file": "a<b.jpg"}
    row = {**twice, "what": "is the same file as c.jpg", "advice": "keep the better one"}
    (remark,) = remarks([row], words("de"))
    assert remark.text == "a&lt;b.jpg ist dieselbe Datei wie c.jpg"


def test_a_remark_on_all_images_is_counted_and_has_the_captions_written(
    folder: Path,
) -> None:
    what = "18 of 18 images have no caption: a.png, b.png, ..."
    row = {"severity": "warning", "kind": "no-caption", "file": None, "what": what}
    answer = check_answer(findings=[row], images=18)
    report, _ = report_on(answer, words(ENGLISH), assumed="SDXL")
    # Its heading, and not only the words of the command, "18 of 18 images have no caption".
    assert re.search(r">\s*18 images have no caption", report) and "Some" not in report
    assert '<button type="button" class="primary" data-write>' in report
    assert "Judged for a real base, SDXL" in report
    # Of pairs the heading says that they are, and not the words of the command.
    for pairs, heading, said in ((5, "5 pairs", ""), (2, "5 images", "2 of 5 images come with a")):
        found = finding("references", file="references/", pairs=pairs, images=5)
        answer = check_answer(findings=[asdict(found)], images=5)
        report, _ = report_on(answer, words(ENGLISH))
        assert f"<h2>{heading}</h2>" in report and said in report
        assert "--set" not in report and "holds reference images" not in report
    # A mask that is there is one press from being used, and the page does not speak as a terminal.
    for count, said in ((1, "1 mask is here and not used"), (2, "2 masks are here and not used")):
        found = finding("unused-mask.setting", count=count, names="a-masklabel.png")
        answer = check_answer(findings=[asdict(found)], images=18)
        report, _ = report_on(answer, words(ENGLISH))
        assert said in report and "--set" not in report
        assert 'data-sets="data.masks" data-value="files"' in report


def test_the_page_lists_what_is_odd_now_with_a_button_each(
    api: DatasetApi, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered(monkeypatch, check_answer())
    for name in ("p2.png", "p3.png", "p4.png", "p5.png"):
        add(folder, name, "mukbot on grass")
    add(folder, "p6.png")
    (folder / "p1.txt").write_text("mukbot")
    ask(api, "look", folder, trigger="mukbot", resolution="")
    ask(api, "check", folder)
    _, said = told(api.work, "findings", {"folder": str(folder)})
    in_german = said["findings"]
    assert said["good"] is False and said["verdict"] == "brauchbar, mit Schwächen"
    assert 'data-kind="blurry"' in in_german and "data-write" in in_german
    # What the captions lack is told of them as they are, not as they were when they were checked.
    kinds = Counter(row["kind"] for row in api.findings(requests.Folder(folder=str(folder)))[1])
    assert (kinds["no-caption"], kinds["bare-caption"], kinds["same-caption"]) == (1, 1, 0)
    (folder / "p0.txt").write_text("mukbot on grass")
    _, rows = api.findings(requests.Folder(folder=str(folder)))
    alike = [row for row in rows if row["kind"] == "same-caption"]
    assert len(alike) == 5 and {row["find"] for row in alike} == {"mukbot on grass"}


def test_images_are_judged_for_the_base_that_is_chosen_or_recommended_and_the_example_for_the_miniature(
    work: Workplace, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the miniature's 64 px every photograph would be large and sharp enough."""
    monkeypatch.setattr(command_lines, "has_gpu", lambda: False)
    draft = drafts.new(work, dataset=str(folder))
    example = Path("anywhere") / command_lines.EXAMPLE_NAME
    for base, at, judged in (
        ("auto", folder, command_lines.RECOMMENDED),
        ("someone/sdxl", folder, "someone/sdxl"),
        ("auto", example, "auto"),
    ):
        assert command_lines.judged_for(replace(draft, base=base), at) == judged
    pairs = replace(draft, kind=drafts.PAIRS)
    assert command_lines.judged_for(pairs, folder) == command_lines.RECOMMENDED_FOR_PAIRS
    monkeypatch.setattr(command_lines, "has_gpu", lambda: True)
    assert command_lines.judged_for(replace(draft, base="auto"), folder) == "auto"


def test_the_check_is_on_the_cards_until_a_picture_or_the_size_changes(
    api: DatasetApi, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = ROOT / "lora_trainer" / "embedded" / "tokenizer"
    limit = {"tokenizer": str(tokenizer), "tokens": 7}
    asked = answered(monkeypatch, check_answer(caption_limit=limit))
    (folder / "p2.txt").write_text("one two three four five six seven")
    ask(api, "check", folder)
    answer = ask(api, "look", folder)
    shown = answer["pictures"][0]
    assert (shown["bucket"], shown["cropped_fraction"], shown["width_px"]) == ("16x16", 0.2, 32)
    assert shown["kept"] == [0.1, 0, 0.9, 1] and "bucket" not in answer["pictures"][1]
    assert (badges(answer, "p0.png"), badges(answer, "p1.png")) == (["blurry"], ["near-duplicate"])
    (text,) = badges(answer, "p2.png")
    assert text.endswith(" of 7 tokens")
    kinds = [row["kind"] for row in api.findings(requests.Folder(folder=str(folder)))[1]]
    assert kinds == [
        "blurred",
        "near-duplicate",
        "ignored-files",
    ]  # "no-caption" is told by the captions now
    judged = {"verdict": "usable, with weak points", "score": 0.7, "buckets": {"16x16": 3}}
    assert answer["check"] == {"fresh": True, "error": "", **judged}
    assert ask(DatasetApi(work=api.work), "look", folder)["check"]["fresh"]
    save(api, folder, "p0.png", "another caption")
    ask(api, "check", folder)
    assert len(asked) == 1
    add(folder, "p0.png", shade=3)
    assert not ask(api, "look", folder)["check"]["fresh"]
    ask(api, "check", folder)
    ask(api, "look", folder, trigger="", resolution="512")
    ask(api, "check", folder)
    assert len(asked) == 3 and "--set=data.resolution=512" in asked[-1]
    answered(monkeypatch, None, error="no such base")
    add(folder, "p0.png", shade=4)
    ask(api, "check", folder)
    answer = ask(api, "look", folder)
    assert (answer["check"]["error"], len(answer["pictures"])) == ("no such base", 3)


def png(pixels: Image.Image) -> str:
    data = io.BytesIO()
    pixels.save(data, format="PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def test_a_painted_mask_is_one_that_training_reads_and_is_undone(
    api: DatasetApi, work: Workplace, folder: Path
) -> None:
    old = folder / "p1-masklabel.jpg"
    Image.new("L", (32, 24), 255).save(old)
    before = old.read_bytes()
    half = Image.new("RGBA", (64, 48), "black")
    half.paste("white", (0, 0, 32, 48))
    answer = ask(api, "mask", folder, file="p1.png", mask=png(half))
    file = folder / "p1-masklabel.png"
    assert file.is_file() and not old.exists(), "one of another kind gives way"
    records = scan(folder, settings=build_config({"data.masks": "files"}).data).records
    assert [record.name for record in records if record.mask] == ["p1.png"]
    assert badges(answer, "p1.png") == ["has a mask"]
    written = file.read_bytes()
    with Image.open(file) as mask:
        assert (mask.mode, mask.size) == ("L", (32, 24))
        assert mask.getpixel((4, 4)) == 255 and mask.getpixel((28, 4)) == 0
    shown = ask(api, "closer", folder, file="p1.png")
    assert shown["mask"] == "data:image/png;base64," + base64.b64encode(written).decode()

    def used() -> object:
        asked = {"draft": "new", "folder": str(folder)}
        return train_view.wanted(work, asked).settings.get("data.masks")

    assert used() == "files", "what was painted is trained with"
    assert "the mask of p1.png" in ask(api, "undo", folder)["step"]
    assert old.read_bytes() == before and not file.exists()
    assert used() == "files", "the one before is there"
    ask(api, "redo", folder)
    assert file.read_bytes() == written
    ask(api, "mask", folder, file="p1.png", mask="")
    assert not file.exists()
    assert used() is None, "the last one is gone"
    ask(api, "undo", folder)
    assert used() == "files"
    ask(api, "redo", folder)
    assert used() is None
    ask(api, "undo", folder)
    black = (png(Image.new("L", (32, 24))), "nothing is painted")
    for bad, why in (black, ("data:x", "not a mask"), (png(half)[:90], "mask")):
        with pytest.raises(RequestError, match=why):
            ask(api, "mask", folder, file="p1.png", mask=bad)
    assert file.read_bytes() == written


def test_painted_masks_are_used_by_each_draft_about_the_folder_until_somebody_says_otherwise(
    api: DatasetApi, work: Workplace, folder: Path
) -> None:
    other = drafts.new(work, dataset=str(folder))
    half = Image.new("L", (64, 48))
    half.paste(255, (0, 0, 32, 48))
    newest = drafts.new(work, dataset=str(folder))
    ask(api, "mask", folder, file="p1.png", mask=png(half))
    for draft in (other, newest):  # what a series, or one training, does with its draft
        kept = drafts.read(work, draft.id)
        assert kept.settings["data.masks"] == "files"
        drafts.save(work, replace(kept, started_as="0-1", series="1"))
    answer = ask(api, "look", folder)
    assert badges(answer, "p1.png") == ["has a mask"]
    assert ask(api, "closer", folder, file="p1.png")["used"] == "files"
    later = train_view.wanted(work, {"draft": "new", "folder": str(folder)})
    assert later.settings["data.masks"] == "files"
    # Who sets it in All settings, or takes it back there, has said otherwise.
    all_settings = SettingsApi(work=work, plans=command_lines.Plans(work))
    all_settings.change(Change(draft=later.id, key="data.masks", text="none"), words(ENGLISH))
    drafts.save(work, replace(drafts.read(work, later.id), started_as="0-2"))
    assert ask(api, "closer", folder, file="p1.png")["used"] == "none"
    ask(api, "use_masks", folder)
    assert ask(api, "closer", folder, file="p1.png")["used"] == "files"
    ask(api, "mask", folder, file="p1.png", mask="")
    assert (
        "data.masks"
        not in train_view.wanted(work, {"draft": "new", "folder": str(folder)}).settings
    )


@pytest.mark.skipif(
    sys.platform == "win32", reason="the program of this test is a script that names its own reader"
)
def test_the_subject_is_found_by_rembg_and_without_it_the_page_says_how_to_get_it(
    api: DatasetApi, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(programs))
    with pytest.raises(RequestError, match="not installed.*pip install"):
        ask(api, "subject", folder, file="p0.png")
    assert ask(api, "closer", folder, file="p0.png")["finds_subject"] is False
    # It is called as rembg is, and finds the left half.
    program = programs / "rembg"
    program.write_text(
        f"#!{sys.executable}\nimport sys\nfrom PIL import Image\n"
        "_, i, om, seen, mask = sys.argv\nassert (i, om) == ('i', '-om')\n"
        "image = Image.open(seen)\nfound = Image.new('L', image.size)\n"
        "found.paste(255, (0, 0, image.width // 2, image.height))\nfound.save(mask)\n"
    )
    program.chmod(0o755)
    before = tree(folder)
    assert ask(api, "closer", folder, file="p0.png")["finds_subject"] is True
    url = ask(api, "subject", folder, file="p0.png")["subject"]
    with Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) as mask:
        assert mask.size == (32, 24)
        assert [mask.getpixel(at) for at in ((3, 9), (28, 9))] == [255, 0]
    assert tree(folder) == before, "it is written when it is saved"
    program.write_text("#!/bin/sh\necho no model >&2\nexit 3\n")
    with pytest.raises(InputError, match="found no subject: no model"):
        ask(api, "subject", folder, file="p0.png")


def test_the_crops_are_those_of_the_trainer(
    api: DatasetApi, work: Workplace, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts.save(work, drafts.new(work, dataset=str(folder)).with_setting("data.flip", True))
    answered(monkeypatch, check_answer())
    with Image.open(folder / "p0.png") as image:
        drawn = image.copy()
    drawn.putpixel((20, 12), (255, 255, 255))
    drawn.save(folder / "p0.png")
    ask(api, "check", folder)
    seen = ask(api, "closer", folder, file="p0.png")["seen"]
    assert [each["said"] for each in seen] == [
        "cropped to 16 \u00d7 16 px",
        "cropped to 16 \u00d7 16 px, mirrored",
    ]
    brightest = []
    for each in seen:
        crop = Image.open(io.BytesIO(base64.b64decode(each["src"].partition(",")[2])))
        assert crop.size == (16, 16)
        brightest.append(int(np.asarray(crop.convert("L")).max(axis=0).argmax()))
    assert brightest[0] + brightest[1] == 15
    # Where in the whole image they lie, so that the page dims them by the mask that is painted on it.
    (part, is_mirrored), (same, other) = ((each["part"], each["is_mirrored"]) for each in seen)
    left, top, right, bottom = part
    assert (same, is_mirrored, other) == (part, False, True)
    assert 0 < left < 20 / drawn.width < right < 1 and (top, bottom) == (0, 1)
    api.crop(requests.Crop(folder=str(folder), file="p0.png", box=(0.5, 0.0, 1.0, 1.0)))
    ask(api, "check", folder)
    (left, top, right, bottom), *_ = (
        each["part"] for each in ask(api, "closer", folder, file="p0.png")["seen"]
    )
    assert 0.5 <= left < right <= 1 and 0 <= top < bottom <= 1


def move(api: DatasetApi, root: Path, *names: str, back: bool = False) -> dict[str, Any]:
    answer = ask(api, "put_back" if back else "exclude", root, files=list(names))
    assert answer["left"] == []
    return answer


def test_an_image_goes_out_and_comes_back_with_its_caption_and_folder(
    api: DatasetApi, root: Path
) -> None:
    for name, caption in (("3_cat/a.png", "one"), ("b.png", None)):
        add(root, name, caption)
    (root / "metadata.jsonl").write_text('{"file_name": "b.png", "text": "x"}')
    before = tree(root)
    move(api, root, "3_cat/a.png")
    assert {"_excluded/3_cat/a.png", "_excluded/3_cat/a.txt"} < set(tree(root))
    assert trained(root) == {"b.png": "x"}
    move(api, root, "3_cat/a.png", back=True)
    assert tree(root) == before
    assert not (root / "_excluded").exists(), "an empty folder of ours is cleared away"
    for _ in range(2):
        ask(api, "undo", root)
    assert tree(root) == before
    move(api, root, "b.png")
    kinds = {finding.kind for finding in scan(root, settings=build_config({}).data).findings}
    assert "excluded" in kinds and not any("caption" in kind for kind in kinds - {"no-caption"})
    _, found = api.findings(requests.Folder(folder=str(root)))
    assert found and "excluded" not in {row["kind"] for row in found}, (
        "the page does not warn of what was done on it"
    )
    move(api, root, "b.png", back=True)
    assert trained(root)["b.png"] == "x", "its line has stayed and counts again"
    answer = move(api, root, "b.png", "3_cat/a.png")
    assert (len(answer["pictures"]), len(answer["excluded"])) == (0, 2)
    assert "no images" in answer["problem"] and answer["check"]["fresh"], "nothing to check"
    assert ask(api, "check", root) == {}
    (root / "c.png").symlink_to("_excluded/b.png")
    with pytest.raises(InputError, match="is a link"):
        move(api, root, "c.png")


def test_a_taken_name_gets_a_number_with_its_caption_and_a_shared_caption_is_copied(
    api: DatasetApi, root: Path, tmp_path: Path
) -> None:
    add(root, "_excluded/a.png", "before", shade=9)
    for name, caption in (("a.png", "one"), ("c.png", None), ("d.png", None)):
        add(root, name, caption)
    (root / "_excluded/c.caption").write_text("not mine")
    old = tree(root)
    move(api, root, "a.png", "c.png")
    now = tree(root)
    assert old["_excluded/a.png"] == now["_excluded/a.png"]
    assert now["_excluded/a-2.png"] == old["a.png"]
    assert (now["_excluded/a.txt"], now["_excluded/a-2.txt"]) == (b"before", b"one")
    assert "_excluded/c-2.png" in now, "else it would come back with the words of another"
    root = tmp_path / "shared"
    for name, caption in (("a.png", "both"), ("a.jpg", None), ("z.png", None)):
        add(root, name, caption)
    before = tree(root)
    move(api, root, "a.png")
    away = ["_excluded/a.png", "_excluded/a.txt"]
    assert sorted(tree(root)) == [*away, "a.jpg", "a.txt", "z.png"]
    move(api, root, "a.jpg")
    gone = ["_excluded/a.jpg", *away, "z.png"]
    assert sorted(tree(root)) == gone and tree(root)["_excluded/a.txt"] == b"both"
    for name in ("a.png", "a.jpg"):
        move(api, root, name, back=True)
    assert tree(root) == before
    move(api, root, "a.png", "a.jpg")
    assert sorted(tree(root)) == gone
    ask(api, "undo", root)
    assert tree(root) == before


def test_a_model_writes_captions_of_what_is_asked_for_and_says_how_far_it_is(
    api: DatasetApi,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The command's own parser is asked, with a model folder that is not there in place of a download."""
    lines: list[list[str]] = []

    def start(work: Workplace, *, argv: list[str], **_: Any) -> None:
        lines.append(argv)

    monkeypatch.setattr("lora_trainer.gui.jobs.start", start)
    ask(api, "look", folder, trigger="-x", resolution="")
    asked = {
        "model": "blip",
        "mode": "replace",
        "files": ["p0.png", "p2.png"],
        "prompt": " -in rhyme",
    }
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(RequestError, match="is set to offline. Fix: allow downloads there"):
        ask(api, "caption", folder, **asked)
    assert lines == [], "said at once, before any model is loaded"
    monkeypatch.setattr("lora_trainer.gui.datasets.caption_job._reaches_hub", lambda: True)
    assert ask(api, "caption", folder, **asked)["state"] == "none"
    words = lines[0][lines[0].index("caption") :]
    options = {"--overwrite", "--trigger=-x", "--prompt=-in rhyme"}
    assert options | {"--images=p0.png", "--images=p2.png"} < set(words)
    words = [word.replace("blip", str(folder / "no model")) for word in words]
    with pytest.raises(SystemExit):
        main([*words, "--dry-run"])
    assert "no model" in capsys.readouterr().err
    captioning(api, folder, [])
    with pytest.raises(RequestError, match="already"):
        ask(api, "caption", folder, **asked)
    with pytest.raises(RequestError, match="are being written"):
        train_view.start(api.work, drafts.new(api.work, dataset=str(folder)).id)
    assert len(lines) == 1
    ninth = {"event": "caption", "index": 9, "count": 9}
    ended = {"event": "captioned", "written": 8, "failed": 1, "had_one": 0}
    problem = {"event": "problem", "file": "a.png", "what": "is damaged", "fix": "remove it"}
    download = {"event": "downloading", "model": "a/b", "gigabytes": 1.6}
    captioning(api, folder, [ninth])
    assert not caption_job.is_writing(caption_job.of_folder(api.work, folder)), "the last is there"
    third = [{**ninth, "index": 3}, problem, "a word of a library", '{"event": "capt']
    for rows, code, state, said, done in (
        ([], None, "running", "loading the model", 0),
        ([download], None, "running", "downloading a/b: 0 B of about 1.5 GiB", 0),
        (third, None, "running", "3 of 9 captions written", 3),
        ([ninth, ended], 0, "finished", "8 captions written, 1 images without", 9),
        (["error: no such model. Fix: x"], 3, "failed", "error: no such model. Fix: x", 0),
    ):
        shown = captioning(api, folder, rows, code)
        assert (shown["state"], shown["said"], shown["done"]) == (state, said, done)
        assert bool(shown["written"] or shown["done"]) == bool(done), "else nothing to take back"
        is_writing = caption_job.is_writing(caption_job.of_folder(api.work, folder))
        assert is_writing == (state == "running")
        assert shown["problems"] == (["a.png is damaged. remove it"] if problem in rows else [])
    values = {"event": "undone", "removed": ["a", "b"], "restored": ["c"], "kept": []}
    undone = SimpleNamespace(values=values)
    monkeypatch.setattr("lora_trainer.gui.command_lines.ask", lambda words: undone)
    assert ask(api, "caption_undo", folder)["step"] == "2 captions removed, 1 put back"
    refused = SimpleNamespace(values=None, error="error: nothing to take back")
    monkeypatch.setattr("lora_trainer.gui.command_lines.ask", lambda words: refused)
    with pytest.raises(InputError, match="nothing to take back"):
        ask(api, "caption_undo", folder)


def test_a_download_of_a_model_is_counted_in_bytes(
    api: DatasetApi, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    blobs = tmp_path / "hub/models--a--b/blobs"
    blobs.mkdir(parents=True)
    (blobs / "abc.incomplete").write_bytes(bytes(2**20))
    row = {"event": "downloading", "model": "a/b", "gigabytes": 2**21 / 1e9}
    shown = captioning(api, folder, [row])
    assert shown["said"].startswith("downloading a/b: 1.0 MiB of about ")
    assert shown["downloaded"] == pytest.approx(0.5)
    assert captioning(api, folder, [row], 3)["downloaded"] is None


@pytest.mark.parametrize(
    ("base", "writes"),
    [
        ("OnomaAIResearch/Illustrious-xl", "tags"),
        ("/m/ponyV6.safetensors", "tags"),
        ("/m/AnythingV5.safetensors", "tags"),
        ("purplesmartai/pony-v7-base", "sentences"),
        ("auto", "sentences"),
    ],
)
def test_the_captioner_that_is_suggested_writes_as_the_base_was_trained(
    api: DatasetApi, folder: Path, base: str, writes: str
) -> None:
    drafts.save(api.work, replace(drafts.new(api.work, dataset=str(folder)), base=base))
    state = ask(api, "caption_state", folder)
    (suggested,) = (each for each in state["models"] if each["name"] == state["suggested"])
    assert suggested["tags"] == (writes == "tags")
    first = [each["offered_for"] for each in state["models"][:4]]
    assert suggested["offered_for"] in first and all(first[:3]) and not first[3]


def test_a_dataset_is_called_as_somebody_calls_it_and_its_folder_keeps_its_name(
    api: DatasetApi, folder: Path
) -> None:
    def called(name: str) -> str:
        return str(api.look(requests.Look(folder=str(folder), name=name))["name"])

    assert ask(api, "look", folder)["name"] == folder.name
    assert called("  My   fox ") == "My fox"
    ask(api, "look", folder, trigger="kwil", resolution="")
    assert ask(api, "glance", folder)["name"] == "My fox", "what else is remembered leaves it alone"
    assert folder.is_dir()
    assert called("") == folder.name


NAMES = {
    "IMG_1234.JPG": "",
    "PXL_20240102_120000123.jpg": "",
    "WhatsApp Image 2024-01-02 at 12.00.00.jpeg": "",
    "0f3a9c1d77e2.png": "",
    "thumb.jpg": "",
    "Foto (3) - Kopie.jpg": "",
    "a_red-cat_003.png": "red cat",
    "MyDogRunning2.jpg": "my dog running",
    "10_blue owl/IMG_7.png": "blue owl",
    "owl/flying owl.png": "owl, flying owl",
}


@pytest.mark.parametrize("name", NAMES)
def test_names_that_somebody_gave_become_captions_and_those_of_cameras_do_not(name: str) -> None:
    assert caption_from_names(name, root=Path("/home/jane/uploads/dataset-2")) == NAMES[name]


def test_captions_from_names_need_no_model_keep_what_is_there_and_are_undone(
    api: DatasetApi, root: Path
) -> None:
    for name in ("red cat.png", "black dog.png", "IMG_1.png"):
        Image.new("RGB", (64, 64)).save(root / name)
    (root / "black dog.txt").write_text("mine")
    answer = ask(api, "caption_names", root)
    captions = {row["file"]: row["caption"] for row in answer["pictures"]}
    assert captions == {"red cat.png": "red cat", "black dog.png": "mine", "IMG_1.png": ""}
    assert answer["step"] == answer["undo"] == "captions from names"
    with pytest.raises(RequestError, match="say nothing in words"):
        ask(api, "caption_names", root)
    ask(api, "undo", root)
    assert not (root / "red cat.txt").exists()


def test_without_a_model_the_images_say_it_themselves_and_that_is_undone_unless_more_was_changed(
    api: DatasetApi, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    described = {"IMG_1.jpg": "H\u00fcndin am See", "IMG_2.jpg": "SONY DSC", "red cat.jpg": ""}
    for name, text in described.items():
        exif = Image.Exif()
        exif[0x010E] = text.encode()
        Image.new("RGB", (64, 64)).save(root / name, exif=exif)
    asked = {"model": "blip", "mode": "missing", "files": [], "prompt": ""}
    answer = ask(api, "caption", root, **asked)
    assert {path.name: path.read_text().strip() for path in root.glob("*.txt")} == {
        "IMG_1.txt": "H\u00fcndin am See",
    }
    why, done, rest, offer = answer["instead"]
    assert why.startswith("BLIP base is not on this machine yet"), "as its card calls it"
    assert done.startswith("1 caption was taken") and rest.startswith("2 images have no caption")
    assert offer.startswith("The name of 1 of them has words") and answer["named"] == 1
    _, told_in_german = told(api.work, "caption", {**asked, "folder": str(root)})
    assert told_in_german["instead"][0].startswith("BLIP base ist noch nicht auf diesem Rechner")
    assert told_in_german["instead"][1].startswith("2 Bilder haben keine"), "nothing more to take"
    # A step is taken back by the name that it was told by.
    _, undone = told(api.work, "undo", {"folder": str(root), "step": told_in_german["undo"]})
    assert "error" not in undone and not [*root.glob("*.txt")]
    answer = ask(api, "caption", root, **asked)
    # Words of names are written by a press of their own.
    ask(api, "caption_names", root)
    assert (root / "red cat.txt").read_text().strip() == "red cat"
    ask(api, "undo", root, step="captions from names")
    assert not (root / "red cat.txt").exists()
    ask(api, "save", root, file="IMG_2.jpg", text="mine", seen="", group="g")
    with pytest.raises(RequestError, match="something else was changed"):
        ask(api, "undo", root, step=answer["undo"])
    ask(api, "undo", root)
    ask(api, "undo", root, step=answer["undo"])
    assert not [*root.glob("*.txt")]


def captioning(api: DatasetApi, folder: Path, rows: list[Any], code: int | None = None) -> Any:
    """Leave what a captioning writes in the folder of a job; return what is said of it."""
    job = api.work.own / "jobs" / ("a" * 12)
    job.mkdir(parents=True, exist_ok=True)
    about = {"kind": "caption", "about": {"folder": str(folder)}, "at_s": time.time()}
    (job / "job.json").write_text(json.dumps(about))
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (job / "log.txt").write_text("\n".join(lines))
    if code is not None:
        (job / "result.json").write_text(json.dumps({"exit_code": code}))
    return ask(api, "caption_state", folder)


def told(work: Workplace, name: str, body: object, code: str = "de") -> tuple[int, dict[str, Any]]:
    """Ask as a script does; return the status and what came back."""
    status, _, answer = answered_by(
        Router(routes=routes(work)),
        f"/datasets/{name}",
        method="POST",
        body=[json.dumps(body).encode()],
        accept_language=code,
    )
    return status, json.loads(answer)


def test_a_script_is_answered_in_the_language_of_the_reader_with_names_and_captions_as_they_are(
    work: Workplace, folder: Path
) -> None:
    (folder / "p0.txt").write_text("no caption")
    whole = {"folder": str(folder)}
    _, answer = told(work, "look", whole)
    first, _, last = answer["pictures"]
    assert first["caption"] == "no caption", "the words of a user stay"
    (badge,) = last["badges"]
    assert (badge["kind"], badge["text"]) == ("no caption", "keine Caption"), "filtered by its kind"
    assert badge["title"] == "wird mit leerer Caption trainiert"
    assert answer["trained_as"] == "der Gr\u00f6\u00dfe des Basismodells"
    _, answer = told(work, "exclude", {**whole, "files": ["p1.png", "p2.png"]})
    assert answer["step"] == answer["undo"] == "2 Bilder ausschlie\u00dfen"
    assert told(work, "undo", whole, "en")[1]["step"] == "exclude 2 pictures"
    _, answer = told(work, "caption_state", whole)
    (blip,) = (model for model in answer["models"] if model["name"] == "blip")
    assert blip["good_for"].startswith("ein kurzer Satz") and "2 GiB Speicher" in blip["takes"]
    page = answered_by(Router(routes=routes(work)), "/datasets", accept_language="de")[2].decode()
    assert "<h1>Datens\u00e4tze</h1>" in page and "Bilder ausw\u00e4hlen" in page


def test_a_caption_too_long_to_be_saved_is_told_so_and_what_no_script_sends_is_refused(
    work: Workplace, folder: Path
) -> None:
    save = {"folder": str(folder), "file": "p0.png", "text": "x", "seen": "a cat", "group": ""}
    status, answer = told(work, "save", {**save, "text": "x" * 20_001}, "en")
    assert status == 200 and "20,001 characters" in answer["error"]
    for wrong in ({}, [], {**save, "more": 1}, {**save, "text": 5}, {**save, "text": "\ud800"}):
        assert told(work, "save", wrong)[0] == 400
    assert (
        told(work, "caption", {**save, "files": [], "model": "no such", "mode": "missing"})[0]
        == 400
    )
    assert (folder / "p0.txt").read_text() == "a cat"


def test_a_pair_shows_its_references_that_lie_in_the_folder(
    api: DatasetApi, root: Path, tmp_path: Path
) -> None:
    names = ("pair.png", "references/pair.png", "references_2/pair.png")
    for name in names:
        add(root, name)
    assert card(api, root, "pair.png")["references"] == [*names[1:]]
    glance = ask(api, "glance", root)
    assert (glance["images"], glance["are_pairs"]) == (1, True)
    assert glance["shown"] == ["references/pair.png", "pair.png"], "before, then after"
    add(root, "alone.png")
    assert not ask(api, "glance", root)["are_pairs"]
    (root / "alone.png").unlink()
    add(tmp_path / "elsewhere", "pair.png")
    draft = replace(drafts.new(api.work), dataset=str(root))
    there = [str(tmp_path / "elsewhere")]
    drafts.save(api.work, draft.with_setting("data.reference_dirs", there))
    assert card(api, root, "pair.png")["references"] == [*names[1:]], "no picture of another folder"


def test_names_that_say_the_same_of_each_image_are_not_made_captions(
    api: DatasetApi, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for number in range(3):
        Image.new("RGB", (64, 64)).save(root / f"moppel_0{number}.png")
    asked = {"model": "blip", "mode": "missing", "files": [], "prompt": ""}
    answer = ask(api, "caption", root, **asked)
    assert answer["written"] == 0 and not [*root.glob("*.txt")]
    assert "\u201cmoppel\u201d, the same of each image, so no caption" in answer["instead"][1]
    _, told_in_german = told(api.work, "caption", {**asked, "folder": str(root)})
    assert told_in_german["instead"][1].startswith(
        "Alles, was die Namen sagen, ist \u201emoppel\u201c"
    )
    with pytest.raises(RequestError, match="the same of each image"):
        ask(api, "caption_names", root)


def test_pairs_lack_an_instruction_which_is_typed_and_which_no_model_writes(folder: Path) -> None:
    paired = "holds reference images, of 5 of 5 images: the captions say what changes"
    shape = "references of another shape than their image (5): a.png, b.png, c.png, d.png, e.png"
    bare = "5 of 5 images have no caption but the trigger, if one is set: a.png, ..."
    rows = [
        {"severity": "note", "kind": "references", "file": "references/", "what": paired},
        {"severity": "warning", "kind": "references", "file": None, "what": shape},
        {"severity": "warning", "kind": "no-caption", "file": None, "what": bare},
    ]
    report, _ = report_on(check_answer(findings=rows, images=5), words(ENGLISH))
    assert "<h2>5 pairs</h2>" in report
    assert "5 pairs have no instruction" in report and "data-instruct" in report
    assert "data-write" not in report and "caption" not in report
    assert "5 pairs differ in shape before and after" in report and "and 1 more" in report
    assert "Show" not in report, "no card has a badge of it"


def test_what_is_warned_of_is_not_good_to_train_on_and_a_caption_of_the_trigger_says_nothing(
    api: DatasetApi, folder: Path
) -> None:
    what = '21 of 21 captions say the same, "moppel": a.png, ...'
    row = {"severity": "warning", "kind": "same-caption", "file": None, "what": what}
    answer = check_answer(findings=[row], images=21) | {"score": 0.97}
    shown, is_good = report_on(answer, words(ENGLISH))
    assert (
        not is_good and "usable, with weak points" in shown and "21 captions say the same" in shown
    )
    assert summary(answer)["verdict"] == "usable, with weak points"
    assert summary({**answer, "findings": []})["verdict"] == "all good to train on"
    for text, kinds in (
        ("moppel", {"says nothing"}),
        ("moppel_03", {"says nothing"}),
        ("moppel asleep", set()),
    ):
        (folder / "p0.txt").write_text(text)
        shown = ask(api, "look", folder, trigger="moppel", resolution="")["pictures"]
        (card,) = (each for each in shown if each["file"] == "p0.png")
        assert {each["kind"] for each in card["badges"]} == kinds


def test_images_that_are_alike_say_which_they_are_and_one_press_leaves_one_of_each(
    api: DatasetApi, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("p1 (1).png", "p3.png"):
        add(folder, name)
    twice, near = "is the same file as p1 (1).png", "looks the same as p0.png"
    rows = [
        {"severity": "warning", "kind": kind, "file": file, "what": what, "advice": "keep one"}
        for kind, file, what in (("duplicate", "p1.png", twice), ("near-duplicate", "p3.png", near))
    ]
    answer = check_answer(
        images=5,
        findings=rows,
        pictures=[
            {"file": name, "width_px": side, "height_px": side}
            for name, side in (("p0.png", 16), ("p1.png", 32), ("p1 (1).png", 32), ("p3.png", 32))
        ],
    )
    answered(monkeypatch, answer)
    ask(api, "check", folder)
    look = ask(api, "look", folder)
    said = {name: badges(look, name) for name in ("p1.png", "p1 (1).png", "p0.png", "p3.png")}
    assert said["p1.png"] == ["= p1 (1).png"] and "= p1.png" in said["p1 (1).png"]
    assert said["p0.png"] == ["\u2248 p3.png"] and "\u2248 p0.png" in said["p3.png"]
    cards = {card["file"]: card["alike"] for card in look["pictures"]}
    assert cards["p1.png"] == cards["p1 (1).png"] == {"duplicate": "p1 (1).png"}
    kinds = {badge["kind"] for card in look["pictures"] for badge in card["badges"]}
    assert {"duplicate", "near-duplicate"} <= kinds  # each remark shows its own, and no others
    report, _ = report_on(answer, words(ENGLISH))
    assert "p1 (1).png = p1.png" in report and "p0.png \u2248 p3.png" in report
    assert 'data-kind="duplicate"' in report and 'data-keep="duplicate"' in report
    # Of copies the one with a caption stays, of different sizes the larger one; nothing else is left out.
    left = ask(api, "keep_one", folder, kind="duplicate")
    assert [card["file"] for card in left["excluded"]] == ["p1 (1).png"]
    (folder / "p0.txt").unlink()
    left = ask(api, "keep_one", folder, kind="near-duplicate")
    assert [card["file"] for card in left["excluded"]] == ["p0.png", "p1 (1).png"]


def test_captions_that_are_all_alike_are_quoted_and_can_be_shown_before_the_folder_is_opened(
    folder: Path,
) -> None:
    found = finding(
        "same-caption", count=5, all=5, text="a photo of a cat", names="a.png, b.png, ..."
    )
    report, _ = report_on(check_answer(findings=[asdict(found)], images=5), words(ENGLISH))
    text = " ".join(re.sub("<[^>]*>", " ", report).split())
    assert text.count("captions say the same") == 1 and "\u201ca photo of a cat\u201d" in text
    assert 'data-find="a photo of a cat"' in report
    # Nor is what the heading says of masks said again behind it.
    lacking = finding("no-mask", count=3, all=5, lack="no mask", names="a.png, b.png, ...")
    report, _ = report_on(check_answer(findings=[asdict(lacking)], images=5), words(ENGLISH))
    assert report.count("so the whole image counts") == 1 and "a.png, b.png, ..." in report
    names = "a.png, b.png, c.png, d.png, e.png and 13 more"
    lacking = finding("no-mask", count=18, all=19, lack="no mask", names=names)
    report, _ = report_on(check_answer(findings=[asdict(lacking)], images=19), words(ENGLISH))
    assert "d.png" in report and "e.png" not in report and "and 14 more" in report
    # A mask that cannot be used is shown with its image.
    what = "is black everywhere: nothing would be learned"
    bad = {"kind": "bad-mask", "severity": "error", "file": "m/IMG_1-masklabel.png", "what": what}
    report, _ = report_on(check_answer(findings=[{**bad, "advice": ""}], images=5), words(ENGLISH))
    assert 'data-find="IMG_1"' in report
