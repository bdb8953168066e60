"""The page Train: drafts, their plan, and the command lines that they become."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lora_trainer.gui import command_lines, drafts, slider_words, uploads, variants
from lora_trainer.gui.datasets import check
from lora_trainer.gui.datasets.view import placed
from lora_trainer.gui.run import routes as run_routes
from lora_trainer.gui.run import starting
from lora_trainer.gui.server.language import ENGLISH
from lora_trainer.gui.server.translation import words
from lora_trainer.gui.train import base_cards, fields, plan, routes, view
from lora_trainer.gui.workplace import Workplace
from starlette.routing import Router
from starlette.testclient import TestClient

from lora_trainer.cli import main
from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.common.records import of_json
from lora_trainer.config.config import parse_assignment
from lora_trainer.dataset.slider_file import Direction, read_sliders
from lora_trainer.queue import commands, worker
from lora_trainer.reporting.plan_record import PlanRecord
from tests.fakes.lora_library import picture
from tests.fakes.runs import write_dataset
from tests.gui.conftest import skip_without_gradio

skip_without_gradio()
SAID = words(ENGLISH)


def test_a_process_that_answers_half_a_line_says_so_and_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command = [sys.executable, "-c", "input(); print('{', flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as half:
        monkeypatch.setattr(command_lines._PLANS, "_process", half)
        assert command_lines.ask(("plan",)).error == "the command ended without an answer"
        assert half.returncode


def test_another_folder_begins_another_draft_unless_its_images_were_sent_from_one(
    work: Workplace,
) -> None:
    first = drafts.new(work, dataset="/one")
    assert view.wanted(work, {"folder": "/one"}) == first
    second = view.wanted(work, {"folder": "/two"})
    assert (second.dataset, drafts.read(work, first.id)) == ("/two", first)
    assert view.wanted(work, {"draft": "new"}).dataset == ""
    example = view.wanted(work, {"example": "1"})
    assert (Path(example.dataset).name, example.step) == ("example", view.CHECK)
    assert view.wanted(work, {"example": "1"}) == example
    assert example.settings["data.trigger"] == "zibbo", "as its captions begin"
    again = view.wanted(work, {"draft": "new", "folder": example.dataset})  # from Datasets
    assert again.id != example.id and again.settings["data.trigger"] == "zibbo"
    draft = replace(first, name="kept", step=view.CHECK)
    drafts.save(work, draft)
    asked = {"draft": draft.id, "folder": "/three"}
    changed = view.wanted(work, asked)
    assert changed == replace(draft, dataset="/three", step=view.IMAGES)
    assert drafts.read(work, draft.id) == changed == view.wanted(work, asked)
    started = replace(changed, started_as="0001-x")
    drafts.save(work, started)
    other = view.wanted(work, {"draft": draft.id, "folder": "/four"})
    assert (other.dataset, drafts.read(work, draft.id)) == ("/four", started)


def test_a_field_that_is_left_by_a_press_of_train_does_not_undo_it(
    work: Workplace, tmp_path: Path
) -> None:
    """Of a change and a click, both requests may be under way at once."""
    draft = drafts.new(work, dataset=str(tmp_path))
    with drafts.changing(work):
        leaving = threading.Thread(
            target=view.keep, args=(work, draft.id, {"output.name": "name", "adapter.rank": "8"})
        )
        leaving.start()
        drafts.save(work, replace(draft, started_as="0001-x"))
    leaving.join()
    assert drafts.read(work, draft.id) == replace(draft, started_as="0001-x")


@pytest.fixture
def page(work: Workplace) -> TestClient:
    """The page's routes, without a browser."""
    own = [*routes.routes(work), *run_routes.routes(work)]
    return TestClient(Router(routes=own), follow_redirects=False)


def ask(page: TestClient, path: str, **body: Any) -> dict[str, Any]:
    answer = page.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def looks(page: TestClient, draft: drafts.Draft, **typed: str) -> dict[str, Any]:
    """Send what was typed, the keys of the fields with __ for a point; return the answer."""
    by_key = {key.replace("__", "."): text for key, text in typed.items()}
    return ask(page, "/train/look", draft=draft.id, typed=by_key, show=["draft"])


def test_images_that_are_given_are_being_read_from_the_first_moment(
    work: Workplace, tmp_path: Path, page: TestClient
) -> None:
    write_dataset(tmp_path / "set", images=2)
    given = drafts.new(work, dataset=str(tmp_path / "set"))
    shown = page.get(f"/train?draft={given.id}").text
    assert "Reading your images …" in shown and 'class="train has-images"' in shown
    slider = replace(drafts.new(work, dataset=str(tmp_path / "set")), kind=drafts.SLIDER)
    drafts.save(work, slider)
    for other in (drafts.new(work), slider):
        shown = page.get(f"/train?draft={other.id}").text
        assert "Reading your images" not in shown and 'class="train"' in shown


