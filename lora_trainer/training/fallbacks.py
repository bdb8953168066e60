"""The answers to a step that failed: give up a speed-up, use less memory, or compute on the plain way.

Each answer keeps the result, up to rounding, and is remembered in the guard state, so a resumed run does not
try again what failed. Compiled blocks affect the speed only: when they fail they are switched off. Out of
memory, the micro-batch is halved; at one image the next remedy of the plan is applied.

The plain way is one retry, with every optional feature off, after an error that is not a lack of memory.
Selective checkpointing, block swap and compiled blocks all give the same result as the plain way, but a GPU,
a driver or a library version may not support them. So an error in a first pass switches all of them off, for
the rest of the run and for every run that resumes it. A second error ends the run and names both reasons.

A pass counts as first until this process has finished an optimizer step with a pass of the same key: same
latent shape, number of images and remedies in force. An action counts as first until it has run once.
An error after that does not come from an unsupported feature, and ends the run.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from functools import partial
from pathlib import Path

from lora_trainer.common.errors import RESUME, LoraTrainError, first_line
from lora_trainer.config.constraints import typed
from lora_trainer.network.compiling import CompilationFailed
from lora_trainer.network.out_of_memory import free_memory, is_lost, is_out_of_memory
from lora_trainer.training.batch import Batch
from lora_trainer.training.guards import GuardState, NoFallbackLeft, Unstable
from lora_trainer.training.training import First, OomFallback, PartialOptimizerStep, Training

Fallback = Callable[[], GuardState]
"""Applies one answer and returns the guard state to go on with. It holds no tensor; call it outside the
`except` block, whose traceback keeps alive the tensors that have to be freed."""
_UNCOMPILED = OomFallback(key="hardware.compile", old="blocks", new="none", apply=lambda: None)
"""The change of the setting when compiled blocks are switched off."""
_OUR_OWN = (LoraTrainError, PartialOptimizerStep, Unstable)
"""Errors that this package raises on purpose: another way to compute does not cure them."""


def fallback_for(
    training: Training, guard: GuardState, error: Exception, *, firsts: Set[First], images: int
) -> Fallback:
    """Return the answer to an error; raises it again, or NoFallbackLeft, where there is none.

    `firsts` are the keys of the passes, or the class of the action, in which `error` was raised, `images`
    is the size of the largest pass.
    """
    if isinstance(error, CompilationFailed):
        return partial(_stop_compiling, training, guard, reason=str(error))
    if isinstance(error, RuntimeError) and is_out_of_memory(error):
        return partial(use_less_memory, training, guard, images=images, reason=first_line(error))
    if isinstance(error, _OUR_OWN):
        raise error
    if is_lost(error):
        raise lost_device(training, guard, error) from error
    plain = training.plain
    if firsts <= plain.proven:
        raise error
    if guard.plain:  # without a first error it was saved in the state that a resume began with
        every_way = f"with every optional feature off: {_line(error)}"
        raise NoFallbackLeft(
            f"training failed twice: {plain.first_error}; and {every_way}"
            if plain.first_error
            else f"training failed {every_way}",
            fix=f"{RESUME} once the cause is gone; include problems.jsonl if you report it",
            guard=guard,
        ) from error
    if not _changes(training, guard):
        raise error
    return partial(go_plainly, training, guard, reason=_line(error))


def _stop_compiling(training: Training, guard: GuardState, *, reason: str) -> GuardState:
    """Do without compiled blocks from now on, and report it."""
    assert training.compiled is not None
    training.compiled.is_off = True
    training.tell_change(_UNCOMPILED.key, _UNCOMPILED.old, _UNCOMPILED.new, reason=reason)
    training.events.problem(
        f"the run continues without compiled blocks, which affect only its speed: {reason}",
        fix=f"nothing; start with {_settings([_UNCOMPILED])} to skip the attempt",
        severity="note",
    )
    return replace(guard, uncompiled=True)


def use_less_memory(
    training: Training, guard: GuardState, *, images: int, reason: str
) -> GuardState:
    """Apply the next remedy after a pass of `images` did not fit; raises NoFallbackLeft without one."""
    training.events.emit("out_of_memory", images_at_once=images, reason=reason)
    training.optimizer.zero_grad(set_to_none=True)
    free_memory()
    remedies = training.remedies_of(guard)
    smaller = guard.after_out_of_memory(images=images, remedies=len(remedies))
    for remedy in remedies[guard.remedies : smaller.remedies]:
        remedy.apply()
        training.tell_change(remedy.key, remedy.old, remedy.new, reason=reason)
    _tell_micro_batch(training, guard, smaller, reason=reason)
    return smaller


def count_fitting(training: Training, guard: GuardState) -> GuardState:
    """Count a step that fitted; after enough of them the next step may use a larger micro-batch again."""
    larger = guard.after_fitting(planned=training.micro_batch)
    reason = f"{guard.patience_steps} steps in a row fitted"
    _tell_micro_batch(training, guard, larger, reason=reason)
    return larger


def tell_unplanned(training: Training, batch: Batch) -> None:
    """Emit a note, once a run, when samples of an unplanned shape run uncompiled."""
    blocks = training.compiled
    if blocks is None or blocks.is_told or not blocks.leaves_out(batch.latents_shape):
        return
    blocks.is_told = True  # shapes change with every step, the reason does not
    height, width, images = batch.latents_shape
    training.events.problem(
        f"{_UNCOMPILED.key} is not used for {images} latents of {width}x{height} at once and for other "
        "shapes that the plan did not include",
        fix="nothing; with fewer buckets or a lower memory.micro_batch there are fewer shapes",
        severity="note",
    )


# ---- the plain way


def go_plainly(training: Training, guard: GuardState, *, reason: str) -> GuardState:
    """Switch to the plain way and report it."""
    changes = _changes(training, guard)
    # `guard.remedies` counts into the list of remedies in force. The plain way has a list of its own; a
    # run that needed every remedy to fit needs all of these too.
    all_taken = 0 < len(training.remedies) <= guard.remedies
    remedies = len(training.plain.remedies) if all_taken else 0
    uncompiled = guard.uncompiled or _UNCOMPILED in changes
    guard = replace(guard, plain=True, uncompiled=uncompiled, remedies=remedies)
    if training.compiled is not None:
        training.compiled.is_off = True
    training.optimizer.zero_grad(set_to_none=True)
    free_memory()
    for change in changes:
        try:
            change.apply()
        except RuntimeError as error:
            raise NoFallbackLeft(
                f"{reason}; and {change.key}={typed(change.new)} was not possible: {_line(error)}",
                fix=f"run the same command with --resume {_settings(changes)}",
                guard=guard,
            ) from error
        training.tell_change(change.key, change.old, change.new, reason=reason)
    training.plain.first_error = reason
    training.events.problem(
        f"an error, not for lack of memory: {reason}. It is tried again, and the run continues, with every "
        f"optional feature off: {', '.join(f'{c.key}={typed(c.new)}' for c in changes)}",
        fix=f"nothing; to start a run this way add {_settings(changes)}",
    )
    return guard


def lost_device(training: Training, guard: GuardState, error: BaseException) -> NoFallbackLeft:
    """Return the error that ends a process whose device is lost; only a new process can use it again."""
    settings = "" if guard.plain else _settings(_changes(training, guard))
    again = f"; if it happens again add {settings}" if settings else ""
    return NoFallbackLeft(
        f"the device cannot be used by this process any more: {_line(error)}",
        fix=f"{RESUME}{again}",
        guard=guard,
    )


def _changes(training: Training, guard: GuardState) -> Sequence[OomFallback]:
    """Return the changes that lead to the plain way; empty when the run is on it already.

    A change from "none" only adds recomputation. By itself that makes nothing plainer, but it gives the
    memory that the other changes cost.
    """
    changes = list(training.plain.changes)
    if training.compiled is not None and not training.compiled.is_off:
        changes.append(_UNCOMPILED)
    return changes if guard.remedies or any(change.old != "none" for change in changes) else []


# ---- wording


def _tell_micro_batch(training: Training, old: GuardState, new: GuardState, *, reason: str) -> None:
    if new.micro_batch != old.micro_batch:
        training.tell_change("memory.micro_batch", old.micro_batch, new.micro_batch, reason=reason)


def _settings(changes: Sequence[OomFallback]) -> str:
    return " ".join(
        f"--set {change.key}={typed(change.new)}" for change in changes if "." in change.key
    )


def _line(error: BaseException) -> str:
    """Return an error's type, first line and source position (file:line) in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    origin = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {first_line(error)}{origin}"
