"""One cell of docs/plans.md: `lora-train` at true size on a pretended card of exactly its memory, then resumed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lora_trainer.config import Priority
from lora_trainer.run.samples import ONE_COLOUR
from scripts.plan_tables import CARDS as PLANNED_CARDS
from scripts.plan_tables import planned, ram_gib_of
from scripts.rehearse.base import as_caption, longest_caption, write_true_size
from scripts.rehearse.card import Card, NoCudaTorch, build
from scripts.rehearse.program import COUNTS_VARIABLE, FAULT_VARIABLE, MEMORY_VARIABLE

ROOT = Path(__file__).parents[2]
STEPS, STEPS_RESUMED = 6, 7
SETTINGS = (
    "sampling.every_steps=6",
    "sampling.steps=1",
    "output.save_every_steps=6",
    "train.validate_every_steps=6",
    "data.validation_fraction=0.2",
)
"""Saving, sampling and validation come at the end; a cell's own settings stand in their place."""
QUIET_STEP = 4
"""The step whose launches, copies and waits are counted: a step is reported while the second after it is under way."""
LIMIT_S = 1800
CACHE = "cache"
"""The folder of a cell's caches: with those of another cell no text would be encoded, and less memory planned."""
BY_NO_KERNEL = ONE_COLOUR
"""The code of a problem that each run there has: no kernel computes."""


CARDS: Mapping[int, Card] = {
    8: Card(vram_gib=8, capability="8.9", name="NVIDIA GeForce RTX 4060", multiprocessors=24),
    12: Card(vram_gib=12, capability="8.6", name="NVIDIA GeForce RTX 3060", multiprocessors=28),
    16: Card(vram_gib=16, capability="8.9", name="NVIDIA GeForce RTX 4060 Ti", multiprocessors=34),
    24: Card(vram_gib=24, capability="8.9", name="NVIDIA GeForce RTX 4090", multiprocessors=128),
}
"""The cards of docs/plans.md by GiB."""
SIZES_PX = ((1024, 1024), (1216, 832), (832, 1216), (1024, 1024), (1024, 1024))


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A base, a card, a priority; `ram_gib` is what the machine is said to have, `planted` a fault (planted.py)."""

    source: str
    card: Card
    priority: str
    ram_gib: float
    settings: Sequence[str] = ()
    planted: str = ""

    @property
    def key(self) -> str:
        return " ".join((self.source, f"{self.card.vram_gib:g}", self.priority, *self.settings))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What was seen. `faults` is empty where the cell holds; memory is in bytes, `quiet_step` has the driver's counts.

    `planned` and `peak` are of the whole run, with what the driver's context takes; `share` is theirs.
    """

    key: str
    plan: Mapping[str, Any] = field(default_factory=dict)
    planned_bytes: int = 0
    peak_bytes: int = 0
    quiet_step: Mapping[str, int] = field(default_factory=dict)
    faults: Sequence[str] = ()

    @property
    def share(self) -> float:
        return self.peak_bytes / self.planned_bytes if self.planned_bytes else 0.0

    def row(self) -> dict[str, Any]:
        return asdict(self)


PLAN_SETTINGS = (
    "data.resolution",
    "memory.base_precision",
    "memory.gradient_checkpointing",
    "memory.streamed_blocks",
    "memory.micro_batch",
    "optimizer.name",
)
LEAST_SHARE = 0.9
"""A peak below this share of the plan is a fault: the plan keeps memory from the user."""


def cell_of(source: str, gib: int, priority: Priority, *settings: str, planted: str = "") -> Cell:
    """Return the cell of docs/plans.md with the size of images that it has there, and settings beside its plan's."""
    (card,) = (name for name, size in PLANNED_CARDS.items() if size == gib)
    side_px = planned(source, card, priority).config.data.resolution
    return Cell(
        source=source,
        card=CARDS[gib],
        priority=priority,
        ram_gib=ram_gib_of(source),
        settings=[f"data.resolution={side_px}", *settings],
        planted=planted,
    )


def libraries_in(folder: Path) -> Path:
    """Return the folder of the pretended driver below `folder`, where it is built unless it is there.

    Ends the program with exit code 4 where it cannot be built.
    """
    try:
        return build(folder / "driver")
    except NoCudaTorch as error:
        print(f"nothing was rehearsed: {error}", file=sys.stderr)
        raise SystemExit(4) from None


def rehearse(cell: Cell, *, folder: Path, name: str, libraries: Path) -> Outcome:
    """Train, then resume in a new process, and judge what the driver counted.

    `folder` keeps the bases of all cells, which are written where they are not there, and their images; the runs and
    counts are in its folder `name`.
    """
    base = folder / "bases" / cell.source.replace("/", "--")
    if not base.is_dir():
        write_true_size(cell.source, base)
    dataset, work = dataset_for(folder / "images", base), folder / name
    work.mkdir(parents=True, exist_ok=True)
    run = work / "run"
    for folder in (run, work / CACHE):
        shutil.rmtree(folder, ignore_errors=True)
    values = dict(setting.split("=", 1) for setting in (*SETTINGS, *cell.settings))
    settings = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    first = [str(dataset), "--base", str(base), "--output", str(work), "--name", run.name]
    first += ["--priority", cell.priority, "--steps", str(STEPS), *settings]
    counts = work / "counts.jsonl"
    counts.unlink(missing_ok=True)
    faults = list(_run(cell, first, counts=counts, libraries=libraries))
    rows = _rows(counts)
    record = _record(run)  # a resumed run writes a plan without what is cached
    if not faults:
        again = [str(dataset), "--resume-from", str(run), "--steps", str(STEPS_RESUMED)]
        resumed = work / "resumed.jsonl"
        resumed.unlink(missing_ok=True)
        faults += [
            f"resumed: {fault}" for fault in _run(cell, again, counts=resumed, libraries=libraries)
        ]
        if not faults and not any(row["step"] == STEPS_RESUMED for row in _rows(resumed)):
            faults.append(f"resumed: step {STEPS_RESUMED} was not taken")
    if record is None:
        return Outcome(key=cell.key, faults=faults)
    plan, chosen = record
    return judged(cell.key, rows, plan=plan, chosen=chosen, faults=faults)


