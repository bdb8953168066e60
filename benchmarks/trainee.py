"""What the benchmarks train: a random denoiser, as released or smaller, on a cache of random entries.

Input is the name of a release and how it is trained; outputs are its frozen network, copies that share
its weights, a feeder over a real cache, the same batches as tensors in memory, and all that our loop
needs to train an adapter on them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from benchmarks.mid_size_base import MID_SIZE, MINIATURE, TINY
from benchmarks.random_bases import RELEASES, random_network
from lora_trainer import families
from lora_trainer.cache.cache_plan import Entries, SampleSource, SampleView
from lora_trainer.cache.store import Cache, CacheKey
from lora_trainer.common.events import EventStream
from lora_trainer.common.files import CappedFolder
from lora_trainer.config.config import build_config
from lora_trainer.config.declare import CHECKPOINTING, Checkpointing
from lora_trainer.config.running import Config
from lora_trainer.families.base.facts import BaseFacts, Geometry
from lora_trainer.families.base.family import Family
from lora_trainer.families.base.noise_levels import levels_of
from lora_trainer.training.actions import Action
from lora_trainer.training.dataloader import TrainingDataLoader
from lora_trainer.training.loss import Batch, Model, collate
from lora_trainer.training.schedules import learning_rate
from lora_trainer.training.step import Training

IMAGES = 16
SEED = 3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Size = Literal["true size", "middling", "miniature", "tiny"]
CHANGED: Mapping[Size, Mapping[str, Mapping[str, Any]]] = {
    "true size": {},
    "middling": MID_SIZE,
    "miniature": MINIATURE,
    "tiny": TINY,
}
"""Entries of the denoiser's configuration that are not as released, by release."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One training: which release, at what size, how many images a step, in which dtype."""

    name: str
    side_px: int
    batch: int
    precision: torch.dtype
    device: torch.device
    size: Size
    checkpointing: Checkpointing = "none"

    @classmethod
    def from_words(cls, words: str, *, device: torch.device, size: Size) -> Case:
        """Read NAME:PX:BATCH:DTYPE[:RECOMPUTING]; raises ValueError and KeyError."""
        name, side, batch, dtype, *kind = words.split(":")
        levels: Mapping[str, Checkpointing] = {level: level for level in CHECKPOINTING}
        return cls(
            name=name,
            side_px=int(side),
            batch=int(batch),
            precision=DTYPES[dtype],
            device=device,
            size=size,
            checkpointing=levels[kind[0] if kind else "none"],
        )

    @cached_property
    def facts(self) -> BaseFacts:
        found = families.known_base(RELEASES[self.name].source)
        assert found is not None
        architecture = {**found.release.architecture, **CHANGED[self.size].get(self.name, {})}
        return replace(found, release=replace(found.release, architecture=architecture))

    @property
    def family(self) -> Family:
        return families.family(self.facts.family)

    @property
    def config(self) -> Config:
        values: dict[str, Any] = {"train.batch_size": self.batch, "train.seed": SEED}
        if self.facts.release.prediction == "flow":
            values["objective.weighting"] = "none"
        return build_config(values)

    @property
    def latent_shapes(self) -> frozenset[tuple[int, int, int]]:
        """Return the one shape of the case's passes: height and width of the latents, and their count."""
        side = self.side_px // self.facts.vae_factor
        return frozenset({(side, side, self.batch)})

    @property
    def title(self) -> str:
        dtype = str(self.precision).removeprefix("torch.")
        again = "" if self.checkpointing == "none" else f", {self.checkpointing} recomputing"
        return f"{self.name} {self.side_px} px, batch {self.batch}, {dtype}, {self.size}{again}"


def frozen_network(case: Case) -> nn.Module:
    """Return the case's denoiser with random weights, on its device."""
    torch.manual_seed(SEED)
    network = random_network(
        lambda: case.family.empty_denoiser(case.facts.release.architecture),
        case.device,
        case.precision,
    )
    return network.requires_grad_(False).train()


