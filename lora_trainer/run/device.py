"""The device of a training: its choice, the bound on its memory, and the fallbacks of a run when it is full.

On Windows and in WSL the driver moves memory to the host instead of refusing an allocation, so a full GPU causes no
error but makes a run ten times slower. There PyTorch's allocator is always bounded.

A run falls back when even a micro-batch of one image does not fit, the cheapest fallback first: recompute more
blocks, move their inputs to host memory, then stream blocks as far as host memory has room. On the processor host
memory is the device's, so it gets only the first. GPUs that ran out of memory are recorded.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from lora_trainer.common.errors import MachineError, first_line
from lora_trainer.common.event_kinds import Event, OutOfMemory
from lora_trainer.common.events import EventStream, Listener
from lora_trainer.common.memo import MEMO_FILE
from lora_trainer.common.processes import read_dist_env
from lora_trainer.config.declare import CHECKPOINTING, Checkpointing, Decided, moved_bytes
from lora_trainer.config.running import MemorySettings
from lora_trainer.hardware.device_calls import (
    first_allocation,
    kind_of,
    name_of,
    require_kernels,
    set_memory_share,
    total_bytes,
)
from lora_trainer.hardware.kept_memory import make_room, take_back
from lora_trainer.hardware.machine import (
    GIB,
    detect,
    driver_spills,
    spare_ram_bytes,
    spill_margin_bytes,
)
from lora_trainer.hardware.nvml import Gpu
from lora_trainer.network.block_swap import base_tensors, repeated_blocks, stream_blocks
from lora_trainer.network.compiling import compiler_version
from lora_trainer.network.gradient_checkpointing import apply_checkpointing
from lora_trainer.network.out_of_memory import is_out_of_memory
from lora_trainer.network.pinned_memory import counted
from lora_trainer.planning.plan import compiled_sizes
from lora_trainer.planning.plan_input import remember_oom
from lora_trainer.run.prepare import Prepared
from lora_trainer.training.step import OomFallback

CPU = torch.device("cpu")


def setup_torch(prepared: Prepared) -> dict[str, Any]:
    """Set threads and determinism of the process; return the facts that bit-exactness depends on.

    Raises MachineError when this torch cannot use the planned device.
    """
    config = prepared.config
    device, gpu = planned_device(prepared), training_gpu(prepared)
    if device.type == CPU.type:
        needed_bytes = prepared.plan.memory.peak_bytes * prepared.inputs.sharing
        make_room(needed_bytes=needed_bytes, free_bytes=prepared.hardware.usable_ram_bytes)
    else:
        take_back()
    # The number of threads decides the order in which the CPU adds, and with it the last bits of sums.
    torch.set_num_threads(config.hardware.threads)
    compiled = config.hardware.compile == "blocks"
    if compiled:
        # Kernels are kept for later runs in the size-capped cache; the user's own variables win.
        folder = prepared.cache_root / "compiled"
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
        os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))
    if config.train.deterministic:  # CUDA reads the variable at its start, in the next lines
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if gpu is not None:
        if kind_of(device).own_memory:  # torch.mps has a single device and no set_device
            torch.get_device_module(device).set_device(device)
        limit_gib = config.hardware.vram_limit_gib
        cap_allocator(
            limit_bytes=None if limit_gib is None else int(limit_gib * GIB),
            free_bytes=gpu.free_bytes,
            device=device,
        )
    if config.train.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "processes": prepared.inputs.processes,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "device": prepared.hardware.cpu_name if device.type == CPU.type else name_of(device),
        "deterministic": device.type == "cpu" or config.train.deterministic,
        **({"compiler": _compiler(prepared, device)} if compiled else {}),
    }


def _compiler(prepared: Prepared, device: torch.device) -> str:
    """Return what compiles, and whether to one code for all sizes, which rounds differently."""
    _, any_size = compiled_sizes(
        prepared.inputs, prepared.config, images_at_once=prepared.plan.images_at_once
    )
    return compiler_version(device) + (", one code for all sizes" if any_size else "")


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
    allowed_bytes = min(total, max(limit_bytes - runtime_bytes, 0))
    set_memory_share(device, allowed_bytes / total)
    return allowed_bytes


def best_device(*, needed_ram_bytes: int | None = None) -> tuple[torch.device, bool]:
    """Return the best GPU of this machine and whether it computes bf16, else the processor.

    For work without a plan: images of a finished LoRA, captions. A process that keeps memory for its next picture
    gives it back first, on the processor only where what is needed does not fit beside it; None: nobody knows.
    """
    machine = detect()
    gpu, _ = machine.accelerator()
    device = CPU
    if gpu is not None and torch.get_device_module(gpu.can.torch_type).is_available():
        device = torch.device(gpu.can.torch_type, gpu.index)
    if gpu is None or device == CPU or require_kernels(device):
        free_bytes = machine.usable_ram_bytes
        needed = free_bytes if needed_ram_bytes is None else needed_ram_bytes
        make_room(needed_bytes=needed, free_bytes=free_bytes)
        return CPU, False
    take_back()
    first_allocation(device)
    return device, gpu.has_bf16


def check_allocator(device: torch.device, events: EventStream) -> None:
    """Let the allocator's segments have fixed sizes where the driver refuses others; say so."""
    if reason := first_allocation(device):
        events.problem(
            f"the driver does not let the allocator's segments grow, so they do not: {reason}",
            fix="nothing; if memory runs out although some is free, lower data.resolution",
            severity="note",
        )


