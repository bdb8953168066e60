"""Noise, targets, errors and loss weights of diffusion training as pure functions, each with its paper.

Noise, targets and errors of diffusion training as pure functions, each with its paper.

The loss of a sample is the mean over its elements of error(prediction - target), where noisy latents are
the network's input and `target` depends on what the base predicts. Timesteps and weights are drawn in
timesteps.py and loss.py.

Notation: noisy = alpha latents + sigma noise (Ho et al. 2020, arXiv 2006.11239); latents and noise
are [B, C, H, W]; per-sample quantities are [B].

Loss weights and Huber deltas per noise level as pure functions, each with its paper.

SNR is alpha^2 / sigma^2 = signal / (1 - signal), with alpha-bar of Ho et al. 2020 (arXiv 2006.11239) as
`signal`. The papers define SNR weights for the loss of predicted noise. The loss of v is (SNR + 1) / SNR
times as large, so a weight for v is SNR / (SNR + 1) = signal times the weight for noise. Torch-free.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lora_trainer.config.config import ObjectiveSettings, Weighting
from lora_trainer.families.base import Prediction


def add_noise(latents: Tensor, noise: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
    """Return alpha latents + sigma noise (Ho et al. 2020, equation 4; alpha = 1 - sigma in flow matching)."""
    return _per_sample(alpha, latents) * latents + _per_sample(sigma, latents) * noise


def target(
    latents: Tensor, noise: Tensor, alpha: Tensor, sigma: Tensor, prediction: Prediction
) -> Tensor:
    """Return the target of the denoiser's prediction, [B, C, H, W].

    epsilon: the noise; v: alpha noise - sigma latents (Salimans & Ho 2022, arXiv 2202.00512); flow: the
    velocity noise - latents (Lipman et al. 2022, arXiv 2210.02747, from data to noise).
    """
    if prediction == "epsilon":
        return noise
    if prediction == "flow":
        return noise - latents
    return _per_sample(alpha, latents) * noise - _per_sample(sigma, latents) * latents


def draw_noise(
    shape: tuple[int, int, int],
    generator: torch.Generator,
    *,
    offset: float,
    octaves: int,
    discount: float,
) -> Tensor:
    """Draw one sample's float32 noise [C, H, W].

    `offset` adds a constant per channel (Guttenberg 2023, "Diffusion with offset noise"); `octaves`
    adds coarser noise, each `discount` times weaker, rescaled to unit variance (Whitaker 2023,
    "Multi-resolution noise"). With both 0 the base noise is the same draw, so runs with and without
    them can be compared.
    """
    channels, height, width = shape
    noise = torch.randn(shape, generator=generator)
    for octave in range(1, octaves + 1):
        size = (math.ceil(height / 2**octave), math.ceil(width / 2**octave))
        coarse = torch.randn((1, channels, *size), generator=generator)
        noise += discount**octave * F.interpolate(coarse, size=(height, width), mode="bilinear")[0]
        if size == (1, 1):
            break
    if octaves:
        noise /= noise.std()
    if offset:
        noise += offset * torch.randn((channels, 1, 1), generator=generator)
    return noise


def sample_losses(
    predicted: Tensor,
    targets: Tensor,
    *,
    delta: Tensor | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    """Return the float32 mean error of each sample over its own elements, [B].

    `counts` [B, 1, H, W] are the weights of a mask, with a mean of 1 over each sample: masked positions
    count less, while each sample counts as much as without a mask.

    The error is squared without `delta` [B]; else it is pseudo-Huber, 2 delta (sqrt(d^2 + delta^2) - delta)
    (Song & Dhariwal 2023, arXiv 2310.14189, at the scale of sd-scripts): d^2 near 0, 2 delta |d| far away.
    """
    # bf16 has 8 bits of mantissa: squares and their mean over 10^5 elements are computed in float32.
    difference = predicted.float() - targets.float()
    errors = difference.square()
    if delta is not None:
        limit = _per_sample(delta, errors)
        # The formula multiplied by its conjugate: for d << delta the difference sqrt(d^2 + delta^2) - delta
        # of two almost equal numbers would lose the digits of d.
        errors = 2 * limit * errors / ((errors + limit.square()).sqrt() + limit)
    if counts is not None:
        errors = errors * counts
    return errors.mean(dim=tuple(range(1, errors.dim())))


def _per_sample(value: Tensor, like: Tensor) -> Tensor:
    return value.view(-1, *[1] * (like.dim() - 1))


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
