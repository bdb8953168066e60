"""Whole runs in which a means of fitting or speed fails: tried once more plainly, the same numbers, said once.

Each fault is what a GPU, a driver or a library may do that the processor does not: the mechanism raises.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lora_trainer.checkpoint.states import ADAPTER, OPTIMIZER_TENSORS, STATE
from lora_trainer.common.errors import MachineError
from lora_trainer.config.declare import KEEP_ATTENTION
from lora_trainer.network.block_swap import Streamed
from lora_trainer.network.gradient_checkpointing import BlockRunner
from lora_trainer.network.pinned_memory import CopyStream
from lora_trainer.planning import plan
from lora_trainer.planning.memory_choice import MemoryChooser
from lora_trainer.training import loop, step
from tests.fakes.family_bases import base_of, facts_at, side_of
from tests.fakes.runs import Toy, events, last_state, problems, toy, trajectory

pytestmark = pytest.mark.timeout(300)  # a loaded machine is no failure
FAULT = "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"
Patch = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    made = toy(tmp_path_factory.mktemp("plain"))
    shutil.copytree(base_of("flux"), made.base)
    return made


@pytest.fixture(autouse=True)
def _streams_on_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    stream_on_a_processor(monkeypatch)


def stream_on_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        MemoryChooser, "_streamable", property(lambda self: len(self.inputs.costs.blocks))
    )
    monkeypatch.setattr(plan, "unmet_needs", lambda config, **machine: ())


def train(place: Toy, name: str, *more: str, code: int = 0, **settings: Any) -> Path:
    side_px = side_of(facts_at(place.base))
    found = place.train(
        "--name", name, *more, data__resolution=side_px, output__precision="fp32", **settings
    )
    assert found == code
    return place.runs / name


def fault(*_: object, **__: object) -> Any:
    raise RuntimeError(FAULT)


def keeping_fails(monkeypatch: pytest.MonkeyPatch, failing: Callable[..., Any] = fault) -> None:
    """The dispatch mode of blocks that keep some results; a plan traces them on `meta`."""
    real = BlockRunner.__call__

    def call(self: BlockRunner, block: nn.Module, *args: Any) -> Any:
        keeps = self._kind in KEEP_ATTENTION
        return failing() if keeps and not args[0].is_meta else real(self, block, *args)

    monkeypatch.setattr(BlockRunner, "__call__", call)


def copies_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that run beside the computation."""
    real = CopyStream.__init__

    def made(self: Any, device: torch.device, *, beside: bool = True) -> None:
        real(self, device, beside=beside)
        if beside:
            self.copy = fault

    monkeypatch.setattr(CopyStream, "__init__", made)


PLAIN: Mapping[str, Any] = {
    "memory__gradient_checkpointing": "full",
    "memory__base_precision": "int8",
    "sampling__every_steps": 4,
    "train__validate_every_steps": 4,
}
MEANS: Mapping[str, tuple[dict[str, Any], Patch, str]] = {
    "light": (
        {"memory__gradient_checkpointing": "light"},
        keeping_fails,
        "memory.gradient_checkpointing=full",
    ),
    "selective": (
        {"memory__gradient_checkpointing": "selective"},
        keeping_fails,
        "memory.gradient_checkpointing=full",
    ),
    "streamed": (
        {"memory__streamed_blocks": 3},
        copies_fail,
        "copies of streamed blocks=when due",
    ),
}
EVERYTHING: Mapping[str, Any] = {
    "memory__gradient_checkpointing": "selective",
    "memory__streamed_blocks": 3,
}


@pytest.fixture(scope="module")
def plain(place: Toy) -> Path:
    """A run that starts plainly."""
    with pytest.MonkeyPatch.context() as patched:
        stream_on_a_processor(patched)
        return train(place, "plain", **PLAIN)


def retries(run: Path) -> list[str]:
    return [row["what"] for row in problems(run) if "not for lack of memory" in row["what"]]


def same_result(one: Path, other: Path) -> None:
    assert trajectory(one) == trajectory(other) != []
    for file in (ADAPTER, OPTIMIZER_TENSORS):
        first, second = load_file(last_state(one) / file), load_file(last_state(other) / file)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first), file


