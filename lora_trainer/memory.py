"""Predicted peak memory of a run, item by item, before any weight is loaded. No torch.

A run has three phases that are never alive together: caching (VAE and text encoder), training, and
sampling on the way. Inputs are the facts of the base, the family's cost of one sample and the
settings that matter; output is every item of the phase with the highest sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from lora_trainer.adapter_size import adapter_parameters, rebuilt_elements
from lora_trainer.config import AdapterSettings, Precision
from lora_trainer.families.base import BaseFacts
from lora_trainer.families.costs import SampleCost, Targets, Workload

GIB = 2**30
ELEMENT_BYTES: Mapping[Precision, int] = {"fp32": 4, "bf16": 2, "fp16": 2}
MASTER_BYTES = GRADIENT_BYTES = 4
# AdamW keeps two moments in fp32; bitsandbytes two in 8 bits, with one fp32 scale per 256 elements.
STATE_BYTES: Mapping[str, float] = {"adamw": 8.0, "adamw8bit": 2 + 2 * 4 / 256}
# CUDA context 0.3-0.5 GiB and workspaces of cuBLAS and cuDNN; Python with torch and diffusers.
RUNTIME_BYTES: Mapping[str, int] = {"cuda": int(0.6 * GIB), "cpu": int(0.7 * GIB)}
# What the allocator reserves beyond what is in use: blocks are rounded and split.
SLACK = 0.05
# AutoencoderKL with its usual 128 channels at full size: 5 of these maps are alive at the peak of
# encoding and 6 at that of decoding (counted on the network with diffusers 0.42).
VAE_ENCODE_ELEMENTS_PER_PX = 5 * 128
VAE_DECODE_ELEMENTS_PER_PX = 6 * 128
# A CLIP text encoder's kept activations of one prompt of 77 tokens, over its weights' bytes: 34
# hidden-sized tensors a layer against 12 hidden^2 weights, and adapters' fp32 copies beside them.
TEXT_KEPT_SHARE = 0.5
REBUILT_PIECES = 8
"""Pieces a checkpointed network has at least, by the weights in them; the largest is kept whole."""
Phase = Literal["caching", "training", "sampling"]


@dataclass(frozen=True, kw_only=True)
class MemoryItem:
    """One named part of the peak."""

    name: str
    bytes: int
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The peak over all phases; `items` add up to it, `phases` has the sum of each phase."""

    items: tuple[MemoryItem, ...]
    phases: Mapping[Phase, int]
    peak_bytes: int
    limit_bytes: int | None

    @property
    def fits(self) -> bool:
        return self.limit_bytes is None or self.peak_bytes <= self.limit_bytes


class CostModel(Protocol):
    """The part of a family that prediction needs."""

    def adapter_shapes(
        self, facts: BaseFacts, *, targets: Targets
    ) -> Mapping[str, tuple[int, ...]]:
        """Return (fan_in, out) of each module of the denoiser that gets an adapter."""

    def sample_cost(self, facts: BaseFacts, workload: Workload) -> SampleCost:
        """Return the cost of training on one sample."""


@dataclass(kw_only=True)
class RememberedCosts:
    """A cost model that computes each workload once: a search asks for the same few again."""

    family: CostModel
    costs: dict[Workload, SampleCost] = field(default_factory=dict)
    shapes: dict[Targets, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)

    def adapter_shapes(
        self, facts: BaseFacts, *, targets: Targets
    ) -> Mapping[str, tuple[int, ...]]:
        """All calls must be about the same base."""
        if targets not in self.shapes:
            self.shapes[targets] = self.family.adapter_shapes(facts, targets=targets)
        return self.shapes[targets]

    def sample_cost(self, facts: BaseFacts, workload: Workload) -> SampleCost:
        """All calls must be about the same base."""
        if workload not in self.costs:
            self.costs[workload] = self.family.sample_cost(facts, workload)
        return self.costs[workload]


