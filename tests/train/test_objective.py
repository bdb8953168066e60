"""The formulas of the objective against diffusers and against the papers' formulas written anew."""

from __future__ import annotations

import math
from typing import get_args

import pytest
import torch
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.config.config import LossName
from lora_trainer.training.loss import ERRORS, add_noise, draw_noise, sample_losses, target

SCHEDULER = DDPMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)
TIMESTEPS = torch.tensor([0, 1, 250, 600, 999])
SIGNAL = SCHEDULER.alphas_cumprod[TIMESTEPS]
LEVEL = (SIGNAL.sqrt(), (1 - SIGNAL).sqrt())


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    source = generator()
    return torch.randn(5, 4, 6, 8, generator=source), torch.randn(5, 4, 6, 8, generator=source)


def noise(seed: int = 0, *, offset: float = 0.0, octaves: int = 0, px: int = 64) -> torch.Tensor:
    return draw_noise((4, px, px), generator(seed), offset=offset, octaves=octaves, discount=0.6)


def test_add_noise_is_that_of_the_scheduler() -> None:
    latents, drawn = pair()
    wanted = SCHEDULER.add_noise(latents, drawn, TIMESTEPS)
    torch.testing.assert_close(add_noise(latents, drawn, *LEVEL), wanted)


def test_the_v_target_is_that_of_the_scheduler() -> None:
    latents, drawn = pair()
    wanted = SCHEDULER.get_velocity(latents, drawn, TIMESTEPS)
    torch.testing.assert_close(target(latents, drawn, *LEVEL, "v_prediction"), wanted)


def test_the_epsilon_target_is_the_noise() -> None:
    latents, drawn = pair()
    assert torch.equal(target(latents, drawn, *LEVEL, "epsilon"), drawn)


def test_flow_noise_and_target_are_those_of_the_flow_scheduler() -> None:
    latents, drawn = pair()
    scheduler = FlowMatchEulerDiscreteScheduler()
    timesteps = scheduler.timesteps[torch.tensor([0, 1, 400, 900, 999])]
    sigma = timesteps / 1000
    noisy = add_noise(latents, drawn, 1 - sigma, sigma)
    torch.testing.assert_close(noisy, scheduler.scale_noise(latents, timesteps, drawn))
    wanted = target(latents, drawn, 1 - sigma, sigma, "flow")
    step = 0.25 * sigma.view(-1, 1, 1, 1)  # along the straight path, velocity times the way
    nearer = add_noise(latents, drawn, 1 - 0.75 * sigma, 0.75 * sigma)
    torch.testing.assert_close(noisy - step * wanted, nearer)


def test_plain_noise_is_one_draw_of_randn() -> None:
    assert torch.equal(noise(3), torch.randn((4, 64, 64), generator=generator(3)))


@pytest.mark.parametrize("octaves", [1, 3, 16])
def test_multires_noise_has_unit_variance_and_is_coarser(octaves: int) -> None:
    plain, coarse = noise(), noise(octaves=octaves)
    assert float(coarse.std()) == pytest.approx(1.0, abs=1e-5)
    assert neighbour_correlation(plain) == pytest.approx(0.0, abs=0.03)
    assert neighbour_correlation(coarse) > 0.06


def neighbour_correlation(drawn: torch.Tensor) -> float:
    return float((drawn[:, :, 1:] * drawn[:, :, :-1]).mean() / drawn.square().mean())


def test_octaves_are_added_to_the_plain_noise() -> None:
    """The first draw is the plain noise; what is added is constant over no more than its octave."""
    one, plain = noise(octaves=1), noise()
    coarse = torch.randn((1, 4, 32, 32), generator=after_plain())
    wide = torch.nn.functional.interpolate(coarse, size=(64, 64), mode="bilinear")[0]
    mixed = plain + 0.6 * wide
    torch.testing.assert_close(one, mixed / mixed.std())


def after_plain() -> torch.Generator:
    source = generator()
    torch.randn((4, 64, 64), generator=source)
    return source


def test_noise_offset_shifts_each_channel_by_its_own_constant() -> None:
    shift = noise(offset=0.1) - noise()
    assert float(shift.std(dim=(1, 2)).max()) < 1e-6
    constants = shift[:, 0, 0]
    torch.testing.assert_close(
        constants, 0.1 * torch.randn(4, 1, 1, generator=after_plain())[:, 0, 0]
    )
    assert len(set(constants.tolist())) == 4


