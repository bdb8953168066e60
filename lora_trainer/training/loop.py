"""The training loop: one readable function over plain values.

It knows nothing of presets, the command line or files. Each `Action` (save, sample, validate) decides
for itself at which steps it runs. Two rules hold for every step: it decodes no image, encodes no
caption and touches no disk, and every random number it uses was drawn by the dataloader.

To follow one optimizer step, read `_train` from top to bottom, then these functions in this order:

1. `compute_gradients_with_oom_retry` (step.py) splits the samples into micro-batches that fit the device;
2. `forward_backward` (step.py) runs one forward and one backward pass over a micro-batch;
3. `Model.losses_of` (loss.py) adds noise, predicts, and compares with the target;
4. `ProcessGroup.reduce` (training/distributed/process_group.py) sums the gradients of all processes;
5. `optimizer_step` (step.py) clips the gradients and calls the optimizer;
6. `_report` (below) logs the step and lets the guards judge it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lora_trainer.common.errors import (
    RESUME,
    LoraTrainError,
    MachineError,
    StoppedBySignal,
    TrainingStopped,
    first_line,
)
from lora_trainer.common.events import EventStream
from lora_trainer.hardware.device_calls import kind_of, may_copy_ahead
from lora_trainer.network.async_copies import AsyncRead
from lora_trainer.network.out_of_memory import device_memory, free_memory, is_lost, is_out_of_memory
from lora_trainer.training.batch import Sample
from lora_trainer.training.freeze import enter_stages
from lora_trainer.training.guards import (
    GuardState,
    Unstable,
    after_rollback,
    after_step,
    after_torn_step,
    after_training_loss,
    changes,
    stopped,
)
from lora_trainer.training.learning_check import (
    ZERO_STEPS,
    LearningContext,
    after_gradient,
    without_gradients,
    without_movement,
)
from lora_trainer.training.optimizers import effective_rate, set_learning_rate
from lora_trainer.training.plain_retry import go_plainly, lost_device, why_again
from lora_trainer.training.progress import Action, Progress
from lora_trainer.training.step import (
    apply_next_fallback,
    compute_gradients_with_oom_retry,
    optimizer_step,
)
from lora_trainer.training.training import PartialOptimizerStep, Training

CUDA_REPORT_LAG = 2  # steps; reading a loss at once would make the host wait for the device


@dataclass(frozen=True, kw_only=True)
class _Report:
    """A finished step whose loss and gradient norm may still be on their way from the device.

    `reached` is true if at least one parameter had a gradient. `left_zero` is read at step ZERO_STEPS only:
    1.0 if a parameter that began at zero has changed, else 0.0.
    """

    fields: dict[str, Any]
    loss_and_norm: AsyncRead
    reached: bool
    left_zero: AsyncRead | None = None


class _Lap:
    """Measures the seconds from one report to the next, without the time that actions take.

    On a GPU reports are a few steps late, so one lap is the duration of a step but not of the step that is
    being reported.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        self._began_s = self._clock()

    def done(self) -> float:
        began_s = self._began_s
        self.restart()
        return self._began_s - began_s


def run(training: Training, start: Progress) -> Progress:
    """Train from `start` to `training.steps` and return where it ended.

    Raises StoppedBySignal when a stop was requested, after the actions have run with `ending` set, and
    TrainingStopped when no remedy is left; the adapter then still holds its last good values.
    """
    progress = start
    if start.step == 0:  # a resumed run has already validated and sampled the untouched base
        progress = _act(training, _due(training, progress), progress)
    while True:
        try:
            return _train(training, progress)
        except Unstable as unstable:
            if training.restore is None:
                raise stopped(unstable) from None
            good = training.restore()
            guard = after_rollback(good.guard, unstable)
            reason = f"back to step {good.step}: {unstable.reason}"
            _tell_changes(training.events, unstable.state, guard, reason=reason)
            progress = replace(good, guard=guard, ending=False)
            continue
        except PartialOptimizerStep as error:
            torn = error.guard, error.reason
        except RuntimeError as error:
            if not is_lost(error):
                raise
            raise lost_device(training, progress.guard, error) from error
        # Recover outside the except block: inside it the traceback would hold the frames, and with them
        # the gradients whose memory has to be freed.
        progress = _mended(training, *torn)


