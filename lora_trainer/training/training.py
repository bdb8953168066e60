"""The parts of a training as plain values: model, parameters, data, actions, and remedies for a full device."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from lora_trainer.common.events import EventStream
from lora_trainer.network.compiling import CompiledBlocks
from lora_trainer.training.batch import Batch
from lora_trainer.training.dataloader import TrainingDataLoader
from lora_trainer.training.distributed.process_group import ProcessGroup
from lora_trainer.training.guards import GuardState
from lora_trainer.training.loss import Model
from lora_trainer.training.optimizers import LearningRate

First = Hashable
"""A key that says which passes count as alike, or the class of an action: see `training/fallbacks.py`."""


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


class Action(Protocol):
    """Something that runs between steps; `due` is called before the first step and after every step."""

    what: ClassVar[str]
    """The result of the action as a noun phrase, to begin a message with: "the validation"."""

    def due(self, progress: Progress) -> bool:
        """Say whether the action runs at this step; must be cheap."""

    def __call__(self, progress: Progress) -> GuardState | None:
        """Run the action; a returned guard state replaces that of `progress`."""


@dataclass(frozen=True, kw_only=True)
class FreezeAfter:
    """Parameters (a text encoder's, say) that are trained before `end_step` (0-based) and frozen from then on.

    A frozen parameter gets no gradient, and optimizers skip parameters without one: neither weight decay nor
    momentum moves it. Freezing depends on the step number alone, so a resumed run does the same.
    """

    parameters: Sequence[nn.Parameter]
    end_step: int

    def enter(self, step: int) -> None:
        """Set `requires_grad` of the parameters for this step (0-based)."""
        for parameter in self.parameters:
            parameter.requires_grad_(step < self.end_step)


@dataclass(frozen=True, kw_only=True)
class OomFallback:
    """An out-of-memory fallback: a setting's change that needs less memory for the same result.

    `apply` changes the networks in place; a remedy is never taken back.
    """

    key: str
    old: Any
    new: Any
    apply: Callable[[], object]


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
    `stop()` returns a signal number once the run should end, else None.
    `remedies` are applied in order when the device is out of memory; a resumed run begins with the
    remedies it had applied before.
    `plain` is the plain way that is tried once after another error in a first pass (fallbacks.py).
    `restore()` puts adapter and optimizer back to the last good state and returns its progress; without
    it, instability ends the run.
    `stages`: parts of the adapter whose
    training stops before the last step. `stop_after_validations`: end after so many validations
    without a lower loss.
    `afterwards` are called in order after each optimizer step with the number of finished steps; they may
    change weights (a norm limit does) but must leave the bits of weights they do not mean to change.
    `from_zero` are the parameters initialised to zero: while all are zero the adapter has no effect.
    `compiled` are the compiled blocks, None in a run without.
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
    stages: Sequence[FreezeAfter] = ()
    stop_after_validations: int | None = None
    afterwards: Sequence[Callable[[int], None]] = ()
    from_zero: Sequence[nn.Parameter] = ()
    compiled: CompiledBlocks | None = None

    def compilation(self, batch: Batch) -> AbstractContextManager[None]:
        """Run the blocks compiled inside the context if the shape is planned; raises CompilationFailed."""
        blocks = self.compiled
        if blocks is None or blocks.is_off or blocks.leaves_out(batch.latents_shape):
            return nullcontext()
        return blocks.used()

    def remedies_of(self, guard: GuardState) -> Sequence[OomFallback]:
        """Return the remedies that apply: the plain way has its own."""
        return self.plain.remedies if guard.plain else self.remedies

    def tell_change(self, key: str, old: object, new: object, *, reason: str) -> None:
        """Emit that a value of the plan has changed."""
        self.events.emit("change", key=key, old=old, new=new, reason=reason)
