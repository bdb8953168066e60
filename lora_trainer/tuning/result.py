"""What a study found: the settings of its best trial as a file, and a page with the curves of all trials.

Input: a study. Outputs: best.json, a settings file, and tune.html, both replaced whole each time a trial has ended.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_trainer.common.files import json_bytes, write_atomic
from lora_trainer.config.layers import read_settings_file
from lora_trainer.reporting.charts import TEMPLATES, Chart, ChartLine, draw
from lora_trainer.tuning.study import Study, TrialRow

BEST_FILE, PAGE_FILE = "best.json", "tune.html"
_PAGE = Path(__file__).with_name("tune.html")


@dataclass(frozen=True, kw_only=True)
class Result:
    """A study so far."""

    folder: Path
    rows: Sequence[TrialRow]

    @property
    def best(self) -> TrialRow | None:
        """The complete trial with the largest gain; of equal ones the first."""
        complete = [row for row in self.rows if row.gain is not None]
        return max(complete, key=lambda row: row.gain or 0.0, default=None)

    @property
    def planned(self) -> TrialRow | None:
        """The first trial, which has the planned settings."""
        first = self.rows[0] if self.rows else None
        return first if first is not None and first.gain is not None else None

    @property
    def sentence(self) -> str:
        """What came out of it, in one sentence."""
        best, planned = self.best, self.planned
        if best is None or best.gain is None:
            return "No trial has finished."
        if planned is None or planned.gain is None:
            return f"Trial {best.number} of {len(self.rows)} is the best, with a gain of {best.gain:.2%}."
        if best.number == planned.number:
            return (
                f"The planned settings are the best of {len(self.rows)} trials, "
                f"with a gain of {best.gain:.2%}."
            )
        return (
            f"Trial {best.number} of {len(self.rows)} is the best, with a gain of {best.gain:.2%}; "
            f"the planned settings have {planned.gain:.2%}."
        )

    def to_json(self) -> dict[str, Any]:
        """Return the study as plain values."""
        best = self.best
        return {
            "folder": str(self.folder),
            "best": None if best is None else best.number,
            "settings": None if best is None else str(self.folder / BEST_FILE),
            "trials": [
                {
                    "number": row.number,
                    "settings": dict(row.settings),
                    "run": row.run,
                    "end": row.end,
                    "gain": row.gain,
                    "best_step": row.best_step,
                    "gains": {str(step): gain for step, gain in row.gains.items()},
                    "seconds": row.seconds,
                    "reason": row.reason,
                }
                for row in self.rows
            ],
        }


def write_result(study: Study, folder: Path) -> Result:
    """Write the page, and the settings once a trial has finished; raises MachineError."""
    result = Result(folder=folder, rows=study.rows())
    if result.best is not None:
        write_atomic(folder / BEST_FILE, json_bytes(_whole_settings(study, result.best.settings)))
    write_atomic(folder / PAGE_FILE, _page(study, result).encode(), durable=False)
    return result


def _whole_settings(study: Study, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a request with those that were found: the file stands for its settings file."""
    record = study.record
    words = list(record.words)
    file = Path(record.folder) / words[words.index("--config") + 1] if "--config" in words else None
    before = {} if file is None else dict(read_settings_file(file).values)
    typed = {key: value for key, value in record.settings.items() if key != "output.folder"}
    return {**before, **typed, **found}


def _command(study: Study, settings_file: Path) -> str:
    """Return the command that trains with what was found, with the preset and priority of the trials."""
    words = list(study.record.words)
    if "--config" in words:  # which the new file holds too
        at = words.index("--config")
        del words[at : at + 2]
    return shlex.join(["lora-train", *words, "--config", str(settings_file)])


def _page(study: Study, result: Result) -> str:
    best, planned = result.best, result.planned
    lines = [
        ChartLine(
            label=_label(row, best=best, planned=planned),
            css=_css(row, best=best, planned=planned),
            points=[(step, 100 * gain) for step, gain in row.gains.items()],
        )
        for row in result.rows
        if row.gains
    ]
    # The last line is drawn above the others.
    lines.sort(key=lambda line: ("other", "planned", "best").index(line.css))
    chart = draw(Chart(title="Gain on held-out images, %", height_px=330, lines=lines))
    page = TEMPLATES.from_string(_PAGE.read_text(encoding="utf-8"))
    return page.render(
        name=study.record.name,
        result=result,
        chart=chart,
        keys=[dimension.name for dimension in study.record.space],
        command=_command(study, result.folder / BEST_FILE),
    )


def _css(row: TrialRow, *, best: TrialRow | None, planned: TrialRow | None) -> str:
    if best is not None and row.number == best.number:
        return "best"
    return "planned" if planned is not None and row.number == planned.number else "other"


def _label(row: TrialRow, *, best: TrialRow | None, planned: TrialRow | None) -> str:
    css = _css(row, best=best, planned=planned)
    return {"best": f"the best, trial {row.number}", "planned": "as planned", "other": ""}[css]