@contextmanager
def pinning(prepared: Prepared, events: EventStream) -> Iterator[None]:
    """Limit pinned host memory to the platform's limit while the block runs; report a refusal once."""
    fix = "nothing; fewer memory.streamed_blocks need less pinned memory"
    report = partial(events.problem, fix=fix, severity="note")
    with counted(limit_bytes=prepared.inputs.pinnable_bytes, on_refusal=report):
        yield


def training_gpu(prepared: Prepared) -> Gpu | None:
    """Return the detected GPU of this process's device, None on the processor."""
    device = planned_device(prepared)
    if device == CPU:
        return None
    return next(gpu for gpu in prepared.hardware.gpus if gpu.index == (device.index or 0))


def planned_device(prepared: Prepared) -> torch.device:
    """Return this process's device with its index; several processes are spread over the GPUs.

    Raises MachineError where torch does not see the GPU or has no kernels for it.
    """
    kind = prepared.config.hardware.device
    if kind == CPU.type:
        return CPU
    cards = prepared.hardware.usable(sharing=prepared.inputs.sharing)
    if not cards:
        _, reason = prepared.hardware.accelerator(sharing=prepared.inputs.sharing)
        raise MachineError(
            f"hardware.device={kind}, but no GPU can be used: {reason}",
            fix="use --set hardware.device=cpu",
        )
    card = cards[read_dist_env().local_rank % len(cards)]
    if problem := _start_problem(kind):
        raise MachineError(
            f"the machine has {card.name} but torch {torch.__version__} cannot use it: {problem}",
            fix="restart the machine after an update of the driver (a container needs "
            "NVIDIA_DRIVER_CAPABILITIES=compute,utility), or use --set hardware.device=cpu",
        )
    device = torch.device(kind, card.index)
    if problem := require_kernels(device, driver=card.driver):
        raise MachineError(problem, fix="install that build, or use --set hardware.device=cpu")
    return device


def _start_problem(kind: str) -> str:
    """Return why torch cannot start a kind of GPU, in its own words; "" where it can."""
    api = torch.get_device_module(kind)
    if api.is_available():
        return ""
    try:
        getattr(api, "init", lambda: None)()
    except (RuntimeError, AssertionError) as error:  # "driver too old", "no driver", "not compiled"
        return first_line(error)
    return "it finds no GPU"


def oom_fallbacks(
    denoiser: nn.Module,
    settings: MemorySettings[Decided],
    *,
    device: torch.device,
    sharing: int = 1,
) -> tuple[OomFallback, ...]:
    """Return the fallbacks beyond the planned settings; each is applied on top of the earlier ones.

    `sharing` processes of this training share the machine's memory.
    """
    planned: Checkpointing = settings.gradient_checkpointing
    on_host = device.type == "cpu"
    stronger = CHECKPOINTING[CHECKPOINTING.index(planned) :]
    if on_host:
        stronger = tuple(kind for kind in stronger if kind != "offloaded")
    fallbacks = [
        OomFallback(
            key="memory.gradient_checkpointing",
            old=old,
            new=new,
            apply=partial(apply_checkpointing, denoiser, new),
        )
        for old, new in pairwise(stronger)
    ]
    if not (on_host or settings.streamed_blocks):
        sizes = [
            sum(owner[name].nbytes for owner, name in base_tensors(block))
            for block in repeated_blocks(denoiser).values()
        ]
        free_bytes, most = spare_ram_bytes() // sharing, range(len(sizes), 0, -1)
        blocks = next((count for count in most if moved_bytes(sizes, count) <= free_bytes), 0)
        if blocks:
            stream = partial(stream_blocks, denoiser, count=blocks, device=device)
            fallbacks.append(
                OomFallback(key="memory.streamed_blocks", old=0, new=blocks, apply=stream)
            )
    return tuple(fallbacks)


@contextmanager
def oom_as_error(doing: str, *, events: EventStream) -> Iterator[None]:
    """Turn an out-of-memory error of the device into an event and a MachineError; `doing` follows "while"."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        reason = first_line(error)
        events.emit(OutOfMemory(images_at_once=0, reason=reason))
        raise MachineError(
            f"the device ran out of memory while {doing}: {reason}",
            fix="close other programs that use it and run the same command again, or set hardware.vram_limit_gib",
        ) from error


def oom_history_memo(prepared: Prepared, events: EventStream) -> Listener:
    """Return a listener that records a GPU on which the plan did not fit, at most once a run."""
    memory, earlier_record = prepared.plan.memory, prepared.inputs.full_card
    limit_bytes = memory.limit_bytes
    is_reported = False

    def listener(event: Event) -> None:
        nonlocal is_reported
        is_cpu = prepared.config.hardware.device == "cpu"
        if is_reported or is_cpu or not isinstance(event, OutOfMemory):
            return
        is_reported = True
        hardware, peak_bytes = prepared.hardware, memory.peak_bytes
        try:
            record = remember_oom(
                prepared.cache_root,
                hardware,
                prepared.family.name,
                planned_bytes=peak_bytes,
                limit_bytes=int(limit_bytes / (earlier_record.share if earlier_record else 1)),
            )
        except MachineError as error:  # a full disk must not hide the out-of-memory error
            what = f"the out-of-memory record of this GPU could not be written: {error.found}"
            fix = error.fix
        else:
            if record is None:
                return
            what = (
                f"{(hardware.usable() or hardware.gpus)[0].name} was planned to {peak_bytes / limit_bytes:.0%}"
                f" of its limit and ran out of memory: later plans use {record.share:.0%} of that limit"
            )
            fix = f"no action needed; delete {MEMO_FILE} in the cache folder to forget it"
        events.problem(what, fix=fix, severity="note", code="TRN-02")

    return listener
