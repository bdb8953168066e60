"""One sample, and a batch of samples of one shape, stacked in host memory and copied to the device.

The dataloader makes `Sample`s, which hold every random draw already. `split` groups the samples of a step into
micro-batches, `collate` stacks one of these. So the same step may be split in another way, or repeated, and
nothing but rounding changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lora_trainer.config.declare import LossName
from lora_trainer.families.base import Conditioning
from lora_trainer.hardware.device_calls import may_copy_ahead
from lora_trainer.lora.dropout import halves
from lora_trainer.network.pinned_memory import pinned, pinned_copy
from lora_trainer.training.timesteps import Level


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One sample ready for the device: latents and noise float32 [C, H, W], conditioning of batch 1.

    `input_noise` is the noise in the input where it is not the noise to predict (noise perturbation).
    `loss` and `delta` choose the error function (loss.py). `mask_weights` [1, H, W] weigh the error by
    position, with a mean of 1; None where all positions count alike. `dropout_seed` names the masks of the
    adapter's dropout. `as_base`: the target is the base model's prediction without the adapter.
    """

    sample: str
    latents: Tensor
    noise: Tensor
    level: Level
    weight: float
    conditioning: Conditioning
    input_noise: Tensor | None = None
    loss: LossName = "mse"
    delta: float = 1.0
    dropout_seed: int = 0
    mask_weights: Tensor | None = None
    as_base: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the latents, (C, H, W)."""
        return tuple(self.latents.shape)


def split(
    samples: Sequence[Sample],
    *,
    cap: int,
    images_at_once: Mapping[tuple[int, int], int] = MappingProxyType({}),
    group_key: Callable[[Conditioning], int] = lambda _: 0,
) -> list[tuple[Sample, ...]]:
    """Split samples by shape, then into micro-batches of at most `cap`; order within a shape is kept.

    `images_at_once` are lower caps by (height, width) of the latents: those of large buckets. Samples whose
    conditioning has different `group_key`s are split too.
    """
    # A dict keeps its order: micro-batches, and with them the order in which gradients are summed, are those of the
    # samples.
    by_shape: dict[tuple[tuple[int, ...], int], list[Sample]] = {}
    for sample in samples:
        key = (sample.shape, group_key(sample.conditioning))
        by_shape.setdefault(key, []).append(sample)
    micro_batches: list[tuple[Sample, ...]] = []
    for (shape, _), alike in by_shape.items():
        size = min(cap, images_at_once.get((shape[-2], shape[-1]), cap))
        micro_batches += [tuple(alike[at : at + size]) for at in range(0, len(alike), size)]
    return micro_batches


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Samples of one shape as few tensors, on the host (`collate`) or on the device (`on`).

    Latents and noises are float32 [B, C, H, W], `mask_weights` [B, 1, H, W] or None. `input_noise` is None
    where it is the noise to predict. The numbers of the samples (alpha, sigma, weight, delta) are one float32
    tensor [4, B], so that they are one copy to the device; timesteps [B] are apart, because some bases count
    them in whole numbers. `as_base` int64 [N] are the rows whose target is the base's prediction,
    `base_conditioning` is stacked of these rows alone: a text by itself has no padding, and some families
    compute something else where there is padding. `dropout_seeds` int64 [B, 2] are the halves of the
    samples' seeds.
    """

    latents: Tensor
    noise: Tensor
    input_noise: Tensor | None
    timesteps: Tensor
    numbers: Tensor
    dropout_seeds: Tensor
    mask_weights: Tensor | None
    as_base: Tensor | None
    conditioning: Conditioning
    base_conditioning: Conditioning
    loss: LossName
    precision: torch.dtype

    def on(self, device: torch.device) -> Batch:
        """Copy to a device, floating conditioning in `precision`; the host does not wait for pinned tensors."""
        ahead = may_copy_ahead(device)

        def moved(value: Any) -> Any:
            if isinstance(value, Mapping):  # cast on the device: host and bus stay out of it
                values = {name: moved(tensor) for name, tensor in value.items()}
                return {
                    name: t.to(self.precision) if t.is_floating_point() else t
                    for name, t in values.items()
                }
            return value.to(device, non_blocking=ahead) if isinstance(value, Tensor) else value

        return replace(self, **{name: moved(value) for name, value in vars(self).items()})

    @property
    def latents_shape(self) -> tuple[int, int, int]:
        """(height, width, samples) of the latents."""
        count, _, height, width = self.latents.shape
        return height, width, count


def collate(samples: Sequence[Sample], *, device: torch.device, precision: torch.dtype) -> Batch:
    """Stack samples of one shape in host memory, from where `Batch.on` copies them to `device`.

    For a device with memory of its own the host memory is pinned, because only then the copy runs beside
    the computation.
    """

    def joined(tensors: Sequence[Tensor]) -> Tensor:
        # Joined straight into pinned memory: torch.cat and a pinned copy after it would copy twice.
        shape = (sum(map(len, tensors)), *tensors[0].shape[1:])
        out = pinned().empty(shape, dtype=tensors[0].dtype, device=device)
        return torch.cat(list(tensors), out=out)

    def stacked(tensors: Iterable[Tensor]) -> Tensor:
        return joined([tensor.unsqueeze(0) for tensor in tensors])

    def listed(values: Sequence[Any], dtype: torch.dtype | None = None) -> Tensor:
        return pinned_copy(torch.tensor(values, dtype=dtype), device=device)

    def conditioning_of(some: Sequence[Sample]) -> Conditioning:
        return {
            name: joined(padded_alike([sample.conditioning[name] for sample in some]))
            for name in (some[0].conditioning if some else ())
        }

    numbers = [(s.level.alpha, s.level.sigma, s.weight, s.delta) for s in samples]
    # Noise is perturbed by a setting of the run: in all of its samples or in none.
    perturbed = [s.input_noise for s in samples if s.input_noise is not None]
    mask_weights = None
    if any(s.mask_weights is not None for s in samples):
        # Images without a mask count everywhere alike.
        ones = samples[0].latents.new_ones(1, *samples[0].latents.shape[1:])
        masks = (ones if s.mask_weights is None else s.mask_weights for s in samples)
        mask_weights = stacked(masks)
    rows = [row for row, sample in enumerate(samples) if sample.as_base]
    return Batch(
        latents=stacked(s.latents for s in samples),
        noise=stacked(s.noise for s in samples),
        input_noise=stacked(perturbed) if perturbed else None,
        timesteps=listed([s.level.timestep for s in samples]),
        numbers=listed([*zip(*numbers, strict=True)], torch.float32),
        dropout_seeds=listed([halves(s.dropout_seed) for s in samples], torch.int64),
        mask_weights=mask_weights,
        as_base=listed(rows, torch.int64) if rows else None,
        conditioning=conditioning_of(samples),
        base_conditioning=conditioning_of([samples[row] for row in rows]),
        loss=samples[0].loss,
        precision=precision,
    )


def padded_alike(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of batch 1 alike in length: texts get zeros on dimension 1, as their masks do."""
    if tensors[0].dim() < 2:
        return list(tensors)
    longest = max(tensor.shape[1] for tensor in tensors)
    return [
        F.pad(t, (0, 0) * (t.dim() - 2) + (0, longest - t.shape[1])) if t.shape[1] < longest else t
        for t in tensors
    ]
