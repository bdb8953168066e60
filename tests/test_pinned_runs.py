"""Whole runs on a machine that pins little host memory, or refuses: the same losses, said once.

The driver is a fake on the processor; that blocks can be streamed there is too. All else is what a user gets.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lora_trainer.hardware import machine
from lora_trainer.network import pinned_memory
from lora_trainer.planning import host_memory as pinned_plan
from lora_trainer.planning import plan
from lora_trainer.planning.memory_choice import MemoryChooser
from tests.fakes.family_bases import base_of, facts_at, side_of
from tests.fakes.pinning import pinning_driver
from tests.fakes.runs import Toy, events, problems, toy, trajectory

pytestmark = pytest.mark.timeout(300)  # a loaded machine is no failure


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    made = toy(tmp_path_factory.mktemp("pinned"))
    shutil.copytree(base_of("flux"), made.base)
    return made


@pytest.fixture(autouse=True)
def streams_on_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        MemoryChooser, "_streamable", property(lambda self: len(self.inputs.costs.blocks))
    )
    monkeypatch.setattr(plan, "unmet_needs", lambda config, **machine: ())


def train(place: Toy, name: str) -> Path:
    code = place.train(
        "--name",
        name,
        data__resolution=side_of(facts_at(place.base)),
        memory__streamed_blocks=3,
        memory__gradient_checkpointing="full",
    )
    assert code == 0
    return place.runs / name


def refusals(run: Path) -> list[str]:
    return [row["what"] for row in problems(run) if "refused to pin" in row["what"]]


def test_a_run_whose_pinning_is_refused_goes_on_with_the_same_losses(
    place: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended before, with exit code 4, also for a copy to save from; at three places here."""
    whole = trajectory(train(place, "whole"))
    with monkeypatch.context() as patched:
        driver = pinning_driver(patched)
        assert trajectory(train(place, "pinned")) == whole
    assert len(driver.in_place) >= 3, "three blocks, and copies for saving"
    assert refusals(place.runs / "pinned") == []
    blocks = sum(driver.in_place[:3])
    for name, most_bytes in (("none", 0), ("a-block", blocks // 2), ("blocks", blocks + 5000)):
        with monkeypatch.context() as patched:
            driver = pinning_driver(patched, most_bytes=most_bytes)
            run = train(place, name)
        assert trajectory(run) == whole
        assert driver.refusals == 1 and driver.peak_bytes <= most_bytes
        (said,) = refusals(run)
        assert "takes two to three times as long, and steps wait for it" in said
        assert events(run, "finished")


def test_wsl_is_asked_for_what_it_gives_and_blocks_come_first(
    place: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a driver that refuses a byte more than the platform's bound there is no refusal."""
    whole = trajectory(train(place, "linux"))
    driver = pinning_driver(monkeypatch)
    train(place, "sizes")
    blocks = driver.in_place[:3]
    most_bytes = -(-blocks[0] // 4096) * 4096 + -(-blocks[1] // 4096) * 4096 + 70_000
    monkeypatch.setattr(machine, "is_wsl", lambda root: True)
    monkeypatch.setattr(machine, "WSL_PINNABLE_BYTES", most_bytes)
    for module in (pinned_plan, pinned_memory):
        monkeypatch.setattr(module, "RESERVED_BYTES", 60_000)
    driver = pinning_driver(monkeypatch, most_bytes=most_bytes)
    run = train(place, "wsl")
    assert driver.refusals == 0 and refusals(run) == []
    assert driver.in_place[:2] == blocks[:2], "what is copied in every step is pinned first"
    assert trajectory(run) == whole
