"""When a run is said to learn nothing: exact zeros only, and losses that stay where they were."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from lora_trainer.training.guards import GuardState, Unstable, after_rollback, from_plain, to_plain
from lora_trainer.training.learning_check import (
    LOOK_IMAGES,
    LOOK_STEPS,
    ZERO_STEPS,
    Learning,
    LearningContext,
    after_gradient,
    least_change,
    look_step,
    without_effect,
    without_gradients,
    without_movement,
)

ABOUT = LearningContext(device="cpu", rate=1e-4, rate_sum=1e-2, loss_scale=None)


def test_only_zeros_in_a_row_count() -> None:
    learning = Learning()
    for _ in range(ZERO_STEPS - 1):
        learning = after_gradient(learning, norm=0.0)
    assert learning.zero_gradients == ZERO_STEPS - 1
    assert after_gradient(learning, norm=0.0).zero_gradients == ZERO_STEPS
    assert after_gradient(learning, norm=1e-30).zero_gradients == 0


@pytest.mark.parametrize(
    ("steps", "batch_size", "look"),
    [
        (1000, 1, 200),
        (399, 1, None),  # too short to be half-way after 200 images
        (400, 1, 200),
        (100, 4, 50),
        (99, 4, None),
        (5000, 1, 1000),
    ],
)
def test_a_look_takes_enough_images_steps_and_a_share_of_the_run(
    steps: int, batch_size: int, look: int | None
) -> None:
    assert look_step(steps=steps, batch_size=batch_size) == look
    if look is not None:
        assert look * batch_size >= LOOK_IMAGES
        assert look >= LOOK_STEPS


def test_the_band_that_changed_most_counts_and_what_is_still_to_come() -> None:
    assert least_change([1.0, 0.5], [1.0, 0.5], so_far=0.2) == 0
    assert least_change([1.0, 0.5], [1.001, 0.45], so_far=1.0) == pytest.approx(0.1)
    assert least_change([1.0, 0.5], [1.0, 0.4999], so_far=0.1) == pytest.approx(2e-3)
    assert least_change([0.0], [0.0], so_far=1.0) == 0


def test_what_is_known_travels_in_the_resume_state_and_outlives_a_rollback() -> None:
    known = GuardState(micro_batch=1, learning=Learning(zero_gradients=3, base=[0.1, 1 / 3]))
    assert from_plain(json.loads(json.dumps(to_plain(known)))) == known
    back = after_rollback(GuardState(micro_batch=1), Unstable("it exploded", known))
    assert back.learning == Learning(base=[0.1, 1 / 3])
    old = to_plain(known)
    del old["learning"]  # a state of an older version
    assert from_plain(old).learning == Learning()


@pytest.mark.parametrize(
    ("about", "loss", "cause", "setting"),
    [
        (replace(ABOUT, reached=False), 0.1, "no trained layer takes part", "adapter.targets"),
        (ABOUT, 1e-25, "weights of the loss", "objective."),
        (replace(ABOUT, loss_scale=65536.0), 0.1, "fp16", "train.precision=bf16"),
        (replace(ABOUT, device="mps"), 0.1, "MPS", "hardware.device=cpu"),
        (ABOUT, 0.1, "do not change what the base predicts", "adapter.targets"),
    ],
)
def test_zero_gradients_name_their_cause(
    about: LearningContext, loss: float, cause: str, setting: str
) -> None:
    error = without_gradients(25, about, loss=loss)
    assert cause in error.found
    assert setting in error.fix
    assert error.exit_code == 5


@pytest.mark.parametrize(
    ("about", "cause", "setting"),
    [
        (
            replace(ABOUT, rate=1e-50, rate_sum=0.0),
            "1e-50, is too small",
            "optimizer.learning_rate",
        ),
        (replace(ABOUT, device="mps"), "MPS", "hardware.device=cpu"),
        (ABOUT, "optimizer does not change", "optimizer.name"),
    ],
)
def test_weights_that_stay_name_their_cause(
    about: LearningContext, cause: str, setting: str
) -> None:
    error = without_movement(25, about)
    assert cause in error.found
    assert setting in error.fix


def test_losses_that_stay_name_their_cause() -> None:
    low = without_effect(200, replace(ABOUT, rate=1e-9), change=1e-7)
    assert "1e-09, is far too low" in low.found
    scaled = without_effect(200, replace(ABOUT, alpha_over_rank=1e-6), change=1e-7)
    assert "adapter.alpha" in scaled.found