def test_what_is_typed_is_of_the_draft_until_it_is_cleared_and_a_refusal_keeps_the_others(
    work: Workplace, tmp_path: Path, page: TestClient
) -> None:
    draft = drafts.new(work, dataset=str(tmp_path))
    for concept, settings in (("person", {"train.concept": "person"}), ("any", {}), ("", {})):
        assert looks(page, draft, train__concept=concept)["refused"] == {}
        assert drafts.read(work, draft.id).settings == settings
    looks(page, draft, train__steps="40", sampling__prompts="a cat\n\na dog")
    chosen = {"train.steps": 40, "sampling.prompts": ["a cat", "a dog"]}
    assert drafts.read(work, draft.id).settings == chosen
    said = looks(page, draft, train__steps="0", adapter__rank="8", output__folder="/")
    assert "is not possible, only a whole number from 1 to" in said["refused"]["train.steps"]
    assert "has no field" in said["refused"]["output.folder"] and len(said["refused"]) == 2
    assert drafts.read(work, draft.id).settings == {**chosen, "adapter.rank": 8}
    assert said["draft"]["texts"]["train.steps"] == "40", "what the draft has"
    looks(page, draft, train__steps="", sampling__prompts=" ", adapter__rank="")
    assert drafts.read(work, draft.id).settings == {}
    refused = looks(page, draft, priority="never", output__name="a/b")["refused"]
    assert set(refused) == {"priority", "output.name"}


def test_two_tabs_on_one_draft_overwrite_no_field_of_each_other(
    work: Workplace, tmp_path: Path, page: TestClient
) -> None:
    """Each sends what was typed in it, so what the other one has typed meanwhile stays."""
    draft = drafts.new(work, dataset=str(tmp_path))
    shown = looks(page, draft)["draft"]
    looks(page, draft, output__name="one", data__trigger="zibbo")
    other = ask(
        page,
        "/train/look",
        draft=draft.id,
        typed={"adapter.rank": "4"},
        step=2,
        show=["draft"],
        seen={"draft": shown["stamp"]},
    )["draft"]
    kept = drafts.read(work, draft.id)
    assert (kept.name, kept.settings) == ("one", {"data.trigger": "zibbo", "adapter.rank": 4})
    assert (other["texts"]["output.name"], other["step"]) == ("one", 2)
    seen = {"draft": other["stamp"]}
    again = ask(page, "/train/look", draft=draft.id, show=["draft"], seen=seen)
    assert again == {"refused": {}}, "of what has not changed nothing is sent"


def sample_of(row: fields.Field, draft: drafts.Draft) -> str:
    """Return a text that somebody may type into a field."""
    tries = (*row.options, "zibbo") if row.kind in ("cards", "choice") else ("64", "0.5", "true")
    for text in tries:
        try:
            changed = fields.changed(draft, key=row.key, text=text)
        except RequestError:
            continue
        if changed != draft:
            return text
    raise AssertionError(f"nothing can be typed into {row.key}")


@pytest.mark.parametrize("row", fields.FIELDS, ids=lambda row: row.key)
def test_each_field_is_drawn_sent_kept_shown_again_and_in_the_command_line(
    row: fields.Field, work: Workplace, root: Path, page: TestClient
) -> None:
    """A field is one row: all that the page does with it comes from there."""
    draft = drafts.new(work, dataset=str(root))
    text = sample_of(row, draft)
    drawn = page.get(f"/train?draft={draft.id}").text
    assert drawn.count(f'data-field="{row.key}"') == 1 and row.label in drawn
    answer = ask(page, "/train/look", draft=draft.id, typed={row.key: text}, show=["draft"])
    assert answer["refused"] == {} and answer["draft"]["texts"][row.key] == text
    kept = drafts.read(work, draft.id)
    assert kept != draft and fields.texts(kept)[row.key] == text
    again = page.get(f"/train?draft={draft.id}").text
    shown = (f'value="{text}"', f'value="{text}" checked', f">\n{text}</textarea>")
    if row.kind == "switch":
        assert re.search(rf'data-field="{row.key}"[^>]* checked', again)
    else:
        assert any(form in again for form in shown)
    if row.key == fields.DATASET:
        assert kept.dataset == text
        return
    if row.part in ("kind", "words"):  # what they make of the command line is a test of its own
        ask(page, "/train/look", draft=draft.id, typed={row.key: ""}, show=[])
        assert drafts.read(work, draft.id) == draft
        return
    # Further values are in the command lines of further trainings.
    single = variants.variants(kept)[-1].draft
    before, after = (set(command_lines.train_words(each, work)) for each in (draft, single))
    (word,) = after - before
    assert text in word
    ask(page, "/train/look", draft=draft.id, typed={row.key: ""}, show=[])
    assert drafts.read(work, draft.id) == draft


