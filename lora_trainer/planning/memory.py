"""The settings that decide memory and time, and the peak memory predicted from them before any weight is loaded.

No torch. The search varies a `Load`. A run has phases that are never alive together: encoding images, encoding
texts, training, and drawing sample images. Inputs are the costs of the base and a `Load`; output is every item of
every phase, and the sum of the highest phase: `predict` for the training device, `predict_host` for the machine's
memory beside a GPU.

Weights are read from mapped files, which the system can drop and read again, so loading may exceed the free
memory of the machine and then takes longer. Data that waits there for the device, pinned or not, has to fit, or
the machine swaps. Unpinned memory is copied more slowly, and a step waits for each copy.

Some memory no tensor can have: library workspaces, a growing desktop, holes between tensors. With expandable
segments a pool is one range that grows by pages, so only the last pages and the holes are lost. A hole stays where
a long-lived tensor was put behind a short-lived one: a block's temporaries are freed, its inputs and results for
the backward pass stay. So all holes together are at most the temporaries of one block, and at most a share of the
bytes a step allocates and frees. With a segment for each request, tensors of other buckets leave holes in their
segments too. The shares are the highest that replays of default plans have shown (`scripts/allocator_table.py`,
docs/memory.md).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from lora_trainer.common.wording import GIB
from lora_trainer.config.declare import (
    ENCODED_AT_ONCE,
    ENCODING_BYTES,
    BasePrecision,
    Checkpointing,
    Precision,
)
from lora_trainer.config.learning import AdapterSettings
from lora_trainer.config.optimizers import SCHEDULE_FREE
from lora_trainer.costs.base_costs import ELEMENT_BYTES, BaseCosts, FrozenBase
from lora_trainer.costs.sample_cost import Workload
from lora_trainer.families.files.weight_files import READ_BYTES
from lora_trainer.hardware.devices import KINDS, RESERVED_BYTES, TorchType
from lora_trainer.lora.adapter_size import rebuilt_elements, total_elements
from lora_trainer.planning.optimizer_facts import (
    GRADIENT_BYTES,
    MASTER_BYTES,
    copied_bytes,
    state_bytes,
)

# cuBLAS workspace of each thread: CUBLAS_WORKSPACE_CONFIG `:4096:2:16:8`, `:4096:8` from capability 9.0 on.
CUBLAS_BYTES, HOPPER_CUBLAS_BYTES = 8320 * 2**10, 32 * 2**20
HOPPER = (9, 0)
# The forward pass runs in Python's thread, the backward pass in autograd's; each has its cuBLAS handle.
THREADS = 2
# Workspace of attention's backward pass (fp32 sums of dQ) and of cuDNN, both allocated off the peak.
KERNELS_BYTES = 64 * 2**20
PAGES_BYTES = 128 * 2**20
# Holes as a share of the bytes a step moves, capped at the temporaries of one block.
HOLES = 0.1
# With a segment for each request: unused rests that buckets leave in segments, and holes, as shares.
SEGMENTS, HOLES_OF_SEGMENTS = 0.08, 0.12
# Memory that malloc, or Metal's allocator, keeps after tensors are freed, as a share of all tensors.
SHARED_SLACK = 0.05
# Activations that a CLIP text encoder keeps for one prompt of 77 tokens, over its weights' bytes: 34
# hidden-sized tensors a layer against 12 hidden^2 weights, and the adapters' fp32 copies of inputs.
TEXT_KEPT_SHARE = 0.5
# Temporaries and results of encoding one text, over the encoder's weights: T5-XXL holds its attention scores three
# times, 64 heads of 512 by 512 in fp32 (2 %); Qwen encoders the hidden states of all layers (2 to 3 %).
TEXT_RUN_SHARE = 1 / 24
# Largest part of a text encoder that is on the GPU at once, over the whole: word embeddings take 3 % (T5-XXL) to 10 %
# (Qwen3-4B), blocks 2 to 4 %. More texts than one pass it together where memory is free (network/offload.py).
TEXT_LAYER_SHARE = 1 / 8
# A checkpointed network has at least so many pieces of equal weights; one piece is alive at a time.
REBUILT_PIECES = 8
SLACK = "allocator slack"
# Items allocated and freed within one block.
TEMPORARY = (
    "largest temporary",
    "dequantised layer",
    "sample image",
    "image encoding",
    "text encoding",
)
# Items that a training step allocates and frees.
MOVED = (
    *("activations", "adapter inputs", "dropped inputs", "rebuilt weights", "inputs"),
    *("adapter gradients", *TEMPORARY),
)
Phase = Literal["images", "texts", "loading", "quantising", "training", "sampling"]


def runs_wide(adapter: AdapterSettings) -> bool:
    """Say whether adapted layers keep fp32 copies of their inputs, as all kinds except a plain LoRA do."""
    return adapter.kind != "lora" or adapter.dora


@dataclass(frozen=True, kw_only=True)
class Load:
    """The settings that decide how much memory and time a run takes; `bucket_px` is (width, height),
    `references_px` those of the reference images of an image.

    `twice` is the share of a step's images that appear a second time for class preservation, `as_base` the
    share for which the base's own prediction is computed too, `contrasted` the share for which the prediction
    for the empty prompt is; of a slider they are the further samples and passes of a draw. `further_texts` are those
    of a sample of a slider, `assistant_bytes` the size of the LoRA that the base is trained with. Of GPU memory beside
    tensors, `expandable` says that the allocator grows its segments, `desktop_bytes` are left to other programs, and
    `cublas_bytes` are the workspace of each thread that runs matrix products.
    """

    device: TorchType
    precision: Precision
    base_precision: BasePrecision
    adapter: AdapterSettings
    optimizer: str
    text_precision: Precision
    text_offload: bool
    micro_batch: int
    checkpointing: Checkpointing
    streamed_blocks: int
    bucket_px: tuple[int, int]
    samples: bool
    sample_side_px: int
    prepared_samples: int
    optimizer_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    averaged: bool = False
    references_px: tuple[tuple[int, int], ...] = ()
    masked: bool = False
    twice: float = 0.0
    as_base: float = 0.0
    contrasted: float = 0.0
    further_texts: int = 0
    keeps_best: bool = False
    assistant_bytes: int = 0
    expandable: bool = True
    desktop_bytes: int = 0
    cublas_bytes: int = CUBLAS_BYTES

    def workload(self) -> Workload:
        width_px, height_px = self.bucket_px
        return Workload(
            height_px=height_px,
            width_px=width_px,
            references_px=self.references_px,
            element_bytes=ELEMENT_BYTES[self.precision],
            rank=self.adapter.rank,
            targets=self.adapter.targets,
            checkpointing=self.checkpointing,
            # Costs are per sample, and the same from two samples on: fewer workloads to compute.
            micro_batch=min(self.micro_batch, 2),
            wide_adapter=runs_wide(self.adapter),
        )

    def frozen_base(self, costs: BaseCosts) -> FrozenBase:
        """Return the base's weights in this load's precisions."""
        return costs.frozen_base(self.precision, self.base_precision)


@dataclass(frozen=True)
class MemoryItem:
    """One named part of a phase."""

    name: str
    bytes: int
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Items by phase; `items` belong to the phase with the highest sum, `peak_bytes`."""

    by_phase: Mapping[Phase, Sequence[MemoryItem]]
    limit_bytes: int

    @cached_property
    def phases(self) -> Mapping[Phase, int]:
        """Bytes of each phase."""
        return {phase: sum_bytes(items) for phase, items in self.by_phase.items()}

    @property
    def peak_phase(self) -> Phase:
        return max(self.phases, key=self.phases.__getitem__)

    @property
    def items(self) -> Sequence[MemoryItem]:
        return self.by_phase[self.peak_phase]

    @property
    def peak_bytes(self) -> int:
        return self.phases[self.peak_phase]

    @property
    def fits(self) -> bool:
        return self.peak_bytes <= self.limit_bytes


