"""What a run's page says that the next training could do better, with pictures and buttons.

Input: the history of a run. Output: what coach.html shows: the advice of the trainer (lora_trainer/reporting/coach.py),
pictures of what it is about, and where its button leads.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

from lora_trainer.common.event_kinds import Finished
from lora_trainer.reporting.charts import Html
from lora_trainer.reporting.coach import Advice, coach
from lora_trainer.reporting.history import RunHistory

from .. import command_lines
from ..media import run_url, thumb_url
from ..server.templates import render
from ..server.translation import Words

# As many pictures as stand beside a sentence.
_MOST_PICTURES = 4


@dataclass(frozen=True, kw_only=True)
class Row:
    """One advice; `again` and `dataset` are addresses of buttons, empty without them."""

    what: str
    advice: str
    label: str
    again: str
    dataset: str
    many: bool
    pictures: tuple[str, ...]


def coach_key(history: RunHistory) -> object:
    """Return what the advice follows from, without looking at a picture."""
    if not isinstance(history.end, Finished):
        return None
    return (history.end, len(history.samples), len(history.images), len(history.validations))


def coach_html(folder: Path, history: RunHistory, _: Words) -> Html:
    """Return the advice as markup; empty for a run that has not finished."""
    dataset = command_lines.recorded_dataset(folder)
    rows = [_row(each, folder.name, dataset) for each in coach(history)]
    return render("run/coach.html", _, rows=rows)


def _row(found: Advice, run: str, dataset: Path | None) -> Row:
    pictures = [run_url(run, file) for file in found.samples]
    address = ""
    if dataset is not None and found.images:
        pictures += [thumb_url(dataset, name) for name in found.images]
        named = {"find": found.images[0]} if len(found.images) == 1 else {}
        address = "/datasets?" + urlencode({"folder": dataset} | named)
    return Row(
        what=found.what,
        advice=found.advice,
        label=found.label,
        again="/train?" + urlencode({"again": run, "advice": found.kind}) if found.changes else "",
        dataset=address,
        many=len(found.images) > 1,
        pictures=tuple(pictures[:_MOST_PICTURES]),
    )
