"""What the script of the page asks for is done on the draft's file, or refused in a sentence."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lora_trainer.gui import drafts
from lora_trainer.gui.drafts import Draft
from lora_trainer.gui.launch import Answer
from lora_trainer.gui.plans import Plans
from lora_trainer.gui.workplace import Workplace

pytest.importorskip("gradio", reason="gradio is not installed (extra `gui`)")

from lora_trainer.gui.pages import expert  # noqa: E402 - needs gradio

Call = Callable[..., dict[str, Any]]


@pytest.fixture
def work(tmp_path: Path) -> Workplace:
    return Workplace(runs=tmp_path)


@pytest.fixture
def draft(work: Workplace, tmp_path: Path) -> Draft:
    return drafts.new(work, dataset=str(tmp_path))


@pytest.fixture
def call(work: Workplace, draft: Draft) -> Call:
    """Ask as the script does; `draft` is named unless another one is."""
    plans = Plans(work, ask=lambda words: Answer(values=None, error=" ".join(words)))
    functions = {f.__name__: f for f in expert.served(expert.ExpertDesk(work=work, plans=plans))}

    def ask(function: str, /, **asked: Any) -> Any:
        answer = functions[function]({"draft": draft.id, **asked})
        json.dumps(answer)  # it has to reach the browser
        return answer

    return ask


def test_a_change_and_its_reset_are_in_the_file(call: Call, work: Workplace, draft: Draft) -> None:
    changed = call("change", key="adapter.rank", text="8")
    assert drafts.read(work, draft.id).settings == {"adapter.rank": 8}
    assert changed["given"] == {"adapter.rank": "8"}
    call("reset", key="adapter.rank")
    assert drafts.read(work, draft.id).settings == {}


@pytest.mark.parametrize(
    "asked",
    [
        {"key": "adapter.rank", "text": "many"},
        {"key": "no.setting", "text": "1"},
        {"key": ["adapter.rank"], "text": "1"},
        {"key": "adapter.rank", "text": 1},
        {"key": "adapter.rank", "text": "1", "draft": "../../x"},
        {"key": "adapter.rank", "text": "1", "draft": None},
        {"key": "output.folder", "text": "/x"},
    ],
)
def test_what_cannot_be_is_refused_and_changes_nothing(
    asked: dict[str, Any], call: Call, work: Workplace, draft: Draft
) -> None:
    assert "Fix: " in call("change", **asked)["error"]
    assert drafts.read(work, draft.id) == draft


def test_a_request_that_is_no_object_is_refused(work: Workplace) -> None:
    functions = expert.served(expert.ExpertDesk(work=work, plans=Plans(work)))
    for function in functions:
        for asked in (None, [], "x", 5):
            answer = function(asked)
            assert answer is not None and "error" in answer


def test_a_tab_sees_the_change_of_another(call: Call) -> None:
    before = call("open")
    assert call("look", stamp=before["stamp"]) is None
    call("change", key="train.seed", text="7")
    assert call("look", stamp=before["stamp"])["given"] == {"train.seed": "7"}


def test_without_an_id_the_newest_draft_opens(call: Call, draft: Draft) -> None:
    assert call("open", draft="")["id"] == draft.id


def test_a_file_does_not_replace_what_was_changed_meanwhile(
    call: Call, work: Workplace, draft: Draft
) -> None:
    before = call("open")["stamp"]
    now = call("change", key="train.seed", text="7")["stamp"]
    refused = call("replace", text='{"adapter.rank": 4}', stamp=before)
    assert "changed elsewhere" in refused["error"]
    assert drafts.read(work, draft.id).settings == {"train.seed": 7}
    call("replace", text='{"adapter.rank": 4}', stamp=now)
    assert drafts.read(work, draft.id).settings == {"adapter.rank": 4}


def test_changes_at_once_are_all_kept(call: Call, work: Workplace, draft: Draft) -> None:
    keys = ("adapter.rank", "train.seed", "train.steps", "data.repeats", "sampling.steps")
    threads = [
        threading.Thread(target=call, args=("change",), kwargs={"key": key, "text": "9"})
        for key in keys
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert drafts.read(work, draft.id).settings == dict.fromkeys(keys, 9)


def test_the_command_line_is_the_training(call: Call, work: Workplace) -> None:
    call("change", key="sampling.prompts", text="an owl's nest")
    command = call("command")["command"]
    assert command == (
        f"lora-train {work.runs} --priority=balanced "
        """'--set=sampling.prompts=["an owl'"'"'s nest"]' """
        f"--output={work.runs}"
    )


def test_a_preset_is_kept_and_loaded_without_the_name_of_the_run(
    call: Call, work: Workplace, draft: Draft
) -> None:
    call("change", key="adapter.rank", text="8")
    call("change", key="output.name", text="owl")
    assert "mine.json" in call("keep", name="mine")["note"]
    assert "there is a preset" in call("keep", name="mine")["error"]
    call("replace", text='{"train.seed": 3, "output.name": "cat"}')
    assert call("load", name="mine")["presets"] == ["mine"]
    loaded = drafts.read(work, draft.id)
    assert (loaded.settings, loaded.name) == ({"adapter.rank": 8}, "cat")


def test_the_plan_says_why_there_is_none(call: Call, work: Workplace) -> None:
    assert call("plan")["error"].startswith("plan ")
    empty = drafts.new(work)
    unplanned = call("plan", draft=empty.id)
    assert "Choose the folder" in unplanned["said"][0] and not unplanned["error"]
    gone = drafts.new(work, dataset="/nowhere/at/all")
    assert "no folder" in call("plan", draft=gone.id)["error"]


def test_a_full_disk_is_said(
    call: Call, monkeypatch: pytest.MonkeyPatch, work: Workplace, draft: Draft
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(drafts, "save", full)
    assert "error" in call("change", key="train.seed", text="7")
    assert drafts.read(work, draft.id) == draft
