"""Memory that one process keeps for the next picture of a LoRA, and gives back as soon as a training needs it.

The process that draws for the pages keeps its base model loaded. It says so in a file of the user's cache folder, where
every program of this user finds it: plans count that memory as free, and whoever needs it ends the process first. On a
GPU that is every training; in the machine's memory a training that fits beside it lets it be. Inputs: that file, the
processes of this machine. Output: who keeps how much. Torch-free.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from pydantic import TypeAdapter

from lora_trainer.common.errors import MachineError
from lora_trainer.common.files import json_bytes, read_regular, user_cache_folder, write_atomic
from lora_trainer.common.processes import living

KEPT_MEMORY_FILE, TAKEN_FILE = "kept-memory.json", "kept-memory-taken.json"
_ENDS_WITHIN_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Keeper:
    """A process that keeps a base model loaded, and what its allocator holds of which GPU."""

    pid: int
    started_s: float
    gpu_uuid: str = ""
    gpu_bytes: int = 0

    @property
    def ram_bytes(self) -> int:
        """The memory of the machine that is free again when it ends; 0 if it has ended."""
        process = living(self.pid, self.started_s)
        try:
            memory = None if process is None else process.memory_info()
        except psutil.Error:
            memory = None
        # What it shares, such as the files of its libraries, is not freed; only Linux tells.
        return 0 if memory is None else memory.rss - getattr(memory, "shared", 0)


@dataclass(frozen=True, kw_only=True)
class Taker:
    """The process that ended the one with the number `keeper_pid`, because it needs its memory."""

    keeper_pid: int
    pid: int
    started_s: float


_KEEPER, _TAKER = TypeAdapter(Keeper), TypeAdapter(Taker)


def keeper() -> Keeper | None:
    """Return the process that keeps memory, None where there is none or it is this process."""
    try:
        found = _KEEPER.validate_json(read_regular(_file()))
    except (OSError, ValueError):  # none, or a file of another version
        return None
    if found.pid == os.getpid() or living(found.pid, found.started_s) is None:
        return None
    return found


def keep(*, gpu_uuid: str, gpu_bytes: int) -> None:
    """Say that this process keeps memory from now on; raises MachineError."""
    me = psutil.Process()
    told = Keeper(pid=me.pid, started_s=me.create_time(), gpu_uuid=gpu_uuid, gpu_bytes=gpu_bytes)
    _file().parent.mkdir(parents=True, exist_ok=True)
    write_atomic(_file(), json_bytes(asdict(told)), durable=False)


def take_back_gpu() -> None:
    """End the process that keeps memory where it keeps that of a GPU: what is free there is measured next."""
    found = keeper()
    if found is not None and found.gpu_uuid:
        take_back()


def make_room(*, needed_bytes: int, free_bytes: int) -> None:
    """End the process that keeps memory unless what is needed of the machine's memory fits beside it.

    `free_bytes` is what a plan may use, which counts what the process keeps as free.
    """
    found = keeper()
    if found is not None and needed_bytes > free_bytes - found.ram_bytes:
        take_back()


def take_back(*, is_told: bool = True) -> None:
    """End the process that keeps memory, and wait until it has ended: its memory is free then.

    It is told who needs its memory, so that it can go on afterwards; without `is_told` nobody does.
    """
    found = keeper()
    process = None if found is None else living(found.pid, found.started_s)
    if process is None:
        return
    assert found is not None
    _tell_taken(found.pid if is_told else 0)
    with suppress(psutil.Error):  # it has ended by itself, or is somebody else's
        process.terminate()
        try:
            process.wait(_ENDS_WITHIN_S)
        except psutil.TimeoutExpired:
            process.kill()
            process.wait(_ENDS_WITHIN_S)


def taken_by() -> Taker | None:
    """Return who asked this process to end for its memory; None where nobody did."""
    try:
        found = _TAKER.validate_json(read_regular(_file().with_name(TAKEN_FILE)))
    except (OSError, ValueError):
        return None
    return found if found.keeper_pid == os.getpid() else None


def _tell_taken(pid: int) -> None:
    me = psutil.Process()
    told = Taker(keeper_pid=pid, pid=me.pid, started_s=me.create_time())
    with suppress(MachineError):  # it then ends without going on
        write_atomic(_file().with_name(TAKEN_FILE), json_bytes(asdict(told)), durable=False)


def _file() -> Path:
    return user_cache_folder() / KEPT_MEMORY_FILE