def predict(load: Load, costs: BaseCosts, *, limit_bytes: int) -> Prediction:
    """Return the predicted peak on the training device of a run with these settings."""
    resident = list(_resident(load, costs))
    phases: dict[Phase, list[MemoryItem]] = {
        "images": list(_images(load, costs)),
        "texts": list(_texts(load, costs)),
    }
    # Where the device has memory of its own, files pass through the host's memory (`predict_host`).
    if not KINDS[load.device].own_memory:
        reading = MemoryItem("file being read", READ_BYTES, "mapped, a part at a time")
        phases["loading"] = [*resident, *_encoding(load, costs), reading]
    phases["training"] = [*resident, *_training(load, costs)]
    if load.samples:
        # Drawn between two steps: no activations, but everything that stays for the next step.
        phases["sampling"] = [*resident, *_sampling(load, costs)]
    outside = list(_outside(load))
    by_phase = {phase: [*outside, *items, _slack(items, load)] for phase, items in phases.items()}
    return Prediction(by_phase=by_phase, limit_bytes=limit_bytes)


def _resident(load: Load, costs: BaseCosts) -> Iterator[MemoryItem]:
    """Yield the items that stay on the device from the first step to the last."""
    own_memory = KINDS[load.device].own_memory
    tensors = costs.adapter_tensors(load.adapter)
    states, paged = state_bytes(tensors, load.optimizer, load.optimizer_options)
    parameters = total_elements(tensors)
    yield from _weights(load, costs)
    if load.assistant_bytes:
        yield MemoryItem("assistant weights", load.assistant_bytes, "frozen, off in sample images")
    # Trained text encoders and their activations stay on the device for the whole run.
    if load.adapter.text_encoder or load.adapter.new_tokens:
        weights = costs.parameters("text_encoder") * ELEMENT_BYTES[load.precision]
        yield MemoryItem("text encoder weights", weights, "run in every step")
        size = int(load.micro_batch * costs.facts.chunks * TEXT_KEPT_SHARE * weights)
        yield MemoryItem("text encoder activations", size, "estimate")
    # The masters, and what has their size: the running average, the best weights, and those that schedule-free
    # averages while they are validated, sampled or exported.
    sets = 1 + load.averaged + load.keeps_best + (load.optimizer == SCHEDULE_FREE)
    note = f"{sets} x {parameters:,} parameters, fp32 masters"
    yield MemoryItem("adapter weights", sets * parameters * MASTER_BYTES, note)
    # Between steps there are none: while samples are drawn, this is the room of the exact weights, which
    # `Adapter.rounded` keeps beside those that it has rounded.
    yield MemoryItem("adapter gradients", parameters * GRADIENT_BYTES, "fp32")
    # Without memory of its own the device would page into the same memory.
    size = states if own_memory else states + paged
    yield MemoryItem("optimizer states", size, f"{load.optimizer}, allocated before step 1")
    if not own_memory:
        yield saved_copies(load, costs)


