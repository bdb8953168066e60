"""Predicted peak memory of a run, item by item, before any weight is loaded. No torch.

A run has phases that are never alive together: encoding images, encoding texts, training, and drawing
sample images. Inputs are the facts of the base, the family's cost of one sample and a `Load`; output is
every item of every phase, and the sum of the highest phase. `host_memory.py` does the same for the
machine's memory beside a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lora_trainer.config.base_precision import INT8_TEMPORARY_BYTES
from lora_trainer.config.config import SCHEDULE_FREE, Checkpointing
from lora_trainer.families.base import BaseFacts
from lora_trainer.families.base_files.base_folder import READ_BYTES
from lora_trainer.hardware.devices import KINDS
from lora_trainer.lora.adapter_size import rebuilt_elements
from lora_trainer.planning.loads import DeviceSurroundings, Load, RememberedCosts, runs_wide
from lora_trainer.planning.weight_bytes import (
    ELEMENT_BYTES,
    GRADIENT_BYTES,
    MASTER_BYTES,
    PAGED,
    FrozenBase,
    copied_bytes,
    state_bytes,
)

GIB = 2**30
RUNTIME_BYTES: Mapping[str, int] = {name: kind.runtime_bytes for name, kind in KINDS.items()}
SHARED_SLACK = 0.05
"""Memory that malloc, or Metal's allocator, keeps after tensors are freed, as a share of all tensors."""
# Activations that a CLIP text encoder keeps for one prompt of 77 tokens, over its weights' bytes: 34
# hidden-sized tensors a layer against 12 hidden^2 weights, and the adapters' fp32 copies of inputs.
TEXT_KEPT_SHARE = 0.5
TEXT_RUN_SHARE = 1 / 24
"""Temporaries and results of encoding one text, over the encoder's weights: T5-XXL holds its attention scores
three times, 64 heads of 512 by 512 in fp32 (2 %); Qwen encoders the hidden states of all layers (2 to 3 %)."""
TEXT_LAYER_SHARE = 1 / 8
"""Largest layer of a text encoder over the whole: word embeddings take 3 % (T5-XXL) to 10 % (Qwen3-4B)."""
REBUILT_PIECES = 8
"""A checkpointed network has at least so many pieces of equal weights; one piece is alive at a time."""
SHOWN = "fp32, while they are validated, sampled or exported"
SAMPLER = "fp32, between sample images too"
SLACK = "allocator slack"
TEMPORARY = (
    "largest temporary",
    "dequantised layer",
    "sample image",
    "image encoding",
    "text encoding",
)
"""Items allocated and freed within one block."""
ACTIVATIONS = (
    "activations",
    "adapter inputs",
    "dropped inputs",
    "rebuilt weights",
    "largest temporary",
)
"""Items that a training step allocates and frees; CUDA graphs keep their memory between steps."""
MOVED = (*ACTIVATIONS, *TEMPORARY, "inputs", "adapter gradients")
Phase = Literal["images", "texts", "loading", "training", "sampling"]


@dataclass(frozen=True, kw_only=True)
class MemoryItem:
    """One named part of a phase."""

    name: str
    bytes: int
    note: str = ""


READING = MemoryItem(name="file being read", bytes=READ_BYTES, note="mapped, a part at a time")


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """Items by phase; `items` belong to the phase with the highest sum, `peak_bytes`."""

    by_phase: Mapping[Phase, tuple[MemoryItem, ...]]
    limit_bytes: int | None

    @property
    def phases(self) -> Mapping[Phase, int]:
        """Bytes of each phase."""
        return {phase: _sum(items) for phase, items in self.by_phase.items()}

    @property
    def peak_phase(self) -> Phase:
        return max(self.by_phase, key=lambda phase: _sum(self.by_phase[phase]))

    @property
    def items(self) -> tuple[MemoryItem, ...]:
        return self.by_phase[self.peak_phase]

    @property
    def peak_bytes(self) -> int:
        return _sum(self.items)

    @property
    def fits(self) -> bool:
        return self.limit_bytes is None or self.peak_bytes <= self.limit_bytes


