"""Whole runs with compiled blocks: the setting is followed, recorded, and a resume is exact.

The blocks are traced and differentiated as for the compiler, whose code is not made: that takes minutes.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_trainer.common.files import read_json_object
from lora_trainer.network.compiling import CompiledBlocks
from tests.fakes.runs import Toy, contents, events, last_state, problems, toy, trajectory
from tests.fakes.trainee import compiled_calls

SETTINGS: dict[str, Any] = {
    "adapter__kind": "oft",
    "adapter__targets": "attention",
    "data__validation_fraction": 0.0,
    "hardware__compile": "blocks",
    "logging__trackers": [],
    "output__measure": False,
    "sampling__every_steps": 0,
    "train__batch_size": 1,
}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The calls of compiled blocks in each run of a test."""
    found: list[list[int]] = []

    def make(*args: Any, **kwargs: Any) -> CompiledBlocks:
        blocks = CompiledBlocks(*args, backend="aot_eager", **kwargs)
        found.append(compiled_calls(blocks))
        kept = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        assert kept.parent.name == "compiled" and kept.parent.parent.name == "cache"
        return blocks

    torch.compiler.reset()  # else shapes that other tests compiled count towards the limit of this one
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr("lora_trainer.run.session.CompiledBlocks", make)
    return found


@pytest.fixture
def place(tmp_path: Path) -> Toy:
    """Images of one shape, on a tiny base."""
    return toy(tmp_path, images=1).with_base()


def went_on(place: Toy, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Go on from the state of step 2 with a copy of the run; return its folder and what it said."""
    copied = place.copy(folder)
    shutil.rmtree(last_state(copied.run))
    (copied.run / "toy.safetensors").unlink()
    assert copied.train("--resume", steps=4, **SETTINGS) == 0
    (resumed,) = events(copied.run, "resumed")
    assert resumed["step"] == 2
    return copied.run, resumed


def test_a_run_with_compiled_blocks_goes_on_exactly(
    place: Toy, made: list[list[int]], tmp_path: Path
) -> None:
    assert place.train(steps=4, **SETTINGS) == 0
    assert len(made[0]) == 4 * len({*made[0]}), "every pass of every step, and nothing else"
    record = read_json_object(place.run / "run.json")
    assert record["settings"]["hardware.compile"] == "blocks"
    assert record["environment"]["exactness"]["compiler"]
    run, resumed = went_on(place, tmp_path / "resumed")
    assert resumed["exactness"] == "EXACT", resumed["differences"]
    assert len(made[1]) == 2 * len({*made[0]})
    assert trajectory(run) == trajectory(place.run)
    assert contents(last_state(run)) == contents(last_state(place.run))


def test_a_run_whose_compiler_fails_is_the_one_without_and_says_so(
    place: Toy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(_: Any, __: Any) -> Any:
        raise OSError("no compiler")

    tried: list[CompiledBlocks] = []

    def make(*args: Any, **kwargs: Any) -> CompiledBlocks:
        tried.append(CompiledBlocks(*args, backend=broken, **kwargs))
        return tried[-1]

    monkeypatch.setattr("lora_trainer.run.session.CompiledBlocks", make)
    assert place.train(steps=4, **SETTINGS) == 0
    (said,) = (row for row in problems(place.run) if "compiled blocks" in row["what"])
    assert "no compiler" in said["what"] and "hardware.compile=none" in said["fix"]
    changes = [row for row in events(place.run, "change") if row["key"] == "hardware.compile"]
    assert [(row["old"], row["new"]) for row in changes] == [("blocks", "none")]
    run, _ = went_on(place, tmp_path / "resumed")
    assert len(tried) == 1, "a resumed run does not try again"
    assert contents(last_state(run)) == contents(last_state(place.run))
    assert place.train("--name", "plain", steps=4, **SETTINGS | {"hardware__compile": "none"}) == 0
    assert trajectory(place.runs / "plain") == trajectory(place.run)
