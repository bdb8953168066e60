"""The device of a training: which one, how much of it, and what bit-exactness depends on."""

from __future__ import annotations

import os
from typing import Any

import torch

from lora_trainer.config import concrete
from lora_trainer.errors import MachineError
from lora_trainer.hardware import GIB
from lora_trainer.launch import place
from lora_trainer.model.compiling import compiler_version
from lora_trainer.model.memory_cap import cap_allocator
from lora_trainer.prepare import Prepared

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CPU = torch.device("cpu")
COMPILED_CODE = "compiled"
"""Folder in the cache folder."""


def setup_torch(prepared: Prepared) -> dict[str, Any]:
    """Set threads and determinism for the process; return what bit-exactness depends on.

    Raises MachineError when the planned device is not there for this torch.
    """
    config = prepared.config
    torch.set_num_threads(concrete(config.hardware.threads))
    compiled = config.hardware.compile == "blocks"
    if compiled:
        _keep_compiled_code(prepared)
    if config.train.deterministic:  # read when CUDA starts, which the next lines do
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    device = planned_device(prepared)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        _cap(prepared, device)
    if config.train.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "processes": prepared.processes,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name()
        if device.type == "cuda"
        else prepared.hardware.cpu_name,
        "deterministic": device.type == "cpu" or config.train.deterministic,
        **({"compiler": compiler_version(device)} if compiled else {}),
    }


def _keep_compiled_code(prepared: Prepared) -> None:
    """Let later runs find what is compiled in this one, in the cache folder, which is kept under its limit.

    What the user has set stays.
    """
    folder = prepared.cache_root / COMPILED_CODE
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))


def _cap(prepared: Prepared, device: torch.device) -> None:
    """Bound what the allocator may take to what was asked for, or to what the driver really has."""
    asked_gib, card = prepared.config.hardware.vram_limit_gib, prepared.hardware.gpus[0]
    cap_allocator(
        limit_bytes=None if asked_gib is None else int(asked_gib * GIB),
        free_bytes=card.free_bytes,
        device=device,
    )


def encoder_device(prepared: Prepared) -> torch.device:
    """Return where encoders and the VAE run: the roomiest card, where no other process trains on it.

    The training device has the denoiser beside them while samples are made; another one has not.
    """
    device = planned_device(prepared)
    if device.type != "cuda" or prepared.sharing > 1 or torch.cuda.device_count() < 2:
        return device
    free = [torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count())]
    others = [index for index in range(len(free)) if index != device.index]
    roomiest = max(others, key=lambda index: free[index])
    needed = prepared.plan.memory.phases
    fits = free[roomiest] >= max(needed["images"], needed["texts"])
    return torch.device("cuda", roomiest) if fits else device


def planned_device(prepared: Prepared) -> torch.device:
    """Return the device of this process, with its index: several processes take a card each."""
    if prepared.config.hardware.device != "cuda":
        return CPU
    if not torch.cuda.is_available():
        raise MachineError(
            f"the machine has {prepared.hardware.gpus[0].name} but torch {torch.__version__} cannot use it",
            fix="install the CUDA build of torch, or use --set hardware.device=cpu",
        )
    return torch.device("cuda", place().local_rank % torch.cuda.device_count())
