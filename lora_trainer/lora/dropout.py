"""Masks of an adapter as a pure function of the sample: no split, resume or recomputation changes them.

Each sample of each epoch has masks per layer: over the input channels, over the ranks of the update (Lin
et al. 2024, arXiv 2404.09610, also drop rows and columns of the factors), and one number for the whole
update. A mask is the same at all positions of an image, so it is small. The masks of all layers are
computed together before a forward pass, from an integer hash of (seed, epoch, sample, layer, channel) that
gives the same bits on every device, and stay in place for the backward pass.

Beside dropout, a mask leaves out ranks at noisy timesteps (T-LoRA): it draws nothing, the sample's timestep decides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lora_trainer.common.randomness import Stream, draw_seed
from lora_trainer.config.learning import AdapterSettings
from lora_trainer.families.base.layout import DENOISER
from lora_trainer.families.base.noise_levels import TIMESTEPS
from lora_trainer.lora.tensors import split_key

_BITS = 32
_LOW = 2**_BITS - 1


@dataclass(eq=False)
class Mask:
    """Multiplies [rows, ..., channels], or [rows, channels, height, width], by the masks of its samples.

    An object with the mask of now rather than a number in a list, so that compiled layers of one kind are one code.
    """

    now: Tensor | None = None
    """float32 [samples, channels]; None leaves nothing out."""

    def __call__(self, values: Tensor) -> Tensor:
        mask = self.now
        if mask is None:
            return values
        rows, samples = values.shape[0], mask.shape[0]
        if rows % samples:
            raise AssertionError(f"{rows} rows do not belong to {samples} samples")
        if rows != samples:  # rows are grouped by sample
            mask = mask.repeat_interleave(rows // samples, dim=0)
        shape = [1] * values.dim()
        shape[0], shape[1 if values.dim() == 4 else -1] = mask.shape
        # Multiplied in float32: 16 bits would round the rescaling, and with it the mean.
        return (values * mask.view(shape)).to(values.dtype)


@dataclass(kw_only=True)
class SampleMasks:
    """The masks of all layers; they apply inside `of`, elsewhere nothing is left out."""

    _widths: list[int] = field(default_factory=list)
    _columns: list[tuple[Tensor, ...]] = field(default_factory=list)
    """Hash key, threshold, scale and `_least_steps` of every channel: by mask, then of all in one entry."""
    _masks: list[Mask] = field(default_factory=list)

    def add(self, name: str, *, width: int, share: float, rescaled: bool = True) -> Mask:
        """Return a mask that drops a `share` of `width` channels and rescales the others to keep the mean."""
        start = draw_seed(0, Stream.ADAPTER_DROPOUT, name) & _LOW
        scale = 1.0 / (1.0 - share) if rescaled else 1.0
        return self._add(
            (start + torch.arange(width)) & _LOW,
            torch.full((width,), round(share * 2**_BITS)),
            torch.full((width,), scale),
            torch.zeros(width),
        )

    def add_by_noise(self, *, rank: int, least: int, power: float) -> Mask:
        """Return a mask of the first floor((1 - t / 1000)^power (rank - least)) + least ranks at timestep t.

        Soboleva et al. 2025, arXiv 2507.05964.
        """
        nothing = torch.zeros(rank, dtype=torch.int64)
        steps = _least_steps(rank=rank, least=least, power=power)
        return self._add(nothing, nothing, torch.ones(rank), steps)

    def _add(self, *columns: Tensor) -> Mask:
        self._widths.append(len(columns[0]))
        self._columns.append(columns)
        self._masks.append(Mask())
        return self._masks[-1]

    @contextmanager
    def of(self, seeds: Tensor, timesteps: Tensor) -> Iterator[None]:
        """Set the masks of the samples, in the order of the batch, while the block runs.

        `seeds` int64 [samples, 2] are the `halves` of each sample's seed, `timesteps` [samples] are 0 to 1000; both
        on the device.
        """
        if len(self._columns) > 1:
            self._columns = [tuple(map(torch.cat, zip(*self._columns, strict=True)))]
        self._columns[0] = tuple(each.to(seeds.device) for each in self._columns[0])
        starts, thresholds, scales, least_steps = self._columns[0]
        # Two rounds, one for each half of the 63-bit seed: [samples, channels] of 32-bit hashes, which are
        # compared with the dropout share as a fraction of 2^32.
        drawn = _mixed(_mixed(starts ^ seeds[:, :1]) ^ seeds[:, 1:])
        masks = (drawn >= thresholds) * scales
        masks = masks * (TIMESTEPS - timesteps.float()[:, None] >= least_steps)
        for mask, now in zip(self._masks, masks.split(self._widths, dim=1), strict=True):
            mask.now = now
        try:
            yield
        finally:
            for mask in self._masks:
                mask.now = None


def halves(seed: int) -> tuple[int, int]:
    """Return the lower 32 bits and the upper 31 bits of a 63-bit seed."""
    return seed & _LOW, seed >> _BITS


def masks_samples(settings: AdapterSettings) -> bool:
    """Say whether each sample has masks: any kind of dropout, or ranks by its noise."""
    drops = settings.dropout or settings.rank_dropout or settings.module_dropout
    return bool(drops) or settings.noise_rank is not None


def gates(
    masks: SampleMasks, key: str, settings: AdapterSettings, *, channels: int, rank: int
) -> tuple[list[Mask], list[Mask]]:
    """Return the masks for an update's inputs, and those for its ranks and the update as a whole."""
    before, after = [], []
    if settings.dropout:
        before.append(masks.add(f"{key}.input", width=channels, share=settings.dropout))
    if settings.rank_dropout:
        after.append(masks.add(f"{key}.rank", width=rank, share=settings.rank_dropout))
    # Text encoders do not know how noisy the image is.
    if (least := settings.noise_rank) is not None and split_key(key)[0] == DENOISER:
        power = settings.noise_rank_power
        after.append(masks.add_by_noise(rank=rank, least=min(least, rank), power=power))
    if share := settings.module_dropout:  # not rescaled, as in sd-scripts and LyCORIS
        after.append(masks.add(f"{key}.module", width=1, share=share, rescaled=False))
    return before, after


def gated(values: Tensor, masks: Sequence[Mask]) -> Tensor:
    """Return `values` through all masks."""
    for mask in masks:
        values = mask(values)
    return values


def _least_steps(*, rank: int, least: int, power: float) -> Tensor:
    """Return how many timesteps below pure noise each rank needs to act, float32 [rank]; 0 for the first `least`.

    Rank k (from 1) acts if k - least <= (1 - t / 1000)^power (rank - least), solved for 1000 - t. One float32
    comparison on the device decides then, without a power of its own, whose last bits differ between devices.
    """
    spare = max(1, rank - least)
    return torch.tensor(
        [TIMESTEPS * (max(0, k - least) / spare) ** (1.0 / power) for k in range(1, rank + 1)]
    )


def _mixed(values: Tensor) -> Tensor:
    """Mix the low 32 bits of int64 so that every bit depends on all (a "lowbias32" hash by Wellons).

    Both factors are below 2^31 and the values below 2^32, so no product overflows 63 bits.
    """
    values = values ^ (values >> 16)
    values = (values * 0x21F0AAAD) & _LOW
    values = values ^ (values >> 15)
    values = (values * 0x735A2D97) & _LOW
    return values ^ (values >> 15)
