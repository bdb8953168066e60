"""What a training allocates on a card and in which order: traced on `meta`, for a model of the allocator.

Input is a load of the planner and the shapes its passes have; output sizes in bytes: what is there from
the first step to the last, and the events of each pass as `planning/caching_allocator.py` reads them.
No weights and no card are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn

from lora_trainer.config.base_precision import QUANTIZATIONS
from lora_trainer.config.config import Precision
from lora_trainer.families.base import BaseFacts, Family
from lora_trainer.network.block_swap import repeated_blocks
from lora_trainer.network.checkpointing import apply_checkpointing
from lora_trainer.network.live_storages import FusedKernels, LiveStorages
from lora_trainer.network.quantize import quantize
from lora_trainer.network.swapped_blocks import BUFFERS, streamed_indices
from lora_trainer.planning.caching_allocator import Event
from lora_trainer.planning.loads import Load, runs_wide
from lora_trainer.tracing.trace import TracedNetwork, add_adapters, empty_conditioning

META = torch.device("meta")
DTYPES: Mapping[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
# AutoencoderKL of Stable Diffusion, FLUX.1, Chroma and Z-Image.
_VAE = {
    "block_out_channels": (128, 256, 512, 512),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "layers_per_block": 2,
    "norm_num_groups": 32,
}
_VAE_CHANNELS, _VAE_FACTOR = 16, 8
_MAPS = 6
"""Tensors at the peak of another VAE."""


@dataclass(frozen=True, kw_only=True, order=True)
class PassShape:
    """One pass: so many images of a bucket, their texts of so many tokens (None: of one length)."""

    width_px: int
    height_px: int
    images: int = 1
    text_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Events of a forward and backward pass by shape, and of one sample image: guided passes and decoding."""

    steps: Mapping[PassShape, tuple[Event, ...]]
    sampling: tuple[Event, ...]


@dataclass(frozen=True, kw_only=True)
class Stays:
    """Sizes of what stays, in the order it is allocated; `loading` comes before and is gone."""

    loading: tuple[Event, ...]
    sizes: tuple[int, ...]


Prompt = Callable[[int | None], Mapping[str, tuple[int, ...]]]
"""Returns the shapes of a text of so many tokens as it is encoded, batch 1; None: the longest."""