def test_a_slider_is_trained_on_a_file_of_its_words_which_no_later_words_change(
    work: Workplace, root: Path, page: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "ensure_worker", lambda _: None)
    draft = drafts.new(work, dataset=str(root))
    looks(page, draft, data__trigger="zibbo", train__concept="style", train__steps="7")
    looks(page, draft, kind="slider")
    assert drafts.read(work, draft.id).settings == {"train.steps": 7}, "what a slider has"

    def images(**typed: str) -> dict[str, Any]:
        named = {f"slider:{key}": text for key, text in typed.items()}
        answer = ask(page, "/train/look", draft=draft.id, typed=named, show=["images"])
        assert answer["refused"] == {}
        found: dict[str, Any] = answer["images"]
        return found

    begun = images(target="a person")
    assert begun["html"] == "", "nothing is wrong with words that are begun"
    assert (begun["next"], begun["lacks"][:10]) == ("Next step", "Fill in Mo"), (
        "a grey button, and why"
    )
    grey = re.search(r'id="next"[^>]*>', page.get(f"/train?draft={draft.id}").text)
    assert grey is not None and " disabled" in grey[0] and "hidden" not in grey[0]
    assert "says the same twice" in images(more="a man", less="a man")["html"]
    shown = images(more="an <b>old</b> person", less="", keep="a dog\n\na house ")
    assert "an &lt;b&gt;old" in shown["html"] and shown["next"] == "Next step"
    assert shown["lacks"] == ""
    assert ask(page, "/train/start", draft=draft.id)["url"] == starting.page_url(draft.id)
    assert "an b old b person" in page.get(starting.page_url(draft.id)).text
    (item,) = commands.items(work.runs)
    dataset, arguments = parsed(item.argv)[1]["dataset"], parsed(item.argv)[1]
    assert (item.label, arguments["name"]) == ("an b old b person", "an b old b person")
    (direction,) = read_sliders(dataset).directions
    said = Direction(
        target="a person",
        more="an <b>old</b> person",
        less="",
        keep=("a dog", "a house"),
        weight=1.0,
    )
    assert direction == said
    # Its run says what it was trained on: to go on with it, and to train again with changes.
    run = work.runs / "x"
    run.mkdir()
    record = {"command": list(item.argv), "dataset": {"name": dataset.name}, "base": {}, "plan": {}}
    (run / "run.json").write_text(json.dumps(record), encoding="utf-8")
    assert command_lines.resume_words(run, dataset="", work=work)[0] == str(dataset)
    again = view.wanted(work, {"again": "x"})
    assert (again.kind, again.slider["keep"]) == (drafts.SLIDER, "a dog\na house")
    assert command_lines.dataset_of(again, work) == dataset, "the same words, the same file"
    looks(page, again, **{"slider:less": "a child"})
    other = command_lines.dataset_of(drafts.read(work, again.id), work)
    assert (other.name, read_sliders(other).directions[0].less) == (dataset.name, "a child")
    assert read_sliders(dataset).directions == (said,)
    # What has more than the fields say stays the file; images that are sent make it a training of images.
    other.write_text(other.read_text() + "weight = 2.0\n", encoding="utf-8")
    assert slider_words.words_of(other) is None
    typed = replace(EMPTY, dataset=str(other))
    assert command_lines.train_words(typed, work)[0] == str(other)
    assert "a child" in view.images_part(work, typed, SAID).html
    sent = view.wanted(work, {"draft": again.id, "folder": str(root)})
    assert (sent.kind, sent.dataset) == (drafts.IMAGES, str(root))


def test_pairs_stay_pairs_when_their_images_come_and_when_they_are_trained_again(
    work: Workplace, tmp_path: Path
) -> None:
    write_dataset(tmp_path / "set", images=2)
    shutil.copytree(tmp_path / "set", tmp_path / "set" / "references")
    draft = view.wanted(work, {"draft": "new", "kind": "pairs"})
    sent = view.wanted(work, {"draft": draft.id, "folder": str(tmp_path / "set")})
    assert (sent.id, sent.kind, sent.dataset) == (draft.id, drafts.PAIRS, str(tmp_path / "set"))
    run = work.runs / "x"
    run.mkdir()
    record = {"command": [sent.dataset], "dataset": {"name": "set"}, "base": {}, "plan": {}}
    (run / "run.json").write_text(json.dumps(record), encoding="utf-8")
    assert view.wanted(work, {"again": "x"}).kind == drafts.PAIRS
    # Whether a folder that is opened from elsewhere is of pairs its images say, not the page that was seen before.
    assert view.wanted(work, {"folder": sent.dataset}).kind == drafts.PAIRS
    shutil.rmtree(tmp_path / "set" / "references")
    assert view.wanted(work, {"again": "x"}).kind == drafts.IMAGES
    assert view.wanted(work, {"draft": "new", "kind": "pairs"}).kind == drafts.PAIRS
    opened = view.wanted(work, {"folder": sent.dataset})
    assert (opened.kind, opened.dataset) == (drafts.IMAGES, sent.dataset)


def test_images_that_take_the_place_of_pairs_are_no_pairs(work: Workplace, tmp_path: Path) -> None:
    """Else the bases stay filtered to those that edit, for images that none of them can learn an edit from."""
    write_dataset(tmp_path / "set", images=2)
    write_dataset(tmp_path / "typed", images=2)
    draft = view.wanted(work, {"draft": "new", "kind": "pairs"})
    sent = view.wanted(work, {"draft": draft.id, "folder": str(tmp_path / "set")})
    assert sent.kind == drafts.IMAGES
    view.keep(work, draft.id, {"kind": drafts.PAIRS})
    assert (
        view.keep(work, draft.id, {"dataset": str(tmp_path / "typed")}).draft.kind == drafts.IMAGES
    )
    chosen = view.keep(work, draft.id, {"dataset": str(tmp_path / "set"), "kind": drafts.PAIRS})
    assert chosen.draft.kind == drafts.PAIRS, "somebody has just said so"


