"""What a save costs training, against writing the same state while training waits.

Usage: python benchmarks/save.py [--rounds 15] [--adapter-mb 90] [--threads N] [--folder DIR]
           [--json FILE]

The state is that of a large adapter with an 8-bit optimizer: float32 masters and two moments of a
byte per weight, 135 MB by default. Both ways take turns in one process (A B B A), on the same disk:
A copies, hashes, writes and syncs before it goes on, B is `StateWriter.save` as training calls it.
Both begin right after the state was read and written, as an optimizer step leaves it. A third figure
is what B costs a thread that computes meanwhile: the time that a fixed amount of matrix products
takes with a save under way, less the time that it takes without. Prints medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lora_trainer.checkpoint.states import TrainingState, freeze, write_state  # noqa: E402 - after sys.path
from lora_trainer.checkpoint.writer import StateWriter  # noqa: E402 - after sys.path
from lora_trainer.common.events import EventStream  # noqa: E402 - after sys.path

MB = 1_000_000
LAYERS = 280
BLOCK = 256  # weights that share a scale in an 8-bit optimizer
TARGET = 0.10


@dataclass(frozen=True, kw_only=True)
class Result:
    """Medians in seconds; `blocked_share` is what training waits over what a waiting save takes."""

    rounds: int
    threads: int
    state_mb: float
    synchronous_s: float
    blocked_s: float
    background_s: float
    slowed_s: float
    blocked_share: float
    cost_share: float
    target: float = TARGET


@dataclass(kw_only=True)
class Rounds:
    """The times of each round."""

    synchronous: list[float] = field(default_factory=list)
    blocked: list[float] = field(default_factory=list)
    background: list[float] = field(default_factory=list)
    slowed: list[float] = field(default_factory=list)


def state_of(adapter_bytes: int, *, step: int) -> TrainingState:
    """Return a state whose adapter has about that many bytes."""
    width = adapter_bytes // 4 // LAYERS // 64
    adapter = {f"denoiser.blocks.{k}.down": torch.randn(64, width) for k in range(LAYERS)}
    count = 64 * width
    moments = {
        k: {
            "step": step,
            "state1": torch.randint(0, 255, (64, width), dtype=torch.uint8),
            "state2": torch.randint(0, 255, (64, width), dtype=torch.uint8),
            "absmax1": torch.rand(-(-count // BLOCK)),
            "absmax2": torch.rand(-(-count // BLOCK)),
        }
        for k in range(LAYERS)
    }
    groups = [{"lr": 1e-4, "betas": (0.9, 0.999), "params": list(range(LAYERS))}]
    return TrainingState(
        step=step,
        images_seen=step,
        adapter=adapter,
        optimizer={"state": moments, "param_groups": groups},
        guard={"kept": "0" * 64},
    )


def measure(folder: Path, state: TrainingState, *, rounds: int) -> Rounds:
    """Take turns, the disk idle before each."""
    found = Rounds()
    writer = StateWriter(folder=folder / "background", keep=2, events=EventStream())
    work = _work_of(1.0)

    def synchronous(step: int) -> None:
        _touch(state)
        found.synchronous.append(
            _seconds(lambda: write_state(folder / "sync", freeze(_at(state, step)), keep=2))
        )

    def background(step: int) -> None:
        alone_s = _seconds(work)
        _touch(state)
        began = time.perf_counter()
        writer.save(_at(state, step), export=None)
        found.blocked.append(time.perf_counter() - began)
        found.slowed.append(_seconds(work) - alone_s)
        writer.wait_for_acknowledgement()
        found.background.append(time.perf_counter() - began)

    with writer:
        background(0)  # the first save maps its memory
        for measured in (found.blocked, found.slowed, found.background):
            measured.clear()
        for number in range(1, rounds + 1):
            turns = (synchronous, background) if number % 2 else (background, synchronous)
            for turn in turns:
                turn(number)
    return found


def _touch(state: TrainingState) -> None:
    """Read and write all of a state, as the optimizer does just before a save."""
    for tensor in state.adapter.values():
        tensor.mul_(1.0)
    for moments in state.optimizer["state"].values():
        for value in moments.values():
            if isinstance(value, torch.Tensor):
                value.mul_(1)


def summary(found: Rounds, *, state_bytes: int) -> Result:
    """Return the medians."""
    synchronous_s, blocked_s = map(statistics.median, (found.synchronous, found.blocked))
    slowed_s = max(0.0, statistics.median(found.slowed))
    return Result(
        rounds=len(found.synchronous),
        threads=torch.get_num_threads(),
        state_mb=round(state_bytes / MB, 1),
        synchronous_s=synchronous_s,
        blocked_s=blocked_s,
        background_s=statistics.median(found.background),
        slowed_s=slowed_s,
        blocked_share=blocked_s / synchronous_s,
        cost_share=(blocked_s + slowed_s) / synchronous_s,
    )


def _at(state: TrainingState, step: int) -> TrainingState:
    return TrainingState(**{**vars(state), "step": step})


def _work_of(seconds: float) -> Callable[[], None]:
    """Return matrix products that take about that long on this machine."""
    matrix = torch.randn(512, 512)
    once_s = statistics.median(_seconds(lambda: torch.mm(matrix, matrix)) for _ in range(50))
    count = max(1, round(seconds / once_s))

    def work() -> None:
        for _ in range(count):
            torch.mm(matrix, matrix)

    return work


def _seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--adapter-mb", type=float, default=90.0)
    parser.add_argument(
        "--threads", type=int, help="threads that copy [default: torch's own, as in training]"
    )
    parser.add_argument(
        "--folder", type=Path, help="where to write [default: the temporary folder]"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    state = state_of(int(options.adapter_mb * MB), step=0)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = measure(Path(folder), state, rounds=options.rounds)
        newest = max((Path(folder) / "sync").glob("step-*"))
        state_bytes = sum(path.stat().st_size for path in newest.iterdir())
    result = summary(found, state_bytes=state_bytes)
    print(
        f"state                      {result.state_mb:8.1f} MB, {result.rounds} rounds, {result.threads} threads"
    )
    print(f"training waits for all     {1000 * result.synchronous_s:8.1f} ms")
    print(f"training waits for copies  {1000 * result.blocked_s:8.1f} ms")
    print(
        f"until it is on the disk    {1000 * result.background_s:8.1f} ms (with 1 s of work beside it)"
    )
    print(f"the work beside it loses   {1000 * result.slowed_s:8.1f} ms")
    print(f"share                      {result.blocked_share:8.1%} (target: {TARGET:.0%})")
    if options.json:
        options.json.write_text(json.dumps(asdict(result) | {"raw": asdict(found)}, indent=2))


if __name__ == "__main__":
    main()
