"""A draft is planned once while it says the same, and again when its images or the time have changed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from lora_trainer.gui.drafts import Draft
from lora_trainer.gui.launch import Answer, Words
from lora_trainer.gui.plans import Plans
from lora_trainer.gui.workplace import Workplace

from lora_trainer.common.errors import InputError

EMPTY = Draft(id="0" * 12)


@dataclass(kw_only=True)
class Command:
    """Stands for `lora-train plan`; counts how often it runs, and at once."""

    asked: list[Words] = field(default_factory=list)
    running: int = 0
    at_once: int = 0
    now_s: float = 0.0

    def __call__(self, words: Words) -> Answer:
        self.running += 1
        self.at_once = max(self.at_once, self.running)
        self.asked.append(words)
        self.running -= 1
        return Answer(values={"asked": len(self.asked)})


@pytest.fixture
def planned(tmp_path: Path) -> tuple[Command, Callable[..., Answer]]:
    command = Command()
    plans = Plans(Workplace(runs=tmp_path), ask=command, clock_s=lambda: command.now_s)
    return command, lambda **more: plans.of(replace(EMPTY, **{"dataset": str(tmp_path), **more}))


def test_the_same_draft_is_asked_once(planned: tuple[Command, Callable[..., Answer]]) -> None:
    command, plan = planned
    assert plan() == plan(name="other") == Answer(values={"asked": 1})
    assert plan(settings={"adapter.rank": 4}) == Answer(values={"asked": 2})
    assert plan() == Answer(values={"asked": 1})


def test_an_old_answer_is_asked_again(planned: tuple[Command, Callable[..., Answer]]) -> None:
    command, plan = planned
    plan()
    command.now_s = 61.0
    assert plan() == Answer(values={"asked": 2})


def test_new_images_are_planned_anew(
    planned: tuple[Command, Callable[..., Answer]], tmp_path: Path
) -> None:
    _, plan = planned
    plan()
    os.utime(tmp_path, ns=(1, 1))
    assert plan() == Answer(values={"asked": 2})


def test_only_some_answers_are_kept(planned: tuple[Command, Callable[..., Answer]]) -> None:
    command, plan = planned
    for rank in range(1, 66):
        plan(settings={"adapter.rank": rank})
    assert plan(settings={"adapter.rank": 65}) == Answer(values={"asked": 65})
    assert plan(settings={"adapter.rank": 1}) == Answer(values={"asked": 66})


def test_tabs_wait_for_each_other(planned: tuple[Command, Callable[..., Answer]]) -> None:
    command, plan = planned
    threads = [threading.Thread(target=plan) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(command.asked), command.at_once) == (1, 1)


def test_a_folder_that_is_none_is_refused(planned: tuple[Command, Callable[..., Answer]]) -> None:
    command, plan = planned
    with pytest.raises(InputError, match="no folder"):
        plan(dataset="/nowhere/at/all")
    assert command.asked == []
