"""Loss weights and Huber deltas per noise level as pure functions, each with its paper.

SNR is alpha^2 / sigma^2 = signal / (1 - signal), with alpha-bar of Ho et al. 2020 (arXiv 2006.11239) as
`signal`. The papers define SNR weights for the loss of predicted noise. The loss of v is (SNR + 1) / SNR
times as large, so a weight for v is SNR / (SNR + 1) = signal times the weight for noise. Torch-free.
"""

from __future__ import annotations

import math

from lora_trainer.config import ObjectiveSettings, Weighting
from lora_trainer.families.base import Prediction

MAX_DEBIASED_SNR = 1000.0
"""Debiased weights, 1 / sqrt(SNR), use an SNR clamped to [1 / this, this]. sd-scripts clamps at the top
only; at zero-terminal SNR the weight would then be infinite."""
MIN_WEIGHED_SIGMA = 1e-3
"""Lowest sigma of the weight sigma^-2 (`sigma_sqrt`): that of a sampler's table of 1000 steps."""


def loss_weight(
    settings: ObjectiveSettings, *, signal: float | None, sigma: float, prediction: Prediction
) -> float:
    """Return the weight of a sample's loss; `signal` is None for flow matching."""
    kind = settings.chosen_weighting
    if kind == "none":
        return 1.0
    if signal is None:
        return flow_weight(kind, sigma)
    weight = noise_weight(kind, snr_of(signal), settings)
    return weight * signal if prediction == "v_prediction" else weight


def snr_of(signal: float) -> float:
    """Return the signal-to-noise ratio of a level with alpha-bar `signal`; infinite without noise."""
    return signal / (1.0 - signal) if signal < 1.0 else math.inf


def noise_weight(kind: Weighting, snr: float, settings: ObjectiveSettings) -> float:
    """Return the weight of the loss of predicted noise; finite at SNR 0 too.

    The usual form of min-SNR, min(SNR, gamma) / SNR, is 0 / 0 at zero-terminal SNR.

    min_snr: Hang et al. 2023, arXiv 2303.09556; soft_min_snr: Crowson et al. 2024, arXiv 2401.11605;
    debiased: Yu et al. 2023, arXiv 2310.08442; p2: Choi et al. 2022, arXiv 2204.00227, with k = 1.
    """
    gamma = settings.min_snr_gamma
    match kind:
        case "min_snr" if gamma is not None:
            return gamma / snr if snr > gamma else 1.0
        case "soft_min_snr" if gamma is not None:
            return gamma / (snr + gamma)
        case "debiased":
            return 1.0 / math.sqrt(min(max(snr, 1.0 / MAX_DEBIASED_SNR), MAX_DEBIASED_SNR))
        case "p2":
            return math.pow(1.0 + snr, -settings.p2_gamma)
    raise AssertionError(f"{kind} is no weighting by SNR")


def flow_weight(kind: Weighting, sigma: float) -> float:
    """Return the weight of the loss of a predicted velocity (Esser et al. 2024, arXiv 2403.03206)."""
    match kind:
        case "sigma_sqrt":
            return max(sigma, MIN_WEIGHED_SIGMA) ** -2
        case "cosmap":
            return 2.0 / (math.pi * (1.0 - 2.0 * sigma + 2.0 * sigma * sigma))
    raise AssertionError(f"{kind} is no weighting of flow matching")


def huber_delta(settings: ObjectiveSettings, *, time: float, alpha: float, sigma: float) -> float:
    """Return the error at which a sample's loss turns from squared to linear; infinite for squared loss.

    `time` is in [0, 1]. The schedules are those of sd-scripts (Khrapov et al. 2024, arXiv 2403.16728):
    exponential and snr fall from 1 without noise to `huber_delta` at pure noise.
    """
    lowest = settings.huber_delta
    if settings.loss == "mse":
        return math.inf
    match settings.huber_schedule:
        case "constant":
            return lowest
        case "exponential":
            return float(lowest**time)
        case "snr":
            # The paper's 1 / (1 + sigma / alpha), rearranged because alpha is 0 at pure noise.
            return (1.0 - lowest) * (alpha / (alpha + sigma)) ** 2 + lowest
