"""The update of one layer by one module of an adapter file, in a form that is the same for all trainers.

Input are a module's tensors by role as numpy arrays, output an `Update`: Tucker forms multiplied out, a
constraint of rotations applied, magnitudes flat, the strength one factor. Formulas are those of
LyCORIS (Yeh et al. 2023, arXiv 2309.14859) unless said. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from lora_trainer.lora.adapter_size import AdapterKind, ModuleUpdate, rotated_size
from lora_trainer.lora_file.key_formats import SCALED, Role

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]


class NoRows(ValueError):
    """An update whose rows cannot be taken apart; the text says why, and follows the layer's name."""


Update = ModuleUpdate[Array]


def normal_form(
    kind: AdapterKind,
    arrays: Mapping[Role, Array],
    *,
    strength_of: Callable[[int], float],
    magnitude_of_outputs: bool = False,
) -> Update:
    """Return the update of a module; `strength_of` gives the strength for a rank where no alpha does.

    Raises ValueError, whose text follows the module's name, for tensors that do not fit together.
    """
    alpha = _alpha(arrays)
    tensors: Arrays = {
        role: np.asarray(array)
        for role, array in arrays.items()
        if role not in ("alpha", "up_bias", "magnitude", "scaled", "on_input")
    }
    match kind:
        case "lora" if "mid" in tensors:
            tensors["down"] = _tucker(tensors.pop("mid"), _matrix(tensors["down"]))
        case "loha" | "lokr":
            for number in "12":
                core = tensors.pop(f"t{number}", None)
                if core is not None:  # LyCORIS has [r, out] and [r, in] around [r, r, kernel]
                    tensors[f"w{number}_a"] = np.ascontiguousarray(tensors[f"w{number}_a"].T)
                    tensors[f"w{number}_b"] = _tucker(core, tensors[f"w{number}_b"])
            if kind == "loha":
                factors = ("w1_a", "w1_b", "w2_a", "w2_b")
                tensors |= {name: _matrix(tensors[name]) for name in factors}
        case "oft":
            tensors = _oft(tensors, constraint=alpha)
        case "oft_in":
            tensors = _oft_in(tensors, scaled=bool(np.any(arrays.get("scaled", 0))))
        case "glora":
            tensors = _glora(tensors)
        case "ia3":
            side = "by_input" if np.any(arrays["on_input"]) else "by_output"
            factor = tensors.pop("factor")
            # LyCORIS's is [n] of a linear layer, [1, n, 1, ...] of a convolution, and broadcast as it is.
            tensors[side] = factor.reshape(-1, *factor.shape[2:])
        case "full" | "norm" if not tensors:
            raise ValueError("has no numbers")
    rank = _rank(kind, tensors, alpha=alpha)
    if kind not in SCALED:
        scale = 1.0
    elif kind == "lokr" and {"w1", "w2"} <= tensors.keys():
        # By LyCORIS's rule, alpha counts only where a factor is decomposed; peft's counts always.
        scale = 1.0 if alpha is not None else strength_of(0)
    else:
        scale = alpha / rank if alpha is not None else strength_of(rank)
    if not math.isfinite(scale):
        raise ValueError(f"has an alpha of {alpha}")
    if "up_bias" in arrays:
        # peft's bias of lora_B is added with the strength of the rest.
        tensors["bias"] = np.asarray(arrays["up_bias"], dtype=np.float64) * scale
    if "bias" in tensors:
        tensors["bias"] = tensors["bias"].reshape(-1)
    update = Update(kind=kind, tensors=tensors, rank=rank, scale=scale)
    if "magnitude" in arrays:
        name, values = _magnitude(arrays["magnitude"], update, outputs=magnitude_of_outputs)
        update = replace(update, tensors={**tensors, name: values})
    _check_sizes(update)
    return update


def _alpha(arrays: Mapping[Role, Array]) -> float | None:
    if "alpha" not in arrays:
        return None
    if arrays["alpha"].size != 1:
        raise ValueError(f"has an alpha of {arrays['alpha'].size} numbers")
    return float(arrays["alpha"].reshape(()))


def _matrix(array: Array) -> Array:
    return array.reshape(array.shape[0], -1)


def _tucker(core: Array, inner: Array) -> Array:
    """Multiply a core [i, j, kernel] with `inner` [j, n]: [i, n, kernel] in float64.

    Trainers split a convolution into three factors (Tucker form, the core holds the kernel). Two of them
    multiplied are the input factor of the plain form, at the same rank.
    """
    product: Array = np.einsum("ij...,jn->in...", core.astype(np.float64), inner)
    return product


