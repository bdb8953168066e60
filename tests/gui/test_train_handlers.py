"""The page Train keeps what is filled in: whichever handlers run at once, wherever one comes from."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
from lora_trainer.gui import drafts
from lora_trainer.gui.workplace import Workplace

from lora_trainer.queue import commands

gradio = pytest.importorskip("gradio", reason="gradio is not installed (extra `gui`)")

from lora_trainer.gui.pages import train_handlers as handlers  # noqa: E402 - needs gradio


@pytest.fixture
def work(tmp_path: Path) -> Workplace:
    return Workplace(runs=tmp_path)


@pytest.fixture
def started(work: Workplace, tmp_path: Path) -> drafts.Draft:
    item = commands.add(work.runs, ["images"], label="x")
    draft = replace(drafts.new(work, dataset=str(tmp_path)), started_as=item.id)
    drafts.save(work, draft)
    return draft


def test_another_folder_begins_another_draft(work: Workplace) -> None:
    first = drafts.new(work, dataset="/one")
    assert handlers._wanted(work, {"folder": "/one"}) == first
    second = handlers._wanted(work, {"folder": "/two"})
    assert (second.dataset, drafts.read(work, first.id)) == ("/two", first)
    assert handlers._wanted(work, {"draft": "new"}).dataset == ""


def test_images_sent_from_a_draft_are_its_own_unless_it_was_started(work: Workplace) -> None:
    draft = replace(drafts.new(work, dataset="/one"), name="kept", step=handlers.CHECK)
    drafts.save(work, draft)
    asked = {"draft": draft.id, "folder": "/two"}
    changed = handlers._wanted(work, asked)
    assert changed == replace(draft, dataset="/two", step=handlers.IMAGES)
    assert drafts.read(work, draft.id) == changed == handlers._wanted(work, asked)
    started = replace(changed, started_as="0001-x")
    drafts.save(work, started)
    other = handlers._wanted(work, {"draft": draft.id, "folder": "/three"})
    assert (other.dataset, drafts.read(work, draft.id)) == ("/three", started)


def test_the_example_is_at_its_plan_at_once(work: Workplace) -> None:
    draft = handlers._wanted(work, {"example": "1"})
    assert (Path(draft.dataset).name, draft.step) == ("example", handlers.CHECK)
    assert handlers._wanted(work, {"example": "1"}) == draft


def test_a_field_that_is_left_by_a_press_of_train_does_not_undo_it(
    work: Workplace, tmp_path: Path
) -> None:
    """Of a blur and a click, both requests are under way at once."""
    draft = drafts.new(work, dataset=str(tmp_path))
    fields = (draft.id, str(tmp_path), "auto", "balanced", "name", "", "any", {})
    with drafts.changing(work):
        leaving = threading.Thread(target=handlers.keeping(work), args=fields)
        leaving.start()
        drafts.save(work, replace(draft, started_as="0001-x"))
    leaving.join()
    assert drafts.read(work, draft.id).started_as == "0001-x"


def test_what_the_images_show_is_a_setting_of_the_draft(work: Workplace, tmp_path: Path) -> None:
    draft = drafts.new(work, dataset=str(tmp_path))
    keep = handlers.keeping(work)
    for concept, settings in (("person", {"train.concept": "person"}), ("any", {}), (None, {})):
        assert keep(draft.id, str(tmp_path), "auto", "balanced", "name", "", concept, {}) == ""
        assert drafts.read(work, draft.id).settings == settings


def test_typed_length_and_samples_are_settings_of_the_draft_until_they_are_cleared(
    work: Workplace, tmp_path: Path
) -> None:
    draft = drafts.new(work, dataset=str(tmp_path))
    keep = handlers.keeping(work)

    def typed(**course: object) -> str:
        return keep(draft.id, str(tmp_path), "auto", "balanced", "name", "", "any", course)

    assert typed(steps=300, prompts="from the plan") == ""
    assert drafts.read(work, draft.id).settings == {}, "what a plan fills in is nobody's choice"
    assert typed(changed={"steps": "40", "prompts": "a cat\n\na dog"}) == ""
    chosen = {"train.steps": 40, "sampling.prompts": ["a cat", "a dog"]}
    assert drafts.read(work, draft.id).settings == chosen
    assert "greater than or equal to 1" in typed(changed={"steps": "0"})
    assert "unknown setting" in typed(changed={"output.folder": "/"})
    assert drafts.read(work, draft.id).settings == chosen
    assert typed(changed={"steps": "", "prompts": " "}) == ""
    assert drafts.read(work, draft.id).settings == {}


def test_a_training_taken_off_the_queue_is_a_draft_again(
    work: Workplace, started: drafts.Draft
) -> None:
    follow = handlers.following(work)
    follow(started.id)
    assert drafts.read(work, started.id) == started
    commands.remove(work.runs, started.started_as)
    said = follow(started.id)
    assert "taken off the queue" in said[1]
    assert said[3].active is False, "a draft that is not started asks nothing"
    assert drafts.read(work, started.id) == replace(started, started_as="", step=2)
    assert drafts.current(work).id == started.id
