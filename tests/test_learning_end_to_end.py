"""Runs that learn nothing stop with exit code 5 and name why; runs that learn, however little, go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_trainer.training import guards, step
from lora_trainer.training.guards import LEAST_CHANGE, ZERO_STEPS
from lora_trainer.training.training import Training
from tests.fakes.runs import SQUARES_PX, Toy, events, toy

QUIET: dict[str, Any] = {
    "output__save_every_steps": 0,
    "sampling__every_steps": 0,
    "train__validate_every_steps": 0,
    "logging__trackers": [],
    "output__measure": False,
}
LOOKED_AT: dict[str, Any] = {
    **QUIET,
    "train__batch_size": 4,
    "memory__micro_batch": 4,
    "steps": 100,
}
SOON: dict[str, Any] = {**LOOKED_AT, "steps": 40}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return toy(tmp_path_factory.mktemp("learning"), sizes=SQUARES_PX).with_base()


@pytest.fixture
def other(place: Toy, tmp_path: Path) -> Toy:
    """The same place with runs of its own."""
    place.runs.mkdir(exist_ok=True)
    return place.copy(tmp_path / "runs")


@pytest.fixture
def looked_at_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look after 20 steps in place of 50, when a run has learned less."""
    monkeypatch.setattr(guards, "LOOK_STEPS", 20)
    monkeypatch.setattr(guards, "LOOK_IMAGES", 80)


def ended(other: Toy) -> str:
    """Return why the run stopped, which must be exit code 5."""
    (row,) = events(other.run, "stopped")
    assert row["exit_code"] == 5
    return str(row["reason"])


def without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every pass give gradients of exact zeros."""
    whole: Callable[..., torch.Tensor] = step.forward_backward

    def vanishing(training: Training, *arguments: Any) -> torch.Tensor:
        loss = whole(training, *arguments)
        for parameter in training.parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()
        return loss

    monkeypatch.setattr(step, "forward_backward", vanishing)


def test_a_rate_that_is_zero_to_32_bits(other: Toy) -> None:
    assert other.train(steps=40, optimizer__learning_rate=1e-50, **QUIET) == 5
    reason = ended(other)
    assert f"after {ZERO_STEPS} steps with gradients the adapter is as it began" in reason
    assert "the learning rate, 1e-50, is too small" in reason
    assert "optimizer.learning_rate=1e-4" in reason


def test_weights_of_the_loss_that_vanish(other: Toy) -> None:
    """Hardly any noise, and p2 at its steepest: (1 + SNR)^-10."""
    settings = {
        "objective__weighting": "p2",
        "objective__p2_gamma": 10,
        "objective__min_timestep": 0,
        "objective__max_timestep": 0,
    }
    assert other.train(steps=40, **settings, **QUIET) == 5
    reason = ended(other)
    assert "the gradients of 25 steps, up to step 25, are all zero" in reason
    assert "the weights of the loss" in reason


@pytest.mark.parametrize(
    ("precision", "cause"),
    [("fp32", "do not change what the base predicts"), ("fp16", "too small for fp16")],
)
def test_gradients_that_are_zero(
    other: Toy, monkeypatch: pytest.MonkeyPatch, precision: str, cause: str
) -> None:
    without_gradients(monkeypatch)
    assert other.train(steps=40, train__precision=precision, **QUIET) == 5
    assert cause in ended(other)


def test_an_optimizer_that_changes_nothing(other: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on some releases for Apple's MPS, where every lora_B stayed zero."""
    monkeypatch.setattr(torch.optim.AdamW, "step", lambda self, closure=None: None)
    assert other.train(steps=40, optimizer__name="adamw", **QUIET) == 5
    assert "the optimizer does not change its weights" in ended(other)


def test_a_rate_far_too_low(other: Toy) -> None:
    assert other.train(optimizer__learning_rate=1e-9, **LOOKED_AT) == 5
    reason = ended(other)
    assert "after 50 steps the loss is as it was at the start" in reason
    assert "the learning rate, 1e-09, is far too low" in reason


def test_an_alpha_far_too_low(other: Toy) -> None:
    assert other.train(adapter__alpha=1e-6, **LOOKED_AT) == 5
    assert "adapter.alpha / adapter.rank" in ended(other)


def test_a_run_that_learns_slowly_goes_on(other: Toy) -> None:
    assert other.train(optimizer__learning_rate=1e-5, **LOOKED_AT) == 0
    (row,) = events(other.run, "learned")
    assert row["step"] == 50
    assert row["change"] > 3 * LEAST_CHANGE


@pytest.mark.usefixtures("looked_at_soon")
@pytest.mark.parametrize(
    "settings",
    [
        {"optimizer__warmup_fraction": 0.5, "optimizer__schedule": "cosine"},
        {"adapter__text_encoder": True, "optimizer__learning_rate_pattern": {"^denoiser": 0}},
        {"adapter__kind": "loha"},
        {"adapter__kind": "lokr"},
        {"adapter__kind": "oft"},
        {"train__precision": "bf16"},
    ],
    ids=str,
)
def test_what_learns_goes_on(other: Toy, settings: dict[str, Any]) -> None:
    assert other.train(**{**SOON, **settings}) == 0
    (row,) = events(other.run, "learned")
    assert row["step"] == 20
    assert row["change"] > 3 * LEAST_CHANGE


@pytest.mark.usefixtures("looked_at_soon")
def test_an_optimizer_that_finds_its_rate_may_begin_slowly(other: Toy) -> None:
    assert other.train(optimizer__name="prodigy", optimizer__learning_rate=1.0, **SOON) == 0
    assert not events(other.run, "learned")


@pytest.mark.usefixtures("looked_at_soon")
def test_a_run_stopped_and_resumed_still_compares_with_its_start(other: Toy) -> None:
    short = {**SOON, "optimizer__learning_rate": 1e-9, "output__save_every_steps": 8}
    assert other.train(**short) == 5
    assert other.train("--resume", **short) == 5
    assert "far too low" in ended(other)


@pytest.mark.usefixtures("looked_at_soon")
def test_a_short_run_is_not_looked_at(other: Toy) -> None:
    assert other.train(**{**SOON, "steps": 39, "optimizer__learning_rate": 1e-9}) == 0
    assert not events(other.run, "learned")
