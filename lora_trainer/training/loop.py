"""The training loop over plain values: `_train` is the loop, `run` recovers from what stops it.

It knows nothing of presets, the command line or files. Each `Action` (save, sample, validate) decides
for itself at which steps it runs. Two rules hold for every step: it decodes no image and waits for no file
(cached texts are read ahead; a text encoder that is trained runs in the step), and every random number it
uses was drawn by the dataloader.

To follow one optimizer step, read `_train` from top to bottom, then these functions in this order:

1. `compute_gradients_with_oom_retry` (step.py) splits the samples into micro-batches that fit the device;
2. `forward_backward` (step.py) runs one forward and one backward pass over a micro-batch;
3. `Model.losses_of` (loss.py) adds noise, predicts, and compares with the target;
4. `ProcessGroup.reduce` (training/distributed/process_group.py) sums the gradients of all processes;
5. `optimizer_step` (step.py) clips the gradients and calls the optimizer;
6. `judge_step` (below) logs the step and lets the guards judge it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lora_trainer.checkpoint.states import NonFiniteAdapter
from lora_trainer.common.errors import (
    RESUME,
    LoraTrainError,
    MachineError,
    StoppedBySignal,
    TrainingStopped,
    first_line,
)
from lora_trainer.common.event_kinds import Phase, Step
from lora_trainer.hardware.device_calls import kind_of, may_copy_ahead
from lora_trainer.network.out_of_memory import device_memory, free_memory, is_lost, is_out_of_memory
from lora_trainer.network.pinned_memory import AsyncRead
from lora_trainer.training.actions import Action, Progress, SaveAction
from lora_trainer.training.guards import (
    ZERO_STEPS,
    GuardState,
    NoFallbackLeft,
    Unstable,
    no_gradients,
    no_movement,
)
from lora_trainer.training.optimizers import set_learning_rate
from lora_trainer.training.step import (
    PartialOptimizerStep,
    Training,
    compute_gradients_with_oom_retry,
    fallback_for,
    lost_device,
    optimizer_step,
    use_less_memory,
)

CUDA_REPORT_LAG = 2  # steps; reading a loss at once would make the host wait for the device


def train_steps(training: Training, start: Progress) -> Progress:
    """Train from `start` to the last of `training.settings.steps` and return where it ended.

    Raises StoppedBySignal when a stop was requested, after the actions have run with `ending` set, and
    TrainingStopped when no remedy is left; a saved state then holds the last whole step.
    """
    progress = start
    if start.step == 0:  # a resumed run has already validated and sampled the untouched base
        training.events.emit(Phase(phase="base", message="before the first step", done=0, total=0))
        progress = _act(training, _due(training, progress), progress)
        training.look_on(progress)
    steps = training.settings.steps
    training.events.emit(Phase(phase="train", message="training", done=start.step, total=steps))
    while True:
        try:
            return _train(training, progress)
        except Unstable as unstable:
            if training.restore is None:
                raise unstable.stopped() from None
            good = training.restore()
            guard = good.guard.after_rollback(unstable)
            key = "optimizer.learning_rate factor"
            old, new = unstable.state.lr_scale, guard.lr_scale
            reason = f"back to step {good.step}: {unstable.reason}"
            training.tell_change(key, old, new, reason=reason)
            training.events.problem(
                f"{key}: {old:g} -> {new:g}, {reason}",
                fix="nothing if this is rare; else lower optimizer.learning_rate",
                code="TRN-01",
            )
            progress = replace(good, guard=guard, ending=False)
            continue
        except PartialOptimizerStep as error:
            torn, reason = error.guard, error.reason
        except RuntimeError as error:
            if not is_lost(error):
                raise
            raise lost_device(training, progress.guard, error) from error
        # Recover outside the except block: inside it the traceback would hold the frames, and with them
        # the gradients whose memory has to be freed.
        guard = use_less_memory(training, torn, images=torn.micro_batch, reason=reason)
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
        progress = replace(good, guard=good.guard.after_going_back(guard), ending=False)


def _train(training: Training, start: Progress) -> Progress:
    """Train from `start` to the end; raises Unstable and PartialOptimizerStep, and the errors of `run`."""
    progress, reports, settings = start, _Reports(training=training), training.settings
    stream = training.feeder.stream(start.step, settings.steps)
    with stream as prepared_steps:
        while progress.step < settings.steps and not _has_converged(training, progress):
            try:
                # ---- data: a thread prepares batches ahead, so this is the time the device may sit idle
                began_s = time.perf_counter()
                samples = next(prepared_steps)
                waited_s = time.perf_counter() - began_s

                # ---- gradients: the noise that the dataloader drew is added; prediction, weighted loss, backward
                # The rate is a function of the step number and of the guards' factor, both of which
                # the resume state holds: a resume needs no scheduler state.
                rate = training.learning_rate(progress.step) * progress.guard.lr_scale
                set_learning_rate(training.optimizer, rate)
                for parameter, end_step in training.stages:
                    parameter.requires_grad_(progress.step < end_step)
                loss, guard = compute_gradients_with_oom_retry(training, samples, progress.guard)
            except (MachineError, TrainingStopped, StoppedBySignal, MemoryError) as error:
                if isinstance(error, NoFallbackLeft):  # a resume must not try again what failed
                    progress = replace(progress, guard=error.guard)
                # The weights are those of the last whole step, so its state is worth saving. With several
                # processes the others may be in the next collective already and would never save.
                if progress.step > start.step and training.ranks.is_single:
                    _save_whole_steps(training, reports.judge(progress))
                raise
            # ---- update: no gradient has been averaged yet: each pass divides by the batch size of all processes, so
            # their sum is the mean over the whole batch, however the images were shared out.
            loss = training.ranks.reduce(training.parameters, loss, ask=training.stop)
            reached = any(parameter.grad is not None for parameter in training.parameters)
            # From here on `step` counts finished steps from 1; `progress.step` was the 0-based index.
            step, images = progress.step + 1, progress.images + settings.batch_size
            grad_norm = optimizer_step(training, loss, guard, step=step)

            # ---- report: the copy of loss and norm starts now and is read a few steps later on a GPU,
            # because reading it now would make the host wait until the device has finished the step
            progress = replace(progress, step=step, images=images, guard=guard)
            done = _DoneStep(
                step=step,
                images=images,
                data_wait_s=waited_s,
                # Prodigy multiplies the rate by its estimate d.
                lr=rate * float(training.optimizer.param_groups[0].get("d", 1.0)),
                epoch=training.feeder.epochs_after(step),
                latents=sum(sample.latents[0].numel() for sample in samples),
                reached=reached,
            )
            reports.add(done, loss, grad_norm)
            progress = reports.judge(progress, but_last=report_lag(training.model.device))

            # ---- save, sample, validate, stop
            # A signal after the last step changes nothing: the run ends as it would have.
            is_last = step == settings.steps
            signal_number = None if is_last else training.ranks.stop_asked(training.stop)
            ending = signal_number is not None or is_last
            progress = replace(progress, ending=ending, stopping=signal_number is not None)
            if due := _due(training, progress):
                # A state on disk must hold the guards' verdict on every step before it, so actions wait
                # for the reports that are still pending.
                progress = _act(training, due, reports.judge(progress))
                reports.lap_began_s = time.perf_counter()
            # Not an action: that it looks must not make the guards judge a step earlier than without it.
            looks_from_s = time.perf_counter()
            training.look_on(progress)
            reports.lap_began_s += time.perf_counter() - looks_from_s
            if not progress.ending and _has_converged(training, progress):
                progress = replace(progress, ending=True)
                progress = _act(training, _due(training, progress, but=due), progress)
            if signal_number is not None:
                raise StoppedBySignal(
                    signal_number,
                    found=f"stopped after step {step} of {settings.steps}; the state is saved",
                    fix=RESUME,
                )
    return progress


def _has_converged(training: Training, progress: Progress) -> bool:
    """Say whether the validation loss has not fallen for `stop_after_validations` validations.

    It is a function of the saved guard state alone, so a resumed run decides the same.
    """
    limit = training.settings.stop_after_validations
    return limit is not None and progress.guard.best.stale >= limit


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
    except (LoraTrainError, MemoryError) as error:
        # The caller raises the error of the step, which the user needs more.
        fix = error.fix if isinstance(error, LoraTrainError) else "free memory"
        training.events.problem(first_line(error), fix=fix, code="CKP-03")


def _due(training: Training, progress: Progress, *, but: Collection[Action] = ()) -> list[Action]:
    """Return the actions of this step, in order, except those `but` that it has run already."""
    done = {id(action) for action in but}
    return [a for a in training.actions if id(a) not in done and a.due(progress)]


def _act(training: Training, due: Sequence[Action], progress: Progress) -> Progress:
    """Run the due actions in order; each sees the guard state that the action before it returned."""
    for action in due:
        try:
            progress = replace(progress, guard=_with_room(training, action, progress))
        except NonFiniteAdapter as error:
            # The weights are the fault and not the disk: going back to the last good state mends them.
            raise Unstable(error.found, progress.guard) from None
    return progress


def _with_room(training: Training, action: Action, progress: Progress) -> GuardState:
    """Run an action; out of memory, run it once more with one image at a time, then leave it out.

    Return the guard state afterwards. Leaving an action out does not change the training: an action changes
    the adapter only through the guard state it returns. After another error the action is repeated on the plain
    way (see step.py), but only in a run of one process, as the other processes may have gone on. A save computes
    nothing: its errors, which may be those of the save before it, are raised.
    """
    planned = progress.guard.micro_batch
    guard, sizes, reason = progress.guard, [planned, 1], ""
    while sizes:
        fall_back = None
        try:
            judged = action(replace(progress, guard=replace(guard, micro_batch=sizes[0])))
        except Exception as error:
            if isinstance(error, RuntimeError) and is_out_of_memory(error):
                reason = first_line(error)
            elif training.ranks.is_single and not isinstance(action, SaveAction):
                fall_back = fallback_for(training, guard, error, images=sizes[0])
            else:
                raise
        else:
            # One image at a time was for this action only; steps keep the micro-batch that fits them.
            return guard if judged is None else replace(judged, micro_batch=planned)
        if fall_back is not None:
            guard = fall_back()
        else:
            sizes.pop(0)
            free_memory()
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
    # An answer to another error stays in force: the next step must not try the failed feature again.
    return replace(guard, micro_batch=planned)


@dataclass(frozen=True, kw_only=True)
class _DoneStep:
    """What is known of a step as soon as its kernels are queued; the names are those of the event `Step`."""

    step: int
    images: int
    data_wait_s: float
    lr: float
    epoch: float
    latents: int
    reached: bool
    """Whether a parameter had a gradient."""


@dataclass(frozen=True, kw_only=True)
class _PendingStep:
    """A finished step whose numbers may still be on their way to the host."""

    done: _DoneStep
    loss_and_norm: AsyncRead
    left_zero: AsyncRead | None
    """At step ZERO_STEPS: 1.0 if a parameter that began at zero has changed."""


@dataclass(kw_only=True)
class _Reports:
    """The finished steps that wait for their numbers, oldest first; `judge` logs them and asks the guards.

    A step's `seconds` are those from one report to the next, without the time that actions take. On a GPU
    reports are a few steps late, so they are the duration of a step but not of the step that is reported.
    """

    training: Training
    lap_began_s: float = field(default_factory=time.perf_counter)
    _pending: deque[_PendingStep] = field(default_factory=deque)

    def lap_s(self) -> float:
        """Return the time since the last report, and begin the next lap."""
        began_s, self.lap_began_s = self.lap_began_s, time.perf_counter()
        return self.lap_began_s - began_s

    def add(self, done: _DoneStep, loss: Tensor, grad_norm: Tensor) -> None:
        """Start copying the numbers of a finished step to the host."""
        left_zero, device = None, self.training.model.device
        if done.step == ZERO_STEPS and self.training.from_zero:
            moved = [parameter.detach().any().to(device) for parameter in self.training.from_zero]
            left_zero = AsyncRead(torch.stack(moved).any().float().reshape(1))
        numbers = AsyncRead(torch.stack([loss, grad_norm]))
        pending = _PendingStep(done=done, loss_and_norm=numbers, left_zero=left_zero)
        self._pending.append(pending)

    def judge(self, progress: Progress, *, but_last: int = 0) -> Progress:
        """Log the pending steps and let the guards judge them; raises TrainingStopped and Unstable."""
        while len(self._pending) > but_last:
            guard = judge_step(self, progress.guard, self._pending.popleft())
            progress = replace(progress, guard=guard)
        return progress


def judge_step(reports: _Reports, guard: GuardState, pending: _PendingStep) -> GuardState:
    """Log one finished step and let the guards judge it; raises TrainingStopped and Unstable."""
    training, done, scaler = reports.training, pending.done, reports.training.scaler
    step, left_zero = done.step, pending.left_zero
    loss, norm = pending.loss_and_norm.read()
    seconds = reports.lap_s()  # after the read, which may have waited for the device
    # A loss that is not finite has taken the place of the norm (see `_clip_and_step` in step.py).
    finite = math.isfinite(norm)
    memory = device_memory(training.model.device)
    training.events.emit(
        Step(
            step=step,
            images=done.images,
            data_wait_s=done.data_wait_s,
            lr=done.lr,
            epoch=done.epoch,
            latents=done.latents,
            loss=loss if math.isfinite(loss) else math.nan,
            grad_norm=norm if finite else math.nan,
            vram_bytes=memory.vram_bytes,
            vram_reserved_bytes=memory.vram_reserved_bytes,
            vram_used_bytes=memory.vram_used_bytes,
            vram_now_bytes=memory.vram_now_bytes,
            host_bytes=memory.host_bytes,
            host_own_bytes=memory.host_own_bytes,
            seconds=seconds,
        )
    )
    # torch's scaler starts at a high scale and halves it at each overflow; that search is normal. Below 1 it has
    # failed: the gradients overflow by themselves. A loss is not scaled: no other scale makes it finite.
    overflowed = not finite and math.isfinite(loss) and scaler.is_enabled()
    if overflowed and (scale := scaler.get_scale()) >= 1.0:
        reason = "fp16 gradients overflowed"
        training.tell_change("loss scale", 2 * scale, scale, reason=reason)
        return guard
    if not finite:
        training.events.problem(
            f"step {step} was skipped: its gradients were not finite numbers",
            fix="nothing if this is rare; else lower optimizer.learning_rate",
            code="TRN-01",
        )
    guard = guard.after_step(finite=finite, step=step, start=training.settings.init_from)
    if not finite:
        return guard
    # Whether the adapter learns at all.
    learning, device = guard.learning.after_gradient(norm), kind_of(training.model.device).name
    if learning.zero_gradients >= ZERO_STEPS:
        loss_scale = float(scaler.get_scale()) if scaler.is_enabled() else None
        raise no_gradients(
            step, loss=loss, device=device, loss_scale=loss_scale, reached=done.reached
        )
    if left_zero is not None and left_zero.read() == [0.0]:
        rates = [training.learning_rate(index) for index in range(training.settings.steps)]
        raise no_movement(step, rate=max(rates), rate_sum=sum(rates[:step]), device=device)
    return replace(guard, learning=learning)