def test_where_there_is_no_plan_the_fields_hold_what_the_draft_sets_and_nothing_of_another_base(
    work: Workplace, root: Path
) -> None:
    draft = replace(drafts.new(work, dataset=str(root)), base="black-forest-labs/FLUX.1-dev")
    draft = replace(draft, settings={"adapter.rank": 8, "sampling.prompts": ["a", "b"]})
    refused = command_lines.Answer(
        values=None, error="error: this run needs at least 53.72 GiB. Fix: x."
    )
    plans = command_lines.Plans(work, ask=lambda _: refused)
    shown = view.plan_part(work, draft, SAID, plans)
    assert (shown.filled, shown.length, shown.works) == ({}, None, False)
    empty = plan_of({})
    all_of_them = replace(draft, settings={"data.validation_fraction": 0.0})
    assert plan.length(empty, all_of_them).trains_on_all
    assert not plan.length(empty, draft).trains_on_all, "none kept aside may have another reason"
    texts = fields.texts(draft)
    assert {row.key: texts.get(row.key) for row in fields.planned()} == {
        "train.steps": None,
        "data.resolution": None,
        "optimizer.learning_rate": None,
        "adapter.rank": "8",
        "train.seed": None,
        "sampling.prompts": "a\nb",
    }
    assert "This run needs at least 53.72 GiB" in shown.html and "53.72 GiB" in shown.beside
    assert 'data-base="auto"' in shown.html and 'data-base=""' in shown.html
    missing = command_lines.Answer(
        values=None, error="error: base model 'x.safetensors' does not exist. Fix: give a file."
    )
    german = view.plan_part(
        work, draft, words("de"), command_lines.Plans(work, ask=lambda _: missing)
    )
    assert german.verdict and german.verdict["said"] == "Nicht auf diesem Rechner"
    # A base that is nowhere is said once, with what to do.
    assert "Das Basismodell FLUX.1-dev ist nicht auf diesem Rechner" in german.html
    assert "nicht auf diesem Rechner" not in german.beside and "gibt es nicht" not in german.beside
    assert german.verdict["is_absent"] and 'data-base=""' in german.html
    # The card of that base says so too, without another plan.
    assert shown.verdict == base_cards.verdict(plans, draft, SAID)
    assert shown.verdict and shown.verdict["said"] == "Does not fit"


def plan_of(values: dict[str, Any]) -> PlanRecord:
    return of_json(PlanRecord, values)


def test_plan_says_whether_it_fits_how_long_and_what_was_decided() -> None:
    memory = {"items": [{"name": "base", "bytes": 2**30, "note": "<n>"}], "peak_bytes": 2**31}
    values = {
        "base": "embedded",
        "preset": "cpu",
        "priority": "speed",
        "memory": {**memory, "limit_bytes": 2**32, "fits": True, "phase": "training"},
        "time": {"steps": 60, "epochs": 2.0, "run_s": [60, 120], "note": "by table"},
        "disk": {"cache": 2**20},
        "settings": {
            "base.model": {
                "value": "embedded",
                "origin": "planner",
                "reason": "no base was chosen",
            },
            "data.flip": {"value": False, "origin": "concept person", "reason": ""},
            "train.steps": {"value": 60, "origin": "planner", "reason": "by images"},
            "data.trigger": {"value": "cat", "origin": "command line", "reason": ""},
            "train.seed": {"value": 42, "origin": "default", "reason": ""},
        },
    }
    found = plan_of(values)
    html = plan.plan(found, SAID)
    assert "Fits: needs 2.0 GiB of 4.0 GiB at most" in html
    source = "from 2 finished runs on this machine"
    timed = replace(found, time=replace(found.time, source=source, corrections=(source,)))
    assert plan.plan(timed, SAID).count(source) == 1, "what the time is from is said once"
    a_night = replace(found, base="owner/name", time=replace(found.time, run_s=(3e5, 6e5)))
    assert "How to train on another" in plan.plan(a_night, SAID), "not only beside a try-out"
    assert "Too slow on this machine." in plan.beside(a_night, SAID), "as its card says"
    a_minute = replace(a_night, time=replace(found.time, run_s=(60.0, 120.0)))
    assert "How to train on another" not in plan.plan(a_minute, SAID)
    beside = plan.beside(found, SAID)
    assert "About 1 to 2 min" in beside and "not for ComfyUI" in beside
    assert "About 1 to 2 min" not in html, "one time on the page"
    assert "<td>changed by you</td>" in html, "a page is not a command line"
    for value in ("Miniature", "off"):  # in the words of the other pages
        assert f'<td translate="no">{value}</td>' in html
    assert "<td>usual for such a subject</td>" in html
    assert 'data-base="of/b" data-afresh="train.steps data.resolution"' in plan.plan(
        found, SAID, leads_to="of/b", afresh=fields.of_try_out(EMPTY)
    )
    brought = plan.plan(found, SAID, of_file=["train.steps"], on_base="auto")
    assert 'data-base="auto" data-afresh="train.steps">Take those of the miniature' in brought
    slow = plan.plan(found, SAID, leads_to="of/b", leads_to_time="about 4 to 15 days")
    assert "here about 4 to 15 days" in slow
    assert "data-base" not in html, "none fits"
    for shown in (plan.beside, plan.plan):
        assert "not for ComfyUI" not in shown(replace(found, base="owner/name"), SAID)
    assert "&lt;n&gt;" in html and "Train: Steps" in html and "Seed" not in html
    assert (
        plan.filled(replace(found, sampling=replace(found.sampling, prompts=("a", "b"))))[
            fields.PROMPTS
        ]
        == "a\nb"
    )
    without = replace(found, sampling=replace(found.sampling, prompts=("",)))
    assert plan.filled(without)[fields.PROMPTS] == "", "images without captions"
    over = {**values, "memory": {**memory, "limit_bytes": 2**30, "fits": False}}
    assert "Does not fit: needs 2.0 GiB, and 1.0 GiB may be used" in plan.plan(plan_of(over), SAID)
    unknown = {**values, "memory": {**memory, "limit_bytes": None}, "time": {"note": "unmeasured"}}
    html = plan.plan(plan_of(unknown), SAID)
    assert "no limit is known" in html and "unmeasured" in plan.beside(plan_of(unknown), SAID)


