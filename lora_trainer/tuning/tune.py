"""Tuning: trainings with proposed settings, one after another or one a GPU, until the hours are spent.

Input: a study as `begin.py` makes it. Outputs: the trials, ordinary run folders beside the study's. They are items of
the training queue, so they share its GPUs with whatever else is queued, go on when this program is killed and can be
resumed; another process goes on with the study.

Trials are compared by their gain on held-out images: the mean over timesteps of 1 - loss / loss of the base, at the
best validation of a run (docs/scores.md, `gain`). It does not depend on how a trial weighs or draws timesteps. One
that is below the median of the others at the same step is ended early.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from lora_trainer.common.errors import MachineError, RequestError
from lora_trainer.common.files import read_json_object
from lora_trainer.common.records import of_json
from lora_trainer.queue import commands
from lora_trainer.queue.commands import Item
from lora_trainer.reporting.control import Control
from lora_trainer.reporting.history import HistoryReader, RunHistory
from lora_trainer.reporting.score import VALIDATION_FILE, ScoreRecord, mean_gain
from lora_trainer.tuning.study import Study, TrialRow

POLL_S = 1.0
MOST_RESUMES = 3
# So many trials that fail before any has trained are a fault of the machine or of the request.
MOST_FAILURES = 3
BELOW_MEDIAN = "below the median of the others at this step"
NO_TIME = "the hours were spent"


def gains_of(history: RunHistory) -> dict[int, float]:
    """Return the gain of each validation of a run by step; nothing before the base was validated."""
    base = history.base_validation
    if base is None:
        return {}
    before = [loss for _, loss in base.by_timestep]
    return {
        row.step: mean_gain(before, [loss for _, loss in row.by_timestep])
        for row in history.validations
        if row.step and len(row.by_timestep) == len(before) > 0
    }


@dataclass(kw_only=True)
class Tuner:
    """Proposes, starts and follows the trials of a study on this machine."""

    study: Study
    runs: Path
    hours: float
    most_trials: int | None
    at_once: int
    """Trainings that this machine's GPUs take at the same time."""
    say: Callable[[str], None]
    now_s: Callable[[], float] = time.time
    """The time of the queue's items, a Unix time."""
    _readers: dict[int, HistoryReader] = field(default_factory=dict, init=False)
    _resumes: dict[int, int] = field(default_factory=dict, init=False)

    def tick(self) -> bool:
        """Follow the trials that run here and start others; return whether anything is left to do.

        Raises RequestError where the first trials all failed, MachineError if the disk refuses.
        """
        for row in self._running():
            self._follow(row)
        self._refuse_failures()
        running = self._running()
        while len(running) < self.at_once and self._may_start(running):
            row = self.study.ask()
            self._start(row)
            running.append(row)
        return bool(running)

    def stop(self) -> None:
        """Ask the trials of this machine to save and end; the study goes on with them."""
        for row in self._running():
            item = self._item(row)
            if item is not None and item.state == "waiting":
                commands.remove(self.runs, item.id)
            elif item is not None and item.run is not None and not item.has_ended:
                Control(self.runs / item.run).request("stop")

    def _running(self) -> list[TrialRow]:
        return [row for row in self.study.rows() if row.is_here and row.end is None]

    # ---- starting

    @property
    def spent_s(self) -> float:
        """Seconds of this machine's trials, those that run included, as if its GPUs were one."""
        here = [row for row in self.study.rows() if row.is_here]
        return math.fsum(self._seconds(row) for row in here) / self.at_once

    def _seconds(self, row: TrialRow) -> float:
        if row.end is not None:
            return row.seconds
        item = self._item(row)
        since_s = self.now_s() if item is None or item.ended_s is None else item.ended_s
        session_s = 0.0 if item is None or item.started_s is None else since_s - item.started_s
        history = self._history(row)
        # A run that was resumed took longer than its last session; starting takes time that no run counts.
        return max(session_s, 0.0 if history is None else history.seconds)

    def _may_start(self, running: list[TrialRow]) -> bool:
        rows = self.study.rows()
        if self.most_trials is not None and len(rows) >= self.most_trials:
            return False
        if not any(row.is_here for row in rows):
            return True
        whole_s = [row.seconds for row in rows if row.end == "complete"]
        expected_s = fmean(whole_s) if whole_s else self.study.record.run_s
        rest_s = len(running) * expected_s - math.fsum(map(self._seconds, running))
        return self.spent_s + (max(0.0, rest_s) + expected_s) / self.at_once <= self.hours * 3600

    def _start(self, row: TrialRow) -> None:
        record = self.study.record
        settings = {**record.settings, **record.fixed, **row.settings, "output.name": row.run}
        words = list(record.words)
        for key, value in settings.items():
            words += ["--set", f"{key}={json.dumps(value)}"]
        commands.add(self.runs, words, label=row.run, folder=Path(record.folder))
        chosen = ", ".join(f"{name} {choice}" for name, choice in row.choices.items())
        self.say(f"trial {row.number}: {chosen}")

    # ---- following

    def _item(self, row: TrialRow) -> Item | None:
        return next((each for each in commands.items(self.runs) if each.label == row.run), None)

    def _history(self, row: TrialRow) -> RunHistory | None:
        folder = self.runs / row.run
        if not (folder / "events.jsonl").exists():
            return None
        reader = self._readers.setdefault(row.number, HistoryReader(folder))
        return reader.read()

    def _follow(self, row: TrialRow) -> None:
        item = self._item(row)
        if (
            item is None
        ):  # this program was killed before it was added, or it was stopped while it waited
            self._start(row)
            return
        history = self._history(row)
        gains = {} if history is None else gains_of(history)
        seconds = self._seconds(row)
        if not item.has_ended:
            self._end_early(row, item, gains)
            return
        if item.state == "finished":
            self._take(row, gains, seconds)
        elif item.state == "stopped" and row.reason:
            self.study.report(row.number, gains)
            self.study.tell(row.number, "pruned", seconds=seconds, reason=row.reason)
            self.say(f"trial {row.number}: ended early, {row.reason}")
        elif item.state == "failed":
            self._fail(row, item.error, seconds)
        elif self._resumes.get(row.number, 0) < MOST_RESUMES:  # killed, or stopped with the study
            self._resumes[row.number] = self._resumes.get(row.number, 0) + 1
            commands.again(self.runs, item.id)
        else:
            self._fail(row, f"it was interrupted {MOST_RESUMES + 1} times", seconds)

    def _end_early(self, row: TrialRow, item: Item, gains: Mapping[int, float]) -> None:
        """Report what a trial has gained so far, and ask it to end where that is too little or too late."""
        is_behind = self.study.report(row.number, gains)
        if row.reason or item.run is None:
            return
        # The first one goes to its end: a study without a result is of use to nobody.
        has_result = any(other.end == "complete" for other in self.study.rows())
        if is_behind:
            reason = BELOW_MEDIAN
        elif has_result and self.spent_s > self.hours * 3600:
            reason = NO_TIME
        else:
            return
        self.study.give_reason(row.number, reason)
        Control(self.runs / item.run).request("stop")

    def _take(self, row: TrialRow, gains: Mapping[int, float], seconds: float) -> None:
        """Note the best gain of a finished trial, unless its weights are of no use."""
        file = self.runs / row.run / VALIDATION_FILE
        parts = of_json(ScoreRecord, read_json_object(file)).parts if file.exists() else {}
        finite = {step: gain for step, gain in gains.items() if math.isfinite(gain)}
        if not finite or parts.get("weights") == 0:
            why = "its weights are of no use" if finite else "it was never validated"
            self._fail(row, why, seconds)
            return
        self.study.report(row.number, gains)
        best = max(finite, key=lambda step: finite[step])
        self.study.tell(row.number, "complete", seconds=seconds, gain=finite[best], best_step=best)
        self.say(f"trial {row.number}: gain {finite[best]:.2%} at step {best}")

    def _fail(self, row: TrialRow, reason: str, seconds: float) -> None:
        self.study.tell(row.number, "failed", seconds=seconds, reason=reason)
        self.say(f"trial {row.number}: failed: {reason}")

    def _refuse_failures(self) -> None:
        rows = self.study.rows()
        failed = [row for row in rows if row.end == "failed"]
        if len(failed) >= MOST_FAILURES and not any(row.end == "complete" for row in rows):
            raise RequestError(
                f"{len(failed)} trials failed and none finished: {failed[-1].reason}",
                fix=f"see the run {failed[-1].run}, or train once: lora-train DATASET",
            )


def tune(
    tuner: Tuner,
    *,
    ensure_worker: Callable[[Path], None],
    stop: Callable[[], object],
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Tune until the budget is spent, or `stop` returns a number; return whether it came to its end.

    Raises RequestError where the first trials all failed. A disk that is full for a while is waited for.
    """
    complaint = ""
    while stop() is None:
        try:
            if not tuner.tick():
                return True
            ensure_worker(tuner.runs)
            complaint = ""
        except MachineError as error:
            if str(error) != complaint:
                tuner.say(complaint := str(error))
        sleep(POLL_S)
    tuner.stop()
    return False
