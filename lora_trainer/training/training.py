"""The parts of a training as plain values: model, parameters, data, and remedies for a full device."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lora_trainer.common.events import EventStream
from lora_trainer.training.dataloader import TrainingDataLoader
from lora_trainer.training.distributed.process_group import ProcessGroup
from lora_trainer.training.freeze import FreezeAfter
from lora_trainer.training.graphed import Speedups
from lora_trainer.training.guards import GuardState
from lora_trainer.training.loss import Model
from lora_trainer.training.optimizers import LearningRate
from lora_trainer.training.progress import Action, Progress


@dataclass(frozen=True, kw_only=True)
class OomFallback:
    """An out-of-memory fallback: a setting's change that needs less memory for the same result.

    `apply` changes the networks in place; a remedy is never taken back.
    """

    key: str
    old: Any
    new: Any
    apply: Callable[[], object]


First = Hashable
"""A key that says which passes count as alike, or the class of an action: see `training/plain_retry.py`."""


@dataclass(kw_only=True)
class PlainWay:
    """The plain way to compute the same training, without the features that make it fit and fast.

    `changes` switch those features off; `remedies` are the out-of-memory fallbacks that remain afterwards.
    `tried` holds the keys of the present step's passes, `proven` the keys that have worked; `first_error`
    is the error that put the plain way in force in this process, empty before.
    """

    changes: Sequence[OomFallback] = ()
    remedies: Sequence[OomFallback] = ()
    tried: frozenset[First] = frozenset()
    proven: set[First] = field(default_factory=set)
    first_error: str = ""


class PartialOptimizerStep(Exception):
    """An optimizer step ran out of memory: some weights and moments may be updated, others not."""

    def __init__(self, guard: GuardState, *, reason: str) -> None:
        super().__init__(reason)
        self.guard, self.reason = guard, reason


@dataclass(frozen=True, kw_only=True)
class Training:
    """Everything the loop needs.

    `batch_size` counts the images of one optimizer step over all processes. `micro_batch` is the planned
    cap of images in one pass; `images_at_once` are caps by (height, width) of the latents.
    `scaler` is enabled for fp16 only. `max_grad_norm` 0 means no clipping.
    `stop()` returns a signal number once the run should end, else None. `clock` returns seconds.
    `remedies` are applied in order when the device is out of memory; a resumed run begins with the
    remedies it had applied before.
    `plain` is the plain way that is tried once after another error in a first pass (plain_retry.py).
    `restore()` puts adapter and optimizer back to the last good state and returns its progress; without
    it, instability ends the run.
    `watch_spikes`: clip more tightly after the loss has jumped. `stages`: parts of the adapter whose
    training stops before the last step. `stop_after_validations`: end after so many validations
    without a lower loss.
    `afterwards` are called in order after each optimizer step with the number of finished steps; they may
    change weights (a norm limit does) but must leave the bits of weights they do not mean to change.
    `from_zero` are the parameters initialised to zero: while all are zero the adapter has no effect.
    """

    model: Model
    parameters: Sequence[nn.Parameter]
    optimizer: torch.optim.Optimizer
    learning_rate: LearningRate
    scaler: torch.amp.GradScaler
    feeder: TrainingDataLoader
    steps: int
    batch_size: int
    micro_batch: int
    prefetch_steps: int
    max_grad_norm: float
    events: EventStream
    actions: Sequence[Action]
    stop: Callable[[], int | None]
    ranks: ProcessGroup = field(default_factory=ProcessGroup)
    images_at_once: Mapping[tuple[int, int], int] = field(default_factory=dict)
    remedies: Sequence[OomFallback] = ()
    plain: PlainWay = field(default_factory=PlainWay)
    restore: Callable[[], Progress] | None = None
    watch_spikes: bool = False
    stages: Sequence[FreezeAfter] = ()
    stop_after_validations: int | None = None
    afterwards: Sequence[Callable[[int], None]] = ()
    from_zero: Sequence[nn.Parameter] = ()
    speedups: Speedups = field(default_factory=Speedups)
    clock: Callable[[], float] = time.perf_counter

    def remedies_of(self, guard: GuardState) -> Sequence[OomFallback]:
        """Return the remedies that apply: the plain way has its own."""
        return self.plain.remedies if guard.plain else self.remedies
