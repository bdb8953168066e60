"""Tables for people: cells are shown as they are, whatever brackets and colons they hold."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from lora_trainer.data.findings import Finding

STYLES = {"note": "dim", "warning": "yellow", "error": "bold red"}


def add_row(table: Table, *cells: str | Text, style: str = "") -> None:
    """Add cells as they are: brackets in a name or caption are no markup, `:cat:` is no picture."""
    texts = [cell if isinstance(cell, Text) else Text(cell) for cell in cells]
    table.add_row(*texts, style=style or None)


def key_table(title: str) -> Table:
    table = Table(title=title or None, box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def finding_line(finding: Finding) -> str:
    where = f"{finding.file}: " if finding.file else ""
    return f"{finding.severity}: {where}{finding.what}. {finding.advice}"
