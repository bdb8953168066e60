"""Fills the tables of docs/ from results, between markers: `<!-- gpu-day:NAME -->` and `<!-- /gpu-day:NAME -->`.

A table whose slice has no result stays as it is. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_day.cases import SLICES, Slice
from benchmarks.gpu_day.results import Results
from benchmarks.gpu_day.verdicts import described, said, verdicts

PAGES = ("performance.md", "memory.md")
GIB = 2**30
Rows = Sequence[tuple[str, dict[str, Any]]]
"""Cases of a slice with their results, in order."""


def write_docs(results: Results, folder: Path) -> list[Path]:
    """Fill what there are results for; return the pages that changed. Raises SystemExit for a lost marker."""
    pages = {folder / name: (folder / name).read_text(encoding="utf-8") for name in PAGES}
    changed = dict(pages)
    for name, lines in _tables(results).items():
        start, end = f"<!-- gpu-day:{name} -->", f"<!-- /gpu-day:{name} -->"
        pattern = re.compile(f"{re.escape(start)}.*?{re.escape(end)}", re.DOTALL)
        holding = [page for page, text in changed.items() if pattern.search(text)]
        if len(holding) != 1:
            raise SystemExit(
                f"{start} has to be once in {', '.join(PAGES)}, not {len(holding)} times"
            )
        (page,) = holding
        block = "\n".join((start, *lines, end))
        changed[page] = pattern.sub(lambda _, block=block: block, changed[page])  # type: ignore[misc]  # a lambda's default
    found = [page for page, text in changed.items() if text != pages[page]]
    for page in found:
        page.write_text(changed[page], encoding="utf-8")
    return found


def _tables(results: Results) -> dict[str, list[str]]:
    """Return the lines of each table that there are results for, by the name of its markers."""
    makers: Mapping[str, tuple[str, Callable[[Rows], Iterator[str]]]] = {
        "ways": ("bits", _ways),
        "capped": ("capped", _capped),
        "ladder": ("ladder", _ladder),
        "pair": ("pair", _pair),
    }
    pieces = {piece.name: piece for piece in SLICES}
    found = {}
    for name, (slice_name, table) in makers.items():
        rows = list(results.rows(pieces[slice_name]))
        done = [(case, row["result"]) for case, row in rows if row["status"] == "done"]
        lines = list(table(done))
        if not lines:
            continue
        missing = [
            f"* {case}: {row['status']}, {_why(row)}"
            for case, row in rows
            if row["status"] != "done"
        ]
        found[name] = [
            *lines,
            *([""] if missing else []),
            *missing,
            "",
            _origin(results, pieces[slice_name]),
        ]
    measured = [verdict for verdict in verdicts(results) if verdict.gains]
    if measured:
        found["verdicts"] = [
            next(said(measured)),
            "",
            "| option | verdict | |",
            "|---|---|---|",
            *(
                f"| {verdict.option} | {verdict.word} | {described(verdict).removeprefix(': ')} |"
                for verdict in measured
            ),
        ]
    return found


def _why(row: Mapping[str, Any]) -> str:
    return str(row.get("error") or row.get("reason"))


def _origin(results: Results, piece: Slice) -> str:
    """Return what a table was measured with."""
    rows = [row for _, row in results.rows(piece)]
    commits = sorted({row["commit"] for row in rows})
    days = sorted({row["at"][:10] for row in rows})
    return (
        f"{results.origin.device}, torch {results.origin.torch}, commit {', '.join(commits)}, "
        f"{' to '.join(days[:: max(1, len(days) - 1)])}, "
        f"`python -m benchmarks.gpu_day --slice {piece.name}`."
    )


def _ways(rows: Rows) -> Iterator[str]:
    ways = [row for _, row in rows if "way" in row]
    if not ways:
        return
    yield "| case | way | against | promised, came | s a step | of that | GiB of tensors | of that | GiB held |"
    yield "|---|---|---|---|---:|---:|---:|---:|---:|"
    for row in ways:
        yield (
            f"| {row['case']} | {row['way']} | {row['against']} | {_came(row)} | {row['step_s']:.4f} "
            f"| {row['step_s'] / row['against_step_s']:.2f} | {_gib(row['peak_bytes'])} "
            f"| {_ratio(row['peak_bytes'], row['against_peak_bytes'])} | {_gib(row['reserved_bytes'])} |"
        )


def _came(row: Mapping[str, Any]) -> str:
    if row["same_bits"]:
        return "the same bits" if row["promise"] == "bits" else "near, the same bits"
    promised = "the same bits" if row["promise"] == "bits" else "near"
    if not row["finite"]:
        return f"{promised}, **not finite**"
    far = f"losses {row['loss_difference']:.1e}, updates {row['update_difference']:.1e} off"
    return f"{promised}, {far}" if row["holds"] else f"{promised}, **{far}**"


def _capped(rows: Rows) -> Iterator[str]:
    if not rows:
        return
    yield "| training | predicted GiB | measured | over | s a step | changed on the way | how |"
    yield "|---|---:|---:|---:|---:|---|---|"
    for case, row in rows:
        how = ", ".join(
            f"{key.partition('.')[2]} {row['settings'][key]}"
            for key in (
                "data.resolution",
                "memory.gradient_checkpointing",
                "memory.base_precision",
                "memory.streamed_blocks",
            )
            if key in row["settings"]
        )
        yield (
            f"| {case} | {_gib(row['predicted_bytes'])} | {_gib(row['measured_bytes'])} "
            f"| {row['over']:+.1%} | {row['step_s']:.3f} | {'; '.join(row['changes']) or 'nothing'} | {how} |"
        )


def _ladder(rows: Rows) -> Iterator[str]:
    if not rows:
        return
    yield "| case | loop | s a step | of bare | 95 % bound | GiB of tensors |"
    yield "|---|---|---:|---:|---:|---:|"
    for _, row in rows:
        for name, rung in row["rungs"].items():
            yield (
                f"| {row['case']} | {name} | {rung['median_s']:.4f} | {rung['ratio']:.3f} "
                f"| {rung['ratio_upper']:.3f} | {_gib(rung['peak_bytes'])} |"
            )
        for name, reason in row["left_out"].items():
            yield f"| {row['case']} | {name} | {reason} | | | |"


def _pair(rows: Rows) -> Iterator[str]:
    if not rows:
        return
    for case, row in rows:
        if "works" in row:
            word = "joins two processes on one GPU" if row["works"] else f"refuses: {row['said']}"
            yield f"* {case} {word}"
            continue
        same = (
            "the same bits"
            if row["same_bits"]
            else (f"losses {row['loss_difference']:.1e}, weights {row['weight_distance']:.1e} off")
        )
        yield (
            f"* {case}, {row['steps']} steps of two images, one a process: {same}; "
            f"{row['two_step_s']:.3f} s a step, one process {row['one_step_s']:.3f} s"
        )


def _gib(size_bytes: int | None) -> str:
    return "" if not size_bytes else f"{size_bytes / GIB:.2f}"


def _ratio(one: int | None, other: int | None) -> str:
    return f"{one / other:.2f}" if one and other else ""
