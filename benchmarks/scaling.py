"""What a second process brings, what the all-reduce takes, and a model of eight GPUs from that.

Usage: python benchmarks/scaling.py [--rounds 5] [--block 3] [--batch 2] [--json FILE] [--compute-s S ...]
           [--gradient-mb MB] [--devices 8] [--latency-us US] [--link NAME=GB_PER_S ...]

Three sides train the smallest network of mid_size_base.py with one thread in each process: one process; two at once
that know nothing of each other, which is what the machine can give at best; and two that share each
step over gloo. The batch of a process is the same on all sides. They take turns in blocks
1 2 3 3 2 1, so that a machine that slows down slows all. Each process runs `lora_trainer.training.loop`
and the collective of `lora_trainer.training.distributed.process_group`. Prints JSON, then tables.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.ladder_rungs import our_adapter  # noqa: E402 - after sys.path
from benchmarks.mid_size_base import NAMES  # noqa: E402 - after sys.path
from benchmarks.trainee import Case, feeder, frozen_network, training  # noqa: E402 - after sys.path
from lora_trainer.common.events import EventStream  # noqa: E402 - after sys.path
from lora_trainer.common.processes import DistEnv
from lora_trainer.planning.scaling import ring_all_reduce_s
from lora_trainer.training.actions import Progress
from lora_trainer.training.distributed.process_group import ProcessGroup, joined  # noqa: E402 - after sys.path
from lora_trainer.training.guards import GuardState  # noqa: E402 - after sys.path
from lora_trainer.training.loop import train_steps  # noqa: E402 - after sys.path
from lora_trainer.training.optimizers import build_optimizer  # noqa: E402 - after sys.path
from lora_trainer.training.step import Training

CPU = torch.device("cpu")
WORKERS = ("alone", "other", "first", "second")
SIDES = {"one": ("alone",), "apart": ("alone", "other"), "together": ("first", "second")}
ROUND = ("one", "apart", "together", "together", "apart", "one")
TITLES = {
    "one": "one process",
    "apart": "two, each a training of its own",
    "together": "two, sharing each step",
}
COLLECTIVES = 30
TIMEOUT_S = 600.0


@dataclass(kw_only=True)
class TimedRanks(ProcessGroup):
    """Ranks that note how long each step's reduction took, waiting for the other process included."""

    seconds: list[float] = field(default_factory=list)

    def reduce(self, *args: Any, **options: Any) -> torch.Tensor:
        began = time.perf_counter()
        found = super().reduce(*args, **options)
        self.seconds.append(time.perf_counter() - began)
        return found


@dataclass(kw_only=True)
class Turns:
    """An action of the loop: times steps, and after each block waits until it is told to go on."""

    what: ClassVar[str] = "a turn"
    pipe: Connection
    block: int
    steps: int
    ranks: TimedRanks
    seconds: list[float] = field(default_factory=list)
    resumed_at_s: float = 0.0

    def due(self, progress: Progress) -> bool:
        now_s = time.perf_counter()
        if progress.step:
            self.seconds.append(now_s - self.resumed_at_s)
        self.resumed_at_s = now_s
        return progress.step % self.block == 0

    def __call__(self, progress: Progress) -> None:
        if progress.step:
            self.pipe.send((self.seconds, self.ranks.seconds))
            self.seconds, self.ranks.seconds = [], []
        if progress.step < self.steps:
            self.pipe.recv()
        self.resumed_at_s = time.perf_counter()


@dataclass(frozen=True, kw_only=True)
class Task:
    """What one worker is to do."""

    place: DistEnv
    folder: Path
    batch: int
    block: int
    steps: int


def work(task: Task, pipe: Connection) -> None:
    """Train in turns, then time the collective alone; runs in a process of its own."""
    torch.set_num_threads(1)
    with ExitStack() as stack:
        shared = stack.enter_context(joined(task.place, timeout_s=TIMEOUT_S))
        ranks = TimedRanks(dist_env=task.place, monitor=shared.monitor)
        inputs = build_training(task, ranks, pipe)
        ranks.connect(CPU, lag=0)
        train_steps(inputs, Progress(step=0, images=0, guard=GuardState(micro_batch=task.batch)))
        elements = sum(parameter.numel() for parameter in inputs.parameters)
        pipe.send((elements, [] if ranks.is_single else time_collective(elements)))


def time_collective(elements: int) -> list[float]:
    """Return the seconds of all-reduces of that many fp32 numbers, begun by all at the same time."""
    flat, found = torch.zeros(elements), []
    for _ in range(COLLECTIVES):
        dist.barrier()
        began = time.perf_counter()
        dist.all_reduce(flat)
        found.append(time.perf_counter() - began)
    return found