def predict(
    load: Load, *, facts: BaseFacts, costs: RememberedCosts, limit_bytes: int | None = None
) -> Prediction:
    """Return the predicted peak on the training device of a run with these settings."""
    resident = _resident(load, facts, costs)
    phases: dict[Phase, list[MemoryItem]] = {
        "images": _images(load, facts, costs),
        "texts": _texts(load, facts),
    }
    # Where the device has memory of its own, files pass through the host's memory (host_memory.py).
    if not KINDS[load.device].own_memory:
        phases["loading"] = [*resident, READING]
    phases["training"] = [*resident, *_training(load, facts, costs)]
    if load.samples:
        # Drawn between two steps: no activations, but everything that stays for the next step.
        phases["sampling"] = [*resident, *_sampling(load, facts, costs)]
    return Prediction(
        by_phase={
            phase: (*_outside(load), *items, _slack(phase, items, load))
            for phase, items in phases.items()
        },
        limit_bytes=limit_bytes,
    )


def _resident(load: Load, facts: BaseFacts, costs: RememberedCosts) -> list[MemoryItem]:
    """Return the items that stay on the device from the first step to the last."""
    adapter = costs.adapter_parameters(facts, load.adapter)
    states = state_bytes(costs.adapter_tensors(facts, load.adapter), load.optimizer)
    if KINDS[load.device].own_memory:
        state = states.on_device
        where = "without the paged part" if load.optimizer in PAGED else "allocated before step 1"
    else:
        state, where = states.total, "allocated before step 1"  # paging leads to the same memory
    return [
        *_weights(load, costs.frozen_base(facts, load)),
        *_trained_text(load, facts),
        MemoryItem(
            name="adapter weights",
            bytes=adapter * MASTER_BYTES,
            note=f"{adapter:,} parameters, fp32 masters",
        ),
        *(
            [MemoryItem(name="adapter average", bytes=adapter * MASTER_BYTES, note="fp32")]
            if load.averaged
            else []
        ),
        *(
            [MemoryItem(name="best adapter", bytes=adapter * MASTER_BYTES, note="fp32")]
            if load.keeps_best
            else []
        ),
        *(
            [MemoryItem(name="averaged weights", bytes=adapter * MASTER_BYTES, note=SHOWN)]
            if load.optimizer == SCHEDULE_FREE
            else []
        ),
        MemoryItem(name="adapter gradients", bytes=adapter * GRADIENT_BYTES, note="fp32"),
        MemoryItem(name="optimizer states", bytes=state, note=f"{load.optimizer}, {where}"),
        *(saved_copies(load, facts, costs) if not KINDS[load.device].own_memory else []),
    ]


def saved_copies(load: Load, facts: BaseFacts, costs: RememberedCosts) -> list[MemoryItem]:
    """Return the host copies of trained weights that a run writes files from while it goes on training."""
    size = copied_bytes(
        costs.adapter_tensors(facts, load.adapter),
        load.optimizer if KINDS[load.device].own_memory else load.optimizer.removeprefix("paged_"),
        pissa=load.adapter.init == "pissa",
        pinned=KINDS[load.device].pins,
        # The best weights count twice: the copy in the resume state, and the copy its file is written from.
        copies=load.averaged + 2 * load.keeps_best,
    )
    note = "adapter, optimizer states and export, written while training goes on"
    return [MemoryItem(name="copies for saving", bytes=size, note=note)]


