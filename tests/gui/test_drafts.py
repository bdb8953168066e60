"""Drafts survive everything but being started, and a damaged one stands in nobody's way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from lora_trainer.gui import drafts
from lora_trainer.gui.workplace import Workplace

from lora_trainer.common.errors import RequestError


@pytest.fixture
def work(tmp_path: Path) -> Workplace:
    return Workplace(runs=tmp_path)


def test_a_draft_is_found_as_it_was_left(work: Workplace) -> None:
    draft = drafts.current(work).with_setting("sampling.prompts", ["a", "b"])
    drafts.save(work, replace(draft, dataset="/x", name="\u202e <b>"))
    assert drafts.current(work) == replace(draft, dataset="/x", name="\u202e <b>")
    assert drafts.current(work).without_setting("sampling.prompts").settings == {}


def test_a_started_draft_makes_place_for_a_new_one(work: Workplace) -> None:
    first = drafts.current(work)
    drafts.save(work, replace(first, started_as="000001"))
    second = drafts.current(work)
    assert second.id != first.id
    assert drafts.read(work, first.id).started_as == "000001"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"id": 5}', '{"id": "x", "unknown": 1}', '{"id": "a", "settings": []}']
)
def test_a_damaged_draft_is_refused_and_passed_over(work: Workplace, text: str) -> None:
    draft = drafts.current(work)
    file = work.own / "drafts" / f"{draft.id}.json"
    file.write_text(text)
    with pytest.raises(RequestError):
        drafts.read(work, draft.id)
    assert drafts.current(work).id != draft.id
    assert file.read_text() == text


@pytest.mark.parametrize("name", ["../x", "", "a" * 12 + "/..", "0" * 200, "ABCDEFABCDEF"])
def test_an_id_is_no_path(work: Workplace, name: str) -> None:
    with pytest.raises(RequestError, match="no draft"):
        drafts.read(work, name)


def test_an_impossible_setting_is_refused_and_changes_nothing(work: Workplace) -> None:
    draft = drafts.current(work)
    with pytest.raises(RequestError, match=r"adapter\.rank"):
        draft.with_setting("adapter.rank", "many")
    assert draft.settings == {}
