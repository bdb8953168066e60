"""Real trainings on the tiny base: a feeder over entries in memory, the real denoiser, adapter and loop.

Everything is a function of the arguments. The base is written once per test process, into the home
folder that `conftest.py` gives it and removes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor

from lora_trainer import families
from lora_trainer.cache.cache_plan import Entries, SampleSource, SampleView
from lora_trainer.cache.store import Cache, CacheKey
from lora_trainer.checkpoint.states import TrainingState
from lora_trainer.checkpoint.writer import StateWriter
from lora_trainer.common.event_kinds import Event
from lora_trainer.common.events import EventStream
from lora_trainer.common.files import CappedFolder
from lora_trainer.config.config import build_config
from lora_trainer.config.inputs import DataSettings
from lora_trainer.config.learning import AdapterSettings, ObjectiveSettings
from lora_trainer.config.optimizers import OptimizerSettings
from lora_trainer.families.base.facts import BaseFacts, Prediction
from lora_trainer.families.base.layout import DENOISER, Layout
from lora_trainer.families.base.noise_levels import table_levels
from lora_trainer.lora.adapter import Adapter, inject
from lora_trainer.training import optimizers, schedules
from lora_trainer.training.actions import Progress, SaveAction
from lora_trainer.training.dataloader import Sample, TrainingDataLoader
from lora_trainer.training.guards import GuardState
from lora_trainer.training.loss import Model
from lora_trainer.training.step import Training, compute_gradients_with_oom_retry
from tests.fakes.tiny_base import write_base

CPU = torch.device("cpu")
SQUARE, WIDE, TALL = (4, 8, 8), (4, 6, 10), (4, 10, 6)
MIXED = (SQUARE, WIDE, TALL, SQUARE, WIDE, SQUARE, TALL)
"""Latent shapes of three buckets; seven samples, so that steps of four cross epochs."""
EMPTY_TEXT = CacheKey.of("text", text="")
TOKENS, TEXT_WIDTH = 77, 16


@cache
def tiny_base() -> Path:
    """Return the tiny base, written on the first call of the process."""
    return write_base("sd15", Path.home() / "tiny-base")


@cache
def tiny_facts() -> BaseFacts:
    """Return the facts of the tiny base."""
    family = families.detect(tiny_base())
    return family.facts(Layout(folder=tiny_base()), source="tiny")


@cache
def tiny_signal() -> Tensor:
    """Return alpha-bar of the tiny base's timesteps."""
    return tiny_facts().release.alphas_cumprod()


def build_feeder(
    shapes: Sequence[tuple[int, int, int]] = MIXED,
    *,
    batch_size: int = 4,
    seed: int = 5,
    data: DataSettings = DataSettings(),  # noqa: B008 - frozen, so sharing is safe
    objective: ObjectiveSettings = ObjectiveSettings(),  # noqa: B008 - frozen, so sharing is safe
    levels: Any = None,
    prediction: Prediction = "epsilon",
    texts: int = 1,
) -> TrainingDataLoader:
    """Return a feeder over samples s0, s1, ... of these latent shapes, all entries in memory."""
    resident: dict[str, Mapping[str, Tensor]] = {}
    generator = torch.Generator().manual_seed(99)

    def text(name: str) -> CacheKey:
        key, shape = CacheKey.of("text", text=name), (1, TOKENS, TEXT_WIDTH)
        resident[key.digest] = {"text": torch.randn(shape, generator=generator)}
        return key

    def latent(name: str, shape: tuple[int, int, int]) -> CacheKey:
        key, mean = CacheKey.of("latents", image=name), torch.randn(shape, generator=generator)
        resident[key.digest] = {"mean": mean, "std": torch.full(shape, 0.1)}
        return key

    text("")
    sources = {
        f"s{index}": SampleSource(
            views=tuple(
                SampleView(latents=latent(f"s{index}{view}", shape), geometry={})
                for view in ("", " mirrored")[: 1 + data.flip]
            ),
            texts=tuple(text(f"s{index} variant {variant}") for variant in range(texts)),
            size_px=(2 * shape[2], 2 * shape[1]),
        )
        for index, shape in enumerate(shapes)
    }
    nowhere = CappedFolder(root=Path.home() / "no-cache-here", limit_bytes=0)
    return TrainingDataLoader(
        sources=sources,
        empty_text=EMPTY_TEXT,
        entries=Entries(
            cache=Cache(folder=nowhere, on_problem=EventStream().problem), resident=resident
        ),
        levels=levels or table_levels(tiny_signal().tolist(), objective),
        prediction=prediction,
        shared_conditioning={},
        data=data,
        objective=objective,
        batch_size=batch_size,
        seed=seed,
        draws_latents=True,
    )


@dataclass(frozen=True, kw_only=True)
class TinyTraining:
    """A training, its adapter, and the events it emitted so far."""

    training: Training
    adapter: Adapter
    events: list[Event] = field(default_factory=list)

    def of_kind(self, kind: str) -> list[Mapping[str, Any]]:
        """Return the fields of the events of one kind."""
        return [event.fields for event in self.events if event.kind == kind]

    @property
    def weights(self) -> list[Tensor]:
        """Return a copy of the trained parameters."""
        return [parameter.detach().clone() for parameter in self.adapter.parameters()]

    @property
    def losses(self) -> list[float]:
        """Return the logged loss of each step so far."""
        return [fields["loss"] for fields in self.of_kind("step")]


