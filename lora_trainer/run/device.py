"""The device of a training: its choice, the bound on its memory, and the facts that bit-exactness depends on.

On Windows and in WSL the driver moves memory to the host instead of refusing an allocation, so a full GPU causes no
error but makes a run ten times slower. There PyTorch's allocator is always bounded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lora_trainer.common.errors import MachineError
from lora_trainer.common.events import EventStream
from lora_trainer.common.processes import read_dist_env
from lora_trainer.hardware.device_calls import (
    bound_allocator,
    kind_of,
    name_of,
    require_kernels,
    total_bytes,
)
from lora_trainer.hardware.machine import GIB, detect, driver_spills, spill_margin_bytes
from lora_trainer.hardware.nvml import Gpu
from lora_trainer.network.compiling import compiler_version
from lora_trainer.network.pinned_memory import counted
from lora_trainer.run.prepare import Prepared

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CPU = torch.device("cpu")


def setup_torch(prepared: Prepared) -> dict[str, Any]:
    """Set threads and determinism of the process; return the facts that bit-exactness depends on.

    Raises MachineError when this torch cannot use the planned device.
    """
    config = prepared.config
    # The number of threads decides the order in which the CPU adds, and with it the last bits of sums.
    torch.set_num_threads(config.hardware.threads)
    compiled = config.hardware.compile == "blocks"
    if (
        compiled
    ):  # kernels are kept for later runs in the size-capped cache; the user's own variables win
        folder = prepared.cache_root / "compiled"
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
        os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))
    if config.train.deterministic:  # CUDA reads the variable at its start, in the next lines
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = planned_device(prepared)
    if device.type != CPU.type:
        if kind_of(device).own_memory:  # torch.mps has a single device and no set_device
            torch.get_device_module(device).set_device(device)
        limit_gib = config.hardware.vram_limit_gib
        cap_allocator(
            limit_bytes=None if limit_gib is None else int(limit_gib * GIB),
            free_bytes=card_of(prepared, device).free_bytes,
            device=device,
        )
    if config.train.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "processes": prepared.processes,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "device": prepared.hardware.cpu_name if device.type == CPU.type else name_of(device),
        "deterministic": device.type == "cpu" or config.train.deterministic,
        **({"compiler": compiler_version(device)} if compiled else {}),
    }


def cap_allocator(*, limit_bytes: int | None, free_bytes: int, device: torch.device) -> int | None:
    """Bound the allocator of a GPU; return the bytes it may take, None if no bound is needed.

    `limit_bytes` is the limit of the whole process, context included; `free_bytes` is free at present.
    """
    spills = driver_spills()
    if limit_bytes is None and not spills:
        return None
    total = total_bytes(device)
    if spills:
        room_bytes = free_bytes - spill_margin_bytes(total)
        limit_bytes = room_bytes if limit_bytes is None else min(limit_bytes, room_bytes)
    assert limit_bytes is not None
    # The context and the libraries take memory that the allocator does not see.
    runtime_bytes = kind_of(device).runtime_bytes
    return bound_allocator(device, allowed_bytes=max(limit_bytes - runtime_bytes, 0))


def best_device() -> tuple[torch.device, bool]:
    """Return the best GPU of this machine and whether it computes bf16, else the processor.

    For work without a plan: images of a finished LoRA, captions.
    """
    gpu = detect().accelerator().value
    if gpu is None or not torch.get_device_module(gpu.can.torch_type).is_available():
        return CPU, False
    device = torch.device(gpu.can.torch_type, gpu.index)
    return (CPU, False) if require_kernels(device) else (device, gpu.has_bf16)


@contextmanager
def pinning(prepared: Prepared, events: EventStream) -> Iterator[None]:
    """Limit pinned host memory to the platform's limit while the block runs; report a refusal once."""

    def report(problem: str) -> None:
        events.problem(
            problem,
            fix="nothing; fewer memory.streamed_blocks need less pinned memory",
            severity="note",
        )

    limit_bytes = prepared.hardware.pinnable_by_each(sharing=prepared.sharing)
    with counted(limit_bytes=limit_bytes, on_refusal=report):
        yield


def card_of(prepared: Prepared, device: torch.device) -> Gpu:
    """Return the detected GPU of a planned device."""
    return next(gpu for gpu in prepared.hardware.gpus if gpu.index == (device.index or 0))


def planned_device(prepared: Prepared) -> torch.device:
    """Return this process's device with its index; several processes are spread over the GPUs.

    Raises MachineError where torch does not see the GPU or has no kernels for it.
    """
    kind = prepared.config.hardware.device
    if kind == CPU.type:
        return CPU
    cards = prepared.hardware.usable(sharing=prepared.sharing)
    if not cards:
        reason = prepared.hardware.accelerator(sharing=prepared.sharing).reason
        raise MachineError(
            f"hardware.device={kind}, but there is no GPU to use: {reason}",
            fix="use --set hardware.device=cpu",
        )
    card = cards[read_dist_env().local_rank % len(cards)]
    if not torch.get_device_module(kind).is_available():
        raise MachineError(
            f"the machine has {card.name} but torch {torch.__version__} cannot use it",
            fix=f"{card.can.install}, or use --set hardware.device=cpu",
        )
    device = torch.device(kind, card.index)
    if problem := require_kernels(device):
        raise MachineError(problem, fix="install that build, or use --set hardware.device=cpu")
    return device