@pytest.mark.parametrize("name", MEANS)
def test_a_mechanism_that_fails_is_done_without_and_the_numbers_are_those_of_a_plain_run(
    name: str, place: Toy, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of any of them was the end of the run, with a traceback."""
    settings, patch, changed = MEANS[name]
    patch(monkeypatch)
    run = train(place, name, **{**PLAIN, **settings})
    same_result(run, plain)
    (said,) = retries(run)
    assert FAULT in said and changed in said
    keys = [(row["key"], row["reason"]) for row in events(run, "change")]
    assert keys and all(FAULT in reason for _, reason in keys)
    assert FAULT in (run / "report.html").read_text(encoding="utf-8")
    state = json.loads((last_state(run) / STATE).read_text(encoding="utf-8"))
    assert '"plain", true' in json.dumps(state) or '"plain": true' in json.dumps(state)


def test_all_at_once_and_an_interrupted_run_goes_on_plainly(
    place: Toy, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _, patch, _ in MEANS.values():
        patch(monkeypatch)
    real, calls = loop.judge_step, 0

    def failing(*args: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise MachineError("the plug was pulled", fix="put it back")
        return real(*args)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(loop, "judge_step", failing)
        broken = train(place, "broken", code=4, **{**PLAIN, **EVERYTHING})
    assert len(retries(broken)) == 1
    resumed = train(place, "broken", "--resume", **{**PLAIN, **EVERYTHING})
    assert len(retries(resumed)) == 1, "it was tried again"
    same_result(resumed, plain)


def test_two_errors_end_the_run_with_both_reasons(
    place: Toy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keeping_fails(monkeypatch)

    def broken(*_: object, **__: object) -> Any:
        raise ValueError("this base is not as it should be")

    real = step.forward_backward

    def second(training: Any, batch: Any) -> Any:
        return broken() if training.plain.first_error else real(training, batch)

    monkeypatch.setattr(step, "forward_backward", second)
    train(place, "twice", code=5, **{**PLAIN, "memory__gradient_checkpointing": "light"})
    said = capsys.readouterr().err
    assert FAULT in said and "ValueError: this base is not as it should be" in said


def test_an_error_in_a_plain_run_is_what_it_was(
    place: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no other way to compute it: nothing is tried twice, and nothing hidden."""
    calls = 0

    def broken(*_: object) -> Any:
        nonlocal calls
        calls += 1
        raise ValueError("this base is not as it should be")

    monkeypatch.setattr(step, "forward_backward", broken)
    for kind in ("none", "full"):
        with pytest.raises(ValueError, match="not as it should be"):
            train(place, f"plain-{kind}", **{**PLAIN, "memory__gradient_checkpointing": kind})
    assert calls == 2


def test_a_later_error_is_no_matter_of_the_way(place: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once passes of a shape have made an optimizer step, what fails is something else."""
    real, seen = step.forward_backward, set[Any]()

    def broken(training: Any, batch: Any) -> Any:
        count, *shape = batch.latents.shape
        key = (*shape, count, 0, False)
        if key in seen and training.plain.proven >= {key}:
            raise RuntimeError(FAULT)
        seen.add(key)
        return real(training, batch)

    monkeypatch.setattr(step, "forward_backward", broken)
    with pytest.raises(RuntimeError, match="EXECUTION_FAILED"):
        train(place, "late", **{**PLAIN, "memory__gradient_checkpointing": "light"})
    assert retries(place.runs / "late") == []


def test_a_lost_device_is_not_asked_again_and_the_settings_to_try_are_named(
    place: Toy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = 0

    def lost(*_: object, **__: object) -> Any:
        nonlocal calls
        calls += 1
        raise RuntimeError("CUDA error: device-side assert triggered\nCUDA kernel errors might be")

    keeping_fails(monkeypatch, lost)
    train(place, "lost", code=5, **{**PLAIN, "memory__gradient_checkpointing": "light"})
    said = capsys.readouterr().err
    assert calls == 1 and "device-side assert triggered" in said
    assert "--resume" in said and "--set memory.gradient_checkpointing=full" in said


def test_streamed_blocks_are_there_when_they_are_due(place: Toy, plain: Path) -> None:
    """The fakes above prove nothing if blocks were not streamed."""
    loads = 0
    real = Streamed._load

    def counting(self: Streamed, index: int) -> Any:
        nonlocal loads
        loads += 1
        return real(self, index)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Streamed, "_load", counting)
        run = train(place, "counted", **{**PLAIN, "memory__streamed_blocks": 3})
    assert loads > 0
    same_result(run, plain)