def saved_copies(load: Load, costs: BaseCosts) -> MemoryItem:
    """Return the host copies of trained weights that a run writes files from while it goes on training."""
    size = copied_bytes(
        costs.adapter_tensors(load.adapter),
        load.optimizer if KINDS[load.device].own_memory else load.optimizer.removeprefix("paged_"),
        load.optimizer_options,
        pinned=KINDS[load.device].pins,
        # The best weights count twice: the copy in the resume state, and the copy its file is written from.
        copies=load.averaged + 2 * load.keeps_best,
    )
    note = "adapter, optimizer states and export, written while training goes on"
    return MemoryItem("copies for saving", size, note)


def _weights(load: Load, costs: BaseCosts) -> Iterator[MemoryItem]:
    """Yield the frozen base: its weights by dtype, and device buffers for weights that lie elsewhere."""
    base, count, precision = load.frozen_base(costs), load.streamed_blocks, load.precision
    elsewhere = base.streamed_bytes(count)
    if not base.is_quantized:
        yield MemoryItem("base weights", base.bytes - elsewhere, f"frozen, {precision}")
    else:
        note = f"frozen, {load.base_precision} with its scales"
        yield MemoryItem("base blocks", base.linear_bytes - elsewhere, note)
        note = f"embeddings, norms, convolutions in {precision}"
        yield MemoryItem("rest of the base", base.other_bytes, note)
        note = f"the largest, in {precision}"
        yield MemoryItem("dequantised layer", base.dequantized_bytes, note)
    if count:
        note = f"{count} of {len(base.block_bytes)} blocks come from host memory"
        yield MemoryItem("streaming buffers", base.buffer_bytes(count), note)


def _encoding(load: Load, costs: BaseCosts) -> Iterator[MemoryItem]:
    """Yield what a layer takes while it is quantised: tensors of the base are read and encoded one at a time."""
    base = load.frozen_base(costs)
    if base.is_quantized:
        elements = base.dequantized_bytes // ELEMENT_BYTES[load.precision]
        size = base.dequantized_bytes + ENCODING_BYTES * min(elements, ENCODED_AT_ONCE)
        yield MemoryItem("layer being quantised", size, "read, and a part of it encoded at a time")


