"""Gradient checkpointing of every family: the same bits, less memory, and right after errors."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lora_trainer import families
from lora_trainer.config.declare import CHECKPOINTING
from lora_trainer.network.gradient_checkpointing import (
    BlockRunner,
    SelectivePolicy,
    apply_checkpointing,
    selective_contexts,
)
from lora_trainer.network.live_storages import LiveStorages
from tests.fakes.trainee import LAYERS, same, trainee

FAMILIES = pytest.mark.parametrize("name", families.MODULES)


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


def test_nothing_is_left_behind_but_what_two_blocks_were_given() -> None:
    at = trainee("qwen")
    apply_checkpointing(at.denoiser, "offloaded")
    at.gradients()
    gc.disable()
    try:
        with LiveStorages() as live:
            at.gradients()
            left = live.now_bytes
    finally:
        gc.enable()
    runner = at.denoiser._gradient_checkpointing_func
    assert isinstance(runner, BlockRunner)
    per_block = runner.host_bytes // 2 // (LAYERS - 1)
    assert left <= 2 * per_block


# ---- what recomputed blocks keep: results that took much arithmetic, handed out once and in their order


ATEN = torch.ops.aten


class Seen(TorchDispatchMode):
    """Lists the kernels that run, each with the shape of its last factor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotation
        self.kernels: list[object] = []

    def __torch_dispatch__(
        self,
        kernel: object,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        self.kernels.append(kernel)
        return kernel(*args, **(kwargs or {}))  # type: ignore[operator]  # a kernel of torch, which has no type


@pytest.mark.parametrize(
    ("kind", "kept"),
    [
        ("light", {"narrow", "wide", "square", "attention"}),
        ("selective", {"wide", "attention"}),
        ("full", set()),
    ],
)
def test_what_each_kind_keeps(kind: Any, kept: set[str]) -> None:
    worth, x = SelectivePolicy(checkpointing=kind, rank=4), torch.zeros(2, 64)
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
    assert worth(ATEN.convolution.default, convolution) == (kind != "full")


def work_again(kind: Any) -> list[object]:
    """Return the kernels of a backward pass through one block of two products and an attention."""
    torch.manual_seed(0)
    up, down = nn.Linear(8, 32), nn.Linear(32, 8)
    for parameter in (*up.parameters(), *down.parameters()):
        parameter.requires_grad_(False)

    def block(x: Tensor) -> Tensor:
        h = down(up(x).sin()).view(1, 1, 3, 8)
        return F.scaled_dot_product_attention(h, h, h).cos()

    x = torch.randn(3, 8, requires_grad=True)
    modes = partial(selective_contexts, SelectivePolicy(checkpointing=kind, rank=2))
    y = checkpoint(block, x, use_reentrant=False, context_fn=modes)
    with Seen() as seen:
        y.sum().backward()
    assert x.grad is not None
    return seen.kernels


def test_what_is_kept_does_not_run_again() -> None:
    attention = ATEN._scaled_dot_product_flash_attention_for_cpu.default
    counts = {
        kind: (
            sum(kernel is ATEN.addmm.default for kernel in found),
            sum(kernel is attention for kernel in found),
        )
        for kind in ("light", "selective", "full")
        for found in [work_again(kind)]  # type: ignore[arg-type]  # literals of a tuple
    }
    assert counts == {"light": (0, 0), "selective": (1, 0), "full": (2, 1)}


def test_a_block_that_does_something_else_the_second_time_is_found_out() -> None:
    weight, passes = torch.randn(8, 4), iter(range(2))

    def block(x: Tensor) -> Tensor:
        y = x @ weight if next(passes) == 0 else torch.addmm(torch.zeros(4), x, weight)
        return y.cos()

    x = torch.randn(3, 8, requires_grad=True)
    modes = partial(selective_contexts, SelectivePolicy(checkpointing="light", rank=0))
    y = checkpoint(block, x, use_reentrant=False, context_fn=modes)
    with pytest.raises(RuntimeError, match=r"calls aten\.addmm.*the forward pass called"):
        y.sum().backward()