EMPTY = drafts.Draft(id="0" * 12)


def test_an_unusual_value_is_told_at_its_field_and_not_at_the_plan() -> None:
    what, advice = "optimizer.learning_rate=0.5 is unusual for adamw", "leave it out"
    values = {
        "base": "owner/name",
        "memory": {"items": [], "peak_bytes": 1, "limit_bytes": 2, "fits": True, "phase": "x"},
        "time": {"steps": 900, "epochs": 2500.0, "images": 3, "run_s": [60, 120]},
        "settings": {"adapter.rank": {"value": 512, "origin": "command line", "reason": ""}},
        "remarks": [
            {"kind": "learning-rate", "what": what, "advice": advice},
            {"kind": "time", "what": "this is long", "advice": "wait"},
        ],
    }
    found = plan_of(values)
    shown = plan.plan(found, SAID)
    assert "unusual" not in shown and "This is long" in shown
    assert "data-shows" not in shown
    blurred = plan.plan(plan_of({**values, "images": {"all": 3, "blurred": 1}}), SAID)
    assert 'data-shows="blurry">Show it<' in blurred, (
        "it leads to the image, which it does not name"
    )
    assert "It takes away “noise”." in plan.plan(found, SAID, slider={"less": "noise"})
    told = plan.at_fields(found, EMPTY, SAID)
    assert "unusual for adamw" in told[fields.RATE] and "eave it out" in told[fields.RATE]
    assert not told[fields.STEPS] and not told[fields.RANK], "what nobody chose is the plan's"
    own = EMPTY.with_setting(fields.STEPS, 900).with_setting(fields.RANK, 512)
    told = plan.at_fields(found, own, SAID)
    assert "seen 2,500 times" in told[fields.STEPS] and "4 to 128" in told[fields.RANK]
    usual = plan.at_fields(plan_of({**values, "remarks": []}), EMPTY, SAID)
    assert set(usual.values()) == {""}, "a line that is mended goes"


@pytest.mark.parametrize("word", ["cat", "Woman", "red cars", "my dog", "M\u00e4dchen"])
def test_an_ordinary_word_is_no_trigger_word_and_a_rare_one_is_offered(
    work: Workplace, page: TestClient, word: str
) -> None:
    draft = drafts.new(work)
    (told,) = looks(page, draft, data__trigger=word)["draft"]["told"].values()
    rare = re.search(r'data-types="data.trigger" data-value="([^"]+)"', told)
    assert rare and f"\u201c{word}\u201d already" in told and rare[1].endswith(f" {word}")
    (told,) = looks(page, draft, data__trigger=rare[1])["draft"]["told"].values()
    assert told == "", "what is offered is not ordinary"
    (told,) = looks(page, draft, data__trigger="")["draft"]["told"].values()
    assert told == ""


def test_images_without_captions_and_trigger_word_are_told_beside_the_button(
    work: Workplace, tmp_path: Path
) -> None:
    write_dataset(tmp_path / "set", images=3)
    draft = drafts.new(work, dataset=str(tmp_path / "set"))
    plans = command_lines.Plans(work)

    def beside(draft: drafts.Draft) -> str:
        return view.plan_part(work, draft, SAID, plans).beside

    assert "None of the" not in beside(draft), "they have captions"
    for caption in (tmp_path / "set").glob("*.txt"):
        caption.unlink()
    told = beside(draft)
    assert "None of the 3 images has a caption, and the trigger word is empty" in told
    assert 'data-types="data.trigger"' in told and "data-captions" in told
    assert "None of the" not in beside(draft.with_setting("data.trigger", "zumok"))
    assert "None of the" not in beside(replace(draft, kind=drafts.PAIRS))


