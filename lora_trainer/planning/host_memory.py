"""Predicted host memory of a run on a GPU: data that waits there for the device, and weights as they load.

Inputs are those of `memory.predict`, and the bytes that the platform lets a process pin; output is one
`HostPrediction`. Weights are read from mapped files, which the system can drop and read again, so loading
may exceed the free memory and then takes longer. Data that waits for the device, pinned or not, has to fit,
or the machine swaps. Unpinned memory is copied more slowly, and a step waits for each copy. No torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lora_trainer.hardware.devices import RESERVED_BYTES
from lora_trainer.planning.loads import Load, RememberedCosts
from lora_trainer.planning.memory import (
    GIB,
    SAMPLER,
    MemoryItem,
    Phase,
    Prediction,
    prepared_batches,
    saved_copies,
    vae_weights,
)
from lora_trainer.planning.weight_bytes import ELEMENT_BYTES, state_bytes


def pinned_shares(
    load: Load, costs: RememberedCosts, *, pinnable_bytes: int | None
) -> tuple[float, float]:
    """Return the pinned shares, 0 to 1, of streamed blocks and of offloaded inputs.

    A process may pin `pinnable_bytes`; None: no limit. Blocks are pinned first: they are pinned once, before
    the first step, and inputs as they come.
    """
    if pinnable_bytes is None:
        return 1.0, 1.0
    usable_bytes = max(0, pinnable_bytes - RESERVED_BYTES)
    blocks = costs.frozen_base(load).streamed_bytes(load.streamed_blocks)
    inputs = offloaded_bytes(load, costs)
    pinned_blocks = min(usable_bytes, blocks)
    pinned_inputs = min(usable_bytes - pinned_blocks, inputs)
    # Where there is nothing to copy no copy is slow.
    return pinned_blocks / blocks if blocks else 1.0, pinned_inputs / inputs if inputs else 1.0


PINNED_AT_MOST = 2
"""Torch rounds pinned memory up to powers of two; a plan knows only the sum of the inputs, so: twice."""


def offloaded_bytes(load: Load, costs: RememberedCosts) -> int:
    """Return the most bytes that inputs of recomputed blocks can take in host memory."""
    return PINNED_AT_MOST * load.micro_batch * costs.sample_cost(load.workload()).host_bytes


# Python with torch, diffusers and transformers, and the CUDA libraries it maps.
HOST_RUNTIME_BYTES = 2 * GIB
CACHE_RESIDENT_BYTES = GIB
"""Latents and text embeddings kept from the disk, at most (`data.sources`)."""


@dataclass(frozen=True, kw_only=True)
class HostPrediction(Prediction):
    """Memory that must be free by phase; `loading_bytes` pass through the system's file cache."""

    limit_bytes: int
    loading_bytes: int

    @property
    def loads_slowly(self) -> bool:
        """Whether weights are read from the disk more than once."""
        return HOST_RUNTIME_BYTES + self.loading_bytes > self.limit_bytes


def predict_host(
    load: Load, costs: RememberedCosts, *, limit_bytes: int, pinnable_bytes: int | None
) -> HostPrediction:
    """Return the host memory that a run on a GPU needs; it may pin `pinnable_bytes` of it, None: all."""
    text = costs.parameters("text_encoder") * ELEMENT_BYTES[load.text_precision]
    base = costs.parameters("denoiser") * ELEMENT_BYTES[load.precision]
    note = f"{load.text_precision}, while texts are cached"
    # These follow each other, so the machine must hold the largest of them, not their sum: texts are cached
    # before the base is loaded, and a base is quantised before the first step.
    phases: dict[Phase, Iterable[MemoryItem]] = {
        "training": _training(load, costs, pinnable_bytes),
        "texts": [MemoryItem("text encoders", text, note)] if load.text_offload else [],
        "quantising": _quantising(load, costs),
    }
    runtime = MemoryItem("runtime", HOST_RUNTIME_BYTES, "Python, torch and CUDA libraries")
    return HostPrediction(
        by_phase={phase: (runtime, *items) for phase, items in phases.items()},
        loading_bytes=max(text, base),  # one after the other, through the same file cache
        limit_bytes=limit_bytes,
    )


def _training(
    load: Load, costs: RememberedCosts, pinnable_bytes: int | None
) -> Iterator[MemoryItem]:
    streamed, offloaded = pinned_shares(load, costs, pinnable_bytes=pinnable_bytes)
    note = "at most; further entries are read from the disk"
    yield MemoryItem("cached latents and texts", CACHE_RESIDENT_BYTES, note)
    yield prepared_batches(load, costs)
    yield saved_copies(load, costs)
    if load.samples:
        yield vae_weights(costs, SAMPLER)
    if count := load.streamed_blocks:
        note = f"{count} blocks in {load.base_precision}{_pinned(streamed)}"
        yield MemoryItem("streamed blocks", costs.frozen_base(load).streamed_bytes(count), note)
    if size := offloaded_bytes(load, costs):
        note = f"inputs of recomputed blocks, {load.micro_batch} at a time{_pinned(offloaded)}"
        yield MemoryItem("offloaded activations", size, f"{note} in powers of two")
    # The driver moves paged states here when the GPU is full, so all of them must find room.
    if size := state_bytes(costs.adapter_tensors(load.adapter), load.optimizer)[1]:
        yield MemoryItem("optimizer states", size, f"{load.optimizer}, the paged part")


def _pinned(share: float) -> str:
    return ", pinned" if share == 1.0 else f", {share:.0%} of it pinned"


def _quantising(load: Load, costs: RememberedCosts) -> Iterator[MemoryItem]:
    """Yield a streamed base while it is quantised in host memory, before the GPU gets its blocks."""
    base = costs.frozen_base(load)
    if load.streamed_blocks and base.is_quantized:
        note = f"{load.base_precision}, before its blocks move to the GPU"
        yield MemoryItem("base while it is quantised", base.bytes, note)
