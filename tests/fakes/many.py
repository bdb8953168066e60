"""Trainings of several processes, many of them in one go: imported once, forked for every process.

`main` runs the scenarios below, in a fork of the test process, and writes results.json; a test
reads it. Faults are put into the children, by rank. Without a launcher: each child has the
environment that one gives.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from lora_trainer.common.errors import InputError
from scripts.reliability.kill import free_port, load_everything
from tests.fakes.runs import Toy, speak_into, toy, write_priors

STEPS = 10
TIMEOUT_S = 300.0
IN_A_STEP = 11
"""A call of the loss in the second or third step: the first eight are of the first validation."""
SPOILT = 2
"""The step, from 0 on, that all skip: its first sample is not a number, whichever process has it."""
SETTINGS: Mapping[str, Any] = {
    "sampling__every_steps": 10,
    "train__validate_every_steps": 5,
    "output__measure": True,
    "output__save_every_steps": 4,
}
CONFIG = ("--config", str(Path(__file__).with_name("many.toml")))
PRIORS: dict[str, Any] = {}
"""Settings of the masks and the regularisation images that `main` writes."""
Fault = Callable[[], None]


Run = dict[str, Any]
"""What a run of several processes came to: exit codes (negative for signals), seconds, and their output."""


def start(
    place: Toy,
    name: str,
    count: int,
    *more: str,
    faults: Mapping[int, Fault] | None = None,
    absent: frozenset[int] = frozenset(),
    **settings: Any,
) -> tuple[list[int], Callable[[], Run]]:
    """Begin to train in `count` processes; return their numbers and what waits for their end."""
    notes = place.folder / f"notes-{name}"
    notes.mkdir(exist_ok=True)
    named, chosen = ("--name", name, *CONFIG), {**SETTINGS, **PRIORS, **settings}
    line = place.arguments(*named, *more, steps=STEPS, **chosen)
    port, began_s = free_port(), time.monotonic()
    pids: dict[int, int] = {}
    for rank in sorted(set(range(count)) - absent):
        pids[rank] = os.fork()
        if pids[rank] == 0:
            _be(rank, count, notes, line, port, (faults or {}).get(rank))

    def wait() -> Run:
        codes = [_wait(pid, began_s) for pid in pids.values()]
        logs = [(notes / f"{rank}.log").read_text("utf-8", errors="replace") for rank in pids]
        seconds = time.monotonic() - began_s
        return {"codes": codes, "seconds": seconds, "output": [log[-3000:] for log in logs]}

    return list(pids.values()), wait


def run(
    place: Toy,
    name: str,
    count: int,
    *more: str,
    meanwhile: Callable[[list[int], Path], None] = lambda pids, run: None,
    **options: Any,
) -> Run:
    """Train in `count` processes; `meanwhile` may do something to them."""
    pids, wait = start(place, name, count, *more, **options)
    meanwhile(pids, place.runs / name)
    return wait()


def _be(
    rank: int, count: int, notes: Path, line: list[str], port: int, fault: Fault | None
) -> None:
    speak_into(notes / f"{rank}.log")
    if count > 1:
        for name, value in {"RANK": rank, "WORLD_SIZE": count}.items():
            os.environ |= {name: str(value), f"LOCAL_{name}": str(value)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    code = 1
    try:
        note_draws(rank, notes)
        if fault is not None:
            fault()
        from lora_trainer.cli import main

        code = main.run(line)
    finally:
        sys.stdout.flush()
        os._exit(code)


def _wait(pid: int, began_s: float) -> int:
    """Return how a child ended; one that hangs is killed, which no test expects.

    A frozen one is killed once those before it have ended, as by a launcher.
    """
    if psutil.Process(pid).status() == psutil.STATUS_STOPPED:
        os.kill(pid, signal.SIGKILL)
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:  # however long ago
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() - began_s > TIMEOUT_S:
            break
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return 1000


# ---- what a child notes down


def note_draws(rank: int, notes: Path) -> None:
    """Note every sample with its noise, entries encoded, and the gradients of the first step; spoil one sample."""
    import torch
    from safetensors.torch import save_file

    from lora_trainer.cache.store import Cache
    from lora_trainer.training.dataloader import TrainingDataLoader
    from lora_trainer.training.distributed.process_group import ProcessGroup

    draws = (notes / f"draws-{rank}.txt").open("a")
    encoded = (notes / f"encoded-{rank}.txt").open("a")
    prepare, reduce, write = TrainingDataLoader.prepare, ProcessGroup.reduce, Cache.write

    def noted_prepare(self: TrainingDataLoader, step: int) -> Any:
        batch = prepare(self, step)
        for sample in batch:
            parts = (sample.latents, sample.noise, torch.tensor(sample.level.timestep))
            digest = hashlib.sha256(b"".join(part.numpy().tobytes() for part in parts)).hexdigest()
            draws.write(f"{step} {sample.sample} {digest}\n")
            if (step, sample.sample) == (SPOILT, self.sample_at(step * self.batch_size)[1]):
                sample.latents.fill_(torch.nan)
        draws.flush()
        return batch

    def noted_reduce(self: ProcessGroup, parameters: Any, loss: Any, **options: Any) -> Any:
        batch_loss = reduce(self, parameters, loss, **options)
        file = notes / "gradients.safetensors"
        if self.dist_env.is_main and not file.exists():
            save_file({str(n): p.grad.clone() for n, p in enumerate(parameters)}, file)
        return batch_loss

    def noted_write(self: Cache, key: Any, arrays: Any) -> Any:
        encoded.write(f"{key.digest}\n")
        encoded.flush()
        return write(self, key, arrays)

    TrainingDataLoader.prepare = noted_prepare
    ProcessGroup.reduce = noted_reduce
    Cache.write = noted_write


# ---- faults


def losses_at(call: int, spoil: Callable[[Any], Any]) -> Fault:
    """Return a fault that spoils one call of the loss."""

    def fault() -> None:
        from lora_trainer.training.loss import Model

        real, calls = Model.losses_of, iter(range(1, 1_000_000))

        def losses_of(self: Model, samples: Any) -> Any:
            found = real(self, samples)
            return spoil(found) if next(calls) == call else found

        Model.losses_of = losses_of

    return fault


def out_of_memory(_: Any) -> Any:
    import torch

    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def broken(_: Any) -> Any:
    raise ValueError("a bug in this process")


def other_weights() -> None:
    """Let this process's optimizer do a little more than the others'."""
    import torch

    real = torch.optim.AdamW.step

    def step(self: Any, *args: Any, **options: Any) -> Any:
        found = real(self, *args, **options)
        with torch.no_grad():
            self.param_groups[0]["params"][0].add_(1e-7)
        return found

    torch.optim.AdamW.step = step


def waits_for_ever(*_: Any, **__: Any) -> Any:
    threading.Event().wait()


def replaced(module: str, name: str, function: Callable[..., Any]) -> Fault:
    """Return a fault that puts a function in place of another."""

    def fault() -> None:
        setattr(importlib.import_module(module), name, function)

    return fault


def unreadable(*_: Any, **__: Any) -> Any:
    raise InputError("the dataset is not readable here", fix="look at it")


ALONE: Mapping[str, Any] = {
    "sampling__every_steps": 0,
    "logging__trackers": [],
    "output__measure": False,
}
"""For runs that are about their processes alone."""


def at_start(rank: int, name: str, does: Callable[..., Any]) -> Mapping[str, Any]:
    return {"faults": {rank: replaced(*name.rsplit(".", 1), does)}, **ALONE}


PREPARE = ("lora_trainer.run.lead.prepare_with_base", "lora_trainer.run.follow.prepare_with_base")
HANGING_STARTS: Mapping[str, Mapping[str, Any]] = {
    "absent": {"absent": frozenset({1}), **ALONE},
    "leader hangs": at_start(0, "lora_trainer.run.lead.start_trackers", waits_for_ever),
    "follower hangs": at_start(1, PREPARE[1], waits_for_ever),
    "unconnected": at_start(1, "torch.distributed.init_process_group", waits_for_ever),
}
REFUSED_STARTS: Mapping[str, Mapping[str, Any]] = {
    "leader refuses": at_start(0, PREPARE[0], unreadable),
    "follower refuses": at_start(1, PREPARE[1], unreadable),
}
UNHURRIED: Mapping[str, Any] = {"hardware__process_timeout_s": 60}
"""Of trainings in which no process is lost: on a busy machine one may come seconds after the others."""


def signalled_at_a_state(rank: int, number: int) -> Callable[[list[int], Path], None]:
    """Return what sends a process a signal once they have saved a state, whatever others left before."""

    def meanwhile(pids: list[int], run: Path) -> None:
        before, until = set(run.glob("states/step-*")), time.monotonic() + TIMEOUT_S
        while time.monotonic() < until:
            if set(run.glob("states/step-*")) - before:
                os.kill(pids[rank], number)
                return
            time.sleep(0.005)

    return meanwhile


# ---- scenarios


def scenarios(place: Toy) -> dict[str, Run]:
    """Run all; the order matters where one goes on with another."""
    found: dict[str, Run] = {"one": run(place, "one", 1)}
    # These do nothing for a while, which is what they are about.
    # The limit is longer than planning takes on a busy machine: the networks here are traced, as no table has them.
    starting = {
        name: start(place, name, 2, hardware__process_timeout_s=20, **how)
        for name, how in HANGING_STARTS.items()
    }
    # Only a rollback cuts events: at the start others' problems may be on their way to the file.
    uncut = {0: replaced("lora_trainer.run.run_job", "cut_events", unreadable)}
    for count in (2, 5):
        found[f"of {count}"] = run(place, f"of {count}", count, faults=uncut, **UNHURRIED)
    full = {1: losses_at(IN_A_STEP, out_of_memory)}
    cold = str(place.folder / "cold")
    found["cold"] = run(place, "cold", 2, faults=full, data__cache_dir=cold, **UNHURRIED)
    found["bug"] = run(place, "bug", 2, faults={1: losses_at(IN_A_STEP, broken)}, **ALONE)
    found["apart"] = run(place, "apart", 2, faults={1: other_weights}, **ALONE)
    for name, how in REFUSED_STARTS.items():  # however late the others come
        found[name] = run(place, name, 2, **UNHURRIED, **how)
    freeze = signalled_at_a_state(1, signal.SIGSTOP)
    found["frozen"] = run(place, "frozen", 2, meanwhile=freeze, **ALONE)
    stop = signalled_at_a_state(1, signal.SIGTERM)
    found["stopped"] = run(place, "stopped", 2, meanwhile=stop)
    found["stopped resumed"] = run(place, "stopped", 2, "--resume")
    moved = {**ALONE, "output__save_every_steps": 3}
    kill = signalled_at_a_state(1, signal.SIGKILL)
    found["killed 1"] = run(place, "moved", 2, meanwhile=kill, **moved)
    kill = signalled_at_a_state(0, signal.SIGKILL)
    found["killed 0"] = run(place, "moved", 3, "--resume", meanwhile=kill, **moved)
    found["moved"] = run(place, "moved", 1, "--resume", **moved)
    return found | {name: wait() for name, (_, wait) in starting.items()}


def main(folder: Path) -> int:
    """Run the scenarios in a folder."""
    os.chdir(folder)
    load_everything()
    place = toy(folder, images=14)
    child = os.fork()  # this process only forks: torch must not compute in it
    if child == 0:
        place.with_base()
        os._exit(0)
    _wait(child, time.monotonic())
    PRIORS.update(write_priors(place))
    (place.dataset / "cut.png").write_bytes((place.dataset / "p0.png").read_bytes()[:200])
    results = {**scenarios(place), "priors": PRIORS}
    (folder / "results.json").write_text(json.dumps(results), "utf-8")
    return 0
