"""Losses with and without an adapter at the same noise, and how far it moves other predictions.

Input: a model whose adapter is on a dial and prepared samples; output: plain numbers. Every number is
a function of the samples alone: pictures count the same, whatever their size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from lora_trainer.data.batches import Prepared, StepBatch, micro_batches, to_device
from lora_trainer.model.attached import Dial
from lora_trainer.train.objective import add_noise, target
from lora_trainer.train.training import Model


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A model, the dial of its adapter, and how many images fit at once."""

    model: Model
    dial: Dial
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

    def _drift(self, samples: Sequence[Prepared]) -> tuple[list[float], list[float]]:
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