def _mended(training: Training, torn: GuardState, reason: str) -> Progress:
    """Apply the next remedy and go back to the last good state after a half-applied optimizer step."""
    guard = apply_next_fallback(training, torn, images=torn.micro_batch, reason=reason)
    if training.restore is None or not training.ranks.is_single:
        raise TrainingStopped(
            f"the device ran out of memory in the optimizer: {reason}",
            fix="run the same command with --resume",
        )
    good = training.restore()
    training.events.problem(
        f"back to step {good.step}: an optimizer step ran out of memory; the steps since then are repeated",
        fix="nothing if this is rare; else lower hardware.vram_limit_gib",
        code="TRN-02",
    )
    return replace(good, guard=after_torn_step(good.guard, guard), ending=False)


def _train(training: Training, start: Progress) -> Progress:
    """Train from `start` to the end; raises Unstable and PartialOptimizerStep, and the errors of `run`."""
    progress, pending = start, deque[_Report]()
    lag = report_lag(training.model.device)
    lap = _Lap(training.clock)
    with training.feeder.stream(
        start.step, training.steps, ahead=training.prefetch_steps
    ) as prepared_steps:
        while progress.step < training.steps and not _has_converged(training, progress):
            try:
                # ---- data: a thread prepares batches ahead, so this is the time the device may sit idle
                began = training.clock()
                samples = next(prepared_steps)
                waited = training.clock() - began

                # ---- gradients: the noise that the dataloader drew is added; prediction, weighted loss, backward
                # The rate is a function of the step number and of the guards' factor, both of which
                # the resume state holds: a resume needs no scheduler state.
                rate = training.learning_rate(progress.step) * progress.guard.lr_scale
                set_learning_rate(training.optimizer, rate)
                enter_stages(training.stages, step=progress.step)
                loss, guard = compute_gradients_with_oom_retry(training, samples, progress.guard)
            except (MachineError, TrainingStopped):
                # The weights are those of the last whole step, so its state is worth saving. With several
                # processes the others may be in the next collective already and would never save.
                if progress.step > start.step and training.ranks.is_single:
                    while pending:
                        progress = _report(training, pending.popleft(), progress, lap)
                    _save_whole_steps(training, progress)
                raise
            # ---- update: no gradient has been averaged yet: each pass divides by the batch size of all processes, so
            # their sum is the mean over the whole batch, however the images were shared out.
            loss = training.ranks.reduce(
                training.parameters,
                loss,
                ask=training.stop,
                in_place=training.speedups.keeps_gradients,
            )
            reached = any(parameter.grad is not None for parameter in training.parameters)
            # From here on `step` counts finished steps from 1; `progress.step` was the 0-based index.
            step, images = progress.step + 1, progress.images + training.batch_size
            grad_norm = optimizer_step(training, loss, guard, step=step)

            # ---- report: the copy of loss and norm starts now and is read a few steps later on a GPU,
            # because reading it now would make the host wait until the device has finished the step
            progress = replace(progress, step=step, images=images, guard=guard)
            fields = {"step": step, "images": images, "data_wait_s": waited}
            fields |= {"lr": effective_rate(training.optimizer, rate)}
            epoch = training.feeder.epochs_after(step)
            fields |= {"epoch": epoch, "latents": _latent_positions(samples)}
            measured = AsyncRead(torch.stack([loss, grad_norm]))
            left_zero = _left_zero(training) if step == ZERO_STEPS else None
            pending.append(
                _Report(fields=fields, loss_and_norm=measured, reached=reached, left_zero=left_zero)
            )
            while len(pending) > lag:
                progress = _report(training, pending.popleft(), progress, lap)

            # ---- save, sample, validate, stop
            # A signal after the last step changes nothing: the run ends as it would have.
            may_stop = step < training.steps
            signal_number = training.ranks.stop_asked(training.stop) if may_stop else None
            ending = signal_number is not None or step == training.steps
            progress = replace(progress, ending=ending, stopping=signal_number is not None)
            due = _due(training, progress)
            # A state on disk must hold the guards' verdict on every step before it, so actions wait for
            # the reports that are still pending.
            while due and pending:
                progress = _report(training, pending.popleft(), progress, lap)
            progress = _act(training, due, progress)
            if due:
                lap.restart()
            if not progress.ending and _has_converged(training, progress):
                progress = _end_early(training, due, progress)
            if signal_number is not None:
                raise StoppedBySignal(
                    signal_number,
                    found=f"stopped after step {step} of {training.steps}; the state is saved",
                    fix=RESUME,
                )
    return progress


