"""What a training consists of: the model, its parameters and data, and what it may fall back on."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lora_trainer.data.batches import MicroBatch, Prepared, Stacked, stack
from lora_trainer.data.loader import Feeder
from lora_trainer.events import EventStream
from lora_trainer.families.base import Conditioning, Prediction
from lora_trainer.model.dropout import SampleMasks
from lora_trainer.train.foresight import Foresight
from lora_trainer.train.guards import GuardState
from lora_trainer.train.objective import add_noise, sample_losses, target
from lora_trainer.train.optim import LearningRate
from lora_trainer.train.progress import Action, Progress
from lora_trainer.train.ranks import Ranks
from lora_trainer.train.speedups import Speedups
from lora_trainer.train.stages import Stage


@dataclass(frozen=True, kw_only=True)
class Model:
    """The frozen denoiser with its adapter, and how it is asked for a prediction, in which dtype, where.

    `embed` turns what is cached of a prompt into conditioning: nothing is left to do, unless the text
    encoders are trained along and run in every step. `masks` are those of the adapter's dropout, which
    needs the whole batch in every pass of the denoiser: that of samples whose conditioning is `alike`.
    `without_adapter` makes the networks the base while a block runs. `foresight` makes what the modulation
    layers give where their weights are not on the device.
    """

    denoiser: nn.Module
    predict: Callable[[nn.Module, Tensor, Tensor, Conditioning], Tensor]
    embed: Callable[[Conditioning], Conditioning]
    prediction: Prediction
    precision: torch.dtype
    device: torch.device
    masks: SampleMasks | None = None
    alike: Callable[[Conditioning], int] = lambda _: 0
    without_adapter: Callable[[], AbstractContextManager[None]] = nullcontext
    foresight: Foresight | None = None

    @contextmanager
    def passing(self, batch: MicroBatch) -> Iterator[None]:
        """Be ready for a pass of these samples, forwards and backwards: dropout, modulation."""
        with self.dropping(batch), self.modulating(batch.samples):
            yield

    def modulating(self, samples: Sequence[Prepared]) -> AbstractContextManager[None]:
        """Let the modulation layers give what was made of these samples."""
        return self.foresight.of(samples) if self.foresight is not None else nullcontext()

    def stacked(self, samples: Sequence[Prepared]) -> Stacked:
        """Return samples of one shape on the host, ready to be copied to the device."""
        return stack(samples, device=self.device)

    def dropping(self, batch: MicroBatch) -> AbstractContextManager[None]:
        """Let the adapter drop what it drops for these samples, forwards and backwards."""
        return nullcontext() if self.masks is None else self.masks.of(batch.dropout_seeds)

    def losses(self, samples: Sequence[Prepared]) -> Tensor:
        """Return the unweighted loss of each sample (all of one shape), float32 [B], with its graph."""
        return self.losses_of(
            self.stacked(samples).on(self.device).micro_batch(dtype=self.precision)
        )

    def losses_of(self, batch: MicroBatch) -> Tensor:
        """Return what `losses` does, of samples on the device; the host waits for nothing."""
        level = (batch.alpha, batch.sigma)
        noisy = add_noise(batch.latents, batch.input_noise, *level).to(self.precision)
        wanted = target(batch.latents, batch.noise, *level, self.prediction)
        if batch.as_base is not None:
            wanted = self._as_base(wanted, batch.as_base, batch, noisy)
        predicted = self.predict(
            self.denoiser, noisy, batch.timesteps, self.embed(batch.conditioning)
        )
        return sample_losses(predicted, wanted, delta=batch.huber_delta, counts=batch.counts)

    @torch.no_grad()
    def _as_base(self, wanted: Tensor, rows: Tensor, batch: MicroBatch, noisy: Tensor) -> Tensor:
        """Return `wanted` with what the base says in the rows of the samples that are to stay as it."""
        of_base = [sample for sample in batch.samples if sample.as_base]
        with self.without_adapter(), self.modulating(of_base):
            said = self.predict(
                self.denoiser,
                noisy[rows],
                batch.timesteps[rows],
                self.embed(batch.base_conditioning),
            )
        return wanted.index_copy(0, rows, said.to(wanted.dtype))


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """Something that needs less memory for the same result; applied in place and for good."""

    key: str
    old: Any
    new: Any
    apply: Callable[[], None]


First = Hashable
"""A pass by what tells it from others, or the class of an action: see `train/plainly.py`."""


@dataclass(kw_only=True)
class PlainWay:
    """How the same training is computed without the means that make it fit and fast.

    `changes` lead there, `remedies` against a full device are left then. `tried` are the passes of the step
    under way, `proven` those that worked; `first_error` is why the plain way is in force, in this process.
    """

    changes: Sequence[Remedy] = ()
    remedies: Sequence[Remedy] = ()
    tried: frozenset[First] = frozenset()
    proven: set[First] = field(default_factory=set)
    first_error: str = ""


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
    without it, instability is the end. `ranks` are the processes it is shared by. `watch_spikes`
    clips tighter when losses jump. `stages` are parts of the adapter that stop being trained before
    the end. `plain` is the way in which the first steps are tried once more. `afterwards` is done to
    the weights after each optimizer step, in order, with the number of steps then; it must leave the
    bits of weights that did not change. `from_zero` are the parameters that an update of zero began
    with, while they are zero it stays so. `speedups` are what its passes are made faster by.
    After `stop_after_validations` validations without a lower loss, training ends as if that had been
    all its steps.
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
    ranks: Ranks = field(default_factory=Ranks)
    images_at_once: Mapping[tuple[int, int], int] = field(default_factory=dict)
    remedies: Sequence[Remedy] = ()
    plain: PlainWay = field(default_factory=PlainWay)
    restore: Callable[[], Progress] | None = None
    watch_spikes: bool = False
    stages: Sequence[Stage] = ()
    stop_after_validations: int | None = None
    afterwards: Sequence[Callable[[int], None]] = ()
    from_zero: Sequence[nn.Parameter] = ()
    speedups: Speedups = field(default_factory=Speedups)
    clock: Callable[[], float] = time.perf_counter

    def remedies_of(self, guard: GuardState) -> Sequence[Remedy]:
        """Return the remedies of the way that is in force."""
        return self.plain.remedies if guard.plain else self.remedies
