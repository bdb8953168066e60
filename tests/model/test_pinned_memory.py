"""What is pinned, in which order, and what a refusal leaves: ordinary memory, said once."""

from __future__ import annotations

import gc

import pytest
import torch

from lora_trainer.hardware.devices import RESERVED_BYTES
from lora_trainer.network import pinned_memory
from lora_trainer.network.block_swap import repeated_blocks, stream_blocks
from lora_trainer.network.gradient_checkpointing import apply_checkpointing
from tests.fakes.family_bases import CPU
from tests.fakes.pinning import pinning_driver
from tests.fakes.trainee import block_sizes, same, trainee

MIB = 2**20


def test_on_a_processor_nothing_is_pinned() -> None:
    assert not pinned_memory.pinned().empty((3,), dtype=torch.float32, device=CPU).is_pinned()
    tensor = torch.ones(3)
    assert pinned_memory.pinned_copy(tensor, device=CPU) is tensor
    assert pinned_memory.pinned().in_place(pinned_memory.whole_pages(100), device=CPU) is None
    assert pinned_memory.pinned().bytes == 0


def test_after_a_refusal_the_rest_is_ordinary_memory_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver, said = pinning_driver(monkeypatch, most_bytes=3 * MIB), list[str]()
    with pinned_memory.counted(limit_bytes=None, on_refusal=said.append) as count:
        kept = [count.empty((MIB,), dtype=torch.uint8, device=CPU) for _ in range(5)]
        assert count.in_place(pinned_memory.whole_pages(4096), device=CPU) is None
        values = torch.arange(4.0)
        assert torch.equal(pinned_memory.pinned_copy(values, device=CPU), values)
    assert driver.refusals == 1 and count.refused and len(kept) == 5
    (told,) = said
    assert "refused to pin another 0.00 GiB" in told and "CUDA error: out of memory" in told
    assert "two to three times as long" in told


def test_a_refusal_in_place_clears_the_error_that_cuda_would_remember(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver, said = pinning_driver(monkeypatch, most_bytes=10_000), list[str]()
    with pinned_memory.counted(limit_bytes=None, on_refusal=said.append) as count:
        undo = count.in_place(pinned_memory.whole_pages(8192), device=CPU)
        assert count.in_place(pinned_memory.whole_pages(8192), device=CPU) is None
        assert driver.cleared == 1 and "CUDA error 2" in said[0]
        assert undo is not None and count.bytes == 8192
        undo()
        assert count.bytes == driver.bytes == 0


def test_no_more_is_asked_for_than_the_platform_gives_and_batches_have_room_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver, said = pinning_driver(monkeypatch, most_bytes=RESERVED_BYTES + MIB), list[str]()
    with pinned_memory.counted(limit_bytes=RESERVED_BYTES + MIB, on_refusal=said.append) as count:
        first = count.in_place(pinned_memory.whole_pages(MIB), device=CPU)
        assert first is not None, "what the limit leaves beside the reserve"
        assert count.in_place(pinned_memory.whole_pages(4096), device=CPU) is None
        count.empty((4096,), dtype=torch.uint8, device=CPU, rare=True)
        assert count.bytes == MIB, "copies for saving leave the reserve too"
        batch = count.empty((RESERVED_BYTES,), dtype=torch.uint8, device=CPU)
        assert count.bytes == RESERVED_BYTES + MIB == driver.bytes
        count.empty((1,), dtype=torch.uint8, device=CPU)
    assert driver.refusals == 0 and said == [] and len(batch)


def test_memory_that_torch_keeps_is_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step's inputs are new tensors in the same memory: the count must not grow with the steps."""
    pinning_driver(monkeypatch)
    with pinned_memory.counted(limit_bytes=2 * MIB, on_refusal=lambda _: None) as count:
        for _ in range(5):
            inputs = [count.empty((300_000,), dtype=torch.uint8, device=CPU) for _ in range(3)]
            assert count.bytes == 3 * 2**19
            inputs.clear()
            gc.collect()


@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_blocks_are_pinned_one_by_one_as_far_as_it_goes_and_the_bits_stay(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No copy may reach over the end of what is pinned: a block is pinned whole or not at all."""
    plain = trainee(name)
    apply_checkpointing(plain.denoiser, "full")
    wanted = plain.gradients()
    sizes = [4 * size for size in block_sizes(trainee(name).denoiser)]
    driver = pinning_driver(monkeypatch, most_bytes=sum(sizes[:2]) + 8 * 4096)
    with pinned_memory.counted(limit_bytes=None, on_refusal=lambda _: None) as count:
        at = trainee(name)
        apply_checkpointing(at.denoiser, "full")
        streamed = stream_blocks(at.denoiser, count=len(repeated_blocks(at.denoiser)), device=CPU)
        assert 1 <= len(driver.in_place) < len(streamed.names)
        assert same(at.gradients(), wanted)
        del at, streamed
        gc.collect()
        assert count.bytes == driver.bytes == 0


def test_pages_are_not_shared() -> None:
    memories = [pinned_memory.whole_pages(size) for size in (1, 4096, 4097)]
    assert [memory.nbytes for memory in memories] == [1, 4096, 4097]
    ends = sorted((memory.data_ptr(), memory.nbytes) for memory in memories)
    assert all(start % 4096 == 0 for start, _ in ends)
    for (start, size), (after, _) in zip(ends, ends[1:], strict=False):
        assert start + -(-size // 4096) * 4096 <= after
