"""The training loop: one readable function over plain values.

It has never heard of presets, the command line or files. Each `Action` (save, sample, validate)
decides for itself whether a step concerns it. The step is fenced by two rules: nothing in it decodes,
encodes or touches the disk, and every random number it uses was drawn by the feeder.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from lora_trainer.data.loader import Feeder, Prepared, StepBatch, micro_batches, to_device
from lora_trainer.errors import RESUME, StoppedBySignal, TrainingStopped, first_line
from lora_trainer.events import EventStream
from lora_trainer.families.base import Conditioning, Prediction
from lora_trainer.model.device_memory import device_memory
from lora_trainer.model.out_of_memory import free_memory, is_out_of_memory
from lora_trainer.train.guards import (
    GuardState,
    Unstable,
    after_fitting,
    after_out_of_memory,
    after_rollback,
    after_step,
    after_torn_step,
    after_training_loss,
    changes,
    stopped,
)
from lora_trainer.train.objective import add_noise, sample_losses, target
from lora_trainer.train.optim import LearningRate, set_learning_rate
from lora_trainer.train.progress import Action, Progress

CUDA_REPORT_LAG = 2  # steps; reading a loss at once would make the host wait for the device


@dataclass(frozen=True, kw_only=True)
class Model:
    """The frozen denoiser with its adapter, and how it is asked for a prediction, in which dtype, where.

    `embed` turns what is cached of a prompt into conditioning: nothing is left to do, unless the text
    encoders are trained along and run in every step.
    """

    denoiser: nn.Module
    predict: Callable[[nn.Module, Tensor, Tensor, Conditioning], Tensor]
    embed: Callable[[Conditioning], Conditioning]
    prediction: Prediction
    precision: torch.dtype
    device: torch.device

    def losses(self, samples: Sequence[Prepared]) -> Tensor:
        """Return the unweighted loss of each sample (all of one shape), float32 [B], with its graph."""
        batch = to_device(samples, device=self.device, dtype=self.precision)
        level = (batch.alpha, batch.sigma)
        noisy = add_noise(batch.latents, batch.noise, *level)
        predicted = self.predict(
            self.denoiser,
            noisy.to(self.precision),
            batch.timesteps,
            self.embed(batch.conditioning),
        )
        return sample_losses(predicted, target(batch.latents, batch.noise, *level, self.prediction))


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """Something that needs less memory for the same result; applied in place and for good."""

    key: str
    old: Any
    new: Any
    apply: Callable[[], None]


class TornStep(Exception):
    """An optimizer step ran out of memory: adapter and optimizer may be half-way."""

    def __init__(self, guard: GuardState, *, reason: str) -> None:
        super().__init__(reason)
        self.guard, self.reason = guard, reason


@dataclass(frozen=True, kw_only=True)
class Training:
    """All the loop needs. `stop()` returns a signal number once the run should end; `clock` is in seconds.

    `batch_size` is images per optimizer step; `scaler` is enabled for fp16 only; `max_grad_norm` 0
    means no clipping. `micro_batch` is the planned cap in images, `images_at_once` caps by (height,
    width) of the latents. `remedies` are taken in their order when the device is full; those a
    resumed run has taken are in force already.
    `restore()` puts adapter and optimizer back to the last good state and returns where that was;
    without it, instability is the end. `watch_spikes` clips tighter when losses jump.
    """

    model: Model
    parameters: Sequence[nn.Parameter]
    optimizer: torch.optim.Optimizer
    learning_rate: LearningRate
    scaler: torch.amp.GradScaler
    feeder: Feeder
    steps: int
    batch_size: int
    micro_batch: int
    prefetch_steps: int
    max_grad_norm: float
    events: EventStream
    actions: Sequence[Action]
    stop: Callable[[], int | None]
    images_at_once: Mapping[tuple[int, int], int] = field(default_factory=dict)
    remedies: Sequence[Remedy] = ()
    restore: Callable[[], Progress] | None = None
    watch_spikes: bool = False
    clock: Callable[[], float] = time.perf_counter


@dataclass(frozen=True, kw_only=True)
class _Report:
    """A finished step whose loss and gradient norm may still be on their way from the device."""

    fields: dict[str, Any]
    loss: Tensor
    grad_norm: Tensor


def run(training: Training, start: Progress) -> Progress:
    """Train from `start` to `training.steps` and return where it ended.

    Raises StoppedBySignal after an asked-for stop, once the actions have seen `ending`, and
    TrainingStopped when no remedy is left; the adapter then still holds its last good values.
    """
    progress = start
    if start.step == 0:  # a resumed run did these before it was interrupted
        progress = _act(training, _due(training, progress), progress)
    while True:
        try:
            return _train(training, progress)
        except Unstable as unstable:
            if training.restore is None:
                raise stopped(unstable) from None
            good = training.restore()
            guard = after_rollback(good.guard, unstable)
            reason = f"back to step {good.step}: {unstable.found}"
            _tell_changes(training.events, unstable.state, guard, reason=reason)
            progress = replace(good, guard=guard, ending=False)
        except TornStep as torn:
            progress = _mended(training, torn)


def _mended(training: Training, torn: TornStep) -> Progress:
    """Go back before a step that ran out of memory while weights were changing, with a remedy taken."""
    guard = _relieved(training, torn.guard, images=torn.guard.micro_batch, reason=torn.reason)
    if training.restore is None:
        raise TrainingStopped(
            f"the device ran out of memory in the optimizer: {torn.reason}",
            fix="run the same command with --resume",
        )
    good = training.restore()
    training.events.problem(
        f"back to step {good.step}: an optimizer step ran out of memory; the steps since are done again",
        fix="nothing if this is rare; else lower hardware.vram_limit_gib",
        code="TRN-02",
    )
    return replace(good, guard=after_torn_step(good.guard, guard), ending=False)


def _train(training: Training, start: Progress) -> Progress:
    """Train from `start` to the end; raises Unstable besides what `run` raises."""
    progress, pending = start, deque[_Report]()
    lag = CUDA_REPORT_LAG if training.model.device.type == "cuda" else 0
    with training.feeder.stream(
        start.step, training.steps, ahead=training.prefetch_steps
    ) as batches:
        while progress.step < training.steps:
            # ---- data: prepared ahead, so what is measured here is only the wait for it
            began = training.clock()
            batch = next(batches)
            waited = training.clock() - began

            # ---- step: noise, predict, weighted loss, backward, clip, optimizer
            rate = training.learning_rate(progress.step) * progress.guard.lr_scale
            set_learning_rate(training.optimizer, rate)
            loss, guard = _gradients_that_fit(training, batch, progress.guard)
            grad_norm = _apply_whole(training, loss, guard)

            # ---- report, a few steps late on a GPU
            step, images = progress.step + 1, progress.images + len(batch.samples)
            progress = Progress(step=step, images=images, guard=guard)
            fields = {"step": step, "images": images, "lr": rate, "epoch": batch.epoch}
            fields |= {"seconds": training.clock() - began, "data_wait_s": waited}
            pending.append(_Report(fields=fields, loss=loss, grad_norm=grad_norm))
            while len(pending) > lag:
                progress = _report(training, pending.popleft(), progress)

            # ---- save, sample, validate, stop
            signal_number = training.stop() if step < training.steps else None
            stopping = signal_number is not None
            progress = replace(
                progress, ending=stopping or step == training.steps, stopping=stopping
            )
            due = _due(training, progress)
            while due and pending:
                progress = _report(training, pending.popleft(), progress)
            progress = _act(training, due, progress)
            if signal_number is not None:
                raise StoppedBySignal(
                    signal_number,
                    found=f"stopped after step {step} of {training.steps}; the state is saved",
                    fix=RESUME,
                )
    return progress


def _due(training: Training, progress: Progress) -> list[Action]:
    return [action for action in training.actions if action.due(progress)]


def _act(training: Training, due: Sequence[Action], progress: Progress) -> Progress:
    """Do what is due; each action sees what the guards made of the one before."""
    for action in due:
        guard = _with_room(training, action, progress)
        if guard is not None:
            reason = f"the validation loss has stopped falling at step {progress.step}"
            _tell_changes(training.events, progress.guard, guard, reason=reason)
            progress = replace(progress, guard=guard)
    return progress


def _with_room(training: Training, action: Action, progress: Progress) -> GuardState | None:
    """Do an action, once more with an emptied cache where the device ran out of memory, else without it.

    Training goes on as it would have: no action decides what the adapter becomes but by its guards.
    """
    for last_try in (False, True):
        try:
            return action(progress)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            reason = first_line(error)
        free_memory()
        if last_try:
            training.events.problem(
                f"{type(action).__name__} at step {progress.step} was left out: {reason}",
                fix="free memory on the device, or lower hardware.vram_limit_gib",
                code="TRN-03",
            )
    return None


def _tell_changes(events: EventStream, old: GuardState, new: GuardState, *, reason: str) -> None:
    for change in changes(old, new, reason=reason):
        events.emit("change", **vars(change))
        events.problem(
            f"{change.key}: {change.old:g} -> {change.new:g}, {change.reason}",
            fix="nothing if this is rare; else lower optimizer.learning_rate",
            code="TRN-01",
        )


def _gradients_that_fit(
    training: Training, batch: StepBatch, guard: GuardState
) -> tuple[Tensor, GuardState]:
    """Accumulate the step's gradients, taking one remedy after the other until the device can hold it.

    The whole step is done again: its draws are already made, so nothing is lost or seen twice.
    """
    while True:
        try:
            loss = _gradients(training, batch, cap=guard.micro_batch)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            reason = first_line(error)
        else:
            return loss, _grown(training, guard)
        # Outside the except block: its traceback would keep the tensors alive that must go.
        images = max(len(group) for group in _split(training, batch, cap=guard.micro_batch))
        guard = _relieved(training, guard, images=images, reason=reason)


def _relieved(training: Training, guard: GuardState, *, images: int, reason: str) -> GuardState:
    """Take the next remedy after `images` at once did not fit; raises TrainingStopped without one."""
    training.optimizer.zero_grad(set_to_none=True)
    free_memory()
    smaller = after_out_of_memory(guard, images=images, remedies=len(training.remedies))
    for remedy in training.remedies[guard.remedies : smaller.remedies]:
        remedy.apply()
        training.events.emit(
            "change", key=remedy.key, old=remedy.old, new=remedy.new, reason=reason
        )
    _tell_micro_batch(training, guard, smaller, reason=reason)
    return smaller


def _grown(training: Training, guard: GuardState) -> GuardState:
    """Count a step that fitted; the next may hold more images at once again."""
    larger = after_fitting(guard, planned=training.micro_batch)
    reason = f"{guard.patience_steps} steps in a row fitted"
    _tell_micro_batch(training, guard, larger, reason=reason)
    return larger


def _tell_micro_batch(training: Training, old: GuardState, new: GuardState, *, reason: str) -> None:
    if new.micro_batch != old.micro_batch:
        training.events.emit(
            "change",
            key="memory.micro_batch",
            old=old.micro_batch,
            new=new.micro_batch,
            reason=reason,
        )


def _gradients(training: Training, batch: StepBatch, *, cap: int) -> Tensor:
    """Add the gradients of (1/B) sum of weight_i loss_i; return that loss, detached, on the device."""
    total = torch.zeros((), device=training.model.device)
    for samples in _split(training, batch, cap=cap):
        weights = torch.tensor([sample.weight for sample in samples], device=training.model.device)
        loss = (training.model.losses(samples) * weights).sum() / training.batch_size
        training.scaler.scale(loss).backward()
        total += loss.detach()
    return total


def _split(training: Training, batch: StepBatch, *, cap: int) -> list[tuple[Prepared, ...]]:
    return micro_batches(batch, cap=cap, at_once=training.images_at_once)


def _apply_whole(training: Training, loss: Tensor, guard: GuardState) -> Tensor:
    """Apply the gradients; raises TornStep when the device ran out of memory on the way."""
    try:
        return _apply_gradients(training, loss, clip_scale=guard.clip_scale)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise TornStep(guard, reason=first_line(error)) from None


def _apply_gradients(training: Training, loss: Tensor, *, clip_scale: float) -> Tensor:
    """Clip and step unless loss or gradients are not finite; return the norm before clipping.

    Fused optimizers mask the step on the device through `found_inf`; others make the host wait.
    """
    optimizer, scaler = training.optimizer, training.scaler
    scaler.unscale_(optimizer)
    limit = training.max_grad_norm * clip_scale or float("inf")
    norm = nn.utils.clip_grad_norm_(training.parameters, limit, foreach=True)
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


def _report(training: Training, report: _Report, progress: Progress) -> Progress:
    """Log one finished step and let the guard judge it; raises TrainingStopped."""
    loss, norm = float(report.loss), float(report.grad_norm)
    finite = norm - norm == 0.0
    memory = device_memory(training.model.device).fields()
    values = {"loss": loss if loss - loss == 0.0 else None, "grad_norm": norm if finite else None}
    training.events.emit("step", **report.fields, **values, **memory)
    if not finite and _is_searching(training.scaler):
        scale = training.scaler.get_scale()
        training.events.emit(
            "change", key="loss scale", old=2 * scale, new=scale, reason="fp16 gradients overflowed"
        )
        return progress
    if not finite:
        training.events.problem(
            f"step {report.fields['step']} was skipped: its gradients were not finite numbers",
            fix="nothing if this is rare; else lower optimizer.learning_rate",
            code="TRN-01",
        )
    guard = after_step(progress.guard, finite=finite, step=report.fields["step"])
    if finite and training.watch_spikes:
        guard = after_training_loss(guard, loss)
        reason = f"the loss jumped at step {report.fields['step']}"
        _tell_changes(training.events, progress.guard, guard, reason=reason)
    return replace(progress, guard=guard)


def _is_searching(scaler: torch.amp.GradScaler) -> bool:
    """Say whether an overflow only means that the fp16 loss scale is being lowered, as it should be."""
    return bool(scaler.is_enabled() and scaler.get_scale() >= 1.0)
