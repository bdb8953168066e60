"""Gradient checkpointing of every family: the same bits, less memory, and right after errors."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lora_trainer import families
from lora_trainer.config.declare import CHECKPOINTING
from lora_trainer.costs.trace import LiveStorages
from lora_trainer.network import gradient_checkpointing
from lora_trainer.network.gradient_checkpointing import apply_checkpointing
from tests.fakes.trainee import same, trainee

FAMILIES = pytest.mark.parametrize("name", families.NAMES)


@FAMILIES
def test_loss_and_gradients_are_the_same_bits_whatever_is_recomputed(name: str) -> None:
    at = trainee(name)
    whole, split = at.gradients(), at.gradients(micro_batch=1)
    assert all(gradient.any() for gradient in whole)
    for kind in CHECKPOINTING[1:]:
        apply_checkpointing(at.denoiser, kind)
        assert same(at.gradients(), whole), kind
    assert same(at.gradients(micro_batch=1), split)


def test_random_draws_inside_a_network_are_repeated() -> None:
    def with_dropout(denoiser: nn.Module) -> None:
        for module in denoiser.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.3

    at = trainee("sd15", prepare=with_dropout)
    at.denoiser.train()
    found = []
    for kind in CHECKPOINTING:
        apply_checkpointing(at.denoiser, kind)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            found.append(at.gradients())
    assert all(same(other, found[0]) for other in found)


def test_the_device_keeps_the_inputs_of_two_blocks_and_the_host_all() -> None:
    host, sums = gradient_checkpointing.HostInputs(), []
    leaf = torch.randn(64, requires_grad=True)
    with LiveStorages() as live:
        for _ in range(4):
            x = leaf * 2
            with host.holding((x,)):
                sums.append(x.square().sum())
            del x
        assert live.now_bytes == (4 + 2) * leaf.nbytes + sum(each.nbytes for each in sums)


@pytest.mark.parametrize(
    ("x", "strides"),
    [
        (torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), (60, 1, 15, 3)),
        (torch.randn(4, 8)[:, :2], (2, 1)),
    ],
    ids=["whole", "a part of a larger storage"],
)
def test_an_input_comes_back_in_its_layout_without_the_rest_of_its_storage(
    x: Tensor, strides: tuple[int, ...]
) -> None:
    host, x = gradient_checkpointing.HostInputs(), x.requires_grad_()
    with host.holding((x,)):
        y = x.square()
    for _ in range(2):  # later blocks take its place on the device
        with host.holding(()):
            pass
    saved = y.grad_fn._saved_self  # type: ignore[union-attr]  # of a product
    assert torch.equal(saved, x) and saved.stride() == strides
    assert saved.untyped_storage().nbytes() == x.nbytes


# ---- what recomputed blocks keep: results that took much arithmetic, handed out once and in their order


ATEN = torch.ops.aten


@pytest.mark.parametrize(
    ("kind", "kept"),
    [("light", {"narrow", "wide", "square", "attention"}), ("selective", {"wide", "attention"})],
)
def test_what_each_kind_keeps(kind: Any, kept: set[str]) -> None:
    worth = partial(gradient_checkpointing.is_worth_saving, kind, 4)
    x = torch.zeros(2, 64)
    weights = {"narrow": (64, 256), "square": (64, 64), "wide": (64, 16), "low rank": (64, 4)}
    found = {
        name for name, shape in weights.items() if worth(ATEN.mm.default, (x, torch.zeros(shape)))
    }
    attention = ATEN._scaled_dot_product_flash_attention_for_cpu.default
    found |= {"attention"} if worth(attention, (x, x, x)) else set()
    assert found == kept
    assert not worth(ATEN.mm.default, (x, torch.zeros(64, 16, requires_grad=True)))
    assert not worth(ATEN.mul.Tensor, (x, x))
    convolution = (x, torch.zeros(8, 64, 3, 3))
    assert worth(ATEN.convolution.default, convolution)


def test_what_is_kept_does_not_run_again() -> None:
    torch.manual_seed(0)
    up, down = nn.Linear(8, 32).requires_grad_(False), nn.Linear(32, 8).requires_grad_(False)

    def block(x: Tensor) -> Tensor:
        h = down(up(x).sin()).view(1, 1, 3, 8)
        return F.scaled_dot_product_attention(h, h, h).cos()

    work = {}
    for kind in ("light", "selective", "full"):
        x = torch.randn(3, 8, requires_grad=True)
        keeping: Any = {}
        if kind != "full":
            keeping["context_fn"] = partial(gradient_checkpointing.selective_contexts, kind, 2)
        y = checkpoint(block, x, use_reentrant=False, **keeping)
        with LiveStorages() as live:
            y.sum().backward()
        work[kind] = (live.kernels - work.get("light", (0, 0))[0], live.flops)
    product, attention = 2 * 3 * 8 * 32, 2 * (2 * 3 * 3 * 8)
    assert work["selective"] == (1, work["light"][1] + product), "a product of `light` runs again"
    again = work["light"][1] + 2 * product + attention
    assert work["full"] == (3, again), "two products, and the attention"


def test_a_block_that_does_something_else_the_second_time_is_found_out() -> None:
    weight, passes = torch.randn(8, 4), iter(range(2))

    def block(x: Tensor) -> Tensor:
        y = x @ weight if next(passes) == 0 else torch.addmm(torch.zeros(4), x, weight)
        return y.cos()

    x = torch.randn(3, 8, requires_grad=True)
    modes = partial(gradient_checkpointing.selective_contexts, "light", 0)
    y = checkpoint(block, x, use_reentrant=False, context_fn=modes)
    with pytest.raises(RuntimeError, match=r"calls aten\.addmm.*the forward pass called"):
        y.sum().backward()
