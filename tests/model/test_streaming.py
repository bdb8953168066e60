"""Streamed blocks against blocks that stay: the same bits, two of them on the device, right after errors."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from lora_trainer import families
from lora_trainer.common.errors import RequestError
from lora_trainer.config import declare
from lora_trainer.families.base.layout import DENOISER
from lora_trainer.lora.lora_hooks import attach_assistant
from lora_trainer.network.block_swap import repeated_blocks, stream_blocks
from lora_trainer.network.gradient_checkpointing import apply_checkpointing, storage_key
from tests.fakes.adapters import adapter_for
from tests.fakes.family_bases import CPU
from tests.fakes.trainee import (
    Trainee,
    block_sizes,
    same,
    trainee,
    with_references_in_text,
)

FAMILIES = pytest.mark.parametrize("name", families.NAMES)


class LateCopies:
    """A copy stream that is as late as a real one may be: what reads without waiting reads the past.

    Copies run in the order in which they were started, like a stream's, and not before somebody waits. Raises
    AssertionError when memory was given back before its copy: on a device, another tensor would be written over.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._queue: deque[object] = deque()
        self._pairs: dict[object, tuple[Any, ...]] = {}

    def copy(self, target: Tensor, source: Tensor) -> Any:
        layouts = [
            (weakref.ref(t.untyped_storage()), t.dtype, t.storage_offset(), t.shape, t.stride())
            for t in (target, source)
        ]
        self._queue.append(done := object())
        self._pairs[done] = tuple(layouts)
        return done

    def wait(self, done: Any) -> None:
        while done in self._queue:
            tensors = []
            for held, dtype, *layout in self._pairs[self._queue.popleft()]:
                assert (storage := held()) is not None, "memory was given back during a copy"
                tensors.append(torch.empty(0, dtype=dtype).set_(storage, *layout))
            tensors[0].copy_(tensors[1])


def streamed(at: Trainee, *, count: int | None = None, checkpointing: Any = "full") -> Any:
    """Stream blocks; `loads` lists those that were copied, `late` those whose copy began when they were due."""
    apply_checkpointing(at.denoiser, checkpointing)
    count = count or len(repeated_blocks(at.denoiser))
    blocks: Any = stream_blocks(at.denoiser, count=count, device=CPU)
    due, load, blocks.loads, blocks.late = [-1], blocks._load, [], []
    for number, name in enumerate(blocks.names):
        at.denoiser.get_submodule(name).register_forward_pre_hook(
            lambda *_, number=number: due.append(number), prepend=True
        )

    def counted(index: int) -> Any:
        blocks.loads.append(index)
        if index == due[-1]:
            blocks.late.append(index)
        return load(index)

    blocks._load = counted
    return blocks


def host_bytes(blocks: Any) -> int:
    return sum(block.host.nbytes for block in blocks._blocks)


def buffer_bytes(blocks: Any) -> int:
    return sum(buffer.memory.nbytes for buffer in blocks._buffers)


# ---- the same bits


@FAMILIES
def test_steps_and_predictions_are_the_same_bits(name: str) -> None:
    at = trainee(name)
    whole, split = at.gradients(), at.gradients(micro_batch=1)
    assert all(gradient.any() for gradient in whole)
    with torch.no_grad():
        predicted = at.predict()
    blocks = streamed(at)
    assert same(at.gradients(), whole)
    with torch.no_grad():
        assert torch.equal(at.predict(), predicted)
        assert torch.equal(at.predict(), predicted)
    assert same(at.gradients(micro_batch=1), split)
    assert len(blocks.loads) > 2 * len(blocks.names), "two buffers were enough for all blocks"


def test_steps_with_references_within_the_text_are_the_same_bits() -> None:
    """Recomputed and streamed, of unlike texts together and of each alone."""
    at = with_references_in_text(trainee("qwen21"))
    whole = at.gradients()
    split = at.gradients(micro_batch=1)
    streamed(at)
    assert same(at.gradients(), whole)
    assert same(at.gradients(micro_batch=1), split)


