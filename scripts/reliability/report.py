"""Write docs/reliability.md from what was measured: `python scripts/reliability/report.py [--measured FOLDER]`.

FOLDER holds kills.json and rank_kills.json (scripts/reliability/kill.py), soak.json (scripts/reliability/soak.py),
terminal.json (scripts/reliability/terminal.py) and figures.jsonl (the tests, with RELIABILITY_FIGURES), as many of
them as there are; what they say is kept in docs/reliability.json, so that the page can be written again without
measuring.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from lora_trainer.common.events import read_jsonl  # noqa: E402 - after sys.path
from scripts.reliability.fault_cases import FAULTS, IDS, files_by_id  # noqa: E402 - after sys.path

PAGE = ROOT / "docs" / "reliability.md"
RECORD = ROOT / "docs" / "reliability.json"
NOT_MEASURED = "not measured"
Measured = Mapping[str, Any]

HEAD = """\
# Reliability

What is done to the trainer, what must come of it, and how often it was tried. Made by
`scripts/reliability/report.py` from `docs/reliability.json`; `scripts/reliability/nightly` measures all of it again.

The promise: a run that is killed at any instant goes on with `--resume` from its last state and ends with the same
bits; a stop by Ctrl-C, SIGTERM or a closed terminal saves first. A terminal, pipe or log that cannot be written to any
more ends no run. Steps whose gradients are not numbers are skipped, and training goes back to a state from before them;
where that happened, or where the LoRA is worse than its base, the last lines say so. Nothing a run skips, lowers or
tries again is silent. A file that cannot be used is one line with what to do about it, before anything is trained.

## Figures
"""

TAIL = """\
## What this does not cover

- Disks and file systems that say a file is safe when it is not; network file systems.
- Bit-equal resumes on a GPU: all figures above are from processors. On CUDA, kernels have to be
  deterministic (`train.deterministic`), which has not been measured here.
- Power cuts: the order of fsync and rename is tested, a real cut is not.
- Memory with flipped bits while a run computes.
- Windows and macOS: the tests run on Linux.
- Secrets that are neither in the environment under a telling name nor of a known form, and the list of processes,
  which shows the command line as it was typed.
"""


def collect(folder: Path, known: Measured) -> dict[str, Any]:
    """Return `known` with what lies in a folder of measurements in place of older figures."""
    found = dict(known)
    for name in ("kills", "rank_kills", "soak", "terminal"):
        file = folder / f"{name}.json"
        if file.is_file():
            values = json.loads(file.read_text(encoding="utf-8"))
            found[name] = {
                key: value for key, value in values.items() if key not in ("looks", "outcomes")
            }
    rows = read_jsonl(folder / "figures.jsonl")
    if rows:
        found["figures"] = added(rows)
    found["machine"] = {
        "system": platform.system(),
        "processor": platform.machine(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "diffusers", "safetensors", "pillow")},
    }
    return found


def added(rows: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Return the counts of each figure, added up over its tests."""
    found: dict[str, dict[str, int]] = {}
    for row in rows:
        counts = found.setdefault(row["figure"], {})
        for name, value in row.items():
            if name not in ("figure", "test"):
                counts[name] = counts.get(name, 0) + value
    return dict(sorted(found.items()))


def page(measured: Measured) -> str:
    """Return the text of docs/reliability.md."""
    rows = [f"| {name} | {target} | {value} |" for name, target, value in _figures(measured)]
    table = ["| figure | aim | measured |", "| --- | --- | --- |", *rows]
    return "\n".join(
        [HEAD, *table, "", *_conditions(measured), "", *_faults(), "", TAIL.rstrip(), ""]
    )


