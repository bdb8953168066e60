"""The actions between steps: their type, and all but sample images: validation loss, check for learning, saving.

Saving is the last action of a step: a state on disk then means that everything logged up to that step
has happened, and a resume repeats nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import ClassVar, Protocol

import torch

from lora_trainer.checkpoint.states import (
    Copy,
    TrainingState,
    freeze,
    tensors_digest,
)
from lora_trainer.checkpoint.writer import Export, StateWriter
from lora_trainer.common.event_kinds import BaseLosses, Change, Learned, Validation
from lora_trainer.common.events import EventStream
from lora_trainer.lora.adapter import Adapter
from lora_trainer.training.dataloader import Sample, split
from lora_trainer.training.distributed.process_group import ProcessGroup
from lora_trainer.training.guards import BASE_STEP, GuardState, no_effect
from lora_trainer.training.loss import Model
from lora_trainer.training.optimizers import restore_optimizer


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Optimizer steps finished, images they used, and the guard state.

    `ending` is set when no further step follows in this process. `stopping` is set as well when a stop was
    requested: then only the actions that a resume needs are due.
    """

    step: int
    images: int
    guard: GuardState
    ending: bool = False
    stopping: bool = False

    @property
    def is_finished(self) -> bool:
        """Whether training is finished. A run that stops half-way must decide as if it had gone on."""
        return self.ending and not self.stopping


class Action(Protocol):
    """Something that runs between steps; `due` is called before the first step and after every step."""

    what: ClassVar[str]
    """The result of the action as a noun phrase, to begin a message with: "the validation"."""

    def due(self, progress: Progress) -> bool:
        """Say whether the action runs at this step; must be cheap."""

    def __call__(self, progress: Progress) -> GuardState | None:
        """Run the action; a returned guard state replaces that of `progress`."""


@dataclass(frozen=True, kw_only=True)
class FixedLosses:
    """Computes mean unweighted losses of fixed images at fixed timesteps with fixed noise.

    Two calls differ only by the weights, so small changes of the loss can be seen. `batches` hold every
    image once per timestep, in the order of timesteps; each process of `ranks` computes its share.
    """

    batches: Sequence[Sequence[Sample]]
    model: Model
    ranks: ProcessGroup

    @torch.no_grad()
    def by_timestep(self, *, cap: int) -> list[float]:
        """Return the mean loss of each batch, at most `cap` images in one pass."""
        rank, count = self.ranks.dist_env.rank, self.ranks.dist_env.count
        # By turns, so that shares differ by one image at most whatever the number of processes.
        shares = [split(samples[rank::count], cap=cap) for samples in self.batches]
        sums = [[self.model.losses(part).sum() for part in parts] for parts in shares]
        # One reading for each batch: one for each pass would make the host wait for the device.
        totals = self.ranks.sum([float(torch.stack(s).sum()) if s else 0.0 for s in sums])
        return [total / len(self.batches[0]) for total in totals]


@dataclass(frozen=True, kw_only=True)
class ValidateAction:
    """Computes the mean unweighted loss of the held-out images over stratified timesteps with fixed noise.

    Step 0 is the untouched base, so the gain of the adapter can be read off. `chosen()` puts the weights to
    measure (averaged weights, say) in place while a block runs; `on_best` is called inside it whenever the
    loss is the lowest so far, and keeps a copy of those weights. After `patience` validations without a clearly
    lower loss the learning rate is multiplied by `lower_to`; None: never.
    """

    what: ClassVar = "the validation"
    fixed: FixedLosses
    every_steps: int
    events: EventStream
    patience: int | None = None
    lower_to: float = 1.0
    watch_best: bool = False
    on_best: Callable[[], None] = lambda: None
    chosen: Callable[[], AbstractContextManager[None]] = nullcontext

    def due(self, progress: Progress) -> bool:
        return (
            bool(self.fixed.batches)
            and self.every_steps > 0
            and (progress.step % self.every_steps == 0 or progress.is_finished)
        )

    def __call__(self, progress: Progress) -> GuardState:
        began_s = time.monotonic()
        with self.chosen():
            losses = self.fixed.by_timestep(cap=progress.guard.micro_batch)
        mean = sum(losses) / len(losses)
        timesteps = [int(samples[0].level.timestep) for samples in self.fixed.batches]
        self.events.emit(
            Validation(
                step=progress.step,
                loss=mean,
                by_timestep=tuple(zip(timesteps, losses, strict=True)),
                images=len(self.fixed.batches[0]),
                seconds=time.monotonic() - began_s,
            )
        )
        # What follows is the same on all processes, as all have the same losses.
        guard = progress.guard
        if self.patience is not None:
            guard = guard.after_validation(mean, patience=self.patience, lower_to=self.lower_to)
            if guard.lr_scale != progress.guard.lr_scale:
                self.events.emit(
                    Change(
                        step=progress.step,
                        key="optimizer.learning_rate factor",
                        old=progress.guard.lr_scale,
                        new=guard.lr_scale,
                        reason=f"{self.patience} validations in a row without a clearly lower loss",
                    )
                )
        if not self.watch_best:
            return guard
        guard = guard.with_best(mean, step=progress.step)
        if guard.best.step == progress.step > 0:
            with self.chosen():
                self.on_best()
        return guard