@dataclass(frozen=True, kw_only=True)
class Load:
    """The settings that decide how much memory a run takes; `bucket_px` is (width, height)."""

    device: Literal["cpu", "cuda"]
    precision: Precision
    adapter: AdapterSettings
    optimizer: str
    text_precision: Precision
    micro_batch: int
    checkpointing: bool
    bucket_px: tuple[int, int]
    samples: bool
    sample_side_px: int
    prepared_samples: int

    def workload(self) -> Workload:
        width_px, height_px = self.bucket_px
        return Workload(
            height_px=height_px,
            width_px=width_px,
            element_bytes=ELEMENT_BYTES[self.precision],
            rank=self.adapter.rank,
            targets=self.adapter.targets,
            checkpointing=self.checkpointing,
        )

    def adapter_parameters(self, facts: BaseFacts, family: CostModel) -> int:
        """Return how many parameters the denoiser's adapter has."""
        shapes = family.adapter_shapes(facts, targets=self.adapter.targets)
        return adapter_parameters(shapes, self.adapter)


def predict(
    load: Load, *, facts: BaseFacts, family: CostModel, limit_bytes: int | None = None
) -> Prediction:
    """Return the predicted peak of a run with these settings."""
    resident = _resident(load, facts, family)
    phases: dict[Phase, list[MemoryItem]] = {
        "caching": _caching(load, facts),
        "training": [*resident, *_training(load, facts, family)],
    }
    if load.samples:
        phases["sampling"] = [*resident, *_sampling(load, facts, family)]
    complete = {phase: _with_runtime(items, load) for phase, items in phases.items()}
    sums = {phase: sum(item.bytes for item in items) for phase, items in complete.items()}
    highest = max(sums, key=lambda phase: sums[phase])
    return Prediction(
        items=tuple(complete[highest]),
        phases=sums,
        peak_bytes=sums[highest],
        limit_bytes=limit_bytes,
    )


def _resident(load: Load, facts: BaseFacts, family: CostModel) -> list[MemoryItem]:
    """What stays on the device from the first step to the last."""
    weights = facts.parts["denoiser"].parameters * ELEMENT_BYTES[load.precision]
    adapter = load.adapter_parameters(facts, family)
    return [
        MemoryItem(name="denoiser weights", bytes=weights, note=f"frozen, {load.precision}"),
        *_trained_text(load, facts),
        MemoryItem(
            name="adapter weights",
            bytes=adapter * MASTER_BYTES,
            note=f"{adapter:,} parameters, fp32 masters",
        ),
        MemoryItem(name="adapter gradients", bytes=adapter * GRADIENT_BYTES, note="fp32"),
        MemoryItem(
            name="optimizer states",
            bytes=int(adapter * STATE_BYTES[load.optimizer]),
            note=f"{load.optimizer}, allocated before step 1",
        ),
    ]


def _training(load: Load, facts: BaseFacts, family: CostModel) -> list[MemoryItem]:
    cost, count = family.sample_cost(facts, load.workload()), load.micro_batch
    width_px, height_px = load.bucket_px
    each = f"{count} x {width_px}x{height_px} px"
    kept = "inputs of recomputed pieces" if load.checkpointing else "kept for backward"
    return [
        *_rebuilt(load, facts, family),
        MemoryItem(
            name="activations",
            bytes=count * (cost.saved_bytes - cost.adapter_saved_bytes),
            note=f"{kept}, {each}",
        ),
        MemoryItem(
            name="adapter inputs",
            bytes=count * cost.adapter_saved_bytes,
            note=f"fp32 copies and rank-wide middles, {each}",
        ),
        MemoryItem(
            name="largest temporary",
            bytes=count * cost.temporary_bytes,
            note="gradients on their way and what is recomputed",
        ),
        MemoryItem(
            name="prepared batches",
            bytes=load.prepared_samples * _prepared_bytes(load, facts, cost),
            note=f"{load.prepared_samples} samples ahead: latents, noise, target, text",
        ),
    ]


