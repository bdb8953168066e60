"""Prepared samples, the steps they make, and what of a step is computed at once, on the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from lora_trainer.families.base import Conditioning
from lora_trainer.train.levels import Level


class Sized(Protocol):
    """What goes into the network with others of its shape (C, H, W) and of like conditioning."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def conditioning(self) -> Conditioning: ...


AnySized = TypeVar("AnySized", bound=Sized)


@dataclass(frozen=True, kw_only=True)
class Glimpse:
    """What is known of a sample long before its step: its shape and noise level, and what it is told.

    Of `conditioning` only some tensors are there, as in `Prepared`.
    """

    shape: tuple[int, ...]
    timestep: float
    conditioning: Conditioning
    as_base: bool = False


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """One sample ready for the device: latents and noise float32 [C, H, W], conditioning of batch 1.

    `input_noise` is the noise of the input where that is not the one to predict; `huber_delta` is
    infinite for squared errors; `dropout_seed` names the masks of the adapter's dropout. `counts` are
    weights of the error [1, H, W] with a mean of 1, None where all of the picture counts alike.
    `as_base`: what is wanted is what the base says without the adapter.
    """

    sample: str
    latents: Tensor
    noise: Tensor
    level: Level
    weight: float
    conditioning: Conditioning
    input_noise: Tensor | None = None
    huber_delta: float = math.inf
    dropout_seed: int = 0
    counts: Tensor | None = None
    as_base: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the latents."""
        return tuple(self.latents.shape)

    @property
    def timestep(self) -> float:
        """What the denoiser is told of the noise level."""
        return self.level.timestep


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """This process's samples of one optimizer step (0-based `step`) and the epochs finished after it.

    A sample whose class is to stay as it is comes twice, the second time as that. Where a window begins,
    `window` tells of the samples of each of its steps, this one first.
    """

    step: int
    samples: tuple[Prepared, ...]
    epoch: float
    window: tuple[tuple[Glimpse, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Samples of one shape, stacked on the device: [B, C, H, W] and [B]; `counts` [B, 1, H, W] or None."""

    latents: Tensor
    noise: Tensor
    input_noise: Tensor
    timesteps: Tensor
    alpha: Tensor
    sigma: Tensor
    huber_delta: Tensor | None
    counts: Tensor | None
    conditioning: Conditioning


def micro_batches(
    batch: StepBatch,
    *,
    cap: int,
    at_once: Mapping[tuple[int, int], int] = MappingProxyType({}),
    alike: Callable[[Conditioning], int] = lambda _: 0,
) -> list[tuple[Prepared, ...]]:
    """Split a step's samples, as `groups` does."""
    return groups(batch.samples, cap=cap, at_once=at_once, alike=alike)


def groups(
    samples: Sequence[AnySized],
    *,
    cap: int,
    at_once: Mapping[tuple[int, int], int] = MappingProxyType({}),
    alike: Callable[[Conditioning], int] = lambda _: 0,
) -> list[tuple[AnySized, ...]]:
    """Split samples by shape, then into groups of at most `cap`; order within a shape is kept.

    `at_once` are lower caps by (height, width) of the latents: those of large buckets. Samples whose
    conditioning is not `alike` are split too.
    """
    by_shape: dict[tuple[tuple[int, ...], int], list[AnySized]] = {}
    for sample in samples:
        key = (sample.shape, alike(sample.conditioning))
        by_shape.setdefault(key, []).append(sample)
    found: list[tuple[AnySized, ...]] = []
    for (shape, _), group in by_shape.items():
        size = min(cap, at_once.get((shape[-2], shape[-1]), cap))
        found += [tuple(group[first : first + size]) for first in range(0, len(group), size)]
    return found


def to_device(
    samples: Sequence[Prepared], *, device: torch.device, dtype: torch.dtype
) -> MicroBatch:
    """Stack samples of one shape on the device; floating conditioning in `dtype`, the rest as it is."""

    def move(stacked: Tensor) -> Tensor:
        return _moved(stacked, device)

    def scalars(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, device=device)

    levels = [sample.level for sample in samples]
    noise = move(torch.stack([sample.noise for sample in samples]))
    perturbed = [sample.input_noise for sample in samples if sample.input_noise is not None]
    deltas = [sample.huber_delta for sample in samples]
    return MicroBatch(
        latents=move(torch.stack([sample.latents for sample in samples])),
        noise=noise,
        input_noise=move(torch.stack(perturbed)) if perturbed else noise,
        timesteps=scalars([level.timestep for level in levels]),
        alpha=scalars([level.alpha for level in levels]),
        sigma=scalars([level.sigma for level in levels]),
        huber_delta=None if math.inf in deltas else scalars(deltas),
        counts=None if (counts := _stacked_counts(samples)) is None else move(counts),
        conditioning=conditioning_of(samples, samples[0].conditioning, device=device, dtype=dtype),
    )


def conditioning_of(
    samples: Sequence[Sized], names: Iterable[str], *, device: torch.device, dtype: torch.dtype
) -> Conditioning:
    """Stack what samples are told under these names on the device, what is floating in `dtype`."""
    stacked = {
        name: _moved(_padded([sample.conditioning[name] for sample in samples]), device)
        for name in names
    }
    return {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in stacked.items()
    }


def _moved(stacked: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda":
        stacked = stacked.pin_memory()
    return stacked.to(device, non_blocking=True)


def _stacked_counts(samples: Sequence[Prepared]) -> Tensor | None:
    """Return [B, 1, H, W], ones for samples without a mask; None where no sample has one."""
    if all(sample.counts is None for sample in samples):
        return None
    ones = samples[0].latents.new_ones(1, *samples[0].latents.shape[1:])
    return torch.stack([ones if sample.counts is None else sample.counts for sample in samples])


def _padded(tensors: Sequence[Tensor]) -> Tensor:
    """Join tensors of batch 1; texts of several lengths get zeros on dimension 1, as their masks do."""
    longest = max(tensor.shape[1] for tensor in tensors) if tensors[0].dim() > 1 else 0
    return torch.cat([_lengthened(tensor, longest) for tensor in tensors])


def _lengthened(tensor: Tensor, length: int) -> Tensor:
    if tensor.dim() < 2 or tensor.shape[1] == length:
        return tensor
    padding = tensor.new_zeros(1, length - tensor.shape[1], *tensor.shape[2:])
    return torch.cat([tensor, padding], dim=1)