def _oft(tensors: Arrays, *, constraint: float | None) -> Arrays:
    blocks = tensors["blocks"]
    if blocks.ndim not in (3, 4) or blocks.shape[-2] != blocks.shape[-1]:
        raise ValueError(f"has rotations of shape {blocks.shape}, not (count, size, size)")
    out = blocks.shape[-3] * blocks.shape[-1]
    # Round n of a BOFT pairs outputs 2^n half blocks apart (arXiv 2311.06243, section 3).
    if blocks.ndim == 4 and (
        blocks.shape[-1] % 2 or out % (2 ** (len(blocks) - 1) * blocks.shape[-1])
    ):
        raise ValueError(f"is a BOFT of {len(blocks)} rounds, which its {out} outputs do not allow")
    if constraint:
        # COFT: in LyCORIS and sd-scripts the alpha of an OFT is not a strength but a limit, the norm of all
        # of a layer's skew matrices is at most alpha x out.
        limit = constraint * out
        wide = blocks.astype(np.float64)
        norm = float(np.linalg.norm(wide - wide.swapaxes(-1, -2)))
        if norm > limit:
            tensors["blocks"] = wide * (limit / norm)
    return tensors


def _oft_in(tensors: Arrays, *, scaled: bool) -> Arrays:
    skew = tensors["skew"]
    if skew.ndim != 2:
        raise ValueError(f"has rotations of shape {skew.shape}, not (count, numbers)")
    size = rotated_size(skew.shape[1])
    if scaled:  # OneTrainer's scaled variant
        tensors["skew"] = skew.astype(np.float64) / (2 * math.sqrt(size - 1))
    return tensors


def _glora(tensors: Arrays) -> Arrays:
    core = tensors.pop("bm", None)
    flat = {name: _matrix(array) for name, array in tensors.items() if array.ndim > 1}
    if core is not None:
        tensors["b2"] = _tucker(core, flat["b2"])
    if flat["b1"].shape[1] != min(flat["a1"].shape):
        # LyCORIS before 2.0 had the two factors of each pair the other way around.
        swapped = {"a1": "a2", "a2": "a1", "b1": "b2", "b2": "b1"}
        tensors |= {name: tensors[other] for name, other in swapped.items()}
    return {**tensors, "a1": _matrix(tensors["a1"]), "a2": _matrix(tensors["a2"])}


_RANK_AXES: Mapping[Role, int] = {
    "blocks": -1,
    **dict.fromkeys(("up", "w1_a", "w2_a", "a1", "b1"), 1),
    **dict.fromkeys(("down", "w1_b", "w2_b", "a2", "b2"), 0),
}


def ranks_of(shapes: Mapping[Role, tuple[int, ...]]) -> frozenset[int]:
    """Return the ranks that factors state by their shapes, one where they agree; of an OFT, the size of a block.

    Raises IndexError for factors with too few dimensions.
    """
    # In LyCORIS's Tucker forms w_a is [r, out], in the plain ones [out, r].
    tucker = {f"w{core[1]}_a": 0 for core in ("t1", "t2") if core in shapes}
    axes = {**_RANK_AXES, **tucker}
    return frozenset(shapes[role][axis] for role, axis in axes.items() if role in shapes)


def _rank(kind: AdapterKind, tensors: Arrays, *, alpha: float | None) -> int:
    if kind == "oft_in":
        return rotated_size(tensors["skew"].shape[1])
    ranks = ranks_of({role: array.shape for role, array in tensors.items()})
    if not ranks:  # two whole LoKr factors: LyCORIS states the rank as alpha
        return max(1, round(alpha)) if alpha is not None and math.isfinite(alpha) else 1
    if len(ranks) > 1 or 0 in ranks:
        raise ValueError(f"has factors of different rank ({', '.join(map(str, sorted(ranks)))})")
    return int(next(iter(ranks)))


def _magnitude(values: Array, update: Update, *, outputs: bool) -> tuple[str, Array]:
    """Return the name and numbers of DoRA's magnitudes: of each output, or of each input.

    LyCORIS and OneTrainer write both: [out, 1, ...] and [1, in, ...]; peft only the former.
    """
    kind, (out, fan_in) = update.kind, update.size
    # An input has one magnitude for all of its kernel; the dimensions after the second are the kernel.
    kernel = (
        1 if kind == "oft" else math.prod(math.prod(a.shape[2:]) for a in update.tensors.values())
    )
    inputs = fan_in // max(1, kernel)
    if not outputs and values.ndim > 1 and values.shape[0] == 1 != values.shape[1]:
        if not values.size or (values.size != inputs and (kernel > 1 or fan_in % values.size)):
            raise ValueError(f"has {values.size} magnitudes for {inputs} inputs")
        return "input_magnitude", values
    if values.size != out:
        raise ValueError(f"has {values.size} magnitudes for {out} outputs")
    # The dimensions of the kernel are kept where the factors do not have them.
    kernel_axes = () if kind == "lora" else (1,) * (values.ndim - 1)
    return "magnitude", values.reshape(out, *kernel_axes)


