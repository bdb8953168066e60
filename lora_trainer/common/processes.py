"""This process and those it starts: its rank, its memory, its console, and how programs end.

Ranks come from the environment that launchers set (`accelerate launch`, torchrun, Slurm through them); without
a launcher there is one process. Windows has neither sessions nor signals for other processes: a program there
is kept from the Ctrl-C and the closing window of its parent by a console and a process group of its own, and
`os.kill` ends a process at once whatever the signal, without its children.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import IO, TYPE_CHECKING, Any

from lora_trainer.common.errors import BROKEN_PACKAGE, MachineError

if TYPE_CHECKING:
    import psutil

# ---- the rank among the processes of a launcher

# Variables of launchers and of MPI by which accelerate recognises that it is one process of several.
_READ_BY_LIBRARIES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    *(
        f"{launcher}_COMM_WORLD_{name}"
        for launcher in ("OMPI", "MV2")
        for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    ),
    "ACCELERATE_CPU_AFFINITY",
)


@dataclass(frozen=True, kw_only=True)
class DistEnv:
    """This process is number `rank` of `count`, and `local_rank` of the `local_count` on its machine.

    The processes connect at `address` and `port`; rank 0 runs the store there unless the launcher does.
    `attempt` counts the launcher's restarts.
    """

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    local_count: int = 1
    address: str = ""
    port: int = 0
    launcher_keeps_store: bool = False
    attempt: int = 0

    @property
    def is_main(self) -> bool:
        """Whether this is the main process, which plans, writes files and prints."""
        return self.rank == 0


def read_dist_env() -> DistEnv:
    """Return the place of this process; raises MachineError for missing or contradictory variables."""
    environment = os.environ
    names = {
        "rank": "RANK",
        "count": "WORLD_SIZE",
        "local_rank": "LOCAL_RANK",
        "local_count": "LOCAL_WORLD_SIZE",
        "address": "MASTER_ADDR",
        "port": "MASTER_PORT",
    }
    variables = {field: environment[name] for field, name in names.items() if environment.get(name)}
    # A launcher may also start a single process, which needs no group.
    if variables.get("count", "1") == "1":
        return DistEnv()
    if missing := names.keys() - variables.keys():
        raise _contradiction(variables | dict.fromkeys(missing, "nothing"))
    try:
        process = DistEnv(
            **{field: int(value) for field, value in variables.items() if field != "address"},
            address=variables["address"],
            launcher_keeps_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")),
        )
    except ValueError:
        raise _contradiction(variables) from None
    if not (0 <= process.rank < process.count and 0 <= process.local_rank < process.local_count):
        raise _contradiction(variables)
    return process


@contextmanager
def without_launcher() -> Iterator[None]:
    """Hide from libraries, while the block runs, that a launcher started this process."""
    hidden = {name: os.environ.pop(name) for name in _READ_BY_LIBRARIES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)


def share(total: int, *, rank: int, count: int) -> range:
    """Return the indices out of `total` that process `rank` of `count` works on; shares differ by one at most."""
    return range(total * rank // count, total * (rank + 1) // count)


def _contradiction(variables: Mapping[str, str]) -> MachineError:
    assignments = ", ".join(f"{name} {value}" for name, value in variables.items())
    return MachineError(
        f"the launcher sets {assignments}, which does not describe a process of a group",
        fix="start it with `accelerate launch -m lora_trainer ...`, or without a launcher",
    )


# ---- programs that outlive who started them

_WINDOWS_CTRL_C = 0xC000013A


def detached(output: IO[bytes] | int | None = None) -> dict[str, Any]:
    """Return the arguments of `subprocess.Popen` that keep a program going when its parent ends.

    With `output` the program has no input, and what it prints goes there.
    """
    streams = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
    options: dict[str, Any] = {} if output is None else streams
    if sys.platform == "win32":
        group = subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW
        return {**options, "creationflags": group}
    return {**options, "start_new_session": True}


def ask_to_end(pid: int) -> None:
    """Ask a program that waits for a command of its own to end that command.

    By SIGTERM, which it hands on. On Windows the command is ended, and its parent writes down how; a
    parent that has not started it yet is ended itself. A process that is gone is left alone.
    """
    import psutil  # here, as `--help` imports this module and needs no psutil

    with suppress(OSError, psutil.NoSuchProcess):
        if sys.platform != "win32":
            os.kill(pid, signal.SIGTERM)
            return
        parent = psutil.Process(pid)
        for process in parent.children(recursive=True) or [parent]:
            with suppress(psutil.NoSuchProcess):
                process.terminate()


# psutil counts from the time of boot, which moves a little when the clock is corrected.
_START_TOLERANCE_S = 1.0


def is_alive(*, pid: int | None, started_s: float | None) -> bool:
    """Return whether the process with this number and start time runs; False for a reused number and for None."""
    return living(pid, started_s) is not None


def living(pid: int | None, started_s: float | None) -> psutil.Process | None:
    """Return the process with this number and start time if it runs."""
    import psutil  # here, as `--help` imports this module and needs no psutil

    if pid is None or started_s is None:
        return None
    try:
        process = psutil.Process(pid)
        same = same_start(process.create_time(), started_s)
        return process if same and process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.Error:
        return None


def same_start(one_s: float | None, other_s: float | None) -> bool:
    """Return whether two times of start, in seconds since the epoch, are of one process."""
    return one_s is not None and other_s is not None and abs(one_s - other_s) <= _START_TOLERANCE_S


def was_killed(code: int) -> bool:
    """Whether an exit code is that of a program which somebody, or the system, ended at once."""
    # psutil and `os.kill` give Windows 15 as the exit code of a process that they end.
    return code in (-9, _WINDOWS_CTRL_C) or (sys.platform == "win32" and code == 15)


def end_of(code: int) -> str:
    """Return how a program ended that its own code did not end; empty for an ordinary exit code."""
    if code < 0:
        try:
            name = f" ({signal.Signals(-code).name})"
        except ValueError:
            name = ""
        return f"was ended by signal {-code}{name}"
    if code == _WINDOWS_CTRL_C:
        return "was ended by Ctrl-C or a closed window"
    if code >= 0xC0000000:  # an NTSTATUS of the severity "error"
        return f"crashed (Windows error 0x{code:08X})"
    return "was ended by another program" if was_killed(code) else ""


# ---- memory, threads, and the messages of libraries

_NO_THREAD = ("can't start new thread", "Resource temporarily unavailable")


def no_thread(error: BaseException) -> MachineError | None:
    """Return the error of a system that allows no more threads, if `error` is Python's or torch's of that."""
    if not isinstance(error, RuntimeError) or not any(text in str(error) for text in _NO_THREAD):
        return None
    return MachineError(
        "the system allows this user or container no more threads, or has no memory for one",
        fix="raise the limit (`ulimit -u`, the container's pids limit) or end other programs, and run it again",
    )


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Search for no garbage while the block, or the function, runs.

    For work that makes many objects and few cycles: looking through them again and again as they grow
    takes a quarter of the time in which a dataset of 100,000 images is planned.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def made_to_stay() -> Iterator[None]:
    """Search for no garbage while the block runs, and never again among the objects alive at its end.

    Importing torch, diffusers and peft makes a million objects: a sixth of the time of the imports.
    """
    with gc_disabled():
        try:
            yield
        finally:
            gc.freeze()
            atexit.register(_unfreeze_for_triton)


def _unfreeze_for_triton() -> None:
    """Let Python's last search reach what was made to stay, where triton's objects are among it.

    At the end of the process triton 3.9 (of torch 2.15) writes thirty lines about those of its objects that are left.
    The search takes a second, so that it is left out for all others.
    """
    if "triton._C.libtriton" in sys.modules:
        gc.unfreeze()


_libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None


def give_back_heap() -> None:
    """Return to the system the freed memory that the C library keeps; takes milliseconds.

    glibc keeps pieces below 32 MiB for the next request (mallopt(3), M_MMAP_THRESHOLD): on a processor that
    is most of what a step has made, and the larger tensors of the next phase would lie beside it. Other
    C libraries have no such call, and nothing happens.
    """
    if hasattr(_libc, "malloc_trim"):
        _libc.malloc_trim(0)


def without_compilers(environment: MutableMapping[str, str]) -> None:
    """Keep torch from compiling kernels that nobody asked for; to be called before torch is imported.

    torch 2.13 makes kernels of its own at run time (`torch/_native`: for a `bmm` of an inner size of 1, and others),
    for which triton needs a C compiler and Python's headers. Many machines and containers have none, and the run
    would end there. Off everywhere, so that a machine with a compiler computes the same bits. `hardware.compile` is
    not concerned.
    """
    environment.setdefault("TORCH_DISABLE_NATIVE_JIT", "1")


def quiet_libraries() -> None:
    """Silence messages meant for users of the libraries; errors still come through.

    Raises MachineError where Python runs without docstrings, from which transformers makes functions.
    """
    if sys.flags.optimize >= 2:
        raise MachineError(
            "Python runs without docstrings (-OO, or PYTHONOPTIMIZE=2), which transformers needs",
            fix="use -O, or unset PYTHONOPTIMIZE",
        )
    without_compilers(os.environ)
    os.environ.setdefault(
        "TORCH_CPP_LOG_LEVEL", "ERROR"
    )  # warnings of torch's C++, with file and line
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    # diffusers imports it where it is installed, and it prints four lines where it is built for another torch, which
    # `doctor` and `plan` say in one.
    logging.getLogger("xformers").setLevel(logging.ERROR)
    from diffusers.utils.logging import disable_progress_bar

    disable_progress_bar()


def quiet_network_libraries() -> None:
    """Silence the libraries, and import bitsandbytes where it is installed, before networks are built.

    peft imports it, and it asks torch to compile five functions at that moment, for which torch imports its compiler:
    0.8 s of each start. They are compiled when they are first called instead. What is wrong with it is said where peft
    imports it again.
    """
    quiet_libraries()
    if "bitsandbytes" in sys.modules or find_spec("bitsandbytes") is None:
        return
    with compiled_when_called(), suppress(*BROKEN_PACKAGE):
        import_module("bitsandbytes")


@contextmanager
def compiled_when_called() -> Iterator[None]:
    """Let functions that are given to `torch.compile` meanwhile be given to it at their first call."""
    import torch

    compile_now = torch.compile

    def compile_later(function: Callable[..., Any] | None = None, **options: Any) -> Any:
        if function is None:
            return partial(compile_later, **options)

        @cache
        def compiled() -> Callable[..., Any]:
            return compile_now(function, **options)

        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            return compiled()(*args, **kwargs)

        return called

    torch.compile = compile_later  # type: ignore[assignment]  # torch has one signature for each way to call it
    try:
        yield
    finally:
        torch.compile = compile_now