def test_the_notebooks_for_machines_with_a_gpu_are_files_of_two_names(page: TestClient) -> None:
    for name in routes.NOTEBOOKS:
        assert json.loads(page.get(f"/train/notebook?of={name}").text)["cells"]
    for name in ("", "../colab", "vast", "colab.ipynb", "/etc/passwd"):
        assert page.get("/train/notebook", params={"of": name}).status_code == 404


def test_the_same_draft_and_images_are_asked_once_for_a_minute(
    work: Workplace, tmp_path: Path
) -> None:
    """Tabs wait for each other, and only some answers are kept."""
    asked: list[Any] = []
    now_s = [0.0]

    def ask(words: Any) -> Any:
        asked.append(words)
        return command_lines.Answer(values=None, error=str(len(asked)))

    plans = command_lines.Plans(work, ask=ask, clock_s=lambda: now_s[0])

    def planned(**more: Any) -> int:
        return int(plans.of(replace(EMPTY, **{"dataset": str(tmp_path), **more})).error)

    with ThreadPoolExecutor(8) as tabs:
        assert set(tabs.map(lambda _: planned(), range(8))) == {1}
    assert planned() == planned(name="other") == 1
    assert planned(settings={"adapter.rank": 4}) == 2 and planned() == 1
    now_s[0] = 61.0
    assert planned() == 3
    os.utime(tmp_path, ns=(1, 1))
    assert planned() == 4, "new images are planned anew"
    for rank in range(5, 69):
        planned(settings={"adapter.rank": rank})
    assert planned(settings={"adapter.rank": 68}) == 68 and planned() == 69
    with pytest.raises(InputError, match="the folder .* does not exist"):
        planned(dataset="/nowhere/at/all")
    assert len(asked) == 69


def test_a_plan_is_known_while_it_is_asked_for_again(work: Workplace, tmp_path: Path) -> None:
    """What a training is started with was shown, whatever is asked for at that moment."""
    seen: list[Any] = []
    draft = replace(EMPTY, dataset=str(tmp_path))

    def ask(_: Any) -> Any:
        seen.append(plans.known(draft))
        return command_lines.Answer(values=None, error=str(len(seen)))

    plans = command_lines.Plans(work, ask=ask)
    first = plans.of(draft)
    plans.of(draft, anew=True)
    assert seen == [None, first]


def test_a_photo_goes_into_what_is_trained_of_it() -> None:
    """`check` says what is kept in shares of the image, also of one that was cropped by hand."""
    picture = placed({"width_px": 300, "height_px": 200, "kept": [0.1, 0.2, 0.9, 0.7]})
    photo = starting._photo("a", picture)
    assert photo == starting.Photo(
        src="a", ratio="2.400", left="-12.5%", top="-40.0%", wide="125.0%", tall="200.0%"
    )
    assert starting._photo("a", placed({})) == starting.Photo(src="a"), "not checked: it is whole"
    nothing = placed({"width_px": 0, "height_px": 0, "kept": [0.5, 0.5, 0.5, 0.5]})
    assert starting._photo("a", nothing) == starting.Photo(src="a"), "not a division by zero"


def test_a_started_or_damaged_draft_makes_place_and_one_taken_off_the_queue_is_a_draft_again(
    work: Workplace, tmp_path: Path
) -> None:
    draft = drafts.current(work)
    drafts.save(work, replace(draft, started_as="000001"))
    assert drafts.current(work).id != draft.id
    assert drafts.read(work, draft.id).started_as == "000001"
    draft = drafts.current(work)
    file = work.own / "drafts" / f"{draft.id}.json"
    for text in ("", "[]", '{"id": 5}', '{"id": "x", "unknown": 1}', '{"id": "a", "settings": []}'):
        file.write_text(text)
        with pytest.raises(RequestError):
            drafts.read(work, draft.id)
        assert drafts.current(work).id != draft.id and file.read_text() == text
    for name in ("../x", "", "a" * 12 + "/..", "0" * 200, "ABCDEFABCDEF"):
        with pytest.raises(RequestError, match="the draft .* does not exist"):
            drafts.read(work, name)
    with pytest.raises(RequestError, match=r"adapter\.rank"):
        draft.with_setting("adapter.rank", "many")
    item = commands.add(work.runs, ["images"], label="x")
    started = replace(drafts.new(work, dataset=str(tmp_path)), started_as=item.id)
    drafts.save(work, started)
    assert starting.look(work, started, SAID).goes
    assert drafts.read(work, started.id) == started
    starting.stop(work, started)
    assert "taken off the queue" in starting.look(work, started, SAID).html
    starting.stop(work, started)  # as a press that comes late
    assert drafts.read(work, started.id) == replace(started, started_as="", step=2)
    assert drafts.current(work).id == started.id


