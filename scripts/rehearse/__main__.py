"""Rehearse the cells of docs/plans.md on a pretended card; read card.py for what that can and cannot show.

Usage: python -m scripts.rehearse --work FOLDER [--base HUB_ID ...] [--gpu 8 12 16 24] [--priority balanced ...]

Needs the CUDA build of torch and gcc. Each cell takes one to five minutes. FOLDER/cells.jsonl gets a line for each,
and a cell that it has is not rehearsed again: delete its line, or the file after a change of the code. Images have the
size of the cell, which a run of a few steps would not come to by itself. Exits with 1 if a cell has a fault.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from lora_trainer import families
from lora_trainer.config import PRIORITIES
from scripts.rehearse.cell import CARDS, Outcome, cell_of, libraries_in, rehearse

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
    libraries = libraries_in(work)
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
                cell = cell_of(source, gib, priority, *asked.set)
                outcome = outcomes.get(cell.key)
                if outcome is None:
                    outcome = rehearse(cell, folder=work, name="cell", libraries=libraries)
                    with record.open("a", encoding="utf-8") as out:
                        out.write(json.dumps(outcome.row()) + "\n")
                faulty += bool(outcome.faults)
                print(_line(outcome), flush=True)
    return 1 if faulty else 0


def _line(outcome: Outcome) -> str:
    plan = ", ".join(f"{name} {value}" for name, value in outcome.plan.items())
    sizes = f"peak {outcome.peak_bytes / GIB:.2f} of {outcome.planned_bytes / GIB:.2f} GiB ({outcome.share:.0%})"
    launches = outcome.quiet_step.get("launches", 0) + outcome.quiet_step.get("gemms", 0)
    return f"{outcome.key}: {'; '.join(outcome.faults) or 'holds'} | {sizes} | {launches} launches a step | {plan}"


if __name__ == "__main__":
    sys.exit(main())