def test_an_assistant_stays_where_it_is_needed_while_blocks_are_streamed() -> None:
    """Streaming was refused with one, so Turbo releases did not fit small GPUs."""

    def assisted(denoiser: nn.Module) -> None:
        names = families.family("zimage").lora_targets(denoiser, "transformer")
        attach_assistant(denoiser, adapter_for(DENOISER, denoiser, names))

    at = trainee("zimage", prepare=assisted)
    whole = at.gradients()
    assert not same(whole, trainee("zimage").gradients())
    streamed(at)
    assert same(at.gradients(), whole)


@pytest.mark.parametrize("name", ["sdxl", "flux"])
def test_a_copy_is_waited_for_before_it_is_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    at = trainee(name)
    expected = at.gradients()
    monkeypatch.setattr("lora_trainer.network.block_swap.CopyStream", LateCopies)
    streamed(at, checkpointing="offloaded")
    assert same(at.gradients(), expected)
    assert same(at.gradients(), expected)


@pytest.mark.parametrize("settings", [{"dora": True}, {"kind": "lokr"}, {"kind": "oft"}], ids=str)
def test_every_kind_of_adapter_trains_the_same(settings: dict[str, Any]) -> None:
    at = trainee("flux2", **settings)
    expected = at.gradients()
    streamed(at)
    assert same(at.gradients(), expected)


@pytest.mark.parametrize("count", [1, 3])
def test_any_number_of_blocks_can_be_streamed(count: int) -> None:
    at = trainee("sd15")
    expected = at.gradients()
    names = list(repeated_blocks(at.denoiser))
    blocks = streamed(at, count=count)
    assert blocks.names == tuple(
        names[index] for index in declare.streamed_indices(len(names), count)
    )
    assert same(at.gradients(), expected)
    assert same(at.gradients(), expected)


