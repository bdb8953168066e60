"""An optimizer step and the answers to one that failed; `Training` holds everything that a step needs.

A step has two halves. The first, `compute_gradients_with_oom_retry`, runs one forward and one backward pass per
micro-batch, the images that go through the network together. It may be repeated: it changes no weight, and the
samples already hold their random draws. The second may not be repeated: an optimizer that runs out of memory has
updated some weights only, so it raises PartialOptimizerStep and the loop goes back to the last good state.

Each answer to a failed first half keeps the result, up to rounding, and is remembered in the guard state, so a
resumed run does not try again what failed. Out of memory, the micro-batch is halved; at one image the next remedy of
the plan is applied. After another error compiled blocks, which affect the speed only, are switched off; where
they are off already or there are none, the plain way is taken.

The plain way is one retry, with every optional feature off, after an error that is not a lack of memory.
Selective checkpointing, block swap and compiled blocks all give the same result as the plain way, but a GPU,
a driver or a library version may not support them. So an error switches all of them off, for the rest of the
run and for every run that resumes it. A second error ends the run.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lora_trainer.common.errors import RESUME, LoraTrainError, first_line
from lora_trainer.common.event_kinds import Change, OutOfMemory
from lora_trainer.common.events import EventStream
from lora_trainer.config.constraints import typed
from lora_trainer.config.declare import Decided
from lora_trainer.config.learning import TrainSettings
from lora_trainer.families.base.references import references_in
from lora_trainer.network.compiling import CompiledBlocks
from lora_trainer.network.convolutions import Convolutions
from lora_trainer.network.out_of_memory import free_memory, is_lost, is_out_of_memory
from lora_trainer.training.actions import Action, Progress
from lora_trainer.training.dataloader import Feeder, Sample, split
from lora_trainer.training.distributed.process_group import ProcessGroup
from lora_trainer.training.guards import GuardState, NoFallbackLeft, Unstable
from lora_trainer.training.loss import Batch, Model
from lora_trainer.training.schedules import LearningRate

# Applies one answer and returns the guard state to go on with. It holds no tensor; call it outside the `except`
# block, whose traceback keeps alive the tensors that have to be freed.
Fallback = Callable[[], GuardState]
_CAP = "memory.micro_batch"


@dataclass(frozen=True, kw_only=True)
class OomFallback:
    """An out-of-memory fallback: a setting's change that needs less memory for the same result.

    `apply` changes the networks in place; a remedy is never taken back.
    """

    key: str
    old: Any
    new: Any
    apply: Callable[[], object]


@dataclass(frozen=True, kw_only=True)
class Training:
    """Everything the loop needs.

    `settings` are those of the run: steps, images of one optimizer step over all processes, limit of the gradients'
    norm (0: no clipping), validations to wait for a lower loss. `micro_batch` is the planned cap of images in one
    pass; `images_at_once` are caps by (height, width) of the latents. `scaler` is enabled for fp16 only.
    `stop()` returns a signal number once the run should end, else None.
    `remedies` are applied in order when the device is out of memory; a resumed run begins with the
    remedies it had applied before.
    `plain` are the changes that lead to the plain way, which is tried once after another error, and
    `plain_remedies` the out-of-memory fallbacks that remain there.
    `restore()` puts adapter and optimizer back to the last good state and returns its progress; without
    it, instability ends the run.
    `stages`: parameters (a text encoder's, say) that are trained before a step (0-based) and frozen from then on.
    A frozen parameter gets no gradient, and optimizers skip parameters without one: neither weight decay nor
    momentum moves it. Freezing depends on the step number alone, so a resumed run does the same.
    `afterwards` are called in order after each optimizer step with the number of finished steps; they may
    change weights (a norm limit does) but must leave the bits of weights they do not mean to change.
    `from_zero` are the parameters initialised to zero: while all are zero the adapter has no effect.
    `compiled` are the compiled blocks, None in a run without.
    `convolutions` says how those of the denoiser are computed in a step; None: as they are.
    `look_on` is called before the first step and after each, once the actions have run; it changes nothing and
    raises nothing but a stop.
    """

    settings: TrainSettings[Decided]
    model: Model
    parameters: Sequence[nn.Parameter]
    optimizer: torch.optim.Optimizer
    learning_rate: LearningRate
    scaler: torch.amp.GradScaler
    feeder: Feeder
    micro_batch: int
    events: EventStream
    actions: Sequence[Action]
    stop: Callable[[], int | None]
    ranks: ProcessGroup = field(default_factory=ProcessGroup)
    images_at_once: Mapping[tuple[int, int], int] = field(default_factory=dict)
    remedies: Sequence[OomFallback] = ()
    plain: Sequence[OomFallback] = ()
    plain_remedies: Sequence[OomFallback] = ()
    restore: Callable[[], Progress] | None = None
    stages: Sequence[tuple[nn.Parameter, int]] = ()
    afterwards: Sequence[Callable[[int], None]] = ()
    from_zero: Sequence[nn.Parameter] = ()
    compiled: CompiledBlocks | None = None
    convolutions: Convolutions | None = None
    look_on: Callable[[Progress], None] = lambda progress: None

    def tell_change(self, key: str, old: object, new: object, *, reason: str) -> None:
        """Emit that a value of the plan has changed, if it has."""
        if new != old:
            self.events.emit(Change(key=key, old=old, new=new, reason=reason))


class PartialOptimizerStep(Exception):
    """An optimizer step ran out of memory: some weights and moments may be updated, others not."""

    def __init__(self, guard: GuardState, *, reason: str) -> None:
        super().__init__(reason)
        self.guard, self.reason = guard, reason


# ---- the first half: gradients


def compute_gradients_with_oom_retry(
    training: Training, samples: Sequence[Sample], guard: GuardState
) -> tuple[Tensor, GuardState]:
    """Accumulate the gradients of (1/B) sum of weight_i loss_i, with one fallback after another until it fits.

    Return the loss of this process's samples, detached on the device, and the guard state. The whole
    step is repeated, from zeroed gradients, after out of memory, and after another error (then without compiled
    blocks, or on the plain way). Raises NoFallbackLeft.
    """
    model = training.model
    # The adapter's masks are one per sample of the batch, so the denoiser must then see a batch in one piece.
    group_key = model.batch_group_key if model.masks is not None else lambda _: 0
    while True:
        micro_batches = split(
            samples,
            cap=guard.micro_batch,
            images_at_once=training.images_at_once,
            group_key=group_key,
        )
        try:
            # Summed on the device: reading a loss here would make the host wait for its pass.
            loss = torch.zeros((), device=model.device)
            for micro_batch in micro_batches:
                loss += forward_backward(training, model.collate(micro_batch))
        except Exception as error:  # noqa: BLE001 - raised again where there is no fallback
            images = max(map(len, micro_batches))
            fall_back = fallback_for(training, guard, error, images=images)
        else:
            larger = guard.after_fitting(planned=training.micro_batch)
            reason = f"{guard.patience_steps} steps in a row fitted"
            training.tell_change(_CAP, guard.micro_batch, larger.micro_batch, reason=reason)
            return loss, larger
        # Outside the except block, whose traceback would keep alive the tensors that have to be freed.
        guard = fall_back()
        # Passes before the failed one have added their gradients already.
        training.optimizer.zero_grad(set_to_none=True)


def forward_backward(training: Training, batch: Batch) -> Tensor:
    """Add the gradients of a batch; return its share of the step's loss, detached, on the device.

    The host never waits for the device. After an error some gradients may have been added, so the caller zeroes
    them and repeats the step.
    """
    model = training.model
    compiled: AbstractContextManager[None] = nullcontext()
    batch, blocks = batch.on(model.device), training.compiled
    if blocks is not None and not blocks.is_off:
        count, _, height, width = batch.latents.shape
        has_references = bool(references_in(batch.conditioning))
        if blocks.takes(height, width, count, has_references=has_references):
            # With several processes the others wait in a collective for the gradients of this step.
            compiled = blocks.used(training.stop if training.ranks.is_single else lambda: None)
        elif not blocks.is_told:  # shapes change with every step, the reason does not
            blocks.is_told = True
            training.events.problem(
                f"{_UNCOMPILED.key} is not used for {count} latents of {width}x{height} at once and for "
                "other shapes that the plan did not include",
                fix="nothing; with fewer buckets or a lower memory.micro_batch there are fewer shapes",
                severity="note",
            )
    # Masks and strength stay set during `backward`: checkpointing runs the forward pass again there and has to
    # meet the same ones.
    convolutions: AbstractContextManager[None] = nullcontext()
    if training.convolutions is not None:
        convolutions = training.convolutions.used(batch.latents.shape)
    with model.strengthened(batch), compiled, convolutions:
        batch = model.drawn(batch)
        with model.masking(batch):
            # Divided by the whole step's images, not by this micro-batch's: the sum over all passes and
            # processes is then the batch mean, and splitting a step differently changes rounding only.
            _, _, weights, _ = batch.numbers
            loss: Tensor = (model.losses_of(batch) * weights).sum() / training.settings.batch_size
            # fp16 gradients would vanish without the scale; for other dtypes the scaler does nothing.
            training.scaler.scale(loss).backward()
    return loss.detach()


# ---- the second half: the optimizer


def optimizer_step(training: Training, loss: Tensor, guard: GuardState, *, step: int) -> Tensor:
    """Update the weights and run `afterwards`; `step` counts from 1. Return the norm of the gradients.

    The norm is taken before clipping and stays on the device. Raises PartialOptimizerStep if the device runs out of
    memory.
    """
    try:
        norm = _clip_and_step(training, loss)
        for change in training.afterwards:
            change(step)
        return norm
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise PartialOptimizerStep(guard, reason=first_line(error)) from None


def _clip_and_step(training: Training, loss: Tensor) -> Tensor:
    """Clip and step unless loss or gradients are not finite; return the norm before clipping.

    There are three ways to skip a step: the fp16 scaler does it by itself; a fused optimizer masks its
    update on the device when `found_inf` is 1; for the others the host has to read the norm, and waits.
    """
    optimizer, scaler = training.optimizer, training.scaler
    if scaler.is_enabled():
        # It looks at gradients alone, and these may be finite although the loss is not.
        gradient = next((p.grad for p in training.parameters if p.grad is not None), None)
        if gradient is None:  # a scaler refuses a step without gradients; the guards count it
            return torch.where(loss.isfinite(), 0.0, loss)
        gradient.add_(torch.where(loss.isfinite(), 0.0, torch.nan))
    scaler.unscale_(optimizer)  # clipping and the reported norm are of the true gradients
    limit = training.settings.max_grad_norm or float("inf")
    norm = nn.utils.clip_grad_norm_(training.parameters, limit, foreach=True)
    # One number then says whether the step counts: gradients may be finite although the loss is not.
    norm = torch.where(loss.isfinite(), norm, loss)
    if scaler.is_enabled():
        scaler.step(optimizer)
        scaler.update()
    elif getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
        optimizer.step()
    elif bool(norm.isfinite()):
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm.detach()


# ---- the answers to a step that failed

# The change of the setting when compiled blocks are switched off. Every error but a lost device is answered so first;
# as one of `_changes` it is only in the advice of `lost_device`.
_UNCOMPILED = OomFallback(key="hardware.compile", old="blocks", new="none", apply=lambda: None)


def fallback_for(
    training: Training, guard: GuardState, error: Exception, *, images: int
) -> Fallback:
    """Return the answer to an error; raises it again, or NoFallbackLeft, where there is none.

    `images` is the size of the largest pass.
    """
    if isinstance(error, RuntimeError) and is_out_of_memory(error):
        return partial(use_less_memory, training, guard, images=images, reason=first_line(error))
    # Another way to compute does not cure errors that this package raises on purpose.
    if isinstance(error, LoraTrainError | PartialOptimizerStep | Unstable):
        raise error
    if is_lost(error):
        raise lost_device(training, guard, error) from error
    if training.compiled is not None and not training.compiled.is_off:
        cause = getattr(error, "inner_exception", error)  # torch wraps the errors of compilers
        return partial(_stop_compiling, training, guard, reason=_line(cause))
    if guard.plain:
        raise NoFallbackLeft(
            f"training failed with every optional feature off: {_line(error)}",
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
    training.events.emit(OutOfMemory(images_at_once=images, reason=reason))
    training.optimizer.zero_grad(set_to_none=True)
    free_memory()
    remedies = training.plain_remedies if guard.plain else training.remedies
    smaller = guard.after_out_of_memory(images=images, remedies=len(remedies))
    for remedy in remedies[guard.remedies : smaller.remedies]:
        try:
            remedy.apply()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            # What it had changed by then is of no use to a pass; a resumed run begins with it.
            raise NoFallbackLeft(
                f"the device ran out of memory, and again while {remedy.key} was changed to {remedy.new}",
                fix=f"{RESUME}, which begins with the change, or free memory on the device",
                guard=smaller,
            ) from error
        training.tell_change(remedy.key, remedy.old, remedy.new, reason=reason)
    training.tell_change(_CAP, guard.micro_batch, smaller.micro_batch, reason=reason)
    return smaller


def go_plainly(training: Training, guard: GuardState, *, reason: str) -> GuardState:
    """Switch to the plain way and report it; raises NoFallbackLeft if a change fails."""
    changes = _changes(training, guard)
    # `guard.remedies` counts into the list of remedies in force. The plain way has a list of its own; a
    # run that needed every remedy to fit needs all of these too.
    all_taken = 0 < len(training.remedies) <= guard.remedies
    remedies = len(training.plain_remedies) if all_taken else 0
    guard = replace(guard, plain=True, remedies=remedies)
    training.optimizer.zero_grad(set_to_none=True)
    free_memory()
    for change in changes:
        try:
            change.apply()
        except RuntimeError as error:
            raise NoFallbackLeft(
                f"{reason}; and {change.key} could not be changed: {_line(error)}",
                fix=RESUME,
                guard=guard,
            ) from error
        training.tell_change(change.key, change.old, change.new, reason=reason)
    training.events.problem(
        f"an error that is not about memory: {reason}. The step is tried again, and the run continues, with "
        f"every optional feature off: {', '.join(f'{c.key}={typed(c.new)}' for c in changes)}",
        fix=f"nothing; to start a run in this way, add {_settings(changes)}",
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
    changes = list(training.plain)
    if training.compiled is not None and not training.compiled.is_off:
        changes.append(_UNCOMPILED)
    return changes if guard.remedies or any(change.old != "none" for change in changes) else []


def _settings(changes: Sequence[OomFallback]) -> str:
    return " ".join(
        f"--set {change.key}={typed(change.new)}" for change in changes if "." in change.key
    )


def _line(error: BaseException) -> str:
    """Return an error's type, first line and source position (file:line) in one line."""
    frames = traceback.extract_tb(error.__traceback__)
    origin = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {first_line(error)}{origin}"
