"""A study: its trials and what they gave, in Optuna's storage, and study.json with what it was begun with.

The storage is a journal beside study.json, or any that Optuna knows by its URL, which several machines may share. It
may be opened again after a kill at any time: a trial that had not ended is found with the name of its run. What the
sampler proposes depends on the seed, the number of the trial and the trials that have ended, not on who asks.
"""

from __future__ import annotations

import socket
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import TypeAdapter, ValidationError

from lora_trainer.common.errors import MachineError, RequestError, first_line
from lora_trainer.common.files import json_bytes, read_regular, write_atomic
from lora_trainer.tuning.space import Choices, Dimension, Span

if TYPE_CHECKING:  # takes a third of a second
    import optuna
    from optuna.trial import FrozenTrial, Trial

STUDY_FILE = "study.json"
JOURNAL_FILE = "trials.journal"
Sampler = Literal["tpe", "random"]
End = Literal["complete", "pruned", "failed"]
# Trials that are drawn at random before the sampler learns from them, and before one may be ended early.
FIRST_AT_RANDOM = 5
NEVER_PRUNED = 4
# What `Trial` has of ours, beside its parameters.
_MACHINE, _RUN, _REASON, _SECONDS, _BEST_STEP = "machine", "run", "reason", "seconds", "best_step"


@dataclass(frozen=True, kw_only=True)
class StudyRecord:
    """study.json."""

    words: Sequence[str]
    """The words of each training's command, before its settings."""
    settings: Mapping[str, Any]
    """Settings of the request, by key."""
    folder: str
    """Where relative paths in them start."""
    name: str
    """Of the study; the runs have it with a number behind it."""
    seed: int
    sampler: Sampler
    space: tuple[Dimension, ...]
    planned: Mapping[str, Any]
    """The planned value of each setting that is varied."""
    fixed: Mapping[str, Any]
    """Settings of every trial, so that they can be compared."""
    steps: int
    """Steps of the plan."""
    run_s: float
    """The predicted time of a training."""


_RECORD = TypeAdapter(StudyRecord)


def read_record(folder: Path) -> StudyRecord:
    """Return study.json of a study's folder; raises RequestError if it is missing or damaged."""
    try:
        return _RECORD.validate_json(read_regular(folder / STUDY_FILE))
    except (OSError, ValidationError) as error:
        raise RequestError(
            f"{folder} holds no study that can be continued: {first_line(error)}",
            fix="start one without --resume",
        ) from None


def write_record(folder: Path, record: StudyRecord) -> None:
    """Write study.json; raises MachineError."""
    write_atomic(folder / STUDY_FILE, json_bytes(asdict(record)))


@dataclass(frozen=True, kw_only=True)
class TrialRow:
    """A trial as people and programs see it."""

    number: int
    settings: Mapping[str, Any]
    """Those that are varied."""
    choices: Mapping[str, str]
    """What was chosen of each dimension, for people."""
    run: str
    """The name of its run; empty where another machine trains it and has not said."""
    end: End | None
    """None while it goes on."""
    gain: float | None
    """Of a complete one; see `tune.gain_of`."""
    best_step: int | None
    """The step of that gain."""
    gains: Mapping[int, float]
    """By step, of each validation so far."""
    seconds: float
    """Of its training; 0 before it ended."""
    reason: str
    """Why it was ended early, or failed."""
    is_here: bool
    """Whether this machine trains it."""


def machine_name(runs: Path) -> str:
    """Return what tells this machine and runs folder from others that share a storage."""
    return f"{socket.gethostname()}:{runs.resolve()}"


