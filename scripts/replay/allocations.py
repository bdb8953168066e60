"""The device allocations of a training in their order, traced on `meta` for a model of the allocator.

Input is a load of the planner and the shapes of its passes. Output, in bytes: the tensors that stay from
the first step to the last, and the allocation events of each pass for `caching_allocator.py`.
Neither weights nor a GPU are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import count
from typing import Any

import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lora_trainer.config.declare import BUFFERS, QUANTIZATIONS, Precision, streamed_indices
from lora_trainer.costs.trace import (
    FusedKernels,
    LiveStorages,
    TracedNetwork,
    add_adapters,
    empty_conditioning,
)
from lora_trainer.families.base.facts import BaseFacts
from lora_trainer.families.base.family import Family
from lora_trainer.families.base.traits import AUTOENCODER_KL
from lora_trainer.network.block_swap import repeated_blocks
from lora_trainer.network.gradient_checkpointing import apply_checkpointing
from lora_trainer.network.quantize import quantize
from lora_trainer.planning.memory import Load, runs_wide
from scripts.replay.caching_allocator import Event

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
"""Number of equal tensors by which the peak of a VAE of another class is modelled."""


@dataclass(frozen=True, kw_only=True, order=True)
class PassShape:
    """The shape of one pass: images of one bucket, with captions of `text_tokens` (None: a fixed length)."""

    width_px: int
    height_px: int
    images: int = 1
    text_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class Passes:
    """Events of forward and backward passes by shape, and of one sample image (guided passes, decoding)."""

    steps: Mapping[PassShape, tuple[Event, ...]]
    sampling: tuple[Event, ...]


@dataclass(frozen=True, kw_only=True)
class Stays:
    """Sizes of the tensors that stay, in order of allocation; the `loading` events come first and are freed."""

    loading: tuple[Event, ...]
    sizes: tuple[int, ...]


Prompt = Callable[[int | None], Mapping[str, tuple[int, ...]]]
"""Returns the shapes of an encoded caption of so many tokens, batch 1; None stands for the longest."""


def built(load: Load, *, family: Family, facts: BaseFacts, prompt: Prompt) -> TracedNetwork:
    """Return the network of a load on `meta`, with its adapter and without checkpointing so far."""
    dtype = DTYPES[load.precision]
    with META:
        network = family.training_denoiser(facts.release.architecture)
    network.requires_grad_(False).train()
    for tensor in (*network.parameters(), *network.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    if load.base_precision in QUANTIZATIONS:
        # nf4's kernels do not run on meta tensors. Its passes allocate as those of int8 do; the bytes of
        # its weights are counted in `_base_tensors`.
        quantize(network, "int8", device=META, skip=family.traits.quantization_skip)
    modules = family.lora_targets(network, load.adapter.targets)
    add_adapters(network, modules, rank=load.adapter.rank, wide=runs_wide(load.adapter))
    conditioning = empty_conditioning(family, facts, prompt=prompt(None), dtype=dtype)
    return TracedNetwork(
        family=family, facts=facts, network=network, dtype=dtype, conditioning=conditioning
    )


def passes(
    load: Load, traced: TracedNetwork, *, prompt: Prompt, shapes: Sequence[PassShape]
) -> Passes:
    """Trace the passes of a load; where its weights lie makes no difference.

    `traced` is the network of this load, or of one that differs only in settings `built` does not read.
    Landscape images allocate as portrait images of the same size do. Only the smallest and the largest
    image of a group are traced: the sizes of all tensors are linear in the area, so the others are
    interpolated.
    """
    _fill_tables(traced, load)
    by_batch: dict[tuple[int, int | None], list[PassShape]] = {}
    for shape in sorted(set(map(_standing, shapes)), key=_area_px):
        by_batch.setdefault((shape.images, shape.text_tokens), []).append(shape)
    events_by_shape: dict[PassShape, tuple[Event, ...]] = {}
    for group in by_batch.values():
        for shape in {group[0], group[-1]}:
            events_by_shape[shape] = tuple(
                _step(_with_text(traced, prompt(shape.text_tokens)), load, shape)
            )
        for shape in group[1:-1]:
            share = Fraction(
                _area_px(shape) - _area_px(group[0]), _area_px(group[-1]) - _area_px(group[0])
            )
            events_by_shape[shape] = between(
                events_by_shape[group[0]], events_by_shape[group[-1]], share=share
            )
    return Passes(
        steps={shape: events_by_shape[_standing(shape)] for shape in shapes},
        sampling=tuple(_sampling(traced, load)),
    )


def between(
    small: Sequence[Event], large: Sequence[Event], *, share: Fraction
) -> tuple[Event, ...]:
    """Interpolate the events of two passes of the same kernels; `share` 0 is `small`, 1 is `large`."""
    # Equal numbers in equal order: both passes allocate and free the same tensors at the same moments.
    assert [number for number, _ in small] == [number for number, _ in large]
    return tuple(
        (number, round(size + share * (larger - size)))
        for (number, size), (_, larger) in zip(small, large, strict=True)
    )


def _area_px(shape: PassShape) -> int:
    return shape.width_px * shape.height_px


def stays(load: Load, traced: TracedNetwork) -> Stays:
    """Return the tensors that stay from the first step to the last: base, adapter, optimizer states."""
    network = traced.network
    return Stays(
        loading=tuple(_loading(network, load)),
        sizes=(
            *_weights(network, load),
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
    """Run the network once, so that tables it caches at its first call do not count as activations."""
    noisy, timesteps, conditioning = traced.inputs(replace(load.workload(), micro_batch=1))
    with torch.no_grad(), FusedKernels("cuda"):
        traced.family.predict(traced.network, noisy, timesteps, conditioning)


def _step(traced: TracedNetwork, load: Load, shape: PassShape) -> Iterator[Event]:
    """Yield the events of one forward and backward pass.

    The adapter's gradients are allocated in the pass and freed at its end, as by `zero_grad`.
    """
    network, family = traced.network, traced.family
    apply_checkpointing(network, load.checkpointing)
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

    live = ListedStorages([*network.parameters(), *network.buffers(), *tensors])
    with FusedKernels("cuda"), live:
        inputs = [torch.empty_like(tensor) for tensor in tensors]
        target, noise = torch.empty_like(noisy), torch.empty_like(noisy)
        prediction = forward()
        loss = (prediction.float() - target.float()).square().mean()
        # Started from a tensor, `backward` is a torch function and would run outside the FusedKernels mode.
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
    live = ListedStorages([*network.parameters(), *network.buffers(), noisy])
    with torch.no_grad(), FusedKernels("cuda"), live, META:
        for _ in range(2):
            family.predict(network, noisy, timesteps, conditioning)
        if family.traits.vae_peak == AUTOENCODER_KL:
            vae = AutoencoderKL(latent_channels=_VAE_CHANNELS, **_VAE).requires_grad_(False)
            side = side_px // _VAE_FACTOR
            vae.decode(torch.empty(1, _VAE_CHANNELS, side, side), return_dict=False)
            del vae
        else:  # a VAE of another class is not built: its weights and its peak are allocated as a whole
            vae_weights = torch.empty(traced.facts.parts["vae"].parameters)
            each = family.traits.vae_peak.decoding * side_px**2 // _MAPS
            maps = [torch.empty(each) for _ in range(_MAPS)]
            del vae_weights, maps
    yield from live.events


# ---- what stays


def _weights(network: nn.Module, load: Load) -> Iterator[int]:
    """Yield the sizes of base weights in module order; streamed blocks have two buffers instead."""
    blocks = repeated_blocks(network)
    names = list(blocks)
    streamed = [
        names[index]
        for index in (
            streamed_indices(len(names), load.streamed_blocks) if load.streamed_blocks else ()
        )
    ]
    moved = dict.fromkeys(streamed, 0)
    for name, size in _base_tensors(network, load):
        block = next((each for each in streamed if name.startswith(f"{each}.")), None)
        if block is not None:
            moved[block] += size
        else:
            yield size
    if streamed:
        yield from (max(moved.values()),) * min(BUFFERS, len(streamed))


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
    """Yield the sizes of the adapter's float32 weights, the optimizer's states, and copies of the weights."""
    sizes = [each.nbytes for each in network.parameters() if each.requires_grad]
    yield from sizes
    states = 1 if load.optimizer.endswith("8bit") else 4
    for size in sizes:
        yield from (size * states // 4,) * 2
    copies = load.averaged + load.keeps_best
    for _ in range(copies):
        yield from sizes


def _loading(network: nn.Module, load: Load) -> Iterator[Event]:
    """Yield the events of quantising a base: each layer is quantised on the GPU and moved back."""
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


# ---- allocations in their order

_ATEN = torch.ops.aten
_ATTENTION_BACKWARD = (
    _ATEN._scaled_dot_product_flash_attention_backward,
    _ATEN._scaled_dot_product_efficient_attention_backward,
)
_CONVOLUTIONS = (_ATEN.convolution, _ATEN.convolution_backward)
_ACCUMULATOR_BYTES = 4


class ListedStorages(LiveStorages):
    """Lists `events`: (storage number, bytes) for each creation, (storage number, 0) for each release.

    Workspaces of CUDA kernels are among them; no other figure counts those.
    """

    def __init__(self, ignored: Iterable[Tensor]) -> None:
        super().__init__(ignored)
        self.events: list[Event] = []
        self._numbers, self._number_of = count(1), dict[int, int]()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_dispatch__(function, types, args, kwargs)
        if workspace_bytes := kernel_workspace_bytes(function.overloadpacket, args, result):
            number = next(self._numbers)
            self.events += [(number, workspace_bytes), (number, 0)]
        return result

    def create(self, key: int, size: int) -> None:
        super().create(key, size)
        number = next(self._numbers)
        if size:
            self._number_of[key] = number
            self.events.append((number, size))

    def forget(self, key: int) -> None:
        super().forget(key)
        if number := self._number_of.pop(key, 0):
            self.events.append((number, 0))


def kernel_workspace_bytes(packet: Any, args: tuple[Any, ...], result: Any) -> int:
    """Return the bytes a CUDA kernel allocates while it runs, besides inputs and outputs.

    Attention sums the gradient of its queries in fp32 (flash_api.cpp, `dq_accum`). cuDNN converts 16-bit
    images to the layout of tensor cores and back, so inputs, weights and outputs exist twice; if that
    memory is refused it uses less (Conv_v8.cpp tries the next plan).
    """
    if packet in _ATTENTION_BACKWARD:
        query: Tensor = args[1]
        return _ACCUMULATOR_BYTES * query.numel()
    if packet in _CONVOLUTIONS:
        tensors = [value for value in tree_leaves((args, result)) if isinstance(value, Tensor)]
        images = [value for value in tensors if value.dim() == 4]
        return sum(value.nbytes for value in images if value.element_size() == 2)
    return 0