def test_the_page_of_a_start_shows_the_images_and_what_it_waits_for_and_leads_to_its_run(
    work: Workplace, tmp_path: Path, page: TestClient
) -> None:
    write_dataset(tmp_path / "set", images=2)
    picture = {"file": "p0.png", "width_px": 100, "height_px": 50, "kept": [0.1, 0.25, 0.9, 0.75]}
    check.remember(work, tmp_path / "set", (), {"pictures": [picture]})
    first = commands.add(work.runs, ["others"], label="first")
    item = commands.add(work.runs, ["images"], label="mine")
    draft = drafts.new(work, dataset=str(tmp_path / "set"))
    address = starting.page_url(draft.id)
    assert page.get(address).headers["location"] == f"/train?draft={draft.id}", "not started"
    drafts.save(work, replace(draft, started_as=item.id))
    assert page.get(f"/train?draft={draft.id}").headers["location"] == address

    def asked() -> dict[str, Any]:
        return ask(page, "/run/starting", draft=draft.id, stamp="")

    shown = page.get(address).text
    assert "Waiting: 1 before it." in shown
    line = re.search(r'<ol class="before-it">(.*?)</ol>', shown, re.DOTALL)
    assert line and re.findall(r'<b translate="no">(.*?)</b>', line[1]) == ["first", "mine"], (
        "as the queue calls it"
    )
    assert re.findall(r"--ratio: ([\d.]+)", shown) == ["3.200", "1"], "one was not checked"
    assert "file=p0.png" in shown and "file=p1.png" in shown
    commands.remove(work.runs, first.id)
    commands.write(work.runs, replace(item, state="running"))
    now = asked()
    assert now["goes"] and "Start the program" in now["html"]
    again = ask(page, "/run/starting", draft=draft.id, stamp=now["stamp"])
    assert again == {"goes": True}, "nothing is drawn again that is there"
    assert "data-seconds" not in page.get(address).text
    commands.write(work.runs, replace(item, state="running", started_s=time.time() - 60))
    assert re.search(r'data-seconds="6\d"', page.get(address).text)
    planned = {"base": "embedded", "steps": 1200, "range_s": [60, 600]}
    drafts.save(work, replace(draft, started_as=item.id, planned=planned))
    html = page.get(address).text
    assert ">Miniature</b>: 1,200 steps, takes " in html and "data-stop" in html
    for damaged in ({"base": 5, "steps": "x", "range_s": "1 2"}, {"range_s": [1]}):
        drafts.save(work, replace(draft, started_as=item.id, planned=damaged))
        assert 'class="chosen"' not in page.get(address).text
    drafts.save(work, replace(draft, started_as=item.id))
    left = {"source": "some/base", "here_bytes": 2**20, "all_bytes": 3 * 2**20}
    commands.item_file(work.runs, item.id, "download").write_text(json.dumps(left))
    assert "1.0 MiB of 3.0 MiB" in asked()["html"]
    commands.write(work.runs, replace(item, state="running", run="mine"))
    assert asked()["url"] == page.get(address).headers["location"] == "/run?run=mine"
    # Before it has a run its program is ended: there is nothing to save.
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as program:
        begun_s = psutil.Process(program.pid).create_time()
        trains = replace(item, state="running", pid=program.pid, pid_started_s=begun_s)
        commands.write(work.runs, trains)
        assert "error" not in ask(page, "/run/starting", draft=draft.id, stamp="", stop=True)
        assert program.wait(60) != 0
    commands.write(work.runs, replace(item, state="stopped"))
    assert "It was stopped before it began" in asked()["html"]
    drafts.save(work, replace(draft, started_as=item.id))
    commands.write(work.runs, replace(item, state="failed", error="the disk is full"))
    assert "The disk is full" in asked()["html"]
    assert drafts.read(work, draft.id) == replace(draft, step=2), "to be mended and started again"


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "--resume; touch marker"
    folder.mkdir()
    return folder


def parsed(words: Any) -> tuple[str, dict[str, Any]]:
    """Return what the real command line understands: the command and its arguments."""
    command, bound, _ = main.app.parse_args(list(words), exit_on_error=False, print_error=False)
    arguments = dict(bound.arguments)
    options = arguments.pop("options", None)
    chosen = vars(options).items() if options else ()
    return command.__name__, arguments | {
        name: value for name, value in chosen if value != getattr(type(options)(), name)
    }


def test_full_draft_arrives_as_typed(images: Path, work: Workplace) -> None:
    draft = replace(
        EMPTY,
        dataset=f"  {images} ",
        base="me/model",
        priority="quality",
        name="my run",
        settings={"train.steps": 5, "sampling.prompts": ["a, b", "c=d"], "data.trigger": "5"},
    )
    command, arguments = parsed(command_lines.train_words(draft, work))
    assert command == "train"
    sets = [parse_assignment(text) for text in arguments.pop("set_")]
    assert dict(sets) == draft.settings
    assert arguments == {
        "dataset": images,
        "priority": "quality",
        "base": "me/model",
        "name": "my run",
        "output": work.runs,
    }
    for text in ("$(touch marker)", "a b", "--strict", "\u202e"):  # a value and never a flag
        draft = replace(EMPTY, dataset=str(images), base=text, settings={"data.trigger": text})
        words = command_lines.train_words(draft, work)
        assert shlex.split(command_lines.command_line(words)) == ["lora-train", *words]
        _, arguments = parsed(words)
        assert set(arguments) == {"dataset", "base", "output", "set_"}
        assert arguments["base"] == text.strip()
        assert parse_assignment(arguments["set_"][0]) == ("data.trigger", text)


