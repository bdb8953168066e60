"""Losses and samples with and without a LoRA, compared with each other and with the dataset.

Losses with and without an adapter at the same noise, and its change of unrelated predictions.

Input: a model whose adapter has an adjustable strength, and prepared samples; output: plain numbers. Each
number depends on the samples alone; images of all sizes have the same weight.

Compares samples with and without an adapter to a dataset's images: nearness, and copies of trained images.

Input: features of samples and images; output: the numbers behind parts, or None. A sample's prompt is the
caption of an image, so that image is left out in the search for copies.
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
from lora_trainer.training.batch import Sample, split
from lora_trainer.training.loss import Model, add_noise, target


@dataclass(frozen=True, kw_only=True)
class LossProbe:
    """A model, the strength control of its adapter, and the micro-batch that fits."""

    model: Model
    dial: LoraStrength
    at_once: int

    @torch.no_grad()
    def losses(self, batches: Sequence[Sequence[Sample]], *, strength: float) -> list[float]:
        """Return the mean loss of each batch; a batch has one timestep."""
        with self.dial.at(strength):
            return [self._mean_loss(samples) for samples in batches]

    def _mean_loss(self, samples: Sequence[Sample]) -> float:
        losses = torch.cat([self.model.losses(group).cpu() for group in self._split(samples)])
        return float(losses.double().mean())

    @torch.no_grad()
    def drift(self, batches: Sequence[Sequence[Sample]]) -> tuple[float, float]:
        """Return (mean squared change of the predictions at strength 1, the base's mean squared error)."""
        changes, errors = [], []
        for samples in batches:
            for group in self._split(samples):
                change, error = self._drift(group)
                changes += change
                errors += error
        return fmean(changes), fmean(errors)

    def _split(self, samples: Sequence[Sample]) -> list[tuple[Sample, ...]]:
        return split(samples, cap=self.at_once, group_key=self.model.batch_group_key)

    def _drift(self, samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
        model = self.model
        batch = model.collate(samples).on(model.device)
        level = (batch.alpha, batch.sigma)
        noisy = add_noise(batch.latents, batch.noise, *level).to(model.precision)
        target_values = target(batch.latents, batch.noise, *level, model.prediction)
        predicted = []
        for strength in (0.0, 1.0):
            with self.dial.at(strength):
                conditioning = model.embed(batch.conditioning)
                prediction = model.predict(model.denoiser, noisy, batch.timesteps, conditioning)
                predicted.append(prediction.float())
        base, adapted = predicted
        change: list[float] = (adapted - base).square().flatten(1).mean(1).tolist()
        error: list[float] = (base - target_values.float()).square().flatten(1).mean(1).tolist()
        return change, error


LEAST_PICTURES = 2


@dataclass(frozen=True, kw_only=True)
class ReferenceImages:
    """Features [N, D] of a dataset's images with their captions; `trained` marks the training images."""

    features: Tensor
    captions: Sequence[str]
    trained: Sequence[bool]


def nearness(base: Tensor, adapted: Tensor, album: ReferenceImages) -> tuple[float, float]:
    """Return the energy distances of the base's and of the adapter's samples to the dataset's images."""
    return set_distance(base, album.features), set_distance(adapted, album.features)


def copy_ratio(samples: Tensor, prompts: Sequence[str], album: ReferenceImages) -> float | None:
    """Return the mean over samples of nearest trained distance / nearest held-out distance.

    Both sets are compared at the size of the smaller one. None where no trained or no held-out image is left.
    """
    ratios = []
    for row, prompt in zip(distances(samples, album.features), prompts, strict=True):
        near: dict[bool, list[float]] = {True: [], False: []}
        other_images = [
            index
            for index, caption in enumerate(album.captions)
            if caption.strip() != prompt.strip()
        ]
        for index in other_images:
            near[album.trained[index]].append(float(row[index]))
        count = min(map(len, near.values()))
        if count == 0:
            return None
        held_out = expected_nearest(near[False], count=count)
        if held_out > 0:
            ratios.append(expected_nearest(near[True], count=count) / held_out)
    return fmean(ratios) if ratios else None


def finite(features: Tensor) -> bool:
    """Whether all features are finite; features of a broken adapter's samples may not be."""
    return bool(torch.isfinite(features).all())
