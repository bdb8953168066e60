"""Which step of a run did best on the held-out images, as the report and the pages of the GUI say it.

Inputs: a RunHistory, the steps whose files are there. Outputs: losses by step, the step to take.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from lora_trainer.common.event_kinds import Finished
from lora_trainer.reporting.history import RunHistory


def held_out_losses(history: RunHistory) -> Mapping[int, float]:
    """Return the losses on the held-out images by step, without the base's."""
    rows = [row for row in history.validations if math.isfinite(row.loss)]
    return {row.step: row.loss for row in rows if row.step}


def lowest_of(steps: Iterable[int], losses: Mapping[int, float]) -> int | None:
    """Return the one of `steps` with the lowest loss, None where none of them was measured."""
    measured = [step for step in steps if step in losses]
    return min(measured, key=lambda step: losses[step], default=None)


def exported(history: RunHistory) -> Mapping[int, str]:
    """Return the names of the exported files by step, as the run wrote them; some may be gone."""
    named = [(saved.step, saved.export) for saved in history.saves]
    if isinstance(history.end, Finished):
        named.append((history.end.step, history.end.export))
    return {step: name for step, name in named if name is not None}


def best_saved(history: RunHistory) -> int | None:
    """Return the step with the lowest loss among those whose file is still in the folder, None for none."""
    kept = [
        step
        for step, name in exported(history).items()
        if Path(name).name == name and (history.folder / name).is_file()
    ]
    return lowest_of(kept, held_out_losses(history))
