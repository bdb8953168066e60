"""The plain way: one retry, with every optional feature off, after an error that is not a lack of memory.

Selective checkpointing, block swap, int8 products, compiled blocks and CUDA graphs all give the same result
as the plain way, but a GPU, a driver or a library version may not support them. So an error in a first
pass switches all of them off, for the rest of the run and for every run that resumes it. A second error
ends the run and names both reasons.

A pass counts as first until this process has finished an optimizer step with a pass of the same key: same
latent shape, number of images and remedies in force. An action counts as first until it has run once.
An error after that does not come from an unsupported feature, and ends the run.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence, Set
from dataclasses import replace
from pathlib import Path

from lora_trainer.common.errors import RESUME, LoraTrainError, TrainingStopped, first_line
from lora_trainer.network.out_of_memory import free_memory, is_lost
from lora_trainer.training.graphed import COMPILE, GRAPHS
from lora_trainer.training.guards import GuardState, Unstable
from lora_trainer.training.training import First, OomFallback, PartialOptimizerStep, Training

_OUR_OWN = (LoraTrainError, PartialOptimizerStep, Unstable)
"""Errors that this package raises on purpose: another way to compute does not cure them."""


def why_again(
    training: Training, guard: GuardState, error: Exception, *, firsts: Set[First]
) -> str:
    """Return, in one line, the reason to try the plain way; raises `error` or TrainingStopped otherwise.

    `firsts` are the keys of the passes, or the class of the action, in which `error` was raised.
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
            f"training failed twice: {plain.first_error}; and with every optional feature off: "
            f"{_line(error)}",
            fix=f"{RESUME} once the cause is gone; include problems.jsonl if you report it",
        ) from error
    if guard.plain or not _changes(training, guard):
        raise error
    return _line(error)


def go_plainly(training: Training, guard: GuardState, *, reason: str) -> GuardState:
    """Switch to the plain way and report it; call this outside the `except` block (see `free_memory`)."""
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
        f"an error, not for lack of memory: {reason}. It is tried again, and the run continues, with every "
        f"optional feature off: {', '.join(f'{c.key}={_value(c.new)}' for c in changes)}",
        fix=f"nothing; to start a run this way add {_settings(changes)}",
    )
    # `guard.remedies` counts into the list of remedies in force. The plain way has a list of its own; a
    # run that needed every remedy to fit needs all of these too.
    all_taken = 0 < len(training.remedies) <= guard.remedies
    return replace(
        guard,
        plain=True,
        remedies=len(training.plain.remedies) if all_taken else 0,
        uncompiled=guard.uncompiled or training.speedups.uncompiled,
        ungraphed=guard.ungraphed or training.speedups.ungraphed,
    )


def lost_device(training: Training, guard: GuardState, error: BaseException) -> TrainingStopped:
    """Return the error that ends a process whose device is lost; only a new process can use it again."""
    settings = "" if guard.plain else _settings(_changes(training, guard))
    again = f"; if it happens again add {settings}" if settings else ""
    return TrainingStopped(
        f"the device cannot be used by this process any more: {_line(error)}",
        fix=f"{RESUME}{again}",
    )


def _changes(training: Training, guard: GuardState) -> Sequence[OomFallback]:
    """Return the changes that lead to the plain way; empty when the run is on it already.

    A change from "none" only adds recomputation. By itself that makes nothing plainer, but it gives the
    memory that the other changes cost.
    """
    speedups = training.speedups
    changes = list(training.plain.changes)
    if speedups.compiled is not None:
        changes.append(OomFallback(key=COMPILE, old="blocks", new="none", apply=_nothing))
    if speedups.graphs is not None:
        changes.append(OomFallback(key=GRAPHS, old=True, new=False, apply=_nothing))
    means = [change for change in changes if change.old != "none"]
    return changes if means or guard.remedies else []


def _nothing() -> None:
    """Do nothing: `go_plainly` has switched the speed-ups off before it applies the changes."""


def _settings(changes: Sequence[OomFallback]) -> str:
    return " ".join(
        f"--set {change.key}={_value(change.new)}" for change in changes if "." in change.key
    )


def _value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _line(error: BaseException) -> str:
    """Return an error's type, first line and source position (file:line) in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    origin = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {first_line(error)}{origin}"
