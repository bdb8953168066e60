"""Noise, targets, errors and weights of the loss against diffusers and the papers' formulas in float64."""

from __future__ import annotations

import math
from typing import Any, get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.training_utils import compute_loss_weighting_for_sd3
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lora_trainer.config.declare import FLOW_WEIGHTINGS, SNR_WEIGHTINGS, LossName
from lora_trainer.config.learning import ObjectiveSettings
from lora_trainer.families.base import Prediction
from lora_trainer.training.loss import (
    ERRORS,
    MAX_DEBIASED_SNR,
    add_noise,
    draw_noise,
    loss_delta,
    loss_weight,
    sample_losses,
    target,
)

SCHEDULER = DDPMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)
TIMESTEPS = torch.tensor([0, 1, 250, 600, 999])
SIGNAL = SCHEDULER.alphas_cumprod.double()
LEVEL = (
    SCHEDULER.alphas_cumprod[TIMESTEPS].sqrt(),
    (1 - SCHEDULER.alphas_cumprod[TIMESTEPS]).sqrt(),
)
PREDICTIONS = pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def pair() -> tuple[Tensor, Tensor]:
    source = generator()
    return torch.randn(5, 4, 6, 8, generator=source), torch.randn(5, 4, 6, 8, generator=source)


# ---- noise and target


def test_noise_and_targets_are_those_of_the_scheduler() -> None:
    latents, drawn = pair()
    close = torch.testing.assert_close
    close(add_noise(latents, drawn, *LEVEL), SCHEDULER.add_noise(latents, drawn, TIMESTEPS))
    velocity = SCHEDULER.get_velocity(latents, drawn, TIMESTEPS)
    close(target(latents, drawn, *LEVEL, "v_prediction"), velocity)
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


def noise(seed: int = 0, *, offset: float = 0.0, octaves: int = 0) -> Tensor:
    return draw_noise((4, 64, 64), generator(seed), offset=offset, octaves=octaves, discount=0.6)


def test_octaves_and_offset_are_added_to_one_draw_of_randn() -> None:
    source = generator()
    plain = torch.randn((4, 64, 64), generator=source)
    assert torch.equal(noise(), plain)
    coarse = torch.randn((1, 4, 32, 32), generator=source)
    mixed = plain + 0.6 * F.interpolate(coarse, size=(64, 64), mode="bilinear")[0]
    torch.testing.assert_close(noise(octaves=1), mixed / mixed.std())
    source = generator()
    torch.randn((4, 64, 64), generator=source)
    shift = 0.1 * torch.randn((4, 1, 1), generator=source)  # a constant per channel
    torch.testing.assert_close(noise(offset=0.1), plain + shift)


@pytest.mark.parametrize("octaves", [1, 3, 16])
def test_multires_noise_has_unit_variance_and_is_coarser(octaves: int) -> None:
    coarse = noise(octaves=octaves)
    assert float(coarse.std()) == pytest.approx(1.0, abs=1e-5)
    neighbours = [
        float((drawn[:, :, 1:] * drawn[:, :, :-1]).mean() / drawn.square().mean())
        for drawn in (noise(), coarse)
    ]
    assert neighbours[0] == pytest.approx(0.0, abs=0.03) and neighbours[1] > 0.06


# ---- errors


def test_losses_are_per_sample_means_in_float32() -> None:
    predicted = torch.zeros(2, 4, 2, 2, dtype=torch.bfloat16)
    wanted = torch.stack([torch.full((4, 2, 2), 1.0), torch.full((4, 2, 2), 3.0)])
    wanted[0, 0, 0, 0] = 5.0
    losses = sample_losses(predicted, wanted)
    assert losses.dtype == torch.float32
    assert losses.tolist() == [(15 * 1 + 25) / 16, 9.0]
    wide = torch.full((1, 1, 4, 4), 300.0, dtype=torch.float16)
    assert float(sample_losses(wide, torch.zeros_like(wide))) == 90_000.0, "no overflow"


@given(error=st.floats(-1e3, 1e3), delta=st.floats(1e-2, 10.0))
def test_errors_are_those_of_their_papers_and_of_other_trainers(error: float, delta: float) -> None:
    """sd-scripts' conditional_loss and OneTrainer's log-cosh, in float64."""
    assert list(ERRORS) == list(get_args(LossName))
    exact = torch.tensor(error, dtype=torch.float64)
    root = math.hypot(error, delta) - delta
    for name, wanted in {
        "mse": error**2,
        "huber": 2 * delta * root,
        "smooth_l1": 2 * root,
        "log_cosh": float(exact + F.softplus(-2.0 * exact) - math.log(2.0)),
    }.items():
        found = sample_losses(
            torch.tensor([[error]]),
            torch.zeros(1, 1),
            loss=name,
            delta=torch.tensor([delta]),  # type: ignore[arg-type]
        )
        assert float(found) == pytest.approx(wanted, rel=1e-4, abs=2e-7), name


