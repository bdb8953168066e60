"""Noise, targets, errors and weights of the loss against diffusers and the papers' formulas in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.training_utils import compute_loss_weighting_for_sd3
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor, nn

from lora_trainer.common.randomness import Stream, draw_seed
from lora_trainer.config.learning import ObjectiveSettings
from lora_trainer.config.losses import LOSSES
from lora_trainer.families.base.facts import Prediction
from lora_trainer.families.base.noise_levels import Level
from lora_trainer.training.dataloader import Sample
from lora_trainer.training.loss import Model
from tests.fakes.training import CPU, build_feeder

SCHEDULER = DDPMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012)
TIMESTEPS = torch.tensor([0, 1, 250, 600, 999])
SIGNAL = SCHEDULER.alphas_cumprod.double()
SNR_WEIGHTINGS = ("min_snr", "soft_min_snr", "debiased", "p2")
MOST_SNR = 1000.0
"""Debiased weights take no larger SNR, and none smaller than one over that."""


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def at(signal: float, time: float = 0.5) -> Level:
    """Return the level of a table at this alpha-bar; `time` is the share of the timesteps."""
    alpha, sigma = math.sqrt(signal), math.sqrt(1 - signal)
    return Level(timestep=1000 * time, alpha=alpha, sigma=sigma, signal=signal)


def flow_at(sigma: float) -> Level:
    return Level(timestep=1000 * sigma, alpha=1 - sigma, sigma=sigma, signal=None)


def pair() -> tuple[Tensor, Tensor]:
    source = generator()
    return torch.randn(5, 4, 6, 8, generator=source), torch.randn(5, 4, 6, 8, generator=source)


def samples(latents: Tensor, noise: Tensor, levels: Sequence[Level], **more: Any) -> list[Sample]:
    rows = zip(latents, noise, levels, strict=True)
    return [
        Sample(sample="s", latents=x, noise=e, level=level, weight=7.0, conditioning={}, **more)
        for x, e, level in rows
    ]


def losses(
    batch: Sequence[Sample], answer: Callable[[Tensor], Tensor], prediction: Prediction = "epsilon"
) -> Tensor:
    """Return the unweighted losses where a denoiser answers so for its input."""
    model = Model(
        denoiser=nn.Identity(),
        predict=lambda _denoiser, noisy, _timesteps, _conditioning: answer(noisy),
        embed=lambda conditioning: conditioning,
        prediction=prediction,
        precision=torch.float32,
        device=CPU,
    )
    return model.losses(batch)


# ---- noise and target


def test_noise_and_targets_are_those_of_the_scheduler() -> None:
    latents, drawn = pair()
    velocity = SCHEDULER.get_velocity(latents, drawn, TIMESTEPS)
    targets: dict[Prediction, Tensor] = {"epsilon": drawn, "v_prediction": velocity}
    batch = samples(latents, drawn, [at(signal) for signal in SIGNAL[TIMESTEPS].tolist()])
    # With a perturbation the input has another noise than the target.
    other = torch.randn(drawn.shape, generator=generator(1))
    perturbed = [replace(s, input_noise=extra) for s, extra in zip(batch, other, strict=True)]
    for prediction, wanted in targets.items():
        for each, its_noise in ((batch, drawn), (perturbed, other)):
            noisy = SCHEDULER.add_noise(latents, its_noise, TIMESTEPS)

            def answer(given: Tensor, wanted: Tensor = wanted, noisy: Tensor = noisy) -> Tensor:
                torch.testing.assert_close(given, noisy)
                return wanted + 1.0

            assert losses(each, answer, prediction).tolist() == pytest.approx([1.0] * 5, rel=1e-5)


def test_flow_noise_and_target_are_those_of_the_flow_scheduler() -> None:
    latents, drawn = pair()
    scheduler = FlowMatchEulerDiscreteScheduler()
    timesteps = scheduler.timesteps[torch.tensor([0, 1, 400, 900, 999])]
    sigmas = (timesteps / 1000).view(-1, 1, 1, 1)

    def answer(noisy: Tensor) -> Tensor:
        torch.testing.assert_close(noisy, scheduler.scale_noise(latents, timesteps, drawn))
        # Along the straight path: the way to the image over the noise level.
        return (noisy - latents) / sigmas + 1.0

    batch = samples(latents, drawn, [flow_at(sigma) for sigma in sigmas.flatten().tolist()])
    assert losses(batch, answer, "flow").tolist() == pytest.approx([1.0] * 5, rel=1e-2)


# ---- errors


def test_losses_are_per_sample_means_in_float32() -> None:
    wanted = torch.stack([torch.full((4, 2, 2), 1.0), torch.full((4, 2, 2), 3.0)])
    wanted[0, 0, 0, 0] = 5.0
    batch = samples(torch.zeros(2, 4, 2, 2), wanted, [at(0.5)] * 2)
    found = losses(batch, lambda noisy: torch.zeros_like(noisy, dtype=torch.bfloat16))
    assert found.dtype == torch.float32
    assert found.tolist() == [(15 * 1 + 25) / 16, 9.0]
    still = samples(torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 4, 4), [at(0.5)])
    wide = losses(still, lambda noisy: torch.full_like(noisy, 300.0, dtype=torch.float16))
    assert float(wide) == 90_000.0, "no overflow"


def error_of(difference: float, **more: Any) -> float:
    still = samples(torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1), [at(0.5)], **more)
    return float(losses(still, lambda noisy: torch.full_like(noisy, difference)))


@given(error=st.floats(-1e3, 1e3), delta=st.floats(1e-2, 10.0))
def test_errors_are_those_of_their_papers_and_of_other_trainers(error: float, delta: float) -> None:
    """sd-scripts' conditional_loss and OneTrainer's log-cosh, in float64."""
    exact = torch.tensor(error, dtype=torch.float64)
    root = math.hypot(error, delta) - delta
    wanted = {
        "mse": error**2,
        "huber": 2 * delta * root,
        "smooth_l1": 2 * root,
        "log_cosh": float(exact + F.softplus(-2.0 * exact) - math.log(2.0)),
    }
    for name, value in wanted.items():
        found = error_of(error, loss=name, delta=delta)
        assert found == pytest.approx(value, rel=1e-4, abs=2e-7), name


@pytest.mark.parametrize("name", LOSSES)
def test_every_error_is_even_grows_from_zero_and_has_a_gradient_everywhere(name: str) -> None:
    distances = [0.0, 1e-6, 1e-3, 0.1, 1.0, 30.0, 1e3]
    found = [error_of(distance, loss=name, delta=0.3) for distance in distances]
    assert found[0] == 0.0 and found == sorted(found) and all(map(math.isfinite, found))
    assert found[3:] == [error_of(-distance, loss=name, delta=0.3) for distance in distances[3:]]
    at = torch.tensor([-2.0, 0.0, 2.0], requires_grad=True)
    LOSSES[name].formula(at, torch.tensor(0.3)).sum().backward()
    assert at.grad is not None
    below, zero, above = at.grad.tolist()
    assert below == -above < 0.0 == zero


def test_an_error_function_that_is_not_there_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValidationError, match=r"not an error function: .*log_cosh.*smooth_l1"):
        ObjectiveSettings.model_validate({"loss": "smooth_l2"})


def test_pseudo_huber_keeps_the_digits_of_small_errors_and_each_sample_has_its_delta() -> None:
    assert error_of(1e-3, loss="huber", delta=0.5) == pytest.approx(1e-6, rel=1e-3)
    latents, drawn = pair()
    batch = [
        sample
        for row, delta in enumerate((0.1, 0.2, 0.5, 1.0, 5.0))
        for sample in samples(
            latents[row : row + 1], drawn[row : row + 1], [at(0.5)], loss="huber", delta=delta
        )
    ]
    alone = [float(losses([sample], torch.zeros_like)) for sample in batch]
    assert losses(batch, torch.zeros_like).tolist() == pytest.approx(alone, rel=1e-6)


def test_what_is_masked_out_does_not_count_and_the_rest_counts_as_much_as_all() -> None:
    noise, zeros, half = torch.ones(2, 3, 2, 2), torch.zeros(2, 3, 2, 2), torch.zeros(1, 2, 2)
    noise[..., 1] = 5.0
    half[..., 0] = 2.0
    (masked,) = samples(zeros[:1], noise[:1], [at(0.5)], mask_weights=half)
    (whole,) = samples(zeros[1:], noise[1:], [at(0.5)])
    assert losses([masked, whole], torch.zeros_like).tolist() == [1.0, 13.0]
    assert losses([whole], torch.zeros_like).tolist() == [13.0]


# ---- what the dataloader draws and weighs


def drawn(level: Level, prediction: Prediction = "epsilon", **objective: Any) -> Sample:
    feeder = build_feeder(
        [(4, 64, 64)] if "shape" in objective else [(1, 1, 1)],
        objective=ObjectiveSettings.model_validate(
            {name: value for name, value in objective.items() if name != "shape"}
        ),
        levels=SimpleNamespace(draw=lambda uniform, size_px: level),
        prediction=prediction,
    )
    return feeder.prepare_sample(0, "s0")


def noise(*, offset: float = 0.0, octaves: int = 0) -> Tensor:
    return drawn(
        at(0.5),
        shape="wide",
        noise_offset=offset,
        multires_noise_iterations=octaves,
        multires_noise_discount=0.6,
    ).noise


def source() -> torch.Generator:
    """Return the generator of the noise of that sample."""
    return generator(draw_seed(5, Stream.NOISE, 0, "s0"))


def test_octaves_and_offset_are_added_to_one_draw_of_randn() -> None:
    own = source()
    plain = torch.randn((4, 64, 64), generator=own)
    assert torch.equal(noise(), plain)
    coarse = torch.randn((1, 4, 32, 32), generator=own)
    mixed = plain + 0.6 * F.interpolate(coarse, size=(64, 64), mode="bilinear")[0]
    torch.testing.assert_close(noise(octaves=1), mixed / mixed.std())
    assert torch.equal(noise(octaves=10), noise(octaves=6)), "the seventh would be a constant again"
    own = source()
    torch.randn((4, 64, 64), generator=own)
    shift = 0.1 * torch.randn((4, 1, 1), generator=own)  # a constant per channel
    torch.testing.assert_close(noise(offset=0.1), plain + shift)


def weight(signal: float, prediction: Prediction = "epsilon", **values: Any) -> float:
    return drawn(at(signal), prediction, **values).weight


def flow_weight(sigma: float, kind: str) -> float:
    return drawn(flow_at(sigma), "flow", weighting=kind).weight


@given(signal=st.floats(1e-4, 0.9999), gamma=st.floats(0.1, 100.0))
def test_snr_weights_are_those_of_the_papers(signal: float, gamma: float) -> None:
    """Of the loss of predicted noise, and of v, whose loss is (SNR + 1) / SNR times that."""
    snr = np.float64(signal) / (1 - np.float64(signal))
    wanted = {
        "min_snr": np.minimum(snr, gamma) / snr,
        "soft_min_snr": gamma / (snr + gamma),
        "debiased": 1 / np.sqrt(np.clip(snr, 1 / MOST_SNR, MOST_SNR)),
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
def test_at_zero_terminal_snr_weights_are_their_limits_and_less_noise_weighs_less(
    kind: str,
) -> None:
    """0/0 for epsilon; v has weight 0 where there is no signal."""
    limit = math.sqrt(MOST_SNR) if kind == "debiased" else 1.0
    assert weight(0.0, weighting=kind) == pytest.approx(limit)
    assert weight(0.0, "v_prediction", weighting=kind) == 0.0
    assert weight(1.0, weighting=kind) >= 0.0, "no noise at all is not a division by zero"
    found = [weight(signal, weighting=kind) for signal in SIGNAL[::37].tolist()]
    assert found == sorted(found) and 0 <= found[0] < 0.2 * found[-1] < 32


@pytest.mark.parametrize("kind", ["sigma_sqrt", "cosmap"])
def test_flow_weights_are_those_of_diffusers_and_finite(kind: str) -> None:
    sigmas = np.linspace(0.001, 0.999, 37)
    wanted = compute_loss_weighting_for_sd3(kind, torch.from_numpy(sigmas)).tolist()
    found = [flow_weight(float(sigma), kind) for sigma in sigmas]
    assert found == pytest.approx(wanted, rel=1e-6)
    assert all(0 < flow_weight(sigma, kind) <= 1e6 for sigma in (0.0, 1e-9, 1.0))


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
        found = drawn(at(signal, time), **values).delta
        assert found == pytest.approx(float(value), rel=1e-9), schedule
        at_noise = lowest if schedule != "constant" else value
        assert drawn(at(0.0, 1.0), **values).delta == pytest.approx(float(at_noise)), "pure noise"
