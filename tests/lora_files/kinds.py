"""Kinds of adapters as trainers write them: tensors by the end of their keys, and the update by its formula.

The formulas are written from the papers and LyCORIS's documentation, apart from the product's: each kind
returns `Written`, whose `delta` makes the whole update [out, in, ...] in float64, given the weight where
the update is made of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.lora_files.layers import Layer

Delta = Callable[[Tensor, slice], Tensor]
"""The rows of the update [out, in, ...], float64, of the weight it changes, which most kinds do not read."""


@dataclass(frozen=True)
class Written:
    """What a trainer writes for one layer: `tensors` by the end of their keys, without the dot."""

    tensors: Mapping[str, Tensor]
    delta: Delta
    kind: str
    based: bool = False
    bias: Tensor | None = None


@dataclass(frozen=True)
class Options:
    """Options of a kind; each reads its own."""

    rank: int = 2
    alpha: float | None = 1.0
    ends: tuple[str, str, str] = ("lora_down.weight", "lora_up.weight", "alpha")
    scale: float | None = None  # the strength of a LoRA where no alpha is written
    dora: str = ""  # "out", "in" or "peft"
    tucker: bool = False
    bias: bool = False
    factor: int = 8  # of a LoKr
    whole: bool = False
    both: bool = False
    blocks: int = (
        16  # of a diagonal OFT by number, as sd-scripts cuts them, or by size, as LyCORIS does
    )
    size: int = 0
    constraint: float = 0.0
    rescaled: bool = False
    scaled: bool = False  # OneTrainer's rotations of inputs
    shared: bool = False
    on_input: bool = False


Kind = Callable[[Layer, torch.Generator], Written]


def kind(write: Callable[[Layer, torch.Generator, Options], Written]) -> Callable[..., Kind]:
    """Return what makes a kind of options, by their names; only those that it reads."""

    def of(**options: Any) -> Kind:
        assert options.keys() <= set(write.__code__.co_names), options
        return partial(write, o=Options(**options))

    return of


def draw(generator: torch.Generator, *shape: int, size: float = 1.0) -> Tensor:
    """Return numbers that fp16 and bf16 hold exactly where size is 1: multiples of 1/64 below 2."""
    return torch.randint(-12, 13, shape, generator=generator).float() / 64 * size


@kind
def lora(layer: Layer, generator: torch.Generator, o: Options) -> Written:
    """LoRA or LoCon; `scale` is the strength where no alpha is written, `dora` "out", "in" or "peft"."""
    kernel = layer.inputs[1:]
    squashed = o.tucker and math.prod(kernel) > 1
    inputs = (layer.inputs[0], *(1 for _ in kernel)) if squashed else layer.inputs
    down = draw(generator, o.rank, *inputs)
    up = draw(generator, layer.out, o.rank, *(1 for _ in kernel))
    strength = (1.0 if o.alpha is None else o.alpha / o.rank) if o.scale is None else o.scale
    tensors = {o.ends[0]: down.half(), o.ends[1]: up.half()}
    wide = down.double().flatten(1)
    if squashed:
        middle = draw(generator, o.rank, o.rank, *kernel)
        tensors["lora_mid.weight"] = middle.half()
        wide = torch.einsum("rs...,si->ri...", middle.double(), wide).flatten(1)
    if o.alpha is not None:
        tensors[o.ends[2]] = torch.tensor(o.alpha)

    def delta(_: Tensor, rows: slice) -> Tensor:
        change = up.double().flatten(1)[rows] @ wide
        return change.reshape(-1, *layer.inputs) * strength

    added = draw(generator, layer.out) if o.bias else None
    if added is not None:
        tensors["diff_b"] = added
    return _decomposed(Written(tensors, delta, "lora", bias=added), o.dora, layer, generator)


@kind
def loha(layer: Layer, generator: torch.Generator, o: Options) -> Written:
    kernel = layer.inputs[1:]
    squashed = o.tucker and math.prod(kernel) > 1
    tensors = dict[str, Tensor]()
    for number in "12":
        if squashed:
            tensors[f"hada_w{number}_a"] = draw(generator, o.rank, layer.out)
            tensors[f"hada_w{number}_b"] = draw(generator, o.rank, layer.inputs[0])
            tensors[f"hada_t{number}"] = draw(generator, o.rank, o.rank, *kernel)
        else:
            tensors[f"hada_w{number}_a"] = draw(generator, layer.out, o.rank)
            tensors[f"hada_w{number}_b"] = draw(generator, o.rank, math.prod(layer.inputs))
    wide = {name: tensor.double() for name, tensor in tensors.items()}
    tensors["alpha"] = torch.tensor(o.alpha)

    def part(number: str, rows: slice) -> Tensor:
        left, right = wide[f"hada_w{number}_a"], wide[f"hada_w{number}_b"]
        if squashed:
            core = wide[f"hada_t{number}"]
            return torch.einsum("rs...,ro,si->oi...", core, left[:, rows], right)
        return (left[rows] @ right).reshape(-1, *layer.inputs)

    def delta(_: Tensor, rows: slice) -> Tensor:
        return part("1", rows) * part("2", rows) * (o.alpha / o.rank)

    return _decomposed(Written(tensors, delta, "loha"), o.dora, layer, generator)


def factors(size: int, factor: int) -> tuple[int, int]:
    """Return two factors of a size, the first at most `factor`; -1: the nearest to its root."""
    limit = math.isqrt(size) if factor < 0 else factor
    first = max(number for number in range(1, limit + 1) if size % number == 0)
    return first, size // first


@kind
def lokr(layer: Layer, generator: torch.Generator, o: Options) -> Written:
    kernel = layer.inputs[1:]
    (a, b), (c, d) = factors(layer.out, o.factor), factors(layer.inputs[0], o.factor)
    tensors = dict[str, Tensor]()
    if o.both:
        up, down = draw(generator, a, o.rank), draw(generator, o.rank, c)
        tensors |= {"lokr_w1_a": up, "lokr_w1_b": down}
        left = up.double() @ down.double()
    else:
        tensors["lokr_w1"] = draw(generator, a, c)
        left = tensors["lokr_w1"].double()
    if o.whole:
        tensors["lokr_w2"] = draw(generator, b, d, *kernel)
        right = tensors["lokr_w2"].double()
    elif o.tucker and math.prod(kernel) > 1:
        core = draw(generator, o.rank, o.rank, *kernel)
        up, down = draw(generator, o.rank, b), draw(generator, o.rank, d)
        tensors |= {"lokr_t2": core, "lokr_w2_a": up, "lokr_w2_b": down}
        right = torch.einsum("rs...,ro,si->oi...", core.double(), up.double(), down.double())
    else:
        up, down = draw(generator, b, o.rank), draw(generator, o.rank, d * math.prod(kernel))
        tensors |= {"lokr_w2_a": up, "lokr_w2_b": down}
        right = (up.double() @ down.double()).reshape(b, d, *kernel)
    tensors["alpha"] = torch.tensor(o.alpha)
    strength = 1.0 if o.whole and not o.both else o.alpha / o.rank
    left = left.reshape(a, c, *(1 for _ in kernel))

    def delta(_: Tensor, rows: slice) -> Tensor:
        start, stop, _step = rows.indices(layer.out)
        first = start // b
        near = torch.kron(left[first : -(-stop // b)], right.contiguous())
        return near[start - first * b : stop - first * b] * strength

    return _decomposed(Written(tensors, delta, "lokr"), o.dora, layer, generator)


@kind
def diag_oft(layer: Layer, generator: torch.Generator, o: Options) -> Written:
    """Blocks by number, as sd-scripts cuts them, or by `size`, as LyCORIS does."""
    count = layer.out // o.size if o.size else o.blocks
    side = layer.out // count
    values = draw(generator, count, side, side, size=0.1)
    tensors = {"oft_blocks": values, "alpha": torch.tensor(o.constraint)}
    turn = _cayley(values, most=o.constraint * layer.out or math.inf)
    rescale = torch.ones(layer.out, dtype=torch.float64)
    if o.rescaled:
        tensors["rescale"] = 1 + draw(generator, layer.out, *(1 for _ in layer.inputs))
        rescale = tensors["rescale"].double().flatten()

    def delta(weight: Tensor, rows: slice) -> Tensor:
        grouped = weight.double().reshape(count, side, -1)
        turned = torch.einsum("knm,kni->kmi", turn, grouped).reshape(weight.shape)
        column = rescale.reshape(-1, *(1 for _ in layer.inputs))
        return (column * turned - weight.double())[rows]

    return Written(tensors, delta, "oft", based=True)


def _cayley(values: Tensor, *, most: float = math.inf) -> Tensor:
    """Return the rotations of blocks, whose skew matrices have together at most this norm."""
    skew = values.double() - values.double().mT
    skew = skew * min(1.0, most / float(skew.norm()))
    identity = torch.eye(values.shape[-1], dtype=torch.float64)
    return (identity + skew) @ torch.linalg.inv(identity - skew)


@kind
def boft(layer: Layer, generator: torch.Generator, o: Options) -> Written:
    """LyCORIS's butterflies: each round turns groups of channels that are farther apart."""
    values = draw(generator, 3, layer.out // o.size, o.size, o.size, size=0.1)

    def delta(weight: Tensor, rows: slice) -> Tensor:
        turned = weight.double().flatten(1)
        for number, turn in enumerate(_cayley(values)):
            # Channel (c, g, k) is the one at (c, k, g) in the order in which groups are cut.
            order = torch.arange(layer.out).reshape(-1, 2, 2**number * o.size // 2).mT.flatten()
            changed = torch.einsum(
                "bij,bjn->bin", turn, turned[order].reshape(-1, o.size, turned.shape[1])
            )
            turned = torch.empty_like(turned).index_copy(0, order, changed.flatten(0, 1))
        return (turned.reshape(weight.shape) - weight.double())[rows]

    return Written({"oft_blocks": values, "alpha": torch.tensor(0.0)}, delta, "oft", based=True)


@kind
def oft_v2(layer: Layer, generator: torch.Generator, o: Options) -> Written:
    """OneTrainer's rotations of inputs: upper triangles, a Cayley transform by its Neumann series."""
    count = 1 if o.shared else math.prod(layer.inputs) // o.size
    values = draw(generator, count, o.size * (o.size - 1) // 2, size=0.2)
    tensors = {"oft_R.weight": values}
    if o.scaled:
        tensors["oft_R.scaled_oft"] = torch.tensor(True)
    own = values.double() / (2 * math.sqrt(o.size - 1) if o.scaled else 1.0)
    skew = torch.zeros(count, o.size, o.size, dtype=torch.float64)
    upper = [(row, column) for row in range(o.size) for column in range(row + 1, o.size)]
    for place, (high, low) in enumerate(upper):
        skew[:, high, low] = own[:, place]
        skew[:, low, high] = -own[:, place]
    powers = [torch.linalg.matrix_power(skew, number) for number in range(5)]
    turn = powers[0] + 2 * (powers[1] + powers[2] + powers[3]) + powers[4]

    def delta(weight: Tensor, rows: slice) -> Tensor:
        grouped = weight.double().reshape(layer.out, -1, o.size)
        whole = turn.expand(grouped.shape[1], o.size, o.size)
        order = "rck" if len(layer.inputs) == 1 else "rkc"
        turned = torch.einsum(f"ork,{order}->orc", grouped, whole).reshape(weight.shape)
        return (turned - weight.double())[rows]

    return Written(tensors, delta, "oft_in", based=True)


@kind
def glora(layer: Layer, generator: torch.Generator, o: Options) -> Written:
    point = tuple(1 for _ in layer.inputs[1:])
    width = layer.inputs[0]
    tensors = {
        "a1.weight": draw(generator, width, o.rank, *point),
        "a2.weight": draw(generator, o.rank, width, *point),
        "b1.weight": draw(generator, layer.out, o.rank, *point),
        "b2.weight": draw(generator, o.rank, *layer.inputs),
        "alpha": torch.tensor(o.alpha),
    }
    a1, a2, b1, b2 = (tensors[f"{name}.weight"].double() for name in ("a1", "a2", "b1", "b2"))

    def delta(weight: Tensor, rows: slice) -> Tensor:
        inner = a1.flatten(1) @ a2.flatten(1)
        turned = torch.einsum("oi...,ij->oj...", weight.double(), inner)
        added = (b1.flatten(1) @ b2.flatten(1)).reshape(weight.shape)
        return ((turned + added) * (o.alpha / o.rank))[rows]

    return Written(tensors, delta, "glora", based=True)


@kind
def ia3(layer: Layer, generator: torch.Generator, o: Options) -> Written:
    kernel = tuple(1 for _ in layer.inputs[1:])
    size = layer.inputs[0] if o.on_input else layer.out
    values = draw(generator, *((1, size, *kernel) if kernel else (size,)))
    tensors = {"weight": values, "on_input": torch.tensor(int(o.on_input))}

    def delta(weight: Tensor, rows: slice) -> Tensor:
        flat = values.double().flatten()
        shape = (1, -1, *kernel) if o.on_input else (-1, 1, *kernel)
        return (weight.double() * flat.reshape(shape))[rows]

    return Written(tensors, delta, "ia3", based=True)


@kind
def full(layer: Layer, generator: torch.Generator, o: Options) -> Written:
    change = draw(generator, layer.out, *layer.inputs).half()
    added = draw(generator, layer.out) if o.bias else None
    tensors = {"diff": change, **({"diff_b": added} if added is not None else {})}
    return Written(tensors, lambda _, rows: change.double()[rows], "full", bias=added)


@kind
def norm(layer: Layer, generator: torch.Generator, o: Options) -> Written:
    change, added = draw(generator, layer.out), draw(generator, layer.out)
    tensors = {"w_norm": change, "b_norm": added}
    return Written(tensors, lambda _, rows: change.double()[rows], "norm", bias=added)


def _decomposed(written: Written, axis: str, layer: Layer, generator: torch.Generator) -> Written:
    """Put DoRA's magnitudes beside what is written, of outputs (out, peft) or of inputs (in)."""
    if not axis:
        return written
    point = tuple(1 for _ in layer.inputs[1:])
    size = layer.inputs[0] if axis == "in" else layer.out
    values = 2 + draw(generator, size)
    name, shape = {
        "out": ("dora_scale", (size, 1, *point)),
        "in": ("dora_scale", (1, size, *point)),
        "peft": ("lora_magnitude_vector.weight", (size,)),
    }[axis]
    dimensions = tuple(d for d in range(1 + len(layer.inputs)) if d != (1 if axis == "in" else 0))

    def delta(weight: Tensor, rows: slice) -> Tensor:
        changed = weight.double() + written.delta(weight, slice(None))
        norms = torch.linalg.vector_norm(changed, dim=dimensions, keepdim=True)
        column = values.double().reshape((1, size, *point) if axis == "in" else (size, 1, *point))
        return (column * changed / norms - weight.double())[rows]

    return Written(
        {**written.tensors, name: values.reshape(shape)}, delta, written.kind, based=True
    )
