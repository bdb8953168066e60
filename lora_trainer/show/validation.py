"""What `validate` says, for people: the score, every part with what it was made from, and remarks."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lora_trainer.validation.parts import WEIGHTS
from lora_trainer.validation.result import Validation


def validation_text(found: Validation) -> RenderableType:
    """Return the score and a table of its parts; what was left out says why."""
    score = found.score
    head = "no score: nothing could be measured" if score is None else f"score {score:.2f} of 1"
    if not found.complete:
        head += f", without {found.weight_left_out:.0%} of the parts' weight"
    table = Table("part", "weight", "value", "", box=None, pad_edge=False)
    for name, weight in WEIGHTS.items():
        part = found.parts.get(name)
        value = "" if part is None else f"{part:.2f}"
        why = f"left out: {found.left_out.get(name, '')}" if part is None else ""
        table.add_row(name, f"{weight:.2f}", value, Text(why, style="dim"))
    notes = [Text(note, style="dim") for note in found.notes]
    return Group(Text(f"{found.file}: {head}", style="bold"), table, *notes)
