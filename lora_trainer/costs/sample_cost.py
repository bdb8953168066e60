"""Cost of one sample: a symbolic forward pass that records the tensors autograd keeps.

A family writes its network as calls on a `Tape`: no torch, no weights, only sizes. The tape models
which tensors each operation saves for its gradient, that the base is frozen, and how an adapter runs:
fused with its layer as one operation, or beside it on an fp32 copy of the input. `liveness.py` turns
the recorded operations into the bytes, FLOPs and kernels of one sample.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

from lora_trainer.config.config import Checkpointing

ADAPTER_BYTES = 4
"""Bytes per element of adapter weights, of their inputs and of their outputs."""

Targets = Literal["attention", "transformer", "all"]
Group = Literal["attention", "feed_forward", "projection", "convolution", "norm", "other"]
TARGET_GROUPS: Mapping[Targets, frozenset[Group]] = {
    "attention": frozenset({"attention"}),
    "transformer": frozenset({"attention", "feed_forward", "projection"}),
    "all": frozenset({"attention", "feed_forward", "projection", "convolution"}),
}


@dataclass(frozen=True, kw_only=True)
class Workload:
    """How one sample is trained; `element_bytes` is the size of the base's dtype.

    `micro_batch` samples go through the network together; some tensors that are views for one sample are
    copies for several. `text_tokens` is the length of the longest prompt, for families that do not pad
    (None: the limit). `wide_adapter`: the adapter reads fp32 copies of its inputs, as every kind but
    plain LoRA does.
    """

    height_px: int
    width_px: int
    element_bytes: int
    rank: int
    targets: Targets
    checkpointing: Checkpointing
    micro_batch: int = 1
    text_tokens: int | None = None
    wide_adapter: bool = False


@dataclass(frozen=True, kw_only=True)
class SampleCost:
    """Cost of training on one sample; multiply all fields but `kernels` by the micro-batch.

    `saved_bytes` are alive between forward and backward; `adapter_saved_bytes` of them are a wide
    adapter's fp32 copies and rank-sized intermediates. `temporary_bytes` is the step's peak minus
    `saved_bytes`. `host_bytes` wait for backward in pinned host memory. `forward_bytes` is the peak of a
    pass without gradients, `conditioning_bytes` one prompt's text embedding in fp32.
    """

    saved_bytes: int
    adapter_saved_bytes: int
    temporary_bytes: int
    forward_bytes: int
    conditioning_bytes: int
    forward_flops: int
    step_flops: int
    kernels: int
    host_bytes: int = 0


KEEP_ATTENTION: tuple[Checkpointing, ...] = ("light", "selective")
"""Checkpointing levels that keep the output of attention in recomputed blocks."""
LEAST_SHAPE = 1 / 16
"""Smallest fan_in / out of a matrix product that `light` keeps. A smaller ratio means an adapter's up
projection (fan_in is the rank): recomputing it costs next to nothing."""


def keeps_product(checkpointing: Checkpointing, *, fan_in: int, out: int) -> bool:
    """Return whether a recomputed block keeps a frozen layer's output; `fan_in` counts a convolution's kernel.

    The FLOPs to recompute one byte of output grow with `fan_in`: `light` keeps all such outputs,
    `selective` only those of layers with more inputs than outputs.
    """
    if checkpointing == "light":
        return fan_in >= LEAST_SHAPE * out
    return checkpointing == "selective" and fan_in > out


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One module with weights; its adapter has rank x (fan_in + out) parameters.

    `fan_in` counts the kernel, of `kernel` elements: 9 x input channels for a 3x3 convolution.
    """

    name: str
    group: Group
    fan_in: int
    out: int
    parameters: int
    kernel: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        """(fan_in, out), and the kernel's size where the kernel has several elements."""
        return (self.fan_in, self.out, self.kernel) if self.kernel > 1 else (self.fan_in, self.out)


@dataclass(frozen=True, eq=False, slots=True)
class Array:
    """A tensor of one sample, compared by identity; a full view of a tensor is the same Array.

    A partial view (`part_of`) has a gradient of its own but no bytes: it shares the whole's storage.
    """

    elements: int
    element_bytes: int
    requires_grad: bool = False
    of_adapter: bool = False
    part_of: Array | None = None

    @property
    def bytes(self) -> int:
        return 0 if self.part_of is not None else self.gradient_bytes

    @property
    def gradient_bytes(self) -> int:
        return self.elements * self.element_bytes

    @property
    def storage(self) -> Array:
        return self if self.part_of is None else self.part_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """An operation that reads `inputs` (their storages: `reads`) and writes `output` in `kernels` kernels.

    Autograd saves the storages `keeps`, with `keeps_late` only after the output exists; local variables
    keep `holds` alive until here. The checkpointing levels in `kept_by` keep `results` (the output among
    them), so one kernel of `spared_flops` is not recomputed.
    """

    inputs: tuple[Array, ...]
    reads: tuple[Array, ...]
    output: Array
    keeps: tuple[Array, ...]
    holds: tuple[Array, ...]
    flops: int
    backward_flops: int
    kernels: int
    backward_kernels: int
    keeps_late: bool
    segment: str | None
    kept_by: tuple[Checkpointing, ...] = ()
    results: tuple[Array, ...] = ()
    spared_flops: int = 0


