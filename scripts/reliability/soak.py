"""One long training with saves, samples and validations on: does anything grow or stay behind?

Usage: python scripts/reliability/soak.py [--minutes 60] [--json FILE]

Trains the tiny base of the tests through the command line, in a process of its own, and looks at it
every ten seconds: memory, open files, threads, children. Then it stops it with SIGTERM and checks
the exit code, the time that took, and that no process stayed. Growth is the difference between the
medians of the last and of the first quarter after a warm-up of a tenth of the time.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.fakes.runs import events, start, toy  # noqa: E402 - after sys.path

MB = 1_000_000
INTERVAL_S = 10.0
LIMIT_MB = 50.0


@dataclass(frozen=True, kw_only=True)
class Look:
    """One look at the process."""

    at_s: float
    rss_mb: float
    files: int
    threads: int
    children: int


@dataclass(frozen=True, kw_only=True)
class Soak:
    """What a soak showed."""

    minutes: float
    steps: int
    saves: int
    samples: int
    rss_start_mb: float
    rss_end_mb: float
    rss_growth_mb: float
    file_growth: int
    thread_growth: int
    most_children: int
    orphans: int
    exit_code: int
    stop_s: float
    passed: bool


def soak(folder: Path, *, seconds: float) -> tuple[Soak, list[Look]]:
    """Train for that long and look on."""
    place = toy(folder).with_base()
    settings = {
        "output__save_every_steps": 25,
        "sampling__every_steps": 50,
        "train__validate_every_steps": 50,
        "data__flip": True,
        "logging__trackers": ["tensorboard"],
    }
    log = folder / "soak.log"
    process = start(*place.arguments(steps=10_000_000, **settings))
    drain = _drained(process, log)
    looks = _watch(process, seconds=seconds)
    family = psutil.Process(process.pid).children(recursive=True)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    code = process.wait(timeout=300)
    stop_s = time.monotonic() - began
    drain.wait()
    settled = looks[len(looks) // 10 :]
    quarter = max(1, len(settled) // 4)
    first, last = settled[:quarter], settled[-quarter:]
    growth_mb = _median(last, "rss_mb") - _median(first, "rss_mb")
    file_growth = round(_median(last, "files") - _median(first, "files"))
    orphans = sum(child.is_running() for child in family)
    steps = events(place.run, "step")
    found = Soak(
        minutes=round(seconds / 60, 1),
        steps=len(steps),
        saves=len(events(place.run, "saved")),
        samples=len(events(place.run, "sample")),
        rss_start_mb=_median(first, "rss_mb"),
        rss_end_mb=_median(last, "rss_mb"),
        rss_growth_mb=round(growth_mb, 1),
        file_growth=file_growth,
        thread_growth=round(_median(last, "threads") - _median(first, "threads")),
        most_children=max(look.children for look in looks),
        orphans=orphans,
        exit_code=code,
        stop_s=round(stop_s, 2),
        passed=growth_mb < LIMIT_MB and file_growth <= 0 and orphans == 0 and code == 143,
    )
    return found, looks


def _drained(process: subprocess.Popen[str], log: Path) -> subprocess.Popen[bytes]:
    """Keep the pipes of the training empty, else it would wait for us."""
    assert process.stdout is not None
    with log.open("wb") as file:
        return subprocess.Popen(["cat"], stdin=process.stdout, stdout=file)


def _watch(process: subprocess.Popen[str], *, seconds: float) -> list[Look]:
    began, looks = time.monotonic(), list[Look]()
    watched = psutil.Process(process.pid)
    while (at_s := time.monotonic() - began) < seconds:
        if process.poll() is not None:
            raise RuntimeError(f"the training ended by itself with {process.returncode}")
        with watched.oneshot():
            looks.append(
                Look(
                    at_s=round(at_s, 1),
                    rss_mb=round(watched.memory_info().rss / MB, 1),
                    files=watched.num_fds(),
                    threads=watched.num_threads(),
                    children=len(watched.children(recursive=True)),
                )
            )
        time.sleep(min(INTERVAL_S, seconds))
    return looks


def _median(looks: Sequence[Look], name: str) -> float:
    return round(statistics.median(getattr(look, name) for look in looks), 1)


def main() -> int:
    """Soak and print what was seen."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lora-train-soak-") as folder:
        found, looks = soak(Path(folder), seconds=60 * options.minutes)
    print(json.dumps(asdict(found), indent=2))
    if options.json:
        rows = {**asdict(found), "looks": [asdict(look) for look in looks]}
        options.json.write_text(json.dumps(rows) + "\n", encoding="utf-8")
    return 0 if found.passed else 1


if __name__ == "__main__":
    sys.exit(main())