def _figures(measured: Measured) -> list[tuple[str, str, str]]:
    """Return (figure, aim, measured) for each row of the table."""
    kills, soak = measured.get("kills", {}), measured.get("soak", {})
    of_several = measured.get("rank_kills", {})
    counts = measured.get("figures", {})
    lost = kills.get("most_steps_lost_by_scenario", {})
    tested = set(files_by_id())

    def counted(figure: str, text: str) -> str:
        return text.format(**_grouped(counts[figure])) if figure in counts else NOT_MEASURED

    def of(values: Measured, text: str) -> str:
        return text.format(**_grouped(values)) if values else NOT_MEASURED

    return [
        ("random kills; runs that ended with other bits", "500; 0",
         of(kills, "{kills}; {differing_chains} of {chains}")),
        ("... of which inside a save", ">= 100", of(kills, "{inside_save}")),
        ("... of which while caching", "", of(kills, "{while_caching}")),
        ("most steps lost at a kill", "<= the steps between saves and the one in work",
         "; ".join(f"{name}: {count}" for name, count in lost.items()) or NOT_MEASURED),
        ("random kills of one of two processes; runs that ended with other bits", "50; 0",
         of(of_several, "{kills}; {differing_chains} of {chains}")),
        ("... seconds until the other had ended too, at most", "<= 30",
         of(of_several, "{most_seconds_left}")),
        ("a kill at every operation of the disk", "all", counted("io_kills", "{survived} of {tried}")),
        ("an error at every operation of the disk", "all", counted("io_errors", "{survived} of {tried}")),
        ("bad images and captions; handled as specified; crashes; hangs", ">= 100; all; 0; 0",
         counted("bad_inputs", "{tried}; {handled}; {crashes}; {hangs}")),
        ("damage to cache entries; wrong numbers used", ">= 5,000; 0",
         counted("cache_faults", "{injected}; {wrong}")),
        ("kills at every operation of caching", "all",
         counted("cache_kills", "{survived} of {tried}")),
        ("power cuts while caching (simulated); wrong numbers used", "0",
         counted("cache_power_cuts", "{tried}; {wrong}")),
        ("changes that make entries stale; detected; encoded without need", "12; 12; 0",
         counted("stale_cache", "{tried}; {detected}; {needless}")),
        ("cases of fuzzing; crashes; over the limit of time or memory", ">= 10,000; 0; 0",
         counted("fuzz", "{cases}; {crashes}; {over_limit}")),
        ("secrets planted; found in any output", ">= 20; 0", counted("secrets", "{planted}; {found}")),
        ("modules searched; ways to load a pickle or to start a shell", "all; 0",
         counted("pickle_loads", "{files}; {reachable}")),
        ("not-a-number and out-of-memory; runs lost; files with not-a-number", ">= 100; 0; 0",
         counted("injections", "{tried}; {lost}; {nan_files}")),
        ("soak: minutes; steps; saves; samples", ">= 60",
         of(soak, "{minutes}; {steps}; {saves}; {samples}")),
        ("... memory grown, MB; files; threads; processes left", "< 50; 0; 0; 0",
         of(soak, "{rss_growth_mb}; {file_growth}; {thread_growth}; {orphans}")),
        ("... seconds from SIGTERM to the end, state saved", "< 5", of(soak, "{stop_s}")),
        ("a terminal closed, a pipe ended, a log disk filled, at ten moments; nothing lost, status true",
         "30; all", of(measured.get("terminal", {}), "{tried}; {held}")),
        ("faults of the list below with a test of their own; met by tests of parts or decided", "60",
         f"{len(tested)}; {len(IDS) - len(tested)}"),
    ]  # fmt: skip


def _grouped(values: Measured) -> dict[str, str]:
    return {
        name: f"{value:,}" if isinstance(value, int | float) else str(value)
        for name, value in values.items()
    }


def _conditions(measured: Measured) -> list[str]:
    machine = measured.get("machine")
    if not machine:
        return []
    named = ", ".join(f"{name} {value}" for name, value in machine.items() if name != "system")
    return [f"Measured on {machine['system']}, processor only: {named.replace('processor ', '')}."]


def _faults() -> list[str]:
    """Return the table of all faults: the tests that have the id in their name, and what was decided."""
    tests = files_by_id()
    rows = ["## Faults", "", "| id | what is done | tests | decided |", "| --- | --- | --- | --- |"]
    for fault_id in IDS:
        fault = FAULTS[fault_id]
        own = tests.get(fault_id, [])
        files = [*own, *(part for part in fault.parts if part not in own)]
        shown = ", ".join(f"`{file.removeprefix('tests/')}`" for file in files)
        rows.append(f"| {fault_id} | {fault.what} | {shown} | {fault.decided} |")
    return rows


def main() -> None:
    """Take in new measurements, if any, and write record and page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--measured", type=Path, help="folder with what was measured")
    options = parser.parse_args()
    known = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.is_file() else {}
    if options.measured is not None:
        known = collect(options.measured, known)
        RECORD.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")
    PAGE.write_text(page(known), encoding="utf-8")


if __name__ == "__main__":
    main()