def _check_sizes(update: Update) -> None:
    """Raise ValueError where the factors of one module are of different layers."""
    arrays = update.tensors
    if update.kind == "loha" and (
        arrays["w1_a"].shape[0] != arrays["w2_a"].shape[0]
        or arrays["w1_b"].shape[1] != arrays["w2_b"].shape[1]
    ):
        raise ValueError("has two products of different sizes")
    if update.kind == "glora" and arrays["a1"].shape[0] != arrays["a2"].shape[1]:
        raise ValueError("has two products of different sizes")
    out = update.size[0]
    for name in ("bias", "rescale"):
        if name in arrays and out and arrays[name].size != out:
            raise ValueError(f"has {arrays[name].size} numbers of {name} for {out} outputs")
    if not all(array.size for array in arrays.values()):
        raise ValueError("has tensors without numbers")
    if any(array.dtype.kind not in "fiub" for array in arrays.values()):
        raise ValueError("has tensors that are not numbers")


# ---- rows of joined layers


_BESIDE = frozenset({"magnitude", "bias"})
# Arrays whose first dimension counts the outputs, but for the factors of a LoKr.
_OUTPUTS = frozenset({"up", "w1_a", "w2_a", "b1", "difference", "by_output", "rescale"}) | _BESIDE


def take_rows(update: Update, begin: int, end: int, *, part: tuple[int, int] = (0, 1)) -> Update:
    """Return the update of some rows of a joined layer, as an update of its own, exactly.

    `part`: which of the joined layers has these rows, and their number. Raises NoRows where the update has no
    rows of its own: it then needs the whole weight.
    """
    arrays = update.tensors
    rows: tuple[int, int] | None = None
    if "input_magnitude" in arrays:
        raise NoRows("has a magnitude for each input of joined layers (DoRA), which they share")
    names = (_BESIDE if update.kind == "lokr" else _OUTPUTS) & arrays.keys()
    changed = {name: arrays[name][begin:end] for name in names}
    match update.kind:
        case "oft":
            size = arrays["blocks"].shape[-1]
            if arrays["blocks"].ndim == 4 or begin % size or end % size:
                raise NoRows("turns outputs of joined layers into each other (OFT)")
            changed["blocks"] = arrays["blocks"][begin // size : end // size]
        case "lokr":
            # Row i of w1 x w2 is made of row i // height of w1 and row i % height of w2, `height` the rows of w2.
            first = "w1" if "w1" in arrays else "w1_a"
            height = arrays["w2" if "w2" in arrays else "w2_a"].shape[0]
            if begin % height or end % height:
                rows = (begin, end)  # of the whole product
            else:
                changed[first] = arrays[first][begin // height : end // height]
    taken = replace(update, tensors={**arrays, **changed}, rows=rows)
    products = PRODUCTS.get(update.kind, ())
    if not products:
        return taken
    beside = np.r_[:begin, end : update.size[0]]
    elsewhere = _read_ranks({name: arrays[name][beside] for name, _ in products}, update.rank)
    return _without_zeros(taken, products, part, elsewhere)


# By kind, the factors of each product: the one that has a row for each output, and the one that reads the inputs.
PRODUCTS: Mapping[AdapterKind, tuple[tuple[Role, Role], ...]] = {
    "lora": (("up", "down"),),
    "loha": (("w1_a", "w1_b"), ("w2_a", "w2_b")),
}


def _read_ranks(factors: Mapping[Role, Array], rank: int) -> Array:
    """Return for each rank whether any of these rows of outputs reads it."""
    read = np.zeros(rank, dtype=bool)
    for factor in factors.values():
        read |= factor.reshape(factor.shape[0], rank, -1).any(axis=(0, 2))
    return read


def _without_zeros(
    update: Update,
    products: tuple[tuple[Role, Role], ...],
    part: tuple[int, int],
    elsewhere: Array,
) -> Update:
    """Leave out the ranks that only other rows of a joined layer read; `elsewhere`: whether those read a rank.

    sd-scripts' split_qkv and this program train q, k and v apart and write them side by side with zeros between
    them: a part has its share of the joined rank. A rank of that share may have no effect yet. Where other rows
    read ranks of the share, ranks are not shared out; rows that read none then keep all, as if they had been trained.
    """
    rank, (number, count) = update.rank, part
    share = np.zeros(rank, dtype=bool)
    share[rank * number // count : rank * (number + 1) // count] = True
    read = _read_ranks({written: update.tensors[written] for written, _ in products}, rank)
    is_shared_out = (
        rank % count == 0 and not (read & ~share).any() and not (elsewhere & share).any()
    )
    own = share if is_shared_out else read
    if own.all() or not own.any():
        return update
    changed = {written: update.tensors[written][:, own] for written, _ in products}
    changed |= {inner: update.tensors[inner][own] for _, inner in products}
    kept = int(own.sum())
    return replace(update, tensors={**update.tensors, **changed}, rank=kept)


def swap_halves(update: Update) -> Update:
    """Return the update with the two halves of its rows exchanged; raises NoRows where it cannot."""
    out = update.size[0]
    if update.kind in ("lokr", "oft", "oft_in") or out % 2:
        raise NoRows(f"is a {update.kind} whose rows are in another order in this base")
    order = np.r_[out // 2 : out, 0 : out // 2]
    changed = {name: update.tensors[name][order] for name in _OUTPUTS & update.tensors.keys()}
    return replace(update, tensors={**update.tensors, **changed})
