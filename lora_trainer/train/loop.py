"""The training loop: one readable function over plain values.

It has never heard of presets, the command line or files. Each `Action` (save, sample, validate)
decides for itself whether a step concerns it. The step is fenced by two rules: nothing in it decodes,
encodes or touches the disk, and every random number it uses was drawn by the feeder.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import Tensor, nn

from lora_trainer.data.loader import Feeder, Prepared, StepBatch, micro_batches, to_device
from lora_trainer.errors import StoppedBySignal
from lora_trainer.events import EventStream
from lora_trainer.families.base import Conditioning, Prediction
from lora_trainer.train.guards import GuardState, after_out_of_memory, after_step
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
class Training:
    """All the loop needs. `stop()` returns a signal number once the run should end; `clock` is in seconds.

    `batch_size` is images per optimizer step; `scaler` is enabled for fp16 only; `max_grad_norm` 0
    means no clipping.
    """

    model: Model
    parameters: Sequence[nn.Parameter]
    optimizer: torch.optim.Optimizer
    learning_rate: LearningRate
    scaler: torch.amp.GradScaler
    feeder: Feeder
    steps: int
    batch_size: int
    prefetch_steps: int
    max_grad_norm: float
    events: EventStream
    actions: Sequence[Action]
    stop: Callable[[], int | None]
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
    progress, pending = start, deque[_Report]()
    lag = CUDA_REPORT_LAG if training.model.device.type == "cuda" else 0
    if start.step == 0:  # a resumed run did these before it was interrupted
        for action in training.actions:
            if action.due(progress):
                action(progress)
    with training.feeder.stream(
        start.step, training.steps, ahead=training.prefetch_steps
    ) as batches:
        while progress.step < training.steps:
            # ---- data: prepared ahead, so what is measured here is only the wait for it
            began = training.clock()
            batch = next(batches)
            waited = training.clock() - began

            # ---- step: noise, predict, weighted loss, backward, clip, optimizer
            rate = training.learning_rate(progress.step)
            set_learning_rate(training.optimizer, rate)
            loss, guard = _gradients_that_fit(training, batch, progress.guard)
            grad_norm = _apply_gradients(training)

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
            progress = replace(progress, ending=step == training.steps or signal_number is not None)
            due = [action for action in training.actions if action.due(progress)]
            while due and pending:
                progress = _report(training, pending.popleft(), progress)
            for action in due:
                action(progress)
            if signal_number is not None:
                raise StoppedBySignal(
                    signal_number,
                    found=f"stopped after step {step} of {training.steps}; the state is saved",
                    fix="run the same command with --resume to go on",
                )
    return progress


def _gradients_that_fit(
    training: Training, batch: StepBatch, guard: GuardState
) -> tuple[Tensor, GuardState]:
    """Accumulate the step's gradients, halving the micro-batch until the device can hold it.

    The whole step is done again: its draws are already made, so nothing is lost or seen twice.
    """
    while True:
        try:
            return _gradients(training, batch, cap=guard.micro_batch), guard
        except RuntimeError as error:
            if not _is_out_of_memory(error):
                raise
            reason = str(error).splitlines()[0]
        # Outside the except block: its traceback would keep the tensors alive that must go.
        training.optimizer.zero_grad(set_to_none=True)
        clear_device_cache(garbage_collection=True)
        largest = max(len(group) for group in micro_batches(batch, cap=guard.micro_batch))
        smaller = after_out_of_memory(guard, images=largest)
        training.events.emit(
            "change",
            key="memory.micro_batch",
            old=guard.micro_batch,
            new=smaller.micro_batch,
            reason=reason,
        )
        guard = smaller


def _is_out_of_memory(error: RuntimeError) -> bool:
    """accelerate knows the allocators' messages; the CUDA runtime and cuBLAS have others."""
    text = str(error)
    return (
        bool(should_reduce_batch_size(error))
        or "CUDA error: out of memory" in text
        or "CUBLAS_STATUS_ALLOC_FAILED" in text
    )


def _gradients(training: Training, batch: StepBatch, *, cap: int) -> Tensor:
    """Add the gradients of (1/B) sum of weight_i loss_i; return that loss, detached, on the device."""
    total = torch.zeros((), device=training.model.device)
    for samples in micro_batches(batch, cap=cap):
        weights = torch.tensor([sample.weight for sample in samples], device=training.model.device)
        loss = (training.model.losses(samples) * weights).sum() / training.batch_size
        training.scaler.scale(loss).backward()
        total += loss.detach()
    return total


def _apply_gradients(training: Training) -> Tensor:
    """Clip and step unless the gradients are not finite; return their norm before clipping.

    Fused optimizers mask the step on the device through `found_inf`; others make the host wait.
    """
    optimizer, scaler = training.optimizer, training.scaler
    scaler.unscale_(optimizer)
    norm = nn.utils.clip_grad_norm_(
        training.parameters, training.max_grad_norm or float("inf"), foreach=True
    )
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
    vram_bytes = torch.cuda.max_memory_allocated() if training.model.device.type == "cuda" else 0
    values = {"loss": loss if loss - loss == 0.0 else None, "grad_norm": norm if finite else None}
    training.events.emit("step", **report.fields, **values, vram_bytes=vram_bytes)
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
    return replace(progress, guard=guard)


def _is_searching(scaler: torch.amp.GradScaler) -> bool:
    """Say whether an overflow only means that the fp16 loss scale is being lowered, as it should be."""
    return bool(scaler.is_enabled() and scaler.get_scale() >= 1.0)