def build_training(
    feeder: TrainingDataLoader,
    *,
    steps: int,
    optimizer: OptimizerSettings | None = None,
    precision: torch.dtype = torch.float32,
    targets: Any = "all",
    checkpointing: bool = False,
    adapt: Callable[[Model], Model] = lambda model: model,
    adapter_settings: Mapping[str, Any] = MappingProxyType({}),
    averaged: bool = False,
    max_grad_norm: float = 1.0,
    **more: Any,
) -> TinyTraining:
    """Return a training on the tiny base; `adapt` may exchange the model for one that misbehaves.

    `more` are other fields of `Training`.
    """
    family = families.detect(tiny_base())
    denoiser = family.load_denoiser(tiny_facts(), dtype=precision, device=CPU)
    if checkpointing:
        denoiser.enable_gradient_checkpointing()
    adapter = inject(
        {DENOISER: denoiser},
        modules={DENOISER: family.lora_targets(denoiser, targets)},
        settings=AdapterSettings.model_validate(
            {"rank": 4, "targets": targets, **adapter_settings}
        ),
        alpha=4.0,
        seed=3,
        averaged=averaged,
    )
    settings = optimizer or OptimizerSettings(learning_rate=1e-3)
    events = EventStream()
    seen: list[Event] = []
    events.subscribe(seen.append)
    model = Model(
        denoiser=denoiser,
        predict=family.predict,
        embed=lambda conditioning: conditioning,
        prediction=feeder.prediction,
        precision=precision,
        device=CPU,
        masks=adapter.masks,
        without_adapter=adapter.off,
    )
    train = {"steps": steps, "batch_size": feeder.batch_size, "max_grad_norm": max_grad_norm}
    config: Any = build_config({f"train.{name}": value for name, value in train.items()})
    training = Training(
        settings=config.train,
        model=adapt(model),
        parameters=adapter.parameters(),
        optimizer=optimizers.build_optimizer(adapter.groups(settings), settings),
        learning_rate=schedules.learning_rate(settings, steps=steps),
        scaler=torch.amp.GradScaler("cpu", enabled=precision == torch.float16),
        feeder=feeder,
        micro_batch=feeder.batch_size,
        events=events,
        **{"actions": (), "stop": lambda: None, **more},
    )
    return TinyTraining(training=training, adapter=adapter, events=seen)


@dataclass
class EveryStep:
    """An action that is due before the first step and after every one."""

    act: Callable[[Progress], None]
    what: ClassVar = "a look"

    def due(self, progress: Progress) -> bool:
        return True

    def __call__(self, progress: Progress) -> None:
        self.act(progress)


def saves(tiny: TinyTraining, folder: Path, *, every_steps: int = 0) -> SaveAction:
    """Return the action that saves the states of a training in `folder`; its export writes nothing."""
    return SaveAction(
        writer=StateWriter(folder=folder, keep=2, events=tiny.training.events),
        adapter=tiny.adapter,
        optimizer=tiny.training.optimizer,
        scaler=tiny.training.scaler,
        export=lambda progress, copy: lambda: "none",
        every_steps=every_steps,
        every_images=None,
        batch_size=tiny.training.settings.batch_size,
        save_requested=lambda: False,
    )


def restored(tiny: TinyTraining, state: TrainingState) -> Progress:
    """Put a training back to a state, as a resume does, and return its progress."""
    return saves(tiny, Path()).restored(state, micro_batch=tiny.training.micro_batch)


def at_start(*, micro_batch: int) -> Progress:
    """Return the progress of a run that has not begun."""
    return Progress(step=0, images=0, guard=GuardState(micro_batch=micro_batch))


def awaken(adapter: Adapter) -> None:
    """Give the up matrices values, as in mid-training: while they are zero, down has no gradient."""
    generator = torch.Generator().manual_seed(17)
    with torch.no_grad():
        for layer in adapter.layers.values():
            up = layer.parameters["up"]
            up.copy_(0.05 * torch.randn(up.shape, generator=generator))


def gradients(adapter: Adapter) -> list[Tensor]:
    """Return a copy of the gradients of all parameters."""
    found = [parameter.grad for parameter in adapter.parameters()]
    return [gradient.clone() for gradient in found if gradient is not None]


def distance(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    """Return the L2 norm of the difference over that of `other`, all tensors taken together."""
    difference = sum(
        float((a - b).double().square().sum()) for a, b in zip(one, other, strict=True)
    )
    return (difference / sum(float(b.double().square().sum()) for b in other)) ** 0.5


def add_gradients(training: Training, samples: Sequence[Sample], *, cap: int) -> Tensor:
    """Add the gradients of samples in passes of at most `cap`; return their share of the loss."""
    loss, _ = compute_gradients_with_oom_retry(training, samples, GuardState(micro_batch=cap))
    return loss