def build_training(task: Task, ranks: TimedRanks, pipe: Connection) -> Training:
    """Return the loop's inputs: `task.batch` images a step for each process."""
    batch, events = task.batch * task.place.count, EventStream()
    case = Case(
        name=NAMES[0],
        side_px=256,
        batch=batch,
        precision=torch.float32,
        device=CPU,
        size="middling",
    )
    settings, denoiser = case.config.optimizer, frozen_network(case)
    adapter, ours = our_adapter(case, denoiser), feeder(case, task.folder, events)
    return training(
        case,
        denoiser,
        task.folder,
        parameters=adapter.parameters(),
        optimizer=build_optimizer(adapter.groups(settings), settings),
        steps=task.steps,
        events=events,
        actions=[Turns(pipe=pipe, block=task.block, steps=task.steps, ranks=ranks)],
        # One step ahead, or a process would prepare steps in the others' turns.
        feeder=replace(
            ours, dist_env=task.place, data=ours.data.model_copy(update={"prefetch_steps": 1})
        ),
        micro_batch=task.batch,
        ranks=ranks,
    )


# ---- the sides, in turns


@dataclass(kw_only=True)
class Times:
    """Seconds of each step of a side, and of the reductions in it."""

    steps: list[float] = field(default_factory=list)
    reductions: list[float] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """All sides, the bytes of the gradients, and the collective alone."""

    sides: dict[str, Times]
    gradient_bytes: int
    collective_s: list[float]


def measure(*, rounds: int, block: int, batch: int) -> Measured:
    """Let the sides take turns; each worker's first block is not counted."""
    order = [*SIDES, *ROUND * rounds]
    sides = {name: Times() for name in SIDES}
    port = free_port()
    context = multiprocessing.get_context("fork")  # torch is imported once, and has not run yet
    with tempfile.TemporaryDirectory(prefix="scaling-") as folder:
        pipes, workers = {}, []
        for name in WORKERS:
            turns = sum(name in SIDES[side] for side in order)
            task = Task(
                place=place_of(name, port=port),
                folder=Path(folder) / name,
                batch=batch,
                block=block,
                steps=turns * block,
            )
            pipes[name], theirs = context.Pipe()
            workers.append(context.Process(target=work, args=(task, theirs), daemon=True))
            workers[-1].start()
            theirs.close()
        for number, side in enumerate(order):
            found = one_turn([pipes[name] for name in SIDES[side]])
            if number >= len(SIDES):
                sides[side].steps += [second for steps, _ in found for second in steps]
                sides[side].reductions += [second for _, inside in found for second in inside]
        ends = {name: pipe.recv() for name, pipe in pipes.items()}
        for worker in workers:
            worker.join()
    elements, collective_s = ends["first"]
    return Measured(sides=sides, gradient_bytes=4 * elements, collective_s=collective_s)


def one_turn(pipes: Sequence[Connection]) -> list[tuple[list[float], list[float]]]:
    """Let some workers do a block at the same time; return what each measured."""
    for pipe in pipes:
        pipe.send("go")
    return [pipe.recv() for pipe in pipes]


