"""What happens between steps besides samples: the validation loss, and saving.

Saving comes last of a step's actions: a state on disk then means that everything logged up to that
step has happened, and a resume repeats nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lora_trainer.data.loader import StepBatch, micro_batches
from lora_trainer.events import EventStream
from lora_trainer.model.adapters import Adapter
from lora_trainer.output.checkpoints import TrainingState, save_state
from lora_trainer.train.loop import Model
from lora_trainer.train.progress import Progress


@dataclass(frozen=True, kw_only=True)
class ValidateAction:
    """Mean unweighted loss of the held-out pictures over stratified timesteps, with fixed noise.

    Step 0 is the untouched base, so the gain of the adapter can be read off.
    """

    batches: Sequence[StepBatch]
    model: Model
    every_steps: int
    events: EventStream

    def due(self, progress: Progress) -> bool:
        return (
            bool(self.batches)
            and self.every_steps > 0
            and (progress.step % self.every_steps == 0 or progress.ending)
        )

    def __call__(self, progress: Progress) -> None:
        by_timestep = [
            [batch.step, self._loss(batch, cap=progress.guard.micro_batch)]
            for batch in self.batches
        ]
        mean = sum(loss for _, loss in by_timestep) / len(by_timestep)
        images = len(self.batches[0].samples)
        self.events.emit(
            "validation", step=progress.step, loss=mean, by_timestep=by_timestep, images=images
        )

    @torch.no_grad()
    def _loss(self, batch: StepBatch, *, cap: int) -> float:
        groups = micro_batches(batch, cap=cap)
        return float(torch.stack([self.model.losses(group).sum() for group in groups]).sum()) / len(
            batch.samples
        )


@dataclass(frozen=True, kw_only=True)
class SaveAction:
    """Saves a resume state and a rolling export every so often, when asked, and when the run ends early.

    `export(progress)` writes and prunes the rolling file and returns its name; it is not called at
    the very end, where the final export takes its place.
    """

    folder: Path
    adapter: Adapter
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    export: Callable[[Progress], str]
    last_step: int
    every_steps: int
    every_images: int | None
    batch_size: int
    keep_states: int
    fingerprint: str
    events: EventStream
    asked: Callable[[], bool]
    clock: Callable[[], float] = time.perf_counter

    def due(self, progress: Progress) -> bool:
        if progress.step == 0:
            return False
        regular = self.every_steps > 0 and progress.step % self.every_steps == 0
        return regular or progress.ending or self._ends_epoch(progress) or self.asked()

    def __call__(self, progress: Progress) -> None:
        began = self.clock()
        state = TrainingState(
            step=progress.step,
            images_seen=progress.images,
            adapter=self.adapter.state(),
            optimizer=self.optimizer.state_dict(),
            extras=extras(progress, self.scaler, self.fingerprint),
        )
        saved = save_state(self.folder, state, keep=self.keep_states)
        file = self.export(progress) if progress.step < self.last_step else None
        self.events.emit(
            "saved",
            step=progress.step,
            export=file,
            state=saved.name,
            bytes=sum(path.stat().st_size for path in saved.iterdir()),
            seconds=self.clock() - began,
        )

    def _ends_epoch(self, progress: Progress) -> bool:
        if self.every_images is None:
            return False
        return (
            progress.images // self.every_images
            > (progress.images - self.batch_size) // self.every_images
        )


def extras(progress: Progress, scaler: torch.amp.GradScaler, fingerprint: str) -> dict[str, Any]:
    """Return what a state holds besides tensors: the guards' memory, the loss scale, what run it is of."""
    return {
        "fingerprint": fingerprint,
        "micro_batch": progress.guard.micro_batch,
        "skipped": progress.guard.skipped,
        "skipped_in_row": progress.guard.skipped_in_row,
        "loss_scale": float(scaler.get_scale()) if scaler.is_enabled() else None,
        "loss_scale_growth": int(scaler.state_dict()["_growth_tracker"])
        if scaler.is_enabled()
        else None,
    }


def load_scaler(scaler: torch.amp.GradScaler, values: Mapping[str, Any]) -> None:
    """Put the loss scale of a state back; does nothing without fp16."""
    if scaler.is_enabled():
        scaler.load_state_dict(
            scaler.state_dict()
            | {"scale": values["loss_scale"], "_growth_tracker": values["loss_scale_growth"]}
        )
