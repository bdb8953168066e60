"""Prepared samples, the steps they make, and what of a step is computed at once, on the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from lora_trainer.families.base import Conditioning
from lora_trainer.hardware.device_calls import may_copy_ahead
from lora_trainer.lora.dropout import halves
from lora_trainer.network.pinned_memory import pinned, pinned_copy
from lora_trainer.training.timesteps import Level

Signature = tuple[tuple[str, torch.Size, torch.dtype], ...]
"""Names, shapes and types of all tensors of a pass."""
_TOLD, _TOLD_BASE = "told.", "told to the base."


class Sized(Protocol):
    """What goes into the network with others of its shape (C, H, W) and of like conditioning."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def conditioning(self) -> Conditioning: ...


AnySized = TypeVar("AnySized", bound=Sized)


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One sample ready for the device: latents and noise float32 [C, H, W], conditioning of batch 1.

    `input_noise` is the noise of the input where that is not the one to predict; `huber_delta` is
    infinite for squared errors; `dropout_seed` names the masks of the adapter's dropout. `counts` are
    weights of the error [1, H, W] with a mean of 1, None where all of the image counts alike.
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

    A sample whose class is to stay as it is comes twice, the second time as that.
    """

    step: int
    samples: tuple[Sample, ...]
    epoch: float


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Samples of one shape, stacked on the device: [B, C, H, W] and [B]; `counts` [B, 1, H, W] or None.

    `weights` [B] are those of the losses; `as_base` int64 are the rows whose wanted prediction is the
    base's, None without any; `dropout_seeds` int64 [B, 2] are the halves of the samples' seeds.
    `base_conditioning` is that of the rows `as_base`, stacked anew: a text alone has no padding, and some
    families count on it. `samples` are what it was made of, on the host.
    """

    latents: Tensor
    noise: Tensor
    input_noise: Tensor
    timesteps: Tensor
    alpha: Tensor
    sigma: Tensor
    weights: Tensor
    huber_delta: Tensor | None
    counts: Tensor | None
    as_base: Tensor | None
    dropout_seeds: Tensor
    conditioning: Conditioning
    base_conditioning: Conditioning
    samples: tuple[Sample, ...]


@dataclass(frozen=True, kw_only=True)
class Stacked:
    """Samples of one shape as few tensors by name, on the host (`stack`) or on the device.

    All numbers of the samples are one float32 tensor "numbers" [3 or 4, B], so that they are one copy,
    but for "timesteps", which some bases count in whole numbers. `samples` are what they are made of,
    on the host.
    """

    tensors: Mapping[str, Tensor]
    samples: tuple[Sample, ...] = ()

    @property
    def latents_shape(self) -> tuple[int, int, int]:
        """Return (height, width, samples) of the latents."""
        count, _, height, width = self.tensors["latents"].shape
        return height, width, count

    @property
    def signature(self) -> Signature:
        """Return what two of them share that are computed by the same kernels."""
        return tuple((name, value.shape, value.dtype) for name, value in self.tensors.items())

    def on(self, device: torch.device) -> Stacked:
        """Copy to a device; the host does not wait for what is pinned."""
        return Stacked(
            tensors={
                name: t.to(device, non_blocking=may_copy_ahead(device))
                for name, t in self.tensors.items()
            },
            samples=self.samples,
        )

    def micro_batch(self, *, dtype: torch.dtype) -> MicroBatch:
        """Name the parts; floating conditioning in `dtype`, the rest as it is."""
        tensors, numbers = self.tensors, self.tensors["numbers"].unbind()

        def told(start: str) -> Conditioning:
            found = {name[len(start) :]: t for name, t in tensors.items() if name.startswith(start)}
            return _in_dtype(found, dtype)

        return MicroBatch(
            latents=tensors["latents"],
            noise=tensors["noise"],
            input_noise=tensors.get("input_noise", tensors["noise"]),
            timesteps=tensors["timesteps"],
            alpha=numbers[0],
            sigma=numbers[1],
            weights=numbers[2],
            huber_delta=numbers[3] if len(numbers) > 3 else None,
            counts=tensors.get("counts"),
            as_base=tensors.get("as_base"),
            dropout_seeds=tensors["dropout_seeds"],
            conditioning=told(_TOLD),
            base_conditioning=told(_TOLD_BASE),
            samples=self.samples,
        )