def _weights(load: Load, base: FrozenBase) -> list[MemoryItem]:
    """Return the frozen base: its weights by dtype, and device buffers for weights that lie elsewhere."""
    count, items = load.streamed_blocks, []
    elsewhere = base.streamed_bytes(count)
    if base.is_quantized:
        items += [
            MemoryItem(
                name="base blocks",
                bytes=base.linear_bytes - elsewhere,
                note=f"frozen, {load.base_precision} with its scales",
            ),
            MemoryItem(
                name="rest of the base",
                bytes=base.other_bytes,
                note=f"embeddings, norms, convolutions in {load.precision}",
            ),
            MemoryItem(
                name="dequantised layer",
                bytes=max(
                    base.dequantized_bytes,
                    INT8_TEMPORARY_BYTES if load.base_matmul == "int8" else 0,
                ),
                note=f"the largest, in {load.precision}"
                + (", or buffers of an int8 product" if load.base_matmul == "int8" else ""),
            ),
        ]
    else:
        note = f"frozen, {load.precision}"
        items.append(MemoryItem(name="base weights", bytes=base.bytes - elsewhere, note=note))
    if count:
        items.append(
            MemoryItem(
                name="streaming buffers",
                bytes=base.buffer_bytes(count),
                note=f"{count} of {len(base.block_bytes)} blocks come from host memory",
            )
        )
    return items


def _training(load: Load, facts: BaseFacts, costs: RememberedCosts) -> list[MemoryItem]:
    cost, count = costs.sample_cost(facts, load.workload()), load.micro_batch
    width_px, height_px = load.bucket_px
    own_memory = KINDS[load.device].own_memory
    each = f"{count} x {width_px}x{height_px} px"
    return [
        *_rebuilt(load, facts, costs),
        MemoryItem(
            name="activations",
            # `saved_bytes` has the adapter's inputs in it; they are the next item.
            bytes=count * (cost.saved_bytes - cost.adapter_saved_bytes),
            note=f"{KEPT[load.checkpointing]}, {each}",
        ),
        MemoryItem(
            name="adapter inputs",
            bytes=count * cost.adapter_saved_bytes,
            note=f"fp32 copies and rank-wide middles, {each}"
            if runs_wide(load.adapter)
            else "none: a plain LoRA reads the inputs that the layers keep",
        ),
        *_dropped_inputs(load, facts, costs),
        *_base_prediction(load, facts),
        MemoryItem(
            name="largest temporary",
            bytes=count * cost.temporary_bytes,
            note="gradients between layers and recomputed activations",
        ),
        _inputs(load, facts, costs),
        *([vae_weights(facts, SAMPLER)] if load.samples and not own_memory else []),
    ]


def _base_prediction(load: Load, facts: BaseFacts) -> list[MemoryItem]:
    """Return the base's own prediction. Its pass runs first and without gradients, below training's peak."""
    if not load.as_base:
        return []
    size = load.micro_batch * 4 * facts.latent_channels * _latent_area(load, facts)
    return [MemoryItem(name="base's prediction", bytes=size, note="target of some samples")]


def _dropped_inputs(load: Load, facts: BaseFacts, costs: RememberedCosts) -> list[MemoryItem]:
    """Return the copies of inputs that `adapter.dropout` makes for each adapted layer.

    They are as many as the fp32 copies of a wide adapter. If it makes those anyway, dropout replaces them.
    """
    if not load.adapter.dropout or (runs_wide(load.adapter) and load.precision != "fp32"):
        return []
    # In a wide adapter of rank 1 in 16 bits nearly all saved bytes are fp32 copies of the inputs, so its
    # cost counts the adapted layers' inputs. `share` below converts them to the training precision.
    copying = replace(
        load.workload(),
        element_bytes=2,
        wide_adapter=True,
        checkpointing="none",
        rank=1,
    )
    copies = costs.sample_cost(facts, copying).adapter_saved_bytes
    share = rebuilt_share(load) * ELEMENT_BYTES[load.precision] / MASTER_BYTES
    size = int(load.micro_batch * copies * share)
    note = "a copy of each layer's input after adapter.dropout"
    return [MemoryItem(name="dropped inputs", bytes=size, note=note)]


def _inputs(load: Load, facts: BaseFacts, costs: RememberedCosts) -> MemoryItem:
    """Return the inputs on the device: a GPU gets one micro-batch, the others wait in host memory."""
    if KINDS[load.device].own_memory:
        size = load.micro_batch * prepared_bytes(load, facts, costs)
        note = f"{load.micro_batch} at a time: latents, noise, target, text"
        return MemoryItem(name="inputs", bytes=size, note=note)
    return prepared_batches(load, facts, costs)


