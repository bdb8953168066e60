"""The size of each layer's adapter: rank, scale, block sizes, and from these its parameter count.

Input is the settings and a layer's name and shape, output plain numbers, so that the memory plan and the
injection use the same sizes. Beside them stand the tensors of a module, `ModuleUpdate`, and the norm of
low-rank ones, for torch and for numpy alike. Torch-free.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from lora_trainer.config.learning import AdapterSettings

AdapterKind = Literal["lora", "loha", "lokr", "oft", "oft_in", "glora", "ia3", "full", "norm"]
KIND_NAMES: Mapping[AdapterKind, str] = {
    "lora": "LoRA",
    "loha": "LoHa",
    "lokr": "LoKr",
    "oft": "OFT",
    "oft_in": "OFT of inputs",
    "glora": "GLoRA",
    "ia3": "IA3",
    "full": "a whole difference",
    "norm": "a change of norms",
}
# Kinds whose update is made of the weight it changes.
BASED: frozenset[AdapterKind] = frozenset({"oft", "oft_in", "glora", "ia3"})
# Shape of a trained tensor; a 1x1 convolution counts as the matrix it is, as plans cannot tell them apart.
Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Width:
    """Rank of one layer's adapter, and the factor that multiplies its update."""

    rank: int
    scale: float


def layer_width(key: str, *, kernel: int, settings: AdapterSettings, alpha: float) -> Width:
    """Return the width of the layer "component.module" whose kernel has `kernel` elements.

    `alpha` belongs to `adapter.rank` (to `conv_rank` if `conv_alpha` is set). A `rank_pattern` keeps
    alpha / rank, so a narrower layer is not scaled up. rsLoRA: alpha / sqrt(rank), with the same alpha.
    """
    rank = settings.rank
    if kernel > 1:
        alpha *= (settings.conv_rank or rank) / rank
        rank = settings.conv_rank or rank
        alpha = settings.conv_alpha or alpha
    pattern = first_match(key, settings.rank_pattern)
    if pattern is not None:
        alpha *= settings.rank_pattern[pattern] / rank
        rank = settings.rank_pattern[pattern]
    return Width(rank=rank, scale=alpha / (math.sqrt(rank) if settings.rslora else rank))


def first_match(key: str, patterns: Iterable[str]) -> str | None:
    """Return the first regular expression found in the module name or in "component.module"."""
    module = key.partition(".")[2]
    for pattern in patterns:
        if re.search(pattern, module) or re.search(pattern, key):
            return pattern
    return None


def block_size(out: int, *, rank: int) -> int:
    """Return the size of OFT's blocks: the largest divisor of `out` that is at most `rank`."""
    return max(size for size in range(1, min(rank, out) + 1) if out % size == 0)


def factorise(dimension: int, *, factor: int) -> tuple[int, int]:
    """Return LoKr's (left, right) with left x right = `dimension`, split as peft and LyCORIS do.

    A `factor` that divides `dimension` becomes the left one; otherwise the split is the most even one
    with left at most `factor` (-1: no limit).
    """
    if factor > 0 and dimension % factor == 0:
        return factor, dimension // factor
    limit = dimension if factor == -1 else max(1, factor)
    left_side = max(size for size in range(1, math.isqrt(dimension) + 1) if dimension % size == 0)
    while left_side > limit:
        left_side = max(size for size in range(1, left_side) if dimension % size == 0)
    return left_side, dimension // left_side