def _training(load: Load, costs: BaseCosts) -> Iterator[MemoryItem]:
    cost, count = costs.sample_cost(load.workload()), load.micro_batch
    width_px, height_px = load.bucket_px
    each = f"{count} x {width_px}x{height_px} px"
    # With checkpointing the tensors of one piece of the network are alive at a time.
    alive = 1.0 if load.checkpointing == "none" else 1.0 / REBUILT_PIECES
    # LoHa and LoKr build full-size weight changes from the factors in every forward pass, in fp32, and autograd
    # keeps them.
    adapter = load.adapter
    if elements := rebuilt_elements(costs.adapted(adapter), adapter):
        rebuilt = elements * alive
        if adapter.text_encoder:  # not checkpointed, so all of its changes are kept
            rebuilt += sum(
                rebuilt_elements(shapes, adapter) for shapes in costs.text_adapter_shapes.values()
            )
        yield MemoryItem("rebuilt weights", int(MASTER_BYTES * rebuilt), f"{adapter.kind}, fp32")
    # `saved_bytes` has the adapter's inputs in it; they are the next item.
    size = count * (cost.saved_bytes - cost.adapter_saved_bytes)
    yield MemoryItem("activations", size, f"{each}, checkpointing: {load.checkpointing}")
    if (
        size := count * cost.adapter_saved_bytes
    ):  # a plain LoRA reads the inputs that the layers keep
        yield MemoryItem("adapter inputs", size, f"fp32 copies and rank-wide middles, {each}")
    # `adapter.dropout` copies the input of each adapted layer. A wide adapter makes as many fp32 copies anyway, and
    # dropout replaces these.
    if adapter.dropout and not (runs_wide(adapter) and load.precision != "fp32"):
        # In a wide adapter of rank 1 in 16 bits nearly all saved bytes are fp32 copies of the inputs, so its
        # cost counts the adapted layers' inputs. `share` converts them to the training precision.
        copying = replace(
            load.workload(), element_bytes=2, wide_adapter=True, checkpointing="none", rank=1
        )
        share = alive * ELEMENT_BYTES[load.precision] / MASTER_BYTES
        size = int(count * costs.sample_cost(copying).adapter_saved_bytes * share)
        note = "a copy of each layer's input after adapter.dropout"
        yield MemoryItem("dropped inputs", size, note)
    # Their passes run first and without gradients, below training's peak.
    prediction_bytes = count * 4 * costs.facts.latent_channels * latent_area(load, costs)
    if load.contrasted:
        yield MemoryItem("prediction without a prompt", prediction_bytes, "moves the target")
    if load.as_base:
        yield MemoryItem("base's prediction", prediction_bytes, "target of some samples")
    note = "gradients between layers and recomputed activations"
    yield MemoryItem("largest temporary", count * cost.temporary_bytes, note)
    # A GPU gets one micro-batch, the others wait in host memory.
    if KINDS[load.device].own_memory:
        note = f"{count} at a time: latents, noise, target, text"
        yield MemoryItem("inputs", count * _prepared_bytes(load, costs), note)
    else:
        yield prepared_batches(load, costs)
        if load.samples:
            yield vae_weights(costs)


def prepared_batches(load: Load, costs: BaseCosts) -> MemoryItem:
    """Return the host memory of batches that the dataloader prepares ahead."""
    count = load.prepared_samples
    note = f"{count} samples ahead: latents, noise, target, text"
    return MemoryItem("prepared batches", count * _prepared_bytes(load, costs), note)


def _prepared_bytes(load: Load, costs: BaseCosts) -> int:
    """Return the bytes of one prepared sample in fp32: latents, noise, target, mask and conditioning."""
    area = latent_area(load, costs)
    # Latents, noise and target have the same shape.
    elements = 3 * costs.facts.latent_channels * area + (area if load.masked else 0)
    elements += costs.facts.latent_channels * _references_area(load, costs)
    # The empty prompt lies beside the caption; it is counted as if it were as long.
    texts = (2 if load.contrasted else 1) + load.further_texts
    return 4 * elements + texts * costs.text_bytes(load.references_px)