def micro_batches(
    batch: StepBatch,
    *,
    cap: int,
    at_once: Mapping[tuple[int, int], int] = MappingProxyType({}),
    alike: Callable[[Conditioning], int] = lambda _: 0,
) -> list[tuple[Sample, ...]]:
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


def to_device(samples: Sequence[Sample], *, device: torch.device, dtype: torch.dtype) -> MicroBatch:
    """Stack samples of one shape on the device; floating conditioning in `dtype`, the rest as it is."""
    return stack(samples, device=device).on(device).micro_batch(dtype=dtype)


def stack(samples: Sequence[Sample], *, device: torch.device) -> Stacked:
    """Stack samples of one shape on the host, from where they go to `device` without waiting."""

    def joined(tensors: Sequence[Tensor]) -> Tensor:
        first = tensors[0]
        shape = (sum(len(tensor) for tensor in tensors), *first.shape[1:])
        out = pinned().empty(shape, dtype=first.dtype, device=device)
        return torch.cat(list(tensors), out=out)

    def stacked(tensors: Sequence[Tensor]) -> Tensor:
        return joined([tensor.unsqueeze(0) for tensor in tensors])

    def listed(values: Sequence[Any], dtype: torch.dtype | None = None) -> Tensor:
        return pinned_copy(torch.tensor(values, dtype=dtype), device=device)

    perturbed = [sample.input_noise for sample in samples if sample.input_noise is not None]
    counts = _all_counts(samples)
    rows = [row for row, sample in enumerate(samples) if sample.as_base]
    found = {
        "latents": stacked([sample.latents for sample in samples]),
        "noise": stacked([sample.noise for sample in samples]),
        "timesteps": listed([sample.level.timestep for sample in samples]),
        "numbers": listed(_numbers(samples), torch.float32),
        "dropout_seeds": listed([halves(s.dropout_seed) for s in samples], torch.int64),
    }
    if perturbed:
        found["input_noise"] = stacked(perturbed)
    if counts:
        found["counts"] = stacked(counts)
    if rows:
        found["as_base"] = listed(rows, torch.int64)
    of_base = [samples[row] for row in rows]
    for start, told in ((_TOLD, samples), (_TOLD_BASE, of_base)):
        for name in told[0].conditioning if told else ():
            texts = [sample.conditioning[name] for sample in told]
            found[start + name] = joined(lengthened_alike(texts))
    return Stacked(tensors=found, samples=tuple(samples))


def _in_dtype(told: Conditioning, dtype: torch.dtype) -> Conditioning:
    return {
        name: tensor.to(dtype) if tensor.is_floating_point() else tensor
        for name, tensor in told.items()
    }


def _numbers(samples: Sequence[Sample]) -> list[list[float]]:
    levels = [sample.level for sample in samples]
    deltas = [sample.huber_delta for sample in samples]
    return [
        [level.alpha for level in levels],
        [level.sigma for level in levels],
        [sample.weight for sample in samples],
        *([] if math.inf in deltas else [deltas]),
    ]


def _all_counts(samples: Sequence[Sample]) -> list[Tensor]:
    """Return those of each sample, ones without a mask; none where no sample has one."""
    if all(sample.counts is None for sample in samples):
        return []
    ones = samples[0].latents.new_ones(1, *samples[0].latents.shape[1:])
    return [ones if sample.counts is None else sample.counts for sample in samples]


def lengthened_alike(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of batch 1 alike in length: texts get zeros on dimension 1, as their masks do."""
    longest = max(tensor.shape[1] for tensor in tensors) if tensors[0].dim() > 1 else 0
    return [_lengthened(tensor, longest) for tensor in tensors]


def _lengthened(tensor: Tensor, length: int) -> Tensor:
    if tensor.dim() < 2 or tensor.shape[1] == length:
        return tensor
    padding = tensor.new_zeros(1, length - tensor.shape[1], *tensor.shape[2:])
    return torch.cat([tensor, padding], dim=1)