def prepared_batches(load: Load, facts: BaseFacts, costs: RememberedCosts) -> MemoryItem:
    """Return the host memory of batches that the dataloader prepares ahead."""
    return MemoryItem(
        name="prepared batches",
        bytes=load.prepared_samples * prepared_bytes(load, facts, costs),
        note=f"{load.prepared_samples} samples ahead: latents, noise, target, text",
    )


KEPT: Mapping[Checkpointing, str] = {
    "none": "kept for backward",
    "light": "inputs of blocks, results of attention and matrix products",
    "selective": "inputs of blocks, results of attention and wide matrix products",
    "full": "inputs of blocks",
    "offloaded": "inputs of two blocks, all others in host memory",
}


def _rebuilt(load: Load, facts: BaseFacts, costs: RememberedCosts) -> list[MemoryItem]:
    """Return full-size weight changes, which LoHa and LoKr build and autograd keeps, and PiSSA's start.

    Text encoders are not checkpointed, so all of theirs are kept.
    """
    shapes = costs.adapter_shapes(facts, targets=load.adapter.targets)
    texts = costs.text_adapter_shapes(facts).values() if load.adapter.text_encoder else ()
    items = []
    if load.adapter.init == "pissa":
        start = MASTER_BYTES * costs.adapter_parameters(facts, load.adapter)
        items.append(MemoryItem(name="adapter's start", bytes=start, note="PiSSA, fp32"))
    # Built from the factors in every forward pass, in fp32 and in the size of the layer's own weight.
    if elements := rebuilt_elements(shapes, load.adapter):
        kept_elements = elements * rebuilt_share(load)
        kept_elements += sum(rebuilt_elements(text_shapes, load.adapter) for text_shapes in texts)
        size = int(MASTER_BYTES * kept_elements)
        items.append(
            MemoryItem(name="rebuilt weights", bytes=size, note=f"{load.adapter.kind}, fp32")
        )
    return items


def rebuilt_share(load: Load) -> float:
    """Return the share of all blocks whose tensors are alive: one piece at a time with checkpointing."""
    return 1.0 if load.checkpointing == "none" else 1.0 / REBUILT_PIECES


def prepared_bytes(load: Load, facts: BaseFacts, costs: RememberedCosts) -> int:
    """Return the bytes of one prepared sample in fp32: latents, noise, target, mask and conditioning."""
    cost = costs.sample_cost(facts, load.workload())
    area = _latent_area(load, facts)
    mask = area if load.masked else 0
    # Latents, noise and target have the same shape.
    return 4 * (3 * facts.latent_channels * area + mask) + cost.conditioning_bytes


