"""The noise of a sample: its values, and how much an error at its level counts.

The levels are those of `families/base/noise_levels`. SNR is alpha^2 / sigma^2 = signal / (1 - signal), with alpha-bar
of Ho et al. as `signal`. The papers define SNR weights for the loss of predicted noise. The loss of v is
(SNR + 1) / SNR times as large, so a weight for v is SNR / (SNR + 1) = signal times the weight for noise.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from lora_trainer.config.learning import ObjectiveSettings
from lora_trainer.families.base.facts import Prediction
from lora_trainer.families.base.noise_levels import TIMESTEPS, Level


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


def contrast(objective: ObjectiveSettings, level: Level) -> float:
    """Return by how much the target is moved away from the prediction for the empty prompt; 1: not at all."""
    if objective.contrast_schedule == "constant":
        return objective.contrast_scale
    return 1.0 + (objective.contrast_scale - 1.0) * level.sigma


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
