"""The first day with a GPU, in one command of at most ten minutes that goes on where it stopped.

Usage: python -m benchmarks.gpu_day [--limit-s 540] [--results FOLDER] [--slice NAME ...] [--tiny]
       python -m benchmarks.gpu_day --write-docs

Slices are done one after the other, of each first what is most worth knowing. Every result is written
as soon as it is there, errors too; what has one of this code, torch and GPU is not done again. Ends with
0 when everything is done, 1 when something failed, 3 when something is left for the next time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from benchmarks.gpu_day.cases import SLICES, Slice  # noqa: E402 - after sys.path
from benchmarks.gpu_day.docs import write_docs  # noqa: E402 - after sys.path
from benchmarks.gpu_day.results import Results, origin, recorded_origin  # noqa: E402 - after sys.path
from benchmarks.gpu_day.runner import Runner  # noqa: E402 - after sys.path
from benchmarks.gpu_day.verdicts import said, verdicts  # noqa: E402 - after sys.path

DOCS = ROOT / "docs"
FAILED, LEFT = 1, 3


def main() -> int:
    """Do what the command line says; return the exit code."""
    asked = _arguments()
    began_s = time.time()
    pieces = [piece for piece in SLICES if asked.slice is None or piece.name in asked.slice]
    if asked.write_docs:
        return _write_docs(asked)
    results = Results(
        folder=asked.results,
        origin=origin(
            tiny=asked.tiny, device=asked.device, commit=asked.commit, measures=not asked.list
        ),
        again=asked.again,
        other_code=asked.other_code,
    )
    if asked.list:
        _list(results, pieces)
        return 0
    runner = Runner(
        results=results,
        folder=asked.work,
        until_s=began_s + asked.limit_s,
        limit_s=asked.limit_s,
    )
    _measure(runner, results, pieces)
    if not asked.tiny:  # whose times say nothing
        for line in said(verdicts(results)):
            print(line)
    return _ended(replace(results, again=False), pieces)


def _write_docs(asked: argparse.Namespace) -> int:
    if asked.tiny and asked.docs == DOCS:
        raise SystemExit(
            "--tiny measures nothing that belongs into docs/: name a copy of it, --docs FOLDER"
        )
    measured_with = recorded_origin(asked.results, tiny=asked.tiny)
    results = Results(folder=asked.results, origin=measured_with)
    for file in write_docs(results, asked.docs):
        print(f"written: {file}")
    for line in said(verdicts(results)):
        print(line)
    return 0


def _measure(runner: Runner, results: Results, pieces: Sequence[Slice]) -> None:
    print(f"{results.origin.device}, torch {results.origin.torch}, commit {results.origin.commit}")
    missing = {piece.name: results.missing(piece) for piece in pieces}
    for later in (False, True):
        for piece in pieces:
            cases = [case for case in missing[piece.name] if case.later == later]
            if cases:
                print(f"{piece.name}: {piece.title}", flush=True)
                runner.measure(piece, cases)


def _list(results: Results, pieces: Sequence[Slice]) -> None:
    for piece in pieces:
        print(f"{piece.name}: {piece.title}")
        rows = dict(results.rows(piece))
        missing = {case.name for case in results.missing(piece)}
        for case in piece.of(tiny=results.origin.tiny):
            state = rows[case.name]["status"] if case.name in rows else "to do"
            if case.name in rows and case.name in missing:
                state += ", to do again"
            when = ", later" if case.later else ""
            print(f"  {case.name}: {state}, about {case.seconds:.0f} s{when}")


def _ended(results: Results, pieces: Sequence[Slice]) -> int:
    """Say what is left and what failed; return the exit code."""
    left = [(piece, case) for piece in pieces for case in results.missing(piece)]
    failed = [
        f"{piece.name}, {name}: {row['error']}"
        for piece in pieces
        for name, row in results.rows(piece)
        if row["status"] == "failed"
    ]
    print(f"results: {results.folder}")
    for line in failed:
        print(f"failed: {line}")
    if left:
        seconds = sum(case.seconds for _, case in left)
        print(
            f"left: {len(left)} cases, about {seconds / 60:.0f} minutes; the same command goes on"
        )
        return LEFT
    return FAILED if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_day", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--results", type=Path, default=Path("gpu-day"), metavar="FOLDER")
    parser.add_argument(
        "--work",
        type=Path,
        default=Path(tempfile.gettempdir()) / "lora-train-gpu-day",
        metavar="FOLDER",
        help="bases, runs and compiled code, which later commands find",
    )
    names = [piece.name for piece in SLICES]
    parser.add_argument("--slice", nargs="+", choices=names, help="else all")
    parser.add_argument("--limit-s", type=float, default=540.0, help="when this command ends")
    parser.add_argument("--list", action="store_true", help="what there is, and what is done")
    parser.add_argument("--again", action="store_true", help="do what failed again")
    parser.add_argument(
        "--other-code", action="store_true", help="what was measured with other code is done"
    )
    parser.add_argument("--tiny", action="store_true", help="tiny bases: whether it runs")
    parser.add_argument("--device", choices=["auto", "cuda", "cpu"], default="auto")
    parser.add_argument("--commit", help="of these files, where git does not know it")
    parser.add_argument("--write-docs", action="store_true", help="fill the tables of the docs")
    parser.add_argument("--docs", type=Path, default=DOCS, metavar="FOLDER")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
