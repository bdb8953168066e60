"""Gradient checkpointing of every family: the same bits, less memory, and right after errors."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lora_trainer import families
from lora_trainer.config.declare import CHECKPOINTING
from lora_trainer.costs.trace import trace_step
from lora_trainer.network.block_swap import repeated_blocks
from lora_trainer.network.gradient_checkpointing import BlockRunner, apply_checkpointing
from lora_trainer.network.live_storages import LiveStorages
from tests.fakes.trainee import LAYERS, Trainee, failing, same, trainee

FAMILIES = pytest.mark.parametrize("name", families.MODULES)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors on several threads are slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@FAMILIES
def test_loss_and_gradients_are_the_same_bits_whatever_is_recomputed(name: str) -> None:
    at = trainee(name)
    whole, split = at.gradients(), at.gradients(micro_batch=1)
    assert all(gradient.any() for gradient in whole)
    for kind in CHECKPOINTING[1:]:
        apply_checkpointing(at.denoiser, kind)
        assert same(at.gradients(), whole), kind
    assert same(at.gradients(micro_batch=1), split)


def test_offloading_leaves_the_inputs_of_two_blocks_on_the_device() -> None:
    at = trainee("qwen")
    at.denoiser.to("meta")
    traced(at)  # networks keep tables from their first call
    saved, moved = [], []
    for kind in ("full", "offloaded"):
        apply_checkpointing(at.denoiser, kind)
        cost = traced(at)
        saved.append(cost.saved_bytes)
        moved.append(cost.host_bytes)
    # The first block's inputs have no gradient: nothing before it is trained. All others' are alike.
    assert moved[0] == 0 < moved[1]
    assert saved[0] - saved[1] == moved[1] * (LAYERS - 1 - 2) // (LAYERS - 1)


def traced(at: Trainee) -> Any:
    """Trace a step on `meta`, where host memory does not count."""
    for parameter in at.parameters:
        parameter.grad = torch.empty_like(parameter)
    noisy, timesteps = at.noisy.to("meta"), at.timesteps.to("meta")
    told = {key: tensor.to("meta") for key, tensor in at.conditioning.items()}
    return trace_step(
        at.denoiser,
        lambda: at.family.predict(at.denoiser, noisy, timesteps, told),
        inputs=[noisy, timesteps, *told.values()],
    )


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


@pytest.mark.parametrize("wanted", [1, 2], ids=["forward", "backward"])
def test_a_step_after_one_that_ran_out_of_memory_is_right(
    wanted: int,
) -> None:
    at = trainee("qwen")
    apply_checkpointing(at.denoiser, "offloaded")
    expected = at.gradients()
    for block in repeated_blocks(at.denoiser).values():
        with failing(block, in_pass=wanted), pytest.raises(torch.OutOfMemoryError):
            at.gradients()
        for parameter in at.parameters:
            parameter.grad = None
        assert same(at.gradients(), expected)


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
