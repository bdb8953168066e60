"""Updates as thin factors: the same matrix as written out, and singular values as of the whole matrix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.lora.low_rank import (
    LowRankUpdate,
    NotLowRank,
    Singular,
    added,
    fits,
    lora,
    product,
    singular,
    truncated,
)
from lora_trainer.lora.tensors import ModuleTensors, update
from tests.fakes.adapters import Draws, draw_module

SHAPES = [(12, 10), (12, 10, 3, 3), (12, 10, 1, 1)]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return Draws(seed)(*shape).double()


def dense(found: LowRankUpdate) -> torch.Tensor:
    return (found.up @ found.down).reshape(-1, *found.inputs)


def lokr(shape: tuple[int, ...], *, whole: tuple[str, ...]) -> ModuleTensors:
    """Return a LoKr of a 3 x 2 and a 4 x 5 (x kernel) matrix, some of them whole, others of rank 1."""
    kernel, draws = shape[2:], Draws(1)
    tensors = {}
    for name, (rows, columns) in (("w1", (3, 2)), ("w2", (4, 5))):
        inner = kernel if name == "w2" else ()
        if name in whole:
            tensors[name] = draws(rows, columns, *inner)
        else:
            tensors[f"{name}_a"] = draws(rows, 1)
            tensors[f"{name}_b"] = draws(1, columns, *inner)
    return ModuleTensors(kind="lokr", tensors=tensors, rank=1, scale=0.3)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["lora", "loha"])
def test_a_product_is_the_update_written_out(kind: Any, shape: tuple[int, ...]) -> None:
    """Of LoHa the file has the kernel flattened: the layer's own size says what it is."""
    module = draw_module(shape, kind=kind, rank=2)
    found = product(module, kernel=shape[2:])
    wanted = update(module, torch.zeros(shape, dtype=torch.float64))
    assert found.inputs == shape[1:]
    assert found.rank == (2 if kind == "lora" else 4)
    assert torch.allclose(dense(found), wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("whole", [(), ("w1",), ("w2",)])
def test_a_kronecker_product_is_one_of_thin_factors(
    shape: tuple[int, ...], whole: tuple[str, ...]
) -> None:
    module = lokr(shape, whole=whole)
    found = product(module, kernel=shape[2:])
    weight = torch.zeros(shape, dtype=torch.float64)
    plain = ModuleTensors(
        kind="lokr",
        tensors={name: tensor.flatten(1) if name == "w2_b" else tensor
                 for name, tensor in module.tensors.items()},
        rank=1,
        scale=0.3,
    )  # fmt: skip
    wanted = update(plain, weight)
    assert torch.allclose(dense(found).flatten(1), wanted.flatten(1), rtol=1e-10, atol=1e-12)


def test_what_is_no_thin_product_says_why() -> None:
    squares = {"w1": draw(3, 3), "w2": draw(4, 4)}
    for module, said in (
        (draw_module((12, 10), kind="oft"), "OFT changes depends on the base"),
        (draw_module((12, 10), kind="loha", rank=4), "LoHa update has full rank"),
        (
            ModuleTensors(kind="lokr", tensors=squares, rank=1, scale=1.0),
            "LoKr update has full rank",
        ),
    ):
        with pytest.raises(NotLowRank, match=said):
            product(module)


def test_a_sum_is_factors_side_by_side() -> None:
    one, other = (product(draw_module((12, 10), rank=rank, seed=rank)) for rank in (2, 3))
    both = added([(one, 0.5), (other, -2.0)])
    assert both.rank == 5
    assert torch.allclose(dense(both), 0.5 * dense(one) - 2 * dense(other), atol=1e-12)


@given(rank=st.integers(1, 14), out=st.integers(1, 9), inputs=st.integers(1, 9))
def test_singular_values_are_those_of_the_whole_matrix(rank: int, out: int, inputs: int) -> None:
    """Also where there are more columns than the matrix has sides, as sums of many adapters have."""
    found = singular(
        LowRankUpdate(up=draw(out, rank), down=draw(rank, inputs, seed=1), inputs=(inputs,))
    )
    whole = draw(out, rank) @ draw(rank, inputs, seed=1)
    values = torch.linalg.svdvals(whole)
    count = min(out, inputs, rank)
    assert torch.allclose(found.values[:count], values[:count], atol=1e-10)
    assert found.energy == pytest.approx(float(whole.square().sum()), rel=1e-10)
    rebuilt = (found.left * found.values) @ found.right
    assert torch.allclose(rebuilt, whole, atol=1e-10)


def values(*numbers: float, energy: float | None = None) -> Singular:
    tensor = torch.tensor(numbers, dtype=torch.float64)
    size = len(numbers)
    eye = torch.eye(size, dtype=torch.float64)
    whole = float(tensor.square().sum()) if energy is None else energy
    return Singular(left=eye, values=tensor, right=eye, inputs=(size,), energy=whole)


def test_ranks_for_a_share_and_a_ratio() -> None:
    found = values(4, 2, 1, 0)  # squares 16, 4, 1 of 21
    assert [found.rank_for_energy(share) for share in (0.1, 16 / 21, 0.8, 20 / 21, 1)] == [
        *(1, 1, 2, 2, 3)
    ]
    assert [found.rank_for_ratio(ratio) for ratio in (1, 2, 3.9, 4, 1e9)] == [1, 2, 2, 3, 3]
    assert [found.kept(rank) for rank in (0, 1, 3)] == [0, pytest.approx(16 / 21), 1]
    assert values(1, 1, energy=4).rank_for_energy(0.9) is None, "the end is not in the values"
    nothing = values(0, 0)
    assert (nothing.rank_for_energy(0.5), nothing.rank_for_ratio(3), nothing.kept(1)) == (1, 1, 1)


@pytest.mark.parametrize("shape", [(700, 600), (600, 70, 3, 3)])
def test_a_large_matrix_is_decomposed_by_iteration_to_the_same_values(
    shape: tuple[int, ...],
) -> None:
    matrix = torch.Size(shape[1:]).numel()
    side = min(shape[0], matrix)
    fall = 0.9 ** torch.arange(side, dtype=torch.float64)
    left = torch.linalg.qr(draw(shape[0], side)).Q
    right = torch.linalg.qr(draw(matrix, side, seed=1)).Q
    weight = ((left * fall) @ right.T).float().reshape(shape)
    found = truncated(weight, rank=8, generator=torch.Generator().manual_seed(0))
    assert len(found.values) == 8
    assert torch.allclose(found.values, fall[:8], rtol=1e-5)
    assert found.kept(8) == pytest.approx(
        float(fall[:8].square().sum() / fall.square().sum()), rel=1e-5
    )
    module = found.lora(3)
    cut = update(module, torch.zeros(shape))
    best = ((left[:, :3] * fall[:3]) @ right[:, :3].T).reshape(shape)
    assert float((cut - best).norm() / best.norm()) < 1e-4


@pytest.mark.parametrize("kind", ["lora", "loha", "lokr", "oft"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_module_fits_its_weight_and_no_other(kind: Any, shape: tuple[int, ...]) -> None:
    module = lokr(shape, whole=("w1",)) if kind == "lokr" else draw_module(shape, kind=kind)
    fan_in = torch.Size(shape[1:]).numel()
    assert fits(module, out=shape[0], fan_in=fan_in)
    assert not fits(module, out=shape[0] + 2, fan_in=fan_in)
    assert kind == "oft" or not fits(module, out=shape[0], fan_in=fan_in + 1)


def test_a_lora_from_factors_has_its_kernel_in_down() -> None:
    found = lora(up=draw(6, 2), down=draw(2, 45, seed=1), inputs=(5, 3, 3), scale=0.5)
    assert {name: tuple(t.shape) for name, t in found.tensors.items()} == {
        "up": (6, 2, 1, 1),
        "down": (2, 5, 3, 3),
    }
    assert found.tensors["up"].dtype == torch.float32
    wanted = 0.5 * (draw(6, 2) @ draw(2, 45, seed=1)).reshape(6, 5, 3, 3)
    assert torch.allclose(update(found).double(), wanted, atol=1e-5)
