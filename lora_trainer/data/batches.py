"""Prepared samples, the steps they make, and what of a step is computed at once, on the device."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from lora_trainer.families.base import Conditioning
from lora_trainer.train.levels import Level


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


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """This process's samples of one optimizer step (0-based `step`) and the epochs finished after it.

    A sample whose class is to stay as it is comes twice, the second time as that.
    """

    step: int
    samples: tuple[Prepared, ...]
    epoch: float


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
    """Split a step's samples by shape, then into groups of at most `cap`; order within a shape is kept.

    `at_once` are lower caps by (height, width) of the latents: those of large buckets. Samples whose
    conditioning is not `alike` are split too.
    """
    by_shape: dict[tuple[torch.Size, int], list[Prepared]] = {}
    for sample in batch.samples:
        key = (sample.latents.shape, alike(sample.conditioning))
        by_shape.setdefault(key, []).append(sample)
    found = []
    for (shape, _), group in by_shape.items():
        size = min(cap, at_once.get((shape[-2], shape[-1]), cap))
        found += [tuple(group[first : first + size]) for first in range(0, len(group), size)]
    return found


def to_device(
    samples: Sequence[Prepared], *, device: torch.device, dtype: torch.dtype
) -> MicroBatch:
    """Stack samples of one shape on the device; floating conditioning in `dtype`, the rest as it is."""

    def move(stacked: Tensor) -> Tensor:
        if device.type == "cuda":
            stacked = stacked.pin_memory()
        return stacked.to(device, non_blocking=True)

    def scalars(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, device=device)

    levels = [sample.level for sample in samples]
    noise = move(torch.stack([sample.noise for sample in samples]))
    perturbed = [sample.input_noise for sample in samples if sample.input_noise is not None]
    deltas = [sample.huber_delta for sample in samples]
    stacked = {
        name: move(_padded([sample.conditioning[name] for sample in samples]))
        for name in samples[0].conditioning
    }
    return MicroBatch(
        latents=move(torch.stack([sample.latents for sample in samples])),
        noise=noise,
        input_noise=move(torch.stack(perturbed)) if perturbed else noise,
        timesteps=scalars([level.timestep for level in levels]),
        alpha=scalars([level.alpha for level in levels]),
        sigma=scalars([level.sigma for level in levels]),
        huber_delta=None if math.inf in deltas else scalars(deltas),
        counts=None if (counts := _stacked_counts(samples)) is None else move(counts),
        conditioning={
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor
            for name, tensor in stacked.items()
        },
    )


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
