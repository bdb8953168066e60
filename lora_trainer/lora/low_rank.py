"""Updates as products of thin matrices: LoHa and LoKr as LoRA, sums, and the best product of a lower rank.

Input is ModuleTensors or a full matrix, output float64 factors or ModuleTensors of kind lora. Singular
values come from the thin factors (QR, then the decomposition of a small core), so the [out, in] matrix
is formed only where it is what is given. "Energy" is a squared Frobenius norm throughout.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from lora_trainer.lora.adapter_size import KIND_NAMES
from lora_trainer.lora.tensors import ModuleTensors

# Matrices with a side up to this are decomposed in full: it takes less than a second.
EXACT_SIDE = 512
_FIRST_RANK = 16
OVERSAMPLING, ITERATIONS = 16, 8


class NotLowRank(ValueError):
    """An update that is not a product of thin matrices; the text says why."""


@dataclass(frozen=True, kw_only=True)
class LowRankUpdate:
    """The update up @ down with its strength, in float64."""

    up: Tensor
    """[out, k]"""
    down: Tensor
    """[k, fan_in]"""
    inputs: tuple[int, ...]
    """Shape of one output's weights: (in,), or (in, height, width) of a kernel."""


@dataclass(frozen=True, kw_only=True)
class Singular:
    """A decomposition left @ diag(values) @ right."""

    left: Tensor
    """[out, k]"""
    values: Tensor
    """Falling; the smallest may be left out."""
    right: Tensor
    """[k, fan_in]"""
    inputs: tuple[int, ...]
    energy: float
    """The energy of the whole update."""


def lora(*, up: Tensor, down: Tensor, inputs: tuple[int, ...], scale: float = 1.0) -> ModuleTensors:
    """Return thin factors as a module, in float32; a kernel lies in `down`."""
    rank = down.shape[0]
    return ModuleTensors(
        kind="lora",
        tensors={
            "down": down.float().reshape(rank, *inputs).contiguous(),
            "up": up.float().reshape(-1, rank, *(1,) * (len(inputs) - 1)).contiguous(),
        },
        rank=rank,
        scale=scale,
    )


def kind_name(module: ModuleTensors) -> str:
    """Return the common name of a module's kind."""
    return "DoRA" if module.dora else KIND_NAMES[module.kind]