def test_the_offset_variance_is_its_square() -> None:
    shifts = torch.stack(
        [(noise(seed, offset=0.5, px=2) - noise(seed, px=2)) for seed in range(400)]
    )
    assert float(shifts.std()) == pytest.approx(0.5, rel=0.05)


def test_losses_are_per_sample_means_in_float32() -> None:
    predicted = torch.zeros(2, 4, 2, 2, dtype=torch.bfloat16)
    wanted = torch.stack([torch.full((4, 2, 2), 1.0), torch.full((4, 2, 2), 3.0)])
    wanted[0, 0, 0, 0] = 5.0
    losses = sample_losses(predicted, wanted)
    assert losses.dtype == torch.float32
    assert losses.tolist() == [(15 * 1 + 25) / 16, 9.0]


def test_half_precision_losses_do_not_overflow() -> None:
    wide = torch.full((1, 1, 4, 4), 300.0, dtype=torch.float16)
    assert math.isclose(float(sample_losses(wide, torch.zeros_like(wide))), 90_000.0)


@given(error=st.floats(-1e3, 1e3), delta=st.floats(1e-3, 10.0))
def test_pseudo_huber_is_its_formula(error: float, delta: float) -> None:
    found = sample_losses(
        torch.tensor([[error]]),
        torch.zeros(1, 1),
        loss="huber",
        delta=torch.tensor([delta], dtype=torch.float64),
    )
    wanted = 2 * delta * (math.hypot(error, delta) - delta)
    assert float(found) == pytest.approx(wanted, rel=1e-4, abs=1e-9)


def test_pseudo_huber_is_squared_near_zero_and_linear_far_away() -> None:
    predicted = torch.tensor([[1e-3], [100.0], [200.0]])
    small, one, two = sample_losses(
        predicted, torch.zeros(3, 1), loss="huber", delta=torch.full((3,), 0.5)
    ).tolist()
    assert small == pytest.approx(1e-6, rel=1e-3)
    assert two - one == pytest.approx(2 * 0.5 * 100.0, rel=1e-4)


def test_each_sample_has_its_own_delta() -> None:
    predicted, wanted = pair()
    deltas = torch.tensor([0.1, 0.2, 0.5, 1.0, 5.0])
    together = sample_losses(predicted, wanted, loss="huber", delta=deltas)
    for index in range(5):
        alone = sample_losses(
            predicted[index : index + 1],
            wanted[index : index + 1],
            loss="huber",
            delta=deltas[index : index + 1],
        )
        assert float(together[index]) == pytest.approx(float(alone), rel=1e-6)


def test_the_gradient_of_pseudo_huber_is_bounded_and_zero_at_zero() -> None:
    predicted = torch.tensor([[0.0], [3e4]], requires_grad=True)
    sample_losses(
        predicted, torch.zeros(2, 1), loss="huber", delta=torch.full((2,), 0.25)
    ).sum().backward()
    assert predicted.grad is not None
    assert predicted.grad.flatten().tolist() == pytest.approx([0.0, 0.5], rel=1e-5)


def test_every_loss_that_can_be_chosen_has_its_error_function() -> None:
    assert list(ERRORS) == list(get_args(LossName))


@given(error=st.floats(-1e3, 1e3), delta=st.floats(1e-2, 1.0))
def test_smooth_l1_and_log_cosh_are_those_of_other_trainers(error: float, delta: float) -> None:
    """sd-scripts' conditional_loss "smooth_l1" and OneTrainer's log-cosh, both in float64."""
    difference = torch.tensor([[error]])
    zero, deltas = torch.zeros(1, 1), torch.tensor([delta])
    smooth = sample_losses(difference, zero, loss="smooth_l1", delta=deltas)
    wanted = 2 * (math.hypot(error, delta) - delta)
    assert float(smooth) == pytest.approx(wanted, rel=1e-4, abs=1e-7)
    exact = torch.tensor(error, dtype=torch.float64)
    theirs = exact + torch.nn.functional.softplus(-2.0 * exact) - math.log(2.0)
    found = sample_losses(difference, zero, loss="log_cosh", delta=deltas)
    assert float(found) == pytest.approx(float(theirs), rel=1e-5, abs=2e-7)


def test_the_gradient_of_log_cosh_is_tanh() -> None:
    predicted = torch.tensor([[0.0], [0.01], [-2.0], [3e4]], requires_grad=True)
    sample_losses(predicted, torch.zeros(4, 1), loss="log_cosh").sum().backward()
    assert predicted.grad is not None
    wanted = torch.tanh(predicted.detach()).flatten().tolist()
    assert predicted.grad.flatten().tolist() == pytest.approx(wanted, rel=1e-4)
