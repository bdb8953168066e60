"""Noise, targets and loss weights of diffusion training as pure functions, each with its paper.

Notation: `signal` is alpha-bar of Ho et al. 2020 (arXiv 2006.11239), the cumulative signal level in
(0, 1]; latents and noise are [B, C, H, W]; per-sample quantities are [B].
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from lora_trainer.families.base import Prediction


def add_noise(latents: Tensor, noise: Tensor, signal: Tensor) -> Tensor:
    """Return sqrt(signal) latents + sqrt(1 - signal) noise (Ho et al. 2020, equation 4)."""
    level = signal.view(-1, 1, 1, 1)
    return level.sqrt() * latents + (1 - level).sqrt() * noise


def target(latents: Tensor, noise: Tensor, signal: Tensor, prediction: Prediction) -> Tensor:
    """Return what the denoiser should say: the noise, or v (Salimans & Ho 2022, arXiv 2202.00512)."""
    if prediction == "epsilon":
        return noise
    level = signal.view(-1, 1, 1, 1)
    return level.sqrt() * noise - (1 - level).sqrt() * latents


def min_snr_weight(signal: Tensor, *, gamma: float | None, prediction: Prediction) -> Tensor:
    """Return the loss weight of each sample (Hang et al. 2023, arXiv 2303.09556, section 3.4).

    min(SNR, gamma) / SNR for epsilon, / (SNR + 1) for v. Where the terminal SNR is zero the epsilon
    weight is its limit 1 instead of 0/0 (TRAPS C.6).
    """
    if gamma is None:
        return torch.ones_like(signal)
    snr = signal / (1 - signal)
    if prediction == "v_prediction":
        return snr.clamp(max=gamma) / (snr + 1)
    return torch.where(snr > 0, snr.clamp(max=gamma) / snr, torch.ones_like(snr))


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
    "Multi-resolution noise"). Off, both leave the draw of the base noise unchanged.
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


def sample_losses(predicted: Tensor, wanted: Tensor) -> Tensor:
    """Return the float32 mean squared error of each sample over its own elements, [B]."""
    difference = predicted.float() - wanted.float()
    return difference.square().mean(dim=tuple(range(1, difference.dim())))
