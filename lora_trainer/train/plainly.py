"""One more try, as plainly as it can be computed, of what failed for another reason than memory.

What makes a step fit and fast (blocks that keep some results, streamed weights, integer products, compiled
code, recordings, modulation made ahead) gives what the plain way gives, by means that a card, a driver or
a version of a library may not have. So an error in one of the first steps is met once with the plain way,
for the rest of the run and of those that go on with it. A second error is the end, with both reasons.

A pass is one of the first until an optimizer step with its like has been made by this process: of this
shape, with as many images, with the same remedies in force. An action is, until it has been done once.
Later an error is no matter of the way, and ends the run.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence, Set
from dataclasses import replace
from pathlib import Path

from lora_trainer.errors import RESUME, LoraTrainError, TrainingStopped, first_line
from lora_trainer.model.device_errors import is_lost
from lora_trainer.model.out_of_memory import free_memory
from lora_trainer.train.guards import GuardState, Unstable
from lora_trainer.train.speedups import COMPILE, GRAPHS
from lora_trainer.train.training import First, Remedy, TornStep, Training

_OUR_OWN = (LoraTrainError, TornStep, Unstable)
"""What is raised on purpose, and means what it says."""


def why_again(
    training: Training, guard: GuardState, error: Exception, *, firsts: Set[First]
) -> str:
    """Return in a line why the plain way is tried; raises `error` or TrainingStopped where it is not.

    `firsts` are the passes or the action in which it happened.
    """
    if isinstance(error, _OUR_OWN):
        raise error
    if is_lost(error):
        raise lost_device(training, guard, error) from error
    plain = training.plain
    if firsts <= plain.proven:
        raise error
    if guard.plain and plain.first_error:
        raise TrainingStopped(
            f"it failed twice: {plain.first_error}; and computed as plainly as it can be: {_line(error)}",
            fix=f"{RESUME} once the cause is gone; a report of it needs problems.jsonl",
        ) from error
    if guard.plain or not _changes(training, guard):
        raise error
    return _line(error)


def go_plainly(training: Training, guard: GuardState, *, reason: str) -> GuardState:
    """Put the plain way in force and say so; call it outside the `except` block (see `free_memory`)."""
    changes = _changes(training, guard)
    if training.speedups.compiled is not None:
        training.speedups.give_up_compiling()
    if training.speedups.graphs is not None:
        training.speedups.give_up_graphs()
    training.optimizer.zero_grad(set_to_none=True)
    free_memory()
    for change in changes:
        try:
            change.apply()
        except RuntimeError as error:
            raise TrainingStopped(
                f"{reason}; and {change.key}={_value(change.new)} was not possible: {_line(error)}",
                fix=f"run the same command with --resume {_settings(changes)}",
            ) from error
        training.events.emit(
            "change", key=change.key, old=change.old, new=change.new, reason=reason
        )
    training.plain.first_error = reason
    training.events.problem(
        f"an error that is no lack of memory: {reason}. It is tried again, and all the run from here on, as "
        f"plainly as it can be: {', '.join(f'{c.key}={_value(c.new)}' for c in changes)}",
        fix=f"nothing; a run that starts so: {_settings(changes)}",
    )
    all_taken = 0 < len(training.remedies) <= guard.remedies
    return replace(
        guard,
        plain=True,
        remedies=len(training.plain.remedies) if all_taken else 0,
        uncompiled=guard.uncompiled or training.speedups.uncompiled,
        ungraphed=guard.ungraphed or training.speedups.ungraphed,
    )


def lost_device(training: Training, guard: GuardState, error: BaseException) -> TrainingStopped:
    """Return the end of a process whose device is lost: no way of computing helps it any more."""
    settings = "" if guard.plain else _settings(_changes(training, guard))
    again = f"; if it happens again add {settings}" if settings else ""
    return TrainingStopped(
        f"the device cannot be used by this process any more: {_line(error)}",
        fix=f"{RESUME}{again}",
    )


def _changes(training: Training, guard: GuardState) -> Sequence[Remedy]:
    """Return what the plain way changes; recomputing by itself is no plainer than not."""
    speedups = training.speedups
    found = list(training.plain.changes)
    if speedups.compiled is not None:
        found.append(Remedy(key=COMPILE, old="blocks", new="none", apply=_nothing))
    if speedups.graphs is not None:
        found.append(Remedy(key=GRAPHS, old=True, new=False, apply=_nothing))
    means = [change for change in found if change.old != "none"]
    return found if means or guard.remedies else []


def _nothing() -> None:
    """The speed-ups are given up by themselves, before anything else."""


def _settings(changes: Sequence[Remedy]) -> str:
    return " ".join(
        f"--set {change.key}={_value(change.new)}" for change in changes if "." in change.key
    )


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _line(error: BaseException) -> str:
    """Say in a line what an error is and where it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {first_line(error)}{place}"