def _rebuilt(load: Load, facts: BaseFacts, family: CostModel) -> list[MemoryItem]:
    """LoHa and LoKr build the change of every weight, and autograd keeps it; PiSSA keeps its start."""
    shapes = family.adapter_shapes(facts, targets=load.adapter.targets)
    found = []
    if load.adapter.init == "pissa":
        start = MASTER_BYTES * load.adapter_parameters(facts, family)
        found.append(MemoryItem(name="adapter's start", bytes=start, note="PiSSA, fp32"))
    if elements := rebuilt_elements(shapes, load.adapter):
        # A checkpointed pass keeps those of the piece it is in: one of at least this many.
        share = 1 / REBUILT_PIECES if load.checkpointing else 1.0
        size = int(MASTER_BYTES * elements * share)
        found.append(
            MemoryItem(name="rebuilt weights", bytes=size, note=f"{load.adapter.kind}, fp32")
        )
    return found


def _prepared_bytes(load: Load, facts: BaseFacts, cost: SampleCost) -> int:
    width_px, height_px = load.bucket_px
    latent = (
        facts.latent_channels * (width_px // facts.vae_factor) * (height_px // facts.vae_factor)
    )
    return 3 * 4 * latent + cost.conditioning_bytes


def _trained_text(load: Load, facts: BaseFacts) -> list[MemoryItem]:
    """Text encoders that are trained along stay, with what one prompt leaves for backward."""
    if not load.adapter.text_encoder:
        return []
    weights = facts.parts["text_encoder"].parameters * ELEMENT_BYTES[load.precision]
    kept = int(load.micro_batch * TEXT_KEPT_SHARE * weights)
    return [
        MemoryItem(name="text encoder weights", bytes=weights, note="trained along"),
        MemoryItem(name="text encoder activations", bytes=kept, note="estimate"),
    ]


def _caching(load: Load, facts: BaseFacts) -> list[MemoryItem]:
    """VAE and text encoders are never loaded together: the larger of the two."""
    width_px, height_px = load.bucket_px
    images = [
        MemoryItem(name="VAE weights", bytes=4 * facts.parts["vae"].parameters, note="fp32"),
        MemoryItem(
            name="image encoding",
            bytes=4 * VAE_ENCODE_ELEMENTS_PER_PX * width_px * height_px,
            note=f"one image of {width_px}x{height_px} px, fp32",
        ),
    ]
    texts = [
        MemoryItem(
            name="text encoder weights",
            bytes=facts.parts["text_encoder"].parameters * ELEMENT_BYTES[load.text_precision],
            note=load.text_precision,
        )
    ]
    return max(images, texts, key=lambda items: sum(item.bytes for item in items))


def _sampling(load: Load, facts: BaseFacts, family: CostModel) -> list[MemoryItem]:
    """Sample images are made with everything of the training in place, from cached prompts."""
    cost, side_px = family.sample_cost(facts, load.workload()), load.sample_side_px
    decoding = 4 * VAE_DECODE_ELEMENTS_PER_PX * side_px * side_px
    return [
        MemoryItem(name="VAE weights", bytes=4 * facts.parts["vae"].parameters, note="fp32"),
        MemoryItem(
            name="sample image",
            bytes=max(decoding, 2 * cost.forward_bytes),
            note=f"decoding {side_px}x{side_px} px in fp32, or a guided forward pass",
        ),
    ]


def _with_runtime(items: list[MemoryItem], load: Load) -> list[MemoryItem]:
    note = "CUDA context and libraries" if load.device == "cuda" else "Python, torch and libraries"
    slack = int(SLACK * sum(item.bytes for item in items))
    return [
        MemoryItem(name="runtime", bytes=RUNTIME_BYTES[load.device], note=note),
        *items,
        MemoryItem(name="allocator slack", bytes=slack, note="rounding and fragmentation"),
    ]
