"""The noise of a sample: its level, its values, and how much an error at that level counts.

A level is a pure function of one uniform random number. It fixes alpha and sigma in noisy = alpha x + sigma
noise, and the timestep that the denoiser gets. Bases that predict noise or v have a table of 1000 levels (Ho et
al. 2020, arXiv 2006.11239); flow matching has a continuum (Lipman et al. 2022, arXiv 2210.02747; alpha =
1 - sigma, timestep = 1000 sigma).

SNR is alpha^2 / sigma^2 = signal / (1 - signal), with alpha-bar of Ho et al. as `signal`. The papers define SNR
weights for the loss of predicted noise. The loss of v is (SNR + 1) / SNR times as large, so a weight for v
is SNR / (SNR + 1) = signal times the weight for noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from lora_trainer.config.learning import ObjectiveSettings
from lora_trainer.families.base.facts import BaseFacts, Prediction

TIMESTEPS = 1000
# (width, height) in pixels.
Size = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Level:
    """One noise level; `signal` is alpha-bar = alpha^2 (with alpha^2 + sigma^2 = 1), None for flow matching."""

    timestep: float
    alpha: float
    sigma: float
    signal: float | None


@dataclass(frozen=True, kw_only=True)
class Levels:
    """The noise levels of a base: random ones for training, evenly spaced ones for validation.

    `draw(uniform, size_px=...)` is the level for a uniform number in [0, 1), by the sampling density and the
    shift of the settings; `at(fraction)` the one at a fraction of the timesteps in (0, 1).
    """

    draw: Callable[..., Level]
    at: Callable[[float], Level]


def levels_of(facts: BaseFacts, settings: ObjectiveSettings) -> Levels:
    """Return the levels that a base is trained at."""
    if facts.release.prediction != "flow":
        return table_levels(facts.release.alphas_cumprod().tolist(), settings)
    return flow_levels(
        settings, base_shift=lambda size: facts.flow_shift(width_px=size[0], height_px=size[1])
    )


def table_levels(signal: Sequence[float], settings: ObjectiveSettings) -> Levels:
    """Return the levels of a base with a table of alpha-bar per timestep."""
    density = _density(settings)
    last = min(settings.max_timestep, len(signal) - 1)
    first = min(settings.min_timestep, last)
    count = last - first + 1

    def level(timestep: int) -> Level:
        # float32 like the tensors that alpha and sigma multiply, so that they equal the scheduler's values.
        exact, rounded = signal[timestep], np.float32(signal[timestep])
        alpha, sigma = float(np.sqrt(rounded)), float(np.sqrt(np.float32(1) - rounded))
        return Level(timestep=timestep, alpha=alpha, sigma=sigma, signal=exact)

    def draw(uniform: float, *, size_px: Size) -> Level:
        # A density below 1 may round to 1.0, and the index would be one past the last timestep.
        return level(first + min(int(density(uniform) * count), count - 1))

    return Levels(draw=draw, at=lambda fraction: level(int(fraction * len(signal))))


def flow_levels(settings: ObjectiveSettings, *, base_shift: Callable[[Size], float]) -> Levels:
    """Return the levels of a flow-matching base; `base_shift` is the shift s its sampler uses at a size.

    sigma = s t / (1 + (s - 1) t) for a t drawn by the density (Esser et al. 2024, arXiv 2403.03206, section
    5.3.2), then mapped linearly from (0, 1) to the range of timesteps. s > 1 moves training to higher noise.
    """
    density, fixed = _density(settings), settings.flow_shift
    lowest, highest = settings.min_timestep / TIMESTEPS, (settings.max_timestep + 1) / TIMESTEPS

    def level(sigma: float) -> Level:
        return Level(timestep=TIMESTEPS * sigma, alpha=1.0 - sigma, sigma=sigma, signal=None)

    def draw(uniform: float, *, size_px: Size) -> Level:
        # One shift per size and not per batch: a sample's level must not depend on the images beside it.
        factor = base_shift(size_px) if fixed == "resolution" else float(fixed)
        time = density(uniform)
        shifted = factor * time / (1.0 + (factor - 1.0) * time)
        return level(lowest + (highest - lowest) * shifted)

    return Levels(draw=draw, at=level)


def _density(settings: ObjectiveSettings) -> Callable[[float], float]:
    """Return the quantile function that maps a uniform number to t in (0, 1) (Esser et al. 2024, section 3.1)."""

    def mode(uniform: float) -> float:
        # It falls from 1 to 0.
        u, scale = _midpoint(uniform), settings.mode_scale
        return 1.0 - u - scale * (math.cos(0.5 * math.pi * u) ** 2 - 1.0 + u)

    match settings.timestep_sampling:
        case "uniform":
            return _midpoint
        case "mode":
            return mode
        case "cosmap":
            return lambda uniform: 1.0 - 1.0 / (math.tan(0.5 * math.pi * _midpoint(uniform)) + 1.0)
        case "sigmoid":
            normal = NormalDist(0.0, 1.0)
        case "logit_normal":
            normal = NormalDist(settings.logit_mean, settings.logit_std)
    return lambda uniform: 1.0 / (1.0 + math.exp(-normal.inv_cdf(_midpoint(uniform))))


def _midpoint(uniform: float) -> float:
    """Clamp a draw off 0 and 1, where the normal quantile is infinite; at 0 there is no noise to learn."""
    return min(max(uniform, 2.0**-40), 1.0 - 2.0**-40)


# ---- the values of the noise, and how much an error counts


def draw_noise(
    shape: Sequence[int], generator: torch.Generator, settings: ObjectiveSettings
) -> Tensor:
    """Draw one sample's float32 noise [C, H, W].

    `noise_offset` adds a constant per channel (Guttenberg 2023, "Diffusion with offset noise");
    `multires_noise_iterations` add coarser noise, each `multires_noise_discount` times weaker, rescaled to unit
    variance (Whitaker 2023, "Multi-resolution noise"). With both 0 the base noise is the same draw, so runs with
    and without them can be compared.
    """
    (channels, height, width), offset = shape, settings.noise_offset
    octaves, discount = settings.multires_noise_iterations, settings.multires_noise_discount
    noise = torch.randn(shape, generator=generator)
    for octave in range(1, octaves + 1):
        size = (math.ceil(height / 2**octave), math.ceil(width / 2**octave))
        coarse = torch.randn((1, channels, *size), generator=generator)
        noise += discount**octave * F.interpolate(coarse, size=(height, width), mode="bilinear")[0]
        if size == (1, 1):  # a constant: coarser octaves would add the same again
            break
    if octaves:
        # Before the offset: dividing by the deviation after it would shrink the offset too.
        noise /= noise.std()
    if offset:
        noise += offset * torch.randn((channels, 1, 1), generator=generator)
    return noise


# Debiased weights, 1 / sqrt(SNR), use an SNR clamped to [1 / this, this]. sd-scripts clamps at the top only; at
# zero-terminal SNR the weight would then be infinite.
MAX_DEBIASED_SNR = 1000.0
# Lowest sigma of the weight sigma^-2 (`sigma_sqrt`): that of a sampler's table of 1000 steps.
MIN_WEIGHED_SIGMA = 1e-3


def loss_weight(settings: ObjectiveSettings, level: Level, prediction: Prediction) -> float:
    """Return the weight of a sample's loss at its noise level. Finite at SNR 0 too.

    min_snr: Hang et al. 2023, arXiv 2303.09556; soft_min_snr: Crowson et al. 2024, arXiv 2401.11605;
    debiased: Yu et al. 2023, arXiv 2310.08442; p2: Choi et al. 2022, arXiv 2204.00227, with k = 1;
    sigma_sqrt and cosmap, for flow matching: Esser et al. 2024, arXiv 2403.03206.
    """
    kind, gamma = settings.chosen_weighting, settings.min_snr_gamma
    signal, sigma = level.signal, level.sigma
    if kind == "none":
        return 1.0
    if signal is None and kind == "sigma_sqrt":
        return max(sigma, MIN_WEIGHED_SIGMA) ** -2
    if signal is None and kind == "cosmap":
        return 2.0 / (math.pi * (1.0 - 2.0 * sigma + 2.0 * sigma * sigma))
    assert signal is not None, f"{kind} is a weighting by SNR"
    snr = signal / (1.0 - signal) if signal < 1.0 else math.inf
    match kind:
        case "min_snr" if gamma is not None:
            # The usual form, min(SNR, gamma) / SNR, is 0 / 0 at zero-terminal SNR.
            weight = gamma / snr if snr > gamma else 1.0
        case "soft_min_snr" if gamma is not None:
            weight = gamma / (snr + gamma)
        case "debiased":
            weight = 1.0 / math.sqrt(min(max(snr, 1.0 / MAX_DEBIASED_SNR), MAX_DEBIASED_SNR))
        case "p2":
            weight = math.pow(1.0 + snr, -settings.p2_gamma)
        case _:
            raise AssertionError(f"{kind} is not a weighting by SNR")
    # At a fixed noisy input an error of v is the error of the noise divided by alpha (Salimans & Ho 2022,
    # arXiv 2202.00512, appendix D), so its square weighs alpha-bar as much.
    return weight * signal if prediction == "v_prediction" else weight


def loss_delta(settings: ObjectiveSettings, level: Level) -> float:
    """Return the delta of a sample's error function at its noise level.

    The schedules are those of sd-scripts (Khrapov et al. 2024, arXiv 2403.16728): exponential and snr fall
    from 1 without noise to `huber_delta` at pure noise. Error functions without a delta ignore it.
    """
    lowest = settings.huber_delta
    match settings.huber_schedule:
        case "constant":
            return lowest
        case "exponential":
            return float(lowest ** (level.timestep / TIMESTEPS))
        case "snr":
            # The paper's 1 / (1 + sigma / alpha), rearranged because alpha is 0 at pure noise.
            signal_share = level.alpha / (level.alpha + level.sigma)
            return (1.0 - lowest) * signal_share**2 + lowest