@dataclass(kw_only=True)
class Tape:
    """Recorder of a network's forward pass; rank 0 means no adapter."""

    element_bytes: int
    rank: int = 0
    targets: Targets = "attention"
    wide_adapter: bool = False
    ops: list[Op] = field(default_factory=list)
    layers: list[Layer] = field(default_factory=list)
    _segment: str | None = None

    def array(self, elements: int) -> Array:
        """Return an input of the network, which needs no gradient."""
        return Array(elements, self.element_bytes)

    @contextmanager
    def segment(self, name: str) -> Iterator[None]:
        """Record the operations inside as module `name`, which gradient checkpointing recomputes as a whole."""
        self._segment = name
        yield
        self._segment = None

    def linear(self, x: Array, layer: Layer) -> Array:
        """Record a linear layer: the frozen layer saves nothing, its adapter saves its input."""
        rows = x.elements // layer.fan_in
        self.layers.append(layer)
        flops = 2 * rows * layer.fan_in * layer.out
        if self._adapts(layer) and not self.wide_adapter:
            return self._fused(x, layer, rows=rows, flops=flops)
        y = self._record(
            (x,),
            _like(x, rows * layer.out),
            flops=flops,
            backward_flops=flops,
            kept_by=self._keepers(layer),
        )
        return self._adapted(x, y, layer, rows=rows)

    def conv(self, x: Array, layer: Layer, *, positions: int) -> Array:
        """Record a convolution: it saves its input even when frozen, because one call makes all gradients."""
        self.layers.append(layer)
        flops = 2 * positions * layer.fan_in * layer.out
        y = self._record(
            (x,),
            _like(x, positions * layer.out),
            keeps=(x,),
            flops=flops,
            backward_flops=flops,
            kept_by=self._keepers(layer),
        )
        return self._adapted(x, y, layer, rows=positions)

    def norm(self, x: Array, layer: Layer, *, groups: int) -> Array:
        """Record a norm: it saves its input, and the mean and inverse deviation of each group in fp32."""
        self.layers.append(layer)
        return self._record((x,), _like(x), keeps=(x, Array(2 * groups, 4)))

    def halves(self, x: Array) -> tuple[Array, Array]:
        """Record two half views of `x`; backward joins their gradients."""
        first, second = (
            Array(x.elements // 2, x.element_bytes, x.requires_grad, part_of=x) for _ in range(2)
        )
        self._record((x,), first)
        return first, self._record((x,), second)

    def activation(self, x: Array) -> Array:
        """Record an activation, which saves its input."""
        return self._record((x,), _like(x), keeps=(x,))

    def product(self, a: Array, b: Array) -> Array:
        """Record an elementwise product of `b`'s size, which saves both factors."""
        output = Array(b.elements, a.element_bytes, a.requires_grad or b.requires_grad)
        return self._record((a, b), output, keeps=(a, b))

    def add(self, a: Array, b: Array) -> Array:
        """Record a sum of `a`'s size in the wider dtype, which saves nothing."""
        wider = max(a.element_bytes, b.element_bytes)
        return self._record((a, b), Array(a.elements, wider, a.requires_grad or b.requires_grad))

    def copy(
        self, x: Array, *, elements: int | None = None, element_bytes: int | None = None
    ) -> Array:
        """Record a cast, layout change, resize or scaling: a new storage, nothing saved."""
        return self._record((x,), _like(x, elements, element_bytes))

    def concat(self, a: Array, b: Array) -> Array:
        """Record a concatenation, which saves nothing."""
        output = Array(a.elements + b.elements, a.element_bytes, a.requires_grad or b.requires_grad)
        return self._record((a, b), output)

    def attention(self, q: Array, k: Array, v: Array, *, heads: int, channels: int) -> Array:
        """Record fused attention, which saves q, k, v, output and an fp32 log-sum per query and head."""
        queries, keys = q.elements // channels, k.elements // channels
        needs_grad = q.requires_grad or k.requires_grad or v.requires_grad
        output = Array(q.elements, q.element_bytes, needs_grad)
        flops = 4 * queries * keys * channels
        sums = Array(heads * queries, 4)
        return self._record(
            (q, k, v),
            output,
            keeps=(q, k, v, output, sums),
            flops=flops,
            backward_flops=flops * 5 // 2,
            kept_by=KEEP_ATTENTION,
            results=(output, sums),
        )

    def hold(self, *arrays: Array) -> None:
        """Keep `arrays` alive up to the last recorded operation, as a module's variables do."""
        last = self.ops[-1]
        self.ops[-1] = replace(last, holds=(*last.holds, *arrays))

    def _keepers(self, layer: Layer) -> tuple[Checkpointing, ...]:
        """Return the checkpointing levels that keep the output of a frozen layer."""
        if min(layer.fan_in, layer.out) <= self.rank:
            return ()
        return tuple(
            kind
            for kind in KEEP_ATTENTION
            if keeps_product(kind, fan_in=layer.fan_in, out=layer.out)
        )

    def _adapts(self, layer: Layer) -> bool:
        return bool(self.rank) and layer.group in TARGET_GROUPS[self.targets]

    def _fused(self, x: Array, layer: Layer, *, rows: int, flops: int) -> Array:
        """Record a linear layer fused with its adapter: the input is saved, the product with A recomputed."""
        down, up = (2 * rows * self.rank * width for width in (layer.fan_in, layer.out))
        casts = 2 * (x.element_bytes != ADAPTER_BYTES)  # A and B forward, their gradients backward
        return self._record(
            (x,),
            Array(rows * layer.out, x.element_bytes, True),
            keeps=(x,),
            flops=flops + down + up,
            backward_flops=2 * (down + up) + (flops + down) * x.requires_grad,
            kernels=3 + casts,
            backward_kernels=4 + 2 * casts + 2 * x.requires_grad,
            keeps_late=True,
            kept_by=self._keepers(layer),
            spared_flops=flops,
        )

    def _adapted(self, x: Array, y: Array, layer: Layer, *, rows: int) -> Array:
        """Record an adapter beside its layer: a convolution's, or a wide adapter."""
        if not self._adapts(layer):
            return y
        if self.wide_adapter:
            return self._wide(x, y, layer, rows=rows)
        down, up = (2 * rows * self.rank * width for width in (layer.fan_in, layer.out))
        casts = 2 * (x.element_bytes != ADAPTER_BYTES)
        middle = self._record(
            (x,), Array(rows * self.rank, x.element_bytes), flops=down, kernels=2 + casts
        )
        update = self._record(
            (x, middle),
            Array(y.elements, x.element_bytes, True),
            keeps=(x,),
            flops=up,
            backward_flops=2 * (down + up) + down * x.requires_grad,
            backward_kernels=6 + casts,
            keeps_late=True,
        )
        return self.add(y, update)

    def _wide(self, x: Array, y: Array, layer: Layer, *, rows: int) -> Array:
        """Record peft's path: cast the input up, down to rank, up again, scale, add, cast back."""
        flops = 2 * rows * self.rank
        wide = x
        if x.element_bytes != ADAPTER_BYTES:
            wide = self._record((x,), Array(x.elements, ADAPTER_BYTES, x.requires_grad, True))
        middle = self._record(
            (wide,),
            Array(rows * self.rank, ADAPTER_BYTES, True, True),
            keeps=(wide,),
            flops=flops * layer.fan_in,
            backward_flops=2 * flops * layer.fan_in,
        )
        update = self._record(
            (middle,),
            Array(y.elements, ADAPTER_BYTES, True),
            keeps=(middle,),
            flops=flops * layer.out,
            backward_flops=2 * flops * layer.out,
        )
        total = self.add(y, self.copy(update))
        if y.element_bytes != ADAPTER_BYTES:
            total = self.copy(total, element_bytes=y.element_bytes)
        self.hold(x, wide)
        return total

    def _record(
        self,
        inputs: tuple[Array, ...],
        output: Array,
        *,
        keeps: tuple[Array, ...] = (),
        flops: int = 0,
        backward_flops: int = 0,
        kernels: int = 1,
        backward_kernels: int | None = None,
        keeps_late: bool = False,
        kept_by: tuple[Checkpointing, ...] = (),
        results: tuple[Array, ...] = (),
        spared_flops: int | None = None,
    ) -> Array:
        if backward_kernels is None:
            backward_kernels = max(1, sum(array.requires_grad for array in inputs))
        op = Op(
            inputs=inputs,
            reads=tuple(array.storage for array in inputs),
            output=output,
            keeps=tuple(array.storage for array in keeps) if output.requires_grad else (),
            holds=(),
            flops=flops,
            backward_flops=backward_flops if output.requires_grad else 0,
            kernels=kernels,
            backward_kernels=backward_kernels if output.requires_grad else 0,
            keeps_late=keeps_late,
            segment=self._segment,
            kept_by=kept_by,
            results=(results or (output,)) if kept_by else (),
            spared_flops=flops if spared_flops is None else spared_flops,
        )
        self.ops.append(op)
        return output


def _like(x: Array, elements: int | None = None, element_bytes: int | None = None) -> Array:
    return Array(elements or x.elements, element_bytes or x.element_bytes, x.requires_grad)
