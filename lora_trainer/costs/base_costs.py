"""What a base costs: its frozen weights, the shapes of its adapters, and training on a sample of it. No torch.

Inputs are a family, the facts of a base and settings; outputs bytes, shapes and the planner's `SampleCost`, each
computed once. The public releases are in a table (`sample_cost.py`). Any other architecture is run on `meta`,
once per workload, and the result remembered on this machine.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property, lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.common.errors import MachineError
from lora_trainer.common.files import user_cache_folder
from lora_trainer.common.memo import MemoTable
from lora_trainer.config.declare import (
    CHECKPOINTING,
    QUANTIZATIONS,
    TARGETS,
    BasePrecision,
    Checkpointing,
    Precision,
    Targets,
    moved_bytes,
    saved_bytes,
    weight_bytes,
)
from lora_trainer.config.learning import AdapterSettings
from lora_trainer.costs.sample_cost import SampleCost, Workload, entry, release_of, tabled
from lora_trainer.families.base.facts import BaseFacts
from lora_trainer.families.base.family import Family
from lora_trainer.families.base.layout import Part
from lora_trainer.lora.adapter_size import Shape, adapter_tensors

if TYPE_CHECKING:
    from lora_trainer.costs.trace import TracedNetwork

ELEMENT_BYTES: Mapping[Precision, int] = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True, eq=False, kw_only=True)
class FrozenBase:
    """The weights of a base, of which the linear layers in its repeated blocks are kept in `kept_as`.

    All other weights (embeddings, norms, biases, convolutions, layers that quantization skips) stay in `dtype`.
    """

    costs: BaseCosts
    dtype: Precision
    kept_as: BasePrecision

    @property
    def is_quantized(self) -> bool:
        return self.kept_as in QUANTIZATIONS

    @cached_property
    def linear_bytes(self) -> int:
        """Bytes of the layers of `linear_shapes`, with their scales."""
        return sum(self.layer_bytes.values())

    @cached_property
    def layer_bytes(self) -> Mapping[str, int]:
        """Bytes of each layer of `linear_shapes` as it is kept."""
        return {
            name: weight_bytes(fan_in=fan_in, out=out, precision=self.kept_as)
            for name, (fan_in, out) in self.costs.linear_shapes.items()
        }

    @cached_property
    def linear_elements(self) -> int:
        """Weights in the layers of `linear_shapes`, counted."""
        return sum(fan_in * out for fan_in, out in self.costs.linear_shapes.values())

    @cached_property
    def other_bytes(self) -> int:
        """Bytes of all weights outside `linear_shapes`, which are never quantised."""
        elements = self.costs.parameters("denoiser") - self.linear_elements
        return elements * ELEMENT_BYTES[self.dtype]

    @cached_property
    def bytes(self) -> int:
        """Bytes of the whole base."""
        return self.linear_bytes + self.other_bytes

    @cached_property
    def dequantized_bytes(self) -> int:
        """Bytes of the largest layer when dequantised; one layer is at a time. 0: the base is unquantised."""
        if not self.is_quantized:
            return 0
        # Layers are dequantised where they are multiplied and freed at once, so only the largest counts.
        largest = max(map(math.prod, self.costs.linear_shapes.values()), default=0)
        return largest * ELEMENT_BYTES[self.dtype]

    @cached_property
    def block_bytes(self) -> tuple[int, ...]:
        """Bytes of each repeated block that can be streamed, in module order, without biases and norms."""
        blocks: dict[str, int] = {}
        for name, size in self.layer_bytes.items():
            if block := self.costs.block_of(name):
                blocks[block] = blocks.get(block, 0) + size
        return tuple(blocks.values())

    @cached_property
    def streamed_bytes(self) -> Callable[[int], int]:
        """Return the bytes that so many streamed blocks take in host memory, and that each pass copies."""
        return cache(lambda count: moved_bytes(self.block_bytes, count) if count else 0)

    @cached_property
    def buffer_bytes(self) -> Callable[[int], int]:
        """Return the bytes of the device buffers through which so many streamed blocks pass."""
        blocks = self.block_bytes
        return cache(lambda count: self.streamed_bytes(count) - saved_bytes(blocks, count))


@dataclass(frozen=True, eq=False, kw_only=True)
class BaseCosts:
    """The costs of one base, each computed once, as a search asks for the same few many times."""

    family: Family
    facts: BaseFacts
    counted: list[tuple[AdapterSettings, Counter[Shape]]] = field(default_factory=list)
    """What `adapter_tensors` has counted. A list, as settings with a `rank_pattern` cannot be hashed."""

    def parameters(self, part: Part) -> int:
        """Return the number of weights in a part of the base."""
        return self.facts.parts[part].parameters

    # ---- training on a sample

    @cached_property
    def sample_cost(self) -> Callable[[Workload], SampleCost]:
        """Return the cost of a workload: from the table, or of an unknown architecture traced."""

        def cost_of(workload: Workload) -> SampleCost:
            cost = None
            reads = self.facts.references
            if reads is not None and reads.as_channels:  # which only the first convolution reads
                workload = replace(workload, references_px=())
            if self._release is not None:
                cost = tabled(
                    self._release,
                    workload,
                    text_tokens=self.facts.text_tokens,
                    seen_px=self._seen_px(workload),
                    in_text=reads is not None and reads.in_text,
                )
            return cost or self.traced(workload)

        return cache(cost_of)

    def _seen_px(self, workload: Workload) -> int:
        """Return what text encoders see of references as pixels of an image: all tokens cost the same."""
        reads, facts = self.facts.references, self.facts
        if reads is None:
            return 0
        token_px = facts.vae_factor * facts.patch
        return int(reads.text_tokens(workload.references_px) * token_px**2)

    @cached_property
    def _release(self) -> Mapping[str, Any] | None:
        return release_of(self.facts)

    @cached_property
    def _prompt(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of the longest encoded prompt."""
        tokens = self.facts.text_tokens
        return self.family.text.shapes(self.facts.release.architecture, text_tokens=tokens)

    @cached_property
    def conditioning_bytes(self) -> int:
        """Bytes of one encoded prompt as it is cached: float32, masks int64."""
        return sum(
            math.prod(shape) * (8 if name.endswith("mask") else 4)
            for name, shape in self._prompt.items()
        )

    def text_bytes(self, references_px: Iterable[tuple[int, int]]) -> int:
        """Return the bytes of one encoded prompt as it is cached, read with references of these (width, height)."""
        reads, tokens = self.facts.references, self.facts.text_tokens
        more = 0 if reads is None else reads.text_tokens(references_px)
        return self.conditioning_bytes * (tokens + more) // tokens

    def known_checkpointing(
        self, *, element_bytes: int, targets: Targets, wide_adapter: bool
    ) -> tuple[Checkpointing, ...]:
        """Return the levels in the table; all levels for an architecture that is traced anyway."""
        costs = {} if self._release is None else self._release["costs"]
        traces = costs.get(entry(element_bytes, wide=wide_adapter), {}).get(targets, {})
        return tuple(kind for kind in CHECKPOINTING if kind in traces) or CHECKPOINTING

    # ---- layers

    @cached_property
    def adapter_shapes(self) -> Callable[[Targets], Mapping[str, tuple[int, ...]]]:
        """Return (fan_in, out) of each denoiser module that gets an adapter, in module order.

        `fan_in` is input channels times kernel elements; a kernel of several elements adds its size as a
        third number.
        """
        # For an adapter a convolution of one element is a linear layer.
        return cache(
            lambda targets: {
                name: shape[:2] if shape[-1] == 1 else shape
                for name, shape in self.layer_shapes(targets).items()
            }
        )

    def adapted(self, settings: AdapterSettings) -> Mapping[str, tuple[int, ...]]:
        """Return `adapter_shapes` of the modules that these settings adapt."""
        return self._adapted(settings.targets, settings.refiners)

    @cached_property
    def _adapted(self) -> Callable[[Targets, bool], Mapping[str, tuple[int, ...]]]:
        def adapted(targets: Targets, refiners: bool) -> Mapping[str, tuple[int, ...]]:
            shapes = self.adapter_shapes(targets)
            names = self.family.without_refiners(shapes, refiners=refiners)
            return {name: shapes[name] for name in names}

        return cache(adapted)

    @cached_property
    def linear_shapes(self) -> Mapping[str, tuple[int, int]]:
        """(fan_in, out) of the linear layers that quantisation takes, in module order."""
        skipped = set(self.family.traits.quantization_skip)
        return {
            name: (shape[0], shape[1])
            for name, shape in self.layer_shapes("all").items()
            if len(shape) == 2 and skipped.isdisjoint(name.split("."))
        }

    @cached_property
    def block_kinds(self) -> int:
        """Repeated blocks that differ in the sizes of their layers, counted; those alike are compiled once."""
        layers: dict[str, set[tuple[str, tuple[int, int]]]] = {}
        for name, shape in self.linear_shapes.items():
            if block := self.block_of(name):
                layers.setdefault(block, set()).add((name.removeprefix(block), shape))
        return max(1, len(set(map(frozenset, layers.values()))))

    def layer_shapes(self, targets: Targets) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of each adapted layer; a convolution's has the elements of its kernel last."""
        if self._release is None:
            return self.built_shapes(targets)
        included = TARGETS[: TARGETS.index(targets) + 1]
        return {
            f"{prefix}{index}.{name}": tuple(shape)
            for table_prefix, first, count, modules in self._release["modules"]
            for prefix in self._with_references(table_prefix)
            for index in range(first, first + count)
            for name, (*shape, least) in modules.items()
            if least in included
        }

    def _with_references(self, prefix: str) -> tuple[str, ...]:
        """Return the beginning of the names of some blocks, and those of equal blocks of references that are loaded."""
        if not self.facts.has_reference_layers:
            return (prefix,)
        parts = prefix.split(".")
        equal = (
            ".".join(of_references if part == own else part for part in parts)
            for of_references, own in self.family.traits.reference_layers.items()
            if own in parts
        )
        return (prefix, *equal)

    def block_of(self, module: str) -> str:
        """Return the name of the repeated block a module is in, or the empty string."""
        match = re.match(self.family.traits.block_pattern, module)
        return match[0] if match else ""

    @cached_property
    def blocks(self) -> frozenset[str]:
        """Names of the repeated blocks."""
        return frozenset(map(self.block_of, self.linear_shapes)) - {""}

    @cached_property
    def frozen_base(self) -> Callable[[Precision, BasePrecision], FrozenBase]:
        """Return the frozen weights in a training precision, with the blocks kept in another."""
        return cache(
            lambda precision, kept_as: FrozenBase(costs=self, dtype=precision, kept_as=kept_as)
        )

    @cached_property
    def text_adapter_shapes(self) -> Mapping[str, Mapping[str, tuple[int, ...]]]:
        return self.family.text_adapter_shapes(self.facts)

    def adapter_tensors(self, settings: AdapterSettings) -> Counter[Shape]:
        """Return how many trained tensors there are of each shape: adapters and new tokens."""
        for known, tensors in self.counted:
            if known is settings or known == settings:
                return tensors
        tensors = adapter_tensors(self.adapted(settings), settings)
        for component, text_shapes in self.text_adapter_shapes.items():
            if settings.text_encoder:
                tensors += adapter_tensors(text_shapes, settings, component=component)
            if settings.new_tokens:
                width = next(iter(text_shapes.values()))[0]  # of the first layer's input
                tensors += Counter({(settings.new_tokens, width): 1})
        self.counted.append((settings, tensors))
        return tensors

    # ---- an architecture that is not in the table

    def traced(self, workload: Workload) -> SampleCost:
        """Trace the network on the meta device, once on this machine."""

        def trace() -> dict[str, Any]:
            # Only the fields that change the network; the others are sizes of its inputs.
            built = replace(
                workload,
                height_px=0,
                width_px=0,
                checkpointing="none",
                micro_batch=1,
                references_px=(),
            )
            return asdict(self._network(built).sample_cost(workload))

        reads, question = self.facts.references, asdict(workload)
        if reads is not None:  # releases of one network differ in what their text encoders see
            question["seen_tokens"] = reads.text_tokens(workload.references_px)
        return SampleCost(**self._remembered(json.dumps(question), trace))

    @cached_property
    def _network(self) -> Callable[[Workload], TracedNetwork]:
        from lora_trainer.costs.trace import traced_network

        return lru_cache(maxsize=4)(
            lambda workload: traced_network(self.family, self.facts, workload, prompt=self._prompt)
        )

    def built_shapes(self, targets: Targets) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of each adapted layer of a network, as in the table; it is built on the meta device."""

        def build() -> dict[str, tuple[int, ...]]:
            import torch

            with torch.device("meta"):
                network = self.family.training_denoiser(
                    self.facts.release.architecture, references=self.facts.has_reference_layers
                )
            shapes: dict[str, tuple[int, ...]] = {}
            for name in self.family.lora_targets(network, targets):
                weight: Any = network.get_submodule(name).weight
                out, _, *kernel = weight.shape
                shape = (math.prod(weight.shape[1:]), int(out))
                shapes[name] = (*shape, math.prod(kernel)) if kernel else shape
            return shapes

        shapes = self._remembered(targets, build)
        return {name: tuple(shape) for name, shape in shapes.items()}

    def _remembered(self, question: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the answer of an earlier process, or compute it and remember it where that is possible."""
        facts, memo = self.facts, _memo()
        case = [
            facts.family,
            facts.release.max_tokens,
            facts.text_tokens,
            dict(facts.release.architecture),
            *(["references"] if facts.has_reference_layers else []),
        ]
        key = f"{json.dumps(case)} {question}"
        if (answer := memo.get(key)) is None:
            answer = json.dumps(compute())
            memo.put(key, answer)
            with suppress(MachineError):  # `plan` only reads; it works where nothing can be written
                memo.save()
        plain: dict[str, Any] = json.loads(answer)
        return plain


@lru_cache(maxsize=1)
def _memo() -> MemoTable:
    """Return the traces of earlier processes: a trace takes seconds, and importing torch three more.

    It is in the folder of the user, as the sizes of a network do not depend on a run's settings.
    """
    return MemoTable.load(user_cache_folder(), "traces", version=_code_version())


def _code_version() -> str:
    """Return a digest of the code that a trace depends on: ours, and the versions of the libraries."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for room in ("costs", "families", "lora", "network"):
        for file in sorted((package / room).rglob("*.py")):
            digest.update(file.read_bytes())
    libraries = {name: version(name) for name in ("torch", "diffusers", "transformers", "peft")}
    return f"{digest.hexdigest()[:16]} {libraries}"
