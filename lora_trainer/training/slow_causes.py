"""Finds why steps became slower: other programs on the GPU, lower clocks, full memory, busy cores.

The machine is measured twice, while steps are fast and after they have become slow; the difference names
the cause. Nothing raises: a value that cannot be read is no cause.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from lora_trainer.config.running import RunConfig
from lora_trainer.hardware.machine import GIB, SPILL_MARGIN_BYTES, cpu_quota, usable_processors
from lora_trainer.hardware.nvml import CardState, Gpu, Nvml, card_state
from lora_trainer.training.cores import Cores, cpu_times
from lora_trainer.training.pace import Slow

_HOT, _BRAKED = 0x20 | 0x40, 0x08 | 0x80
"""NVML's bits for lower clocks: software and hardware thermal slowdown; hardware and power brake slowdown."""
_LOWER_CLOCK = 0.85
_BUSY_PERCENT = 10
_SHARED_CORES = 0.5
_SWAPPED_BYTES_PER_S = 2**20
_WATCHED_S = 1.0


@dataclass(frozen=True, kw_only=True)
class MachineState:
    """State of the machine at one moment: the GPU of the training, cores other programs use, swap writes."""

    card: CardState | None = None
    beside_card: bool = False
    processors: int = 1
    cores_taken: float = 0.0
    swapped_bytes_per_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A cause of slow steps as `observation`, and its `fix`; each `name` is reported once."""

    name: str
    observation: str
    fix: str


def look(gpu: Gpu | None, *, nvml: Nvml | None = None) -> MachineState:
    """Measure the machine for one second; blocks meanwhile."""
    card = card_state(gpu, nvml) if gpu is not None else None
    numbers = usable_processors()
    cores = Cores(processors=len(numbers), quota=cpu_quota(Path("/")))
    cores_taken, swapped = 0.0, 0.0
    with suppress(OSError, RuntimeError, psutil.Error):
        before, swapped_before = cpu_times(numbers), psutil.swap_memory().sout
        time.sleep(_WATCHED_S)
        after = cpu_times(numbers)
        cores_taken = cores.taken(before, after)
        swapped = (psutil.swap_memory().sout - swapped_before) / (after.at_s - before.at_s)
    return MachineState(
        card=card,
        beside_card=gpu is not None,
        processors=len(numbers),
        cores_taken=cores_taken,
        swapped_bytes_per_s=swapped,
    )


def causes(
    slow: Slow, before: MachineState, now: MachineState, *, spills: bool, config: RunConfig
) -> Iterator[Cause]:
    """Yield the causes that explain slower steps, the likeliest first."""
    # The data are the cause only of the time beyond the usual, at least half of which must be waiting.
    waits_s = slow.now.wait_s - slow.usual.wait_s
    longer_s = slow.now.seconds - slow.usual.seconds
    if waits_s > longer_s / 2:
        share = 100 * slow.now.wait_s / slow.now.seconds
        yield Cause(
            name="data",
            observation=f"{share:.0f} % of a step is waiting for prepared batches",
            fix=f"raise data.prefetch_steps (now {config.data.prefetch_steps}), or put data.cache_dir "
            "on a faster disk",
        )
    if before.card is not None and now.card is not None:
        yield from _card_causes(before.card, now.card, spills=spills)
    if now.swapped_bytes_per_s > _SWAPPED_BYTES_PER_S:
        yield Cause(
            name="swap",
            observation=f"the machine is out of memory and swaps {now.swapped_bytes_per_s / 2**20:.0f} MiB/s",
            fix=_less_host_memory(config),
        )
    # Beside a GPU one thread launches kernels; the others only prepare batches, which is measured as waiting.
    threads = 1 if now.beside_card else config.hardware.threads
    lacks_cores = now.processors - now.cores_taken < threads
    if now.cores_taken - before.cores_taken > _SHARED_CORES and lacks_cores:
        yield Cause(
            name="processor",
            observation=f"other programs use {now.cores_taken:.1f} of {now.processors} processors, "
            f"{before.cores_taken:.1f} before",
            fix="close them or wait for them; the result stays the same",
        )


def _less_host_memory(config: RunConfig) -> str:
    blocks = config.memory.streamed_blocks
    change = (
        f"a lower memory.streamed_blocks (now {blocks})" if blocks else "memory.base_precision=int8"
    )
    return f"close other programs, or continue with --resume and {change}"


def _card_causes(before: CardState, now: CardState, *, spills: bool) -> Iterator[Cause]:
    used, total = now.used_bytes / GIB, now.total_bytes / GIB
    if spills and now.total_bytes - now.used_bytes < SPILL_MARGIN_BYTES:
        more_bytes = max(0, now.used_bytes - before.used_bytes)
        # Leave out what other programs have taken since the run began, and half a GiB to spare.
        limit = max(1.0, total - more_bytes / GIB - 0.5)
        yield Cause(
            name="spill",
            observation=f"the GPU is full, {used:.1f} of {total:.1f} GiB, and its driver moves memory to the host",
            fix="close other programs on the GPU, or continue with --resume --set "
            f"hardware.vram_limit_gib={limit:.1f}",
        )
    yield from _clock_causes(before, now)
    # In a container the driver gives the host's process numbers, so our own may not be among them: the
    # busiest one before was this training.
    busiest = max(before.busy_percent, key=before.busy_percent.__getitem__, default=None)
    known = before.users | before.busy_percent.keys() | {os.getpid()}
    busier = {
        pid
        for pid, percent in now.busy_percent.items()
        if before.busy_percent and percent - before.busy_percent.get(pid, 0) > _BUSY_PERCENT
    } - {busiest, os.getpid()}
    new = sorted((now.users | now.busy_percent.keys()) - known | busier)
    if new:
        names = ", ".join(_program(pid) for pid in new[:3])
        yield Cause(
            name="others",
            observation=f"other programs use the GPU: {names}; {used:.1f} of {total:.1f} GiB are in use",
            fix="close them or wait for them; the result stays the same",
        )


def _clock_causes(before: CardState, now: CardState) -> Iterator[Cause]:
    if before.clock_mhz is None or now.clock_mhz is None:
        return
    if now.clock_mhz >= _LOWER_CLOCK * before.clock_mhz:
        return
    clocks = f"from {before.clock_mhz} to {now.clock_mhz} MHz"
    if now.held_back & _HOT:
        heat = "" if now.celsius is None else f" at {now.celsius} degrees Celsius"
        yield Cause(
            name="heat",
            observation=f"the GPU is too hot{heat} and has lowered its clock {clocks}",
            fix="clean its fans and give it more air, or lower its power limit (nvidia-smi -pl WATTS)",
        )
    elif now.held_back & _BRAKED:
        yield Cause(
            name="power supply",
            observation=f"the power supply limits the GPU, its clock went {clocks}",
            fix="plug the machine in, and check the GPU's power cables and the power supply",
        )
    else:
        yield Cause(
            name="clock",
            observation=f"the GPU's clock went {clocks}, because of its power limit or its settings",
            fix="plug a laptop in, or raise the GPU's power limit (nvidia-smi -pl WATTS)",
        )


def _program(pid: int) -> str:
    with suppress(psutil.Error):
        return f"{psutil.Process(pid).name()} (process {pid})"
    return f"process {pid}"
