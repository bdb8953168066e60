"""Tables of docs/ made from the rows of config/: error functions and optimizers.

`python -m scripts.make` writes them.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

from lora_trainer.config.losses import LOSSES
from lora_trainer.config.optimizers import OPTIMIZERS
from lora_trainer.planning.optimizer_facts import state_bytes
from scripts.marked_tables import with_table

DOCS = Path(__file__).resolve().parents[1] / "docs"
OBJECTIVE_PAGE = DOCS / "objective.md"
OPTIMIZERS_PAGE = DOCS / "optimizers.md"
MATRIX = (1280, 16)
"""A factor of an adapter, of which the states are counted: 16 ranks of a layer that is 1,280 wide."""
NUMBER_BYTES = 4


def loss_table() -> str:
    """Return the table of error functions as Markdown."""
    lines = ["| `objective.loss` | error of an element | as in |", "|---|---|---|"]
    lines += [f"| `{name}` | {row.written} | {row.also_in} |" for name, row in LOSSES.items()]
    return "\n".join([*lines, ""])


def optimizer_table() -> str:
    """Return the table of optimizers as Markdown."""
    lines = [
        "| name | state, fp32 numbers per weight | learning rate over AdamW's | library | published |",
        "|---|---:|---:|---|---|",
    ]
    for name, row in OPTIMIZERS.items():
        per_weight = sum(state_bytes({MATRIX: 1}, name)) / NUMBER_BYTES / (MATRIX[0] * MATRIX[1])
        factor = Fraction(row.rate_factor).limit_denominator(100)
        rate = f"{row.rate:g} whatever AdamW's is" if row.rate is not None else factor
        library = row.package or "torch"
        lines.append(f"| `{name}` | {per_weight:.2g} | {rate} | {library} | {row.published} |")
    return "\n".join([*lines, ""])


def with_loss_table(page: str) -> str:
    """Return the text of docs/objective.md with a new table of error functions between its two markers."""
    return with_table(page, "losses", loss_table())


def with_optimizer_table(page: str) -> str:
    """Return the text of docs/optimizers.md with a new table between its two markers."""
    return with_table(page, "optimizers", optimizer_table())
