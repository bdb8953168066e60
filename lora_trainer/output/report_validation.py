"""The report's section on what the adapter is worth, from RUN/validation.json.

Input: a run folder; output: a table of parts, or None where nothing was measured or the file cannot be
read. docs/scores.md has the formulas.
"""

from __future__ import annotations

import math
from pathlib import Path

from lora_trainer.errors import RequestError
from lora_trainer.files import read_json_object
from lora_trainer.output.history import mapping, number, sequence
from lora_trainer.output.markup import Html, join, tag
from lora_trainer.validation.parts import WEIGHTS
from lora_trainer.validation.result import VALIDATION_FILE


def section(folder: Path) -> Html | None:
    """Return the score and its parts."""
    try:
        row = read_json_object(folder / VALIDATION_FILE)
    except (OSError, RequestError):
        return None
    parts, left_out = mapping(row, "parts"), mapping(row, "left_out")
    body = [
        tag(
            "tr",
            tag("td", name),
            tag("td", f"{weight:.2f}"),
            tag("td", f"{value:.2f}" if math.isfinite(value := number(parts, name)) else ""),
            tag("td", str(left_out.get(name, ""))),
        )
        for name, weight in WEIGHTS.items()
    ]
    head = tag(
        "tr", *(tag("th", title) for title in ("part", "weight", "value", "left out because"))
    )
    remarks = [tag("p", str(note)) for note in sequence(row, "notes")]
    return join((tag("p", _verdict(row)), tag("table", head, *body), *remarks))


def _verdict(row: dict[str, object]) -> str:
    score, missing = number(row, "score"), number(row, "weight_left_out")
    name = str(row.get("file", "the adapter"))
    if not math.isfinite(score):
        return f"{name}: nothing could be measured"
    if row.get("complete") is True:
        return f"{name}: score {score:.2f} of 1"
    return f"{name}: {score:.2f} of 1 from its parts so far, without {missing:.0%} of their weight"
