"""Which step of a run did best on the held-out images and how well it learned, as the report and the GUI say it.

Inputs: a RunHistory, the steps whose files are there. Outputs: losses by step, the step to take, a sentence.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lora_trainer.common.event_kinds import Finished
from lora_trainer.common.wording import better_than_base
from lora_trainer.reporting.history import RunHistory

# How much below the base's a loss is, as a fraction, that somebody may expect to see.
_LEARNED_WELL, _LEARNED = 0.1, 0.02
# Fewer held-out images say how much was learned, and not that it looks well.
_FEW_IMAGES = 4
# Losses that differ by less are within the noise of a few held-out images.
AS_GOOD = 1.02


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How good a LoRA is: its loss on the held-out images, and the base's."""

    step: int
    loss: float
    base_loss: float

    @property
    def gain(self) -> float:
        """How far the loss is below the base's, as a fraction; NaN where the base has none."""
        return 1 - self.loss / self.base_loss if self.base_loss > 0 else math.nan

    @property
    def is_clear(self) -> bool:
        """Whether the two losses differ by more than those of a few held-out images do by themselves."""
        return abs(self.gain) >= AS_GOOD - 1

    def is_sure(self, held_out: int) -> bool:
        """Whether it learned well, and enough images say so: else the figure alone does not praise it."""
        return self.gain >= _LEARNED_WELL and held_out >= _FEW_IMAGES

    @property
    def said(self) -> str:
        """The one figure that all pages show: `69 % better than the base`."""
        return better_than_base(self.loss, self.base_loss)


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


def standing_of_saved(history: RunHistory) -> Standing | None:
    """Return how good the step of `best_saved` is, the last measured one where no file is left; None without any."""
    measured, base = held_out_losses(history), history.base_validation
    step = best_saved(history) or max(measured, default=None)
    if step is None or base is None or not math.isfinite(base.loss):
        return None
    return Standing(step=step, loss=measured[step], base_loss=base.loss)


def held_out(history: RunHistory) -> int:
    """Return how many images were kept aside."""
    return len(history.run.dataset.held_out)


def judgement(good: Standing | None, *, held_out: int) -> str:
    """Return in a plain sentence how well a run learned; `held_out` is the number of images that say so."""
    if good is None or math.isnan(good.gain):
        return "Nothing was kept aside to measure how well it learned: look at the samples."
    if good.gain >= _LEARNED and held_out < _FEW_IMAGES:
        return f"It learned: on the few images kept aside, it is {good.said}."
    if good.gain >= _LEARNED_WELL:
        return f"It learned well: on images it never saw, it is {good.said}."
    if good.gain >= _LEARNED:
        return f"It learned: on images it never saw, it is {good.said}."
    if good.gain > -_LEARNED:
        return "It changed little: on images it never saw, it is about as good as the base."
    return (
        f"It learned its images by heart: on images it never saw, it is {good.said}. "
        "Train it shorter, or with more images."
    )
