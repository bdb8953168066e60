"""What `bench` and `profile` say: as tables for people, as plain values for scripts.

Functions take finished results and return rich renderables; nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lora_trainer.bench import Row
from lora_trainer.planning.fitting import gib

if TYPE_CHECKING:  # it imports torch, these tables do not
    from lora_trainer.profiling import Profiled

_SHOWN_OPERATIONS = 10


def bench_table(rows: Sequence[Row]) -> RenderableType:
    """Return the table of a bench: one row per training, what failed last."""
    table = Table(box=None, pad_edge=False)
    table.add_column("setting", no_wrap=True)
    for title in (
        "s a step",
        "images/s",
        "against planned",
        "peak",
        "predicted",
        "cached images/s",
    ):
        table.add_column(title, justify="right")
    planned = rows[0].images_per_s if rows else None
    for row in rows:
        if row.failure is None:
            table.add_row(*map(Text, (row.name, *_figures(row, planned))))
    failures = [Text(f"{row.name}: {row.failure}", style="yellow") for row in rows if row.failure]
    return Group(table, *failures)


def _figures(row: Row, planned: float | None) -> tuple[str, ...]:
    speed = row.images_per_s
    return (
        "" if row.seconds_per_step is None else f"{row.seconds_per_step:.3f}",
        "" if speed is None else f"{speed:.2f}",
        f"{speed / planned:.2f}x" if speed and planned else "",
        "" if row.peak_bytes is None else gib(row.peak_bytes),
        "" if row.predicted_bytes is None else gib(row.predicted_bytes),
        "warm" if row.cached_images_per_s is None else f"{row.cached_images_per_s:.2f}",
    )


def profile_text(profiled: Profiled) -> RenderableType:
    """Return what a profile found: shares, the longest operations, where the trace is, the verdict."""
    shares = Table("where a step's time goes", "share", box=None, pad_edge=False)
    for cause, share in profiled.verdict.shares.items():
        shares.add_row(cause, Text(f"{100 * share:.1f} %", justify="right"))
    longest = sorted(profiled.measured.work_s.items(), key=lambda item: -item[1])
    operations = Table("operation", "ms a step", box=None, pad_edge=False)
    for name, seconds in longest[:_SHOWN_OPERATIONS]:
        operations.add_row(Text(name[:80]), Text(f"{1000 * seconds:.2f}", justify="right"))
    return Group(
        shares,
        "",
        operations,
        "",
        Text(f"{profiled.measured.wall_s:.3f} s a step over {profiled.steps} steps"),
        Text(f"trace: {profiled.trace} (tensorboard --logdir, or open it in Perfetto)"),
        Text(profiled.verdict.sentence, style="bold"),
    )
