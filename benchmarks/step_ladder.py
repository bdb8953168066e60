"""A training step by what computes it: a bare loop with peft's LoRA, the way trainers do it, and ours.

Usage: python benchmarks/step_ladder.py [--case NAME:PX:BATCH:DTYPE ...] [--steps 40] [--threads N]
                                        [--true-size | --miniature] [--json FILE] [--plot FILE.svg]

On a GPU: `python benchmarks/step_ladder.py --true-size --block 10 --json FILE`, which needs no network.

All rungs of a case train the same LoRA on the same random network, whose weights they share, on the
same batches, in one process, in turns of a few steps, so that a machine that slows down slows all.
Networks are of middling size (half a second to a second a step on one core), with --true-size as
released, made on the GPU, and with --miniature that of the embedded base (a side of 128 px here is one
of 64 px there, as its VAE halves a side once less). Prints medians, the ratio to the bare loop with the
upper end of its 95 % interval (bootstrap over the turns), the same of the processor's seconds, feeder
included, which other programs on the machine change less, and on a GPU what network, adapter and a step
take of its memory.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu_day.cases import LADDER  # noqa: E402 - after sys.path
from benchmarks.ladder_rungs import Bare, Ours, Rung, our_adapter, peft_adapter  # noqa: E402 - after sys.path
from benchmarks.mid_size_base import MINIATURE, NAMES  # noqa: E402 - after sys.path
from benchmarks.plots import bars  # noqa: E402 - after sys.path
from benchmarks.trainee import DTYPES, Case, Size, batches, frozen_network, sharing  # noqa: E402 - after sys.path
from lora_trainer.common.errors import first_line  # noqa: E402 - after sys.path
from lora_trainer.lora.adapter import Adapter  # noqa: E402 - after sys.path
from lora_trainer.network.compiling import CompiledBlocks  # noqa: E402 - after sys.path
from lora_trainer.network.gradient_checkpointing import apply_checkpointing  # noqa: E402 - after sys.path
from lora_trainer.network.out_of_memory import free_memory, is_lost  # noqa: E402 - after sys.path

MIDDLING = [f"{name}:256:2:{dtype}" for name in NAMES for dtype in DTYPES]
CASES: Mapping[Size, Sequence[str]] = {
    "middling": MIDDLING,
    "true size": list(LADDER),
    "miniature": [
        f"{name}:{size}:fp32" for name in MINIATURE for size in ("64:1", "128:1", "128:8")
    ],
}
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
DRAWS = 4000


def measure(case: Case, *, steps: int, block: int) -> dict[str, Any]:
    """Let the rungs take turns; exits when they do not compute the same first loss.

    Rungs that do not fit, or are computed another way than they say, are left out with the reason; ratios
    are to the first that is there, which is the bare loop if any.
    """
    with tempfile.TemporaryDirectory(prefix="step-ladder-", ignore_cleanup_errors=True) as place:
        warm_up = max(block, 4)
        rungs: list[Rung] = []
        left_out: dict[str, str] = {}
        peaks: dict[str, int | None] = {}
        for rung in build(case, Path(place), steps=steps + warm_up):
            try:
                peaks[rung.name] = _warm_up(case, rung, steps=warm_up)
            except _Fell as error:
                left_out[rung.name] = str(error)
            else:
                rungs.append(rung)
        _compare_losses(case, rungs, left_out)
        seconds: dict[str, list[float]] = {rung.name: [] for rung in rungs}
        processor: dict[str, list[float]] = {rung.name: [] for rung in rungs}
        for turn in range(steps // block):
            for rung in list(rungs if turn % 2 else reversed(rungs)):
                began = time.process_time()
                try:
                    took = _taken(rung, block)
                except _Fell as error:
                    left_out[rung.name] = str(error)
                    rungs.remove(rung)
                    continue
                seconds[rung.name].append(statistics.median(took))
                processor[rung.name].append((time.process_time() - began) / block)
        waits = [rung.waits for rung in rungs if isinstance(rung, Ours)]
    return {
        "case": case.title,
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name() if case.device.type == "cuda" else "cpu",
        "steps": steps,
        "rungs": {
            name: {
                **_compared(seconds[name], seconds[rungs[0].name]),
                "processor": _compared(processor[name], processor[rungs[0].name]),
                "peak_bytes": peaks[name],
            }
            for name in (rung.name for rung in rungs)
        },
        "left_out": left_out,
        "wait_share": statistics.median(waits[0]) if waits else None,
    }


class _Fell(Exception):
    """A rung cannot be measured: it failed, or its loop has given up what the rung is about."""


def _taken(rung: Rung, count: int) -> list[float]:
    """Let a rung take its steps; raises _Fell, but what leaves no device to go on with as it is."""
    try:
        took = rung.take(count)
    except Exception as error:
        if is_lost(error):
            raise
        reason = f"{type(error).__name__}: {first_line(error)}"
    else:
        reason = rung.fell_back
        if not reason:
            return took
    # Outside the except block: its traceback would keep the tensors alive that must go.
    free_memory()
    raise _Fell(reason)


def _warm_up(case: Case, rung: Rung, *, steps: int) -> int | None:
    """Take the first steps; return the bytes of network, adapter and a step, None on a CPU. Raises _Fell.

    The first step compiles.
    """
    if case.device.type != "cuda":
        _taken(rung, steps)
        return None
    before = torch.cuda.memory_allocated(case.device)
    _taken(rung, 1)
    torch.cuda.reset_peak_memory_stats(case.device)
    _taken(rung, steps - 1)
    return rung.resident_bytes + torch.cuda.max_memory_allocated(case.device) - before


def build(case: Case, folder: Path, *, steps: int) -> list[Rung]:
    """Return the rungs of a case, on networks that share one set of frozen weights."""
    network = frozen_network(case)
    fused = sharing(network)
    adapter = our_adapter(case, fused)
    inputs = batches(case, folder, steps=steps)

    def bare(name: str, **more: Any) -> Bare:
        own = sharing(network)
        parameters = peft_adapter(case, own, like=fused)
        apply_checkpointing(own, more.pop("checkpointing", case.checkpointing))
        return Bare(
            name=name, case=case, network=own, parameters=parameters, batches=inputs, **more
        )

    rungs: list[Rung] = [bare("bare")]
    if case.precision == torch.bfloat16:
        rungs.append(bare("trainers' way", autocast=True, reads_loss=True))
        if case.device.type == "cuda" and case.checkpointing == "none":
            again = {"autocast": True, "reads_loss": True, "checkpointing": "full"}
            rungs.append(bare("trainers' way, recomputing", **again))
    rungs.append(ours("ours", case, fused, adapter, folder, steps=steps))
    if case.device.type == "cuda":
        own = sharing(network)
        adapter = our_adapter(case, own)
        blocks = CompiledBlocks(own, shapes=case.latent_shapes)
        rungs.append(
            ours("ours, compiled", case, own, adapter, folder, steps=steps, compiled=blocks)
        )
    return rungs


def ours(
    name: str,
    case: Case,
    network: nn.Module,
    adapter: Adapter,
    folder: Path,
    *,
    steps: int,
    compiled: CompiledBlocks | None = None,
) -> Ours:
    """Return our loop, with compiled blocks or without."""
    apply_checkpointing(network, case.checkpointing)
    return Ours(name, case, network, adapter, folder, steps=steps, compiled=compiled)


def _compare_losses(case: Case, rungs: Sequence[Rung], left_out: Mapping[str, str]) -> None:
    if not rungs:
        sys.exit(f"{case.title}: no rung can be measured: {json.dumps(left_out)}")
    first = {rung.name: rung.losses[0] for rung in rungs}
    against = first[rungs[0].name]
    worst = max(abs(loss / against - 1) for loss in first.values())
    if not worst <= TOLERANCE[case.precision]:  # nor NaN
        sys.exit(f"{case.title}: not the same maths, losses of the first step are {first}")


def _compared(taken: Sequence[float], bare: Sequence[float]) -> dict[str, Any]:
    """Return the median of the turns, and of their ratios to the bare loop's with its 95 % bound."""
    ratios = [one / other for one, other in zip(taken, bare, strict=True)]
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(DRAWS))
    return {
        "median_s": statistics.median(taken),
        "quartiles_s": statistics.quantiles(taken, n=4) if len(taken) > 1 else list(taken),
        "ratio": statistics.median(ratios),
        "ratio_upper": medians[int(0.95 * DRAWS)],
        "turns_s": list(taken),
    }


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table of docs/performance.md."""
    print("| case | rung | median s | of bare | 95 % bound | processor | 95 % bound | peak GiB |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        for name, found in row["rungs"].items():
            peak, processor = found["peak_bytes"], found["processor"]
            print(
                f"| {row['case']} | {name} | {found['median_s']:.4f} | {found['ratio']:.3f} "
                f"| {found['ratio_upper']:.3f} | {processor['ratio']:.3f} "
                f"| {processor['ratio_upper']:.3f} | {f'{peak / 2**30:.2f}' if peak else ''} |"
            )


def main() -> None:
    """Read the command line, measure, report."""
    options = _options()
    if options.threads:
        torch.set_num_threads(options.threads)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    rows = []
    cases = options.case or CASES[options.size]
    for words in cases:
        size: Size = options.size
        case = Case.from_words(words, device=device, size=size)
        rows.append(measure(case, steps=options.steps, block=options.block))
        print(json.dumps({**rows[-1], "rungs": list(rows[-1]["rungs"])}), file=sys.stderr)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
    show(rows)
    if options.plot:
        times = {
            row["case"]: {name: found["median_s"] for name, found in row["rungs"].items()}
            for row in rows
        }
        options.plot.write_text(bars(times, unit="s a step") + "\n")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--case",
        nargs="+",
        metavar="NAME:PX:BATCH:DTYPE[:RECOMPUTING]",
        help="default: small ones, or with --true-size those of gpu_day/cases.py",
    )
    parser.add_argument("--steps", type=int, default=40, help="steps of each rung")
    parser.add_argument("--block", type=int, default=2, help="steps in a row of one rung")
    parser.add_argument("--threads", type=int, help="threads of torch; else its own choice")
    sizes = parser.add_mutually_exclusive_group()
    for size, words in (
        ("true size", "networks as released"),
        ("miniature", "the embedded base's"),
    ):
        option = f"--{size.replace(' ', '-')}"
        sizes.add_argument(option, dest="size", action="store_const", const=size, help=words)
    parser.set_defaults(size="middling")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    parser.add_argument("--plot", type=Path, help="where to draw them, an .svg")
    return parser.parse_args()


if __name__ == "__main__":
    main()
