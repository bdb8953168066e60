"""Samples with and without an adapter against a dataset's pictures: nearness, and copies of trained ones.

Input: features of samples and pictures; output: parts' numbers, or why there are none. A sample's
prompt is the caption of a picture, so that picture is left out where copies are looked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from lora_trainer.validation.features import distances, set_distance
from lora_trainer.validation.parts import expected_nearest

LEAST_PICTURES = 2


@dataclass(frozen=True, kw_only=True)
class Album:
    """Features [N, D] of a dataset's pictures with their captions; `trained` says which were trained."""

    features: Tensor
    captions: Sequence[str]
    trained: Sequence[bool]


def nearness(base: Tensor, adapted: Tensor, album: Album) -> tuple[float, float]:
    """Return the energy distances of the base's and of the adapter's samples to the pictures."""
    return set_distance(base, album.features), set_distance(adapted, album.features)


def copy_ratio(samples: Tensor, prompts: Sequence[str], album: Album) -> float | None:
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