def product(module: ModuleTensors, *, kernel: tuple[int, ...] = ()) -> LowRankUpdate:
    """Return the update of a module as one product; raises NotLowRank where it is none.

    LoHa of rank r is a product of rank r^2 (rows of the factors multiplied pair by pair), LoKr one of
    the product of its factors' ranks; where these are no longer thin, they are refused too. `kernel`
    is the layer's, for files that have it flattened.
    """
    if module.needs_weight:
        raise NotLowRank(f"the change by {kind_name(module)} depends on the base's weights")
    if module.kind in ("full", "norm"):
        raise NotLowRank(f"it is {kind_name(module)}, not a product of factors")
    tensors = {name: tensor.double() for name, tensor in module.tensors.items()}
    if module.kind == "lora":
        up, down = tensors["up"].flatten(1), tensors["down"]
    else:
        (left_up, left_down), (right_up, right_down) = _pair(tensors, "w1"), _pair(tensors, "w2")
        if left_up.shape[1] * right_up.shape[1] >= min(module.size):
            name = kind_name(module)
            raise NotLowRank(f"its {name} update has full rank, no LoRA is smaller than the weight")
        if module.kind == "loha":
            # (A B) * (C D), elementwise, as one product: columns of A and C, rows of B and D, pair by pair.
            up = _pairs(left_up.T, right_up.T).T
            down = _pairs(left_down.flatten(1), right_down.flatten(1))
            down = down.reshape(-1, *left_down.shape[1:])
        else:
            # (A B) x (C D) = (A x C) (B x D); the kernel, if any, is that of D.
            fan_in = left_down.shape[1] * right_down.shape[1]
            up = torch.kron(left_up, right_up)
            down = torch.kron(left_down, right_down.flatten(1))
            down = down.reshape(-1, fan_in, *right_down.shape[2:])
    if module.rows is not None:
        up = up[slice(*module.rows)]
    kernel_shape = tuple(down.shape[1:])
    down = down.flatten(1)
    inputs = (
        kernel_shape if len(kernel_shape) > 1 else (down.shape[1] // math.prod(kernel), *kernel)
    )
    return LowRankUpdate(up=up * module.scale, down=down, inputs=inputs)


def fits(module: ModuleTensors, *, out: int, fan_in: int) -> bool:
    """Say whether a module's update has the size of a weight, from the shapes of its factors."""
    shapes = {name: tuple(tensor.shape) for name, tensor in module.tensors.items()}
    rows, columns = module.size
    if module.rows is not None:
        rows = module.rows[1] - module.rows[0]
    # One rotation or one share may serve all inputs, and then the tensors do not tell how many.
    share = module.rank if module.kind == "oft_in" else shapes.get("by_input", (1,))[0]
    return (
        rows in (0, out)
        and columns in (0, fan_in)
        and fan_in % share == 0
        and shapes.get("bias", (out,))[0] == out
    )


def singular(update: LowRankUpdate) -> Singular:
    """Return all singular values of a product of thin factors."""
    left_basis, left = torch.linalg.qr(update.up)
    right_basis, right = torch.linalg.qr(update.down.T)
    core_left, values, core_right = torch.linalg.svd(left @ right.T, full_matrices=False)
    return Singular(
        left=left_basis @ core_left,
        values=values,
        right=core_right @ right_basis.T,
        inputs=update.inputs,
        energy=float(values.square().sum()),
    )


def approximated(
    change: Tensor, *, enough: Callable[[Singular], int], limit: int | None, seed: str
) -> Singular:
    """Return the largest singular values of a whole update [out, in, ...], as many as are asked for.

    `enough` says how many of those it is given a rank needs; all of them: there may be more to come.
    `limit` is the most that are wanted, `seed` makes the same draws in every run.

    Of a large matrix by torch's subspace iteration (Halko et al. 2009, arXiv 0909.4061) in float32: the
    values are of a projection of the matrix, so what they keep of its energy is exact. Of a small one all, in
    float64.
    """
    matrix = change.float().flatten(1)
    energy = float(torch.linalg.vector_norm(matrix, dtype=torch.float64)) ** 2
    side = min(matrix.shape)
    most = side if limit is None else min(limit, side)
    rank = most if limit is not None else min(_FIRST_RANK, most)
    while True:
        width, count = rank + OVERSAMPLING, rank
        if side <= max(EXACT_SIDE, width):
            count = side
            left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
        else:
            # torch draws from its global generator, which is as before afterwards.
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(zlib.crc32(seed.encode()))
                left, values, columns = torch.svd_lowrank(matrix, width, niter=ITERATIONS)
            right = columns.T
        decomposition = Singular(
            left=left[:, :count].double(),
            values=values[:count].double(),
            right=right[:count].double(),
            inputs=tuple(change.shape[1:]),
            energy=energy,
        )
        if rank >= most or enough(decomposition) < len(decomposition.values):
            return decomposition
        rank = min(2 * rank, most)


def _pair(tensors: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    """Return a factor as a product of two; a whole one times the identity of its shorter side."""
    if name not in tensors:
        return tensors[f"{name}_a"], tensors[f"{name}_b"]
    whole = tensors[name]
    rows, columns = whole.flatten(1).shape
    if rows <= columns:
        return torch.eye(rows, dtype=whole.dtype), whole
    identity = torch.eye(columns, dtype=whole.dtype)
    return whole.flatten(1), identity.reshape(columns, *whole.shape[1:])


def _pairs(left: Tensor, right: Tensor) -> Tensor:
    """Multiply every row of `left` [r, n] with every row of `right` [s, n]: [r s, n]."""
    return (left[:, None] * right[None]).flatten(0, 1)