def test_what_cannot_be_is_refused_before_anything_starts_and_no_folder_is_a_flag(
    images: Path, work: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("../up", "/abs", "a\\b", "..", ".hidden", "--strict", "C:x", "a\nb", "x" * 101):
        with pytest.raises(RequestError, match="name of a run"):
            command_lines.train_words(replace(EMPTY, dataset=str(images), name=name), work)
    with pytest.raises(RequestError, match=r"train\.steps"):
        wrong = replace(EMPTY, dataset=str(images), settings={"train.stepz": 5})
        command_lines.train_words(wrong, work)
    for text in ("", "/no/such/folder", "a\0b"):
        with pytest.raises(InputError):
            command_lines.train_words(replace(EMPTY, dataset=text), work)
    (tmp_path / "outside").mkdir()
    bounded = Workplace(runs=tmp_path / "runs", roots=(images,))
    (images / "deeper").mkdir()
    (images / "link").symlink_to(tmp_path / "outside")
    command_lines.train_words(replace(EMPTY, dataset=str(images / "deeper")), bounded)
    for other in (tmp_path, tmp_path / "outside", images / "link", images / ".." / "outside"):
        with pytest.raises(InputError, match="outside of the folders"):
            command_lines.train_words(replace(EMPTY, dataset=str(other)), bounded)
        with pytest.raises(InputError, match="outside of the folders"):
            draft = replace(EMPTY, dataset=str(images / "deeper"), base=str(other))
            command_lines.train_words(draft, bounded)
    monkeypatch.chdir(work.runs)
    for name in ("--strict", "plan"):
        (work.runs / name).mkdir()
        words = command_lines.train_words(replace(EMPTY, dataset=name), work)
        assert words[0] == str(work.runs / name)
        assert parsed(words)[0] == "train"


@given(st.text(max_size=30))
def test_every_name_that_passes_is_one_folder_in_the_root(name: str) -> None:
    try:
        found = command_lines.run_name(name)
    except RequestError:
        return
    assert not found or Path("/runs", found).resolve().parent == Path("/runs")


def test_resume_finds_the_dataset_in_the_command_of_the_run_or_takes_the_typed_one(
    images: Path, work: Workplace
) -> None:
    run = work.runs / "x"
    run.mkdir()

    def record(*command: str) -> None:
        content = {"command": command, "dataset": {"name": images.name}}
        (run / "run.json").write_text(json.dumps(content), encoding="utf-8")

    record("--output", str(work.runs), str(images), "--name=x")
    words = command_lines.resume_words(run, dataset="", work=work)
    assert words == (str(images), f"--resume-from={run}")
    assert parsed(words)[1] == {"dataset": images, "resume_from": run}
    record("not/here", str(work.runs), "~nobody-of-that-name/x", "a" * 5000, "a\0b")
    assert command_lines.resume_words(run, dataset=str(images), work=work)[0] == str(images)
    with pytest.raises(InputError, match="where its images are"):
        command_lines.resume_words(run, dataset="", work=work)


def test_ask_returns_json_or_the_line_of_the_refusal() -> None:
    def asked(program: str) -> command_lines.Answer:
        return command_lines.ask((), program=(sys.executable, "-c", program))

    assert asked("print('{\"a\": 1}')").values == {"a": 1}
    refused = asked(r"import sys; sys.stderr.write('x\nerror: no. Fix: do\n'); sys.exit(3)")
    assert (refused.values, refused.error) == (None, "error: no. Fix: do")
    assert "no JSON" in asked("print('hello')").error
    assert "/no/such/program" in command_lines.ask((), program=("/no/such/program",)).error


def test_images_are_looked_at_although_the_settings_name_a_base_that_is_not_here(
    work: Workplace, tmp_path: Path
) -> None:
    write_dataset(tmp_path / "cats", images=3)
    draft = drafts.new(work, dataset=str(tmp_path / "cats"))
    missing = "/models/sd_xl_base_1.0.safetensors"
    shown = view.images_part(work, replace(draft, base=missing), SAID)
    assert (
        f"Base model &#x27;{missing}&#x27; does not exist. The images are judged without it"
        in shown.html
        and "3 images" in shown.html
    )
    assert "error:" not in shown.html and "Fix:" not in shown.html
    assert (shown.folder, shown.next) == (str(tmp_path / "cats"), "Continue anyway")


def test_images_that_were_sent_without_a_name_are_called_after_their_trigger_word(
    work: Workplace,
) -> None:
    folder = uploads.upload_folder(work, "")
    picture(folder / "IMG_4101.png")
    draft = drafts.Draft(id="0" * 12, dataset=str(folder))
    assert command_lines.label_of(draft, work) == "IMG_4101"
    assert "--name=IMG_4101" in command_lines.train_words(draft, work)
    draft = draft.with_setting("data.trigger", "mietzi")
    assert command_lines.label_of(draft, work) == "mietzi"
    assert "--name=mietzi" in command_lines.train_words(draft, work)
    draft = draft.with_setting("data.trigger", "a/b")
    assert command_lines.label_of(draft, work) == "IMG_4101", "what no folder can be called"
    named = uploads.upload_folder(work, "my cats")
    assert command_lines.label_of(replace(draft, dataset=str(named)), work) == "my cats"
