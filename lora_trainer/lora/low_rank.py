"""Updates as products of thin matrices: LoHa and LoKr as LoRA, sums, and the best product of a lower rank.

Input is ModuleTensors or a full matrix, output float64 factors or ModuleTensors of kind lora. Singular
values come from the thin factors (QR, then the decomposition of a small core), so the [out, in] matrix
is formed only where it is what is given. "Energy" is a squared Frobenius norm throughout.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lora_trainer.lora.adapter_size import KIND_NAMES, update_size
from lora_trainer.lora.tensors import ModuleTensors, needs_weight

EXACT_SIDE = 512
"""Matrices with a side up to this are decomposed in full: it takes less than a second."""
_FIRST_RANK = 16
OVERSAMPLING, ITERATIONS = 16, 8


class NotLowRank(ValueError):
    """An update that is no product of thin matrices; the text says why."""


@dataclass(frozen=True, kw_only=True)
class LowRankUpdate:
    """The update up @ down, strength in it: float64 [out, k] and [k, fan_in].

    `inputs` is the shape of one output's weights: (in,), or (in, height, width) of a kernel.
    """

    up: Tensor
    down: Tensor
    inputs: tuple[int, ...]

    @property
    def rank(self) -> int:
        return self.up.shape[1]


@dataclass(frozen=True, kw_only=True)
class Singular:
    """A decomposition left @ diag(values) @ right, values falling; left [out, k], right [k, fan_in].

    `energy` is that of the whole update, `values` may lack its end.
    """

    left: Tensor
    values: Tensor
    right: Tensor
    inputs: tuple[int, ...]
    energy: float

    def kept(self, rank: int) -> float:
        """Return the share of the energy in the first `rank` values; 1 for an update of zero."""
        if self.energy <= 0:
            return 1.0
        return min(1.0, float(self.values[:rank].square().sum()) / self.energy)

    def rank_for_energy(self, share: float) -> int | None:
        """Return the smallest rank that keeps this share of the energy, at least 1; None: not in `values`."""
        sums = self.values.square().cumsum(0)
        enough = (sums >= share * self.energy * (1 - 1e-12)).nonzero()
        return int(enough[0]) + 1 if len(enough) else None

    def rank_for_ratio(self, ratio: float) -> int:
        """Return how many values are at least the largest divided by `ratio`, at least 1."""
        return max(1, int(((self.values >= self.values[0] / ratio) & (self.values > 0)).sum()))

    def lora(self, rank: int) -> ModuleTensors:
        """Return the update cut to `rank`, float32, scale 1; both factors get half of every value."""
        roots = self.values[:rank].sqrt()
        return lora(
            up=self.left[:, :rank] * roots,
            down=roots[:, None] * self.right[:rank],
            inputs=self.inputs,
        )


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
    if needs_weight(module):
        raise NotLowRank(f"what {kind_name(module)} changes depends on the base's weights")
    if module.kind in ("full", "norm"):
        raise NotLowRank(f"it is {kind_name(module)}, no product of factors")
    tensors = {name: tensor.double() for name, tensor in module.tensors.items()}
    if module.kind == "lora":
        up, down = tensors["up"].flatten(1), tensors["down"]
    elif module.kind == "loha":
        up, down = _hadamard(tensors)
    else:
        up, down = _kronecker(tensors)
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
    rows, columns = update_size(module.kind, shapes)
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


def added(parts: Sequence[tuple[LowRankUpdate, float]]) -> LowRankUpdate:
    """Return the weighted sum of updates of one module: their factors side by side."""
    inputs = max((part.inputs for part, _ in parts), key=len)
    return LowRankUpdate(
        up=torch.cat([part.up * weight for part, weight in parts], dim=1),
        down=torch.cat([part.down for part, _ in parts], dim=0),
        inputs=inputs,
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


def truncated(weight: Tensor, *, rank: int, generator: torch.Generator) -> Singular:
    """Return the first `rank` singular values of a full [out, in, ...] matrix, or all of a small one.

    By subspace iteration (Halko et al. 2009, arXiv 0909.4061, algorithm 4.4) in float32: the values
    are of a projection of the matrix, so what they keep of its energy is exact. Small ones: float64.
    """
    matrix = weight.float().flatten(1)
    energy = float(torch.linalg.vector_norm(matrix, dtype=torch.float64)) ** 2
    width = rank + OVERSAMPLING
    if min(matrix.shape) <= max(EXACT_SIDE, width):
        rank = min(matrix.shape)
        left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    else:
        start = torch.randn(matrix.shape[1], width, generator=generator)
        basis = leading_basis(matrix, start)
        core, values, right = torch.linalg.svd(basis.T @ matrix, full_matrices=False)
        left = basis @ core
    return Singular(
        left=left[:, :rank].double(),
        values=values[:rank].double(),
        right=right[:rank].double(),
        inputs=tuple(weight.shape[1:]),
        energy=energy,
    )


def leading_basis(matrix: Tensor, start: Tensor) -> Tensor:
    """Return an orthonormal basis [m, k] of the main directions of [m, n], from a random `start` [n, k]."""
    basis: Tensor = torch.linalg.qr(matrix @ start).Q
    # A QR decomposition after each product: without it all columns would turn to the largest singular
    # vector and lose the others in float32.
    for _ in range(ITERATIONS):
        basis = torch.linalg.qr(matrix @ torch.linalg.qr(matrix.T @ basis).Q).Q
    return basis


def approximated(
    change: Tensor, *, enough: Callable[[Singular], int], limit: int | None, seed: str
) -> Singular:
    """Return the largest singular values of a whole update [out, in, ...], as many as are asked for.

    `enough` says how many of those it is given a rank needs; all of them: there may be more to come.
    `limit` is the most that are wanted, `seed` makes the same draws in every run.
    """
    most = min(change.flatten(1).shape)
    most = most if limit is None else min(limit, most)
    rank = most if limit is not None else min(_FIRST_RANK, most)
    while True:
        decomposition = truncated(change, rank=rank, generator=seeded(seed))
        if rank >= most or enough(decomposition) < len(decomposition.values):
            return decomposition
        rank = min(2 * rank, most)


def seeded(text: str) -> torch.Generator:
    """Return a generator with the same draws for a text in every run, whatever else differs."""
    seed = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)
    return torch.Generator().manual_seed(seed)


def _hadamard(tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(A B) * (C D), elementwise, as one product: columns of A and C, rows of B and D, pair by pair."""
    first, second = tensors["w1_b"], tensors["w2_b"]
    _refuse_wide(
        "LoHa",
        rank=first.shape[0] * second.shape[0],
        sides=(tensors["w1_a"].shape[0], first[0].numel()),
    )
    up = _pairs(tensors["w1_a"].T, tensors["w2_a"].T).T
    down = _pairs(first.flatten(1), second.flatten(1))
    return up, down.reshape(-1, *first.shape[1:])