def dataset_for(folder: Path, base: Path) -> Path:
    """Write five images of noise with captions for a base, two of them as long as it reads: one image is held out."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    longest = longest_caption(base)
    numbers = np.random.default_rng(0)
    for index, (width, height) in enumerate(SIZES_PX):
        file = folder / f"image-{index}.png"
        Image.fromarray(numbers.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(file)
        usual = as_caption(f"a photo of thing {index} on a table", base)
        file.with_suffix(".txt").write_text((index < 2 and longest) or usual)
    return folder


def judged(
    key: str,
    rows: Sequence[Mapping[str, Any]],
    *,
    plan: Mapping[str, Any],
    chosen: Mapping[str, Any],
    faults: Sequence[str] = (),
) -> Outcome:
    """Compare the counts of a run with its plan; `rows` are lines of the file of counts."""
    found = list(faults)
    for row in rows:
        is_problem = row.get("code") not in (None, "", BY_NO_KERNEL)
        if row["event"] in ("change", "out_of_memory") or is_problem:
            found.append(json.dumps({k: v for k, v in row.items() if k != "counts"}))
    planned = max(plan["memory"]["phases"].values())
    peak = max((row["counts"]["peak_used"] for row in rows), default=0)
    if peak > planned:
        found.append("the peak is above the plan")
    elif _peak_of_steps(rows) > plan["memory"]["phases"]["training"]:
        found.append("the peak of the steps is above what is planned for them")
    if peak < LEAST_SHARE * planned:
        found.append(f"the peak is below {LEAST_SHARE:.0%} of the plan")
    if _grows(rows):
        found.append("tensors on the card grow from step to step")
    quiet = _between(rows, QUIET_STEP - 1, QUIET_STEP)
    if not quiet:
        found.append(f"step {QUIET_STEP} was not reported")
    elif quiet["h2d_pageable"] or quiet["d2h_pageable"]:
        found.append("a step copies memory that is not pinned")
    if quiet and (quiet["mallocs"] or quiet["frees"]):
        found.append("a step takes memory from the driver or gives it back")
    if quiet and (quiet["stream_sync"] or quiet["dev_sync"] or quiet["sync_copies"]):
        found.append("the host waits within a step")
    return Outcome(
        key=key,
        plan=chosen,
        planned_bytes=planned,
        peak_bytes=peak,
        quiet_step=quiet,
        faults=found,
    )


def _run(cell: Cell, words: Sequence[str], *, counts: Path, libraries: Path) -> Iterator[str]:
    """Run the command on the card and yield what went wrong: its last line, if it did not end well."""
    environment = {
        **cell.card.environment(libraries),
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        COUNTS_VARIABLE: str(counts),
        MEMORY_VARIABLE: str(cell.ram_gib),
        FAULT_VARIABLE: cell.planted,
        "XDG_CACHE_HOME": str(counts.parent / CACHE),
    }
    command = [sys.executable, "-m", "scripts.rehearse.program", *words]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        yield f"not done after {LIMIT_S} s"
        return
    counts.with_suffix(".log").write_text(done.stdout + done.stderr, encoding="utf-8")
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        yield f"exit code {done.returncode}: {lines[-1] if lines else 'no message'}"


def _rows(counts: Path) -> list[dict[str, Any]]:
    if not counts.is_file():
        return []
    return [json.loads(line) for line in counts.read_text(encoding="utf-8").splitlines()]


def _between(rows: Sequence[Mapping[str, Any]], first: int, last: int) -> dict[str, int]:
    """Return how much each count grew from the event of one step to that of another."""
    steps = {row["step"]: row["counts"] for row in rows if row["event"] == "step"}
    if first not in steps or last not in steps:
        return {}
    return {name: steps[last][name] - steps[first][name] for name in steps[last]}


def _peak_of_steps(rows: Sequence[Mapping[str, Any]]) -> int:
    """Return the bytes of tensors at the peak of the steps and of the driver, without what torch keeps for reuse."""
    peaks = [
        row["tensors"]["peak_bytes"] for row in rows if row["event"] == "step" and "tensors" in row
    ]
    return rows[0]["counts"]["used"] + max(peaks) if peaks else 0


def _grows(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Say whether each of three steps left more in tensors than the one before; later ones are told at one moment."""
    sizes = {
        row["step"]: row["tensors"]["bytes"]
        for row in rows
        if row["event"] == "step" and "tensors" in row
    }
    steps = range(QUIET_STEP - 2, QUIET_STEP + 1)
    return sizes.keys() >= set(steps) and all(sizes[n] < sizes[n + 1] for n in steps[:-1])


def _record(run: Path) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Return the plan of run.json and the settings that it chose; None for a folder without one."""
    try:
        record = json.loads((run / "run.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return record["plan"], {
        name.partition(".")[2]: record["settings"][name] for name in PLAN_SETTINGS
    }