def test_pseudo_huber_keeps_the_digits_of_small_errors_and_each_sample_has_its_delta() -> None:
    small = sample_losses(
        torch.tensor([[1e-3]]), torch.zeros(1, 1), loss="huber", delta=torch.tensor([0.5])
    )
    assert float(small) == pytest.approx(1e-6, rel=1e-3)
    predicted, wanted = pair()
    deltas = torch.tensor([0.1, 0.2, 0.5, 1.0, 5.0])
    together = sample_losses(predicted, wanted, loss="huber", delta=deltas)
    for index in range(5):
        row = slice(index, index + 1)
        alone = sample_losses(predicted[row], wanted[row], loss="huber", delta=deltas[row])
        assert float(together[index]) == pytest.approx(float(alone), rel=1e-6)


# ---- weights


def settings_of(**values: Any) -> ObjectiveSettings:
    return ObjectiveSettings.model_validate(values)


def weight(signal: float, prediction: Prediction = "epsilon", **values: Any) -> float:
    return loss_weight(
        settings_of(**values), signal=signal, sigma=math.sqrt(1 - signal), prediction=prediction
    )


def flow_weight(sigma: float, kind: str) -> float:
    return loss_weight(settings_of(weighting=kind), signal=None, sigma=sigma, prediction="flow")


@given(signal=st.floats(1e-4, 0.9999), gamma=st.floats(0.1, 100.0))
def test_snr_weights_are_those_of_the_papers(signal: float, gamma: float) -> None:
    """Of the loss of predicted noise, and of v, whose loss is (SNR + 1) / SNR times that."""
    snr = np.float64(signal) / (1 - np.float64(signal))
    wanted = {
        "min_snr": np.minimum(snr, gamma) / snr,
        "soft_min_snr": gamma / (snr + gamma),
        "debiased": 1 / np.sqrt(np.clip(snr, 1 / MAX_DEBIASED_SNR, MAX_DEBIASED_SNR)),
        "p2": 1 / (1 + snr) ** np.float64(0.7),
        "none": np.float64(1.0),
    }
    for kind, epsilon in wanted.items():
        values = {"weighting": kind, "min_snr_gamma": gamma, "p2_gamma": 0.7}
        assert weight(signal, **values) == pytest.approx(float(epsilon), rel=1e-9), kind
        velocity = epsilon if kind == "none" else epsilon * snr / (snr + 1)
        found = weight(signal, "v_prediction", **values)
        assert found == pytest.approx(float(velocity), rel=1e-9), kind
    auto = weight(signal, min_snr_gamma=gamma)
    assert auto == weight(signal, weighting="min_snr", min_snr_gamma=gamma)
    assert weight(signal, min_snr_gamma=None) == 1.0


@pytest.mark.parametrize("kind", SNR_WEIGHTINGS)
@PREDICTIONS
@given(signal=st.floats(0.0, 1.0, exclude_max=True))
def test_weights_by_snr_are_finite_everywhere(
    kind: str, prediction: Prediction, signal: float
) -> None:
    assert 0 <= weight(signal, prediction, weighting=kind) < 32


@pytest.mark.parametrize("kind", SNR_WEIGHTINGS)
def test_at_zero_terminal_snr_weights_are_their_limits_and_less_noise_weighs_less(
    kind: str,
) -> None:
    """0/0 for epsilon; v has weight 0 where there is no signal."""
    limit = math.sqrt(MAX_DEBIASED_SNR) if kind == "debiased" else 1.0
    assert weight(0.0, weighting=kind) == pytest.approx(limit)
    assert weight(0.0, "v_prediction", weighting=kind) == 0.0
    assert weight(1.0, weighting=kind) >= 0.0, "no noise at all is no division by zero"
    found = [weight(signal, weighting=kind) for signal in SIGNAL.tolist()]
    assert found == sorted(found) and found[0] < 0.2 * found[-1]


@pytest.mark.parametrize("kind", FLOW_WEIGHTINGS)
def test_flow_weights_are_those_of_diffusers_and_finite(kind: str) -> None:
    sigmas = np.linspace(0.001, 0.999, 37)
    wanted = compute_loss_weighting_for_sd3(kind, torch.from_numpy(sigmas)).tolist()
    found = [flow_weight(float(sigma), kind) for sigma in sigmas]
    assert found == pytest.approx(wanted, rel=1e-6)
    assert all(0 < flow_weight(sigma, kind) <= 1e6 for sigma in (0.0, 1e-9, 1.0))


# ---- the delta of Huber's error


def delta(signal: float, time: float, **values: Any) -> float:
    return loss_delta(
        settings_of(**values), time=time, alpha=math.sqrt(signal), sigma=math.sqrt(1 - signal)
    )


@pytest.mark.parametrize("loss", ["huber", "smooth_l1"])
@given(lowest=st.floats(0.01, 1.0), index=st.integers(0, 999))
def test_deltas_are_those_of_sd_scripts(loss: str, lowest: float, index: int) -> None:
    signal, time = float(SIGNAL[index]), index / 1000
    sigma = np.sqrt((1 - np.float64(signal)) / np.float64(signal))
    wanted = {
        "constant": lowest,
        "exponential": np.exp(np.log(lowest) * time),
        "snr": (1 - lowest) / (1 + sigma) ** 2 + lowest,
    }
    for schedule, value in wanted.items():
        values = {"loss": loss, "huber_delta": lowest, "huber_schedule": schedule}
        assert delta(signal, time, **values) == pytest.approx(float(value), rel=1e-9), schedule
        at_noise = lowest if schedule != "constant" else value
        assert delta(0.0, 1.0, **values) == pytest.approx(float(at_noise)), "pure noise"