def _kronecker(tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """(A B) x (C D) = (A x C) (B x D); the kernel, if any, is that of D."""
    (left_up, left_down), (right_up, right_down) = _pair(tensors, "w1"), _pair(tensors, "w2")
    _refuse_wide(
        "LoKr",
        rank=left_up.shape[1] * right_up.shape[1],
        sides=(
            left_up.shape[0] * right_up.shape[0],
            left_down.shape[1] * right_down[0].numel(),
        ),
    )
    down = torch.kron(left_down, right_down.flatten(1))
    kernel = right_down.shape[2:]
    fan_in = left_down.shape[1] * right_down.shape[1]
    return torch.kron(left_up, right_up), down.reshape(-1, fan_in, *kernel)


def _pair(tensors: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
    """Return a Kronecker factor as a product of two; a whole one times the identity, the shorter side."""
    if name not in tensors:
        return tensors[f"{name}_a"], tensors[f"{name}_b"]
    whole = tensors[name]
    rows, columns = whole.flatten(1).shape
    if rows <= columns:
        return torch.eye(rows, dtype=whole.dtype), whole
    identity = torch.eye(columns, dtype=whole.dtype)
    return whole.flatten(1), identity.reshape(columns, *whole.shape[1:])


def _refuse_wide(kind: str, *, rank: int, sides: tuple[int, int]) -> None:
    if rank >= min(sides):
        raise NotLowRank(f"its {kind} update has full rank, no LoRA is smaller than the weight")


def _pairs(left: Tensor, right: Tensor) -> Tensor:
    """Multiply every row of `left` [r, n] with every row of `right` [s, n]: [r s, n]."""
    return (left[:, None] * right[None]).flatten(0, 1)
