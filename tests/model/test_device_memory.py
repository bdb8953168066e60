"""Memory of the device and for it: what is pinned, which errors mean that it is full, and the allocator's bound."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch

from lora_trainer.hardware.devices import KINDS, RESERVED_BYTES
from lora_trainer.hardware.machine import spill_margin_bytes
from lora_trainer.network import pinned_memory
from lora_trainer.network.block_swap import repeated_blocks, stream_blocks
from lora_trainer.network.gradient_checkpointing import apply_checkpointing
from lora_trainer.network.out_of_memory import is_out_of_memory
from lora_trainer.run import device
from lora_trainer.run.device import cap_allocator
from tests.fakes.family_bases import CPU
from tests.fakes.pinning import pinning_driver
from tests.fakes.trainee import block_sizes, same, trainee

MIB, GIB = 2**20, 2**30


def test_on_a_processor_nothing_is_pinned() -> None:
    assert not pinned_memory.pinned().empty((3,), dtype=torch.float32, device=CPU).is_pinned()
    tensor = torch.ones(3)
    assert pinned_memory.pinned_copy(tensor, device=CPU) is tensor
    assert pinned_memory.pinned().in_place(pinned_memory.whole_pages(100), device=CPU) is None
    assert pinned_memory.pinned().bytes == 0


def test_after_a_refusal_the_rest_is_ordinary_memory_and_it_is_said_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver, said = pinning_driver(monkeypatch, most_bytes=10_000), list[str]()
    with pinned_memory.counted(limit_bytes=None, on_refusal=said.append) as count:
        undo = count.in_place(pinned_memory.whole_pages(8192), device=CPU)
        assert count.in_place(pinned_memory.whole_pages(8192), device=CPU) is None
        assert driver.cleared == 1, "the error that CUDA would remember"
        assert undo is not None and count.bytes == 8192 and "CUDA error 2" in said.pop()
        undo()
        assert count.bytes == driver.bytes == 0
    driver = pinning_driver(monkeypatch, most_bytes=3 * MIB)
    with pinned_memory.counted(limit_bytes=None, on_refusal=said.append) as count:
        kept = [count.empty((MIB,), dtype=torch.uint8, device=CPU) for _ in range(5)]
        assert count.in_place(pinned_memory.whole_pages(4096), device=CPU) is None
        values = torch.arange(4.0)
        assert torch.equal(pinned_memory.pinned_copy(values, device=CPU), values)
    assert driver.refusals == 1 and count.refused and len(kept) == 5
    (told,) = said
    assert "refused to pin another 0.00 GiB" in told and "CUDA error: out of memory" in told
    assert "two to three times as long" in told


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


def test_blocks_are_pinned_one_by_one_as_far_as_it_goes_and_the_bits_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No copy may reach over the end of what is pinned: a block is pinned whole or not at all."""
    at = trainee("sdxl")
    apply_checkpointing(at.denoiser, "full")
    wanted, sizes = at.gradients(), [4 * size for size in block_sizes(at.denoiser)]
    driver = pinning_driver(monkeypatch, most_bytes=sum(sizes[:2]) + 8 * 4096)
    with pinned_memory.counted(limit_bytes=None, on_refusal=lambda _: None) as count:
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


# ---- which errors mean that a device is full: the libraries' own words, and two that mean it on a full gpu only


def test_what_libraries_say_of_a_full_device() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("HIP is full"))
    for text in (
        "CUDA out of memory. Tried to allocate 2.00 GiB",
        "CUDA driver error: out of memory",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes",
    ):
        assert is_out_of_memory(RuntimeError(text)), text
    for text in ("shapes do not match", "CUDA error: device-side assert"):
        assert not is_out_of_memory(RuntimeError(text)), text


@pytest.mark.parametrize(
    ("free_bytes", "full"),
    [(256 * MIB - 1, True), (2 * GIB, False), ("no GPU", False), ("lost", False)],
)
def test_a_missing_workspace_counts_on_a_card_that_is_nearly_full(
    free_bytes: int | str, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mem_get_info(_: torch.device) -> tuple[int, int]:
        if isinstance(free_bytes, str):
            raise RuntimeError("CUDA error: unspecified launch failure")
        return free_bytes, 8 * GIB

    device = None if free_bytes == "no GPU" else torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: device)
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    for text in (
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "GET was unable to find an engine to execute this computation",
    ):
        assert is_out_of_memory(RuntimeError(text)) is full


CARD = torch.device("cuda", 0)
CONTEXT = KINDS["cuda"].runtime_bytes
MARGIN = spill_margin_bytes(24 * GIB)


@pytest.mark.parametrize(
    ("spills", "limit_gib", "allowed"),
    [
        (False, 8, 8 * GIB - CONTEXT),  # the context counts in what is asked for
        (False, None, None),  # where the driver refuses, no bound is needed
        (False, 40, 24 * GIB),  # a bound above the card is the card
        (True, None, 20 * GIB - MARGIN - CONTEXT),  # where it spills there always is one
        (True, 22, 20 * GIB - MARGIN - CONTEXT),
    ],
)
def test_the_bound_on_the_allocator(
    spills: bool, limit_gib: int | None, allowed: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    fractions: list[float] = []

    def bound(fraction: float, device: torch.device) -> None:
        assert device.index is not None, "torch refuses a device without one"
        fractions.append(fraction)

    card = SimpleNamespace(total_memory=24 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: card)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", bound)
    monkeypatch.setattr(device, "driver_spills", lambda: spills)
    limit_bytes = None if limit_gib is None else limit_gib * GIB
    assert cap_allocator(limit_bytes=limit_bytes, free_bytes=20 * GIB, device=CARD) == allowed
    assert fractions == ([] if allowed is None else [allowed / (24 * GIB)])