def latent_area(load: Load, costs: BaseCosts) -> int:
    """Return the elements of one channel of a latent of the load's bucket."""
    width_px, height_px = load.bucket_px
    return (width_px // costs.facts.vae_factor) * (height_px // costs.facts.vae_factor)


def _references_area(load: Load, costs: BaseCosts) -> int:
    """Return the elements of one channel of the latents of all references of an image."""
    factor = costs.facts.vae_factor
    return sum((width // factor) * (height // factor) for width, height in load.references_px)


def vae_weights(costs: BaseCosts) -> MemoryItem:
    """Return the VAE's weights, in fp32 whatever dtype the base is trained in; they stay between sample images."""
    return MemoryItem("VAE weights", 4 * costs.parameters("vae"), "fp32")


def _vae_elements_per_px(load: Load, costs: BaseCosts) -> tuple[int, int]:
    """Return the elements a pixel that the VAE has alive at its peak, encoding and decoding."""
    peak = costs.family.traits.vae_peak
    is_blocked = KINDS[load.device].blocks_convolutions
    return peak.blocked if is_blocked else (peak.encoding, peak.decoding)


def _images(load: Load, costs: BaseCosts) -> Iterator[MemoryItem]:
    width_px, height_px = max((load.bucket_px, *load.references_px), key=math.prod)
    elements = _vae_elements_per_px(load, costs)[0] * width_px * height_px
    yield vae_weights(costs)
    note = f"one image of {width_px}x{height_px} px, fp32"
    yield MemoryItem("image encoding", 4 * elements, note)


def _texts(load: Load, costs: BaseCosts) -> Iterator[MemoryItem]:
    """Yield the text encoder while captions are cached: the VAE is freed, the denoiser not loaded yet."""
    weights = costs.parameters("text_encoder") * ELEMENT_BYTES[load.text_precision]
    if load.text_offload:
        note = f"{load.text_precision}, the largest block: blocks are copied in one at a time"
        yield MemoryItem("text encoder block", int(weights * TEXT_LAYER_SHARE), note)
    else:
        yield MemoryItem("text encoder weights", weights, load.text_precision)
    note = "activations of one text, estimate"
    yield MemoryItem("text encoding", int(TEXT_RUN_SHARE * weights), note)


def _sampling(load: Load, costs: BaseCosts) -> Iterator[MemoryItem]:
    """Yield the items of drawing sample images, beside all that training keeps; prompts are cached."""
    side_px = load.sample_side_px
    # Without gradients nothing is kept, so micro-batch and checkpointing of the training do not matter.
    alone = replace(load, micro_batch=1, bucket_px=(side_px, side_px), checkpointing="none")
    forward_bytes = costs.sample_cost(alone.workload()).forward_bytes
    encoding, decoding = (4 * each for each in _vae_elements_per_px(load, costs))
    # References are encoded before, one after another.
    vae = max(
        decoding * side_px * side_px, *(encoding * math.prod(s) for s in load.references_px), 0
    )
    yield vae_weights(costs)
    # Guidance predicts with the prompt and the negative prompt together; decoding comes later.
    size = max(vae, 2 * forward_bytes)
    note = f"the larger of: decoding {side_px}x{side_px} px in fp32, a guided forward pass"
    yield MemoryItem("sample image", size, note)


def _outside(load: Load) -> Iterator[MemoryItem]:
    """Yield the device memory outside of tensors, taken in every phase."""
    kind = KINDS[load.device]
    yield MemoryItem("runtime", kind.runtime_bytes, "libraries, GPU context and kernels")
    if not kind.own_memory:
        return
    library_bytes = THREADS * load.cublas_bytes + KERNELS_BYTES
    note = "matrix products, convolutions, attention"
    yield MemoryItem("library workspaces", library_bytes, note)
    if load.desktop_bytes:
        note = "room for other programs to grow"
        yield MemoryItem("desktop", load.desktop_bytes, note)


def _slack(items: Sequence[MemoryItem], load: Load) -> MemoryItem:
    """Return the memory that the allocator keeps beyond the tensors of a phase."""
    if not KINDS[load.device].own_memory:
        size = int(SHARED_SLACK * sum_bytes(items))
        return MemoryItem(SLACK, size, "freed memory that the allocator keeps")
    moved_bytes = temporary_bytes = 0
    for item in items:
        if item.name in MOVED:
            moved_bytes += item.bytes
        if item.name in TEMPORARY:
            temporary_bytes += item.bytes
    holes, segments = (HOLES, 0.0) if load.expandable else (HOLES_OF_SEGMENTS, SEGMENTS)
    holes_bytes = min(int(holes * moved_bytes), temporary_bytes)
    size = PAGES_BYTES + int(segments * moved_bytes) + holes_bytes
    return MemoryItem(SLACK, size, "holes between tensors, and unused ends of segments")


def sum_bytes(items: Iterable[MemoryItem]) -> int:
    """Return the bytes of all these items."""
    return sum(item.bytes for item in items)


# ---- beside a GPU


def pinned_shares(
    load: Load, costs: BaseCosts, *, pinnable_bytes: int | None
) -> tuple[float, float]:
    """Return the pinned shares, 0 to 1, of streamed blocks and of offloaded inputs.

    A process may pin `pinnable_bytes`; None: no limit. Blocks are pinned first: they are pinned once, before
    the first step, and inputs as they come.
    """
    if pinnable_bytes is None:
        return 1.0, 1.0
    usable_bytes = max(0, pinnable_bytes - RESERVED_BYTES)
    blocks = load.frozen_base(costs).streamed_bytes(load.streamed_blocks)
    inputs = offloaded_bytes(load, costs)
    pinned_blocks = min(usable_bytes, blocks)
    pinned_inputs = min(usable_bytes - pinned_blocks, inputs)
    # Where there is nothing to copy no copy is slow.
    return pinned_blocks / blocks if blocks else 1.0, pinned_inputs / inputs if inputs else 1.0


# Torch rounds pinned memory up to powers of two; a plan knows only the sum of the inputs, so: twice.
PINNED_AT_MOST = 2


def offloaded_bytes(load: Load, costs: BaseCosts) -> int:
    """Return the most bytes that inputs of recomputed blocks can take in host memory."""
    return PINNED_AT_MOST * load.micro_batch * costs.sample_cost(load.workload()).host_bytes


# Python with torch, diffusers and transformers, and the CUDA libraries it maps.
HOST_RUNTIME_BYTES = 2 * GIB
# Latents and text embeddings kept from the disk, at most (`data.sources`).
CACHE_RESIDENT_BYTES = GIB


def predict_host(
    load: Load, costs: BaseCosts, *, limit_bytes: int, pinnable_bytes: int | None
) -> Prediction:
    """Return the host memory that a run on a GPU needs; it may pin `pinnable_bytes` of it, None: all."""
    runtime = MemoryItem("runtime", HOST_RUNTIME_BYTES, "Python, torch and CUDA libraries")
    # These follow each other, so the machine must hold the largest of them, not their sum: texts are cached
    # before the base is loaded, and a base is quantised before the first step.
    phases: dict[Phase, list[MemoryItem]] = {
        "training": [runtime, *_waiting(load, costs, pinnable_bytes)],
        "texts": [runtime],
        "quantising": [runtime],
    }
    if load.text_offload:
        size = costs.parameters("text_encoder") * ELEMENT_BYTES[load.text_precision]
        note = f"{load.text_precision}, while texts are cached"
        phases["texts"].append(MemoryItem("text encoders", size, note))
    # Layer by layer a base goes to the GPU; one that is streamed waits here until its blocks move there.
    phases["quantising"].extend(_encoding(load, costs))
    if load.streamed_blocks and (base := load.frozen_base(costs)).is_quantized:
        note = f"{load.base_precision}, before its blocks move to the GPU"
        phases["quantising"].append(MemoryItem("base while it is quantised", base.bytes, note))
    return Prediction(by_phase=phases, limit_bytes=limit_bytes)


def _waiting(load: Load, costs: BaseCosts, pinnable_bytes: int | None) -> Iterator[MemoryItem]:
    streamed, offloaded = pinned_shares(load, costs, pinnable_bytes=pinnable_bytes)
    note = "at most; further entries are read from the disk"
    yield MemoryItem("cached latents and texts", CACHE_RESIDENT_BYTES, note)
    yield prepared_batches(load, costs)
    yield saved_copies(load, costs)
    if load.samples:
        yield vae_weights(costs)
    if count := load.streamed_blocks:
        note = f"{count} blocks in {load.base_precision}{_pinned(streamed)}"
        yield MemoryItem("streamed blocks", load.frozen_base(costs).streamed_bytes(count), note)
    if size := offloaded_bytes(load, costs):
        note = f"inputs of recomputed blocks, {load.micro_batch} at a time{_pinned(offloaded)}"
        yield MemoryItem("offloaded activations", size, f"{note} in powers of two")
    # The driver moves paged states here when the GPU is full, so all of them must find room.
    if size := state_bytes(
        costs.adapter_tensors(load.adapter), load.optimizer, load.optimizer_options
    )[1]:
        yield MemoryItem("optimizer states", size, f"{load.optimizer}, the paged part")


def _pinned(share: float) -> str:
    return ", pinned" if share == 1.0 else f", {share:.0%} of it pinned"
