"""What an adapter does to a weight, against definitions written out by hand."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lora_trainer.lora.adapter_size import AdapterKind
from lora_trainer.lora.tensors import (
    ModuleTensors,
    kronecker,
    needs_weight,
    rotate,
    rotation,
    row_norms,
    split_key,
    update,
)

SIZES = st.integers(1, 6)
KERNELS = st.sampled_from([(), (1, 1), (3, 3), (2, 3)])


def values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(hash((shape, seed)))
    return torch.randn(shape, generator=generator, dtype=dtype)


def module(
    kind: AdapterKind, tensors: Mapping[str, Tensor], *, rank: int = 2, scale: float = 1.0
) -> ModuleTensors:
    return ModuleTensors(kind=kind, tensors=tensors, rank=rank, scale=scale)


@given(out=SIZES, inputs=SIZES, rank=SIZES, kernel=KERNELS, scale=st.floats(0.1, 4.0))
def test_a_lora_adds_its_scaled_product(
    out: int, inputs: int, rank: int, kernel: tuple[int, ...], scale: float
) -> None:
    down, up = values(rank, inputs, *kernel), values(out, rank, seed=1)
    wanted = torch.einsum("or,ri...->oi...", up, down) * scale
    shaped = up.reshape(out, rank, *(1,) * len(kernel))
    found = update(module("lora", {"down": down, "up": shaped}, scale=scale))
    torch.testing.assert_close(found, wanted)
    assert found.dtype == torch.float64


@given(out=SIZES, inputs=SIZES, rank=SIZES, kernel=KERNELS)
def test_a_loha_adds_the_elementwise_product_of_two_products(
    out: int, inputs: int, rank: int, kernel: tuple[int, ...]
) -> None:
    flat = inputs * int(torch.Size(kernel).numel())
    one, two = (values(out, rank, seed=seed) for seed in (0, 1))
    three, four = (values(rank, flat, seed=seed) for seed in (2, 3))
    tensors = {"w1_a": one, "w1_b": three, "w2_a": two, "w2_b": four}
    weight = values(out, inputs, *kernel, seed=4)
    wanted = torch.einsum("or,ri,os,si->oi", one, three, two, four) * 0.5
    found = update(module("loha", tensors, scale=0.5), weight)
    torch.testing.assert_close(found, wanted.reshape(weight.shape))
    torch.testing.assert_close(update(module("loha", tensors, scale=0.5)), wanted)


@given(a=SIZES, b=SIZES, c=SIZES, d=SIZES, rank=SIZES, kernel=KERNELS)
def test_a_lokr_adds_a_kronecker_product_of_full_or_factored_factors(
    a: int, b: int, c: int, d: int, rank: int, kernel: tuple[int, ...]
) -> None:
    size = int(torch.Size(kernel).numel())
    left, right_a, right_b = values(a, c), values(b, rank, seed=1), values(rank, d * size, seed=2)
    right = (right_a @ right_b).reshape(b, d, *kernel)
    wanted = torch.einsum("ac,bd...->abcd...", left, right).reshape(a * b, c * d, *kernel)
    full = module("lokr", {"w1": left, "w2": right})
    factored = module("lokr", {"w1": left, "w2_a": right_a, "w2_b": right_b}, scale=2.0)
    torch.testing.assert_close(update(full), wanted)
    torch.testing.assert_close(update(factored, wanted), 2.0 * wanted)
    torch.testing.assert_close(kronecker(left, right), wanted)


def test_a_lokr_may_factor_its_left_side() -> None:
    a, b, right = values(3, 2), values(2, 4, seed=1), values(2, 5, seed=2)
    found = update(module("lokr", {"w1_a": a, "w1_b": b, "w2": right}))
    torch.testing.assert_close(found, torch.kron(a @ b, right))


@given(out=SIZES, inputs=SIZES, kernel=KERNELS)
def test_dora_gives_each_output_its_learned_norm(
    out: int, inputs: int, kernel: tuple[int, ...]
) -> None:
    weight = values(out, inputs, *kernel)
    down, up = values(2, inputs, *kernel, seed=1), values(out, 2, seed=2)
    magnitude = values(out, seed=3).abs() + 0.1
    tensors = {"down": down, "up": up, "magnitude": magnitude}
    dora = module("lora", tensors, scale=0.7)
    changed = weight + update(module("lora", {"down": down, "up": up}, scale=0.7), weight)
    found = weight + update(dora, weight)
    torch.testing.assert_close(row_norms(found), magnitude)
    direction = torch.nn.functional.cosine_similarity(found.flatten(1), changed.flatten(1))
    torch.testing.assert_close(direction, torch.ones_like(direction))


@given(count=st.integers(1, 4), size=st.integers(1, 6))
def test_a_rotation_is_orthogonal_and_no_blocks_leave_the_identity(count: int, size: int) -> None:
    matrices = rotation(values(count, size, size))
    identity = torch.eye(size, dtype=torch.float64).expand(count, size, size)
    torch.testing.assert_close(matrices @ matrices.mT, identity)
    torch.testing.assert_close(torch.linalg.det(matrices), torch.ones(count, dtype=torch.float64))
    assert torch.equal(rotation(torch.zeros(count, size, size, dtype=torch.float64)), identity)


@pytest.mark.parametrize("kernel", [(), (3, 3)])
def test_oft_rotates_groups_of_outputs_as_its_readers_do(kernel: tuple[int, ...]) -> None:
    """The formula of LyCORIS' diag-oft and ComfyUI's oft, from their definition of `oft_blocks`."""
    blocks, weight = values(3, 4, 4), values(12, 5, *kernel, seed=1)
    q = blocks - blocks.transpose(1, 2)
    eye = torch.eye(4, dtype=torch.float64)
    r = (eye + q) @ torch.linalg.inv(eye - q)
    wanted = torch.einsum("knm,kn...->km...", r, weight.reshape(3, 4, 5, *kernel))
    wanted = wanted.reshape(weight.shape)
    torch.testing.assert_close(rotate(rotation(blocks), weight), wanted)
    found = update(module("oft", {"blocks": blocks}, rank=4), weight)
    torch.testing.assert_close(weight + found, wanted)


def test_half_precision_tensors_are_computed_in_float32() -> None:
    down, up = (values(2, 64, dtype=torch.float16), values(64, 2, seed=1, dtype=torch.float16))
    found = update(module("lora", {"down": down, "up": up}))
    assert found.dtype == torch.float32
    assert torch.equal(found, up.float() @ down.float())
    assert update(module("lora", {"down": down, "up": up}), values(64, 64)).dtype == torch.float64


def test_dora_and_oft_say_that_they_need_the_weight() -> None:
    plain = module("lora", {"down": values(1, 2), "up": values(2, 1)})
    dora = module("lora", {**plain.tensors, "magnitude": values(2)})
    oft = module("oft", {"blocks": values(1, 2, 2)})
    assert [needs_weight(each) for each in (plain, dora, oft)] == [False, True, True]
    for each in (dora, oft):
        with pytest.raises(ValueError, match="depends on the weight"):
            update(each)


def test_keys_are_split_at_the_first_dot() -> None:
    assert split_key("text_encoder_2.layers.0.q") == ("text_encoder_2", "layers.0.q")
