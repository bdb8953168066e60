"""Noise, targets and errors of diffusion training as pure functions, each with its paper.

The loss of a sample is the mean over its elements of error(prediction - target), where noisy latents are
the network's input and `target` depends on what the base predicts. Timesteps and weights are drawn in
levels.py and weighting.py.

Notation: noisy = alpha latents + sigma noise (Ho et al. 2020, arXiv 2006.11239); latents and noise
are [B, C, H, W]; per-sample quantities are [B].
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

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
