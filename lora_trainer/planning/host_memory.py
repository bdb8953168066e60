"""Predicted host memory of a run on a GPU: data that waits there for the device, and weights as they load.

Inputs are those of `memory.predict`, and the bytes that the platform lets a process pin; output is one
`HostPrediction`. Weights are read from mapped files, which the system can drop and read again, so loading
may exceed the free memory and then takes longer. Data that waits for the device, pinned or not, has to fit,
or the machine swaps. Unpinned memory is copied more slowly, and a step waits for each copy. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from lora_trainer.families.base import BaseFacts
from lora_trainer.hardware.torch_allocator import RESERVED_BYTES
from lora_trainer.planning.loads import Load, RememberedCosts
from lora_trainer.planning.memory import (
    GIB,
    SAMPLER,
    MemoryItem,
    prepared_batches,
    saved_copies,
    vae_weights,
)
from lora_trainer.planning.weight_bytes import ELEMENT_BYTES, state_bytes


@dataclass(frozen=True, kw_only=True)
class Pinned:
    """Pinned shares, 0 to 1, of streamed blocks and offloaded inputs."""

    streamed: float = 1.0
    offloaded: float = 1.0


def pinned_shares(
    load: Load, *, facts: BaseFacts, costs: RememberedCosts, pinnable_bytes: int | None
) -> Pinned:
    """Return the pinned shares of a load where a process may pin this many bytes; None: no limit.

    Blocks are pinned first: they are pinned once, before the first step, and inputs as they come.
    """
    if pinnable_bytes is None:
        return Pinned()
    base = costs.frozen_base(facts, load)
    remaining_bytes = max(0, pinnable_bytes - RESERVED_BYTES)
    shares = []
    for size in (
        base.streamed_bytes(load.streamed_blocks),
        offloaded_bytes(load, facts=facts, costs=costs),
    ):
        pinned_size = min(remaining_bytes, size)
        shares.append(pinned_size / size if size else 1.0)  # nothing to copy: no copy is slow
        remaining_bytes -= pinned_size
    streamed, offloaded = shares
    return Pinned(streamed=streamed, offloaded=offloaded)


PINNED_AT_MOST = 2
"""Torch rounds pinned memory up to powers of two; a plan knows only the sum of the inputs, so: twice."""


def offloaded_bytes(load: Load, *, facts: BaseFacts, costs: RememberedCosts) -> int:
    """Return the most bytes that inputs of recomputed blocks can take in host memory."""
    return PINNED_AT_MOST * load.micro_batch * costs.sample_cost(facts, load.workload()).host_bytes


# Python with torch, diffusers and transformers, and the CUDA libraries it maps.
HOST_RUNTIME_BYTES = 2 * GIB
CACHE_RESIDENT_BYTES = GIB
"""Latents and text embeddings kept from the disk, at most (`data.sources`)."""


@dataclass(frozen=True, kw_only=True)
class HostPrediction:
    """`items` add up to `bytes`, which must be free; `loading_bytes` pass through the system's file cache."""

    items: tuple[MemoryItem, ...]
    loading_bytes: int
    limit_bytes: int

    @property
    def bytes(self) -> int:
        return sum(item.bytes for item in self.items)

    @property
    def fits(self) -> bool:
        return self.bytes <= self.limit_bytes

    @property
    def loads_slowly(self) -> bool:
        """Whether weights are read from the disk more than once."""
        return HOST_RUNTIME_BYTES + self.loading_bytes > self.limit_bytes


def predict_host(
    load: Load,
    *,
    facts: BaseFacts,
    costs: RememberedCosts,
    limit_bytes: int,
    pinnable_bytes: int | None,
) -> HostPrediction:
    """Return the host memory that a run on a GPU needs; it may pin `pinnable_bytes` of it, None: all."""
    text = facts.parts["text_encoder"].parameters * ELEMENT_BYTES[load.text_precision]
    base = facts.parts["denoiser"].parameters * ELEMENT_BYTES[load.precision]
    # These follow each other, so the machine must hold the largest of them, not their sum: texts are cached
    # before the base is loaded, and a base is quantised before the first step.
    phases = (
        _training(load, facts, costs, pinnable_bytes),
        _offloaded_text(load, text),
        _quantising(load, facts, costs),
    )
    largest = max(phases, key=lambda items: sum(item.bytes for item in items))
    runtime = MemoryItem(
        name="runtime", bytes=HOST_RUNTIME_BYTES, note="Python, torch and CUDA libraries"
    )
    return HostPrediction(
        items=(runtime, *largest),
        loading_bytes=max(text, base),  # one after the other, through the same file cache
        limit_bytes=limit_bytes,
    )


def _training(
    load: Load, facts: BaseFacts, costs: RememberedCosts, pinnable_bytes: int | None
) -> list[MemoryItem]:
    pinned = pinned_shares(load, facts=facts, costs=costs, pinnable_bytes=pinnable_bytes)
    items = [
        MemoryItem(
            name="cached latents and texts",
            bytes=CACHE_RESIDENT_BYTES,
            note="at most; further entries are read from the disk",
        ),
        prepared_batches(load, facts, costs),
        *saved_copies(load, facts, costs),
        *([vae_weights(facts, note=SAMPLER)] if load.samples else []),
    ]
    if load.streamed_blocks:
        base = costs.frozen_base(facts, load)
        note = f"{load.streamed_blocks} blocks in {load.base_precision}{_pinned(pinned.streamed)}"
        streamed = base.streamed_bytes(load.streamed_blocks)
        items.append(MemoryItem(name="streamed blocks", bytes=streamed, note=note))
    if size := offloaded_bytes(load, facts=facts, costs=costs):
        note = (
            f"inputs of recomputed blocks, {load.micro_batch} at a time{_pinned(pinned.offloaded)} "
            "in powers of two"
        )
        items.append(MemoryItem(name="offloaded activations", bytes=size, note=note))
    states = state_bytes(costs.adapter_tensors(facts, load.adapter), load.optimizer)
    # The driver moves paged states here when the GPU is full, so all of them must find room.
    if states.paged:
        note = f"{load.optimizer}, the paged part"
        items.append(MemoryItem(name="optimizer states", bytes=states.paged, note=note))
    return items


def _pinned(share: float) -> str:
    return ", pinned" if share == 1.0 else f", {share:.0%} of it pinned"


def _quantising(load: Load, facts: BaseFacts, costs: RememberedCosts) -> list[MemoryItem]:
    """Return a streamed base while it is quantised in host memory, before the GPU gets its blocks."""
    base = costs.frozen_base(facts, load)
    if not (load.streamed_blocks and base.is_quantized):
        return []
    note = f"{load.base_precision}, before its blocks move to the GPU"
    return [MemoryItem(name="base while it is quantised", bytes=base.bytes, note=note)]


def _offloaded_text(load: Load, text_bytes: int) -> list[MemoryItem]:
    if not load.text_offload:
        return []
    note = f"{load.text_precision}, while texts are cached"
    return [MemoryItem(name="text encoders", bytes=text_bytes, note=note)]