def _has_converged(training: Training, progress: Progress) -> bool:
    """Say whether the validation loss has not fallen for `stop_after_validations` validations.

    It is a function of the saved guard state alone, so a resumed run decides the same.
    """
    limit = training.stop_after_validations
    return limit is not None and progress.guard.best.stale >= limit


def _end_early(
    training: Training, finished_actions: Sequence[Action], progress: Progress
) -> Progress:
    """Run the actions that are due at the end of a training, except those this step has run already."""
    progress = replace(progress, ending=True)
    due = _due(training, progress)
    return _act(
        training,
        [action for action in due if all(action is not one for one in finished_actions)],
        progress,
    )


def report_lag(device: torch.device) -> int:
    """Return by how many steps the reading of a loss is delayed on `device`."""
    # Guards act on a loss when it is read. Actions read all pending losses early, so with a lag a
    # guard's reaction depends on when a run saves or stops; bit-exact runs must not depend on that.
    if not may_copy_ahead(device) or torch.are_deterministic_algorithms_enabled():
        return 0
    return CUDA_REPORT_LAG


def _save_whole_steps(training: Training, progress: Progress) -> None:
    """Save the result of all finished steps, as a requested stop would, because the next one failed."""
    progress = replace(progress, ending=True, stopping=True)
    try:
        _act(training, _due(training, progress), progress)
    except (
        LoraTrainError
    ) as error:  # the caller raises the error of the step, which the user needs more
        training.events.problem(error.found, fix=error.fix, code="CKP-03")


def _due(training: Training, progress: Progress) -> list[Action]:
    return [action for action in training.actions if action.due(progress)]


def _act(training: Training, due: Sequence[Action], progress: Progress) -> Progress:
    """Run the due actions in order; each sees the guard state that the action before it returned."""
    for action in due:
        guard = _with_room(training, action, progress)
        if guard is not None:
            reason = f"the validation loss has stopped falling at step {progress.step}"
            _tell_changes(training.events, progress.guard, guard, reason=reason)
            progress = replace(progress, guard=guard)
    return progress