def built(load: Load, *, family: Family, facts: BaseFacts, prompt: Prompt) -> TracedNetwork:
    """Return the network of a load on `meta`, with its adapter; what a pass keeps is not settled yet."""
    dtype = DTYPES[load.precision]
    with META:
        network = family.empty_denoiser(facts.architecture)
    network.requires_grad_(False).train()
    for tensor in (*network.parameters(), *network.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    if load.base_precision in QUANTIZATIONS:
        # nf4's kernels know no meta tensors: its steps are those of int8, its bytes are its own.
        quantize(
            network, "int8", device=META, skip=family.quantization_skip, matmul=load.base_matmul
        )
    modules = family.lora_targets(network, load.adapter.targets)
    add_adapters(network, modules, rank=load.adapter.rank, wide=runs_wide(load.adapter))
    conditioning = empty_conditioning(family, facts, prompt=prompt(None), dtype=dtype)
    return TracedNetwork(
        family=family, facts=facts, network=network, dtype=dtype, conditioning=conditioning
    )


def passes(
    load: Load, traced: TracedNetwork, *, prompt: Prompt, shapes: Sequence[PassShape]
) -> Passes:
    """Trace the passes of a load, wherever its weights lie.

    `traced` is built for this load, or one that differs in nothing it is built from. A picture lying
    down takes what it takes standing. Sizes between the smallest and the largest picture follow from
    these two: each tensor is as large as a line in the area says.
    """
    _fill_tables(traced, load)
    alike: dict[tuple[int, int | None], list[PassShape]] = {}
    for shape in sorted(set(map(_standing, shapes)), key=_area_px):
        alike.setdefault((shape.images, shape.text_tokens), []).append(shape)
    found: dict[PassShape, tuple[Event, ...]] = {}
    for group in alike.values():
        for shape in {group[0], group[-1]}:
            found[shape] = tuple(_step(_with_text(traced, prompt(shape.text_tokens)), load, shape))
        for shape in group[1:-1]:
            share = Fraction(
                _area_px(shape) - _area_px(group[0]), _area_px(group[-1]) - _area_px(group[0])
            )
            found[shape] = between(found[group[0]], found[group[-1]], share=share)
    return Passes(
        steps={shape: found[_standing(shape)] for shape in shapes},
        sampling=tuple(_sampling(traced, load)),
    )


def between(
    small: Sequence[Event], large: Sequence[Event], *, share: Fraction
) -> tuple[Event, ...]:
    """Return the events of a pass between two that run the same kernels; `share` 0 is the small one."""
    assert [number for number, _ in small] == [number for number, _ in large]
    return tuple(
        (number, round(size + share * (larger - size)))
        for (number, size), (_, larger) in zip(small, large, strict=True)
    )


def _area_px(shape: PassShape) -> int:
    return shape.width_px * shape.height_px


def stays(
    load: Load, traced: TracedNetwork, *, away: Sequence[str] = (), samples_ahead: int = 0
) -> Stays:
    """Return what is there from the first step to the last: base, adapter, optimizer states.

    The layers `away` lie in host memory, as modulation may, and what they give is made for so many
    samples ahead.
    """
    network = traced.network
    return Stays(
        loading=tuple(_loading(network, load)),
        sizes=(
            *_weights(network, load, away),
            *_vectors(network, load, away, samples_ahead=samples_ahead),
            *_adapter(network, load),
        ),
    )


def _standing(shape: PassShape) -> PassShape:
    short_px, long_px = sorted((shape.width_px, shape.height_px))
    return replace(shape, width_px=short_px, height_px=long_px)


def _with_text(traced: TracedNetwork, prompt: Mapping[str, tuple[int, ...]]) -> TracedNetwork:
    conditioning = empty_conditioning(
        traced.family, traced.facts, prompt=prompt, dtype=traced.dtype
    )
    return replace(traced, conditioning=conditioning)


def _fill_tables(traced: TracedNetwork, load: Load) -> None:
    """Let the network make what it keeps from its first call, which is no activation."""
    noisy, timesteps, conditioning = traced.inputs(replace(load.workload(), micro_batch=1))
    with torch.no_grad(), FusedKernels("cuda"):
        traced.family.predict(traced.network, noisy, timesteps, conditioning)


def _step(traced: TracedNetwork, load: Load, shape: PassShape) -> Iterator[Event]:
    """Gradients of the adapter are made in the pass and gone after it, as `zero_grad` leaves them."""
    network, family = traced.network, traced.family
    apply_checkpointing(network, load.checkpointing, kept_share=load.kept_share)
    parameters = [each for each in network.parameters() if each.requires_grad]
    for parameter in parameters:
        parameter.grad = None
    workload = replace(
        load.workload(),
        width_px=shape.width_px,
        height_px=shape.height_px,
        micro_batch=shape.images,
    )
    noisy, timesteps, conditioning = traced.inputs(workload)
    tensors = [noisy, timesteps, *conditioning.values()]

    def forward() -> Tensor:
        return family.predict(network, noisy, timesteps, conditioning)

    live = LiveStorages([*network.parameters(), *network.buffers(), *tensors])
    with FusedKernels("cuda"), live:
        inputs = [torch.empty_like(tensor) for tensor in tensors]
        target, noise = torch.empty_like(noisy), torch.empty_like(noisy)
        prediction = forward()
        loss = (prediction.float() - target.float()).square().mean()
        # From a tensor, the backward pass would leave FusedKernels.
        edge = torch.autograd.graph.get_gradient_edge(loss)
        del prediction
        torch.autograd.backward([edge], [torch.ones_like(loss)])
        del loss, target, noise, inputs, edge
        for parameter in parameters:
            parameter.grad = None
    yield from live.events


def _sampling(traced: TracedNetwork, load: Load) -> Iterator[Event]:
    network, family, side_px = traced.network, traced.family, load.sample_side_px
    workload = replace(load.workload(), width_px=side_px, height_px=side_px, micro_batch=1)
    noisy, timesteps, conditioning = traced.inputs(workload)
    live = LiveStorages([*network.parameters(), *network.buffers(), noisy])
    with torch.no_grad(), FusedKernels("cuda"), live, META:
        for _ in range(2):
            family.predict(network, noisy, timesteps, conditioning)
        if family.decoding_elements_per_px == Family.decoding_elements_per_px:
            vae = AutoencoderKL(latent_channels=_VAE_CHANNELS, **_VAE).requires_grad_(False)
            side = side_px // _VAE_FACTOR
            vae.decode(torch.empty(1, _VAE_CHANNELS, side, side), return_dict=False)
            del vae
        else:  # of another kind only how much it is
            held = torch.empty(traced.facts.parts["vae"].parameters)
            each = family.decoding_elements_per_px * side_px**2 // _MAPS
            maps = [torch.empty(each) for _ in range(_MAPS)]
            del held, maps
    yield from live.events


# ---- what stays


def _weights(network: nn.Module, load: Load, away: Sequence[str]) -> Iterator[int]:
    """Base weights in module order; streamed blocks have two buffers instead."""
    blocks = repeated_blocks(network)
    names = list(blocks)
    streamed = [
        names[index]
        for index in (
            streamed_indices(len(names), load.streamed_blocks) if load.streamed_blocks else ()
        )
    ]
    moved = dict.fromkeys(streamed, 0)
    aside = 0
    for name, size in _base_tensors(network, load):
        block = next((each for each in streamed if name.startswith(f"{each}.")), None)
        if any(name.startswith(f"{layer}.") for layer in away):
            aside = max(aside, size)
        elif block is not None:
            moved[block] += size
        else:
            yield size
    if streamed:
        yield from (max(moved.values()),) * min(BUFFERS, len(streamed))
    if aside:
        yield from (aside,) * min(BUFFERS, len(away))


def _vectors(
    network: nn.Module, load: Load, away: Sequence[str], *, samples_ahead: int
) -> Iterator[int]:
    """What the layers that are away give, a tensor for each."""
    for name in away:
        width: Any = network.get_submodule(name).out_features
        yield samples_ahead * width * DTYPES[load.precision].itemsize


def _base_tensors(network: nn.Module, load: Load) -> Iterator[tuple[str, int]]:
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        if tensor.requires_grad:
            continue
        plain = name.replace(".base_layer.", ".")
        if load.base_precision == "nf4" and name.endswith(".codes"):
            yield plain, tensor.nbytes // 2
            yield plain, tensor.nbytes // 64
        else:
            yield plain, tensor.nbytes


def _adapter(network: nn.Module, load: Load) -> Iterator[int]:
    """Masters, then optimizer states."""
    sizes = [each.nbytes for each in network.parameters() if each.requires_grad]
    yield from sizes
    states = 1 if load.optimizer.endswith("8bit") else 4
    for size in sizes:
        yield from (size * states // 4,) * 2
    copies = load.averaged + load.keeps_best
    for _ in range(copies):
        yield from sizes


def _loading(network: nn.Module, load: Load) -> Iterator[Event]:
    """A base in few bits is made on the card, a layer at a time, and goes back."""
    if load.base_precision not in QUANTIZATIONS:
        return
    number = 0
    for name, buffer in network.named_buffers():
        if name.endswith(".codes"):
            whole = 2 * buffer.numel()
            sizes = (whole, whole, buffer.nbytes)
            yield from ((number + index, size) for index, size in enumerate(sizes))
            yield from ((number + index, 0) for index in range(len(sizes)))
            number += len(sizes)