@dataclass(frozen=True, kw_only=True)
class LearningAction:
    """Compares, once in a run, the losses of a few training images with their losses after the first step.

    `step` is the step of the comparison, None in a run too short for one. `so_far` is the sum of the
    learning rates between the two as a share of the sum over the run, `rate` the learning rate of the settings.
    Raises TrainingStopped when the losses are the same and will be at the end.
    """

    what: ClassVar = "the check that the adapter learns"
    fixed: FixedLosses
    step: int | None
    so_far: float
    rate: float
    alpha_over_rank: float
    events: EventStream

    def due(self, progress: Progress) -> bool:
        # Once each: a save is asked for again at a step whose actions have run, and nothing must be computed then.
        next_step = self.step if progress.guard.learning.base else BASE_STEP
        return self.step is not None and progress.step == next_step

    def __call__(self, progress: Progress) -> GuardState | None:
        began_s, guard = time.monotonic(), progress.guard
        losses = self.fixed.by_timestep(cap=guard.micro_batch)
        step, seconds = progress.step, time.monotonic() - began_s
        if not guard.learning.base:
            # With a loss that is not a number nothing can be compared, and no state could be written.
            base = losses if all(map(math.isfinite, losses)) else []
            self.events.emit(BaseLosses(step=step, seconds=seconds, losses=base))
            return replace(guard, learning=replace(guard.learning, base=base))
        change = guard.learning.least_change(losses, so_far=self.so_far)
        looked = Learned(step=step, seconds=seconds, change=change)
        self.events.emit(looked)
        if not looked.learns:
            raise no_effect(
                progress.step, change=change, rate=self.rate, alpha_over_rank=self.alpha_over_rank
            )
        return None


@dataclass(frozen=True, kw_only=True)
class SaveAction:
    """Saves a resume state and a rolling export at regular steps, on request, and when the run ends early.

    `export(progress, copy)` copies the adapter and returns the function that writes the rolling file and
    prunes old ones; at the end of the run there is none, as the final export takes its place. Training
    waits only for copies, except at the end, where it waits until the state is on disk. The last save is
    tried even if earlier ones failed. A failure at the end of the run is a reported problem; a failure at
    a requested stop is the error that the run ends with, because nothing else holds the result.
    """

    what: ClassVar = "the saved state"
    writer: StateWriter
    adapter: Adapter
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    export: Callable[[Progress, Copy], Export]
    every_steps: int
    every_images: int | None
    batch_size: int
    save_requested: Callable[[], bool]

    def due(self, progress: Progress) -> bool:
        return progress.step > 0 and (self.is_regular(progress) or self.save_requested())

    def is_regular(self, progress: Progress) -> bool:
        """Say whether a save is due by the schedule alone; the answer is the same on all processes."""
        if progress.step == 0 or progress.ending:
            return progress.step > 0
        if self.every_steps > 0 and progress.step % self.every_steps == 0:
            return True
        # A batch may contain the end of an epoch, and several epochs may end in one batch.
        before, epoch = progress.images - self.batch_size, self.every_images
        return epoch is not None and progress.images // epoch > before // epoch

    def __call__(self, progress: Progress) -> None:
        """Copy the state and start writing it.

        Raises the errors of `StateWriter.save`, and MachineError when the run is to stop and its state
        cannot be written.
        """
        export = None if progress.is_finished else partial(self.export, progress)
        self.writer.save(self.state(progress), export=export, last=progress.ending)
        if progress.is_finished:
            self.writer.wait()  # reports a failed write; the final export is still to be made
        elif progress.ending:
            self.writer.wait_for_acknowledgement()

    def state(self, progress: Progress) -> TrainingState:
        """Return the state of a resume at this point; its tensors are the live ones, not copies."""
        scaler = self.scaler.state_dict()  # empty without fp16
        return TrainingState(
            step=progress.step,
            images_seen=progress.images,
            adapter=self.adapter.state(),
            optimizer=self.optimizer.state_dict(),
            guard=asdict(progress.guard),
            loss_scale=scaler.get("scale"),
            loss_scale_growth=scaler.get("_growth_tracker"),
        )

    def restored(self, state: TrainingState, *, micro_batch: int) -> Progress:
        """Load adapter, optimizer and loss scale from `state`; return its progress."""
        self.adapter.load_state(state.adapter)
        restore_optimizer(self.optimizer, state.optimizer)
        state.restore_loss_scale(self.scaler)
        guard = GuardState.from_plain(state.guard)
        guard = replace(guard, micro_batch=min(micro_batch, guard.micro_batch))
        return Progress(step=state.step, images=state.images_seen, guard=guard)


@dataclass(frozen=True, kw_only=True)
class CompareAction:
    """Compares weights and moments of all processes before each scheduled save; if they differ, none saves."""

    what: ClassVar = "the comparison of states"
    saves: SaveAction
    ranks: ProcessGroup

    def due(self, progress: Progress) -> bool:
        return not self.ranks.is_single and self.saves.is_regular(progress)

    def __call__(self, progress: Progress) -> None:
        """Raise NonFiniteAdapter for non-finite weights, TrainingStopped for differing ones; on every process."""
        digest = tensors_digest(freeze(self.saves.state(progress)))
        self.ranks.require_same(digest, step=progress.step)
