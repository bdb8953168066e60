"""The page Datasets: what its script can ask for, what nobody can, and images that are left out."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lora_trainer.gui import dataset_check, dataset_notes, drafts, exclusion
from lora_trainer.gui.dataset_desk import DatasetDesk
from lora_trainer.gui.journal import Journal
from lora_trainer.gui.launch import Answer
from lora_trainer.gui.posted import Posted
from lora_trainer.gui.workplace import Workplace
from PIL import Image

from lora_trainer.common.errors import InputError, LoraTrainError, RequestError
from lora_trainer.config.config import build_config
from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset.listing import EXCLUDED_FOLDER, ImageFile, list_dataset

BULK = {"kind": "prepend", "text": "word", "replacement": "", "joint": ", "}


@pytest.fixture
def work(tmp_path: Path) -> Workplace:
    return Workplace(runs=tmp_path / "runs")


@pytest.fixture
def desk(work: Workplace) -> DatasetDesk:
    return DatasetDesk(work=work)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "set"
    root.mkdir()
    for index, caption in enumerate(("a cat", "a dog, big", None)):
        Image.new("RGB", (32, 24), (index * 90, 0, 0)).save(root / f"p{index}.png")
        if caption is not None:
            (root / f"p{index}.txt").write_text(caption)
    return root


def ask(desk: DatasetDesk, name: str, folder: Path, **values: Any) -> dict[str, Any]:
    answer: dict[str, Any] = getattr(desk, name)(Posted.of({"folder": str(folder), **values}))
    json.dumps(answer, allow_nan=False)
    return answer


def save(desk: DatasetDesk, folder: Path, file: str, text: str, *, seen: str) -> dict[str, Any]:
    return ask(desk, "save", folder, file=file, text=text, seen=seen, group="")


def captions(answer: Mapping[str, Any]) -> dict[str, str]:
    return {picture["file"]: picture["caption"] for picture in answer["pictures"]}


def badges(answer: Mapping[str, Any], file: str) -> list[str]:
    (picture,) = [picture for picture in answer["pictures"] if picture["file"] == file]
    return [badge["text"] for badge in picture["badges"]]


def test_all_cards(desk: DatasetDesk, folder: Path) -> None:
    answer = ask(desk, "look", folder)
    assert captions(answer) == {"p0.png": "a cat", "p1.png": "a dog, big", "p2.png": ""}
    assert badges(answer, "p2.png") == ["no caption"]
    assert (answer["undo"], answer["redo"], answer["excluded"]) == ("", "", [])
    assert not answer["check"]["fresh"]


def test_saving_what_is_there_already_is_no_step(desk: DatasetDesk, folder: Path) -> None:
    assert save(desk, folder, "p0.png", "a cat", seen="something older")["saved"]
    assert ask(desk, "look", folder)["undo"] == ""


def test_a_shared_caption_shows_on_both_cards(desk: DatasetDesk, folder: Path) -> None:
    Image.new("RGB", (32, 32)).save(folder / "p0.jpg")
    cards = save(desk, folder, "p0.png", "both", seen="a cat")["cards"]
    assert {card["file"]: card["caption"] for card in cards} == {"p0.png": "both", "p0.jpg": "both"}
    rows = ask(desk, "preview", folder, files=["p0.png", "p0.jpg"], **BULK)["rows"]
    assert len(rows) == 1


def test_what_changed_since_the_preview_is_left_alone(desk: DatasetDesk, folder: Path) -> None:
    (folder / "p0.txt").write_text("theirs")
    answer = ask(desk, "apply", folder, seen={"p0.png": "a cat", "p1.png": "a dog, big"}, **BULK)
    assert (folder / "p0.txt").read_text() == "theirs"
    assert (folder / "p1.txt").read_text() == "word, a dog, big"
    (left,) = answer["left"]
    assert "p0.png has another caption" in left


def test_a_folder_whose_pictures_are_all_excluded_can_be_looked_at(
    desk: DatasetDesk, folder: Path
) -> None:
    answer = ask(desk, "exclude", folder, files=["p0.png", "p1.png", "p2.png"])
    assert (len(answer["pictures"]), len(answer["excluded"])) == (0, 3)
    assert "no images" in answer["problem"]
    assert answer["check"]["fresh"], "there is nothing to check"
    assert "no images" in ask(desk, "check", folder)["problem"]


@pytest.mark.parametrize(
    "file",
    ["../other/x.png", "/etc/passwd", "_excluded/p0.png", "p0.txt", "P0.PNG", "", "p0.png\0"],
)
@pytest.mark.parametrize("act", ["save", "preview", "apply", "exclude", "put_back"])
def test_only_pictures_of_the_listing_can_be_named(
    act: str, file: str, desk: DatasetDesk, folder: Path
) -> None:
    values = {"files": [file], "seen": {file: ""}, **BULK}
    if act == "save":
        values |= {"file": file, "seen": "", "group": ""}
    with pytest.raises(RequestError, match="there is no picture"):
        ask(desk, act, folder, **values)


@pytest.mark.parametrize(
    "values",
    [
        None,
        [],
        {"folder": 3},
        {"folder": "x" * 5_000},
        {"text": "x" * 30_000},
        {"text": "\ud800"},
        {"text": None},
        {"seen": {}},
        {"group": ["a"]},
        {"file": {"a": 1}},
    ],
)
def test_values_of_another_kind_are_refused(values: Any, desk: DatasetDesk, folder: Path) -> None:
    whole = {"folder": str(folder), "file": "p0.png", "text": "x", "seen": "a cat", "group": ""}
    posted = {**whole, **values} if isinstance(values, dict) else values
    with pytest.raises(LoraTrainError):
        desk.save(Posted.of(posted))
    assert (folder / "p0.txt").read_text() == "a cat"


def test_a_folder_outside_of_the_roots_is_refused(folder: Path, tmp_path: Path) -> None:
    work = Workplace(runs=tmp_path / "runs", roots=(tmp_path / "datasets",))
    with pytest.raises(InputError, match="outside"):
        ask(DatasetDesk(work=work), "look", folder)
    assert not (tmp_path / "runs").exists()


def test_the_trigger_is_looked_for_and_remembered(desk: DatasetDesk, folder: Path) -> None:
    answer = ask(desk, "look", folder, trigger=" cat ", resolution="768")
    assert badges(answer, "p0.png") == []
    assert badges(answer, "p1.png") == ["trigger missing"]
    again = ask(DatasetDesk(work=desk.work), "look", folder)
    assert (again["trigger"], again["resolution"]) == ("cat", "768")
    assert badges(again, "p1.png") == ["trigger missing"]


def test_a_draft_about_the_folder_says_how_it_is_trained(
    desk: DatasetDesk, folder: Path, work: Workplace
) -> None:
    draft = drafts.new(work, dataset=str(folder))
    draft = draft.with_setting("data.trigger", "zibbo").with_setting("data.resolution", 640)
    drafts.save(work, draft)
    answer = ask(desk, "look", folder)
    assert answer["trigger"] == "zibbo"
    assert "640 px" in answer["trained_as"]


def test_an_unreadable_caption_is_locked_and_says_why(desk: DatasetDesk, folder: Path) -> None:
    (folder / "p0.txt").write_bytes(b"x" * 70_000)
    (card, *_) = ask(desk, "look", folder)["pictures"]
    assert "too long" in card["locked"]


def test_odd_names_and_captions_pass_as_they_are(desk: DatasetDesk, folder: Path) -> None:
    name = "q'\"<b>&\U0001f600 ${value}{{value}}.png"
    Image.new("RGB", (32, 32)).save(folder / name)
    text = "\u202e<script>alert(1)</script> \u05e9\u05dc\u05d5\u05dd\n${x}"
    assert save(desk, folder, name, text, seen="")["saved"]
    assert captions(ask(desk, "look", folder))[name] == text


def check_answer(**changes: Any) -> dict[str, Any]:
    picture = {
        "file": "p0.png",
        "width_px": 32,
        "height_px": 24,
        "score": 0.5,
        "bucket": "64x48",
        "kept": [0.1, 0, 0.9, 1],
        "cropped_fraction": 0.2,
        "upscaled": True,
    }
    findings = [
        {"kind": "blurred", "severity": "warning", "file": "p0.png", "what": "looks blurred"},
        {"kind": "near-duplicate", "severity": "warning", "file": "p1.png", "what": "looks like x"},
        {"kind": "no-caption", "severity": "warning", "file": None, "what": "told by the text"},
        {"kind": "ignored-files", "severity": "note", "file": None, "what": "3 .md"},
    ]
    whole = {"score": 0.7, "buckets": {"64x48": 3}, "pictures": [picture], "findings": findings}
    return {**whole, **changes}


def answered(monkeypatch: pytest.MonkeyPatch, answer: Answer) -> list[Any]:
    """Let `lora-train check` answer; return the list that its command lines go to."""
    asked: list[Any] = []

    def stand_in(words: Any) -> Answer:
        asked.append(words)
        return answer

    monkeypatch.setattr(dataset_check, "ask", stand_in)
    return asked


def test_what_the_check_found_is_on_the_cards(
    desk: DatasetDesk, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered(monkeypatch, Answer(values=check_answer()))
    answer = ask(desk, "check", folder)
    card = answer["pictures"][0]
    assert (card["bucket"], card["cropped_fraction"], card["width_px"]) == ("64x48", 0.2, 32)
    assert card["kept"] == [0.1, 0, 0.9, 1]
    assert badges(answer, "p0.png") == ["blurry"]
    assert badges(answer, "p1.png") == ["looks like x"]
    assert "bucket" not in answer["pictures"][1]
    assert len(answer["notes"]) == 1
    assert answer["check"] == {"fresh": True, "error": "", "score": 0.7, "buckets": {"64x48": 3}}


def test_a_check_is_asked_again_when_a_picture_or_the_size_changes(
    desk: DatasetDesk, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = answered(monkeypatch, Answer(values=check_answer()))
    ask(desk, "check", folder)
    assert ask(DatasetDesk(work=desk.work), "look", folder)["check"]["fresh"]
    save(desk, folder, "p0.png", "another caption", seen="a cat")
    ask(desk, "check", folder)
    assert len(asked) == 1
    Image.new("RGB", (40, 40)).save(folder / "p0.png")
    assert not ask(desk, "look", folder)["check"]["fresh"]
    ask(desk, "check", folder)
    ask(desk, "look", folder, trigger="", resolution="512")
    ask(desk, "check", folder)
    assert len(asked) == 3
    assert "--set=data.resolution=512" in asked[-1]


def test_a_check_that_refuses_says_so_and_the_cards_stay(
    desk: DatasetDesk, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered(monkeypatch, Answer(values=None, error="no such base"))
    answer = ask(desk, "check", folder)
    assert answer["check"]["error"] == "no such base"
    assert len(answer["pictures"]) == 3


def test_a_caption_is_counted_where_the_tokenizer_is_known(
    desk: DatasetDesk, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedded = Path(__file__).resolve().parents[2] / "lora_trainer" / "embedded" / "tokenizer"
    limit = {"tokenizer": str(embedded), "tokens": 6}
    answered(monkeypatch, Answer(values=check_answer(caption_limit=limit)))
    (folder / "p2.txt").write_text("one two three four five six")
    answer = ask(desk, "check", folder)
    (text,) = badges(answer, "p2.png")
    assert text.endswith(" of 6 tokens")
    assert badges(answer, "p0.png") == ["blurry"]


def test_recent_folders_are_those_opened_drafted_and_still_there(
    desk: DatasetDesk, folder: Path, tmp_path: Path, work: Workplace
) -> None:
    other, gone = tmp_path / "other", tmp_path / "gone"
    for path in (other, gone):
        path.mkdir()
    drafts.new(work, dataset=str(other))
    dataset_notes.opened(work, gone)
    dataset_notes.opened(work, folder)
    gone.rmdir()
    assert dataset_notes.recent(work) == [str(folder), str(other)]


def png(pixels: Image.Image) -> str:
    data = io.BytesIO()
    pixels.save(data, format="PNG")
    return "data:image/png;base64," + base64.b64encode(data.getvalue()).decode()


def test_a_painted_mask_is_one_that_training_reads_and_is_undone(
    desk: DatasetDesk, work: Workplace, folder: Path
) -> None:
    half = Image.new("RGBA", (64, 48), "black")
    half.paste("white", (0, 0, 32, 48))
    answer = ask(desk, "mask", folder, file="p1.png", mask=png(half))
    file = folder / "p1-masklabel.png"
    settings = build_config({"data.masks": "files"}).data
    (picture,) = [each for each in list_dataset(folder, settings=settings).pictures if each.mask]
    assert (picture.name, picture.mask) == ("p1.png", file)
    assert badges(answer, "p1.png") == ["has a mask"]
    written = file.read_bytes()
    with Image.open(file) as mask:
        assert (mask.mode, mask.size) == ("L", (32, 24))
        assert mask.getpixel((4, 4)) == 255 and mask.getpixel((28, 4)) == 0
    shown = ask(desk, "closer", folder, file="p1.png")
    assert shown["mask"] == "data:image/png;base64," + base64.b64encode(written).decode()
    draft = dataset_notes.draft_for(work, folder)
    assert draft.settings["data.masks"] == "files", "what was painted is trained with"
    assert "the mask of p1.png" in ask(desk, "undo", folder)["step"]
    assert not file.exists()
    ask(desk, "redo", folder)
    assert file.read_bytes() == written
    ask(desk, "mask", folder, file="p1.png", mask="")
    assert not file.exists()
    ask(desk, "undo", folder)
    assert file.read_bytes() == written
    black = png(Image.new("L", (32, 24)))
    for bad, why in (
        (black, "nothing is painted"),
        ("data:x", "no mask"),
        (png(half)[:90], "mask"),
    ):
        with pytest.raises(RequestError, match=why):
            ask(desk, "mask", folder, file="p1.png", mask=bad)
    with pytest.raises(RequestError, match="no picture"):
        ask(desk, "mask", folder, file="../p1.png", mask=png(half))
    assert file.read_bytes() == written


def test_a_mask_of_another_kind_gives_way_and_comes_back(desk: DatasetDesk, folder: Path) -> None:
    old = folder / "p0-masklabel.jpg"
    Image.new("L", (32, 24), 255).save(old)
    before = old.read_bytes()
    ask(desk, "mask", folder, file="p0.png", mask=png(Image.new("L", (32, 24), 200)))
    assert (folder / "p0-masklabel.png").is_file() and not old.exists()
    ask(desk, "undo", folder)
    assert old.read_bytes() == before and not (folder / "p0-masklabel.png").exists()


def test_the_crops_are_those_of_the_trainer(
    desk: DatasetDesk, work: Workplace, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafts.save(work, drafts.new(work, dataset=str(folder)).with_setting("data.flip", True))
    picture = {"file": "p0.png", "bucket": "16x16", "width_px": 32, "height_px": 24}
    answer = Answer(values={"pictures": [picture], "findings": []})
    answered(monkeypatch, answer)
    with Image.open(folder / "p0.png") as image:
        drawn = image.copy()
    drawn.putpixel((20, 12), (255, 255, 255))
    drawn.save(folder / "p0.png")
    ask(desk, "check", folder)
    seen = ask(desk, "closer", folder, file="p0.png")["seen"]
    assert [each["said"] for each in seen] == ["cropped to 16x16", "cropped to 16x16, mirrored"]
    shown = [decoded_url(each["src"]) for each in seen]
    assert [image.size for image in shown] == [(16, 16)] * 2
    brightest = [int(np.asarray(image.convert("L")).max(axis=0).argmax()) for image in shown]
    assert brightest[0] + brightest[1] == 15


def decoded_url(url: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))


EXTENSIONS = (".txt", ".caption")


def add(root: Path, name: str, caption: str | None = None, *, shade: int = 0) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (shade, 0, 0)).save(path)
    if caption is not None:
        path.with_suffix(".txt").write_text(caption)


def files(root: Path) -> dict[str, bytes]:
    found = sorted(path for path in root.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in found}


def listed(folder: Path) -> tuple[ImageFile, ...]:
    return list_dataset(folder, settings=DataSettings()).pictures


def move(journal: Journal, *names: str, back: bool = False) -> None:
    act = exclusion.put_back if back else exclusion.exclude
    every = listed(journal.root / EXCLUDED_FOLDER if back else journal.root)
    chosen = [picture for picture in every if picture.name in names]
    assert len(chosen) == len(names)
    changes = act(chosen, every=every, root=journal.root, extensions=EXTENSIONS)
    with journal.locked():
        assert not journal.perform("move", changes).left


def test_out_and_back(journal: Journal, root: Path) -> None:
    add(root, "a.png", "one")
    add(root, "b.png")
    before = files(root)
    move(journal, "a.png")
    assert sorted(files(root)) == ["_excluded/a.png", "_excluded/a.txt", "b.png"]
    assert [picture.name for picture in listed(root)] == ["b.png"]
    move(journal, "a.png", back=True)
    assert files(root) == before
    assert not (root / "_excluded").exists(), "an empty folder of ours is cleared away"
    journal.undo()
    journal.undo()
    assert files(root) == before


def test_the_folder_of_a_picture_is_kept(journal: Journal, root: Path) -> None:
    add(root, "3_cat/a.png", "one")
    add(root, "b.png")
    move(journal, "3_cat/a.png")
    assert {"_excluded/3_cat/a.png", "_excluded/3_cat/a.txt"} < set(files(root))
    move(journal, "3_cat/a.png", back=True)
    assert [picture.repeats for picture in listed(root)] == [3, 1]


def test_a_taken_name_gets_a_number_with_its_caption(journal: Journal, root: Path) -> None:
    add(root, "_excluded/a.png", "before", shade=9)
    add(root, "a.png", "one")
    add(root, "b.png")
    old = files(root)
    move(journal, "a.png")
    now = files(root)
    assert now["_excluded/a.png"] == old["_excluded/a.png"]
    assert now["_excluded/a.txt"] == b"before"
    assert now["_excluded/a-2.png"] == old["a.png"]
    assert now["_excluded/a-2.txt"] == b"one"


def test_a_caption_in_the_way_counts_as_taken(journal: Journal, root: Path) -> None:
    """Else the picture would come back with the words of another."""
    add(root, "a.png")
    add(root, "b.png")
    (root / "_excluded").mkdir()
    (root / "_excluded/a.caption").write_text("not mine")
    move(journal, "a.png")
    assert "_excluded/a-2.png" in files(root)


def test_a_shared_caption_stays_and_is_copied(journal: Journal, root: Path) -> None:
    add(root, "a.png", "both")
    add(root, "a.jpg", shade=200)
    before = files(root)
    move(journal, "a.png")
    assert sorted(files(root)) == ["_excluded/a.png", "_excluded/a.txt", "a.jpg", "a.txt"]
    add(root, "z.png")
    move(journal, "a.jpg")
    assert files(root)["_excluded/a.txt"] == b"both"
    assert "a.txt" not in files(root)
    move(journal, "a.png", back=True)
    move(journal, "a.jpg", back=True)
    assert {name: data for name, data in files(root).items() if name != "z.png"} == before


def test_both_users_of_a_caption_go_in_one_step(journal: Journal, root: Path) -> None:
    add(root, "a.png", "both")
    add(root, "a.jpg", shade=200)
    add(root, "z.png")
    before = files(root)
    move(journal, "a.png", "a.jpg")
    assert sorted(files(root)) == ["_excluded/a.jpg", "_excluded/a.png", "_excluded/a.txt", "z.png"]
    journal.undo()
    assert files(root) == before


def test_the_line_of_an_excluded_picture_stays_and_counts_again(
    journal: Journal, root: Path
) -> None:
    add(root, "a.png")
    add(root, "b.png")
    (root / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "x"}')
    move(journal, "a.png")
    kinds = {finding.kind for finding in list_dataset(root, settings=DataSettings()).findings}
    assert kinds == {"excluded"}, "no word of a caption without a picture"
    move(journal, "a.png", back=True)
    assert listed(root)[0].stand_ins[0].text == "x"


def test_a_link_is_not_moved(journal: Journal, root: Path) -> None:
    add(root, "a.png")
    (root / "b.png").symlink_to("a.png")
    with pytest.raises(InputError, match="is a link"):
        move(journal, "b.png")
