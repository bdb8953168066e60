"""Convolutions in another way are the same training, and the first steps find the fastest way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import nn

from lora_trainer.common.errors import MachineError
from lora_trainer.config.declare import ConvolutionWay
from lora_trainer.network.convolutions import Convolutions
from lora_trainer.planning.known_convolutions import MOST_STEPS, TIMED_STEPS, TURN_STEPS
from lora_trainer.training.convolution_trial import LEAST_GAIN, WAYS, ConvolutionTrial
from lora_trainer.training.loop import train_steps
from tests.fakes.training import (
    SQUARE,
    WIDE,
    TinyTraining,
    at_start,
    awaken,
    build_feeder,
    build_training,
    distance,
)

# Of one size: the first step of a way is not timed.
STEPS = (2 * TIMED_STEPS + 1) * len(WAYS) + 2


def layouts(network: nn.Module) -> set[bool]:
    """Return whether weights of frozen 3x3 convolutions have the channels last, those that are."""
    weights = [
        module.weight
        for module in network.modules()
        if isinstance(module, nn.Conv2d)
        and module.kernel_size == (3, 3)
        and not module.weight.requires_grad
    ]
    assert len(weights) > 10
    return {weight.is_contiguous(memory_format=torch.channels_last) for weight in weights}


@dataclass(kw_only=True)
class Compared:
    """A training whose first steps compare the ways; a step takes as long as `seconds` says of its way."""

    seconds: Mapping[ConvolutionWay, float]
    sizes: tuple[Any, ...] = (SQUARE,) * 4
    steps: int = STEPS
    remember: Callable[[ConvolutionWay, float], None] | None = None
    remembered: list[tuple[ConvolutionWay, float]] = field(default_factory=list)
    flags: list[tuple[ConvolutionWay, bool]] = field(default_factory=list)
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.tiny = build_training(build_feeder(list(self.sizes)), steps=self.steps)
        awaken(self.tiny.adapter)
        self.network = self.tiny.training.model.denoiser
        self.convolutions = Convolutions(self.network)
        self.trial = ConvolutionTrial(
            convolutions=self.convolutions,
            events=self.tiny.training.events,
            remember=self.remember or (lambda *found: self.remembered.append(found)),
            clock=lambda: self.now_s,
        )
        self.network.register_forward_hook(self._passed)

    def _passed(self, *_: Any) -> None:
        way = self.convolutions.way
        self.now_s += self.seconds[way]
        self.flags.append((way, torch.backends.cudnn.benchmark))

    def train(self, **more: Any) -> TinyTraining:
        ways: Any = {"convolutions": self.convolutions, "actions": (self.trial,), **more}
        train_steps(replace(self.tiny.training, **ways), at_start(micro_batch=4))
        return self.tiny

    @property
    def changes(self) -> list[dict[str, Any]]:
        return self.tiny.of_kind("change")


SECONDS: Mapping[ConvolutionWay, float] = {
    "plain": 1.0,
    "channels_last": 0.9,
    "benchmark": 0.95,
    "both": 1.2,
}


def test_the_first_steps_find_the_fastest_way_and_the_training_is_the_same() -> None:
    compared = Compared(seconds=SECONDS)
    found = compared.train()
    assert compared.convolutions.way == "channels_last" and layouts(compared.network) == {True}
    (change,) = compared.changes
    assert (change["key"], change["old"], change["new"]) == (
        "hardware.convolutions",
        "fastest",
        "channels_last",
    )
    assert change["reason"] == (
        "what the ways save of a plain step: channels_last 10.0%, benchmark 5.0%, both -20.0%"
    )
    assert compared.remembered == [("channels_last", pytest.approx(0.1))]
    # A way's first step is not timed: a turn of the first round has one step more.
    first = [way for way, _ in compared.flags]
    assert first[: TIMED_STEPS + 1] == ["plain"] * (TIMED_STEPS + 1)
    assert first[TIMED_STEPS + 1] == "channels_last"
    assert [way for way, is_on in compared.flags if is_on] == [
        way for way, _ in compared.flags if way in ("benchmark", "both")
    ]
    assert not torch.backends.cudnn.benchmark, "outside of steps nothing is timed by cuDNN"
    plain = build_training(build_feeder([SQUARE] * 4), steps=STEPS)
    awaken(plain.adapter)
    train_steps(plain.training, at_start(micro_batch=4))
    assert found.losses == pytest.approx(plain.losses, rel=1e-4)
    assert distance([*found.adapter.state().values()], [*plain.adapter.state().values()]) < 1e-3


def test_what_does_not_save_enough_is_left() -> None:
    almost = 1 - LEAST_GAIN / 2
    compared = Compared(seconds={**SECONDS, "channels_last": almost, "benchmark": 1.1})
    compared.train()
    assert compared.convolutions.way == "plain" and layouts(compared.network) == {False}
    assert compared.changes[0]["reason"].startswith("no other way saves 3% of a step")
    assert compared.remembered == [("plain", 0.0)], "the next run need not compare"


def test_a_program_that_ends_during_the_comparison_makes_no_way_faster() -> None:
    """What follows the first third of the steps takes half of the time."""
    compared = Compared(seconds=dict.fromkeys(WAYS, 1.0))

    def beside(*_: Any) -> None:
        compared.now_s += 1.0 if len(compared.flags) < STEPS // 3 else 0.0

    compared.network.register_forward_pre_hook(beside)
    compared.train()
    assert compared.convolutions.way == "plain"
    assert compared.remembered == [("plain", 0.0)]


def test_the_first_step_of_a_size_is_not_timed() -> None:
    """There cuDNN tries its algorithms, which takes seconds: here all of the time that `both` has."""
    compared = Compared(
        seconds={**SECONDS, "both": 0.5}, sizes=(SQUARE, WIDE) * 4, steps=MOST_STEPS
    )
    known = set[tuple[ConvolutionWay, torch.Size]]()
    begins = compared.convolutions.on_pass

    def slow(shape: torch.Size) -> None:
        begins(shape)
        if (compared.convolutions.way, shape) not in known:
            known.add((compared.convolutions.way, shape))
            compared.now_s += 100.0

    compared.convolutions.on_pass = slow
    compared.train()
    assert len(known) > 2 * len(WAYS) - 1 and compared.convolutions.way == "both"
    ((_, saves),) = compared.remembered
    assert saves == pytest.approx(0.5, abs=0.2)


def test_a_lack_of_memory_ends_the_comparison_in_the_plain_way() -> None:
    compared = Compared(seconds=SECONDS)
    calls = 0

    def short(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3 * TURN_STEPS // 2:
            raise torch.OutOfMemoryError("CUDA out of memory")

    compared.network.register_forward_pre_hook(short)
    compared.train()
    assert compared.convolutions.way == "plain" and compared.remembered == []
    own = [change for change in compared.changes if change["key"] == "hardware.convolutions"]
    assert [change["reason"] for change in own] == [
        "a step had to do with less memory or in the plain way"
    ]


def test_a_full_disk_costs_no_more_than_another_comparison() -> None:
    def refused(*_: Any) -> None:
        raise MachineError("No space left on device", fix="free some")

    compared = Compared(seconds=SECONDS, remember=refused)
    compared.train()
    assert compared.convolutions.way == "channels_last"
    (note,) = compared.tiny.of_kind("problem")
    assert "No space left on device" in note["what"] and note["severity"] == "note"