@pytest.mark.parametrize("wanted", [1, 2], ids=["forward", "backward"])
def test_a_step_after_one_that_ran_out_of_memory_is_right(
    wanted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lora_trainer.network.block_swap.CopyStream", LateCopies)
    at = trainee("sd15")
    expected = at.gradients()
    streamed(at, checkpointing="offloaded")
    for block in list(repeated_blocks(at.denoiser).values())[::3]:
        passes = itertools.count(1)

        def fail(*_: object, passes: Iterator[int] = passes) -> None:
            if next(passes) == wanted:  # the second pass of a block is its recomputation
                raise torch.OutOfMemoryError("CUDA out of memory.")

        # In the middle of the block: after its first layer has run.
        inside = next(module for module in block.modules() if isinstance(module, nn.Linear))
        handle = inside.register_forward_hook(fail)
        with pytest.raises(torch.OutOfMemoryError):
            at.gradients()
        handle.remove()
        for parameter in at.parameters:
            parameter.grad = None
        assert same(at.gradients(), expected)


# ---- what is on the device


def test_two_blocks_at_most_are_on_the_device() -> None:
    at = trainee("sdxl")
    blocks = streamed(at)
    host = {storage_key(block.host) for block in blocks._blocks}
    on_device = []

    def watch(*_: object) -> None:
        there = [
            block
            for block in repeated_blocks(at.denoiser).values()
            if any(storage_key(tensor) not in host for tensor in weights_of(block))
        ]
        on_device.append(len(there))

    for block in repeated_blocks(at.denoiser).values():
        block.register_forward_hook(watch, always_call=True)
    at.gradients()
    assert max(on_device) == 2
    largest = max(4 * size for size in block_sizes(at.denoiser))
    assert largest <= buffer_bytes(blocks) / 2 <= largest + 64 * 256


def weights_of(block: nn.Module) -> list[Tensor]:
    return [tensor for tensor in block.parameters() if not tensor.requires_grad]


def test_the_planner_s_bytes_are_those_of_the_network() -> None:
    plain = trainee("sdxl")
    with torch.device("meta"):
        empty = plain.family.training_denoiser(plain.facts.release.architecture)
    assert block_sizes(empty) == block_sizes(plain.denoiser)
    block_bytes = [4 * size for size in block_sizes(empty)]
    for count in (3, len(block_bytes)):
        blocks = streamed(trainee("sdxl"), count=count)
        padding = 64 * 256 * count
        assert 0 <= host_bytes(blocks) - declare.moved_bytes(block_bytes, count) < padding
        freed = host_bytes(blocks) - buffer_bytes(blocks)
        assert abs(freed - declare.saved_bytes(block_bytes, count)) < padding


def test_all_but_the_streamed_weights_move_to_the_device() -> None:
    at = trainee("zimage")
    apply_checkpointing(at.denoiser, "full")
    blocks = stream_blocks(at.denoiser, count=2, device=torch.device("meta"))
    there = {name for name, tensor in at.denoiser.named_parameters() if tensor.device.type == "cpu"}
    assert there
    for name in there:
        assert name.startswith(tuple(f"{block}." for block in blocks.names))
        assert "lora_" not in name


# ---- which blocks, and the bytes that go with them


COUNTS = st.integers(1, 80).flatmap(lambda total: st.tuples(st.just(total), st.integers(1, total)))


@given(COUNTS)
def test_streamed_blocks_are_as_many_as_asked_for_and_evenly_spread(
    counts: tuple[int, int],
) -> None:
    """What is set free is what is moved, without two of the largest."""
    total, count = counts
    chosen = declare.streamed_indices(total, count)
    assert len(chosen) == count
    assert list(chosen) == sorted(set(chosen))
    assert 0 <= chosen[0] <= chosen[-1] < total
    # Round the ring: sampling goes from the last block to the first.
    gaps = {
        after - before
        for before, after in zip(chosen, (*chosen[1:], chosen[0] + total), strict=True)
    }
    assert max(gaps) - min(gaps) <= 1
    sizes = [10 + number % 7 for number in range(total)]
    moved = [sizes[index] for index in chosen]
    assert declare.moved_bytes(sizes, count) == sum(moved)
    assert declare.saved_bytes(sizes, count) == sum(moved) - min(2, count) * max(moved)
    assert declare.streamed_indices(total, 0) == ()


@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_after_one_step_every_copy_is_foreseen_and_none_is_made_twice(name: str) -> None:
    at = trainee(name)
    blocks = streamed(at)
    count = len(blocks.names)
    at.gradients()
    learning, unforeseen = len(blocks.loads), len(blocks.late)
    assert unforeseen, "the first block of all"
    at.gradients()
    assert len(blocks.late) == unforeseen
    # The last two of a pass are the first two of the pass that follows.
    assert len(blocks.loads) - learning == 2 * (count - 2)
    with torch.no_grad():
        at.predict()
        at.predict()
    assert len(blocks.late) == unforeseen


# ---- what cannot be


def test_blocks_that_autograd_would_keep_are_refused() -> None:
    at = trainee("flux")
    apply_checkpointing(at.denoiser, "none")
    with pytest.raises(
        RequestError, match=r"needs every block recomputed.*gradient_checkpointing=full"
    ):
        stream_blocks(at.denoiser, count=6, device=CPU)
    expected = at.gradients()
    blocks = streamed(at)
    apply_checkpointing(at.denoiser, "none")
    with pytest.raises(RequestError, match="needs every block recomputed"):
        at.gradients()
    with torch.no_grad():
        at.predict()
    apply_checkpointing(at.denoiser, "full")
    assert same(at.gradients(), expected)
    assert blocks.loads


def test_there_are_only_so_many_blocks() -> None:
    at = trainee("flux")
    apply_checkpointing(at.denoiser, "full")
    for count in (0, 7):
        refused = rf"streamed_blocks={count} is impossible: the base has 6 blocks"
        with pytest.raises(RequestError, match=refused):
            stream_blocks(at.denoiser, count=count, device=CPU)


def test_weights_that_are_no_plain_tensors_are_refused_before_anything_is_moved() -> None:
    class Wrapped(nn.Parameter):
        pass

    at = trainee("flux")
    expected = at.gradients()
    layer = repeated_blocks(at.denoiser)["single_transformer_blocks.2"].get_submodule("norm.linear")
    layer.weight = Wrapped(layer.get_parameter("weight").detach(), requires_grad=False)
    with pytest.raises(RequestError, match=r"weights of type Wrapped.*streamed_blocks=0"):
        streamed(at)
    assert same(at.gradients(), expected)
