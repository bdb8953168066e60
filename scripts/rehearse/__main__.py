"""Rehearse the cells of docs/plans.md on a pretended card; read card.py for what that can and cannot show.

Usage: python -m scripts.rehearse --work FOLDER [--base HUB_ID ...] [--gpu 8 12 16 24] [--priority balanced ...]

Needs the CUDA build of torch and gcc. Each cell takes one to five minutes. FOLDER/cells.jsonl gets a line for each,
and a cell that it has is not rehearsed again: delete its line, or the file after a change of the code. Images have the
size of the cell, which a run of a few steps would not come to by itself. Exits with 1 if a cell has a fault.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from PIL import Image

from lora_trainer import families
from lora_trainer.config import PRIORITIES, Priority
from scripts.plan_tables import CARDS as PLANNED_CARDS
from scripts.plan_tables import planned, ram_gib_of
from scripts.rehearse.base import as_caption, longest_caption, write_true_size
from scripts.rehearse.card import Card, NoCudaTorch, build
from scripts.rehearse.cell import Cell, Outcome, rehearse

CARDS: Mapping[int, Card] = {
    8: Card(vram_gib=8, capability="8.9", name="NVIDIA GeForce RTX 4060", multiprocessors=24),
    12: Card(vram_gib=12, capability="8.6", name="NVIDIA GeForce RTX 3060", multiprocessors=28),
    16: Card(vram_gib=16, capability="8.9", name="NVIDIA GeForce RTX 4060 Ti", multiprocessors=34),
    24: Card(vram_gib=24, capability="8.9", name="NVIDIA GeForce RTX 4090", multiprocessors=128),
}
"""The cards of docs/plans.md by GiB."""
SIZES_PX = ((1024, 1024), (1216, 832), (832, 1216), (1024, 1024), (1024, 1024))
GIB = 1 << 30


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument(
        "--base",
        nargs="*",
        default=[families.family(n).published[0].ids[0] for n in families.NAMES],
    )
    parser.add_argument("--gpu", nargs="*", type=int, choices=list(CARDS), default=list(CARDS))
    parser.add_argument("--priority", nargs="*", choices=PRIORITIES, default=["balanced"])
    parser.add_argument(
        "--set", nargs="*", default=[], help="settings beside the plan's, section.key=value"
    )
    asked = parser.parse_args()
    work: Path = asked.work.resolve()
    try:
        libraries = build(work / "driver")
    except NoCudaTorch as error:
        print(f"nothing was rehearsed: {error}", file=sys.stderr)
        return 4
    record = work / "cells.jsonl"
    done = (
        [json.loads(line) for line in record.read_text().splitlines()] if record.is_file() else []
    )
    outcomes = {row["key"]: Outcome(**row) for row in done}
    print("REHEARSED on a pretended card, not measured on a GPU")
    faulty = 0
    for source in asked.base:
        for gib in asked.gpu:
            for priority in asked.priority:
                cell = Cell(
                    source=source,
                    card=CARDS[gib],
                    priority=priority,
                    ram_gib=ram_gib_of(source),
                    settings=[side_setting(source, gib, priority), *asked.set],
                )
                outcome = outcomes.get(cell.key)
                if outcome is None:
                    base = work / "bases" / source.replace("/", "--")
                    if not base.is_dir():
                        write_true_size(source, base)
                    outcome = rehearse(
                        cell,
                        base=base,
                        dataset=dataset_for(work / "images", base),
                        work=work / "cell",
                        libraries=libraries,
                    )
                    with record.open("a", encoding="utf-8") as out:
                        out.write(json.dumps(outcome.row()) + "\n")
                faulty += bool(outcome.faults)
                print(_line(outcome), flush=True)
    return 1 if faulty else 0


def side_setting(source: str, gib: int, priority: Priority) -> str:
    """Return the setting for the size of images that docs/plans.md has."""
    (card,) = (name for name, size in PLANNED_CARDS.items() if size == gib)
    return f"data.resolution={planned(source, card, priority).config.data.resolution}"


def _line(outcome: Outcome) -> str:
    plan = ", ".join(f"{name} {value}" for name, value in outcome.plan.items())
    sizes = f"peak {outcome.peak_bytes / GIB:.2f} of {outcome.planned_bytes / GIB:.2f} GiB ({outcome.share:.0%})"
    launches = outcome.quiet_step.get("launches", 0) + outcome.quiet_step.get("gemms", 0)
    return f"{outcome.key}: {'; '.join(outcome.faults) or 'holds'} | {sizes} | {launches} launches a step | {plan}"


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


if __name__ == "__main__":
    sys.exit(main())