def sharing(network: nn.Module) -> nn.Module:
    """Return another network of the same modules on the same weights."""
    tensors = (*network.parameters(), *network.buffers())
    return copy.deepcopy(network, {id(tensor): tensor for tensor in tensors})


def feeder(case: Case, folder: Path, events: EventStream) -> TrainingDataLoader:
    """Return a feeder over a cache of random entries of one bucket, made where there is none."""
    root = CappedFolder(root=folder / "cache", limit_bytes=1 << 34)
    root.create()
    cache = Cache(folder=root, on_problem=events.problem)
    rng, config, facts = np.random.default_rng(SEED), case.config, case.facts
    width_px, height_px = size_px = (case.side_px, case.side_px)

    def normal(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return rng.standard_normal(shape, dtype=np.float32)

    def text(words: str) -> Any:
        key = CacheKey.of("text", text=words)
        arrays = {
            name: np.ones(shape, np.int64) if name.endswith("mask") else normal(*shape)
            for name, shape in _prompt(case).items()
        }
        if not cache.has(key):
            cache.write(key, arrays)
        return key

    sources = {}
    for index in range(IMAGES):
        whole = Geometry(original_px=size_px, corner_px=(0, 0), target_px=size_px)
        told = facts.release.geometry_conditioning(whole)
        plain = CacheKey.of("latents", image=str(index), size=f"{width_px}x{height_px}")
        latent_size = (height_px // facts.vae_factor, width_px // facts.vae_factor)
        shape = (facts.latent_channels, *latent_size)
        drawn = {"mean": normal(*shape), "std": np.full(shape, 0.1, np.float32)}
        if not cache.has(plain):
            cache.write(plain, drawn)
        sources[str(index)] = SampleSource(
            views=(SampleView(latents=plain, geometry=told),),
            texts=(text(str(index)),),
            size_px=size_px,
        )
    return TrainingDataLoader(
        sources=sources,
        empty_text=text(""),
        entries=Entries(cache=cache),
        levels=levels_of(case.facts, case.config.objective),
        prediction=facts.release.prediction,
        shared_conditioning=facts.guidance.conditioning(1.0),
        data=config.data,
        objective=config.objective,
        batch_size=case.batch,
        draws_latents=True,
        seed=SEED,
    )


def batches(case: Case, folder: Path, *, steps: int) -> Sequence[Batch]:
    """Return what the feeder gives for each step, stacked on the device."""
    own = feeder(case, folder, EventStream())
    found = []
    for step in range(steps):
        samples = own.prepare(step)
        found.append(collate(samples, device=case.device, precision=case.precision).on(case.device))
    return found


def training(
    case: Case,
    network: nn.Module,
    folder: Path,
    *,
    parameters: Sequence[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    steps: int,
    events: EventStream,
    actions: Sequence[Action],
    **others: Any,
) -> Training:
    """Return what our loop needs to train these parameters of a network; `others` are fields of it."""
    config = case.config
    fields: dict[str, Any] = {
        "learning_rate": learning_rate(config.optimizer, steps=steps),
        "feeder": feeder(case, folder, events),
        "micro_batch": case.batch,
        **others,
    }
    settings: Any = config.train.model_copy(update={"steps": steps})
    return Training(
        settings=settings,
        model=Model(
            denoiser=network,
            predict=case.family.predict,
            embed=lambda conditioning: conditioning,
            prediction=case.facts.release.prediction,
            precision=case.precision,
            device=case.device,
        ),
        parameters=parameters,
        optimizer=optimizer,
        scaler=torch.amp.GradScaler(case.device.type, enabled=False),
        events=events,
        actions=actions,
        stop=lambda: None,
        **fields,
    )


def _prompt(case: Case) -> Mapping[str, tuple[int, ...]]:
    """Return the shapes of one encoded prompt; half of the limit where texts are as long as they are."""
    family, facts = case.family, case.facts
    shapes = family.text.shapes(facts.release.architecture, text_tokens=facts.release.max_tokens)
    if any(name.endswith("mask") for name in shapes):
        shapes = family.text.shapes(
            facts.release.architecture, text_tokens=facts.release.max_tokens // 2
        )
    return shapes
