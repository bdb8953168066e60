"""The parts of a training as plain values: model, parameters, data, and remedies for a full device.

`Model.losses_of` is the loss of one micro-batch; every training and validation loss is computed there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lora_trainer.common.events import EventStream
from lora_trainer.families.base import Conditioning, Prediction
from lora_trainer.lora.dropout import SampleMasks
from lora_trainer.training.batch import MicroBatch, Sample, Stacked, stack
from lora_trainer.training.dataloader import TrainingDataLoader
from lora_trainer.training.distributed.process_group import ProcessGroup
from lora_trainer.training.freeze import FreezeAfter
from lora_trainer.training.graphed import Speedups
from lora_trainer.training.guards import GuardState
from lora_trainer.training.loss import add_noise, sample_losses, target
from lora_trainer.training.optimizers import LearningRate
from lora_trainer.training.progress import Action, Progress


@dataclass(frozen=True, kw_only=True)
class Model:
    """The frozen denoiser with its adapter, the function that predicts with it, its dtype and its device.

    `predict(denoiser, noisy [B, C, H, W], timesteps [B], conditioning)` returns the prediction
    [B, C, H, W] of kind `prediction`. `embed` turns cached prompts into conditioning; it does nothing
    unless the text encoders are trained and therefore run in every step. `masks` hold the adapter's
    dropout masks, one per sample, so the denoiser must see the whole batch in each of its forward calls:
    only samples with the same `batch_group_key(conditioning)` share a micro-batch then.
    `without_adapter` switches the adapter off while a block runs.
    """

    denoiser: nn.Module
    predict: Callable[[nn.Module, Tensor, Tensor, Conditioning], Tensor]
    embed: Callable[[Conditioning], Conditioning]
    prediction: Prediction
    precision: torch.dtype
    device: torch.device
    masks: SampleMasks | None = None
    batch_group_key: Callable[[Conditioning], int] = lambda _: 0
    without_adapter: Callable[[], AbstractContextManager[None]] = nullcontext

    def stacked(self, samples: Sequence[Sample]) -> Stacked:
        """Stack samples of one shape in host memory (pinned where it helps), ready for the device."""
        return stack(samples, device=self.device)

    def dropping(self, batch: MicroBatch) -> AbstractContextManager[None]:
        """Use the dropout masks of these samples in forward and backward passes, while a block runs."""
        return nullcontext() if self.masks is None else self.masks.of(batch.dropout_seeds)

    def losses(self, samples: Sequence[Sample]) -> Tensor:
        """Return the unweighted loss of each sample (all of one shape), float32 [B], with its graph."""
        return self.losses_of(
            self.stacked(samples).on(self.device).micro_batch(dtype=self.precision)
        )

    def losses_of(self, batch: MicroBatch) -> Tensor:
        """Return the unweighted losses, float32 [B], of a micro-batch on the device; the host never waits."""
        level = (batch.alpha, batch.sigma)  # noisy = alpha latents + sigma noise
        # The input may carry other noise than the target (`input_noise`, noise perturbation).
        noisy = add_noise(batch.latents, batch.input_noise, *level).to(self.precision)
        targets = target(batch.latents, batch.noise, *level, self.prediction)
        if batch.as_base is not None:
            targets = self._as_base(targets, batch.as_base, batch, noisy)
        predicted = self.predict(
            self.denoiser, noisy, batch.timesteps, self.embed(batch.conditioning)
        )
        return sample_losses(predicted, targets, delta=batch.huber_delta, counts=batch.counts)

    @torch.no_grad()
    def _as_base(self, targets: Tensor, rows: Tensor, batch: MicroBatch, noisy: Tensor) -> Tensor:
        """Return `targets` with the base model's own prediction in `rows`, int64 [N].

        With class preservation each sample appears twice: once with its caption, once with the class word
        and the base model's prediction as target.
        """
        with self.without_adapter():
            base_prediction = self.predict(
                self.denoiser,
                noisy[rows],
                batch.timesteps[rows],
                self.embed(batch.base_conditioning),
            )
        return targets.index_copy(0, rows, base_prediction.to(targets.dtype))


@dataclass(frozen=True, kw_only=True)
class OomFallback:
    """An out-of-memory fallback: a setting's change that needs less memory for the same result.

    `apply` changes the networks in place; a remedy is never taken back.
    """

    key: str
    old: Any
    new: Any
    apply: Callable[[], None]


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
