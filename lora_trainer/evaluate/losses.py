"""Losses and samples with and without a LoRA, compared with each other and with the dataset.

Losses with and without an adapter at the same noise, and how far it moves other predictions.

Input: a model whose adapter is on a dial and prepared samples; output: plain numbers. Every number is
a function of the samples alone: pictures count the same, whatever their size.

Samples with and without an adapter against a dataset's pictures: nearness, and copies of trained ones.

Input: features of samples and pictures; output: parts' numbers, or why there are none. A sample's
prompt is the caption of a picture, so that picture is left out where copies are looked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from lora_trainer.evaluate.features import distances, set_distance
from lora_trainer.lora.lora_hooks import LoraStrength
from lora_trainer.reporting.score import expected_nearest
from lora_trainer.training.batch import Sample, StepBatch, micro_batches, to_device
from lora_trainer.training.loss import add_noise, target
from lora_trainer.training.training import Model


@dataclass(frozen=True, kw_only=True)
class LossProbe:
    """A model, the dial of its adapter, and how many images fit at once."""

    model: Model
    dial: LoraStrength
    at_once: int

    @torch.no_grad()
    def losses(self, batches: Sequence[StepBatch], *, strength: float) -> list[float]:
        """Return the mean loss of each batch, all of it at one timestep."""
        with self.dial.at(strength):
            return [self._mean_loss(batch) for batch in batches]

    def _mean_loss(self, batch: StepBatch) -> float:
        groups = micro_batches(batch, cap=self.at_once, alike=self.model.batch_group_key)
        losses = torch.cat([self.model.losses(group).cpu() for group in groups])
        return float(losses.double().mean())

    @torch.no_grad()
    def drift(self, batches: Sequence[StepBatch]) -> tuple[float, float]:
        """Return (mean squared change of the predictions at strength 1, the base's mean squared error)."""
        changes, errors = [], []
        for batch in batches:
            for group in micro_batches(batch, cap=self.at_once, alike=self.model.batch_group_key):
                change, error = self._drift(group)
                changes += change
                errors += error
        return fmean(changes), fmean(errors)

    def _drift(self, samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
        model = self.model
        batch = to_device(samples, device=model.device, dtype=model.precision)
        level = (batch.alpha, batch.sigma)
        noisy = add_noise(batch.latents, batch.noise, *level).to(model.precision)
        wanted = target(batch.latents, batch.noise, *level, model.prediction)
        predicted = []
        for strength in (0.0, 1.0):
            with self.dial.at(strength):
                told = model.embed(batch.conditioning)
                found = model.predict(model.denoiser, noisy, batch.timesteps, told)
                predicted.append(found.float())
        base, adapted = predicted
        change: list[float] = (adapted - base).square().flatten(1).mean(1).tolist()
        error: list[float] = (base - wanted.float()).square().flatten(1).mean(1).tolist()
        return change, error


LEAST_PICTURES = 2


@dataclass(frozen=True, kw_only=True)
class ReferenceImages:
    """Features [N, D] of a dataset's pictures with their captions; `trained` says which were trained."""

    features: Tensor
    captions: Sequence[str]
    trained: Sequence[bool]


def nearness(base: Tensor, adapted: Tensor, album: ReferenceImages) -> tuple[float, float]:
    """Return the energy distances of the base's and of the adapter's samples to the pictures."""
    return set_distance(base, album.features), set_distance(adapted, album.features)


def copy_ratio(samples: Tensor, prompts: Sequence[str], album: ReferenceImages) -> float | None:
    """Return the mean over samples of nearest trained distance / nearest held-out distance.

    Sets are compared at the size of the smaller one. None where a sample has no picture of a kind.
    """
    ratios = []
    for row, prompt in zip(distances(samples, album.features), prompts, strict=True):
        near: dict[bool, list[float]] = {True: [], False: []}
        own = [
            index
            for index, caption in enumerate(album.captions)
            if caption.strip() != prompt.strip()
        ]
        for index in own:
            near[album.trained[index]].append(float(row[index]))
        count = min(map(len, near.values()))
        if count == 0:
            return None
        held_out = expected_nearest(near[False], count=count)
        if held_out > 0:
            ratios.append(expected_nearest(near[True], count=count) / held_out)
    return fmean(ratios) if ratios else None


def finite(features: Tensor) -> bool:
    """Whether every feature is a number: samples of a broken adapter may not be."""
    return bool(torch.isfinite(features).all())
