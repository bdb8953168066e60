"""How long a training takes beside another one on the same processor, and whether anything is lost alone.

Usage: python benchmarks/beside.py [--rounds 3] [--steps 6] [--at-once 2] [--spinning] [--json FILE]

Whole trainings of the example with the defaults of a fresh install, each a fresh process that finds
its caches filled, in turns: one alone; several at once; one alone whose threads always spin while
they wait for each other, which is what libgomp does by itself; with --spinning also several of
those at once. The ratios are of medians within this run. Run it on an otherwise idle machine: other
programs are what is measured here. Ends with 1 where a ratio is above its bound.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BOUND_BESIDE, BOUND_ALONE = 3.0, 1.1
SPINNING = (
    "from lora_trainer.training import cores; cores.openmp = lambda: 'other'\n"
    "from lora_trainer.cli.main import main; main()"
)


def main() -> None:
    asked = _arguments()
    sides = {"alone": (1, False), "beside": (asked.at_once, False), "alone, spinning": (1, True)}
    if asked.spinning:
        sides["beside, spinning"] = (asked.at_once, True)
    took: dict[str, list[float]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory() as folder:
        _trained(asked, Path(folder), count=1, spinning=False)
        for _ in range(asked.rounds):
            for name, (count, spinning) in sides.items():
                took[name] += _trained(asked, Path(folder), count=count, spinning=spinning)
    found = _judged(took, steps=asked.steps)
    if asked.json:
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    within = found["beside"] <= BOUND_BESIDE and found["alone"] <= BOUND_ALONE
    sys.exit(0 if within or not asked.bounds else 1)


def _trained(asked: argparse.Namespace, folder: Path, *, count: int, spinning: bool) -> list[float]:
    """Return the seconds of each of `count` trainings that start together; infinity past the limit."""
    start = ["-c", SPINNING] if spinning else ["-m", "lora_trainer"]
    own = folder / f"{time.time_ns()}"
    began_s = time.monotonic()
    running = {
        number: subprocess.Popen(
            [
                *(
                    sys.executable,
                    *start,
                    str(ROOT / "datasets/example"),
                    "--steps",
                    str(asked.steps),
                ),
                *("--output", str(own), "--name", str(number), "--set", "hardware.device=cpu"),
                *(word for setting in asked.set for word in ("--set", setting)),
                *("--set", f"data.cache_dir={json.dumps(str(folder / 'cache'))}"),
            ],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.DEVNULL,
        )
        for number in range(count)
    }
    ended: dict[int, float] = {}
    while len(ended) < count:
        passed_s = time.monotonic() - began_s
        for number in running.keys() - ended.keys():
            if passed_s > asked.limit_s:
                running[number].kill()
                running[number].wait()
                ended[number] = float("inf")
            elif (code := running[number].poll()) is not None:
                if code:
                    raise SystemExit(f"a training ended with {code}")
                ended[number] = passed_s
        time.sleep(0.02)
    return list(ended.values())


def _judged(took: Mapping[str, list[float]], *, steps: int) -> dict[str, float]:
    medians = {name: statistics.median(values) for name, values in took.items()}
    print(f"seconds of {steps} steps of the example, {os.cpu_count()} processors")
    print("| training | median | all | of one alone |\n|---|---|---|---|")
    for name, values in took.items():
        every = ", ".join(f"{value:.1f}" for value in values)
        print(
            f"| {name} | {medians[name]:.1f} | {every} | {medians[name] / medians['alone']:.2f} |"
        )
    beside = max(took["beside"]) / medians["alone"]
    alone = medians["alone"] / medians["alone, spinning"]
    print(f"slowest beside another: {beside:.2f} of alone, at most {BOUND_BESIDE:g} is promised")
    print(f"alone: {alone:.2f} of always spinning, within {BOUND_ALONE:g} is noise")
    return {"beside": beside, "alone": alone, **{f"{name}, s": s for name, s in medians.items()}}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=300.0)
    parser.add_argument("--spinning", action="store_true", help="also several that always spin")
    parser.add_argument("--no-bounds", dest="bounds", action="store_false", help="only measure")
    parser.add_argument("--set", action="append", default=[], help="a setting of all trainings")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