class Study:
    """The study of a folder, open."""

    def __init__(self, record: StudyRecord, folder: Path, *, storage: str | None) -> None:
        """Open a study or begin it; raises RequestError for a storage that cannot be used."""
        self.record = record
        self._machine = machine_name(folder.parent)
        optuna = _optuna()
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        try:
            opened = _journal(folder) if storage is None else storage
            self._study = optuna.create_study(
                study_name=record.name,
                storage=opened,
                direction="maximize",
                load_if_exists=True,
                pruner=optuna.pruners.MedianPruner(
                    n_startup_trials=NEVER_PRUNED, n_warmup_steps=record.steps // 4
                ),
            )
        except Exception as error:  # a storage is any database, each with errors of its own
            raise RequestError(
                f"the storage of the study cannot be opened: {first_line(error)}",
                fix="give a URL that Optuna knows, such as sqlite:///study.db, or leave --storage out",
            ) from error
        space = [asdict(dimension) for dimension in record.space]
        before = self._study.user_attrs.get("space")
        if before is None:
            self._study.enqueue_trial(self._nearest_to_plan(), skip_if_exists=True)
            self._study.set_user_attr("space", space)
        elif before != space:
            raise RequestError(
                f"the study {record.name} in that storage varies other settings, or in other ranges",
                fix="give the same settings and --vary on every machine, or another --name",
            )

    def _nearest_to_plan(self) -> dict[str, Any]:
        """Return the parameters of the first trial: the plan, as far as it lies in the space."""
        values: dict[str, Any] = {}
        for dimension in self.record.space:
            if isinstance(dimension, Span):
                planned = float(self.record.planned[dimension.name])
                values[dimension.name] = min(max(planned, dimension.low), dimension.high)
                continue
            same = (
                label
                for label, settings in dimension.by_label.items()
                if all(self.record.planned.get(key) == value for key, value in settings.items())
            )
            values[dimension.name] = next(same, next(iter(dimension.by_label)))
        return values

    def ask(self) -> TrialRow:
        """Return a new trial of this machine with proposed settings; its run has no name yet to others."""
        optuna = _optuna()
        count = len(self._study.get_trials(deepcopy=False))
        seed = self.record.seed + count
        self._study.sampler = (
            optuna.samplers.RandomSampler(seed=seed)
            if self.record.sampler == "random"
            else optuna.samplers.TPESampler(
                seed=seed, n_startup_trials=FIRST_AT_RANDOM, multivariate=True
            )
        )
        trial = self._study.ask()
        trial.set_user_attr(_MACHINE, self._machine)
        trial.set_user_attr(_RUN, f"{self.record.name}-trial-{trial.number}")
        for dimension in self.record.space:
            if isinstance(dimension, Span):
                trial.suggest_float(dimension.name, dimension.low, dimension.high, log=True)
            else:
                trial.suggest_categorical(dimension.name, list(dimension.by_label))
        return self.row(trial.number)

    def report(self, number: int, gains: Mapping[int, float]) -> bool:
        """Take the gains of a trial by step; return whether it should end early, being below the median."""
        known = self._frozen(number).intermediate_values
        trial = self._open_trial(number)
        for step, gain in sorted(gains.items()):
            if step not in known:
                trial.report(gain, step)
        return bool(gains) and trial.should_prune()

    def give_reason(self, number: int, reason: str) -> None:
        """Note why a trial is ended early, before it is asked to."""
        self._open_trial(number).set_user_attr(_REASON, reason)

    def tell(
        self,
        number: int,
        end: End,
        *,
        seconds: float,
        gain: float | None = None,
        best_step: int | None = None,
        reason: str = "",
    ) -> None:
        """Note how a trial ended; a gain is of a complete one."""
        states = _optuna().trial.TrialState
        trial = self._open_trial(number)
        trial.set_user_attr(_SECONDS, seconds)
        if best_step is not None:
            trial.set_user_attr(_BEST_STEP, best_step)
        if reason:
            trial.set_user_attr(_REASON, reason)
        state = {"complete": states.COMPLETE, "pruned": states.PRUNED, "failed": states.FAIL}[end]
        self._study.tell(number, gain if end == "complete" else None, state=state)

    def rows(self) -> list[TrialRow]:
        """Return all trials by number, those of other machines too."""
        waiting = _optuna().trial.TrialState.WAITING
        trials = self._study.get_trials(deepcopy=False)
        return [self._row(trial) for trial in trials if trial.state != waiting]

    def row(self, number: int) -> TrialRow:
        return self._row(self._frozen(number))

    def _row(self, trial: FrozenTrial) -> TrialRow:
        settings: dict[str, Any] = {}
        choices: dict[str, str] = {}
        for dimension in self.record.space:
            if dimension.name in trial.params:
                chosen = dimension.settings(trial.params[dimension.name])
                settings |= chosen
                is_label = isinstance(dimension, Choices)
                choices[dimension.name] = str(
                    trial.params[dimension.name] if is_label else chosen[dimension.name]
                )
        states = _optuna().trial.TrialState
        ends: Mapping[Any, End] = {
            states.COMPLETE: "complete",
            states.PRUNED: "pruned",
            states.FAIL: "failed",
        }
        notes = trial.user_attrs
        end = ends.get(trial.state)
        return TrialRow(
            number=trial.number,
            settings=settings,
            choices=choices,
            run=str(notes.get(_RUN, "")),
            end=end,
            gain=trial.value if end == "complete" else None,
            best_step=notes.get(_BEST_STEP),
            gains=dict(sorted(trial.intermediate_values.items())),
            seconds=float(notes.get(_SECONDS, 0.0)),
            reason=str(notes.get(_REASON, "")),
            is_here=notes.get(_MACHINE) == self._machine,
        )

    def _frozen(self, number: int) -> FrozenTrial:
        trial: FrozenTrial = self._study.get_trials(deepcopy=False)[number]
        return trial

    def _open_trial(self, number: int) -> Trial:
        # The id, by which a trial is opened again after this program was killed, has no public name.
        trial: Trial = _optuna().trial.Trial(self._study, self._frozen(number)._trial_id)
        return trial


def _journal(folder: Path) -> optuna.storages.BaseStorage:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    return JournalStorage(JournalFileBackend(str(folder / JOURNAL_FILE)))


def _optuna() -> Any:
    try:
        with warnings.catch_warnings():  # of its dependencies, at their first import
            warnings.simplefilter("ignore")
            import optuna
    except ImportError:
        raise MachineError(
            "tune needs Optuna, which is not installed",
            fix='pip install "lora-train[tune]"',
        ) from None
    return optuna
