"""Which errors mean that a device is full: the libraries' own words, and two that mean it on a full GPU only."""

from __future__ import annotations

import pytest
import torch

from lora_trainer.network.out_of_memory import NEARLY_FULL_BYTES, is_out_of_memory

GIB = 2**30


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("HIP is full"),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
    ids=str,
)
def test_what_libraries_say_of_a_full_device(error: RuntimeError) -> None:
    assert is_out_of_memory(error)


@pytest.mark.parametrize("text", ["shapes do not match", "CUDA error: device-side assert"])
def test_other_errors_are_none(text: str) -> None:
    assert not is_out_of_memory(RuntimeError(text))


AMBIGUOUS = pytest.mark.parametrize(
    "text",
    [
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "GET was unable to find an engine to execute this computation",
    ],
)


@AMBIGUOUS
@pytest.mark.parametrize(
    ("free_bytes", "full"),
    [
        (NEARLY_FULL_BYTES - 1, True),
        (2 * GIB, False),
        ("no GPU", False),
        ("lost", False),
    ],
)
def test_a_missing_workspace_counts_on_a_card_that_is_nearly_full(
    text: str, free_bytes: int | str, full: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mem_get_info(_: torch.device) -> tuple[int, int]:
        if isinstance(free_bytes, str):
            raise RuntimeError("CUDA error: unspecified launch failure")
        return free_bytes, 8 * GIB

    device = None if free_bytes == "no GPU" else torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: device)
    monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
    assert is_out_of_memory(RuntimeError(text)) is full