def adapter_tensors(
    shapes: Mapping[str, Sequence[int]],
    settings: AdapterSettings,
    *,
    component: str = "denoiser",
) -> Counter[Shape]:
    """Return the number of trained tensors of each shape in the adapters of these layers.

    `shapes` maps a module to (fan_in, out), or (fan_in, out, kernel) where the kernel has more than one
    element; `fan_in` includes the kernel.
    """
    tensors: Counter[Shape] = Counter()
    for module, shape in shapes.items():
        fan_in, out, kernel = (*shape, 1)[:3]
        width = layer_width(f"{component}.{module}", kernel=kernel, settings=settings, alpha=1.0)
        rank, convolution = width.rank, kernel > 1
        match settings.kind:
            case "lora":
                written = (out, rank, 1, 1) if convolution else (out, rank)
                tensors.update((_read(rank, fan_in, kernel), written))
                if settings.dora:
                    tensors[(1, out, 1, 1) if convolution else (out,)] += 1
            case "loha":
                tensors.update(2 * ((rank, fan_in), (out, rank)))
            case "lokr":
                in_left, in_right = factorise(fan_in // kernel, factor=settings.lokr_factor)
                out_left, out_right = factorise(out, factor=settings.lokr_factor)
                right = in_right * kernel
                tensors[out_left, in_left] += 1
                if rank >= max(in_right, out_right) / 2:  # a factor of full size is smaller
                    tensors[_read(out_right, right, kernel)] += 1
                else:
                    tensors.update(((out_right, rank), (rank, right)))
            case "oft":
                size = block_size(out, rank=rank)
                tensors[out // size, size, size] += 1
    return tensors


def total_elements(tensors: Mapping[Shape, int]) -> int:
    """Return the number of elements of all these tensors."""
    return sum(math.prod(shape) * count for shape, count in tensors.items())


def rebuilt_elements(shapes: Mapping[str, Sequence[int]], settings: AdapterSettings) -> int:
    """Return how many fp32 numbers LoHa and LoKr keep for the backward pass of these layers.

    Both build the full-size change of a weight in every forward pass, and autograd keeps it: of all layers
    without gradient checkpointing, of one block at a time with it.
    """
    if settings.kind not in ("loha", "lokr"):
        return 0
    return sum(fan_in * out for fan_in, out, *_ in shapes.values())


def _read(rank: int, fan_in: int, kernel: int) -> Shape:
    """Return the shape of the adapter tensor that reads a layer's inputs; kernels are square."""
    if kernel == 1:
        return (rank, fan_in)
    side = math.isqrt(kernel)
    return (rank, fan_in // kernel, side, kernel // side)


def rotated_size(numbers: int) -> int:
    """Return the side of a skew matrix with this many numbers above its diagonal; raises ValueError."""
    size = (1 + math.isqrt(1 + 8 * numbers)) // 2
    if size * (size - 1) // 2 != numbers or size < 2:
        raise ValueError(
            f"has rotations of {numbers} numbers each, which is not a triangular number"
        )
    return size


def update_size(kind: AdapterKind | None, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, int]:
    """Return (out, fan in) of an update, kernels counted, 0 for a side that the tensors do not tell.

    `shapes` are those of a file's tensors by role or of a `ModuleUpdate`. Raises KeyError, IndexError or
    ValueError for a module whose tensors are not all there.
    """
    match kind:
        case "lora":
            fan_in = math.prod(shapes["down"][1:]) * math.prod(shapes.get("mid", ())[2:])
            return shapes["up"][0], fan_in
        case "loha":
            if "t1" in shapes:  # Tucker form: [r, out], [r, in] around [r, r, kernel]
                return shapes["w1_a"][1], shapes["w1_b"][1] * math.prod(shapes["t1"][2:])
            return shapes["w1_a"][0], math.prod(shapes["w1_b"][1:])
        case "lokr":
            # Both sides of a Kronecker product are the products of its factors' sides.
            out, fan_in = 1, 1
            for factor in ("w1", "w2"):
                rows_of = shapes.get(factor, shapes.get(f"{factor}_a", ()))
                columns_of = shapes.get(factor, shapes.get(f"{factor}_b", ()))
                core = shapes.get("t2", ()) if f"{factor}_a" in shapes and factor == "w2" else ()
                out *= rows_of[1] if core else rows_of[0]
                columns = columns_of[1] if core else math.prod(columns_of[1:])
                fan_in *= columns * math.prod(core[2:])
            return out, fan_in
        case "oft":
            return shapes["blocks"][-3] * shapes["blocks"][-1], 0
        case "oft_in" if shapes["skew"][0] > 1:  # one rotation may serve all inputs
            return 0, shapes["skew"][0] * rotated_size(shapes["skew"][1])
        case "glora":
            if shapes["b1"][1] == min(shapes["b1"][:2]):
                kernel = math.prod(shapes.get("bm", ())[2:])
                return shapes["b1"][0], math.prod(shapes["b2"][1:]) * kernel
            return shapes["b2"][0], math.prod(shapes["b1"][1:])  # LyCORIS before 2.0
        case "full" | "norm" if "difference" in shapes:
            return shapes["difference"][0], math.prod(shapes["difference"][1:])
        case "full":
            return shapes["bias"][0], 0
        case "ia3":
            return shapes.get("by_output", (0,))[0], 0
    return 0, 0


T = TypeVar("T", bound=Any)


@dataclass(frozen=True, kw_only=True)
class ModuleUpdate(Generic[T]):
    """The tensors, or numpy's arrays, that change one module's weight [out, in, ...].

    lora: `down` [r, in, ...], `up` [out, r(, 1, 1)].
    loha: `w1_a` [out, r], `w1_b` [r, in x kernel], `w2_a`, `w2_b`.
    lokr: `w1` or `w1_a` and `w1_b`, `w2` [b, d, ...] or `w2_a` and `w2_b` [r, d x kernel].
    oft: `blocks` [count, size, size], the rotation of groups of outputs; BOFT in files of others:
    [rounds, count, size, size]. `rescale` [out, 1, ...] after that, with the dimensions of the weight, as readers
    multiply it as it is.
    oft_in: `skew` [count, size (size - 1) / 2], upper triangles of the rotations of groups of inputs.
    glora: `a1` [in, r], `a2` [r, in], `b1` [out, r], `b2` [r, in, ...]: the weight times A, plus B.
    ia3: `by_output` [out, 1, ...] or `by_input` [in, 1, ...], the share of the weight that is added; a one
    for each dimension of the kernel.
    full: `difference` [out, in, ...]; norm: `difference` [width].
    Any may have `bias` [out], added to the layer's bias; DoRA has `magnitude` [out(, 1, ...)], or
    in files of others `input_magnitude` [1, in(, 1, 1)].
    `rows` are those of the product that the layer has, None: all of them.
    `scale` multiplies the update: alpha / rank, or alpha / sqrt(rank) for rsLoRA; oft ignores it, and
    it is 1 for a lokr whose factors are both full, as readers ignore the alpha of those.
    """

    kind: AdapterKind
    tensors: Mapping[str, T]
    rank: int
    scale: float
    rows: tuple[int, int] | None = None

    @property
    def dora(self) -> bool:
        """Whether the norm of each output, or input, is learned apart (Liu et al. 2024, arXiv 2402.09353)."""
        return "magnitude" in self.tensors or "input_magnitude" in self.tensors

    @property
    def needs_weight(self) -> bool:
        """Whether the update depends on the weight it changes: DoRA, OFT, GLoRA, IA3."""
        return self.dora or self.kind in BASED

    @property
    def size(self) -> tuple[int, int]:
        """(out, fan in) of the update, kernels counted, 0 for a side that the tensors do not tell."""
        return update_size(self.kind, {name: tuple(t.shape) for name, t in self.tensors.items()})


def factored_norm(factors: Mapping[str, T], *, norm: Callable[[T], Any]) -> Any:
    """Return the Frobenius norm of the update of a LoRA or LoKr without its strength, NaN where a number is NaN.

    `factors` are tensors or arrays, and `norm` is the Frobenius norm of their library.
    """

    def product_norm(outer: str, inner: str) -> Any:
        tall, wide = (factors[name].reshape(len(factors[name]), -1) for name in (outer, inner))
        # |A B|^2 = tr(B^T A^T A B) = sum of (A^T A) * (B B^T), elementwise: only [r, r] matrices are formed.
        # Rounding can put the sum for a product of zero a little below zero, whose root would be NaN.
        return ((tall.T @ tall) * (wide @ wide.T)).sum().clip(0) ** 0.5

    if "up" in factors:
        return product_norm("up", "down")
    # Each number of A x B is one of A times one of B, so the norms multiply.
    first, second = (
        norm(factors[side]) if side in factors else product_norm(f"{side}_a", f"{side}_b")
        for side in ("w1", "w2")
    )
    return first * second