def place_of(name: str, *, port: int) -> DistEnv:
    """Return the place of a worker: those of "together" are two processes, the others one each."""
    if name not in SIDES["together"]:
        return DistEnv()
    rank = SIDES["together"].index(name)
    return DistEnv(
        rank=rank, count=2, local_rank=rank, local_count=2, address="127.0.0.1", port=port
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ---- eight GPUs, as a model


@dataclass(frozen=True, kw_only=True)
class Link:
    """How fast a device gives bytes to the next one of the ring."""

    name: str
    bytes_per_s: float


LINKS = ("PCIe 4 x8=13", "NVLink=200", "25 Gbit Ethernet=2.8")


@dataclass(frozen=True, kw_only=True)
class Modelled:
    """Steps of several GPUs on paper: all compute equally long, then wait for the all-reduce."""

    link: str
    devices: int
    compute_s: float
    all_reduce_s: float
    speedup: float
    efficiency: float


def modelled(
    link: Link, *, compute_s: float, gradient_bytes: float, devices: int, latency_s: float
) -> Modelled:
    """Return what devices of the same batch each come to, nothing overlapped."""
    all_reduce_s = ring_all_reduce_s(
        gradient_bytes, devices=devices, bytes_per_s=link.bytes_per_s, latency_s=latency_s
    )
    efficiency = compute_s / (compute_s + all_reduce_s)
    return Modelled(
        link=link.name,
        devices=devices,
        compute_s=compute_s,
        all_reduce_s=all_reduce_s,
        speedup=devices * efficiency,
        efficiency=efficiency,
    )


# ---- results


@dataclass(frozen=True, kw_only=True)
class Side:
    """What one side came to; `efficiency` is images a second per process over those of one process."""

    processes: int
    median_s: float
    quartiles_s: list[float]
    images_per_s: float
    efficiency: float


@dataclass(frozen=True, kw_only=True)
class Result:
    """Measurements of the sides, what the reduction takes of a step, and the model."""

    batch_per_process: int
    steps: int
    gradient_bytes: int
    sides: dict[str, Side]
    reduction_median_s: float
    reduction_share: float
    collective_median_s: float
    collective_quartiles_s: list[float]
    collective_share: float
    model: list[Modelled]


def result_of(found: Measured, *, batch: int, model: list[Modelled]) -> Result:
    """Sum up; all averages are medians."""
    alone_s = statistics.median(found.sides["one"].steps)
    sides = {}
    for name, times in found.sides.items():
        median_s, processes = statistics.median(times.steps), len(SIDES[name])
        sides[name] = Side(
            processes=processes,
            median_s=median_s,
            quartiles_s=statistics.quantiles(times.steps, n=4),
            images_per_s=processes * batch / median_s,
            efficiency=alone_s / median_s,
        )
    reduction_s = statistics.median(found.sides["together"].reductions)
    collective_s = statistics.median(found.collective_s)
    return Result(
        batch_per_process=batch,
        steps=len(found.sides["one"].steps),
        gradient_bytes=found.gradient_bytes,
        sides=sides,
        reduction_median_s=reduction_s,
        reduction_share=reduction_s / sides["together"].median_s,
        collective_median_s=collective_s,
        collective_quartiles_s=statistics.quantiles(found.collective_s, n=4),
        collective_share=collective_s / sides["together"].median_s,
        model=model,
    )


def show(result: Result) -> None:
    """Print the tables that go into docs/performance.md."""
    print("\n| side | images a second | step, median s | quartiles s | efficiency |")
    print("|---|---|---|---|---|")
    for name, side in result.sides.items():
        low, _, high = side.quartiles_s
        print(
            f"| {TITLES[name]} | {side.images_per_s:.2f} | {side.median_s:.3f} "
            f"| {low:.3f} to {high:.3f} | {side.efficiency:.1%} |"
        )
    print(
        f"\nreduction in a step, waiting for the other process included: "
        f"{result.reduction_median_s * 1000:.1f} ms, {result.reduction_share:.1%} of it; "
        f"the all-reduce of {result.gradient_bytes / 1e6:.2f} MB alone: "
        f"{result.collective_median_s * 1000:.2f} ms, {result.collective_share:.2%}"
    )
    print("\n| link | devices | compute s | all-reduce s | speedup | efficiency |")
    print("|---|---|---|---|---|---|")
    for row in result.model:
        print(
            f"| {row.link} | {row.devices} | {row.compute_s:.3f} | {row.all_reduce_s:.4f} "
            f"| {row.speedup:.2f} | {row.efficiency:.1%} |"
        )


def link_from(text: str) -> Link:
    """Read NAME=GB_PER_S; raises ValueError."""
    name, _, speed = text.rpartition("=")
    return Link(name=name, bytes_per_s=float(speed) * 1e9)


def main() -> None:
    """Read the command line, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="of two turns for each side")
    parser.add_argument("--block", type=int, default=3, help="steps of a turn")
    parser.add_argument("--batch", type=int, default=2, help="images a step for each process")
    parser.add_argument("--json", type=Path, help="where to write the numbers too")
    told = parser.add_argument_group("the model of several GPUs")
    told.add_argument("--devices", type=int, default=8)
    told.add_argument(
        "--compute-s",
        type=float,
        nargs="+",
        default=[0.6, 0.2],
        help="a step of one GPU; 0.6 is about what an H100 takes for SDXL at 1024 px, one image",
    )
    told.add_argument(
        "--gradient-mb",
        type=float,
        default=170.2,
        help="1e6 bytes; 170.2 are the fp32 gradients of SDXL's transformer blocks at rank 16",
    )
    told.add_argument("--latency-us", type=float, default=20, help="of each message")
    told.add_argument(
        "--link", action="append", type=link_from, metavar="NAME=GB_PER_S", help=f"else {LINKS}"
    )
    options = parser.parse_args()
    model = [
        modelled(
            link,
            compute_s=compute_s,
            gradient_bytes=options.gradient_mb * 1e6,
            devices=options.devices,
            latency_s=options.latency_us / 1e6,
        )
        for compute_s in options.compute_s
        for link in options.link or [link_from(text) for text in LINKS]
    ]
    found = measure(rounds=options.rounds, block=options.block, batch=options.batch)
    result = result_of(found, batch=options.batch, model=model)
    text = json.dumps(asdict(result), indent=2)
    print(text)
    show(result)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
