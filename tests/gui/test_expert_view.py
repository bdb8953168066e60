"""What the page of all settings shows: every setting, what is in force, why, and whether it fits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lora_trainer.gui import expert_view
from lora_trainer.gui.drafts import Draft
from lora_trainer.gui.expert_text import value_of
from lora_trainer.gui.launch import Answer
from lora_trainer.gui.markup import named
from lora_trainer.gui.workplace import Workplace

from lora_trainer.config.config import all_settings
from lora_trainer.run.plan_text import plan_json
from lora_trainer.run.prepare import Request, prepare
from tests.fakes.runs import toy

EMPTY = Draft(id="0" * 12)
NO_PLAN = Answer(values=None, error="adapter.rank=4096: input should be less than or equal to 1024")


def fields() -> dict[str, dict[str, Any]]:
    """Return the fields of the form as the script gets them, by key."""
    form = json.loads(json.dumps(expert_view.form()))
    return {field["key"]: field for part in form["sections"] for field in part["settings"]}


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """The real plan of a draft with a rank of its own, without a card."""
    place = toy(tmp_path_factory.mktemp("expert"))
    overrides = {"data.cache_dir": str(place.cache), "adapter.rank": 8, "hardware.device": "cpu"}
    found = plan_json(prepare(Request(dataset=place.dataset, overrides=overrides)))
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


def test_every_setting_is_in_the_form_with_all_it_says_about_itself() -> None:
    shown = fields()
    infos = all_settings()
    assert list(shown) == [info.key for info in infos]
    for info in infos:
        field = shown[info.key]
        assert (field["doc"], field["unit"], field["label"]) == (
            named(info.doc),
            info.unit,
            info.label,
        )
        default = json.loads(json.dumps(info.default))
        assert value_of(info, field["default"]) == default, info.key
        words = [value_of(info, word["text"]) for word in field["words"]]
        assert words == list(info.form.words)


def test_the_form_is_small_enough_to_come_with_the_page() -> None:
    assert len(json.dumps(expert_view.form())) < 60_000


def test_what_is_in_force_comes_with_its_origin(plan: Mapping[str, Any]) -> None:
    draft = replace(EMPTY, settings={"adapter.rank": 8, "hardware.device": "cpu"})
    found = expert_view.planned(draft, Answer(values=plan))
    rank, resolution = found["fields"]["adapter.rank"], found["fields"]["data.resolution"]
    assert (rank["text"], rank["from"]) == ("8", "you")
    assert (rank["preset"], rank["preset_from"]) == ("16", "priority balanced")
    assert (resolution["text"], resolution["from"]) == ("64", "planner")
    assert resolution["reason"] == "the size embedded was trained on"
    assert found["fields"]["data.flip"]["from"] == "default"
    assert found["unused"]["objective.flow_shift"] == (
        "needs \u201cPrediction\u201d = flow, but it is epsilon"
    )
    assert "adapter.rank" not in found["unused"]
    assert found["error"] == "" and found["blamed"] == []


def test_the_bar_is_of_the_plan(plan: Mapping[str, Any]) -> None:
    memory = expert_view.planned(EMPTY, Answer(values=plan))["memory"]
    assert memory["fits"] and memory["said"].startswith("Fits: needs ")
    total = sum(part["share"] for part in memory["parts"])
    peak, limit = plan["memory"]["peak_bytes"], plan["memory"]["limit_bytes"]
    assert total / memory["limit"] == pytest.approx(peak / limit, rel=0.01)
    assert 0 < memory["limit"] < 1


def test_without_a_plan_the_defaults_stand_and_the_reason_is_said() -> None:
    draft = replace(EMPTY, settings={"adapter.kind": "oft"})
    found = expert_view.planned(draft, NO_PLAN)
    assert found["fields"]["adapter.rank"]["text"] == "16"
    assert found["unused"]["adapter.alpha"] == "without effect while \u201cKind\u201d is oft"
    assert "objective.flow_shift" not in found["unused"], "the base is not known"
    assert (found["error"], found["blamed"]) == (named(NO_PLAN.error), ["adapter.rank"])
    assert found["memory"] is None


def test_a_damaged_plan_does_no_harm() -> None:
    found = expert_view.planned(EMPTY, Answer(values={"priority": "balanced", "settings": []}))
    assert found["fields"]["adapter.rank"]["preset_from"] == "default"


def test_the_stamp_changes_with_what_is_shown(tmp_path: Path) -> None:
    stamps = {
        expert_view.stamp(draft)
        for draft in (
            EMPTY,
            replace(EMPTY, settings={"train.seed": 1}),
            replace(EMPTY, settings={"train.seed": 2}),
            replace(EMPTY, base="embedded"),
            replace(EMPTY, name="owl"),
            replace(EMPTY, dataset="/x"),
            replace(EMPTY, priority="speed"),
            replace(EMPTY, started_as="000001"),
        )
    }
    assert len(stamps) == 8
    state = expert_view.state(Workplace(runs=tmp_path), replace(EMPTY, settings={"train.seed": 1}))
    assert state["given"] == {"train.seed": "1"}
    assert json.loads(state["json"]) == {"train.seed": 1}
