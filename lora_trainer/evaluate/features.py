"""Images as feature vectors, and distances between sets of images: how near samples come to a dataset.

Input: PIL images of any size, cropped square here; output: float32 [N, D]. The encoder is a CLIP image
encoder if this machine has one (Radford et al. 2021, arXiv 2103.00020), else the embedded base's VAE, whose
latents hold colours and layout but no meaning. Nothing is downloaded. A sample's prompt is the caption of an
image, so that image is left out in the search for copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from lora_trainer import families
from lora_trainer.common.errors import InputError, first_line
from lora_trainer.config.inputs import BaseSettings
from lora_trainer.evaluate.evaluation import pixels
from lora_trainer.families.hub_files import cached_snapshot
from lora_trainer.families.locate import EMBEDDED, locate
from lora_trainer.reporting.score import energy_distance, expected_nearest

CLIP = "openai/clip-vit-base-patch32"
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
LEAST_PICTURES = 2
GRIDS = (1, 2, 4)
"""Cells per side over which latents are averaged: so coarse that a subject that moves a little still matches."""


@dataclass(frozen=True, kw_only=True)
class Features:
    """An image encoder; the report names it, as numbers of different encoders cannot be compared."""

    name: str
    encode: Callable[[Sequence[Image.Image]], Tensor]


def find_features(clip: str | None = None) -> Features:
    """Return CLIP from `clip`, a folder or a Hub id in the local cache; None: the best encoder on the machine.

    Raises InputError where `clip` is named but not on this machine.
    """
    if clip is not None and (folder := Path(clip).expanduser()).is_dir():
        return clip_features(folder, name=clip)
    snapshot = cached_snapshot(clip or CLIP, revision=None)
    if snapshot is not None:
        return clip_features(snapshot, name=clip or CLIP)
    if clip is not None:
        raise InputError(
            f"{clip} is neither a folder nor in the local Hub cache",
            fix="give a folder with a CLIP vision model, or leave --clip out",
        )
    return latent_features()


def latent_features() -> Features:
    """Return means and deviations of the embedded VAE's latents over 1, 4 and 16 cells, D = 168."""
    facts = locate(BaseSettings(model=EMBEDDED))
    encoder = families.family(facts.family).latents.encoder(facts, device=torch.device("cpu"))
    side_px = facts.resolution_px

    def encode(images: Sequence[Image.Image]) -> Tensor:
        squares = (pixels(image, side_px=side_px) * 2 - 1 for image in images)
        return torch.stack([pooled(encoder.encode_images(each)[0].mean) for each in squares])

    return Features(name="latents of the embedded base's VAE", encode=encode)


def clip_features(folder: Path, *, name: str) -> Features:
    """Return unit-length image embeddings of a CLIP model in a folder; raises InputError."""
    from transformers import CLIPVisionModelWithProjection

    try:
        model: Any = CLIPVisionModelWithProjection.from_pretrained(
            folder, local_files_only=True, use_safetensors=True
        )
    except (OSError, ValueError) as error:
        raise InputError(
            f"{name} cannot be loaded as a CLIP image encoder: {first_line(error)}",
            fix="give a folder with a CLIP vision model, or leave --clip out",
        ) from error
    model = model.eval().requires_grad_(False)
    side_px = int(model.config.image_size)
    mean, std = (torch.tensor(values)[:, None, None] for values in (CLIP_MEAN, CLIP_STD))

    @torch.no_grad()
    def encode(images: Sequence[Image.Image]) -> Tensor:
        rows = [(pixels(image, side_px=side_px) - mean) / std for image in images]
        return torch.cat([F.normalize(model(row).image_embeds, dim=-1) for row in rows])

    return Features(name=f"CLIP ({name})", encode=encode)


def pooled(latent: Tensor) -> Tensor:
    """Return mean and deviation of [C, H, W] in the cells of each grid; all grids have the same weight."""
    rows = []
    for cells in GRIDS:
        mean = F.adaptive_avg_pool2d(latent[None], cells)
        square = F.adaptive_avg_pool2d(latent[None].square(), cells)
        # E[x^2] - E[x]^2 may round below zero where a cell is uniform.
        deviation = (square - mean.square()).clamp(min=0).sqrt()
        # A grid has cells^2 numbers, so dividing by `cells` gives each grid the same squared norm.
        rows.append(torch.cat([mean, deviation], dim=1).flatten() / cells)
    return torch.cat(rows)


def distances(first: Tensor, second: Tensor) -> Tensor:
    """Return Euclidean distances [N, M] of [N, D] and [M, D], exact for near pairs too."""
    # The product form |a|^2 + |b|^2 - 2ab cancels for near vectors, and copies are the nearest of all.
    return torch.cdist(
        first[None], second[None], compute_mode="donot_use_mm_for_euclid_dist"
    ).squeeze(0)


def set_distance(first: Tensor, second: Tensor) -> float:
    """Return the energy distance of two sets of at least two vectors."""
    return energy_distance(
        distances(first, second).flatten().tolist(), _pairs(first), _pairs(second)
    )


def _pairs(features: Tensor) -> list[float]:
    upper = torch.triu_indices(len(features), len(features), offset=1)
    pair_distances: list[float] = distances(features, features)[upper[0], upper[1]].tolist()
    return pair_distances


@dataclass(frozen=True, kw_only=True)
class ReferenceImages:
    """Features [N, D] of a dataset's images with their captions; `trained` marks the training images."""

    features: Tensor
    captions: Sequence[str]
    trained: Sequence[bool]


def copy_ratio(samples: Tensor, prompts: Sequence[str], album: ReferenceImages) -> float | None:
    """Return the mean over samples of nearest trained distance / nearest held-out distance.

    Both sets are compared at the size of the smaller one. None where no trained or no held-out image is left.
    """
    ratios = []
    for row, prompt in zip(distances(samples, album.features), prompts, strict=True):
        near: dict[bool, list[float]] = {True: [], False: []}
        every = zip(album.captions, album.trained, row.tolist(), strict=True)
        for caption, is_trained, distance in every:
            if caption.strip() != prompt.strip():
                near[is_trained].append(distance)
        count = min(map(len, near.values()))
        if count == 0:
            return None
        held_out = expected_nearest(near[False], count=count)
        if held_out > 0:
            ratios.append(expected_nearest(near[True], count=count) / held_out)
    return fmean(ratios) if ratios else None
