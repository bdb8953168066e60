"""Whether a commit is slower than another: import, plan, caching, start and steps of both, in turns in one run.

Usage: python benchmarks/watch.py BEFORE [AFTER] [--rounds 6] [--only NAME ...] [--json FILE]

Both commits are unpacked beside each other (AFTER is HEAD by itself) and run by the Python of this environment, one
process at a time, on one thread: in every round the first, the second, then the other way round. A part is what one
command takes more than another: caching is a training with an empty cache less one with a full cache, a step is a
longer training less a shorter one. So every part is known in seconds of the processor too, which other work on the
machine disturbs less than the clock.

The ratio of a part is the median over the rounds; its bound is the lower end of a one-sided 99 % interval
(bootstrap). A commit counts as slower, and this ends with 1, where that bound is above 1 plus the margin, by the
processor or by the clock: noise widens the interval, so a busy machine hides a loss and does not invent one.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import random
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Steps of the shorter and of the longer training.
FEW, MANY = 2, 14
MARGIN = 0.05
DRAWS = 2000
CONFIDENCE = 0.99
LIMIT_S = 1800


@dataclass(frozen=True)
class Took:
    """Seconds of the clock and of the processor."""

    wall_s: float
    cpu_s: float

    def less(self, other: Took, *, parts: int = 1) -> Took:
        """Return one of `parts` equal parts of what this took more."""
        return Took((self.wall_s - other.wall_s) / parts, (self.cpu_s - other.cpu_s) / parts)


def main() -> None:
    asked = _arguments()
    with tempfile.TemporaryDirectory(prefix="watch-") as place:
        sides = {}
        for name, commit in (("before", asked.before), ("after", asked.after)):
            sides[name] = Side.unpacked(commit, Path(place) / name)
        found = measured(sides, asked.only or [*PARTS], rounds=asked.rounds)
    rows = [compared(name, *pair, margin=asked.margin) for name, pair in found.items()]
    show(rows, before=asked.before, after=asked.after)
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=1) + "\n")
    slower = [str(row["part"]) for row in rows if row["slower"]]
    if slower:
        sys.exit(f"{asked.after} is slower than {asked.before}: {', '.join(slower)}")


@dataclass(frozen=True)
class Side:
    """A commit's files in a folder of its own, beside the caches and runs of its trainings."""

    place: Path

    @classmethod
    def unpacked(cls, commit: str, place: Path) -> Side:
        """Write the files of a commit to `place`/tree; ends the program where git does not know it."""
        line = ["git", "-C", str(ROOT), "archive", "--format=tar", commit]
        done = subprocess.run(line, capture_output=True, check=False)
        if done.returncode:
            sys.exit(f"git has no files of {commit!r}: {done.stderr.decode().strip()}")
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as packed:
            packed.extractall(place / "tree", filter="data")
        return cls(place)

    def python(self, *words: str) -> Took:
        """Run Python on the commit's code; ends the program where that fails."""
        # An installation has the package's bytecode; with this variable it would be compiled each time.
        environment = {
            **{k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"},
            "PYTHONPATH": str(self.place / "tree"),
            "XDG_CACHE_HOME": str(self.place / "home"),
            "OMP_NUM_THREADS": "1",
        }
        log = self.place / "log.txt"
        began_s, spent = time.monotonic(), os.times()
        with log.open("w") as out:
            # In the folder of the commit, or the files of this checkout would be found first.
            done = subprocess.run(
                [sys.executable, *words],
                cwd=self.place,
                env=environment,
                stdout=out,
                stderr=out,
                timeout=LIMIT_S,
                check=False,
            )
        wall_s, after = time.monotonic() - began_s, os.times()
        if done.returncode:
            end = log.read_text(errors="replace")[-2000:]
            sys.exit(f"{' '.join(words)} ended with {done.returncode} in {self.place.name}:\n{end}")
        used_s = (after.children_user - spent.children_user) + (
            after.children_system - spent.children_system
        )
        return Took(wall_s, used_s)

    def train(self, name: str, *, steps: int, folder: Path) -> Took:
        """Train the embedded miniature on the example, with the cache in `folder`."""
        settings: Mapping[str, Any] = {
            "hardware.device": "cpu",
            "hardware.threads": 1,
            "data.cache_dir": folder / "cache",
            "output.measure": False,
            "sampling.every_steps": 0,
            "train.validate_every_steps": 0,
        }
        words = ["-m", "lora_trainer", str(self.place / "tree" / "datasets" / "example")]
        words += ["--output", str(folder / "runs"), "--name", name, "--steps", str(steps)]
        for key, value in settings.items():
            words += ["--set", f"{key}={json.dumps(value, default=str)}"]
        return self.python(*words)


def _imports(side: Side) -> dict[str, Took]:
    return {"import": side.python("-c", "import lora_trainer.run.run_job")}


def _plans(side: Side) -> dict[str, Took]:
    cache = json.dumps(str(side.place / "plans"))
    words = (str(side.place / "tree" / "datasets" / "example"), "--set", f"data.cache_dir={cache}")
    return {"plan": side.python("-m", "lora_trainer", "plan", *words)}


def _trainings(side: Side) -> dict[str, Took]:
    with tempfile.TemporaryDirectory(dir=side.place) as place:
        empty = side.train("empty", steps=FEW, folder=Path(place))
        few = side.train("few", steps=FEW, folder=Path(place))
        many = side.train("many", steps=MANY, folder=Path(place))
    step = many.less(few, parts=MANY - FEW)
    steps = Took(FEW * step.wall_s, FEW * step.cpu_s)
    return {"caching": empty.less(few), "start and end": few.less(steps), "step": step}


# What is measured together, by the name that --only takes.
PARTS: Mapping[str, Callable[[Side], dict[str, Took]]] = {
    "import": _imports,
    "plan": _plans,
    "training": _trainings,
}

Pair = tuple[list[Took], list[Took]]


def measured(sides: Mapping[str, Side], names: Sequence[str], *, rounds: int) -> dict[str, Pair]:
    """Return what each part took in each round, before and after; the first look at the files does not count."""
    for side in sides.values():
        _imports(side)
    found: dict[str, Pair] = {}
    for turn in range(rounds):
        order = ("before", "after") if turn % 2 == 0 else ("after", "before")
        for name in names:
            for which in order:
                for part, took in PARTS[name](sides[which]).items():
                    found.setdefault(part, ([], []))[which == "after"].append(took)
        print(f"round {turn + 1} of {rounds}", file=sys.stderr, flush=True)
    return found


def compared(
    part: str, before: Sequence[Took], after: Sequence[Took], *, margin: float
) -> dict[str, Any]:
    """Return medians, the ratio and its lower bound by both clocks, and whether `after` is slower."""
    row: dict[str, Any] = {"part": part, "slower": False}
    for kind in ("cpu_s", "wall_s"):
        one, other = ([getattr(took, kind) for took in side] for side in (before, after))
        ratios = [b / a for a, b in zip(one, other, strict=True)]
        draw = random.Random(0)  # noqa: S311 - a bootstrap that everybody can repeat, no secret
        medians = sorted(
            statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(DRAWS)
        )
        least = medians[int((1 - CONFIDENCE) * DRAWS)]
        row[kind] = {
            "before": statistics.median(one),
            "after": statistics.median(other),
            "ratio": statistics.median(ratios),
            "ratio_least": least,
            "turns_before": one,
            "turns_after": other,
        }
        row["slower"] = row["slower"] or least > 1 + margin
    return row


def show(rows: Sequence[Mapping[str, Any]], *, before: str, after: str) -> None:
    """Print the table of docs/performance.md."""
    print(f"| part | {before}, s | {after}, s | ratio | at least | by the clock | at least | |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        cpu, wall = row["cpu_s"], row["wall_s"]
        said = "**slower**" if row["slower"] else ""
        print(
            f"| {row['part']} | {cpu['before']:.2f} | {cpu['after']:.2f} | {cpu['ratio']:.3f} "
            f"| {cpu['ratio_least']:.3f} | {wall['ratio']:.3f} | {wall['ratio_least']:.3f} | {said} |"
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("before", help="a commit, tag or branch")
    parser.add_argument("after", nargs="?", default="HEAD")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--only", nargs="+", choices=sorted(PARTS))
    parser.add_argument("--margin", type=float, default=MARGIN, help="a loss that is let pass")
    parser.add_argument("--json", type=Path, help="where the measurements are written")
    return parser.parse_args()


if __name__ == "__main__":
    main()