def _latent_area(load: Load, facts: BaseFacts) -> int:
    width_px, height_px = load.bucket_px
    return (width_px // facts.vae_factor) * (height_px // facts.vae_factor)


def _trained_text(load: Load, facts: BaseFacts) -> list[MemoryItem]:
    """Return trained text encoders with their activations; they stay on the device for the whole run."""
    if not (load.adapter.text_encoder or load.adapter.new_tokens):
        return []
    weights = facts.parts["text_encoder"].parameters * ELEMENT_BYTES[load.precision]
    activation_bytes = int(load.micro_batch * facts.chunks * TEXT_KEPT_SHARE * weights)
    return [
        MemoryItem(name="text encoder weights", bytes=weights, note="run in every step"),
        MemoryItem(name="text encoder activations", bytes=activation_bytes, note="estimate"),
    ]


def vae_weights(facts: BaseFacts, note: str = "fp32") -> MemoryItem:
    """Return the VAE's weights, in fp32 whatever dtype the base is trained in."""
    return MemoryItem(name="VAE weights", bytes=4 * facts.parts["vae"].parameters, note=note)


def _vae_elements_per_px(load: Load, costs: RememberedCosts) -> tuple[int, int]:
    """Return the elements a pixel that the VAE has alive at its peak, encoding and decoding."""
    if KINDS[load.device].blocks_convolutions:
        return costs.family.traits.vae_peak.blocked
    return costs.family.traits.vae_peak.encoding, costs.family.traits.vae_peak.decoding


def _images(load: Load, facts: BaseFacts, costs: RememberedCosts) -> list[MemoryItem]:
    width_px, height_px = load.bucket_px
    elements = _vae_elements_per_px(load, costs)[0] * width_px * height_px
    return [
        vae_weights(facts),
        MemoryItem(
            name="image encoding",
            bytes=4 * elements,
            note=f"one image of {width_px}x{height_px} px, fp32",
        ),
    ]


def _texts(load: Load, facts: BaseFacts) -> list[MemoryItem]:
    """Return the text encoder while captions are cached: the VAE is freed, the denoiser not loaded yet."""
    weights = facts.parts["text_encoder"].parameters * ELEMENT_BYTES[load.text_precision]
    if load.text_offload:
        largest = int(weights * TEXT_LAYER_SHARE)
        note = f"{load.text_precision}, the largest layer: layers are copied in one at a time"
        weights_item = MemoryItem(name="text encoder layer", bytes=largest, note=note)
    else:
        weights_item = MemoryItem(
            name="text encoder weights", bytes=weights, note=load.text_precision
        )
    size, note = int(TEXT_RUN_SHARE * weights), "activations of one text, estimate"
    return [weights_item, MemoryItem(name="text encoding", bytes=size, note=note)]


def _sampling(load: Load, facts: BaseFacts, costs: RememberedCosts) -> list[MemoryItem]:
    """Return the items of drawing sample images, beside all that training keeps; prompts are cached."""
    side_px = load.sample_side_px
    # Without gradients nothing is kept, so micro-batch and checkpointing of the training do not matter.
    alone = replace(load, micro_batch=1, bucket_px=(side_px, side_px), checkpointing="none")
    cost = costs.sample_cost(facts, alone.workload())
    decoding = 4 * _vae_elements_per_px(load, costs)[1] * side_px * side_px
    return [
        vae_weights(facts),
        MemoryItem(
            name="sample image",
            # Guidance predicts with the prompt and the negative prompt together; decoding comes later.
            bytes=max(decoding, 2 * cost.forward_bytes),
            note=f"decoding {side_px}x{side_px} px in fp32, or a guided forward pass",
        ),
    ]


def _outside(load: Load) -> list[MemoryItem]:
    """Return the device memory outside of tensors, taken in every phase."""
    on_card = KINDS[load.device].own_memory
    note = "context and kernels of the GPU" if on_card else "Python, torch and libraries"
    items = [MemoryItem(name="runtime", bytes=RUNTIME_BYTES[load.device], note=note)]
    if not on_card:
        return items
    items.append(
        MemoryItem(
            name="library workspaces",
            bytes=load.beside.library_bytes,
            note="matrix products, convolutions, attention",
        )
    )
    if load.beside.desktop_bytes:
        note = "room for other programs to grow"
        items.append(MemoryItem(name="desktop", bytes=load.beside.desktop_bytes, note=note))
    return items


def _slack(phase: Phase, items: Sequence[MemoryItem], load: Load) -> MemoryItem:
    if not KINDS[load.device].own_memory:
        size, note = int(SHARED_SLACK * _sum(items)), "freed memory that the allocator keeps"
    else:
        size = holes_bytes(items, load.beside)
        note = "holes between tensors" + ("" if load.beside.expandable else ", whole segments")
    return MemoryItem(name=SLACK, bytes=size, note=note)


def holes_bytes(items: Sequence[MemoryItem], beside: DeviceSurroundings) -> int:
    """Return the bytes that the allocator reserves beyond the tensors of a phase."""
    return beside.holes_bytes(
        moved_bytes=_sum([item for item in items if item.name in MOVED]),
        temporary_bytes=_sum([item for item in items if item.name in TEMPORARY]),
    )


def _sum(items: Sequence[MemoryItem]) -> int:
    return sum(item.bytes for item in items)