def _with_room(training: Training, action: Action, progress: Progress) -> GuardState | None:
    """Run an action; out of memory, run it once more with one image at a time, then leave it out.

    Leaving an action out does not change the training: an action changes the adapter only through the
    guard state it returns. After another error the first action of its class is repeated on the plain
    way (see plain_retry.py), but only in a run of one process, as the other processes may have gone on.
    """
    # Micro-batch sizes to try, last first.
    guard, images = progress.guard, [1, progress.guard.micro_batch]
    while images:
        tried = replace(progress, guard=replace(guard, micro_batch=images[-1]))
        full = False
        try:
            judged = action(tried)
        except Exception as error:
            full = isinstance(error, RuntimeError) and is_out_of_memory(error)
            if not full and not training.ranks.is_single:
                raise
            reason = (
                first_line(error)
                if full
                else why_again(training, guard, error, firsts={type(action)})
            )
        else:
            training.plain.proven.add(type(action))
            if judged is not None:
                # One image at a time was for this action only; steps keep the micro-batch that fits them.
                return replace(judged, micro_batch=progress.guard.micro_batch)
            return None if guard is progress.guard else guard
        if full:
            images.pop()
            training.speedups.make_room()
            free_memory()
        else:
            guard = go_plainly(training, guard, reason=reason)
    # A stop needs its saved state, and in a run of several processes the others wait for this one's share.
    if progress.stopping or not training.ranks.is_single:
        raise TrainingStopped(
            f"{action.what} of step {progress.step} is missing: {reason}", fix=RESUME
        )
    training.events.problem(
        f"{action.what} of step {progress.step} was skipped: {reason}",
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


def _left_zero(training: Training) -> AsyncRead | None:
    """Start copying to the host whether any parameter that began at zero has changed: 1.0 or 0.0."""
    if not training.from_zero:
        return None
    device = training.model.device
    has_nonzero = [parameter.detach().any().to(device) for parameter in training.from_zero]
    return AsyncRead(torch.stack(has_nonzero).any().float().reshape(1))


def _latent_positions(samples: Sequence[Sample]) -> int:
    """Return the latent positions (height x width, summed over the images) that a step computes.

    Steps of as many positions take about as long, which is how the pace of a run is judged.
    """
    return sum(sample.shape[-2] * sample.shape[-1] for sample in samples)


def _report(
    training: Training,
    report: _Report,
    progress: Progress,
    lap: _Lap,
) -> Progress:
    """Log one finished step and let the guards judge it; raises TrainingStopped and Unstable."""
    loss, norm = report.loss_and_norm.read()
    seconds = lap.done()
    # x - x is 0 for finite numbers and NaN for NaN and infinities. A loss that is not
    # finite has taken the place of the norm (see `_clip_and_step` in step.py).
    finite = norm - norm == 0.0
    memory = device_memory(training.model.device).fields()
    values = {"loss": loss if loss - loss == 0.0 else None, "grad_norm": norm if finite else None}
    training.events.emit("step", **report.fields, **values, **memory, seconds=seconds)
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
    if finite:
        guard = _learning(training, report, guard, loss=loss, norm=norm)
    if finite and training.watch_spikes:
        guard = after_training_loss(guard, loss)
        reason = f"the loss jumped at step {report.fields['step']}"
        _tell_changes(training.events, progress.guard, guard, reason=reason)
    return replace(progress, guard=guard)


def _learning(
    training: Training,
    report: _Report,
    guard: GuardState,
    *,
    loss: float,
    norm: float,
) -> GuardState:
    """Update the check that the adapter learns at all with a finite step; raises TrainingStopped."""
    step, learning = report.fields["step"], after_gradient(guard.learning, norm=norm)
    if learning.zero_gradients >= ZERO_STEPS:
        raise without_gradients(step, _circumstances(training, report), loss=loss)
    if report.left_zero is not None and report.left_zero.read() == [0.0]:
        raise without_movement(step, _circumstances(training, report))
    return replace(guard, learning=learning)


def _circumstances(training: Training, report: _Report) -> LearningContext:
    scaler, rate = training.scaler, training.learning_rate
    return LearningContext(
        device=kind_of(training.model.device).name,
        rate=max(map(rate, range(training.steps))),
        rate_sum=sum(map(rate, range(report.fields["step"]))),
        loss_scale=float(scaler.get_scale()) if scaler.is_enabled() else None,
        reached=report.reached,
    )


def _is_searching(scaler: torch.amp.GradScaler) -> bool:
    """Say whether an overflow is part of the normal search for the fp16 loss scale.

    torch's scaler starts at a high scale and halves it at each overflow. Below 1 the search has failed:
    the gradients overflow by themselves, and the guards have to count the step.
    """
    return bool(scaler.is_enabled() and scaler.get_scale() >= 1.0)
