"""The head of a run's page: its sentence, how far it is, why it ended; the figures below it.

Inputs: a look at the run and its RunHistory. Output: what head.html and figures.html show. Figures that were not
recorded are left out.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

from lora_trainer.common.wording import (
    against_base,
    bytes_text,
    duration_text,
    loss_text,
    step_seconds_text,
)
from lora_trainer.config.inputs import MINIATURES
from lora_trainer.dataset.slider_file import is_slider_file
from lora_trainer.hardware.nvml import CardState
from lora_trainer.reporting.best_step import AS_GOOD, held_out, judgement
from lora_trainer.reporting.charts import Html
from lora_trainer.reporting.history import RunHistory
from lora_trainer.reporting.status import FIRST_STEPS, RunStatus

from .. import plan_view
from ..markup import inline, inline_sentence
from ..media import run_url
from ..run_best import exports, losses, read_best, recommended, standing_of
from ..run_mend import Mend, mend_of
from ..run_state import (
    FINISHING,
    PACE_STEPS,
    Look,
    Stage,
    explained,
    left_text,
    remarks,
    sentence,
    starting,
    step_s,
)
from ..server.language import ENGLISH
from ..server.templates import render
from ..server.translation import Words, words

_ENGLISH = words(ENGLISH)
_LOSS_STEPS = 20
# A training is called longer than planned from so many times the longest time of the plan on.
_LONGER = 1.3

Figure = tuple[str, str, str]


@dataclass(frozen=True, kw_only=True)
class Head:
    """What head.html shows of a run. Texts are English, as a run says them; addresses lead to pages and files."""

    state: str
    said: str
    fraction: float
    stages: tuple[Stage, ...]
    """Up to the first step; none from then on."""
    lora: Take | None
    ended: tuple[str, str] | None
    """Why it ended before its end, and what to do about it."""
    again: str
    """Trains again with changes, beside `mended`; empty without that."""
    mended: tuple[Mend, str] | None
    """What trains again with the change that the end advises."""
    remarks: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Take:
    """The LoRA of a finished run to take."""

    ref: str
    step: str
    is_best: bool
    file: str
    learned: str
    """How well it learned, empty where that was not measured."""
    best_step: str
    others: tuple[tuple[str, str], ...]
    """Step and address of the other files."""
    is_try_out: bool
    trigger: str
    page: str
    again: str


def _is_slider(history: RunHistory) -> bool:
    return is_slider_file(Path(history.run.dataset.name))


def head(seen: Look, history: RunHistory) -> Head:
    """Return the head of the page of a run."""
    status, run = seen.status, seen.folder.name
    mend = mend_of(seen, history.run) if _ends_early(seen) else None
    return Head(
        state=status.state,
        said=sentence(seen, history),
        fraction=status.step / status.steps if status.steps else 0.0,
        stages=starting(seen, is_slider=_is_slider(history)),
        lora=take(seen, history),
        ended=_ended(seen, history),
        again="" if mend is None else _again(run),
        mended=None if mend is None else (mend, _again(run, mended="1")),
        remarks=tuple(remarks(seen, history)),
    )


@dataclass(frozen=True, kw_only=True)
class TakeSoFar:
    """What take.html shows beside the buttons: step, file and page of the LoRA so far, empty without one.

    `again` trains again with changes, for a run that ended early and whose head does not offer that.
    """

    trains: bool
    step: str = ""
    is_best: bool = False
    """It did best of several that were saved."""
    file: str = ""
    page: str = ""
    again: str = ""


def take_so_far(seen: Look, history: RunHistory) -> TakeSoFar:
    """Return the LoRA of a run that has not finished: the newest while it trains, else the one to take."""
    run, trains = seen.folder.name, seen.status.state == "running"
    if seen.status.state == "finished":
        return TakeSoFar(trains=trains)
    offers_again = _ends_early(seen) and mend_of(seen, history.run) is None
    again = _again(run) if offers_again else ""
    files = exports(seen.folder, history)
    step, file = max(files.items(), default=(0, ""))
    is_best = False
    if not trains and (best := recommended(files, losses(history), read_best(seen.folder))):
        step, file, is_best = best.step, best.file, best.is_found and len(files) > 1
    if not file:
        return TakeSoFar(trains=trains, again=again)
    return TakeSoFar(
        trains=trains,
        step=f"{step:,}",
        is_best=is_best,
        file=run_url(run, file),
        page="/library?" + urlencode({"file": f"{run}/{file}"}),
        again=again,
    )


def _ends_early(seen: Look) -> bool:
    return seen.status.state in {"failed", "stopped"} and not seen.goes_on_soon


def head_html(shown: Head, _: Words) -> Html:
    """Return the head as markup."""
    return render("run/head.html", _, head=shown, inline=inline, inline_sentence=inline_sentence)


def cards_of(status: RunStatus, cards: Sequence[CardState]) -> Sequence[CardState]:
    """Return the GPUs that a run trains on; all where the driver does not tell who uses one."""
    return [card for card in cards if status.pid in card.users] or cards


def take(seen: Look, history: RunHistory) -> Take | None:
    """Return the LoRA of a finished run to take, how well it learned, and which step did best."""
    if seen.status.state != "finished":
        return None
    files = exports(seen.folder, history)
    measured = losses(history)
    best = recommended(files, measured, read_best(seen.folder))
    if best is None:
        return None
    run, ref = seen.folder.name, f"{seen.folder.name}/{best.file}"
    others = (step for step in sorted(files) if step != best.step)
    return Take(
        ref=ref,
        step=f"{best.step:,}",
        is_best=best.is_found,
        file=run_url(run, best.file),
        learned=judgement(standing_of(seen.folder, history), held_out=held_out(history))
        if best.step in measured
        else "",
        best_step=_best_step(history, files),
        others=tuple((f"{step:,}", run_url(run, files[step])) for step in others),
        is_try_out=history.run.base.source in MINIATURES,
        trigger=str(history.run.settings.get("data.trigger") or ""),
        page="/library?" + urlencode({"file": ref}),
        again=_again(run),
    )


def _again(run: str, **more: str) -> str:
    return "/train?" + urlencode({"again": run, **more})


def _best_step(history: RunHistory, files: Mapping[int, str]) -> str:
    """Return which step did best on the held-out images, and where to look at it; `files` are the LoRAs by step."""
    measured = losses(history)
    if not measured:
        return "Compare the samples below: an earlier step may look better than the last one."
    kept = {step: loss for step, loss in measured.items() if step in files}
    if not kept:
        return "No LoRA file is left of a step that was measured; compare the samples below."
    best = min(kept, key=lambda step: kept[step])
    equal = [f"{step:,}" for step, loss in kept.items() if loss <= AS_GOOD * kept[best]]
    said = (
        f"Step {best:,} did best on the images kept aside: {_samples_of(best, history)}."
        if len(equal) == 1
        else f"Steps {', '.join(equal)} are practically equal on the images kept aside: choose by eye."
    )
    lowest = min(measured, key=lambda step: measured[step])
    if kept[best] <= AS_GOOD * measured[lowest]:
        return said
    return (
        f"{said} Around step {lowest:,} the loss was lower ({loss_text(measured[lowest])}), but "
        "no LoRA file of it was kept; the setting Keep best keeps it."
    )


def _samples_of(step: int, history: RunHistory) -> str:
    """Return where to look at a step: its own samples, or those of the step nearest to it."""
    steps = {image.step for image in history.samples}
    if not steps or step in steps:
        return "compare its samples below"
    nearest = min(steps, key=lambda sampled: abs(sampled - step))
    return f"the nearest samples below are of step {nearest:,}"


def _ended(seen: Look, history: RunHistory) -> tuple[str, str] | None:
    """Return why a run ended before its end and what to do about it, without their dots."""
    told = explained(seen, history)
    if told is None:
        return None
    what, fix = (words.rstrip(". ") for words in told)
    return what, fix


def figures(seen: Look, history: RunHistory, *, best_step: int = 0) -> Iterator[Figure]:
    """Yield name, value and note of what figures.html shows; `best_step` is that of the LoRA to take."""
    status = seen.status
    if status.steps:
        yield "Steps", f"{status.step:,} of {status.steps:,}", f"{_percent(seen)} %"
    if status.state == "running" and not seen.stopping:
        left = left_text(status)
        planned = plan_view.from_now_s(history.run.plan.time)
        if planned is not None and not left and not status.steps_here:
            yield "Takes", plan_view.span(planned, _ENGLISH), status.left_from
        elif left:
            yield "Time left", left, "" if left == FINISHING else _told_from(seen, history)
    elif history.seconds:
        yield "Took", duration_text(history.seconds), ""
    pace_s = step_s(history)
    if math.isfinite(pace_s):
        count = min(PACE_STEPS, len(history.steps))
        yield "A step takes", step_seconds_text(pace_s), _of_last(count, "median of the last {}")
    yield from _losses(history, best_step)
    found = memory(history) if status.state != "running" else None
    if found is not None:
        predicted = found.predicted_bytes
        note = f"at most; predicted {bytes_text(predicted)}" if predicted > 0 else "at most"
        yield "Memory", bytes_text(found.highest_bytes), note


def _told_from(seen: Look, history: RunHistory) -> str:
    """Return what the time left is told from, and whether it all takes longer than the plan had said."""
    status, planned = seen.status, history.run.plan.time
    from_now_s = plan_view.from_now_s(planned)
    if from_now_s is None or status.steps_here < FIRST_STEPS:
        return status.left_from
    is_longer = history.seconds + status.left_s > _LONGER * from_now_s[1]
    return f"{status.left_from}; longer than planned" if is_longer else status.left_from


def _percent(seen: Look) -> int:
    """Return how much is done, rounded; 100 is for what has ended."""
    share = round(100 * seen.status.step / seen.status.steps)
    return min(share, 99) if seen.status.step < seen.status.steps else share


def _of_last(count: int, several: str) -> str:
    return "of the last step" if count == 1 else several.format(count)


def _losses(history: RunHistory, best_step: int) -> Iterator[Figure]:
    recent = [row.loss for row in history.steps[-_LOSS_STEPS:] if math.isfinite(row.loss)]
    if recent:
        yield (
            "Loss",
            loss_text(statistics.fmean(recent)),
            _of_last(len(recent), "mean of the last {} steps"),
        )
    base, shown = history.base_validation, history.last_validation
    if history.end is not None:  # of the LoRA that the page offers, where it was measured
        shown = next((row for row in history.validations if row.step == best_step > 0), shown)
    if shown is not None:
        against = against_base(shown.loss, base.loss) if base is not None else ""
        yield "Validation loss", loss_text(shown.loss), f"step {shown.step:,}: {against}"


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes that a run takes, NaN for what is not known."""

    now_bytes: float
    highest_bytes: float
    predicted_bytes: float


def memory(history: RunHistory) -> Memory | None:
    """Return what the run takes of the card, of the machine where it trains on the processor.

    The highest of a card counts what the libraries hold there too, as the prediction does.
    """
    if not history.steps:
        return None
    planned = history.run.plan.memory
    last = history.steps[-1]
    reserved_bytes = _highest(row.vram_reserved_bytes for row in history.steps)
    on_card = reserved_bytes > 0
    highest = (
        reserved_bytes + planned.runtime_bytes
        if on_card
        else _highest(row.host_bytes for row in history.steps)
    )
    found = Memory(
        now_bytes=last.vram_used_bytes if on_card else last.host_bytes,
        highest_bytes=highest,
        predicted_bytes=planned.peak_bytes,
    )
    return found if found.highest_bytes > 0 else None


def _highest(values: Iterable[float]) -> float:
    return max((value for value in values if value > 0), default=0.0)


def _known(value: float) -> float:
    return value if math.isfinite(value) else 0.0
