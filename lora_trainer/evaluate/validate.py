"""Validate an adapter against a dataset: measure every part that can be measured, give reasons for the others.

Input: a run folder or an adapter file, and the dataset it was trained on; output: a Validation, also
as RUN/validation.json and in the run's report. Nothing is written beside a file or into the dataset.

Samples are compared with the dataset's images as vectors, float32 [N, D], of images of any size, cropped square here.
The encoder is a CLIP image encoder if this machine has one (Radford et al. 2021, arXiv 2103.00020), else the
embedded base's VAE, whose latents hold colours and layout but no meaning. Nothing is downloaded. A sample's prompt is
the caption of an image, so that image is left out in the search for copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from lora_trainer import families
from lora_trainer.common.errors import InputError, RequestError, first_line
from lora_trainer.common.event_kinds import Phase
from lora_trainer.common.events import EventStream, Listener
from lora_trainer.common.files import json_bytes, user_path, write_atomic
from lora_trainer.config.inputs import EMBEDDED, BaseSettings
from lora_trainer.dataset.caption_rules import has_trigger
from lora_trainer.dataset.slider_file import is_slider_file
from lora_trainer.evaluate.evaluation import (
    Evaluation,
    build_evaluation,
    evaluated_lora_of,
    pixels,
    prepare_again,
)
from lora_trainer.families.files.hub_files import cached_snapshot
from lora_trainer.families.files.locate import locate
from lora_trainer.reporting import score
from lora_trainer.reporting.report import write_report
from lora_trainer.reporting.score import VALIDATION_FILE, WEIGHTS, Validation
from lora_trainer.run.device import pinning
from lora_trainer.run.saving import measure_weights

STRENGTHS = (0.0, 0.5, 1.0, 1.5)
SAMPLES = 8
MAX_ALBUM = 64
# Prompts for subjects that a dataset is unlikely to hold; the miniature base was trained on the first two.
UNRELATED = (
    "a red circle on a white background",
    "a blue square on a yellow background",
    "a photo of a mountain lake",
    "a bowl of fruit on a wooden table",
)
CLIP = "openai/clip-vit-base-patch32"
LEAST_PICTURES = 2
# Cells per side over which latents are averaged: so coarse that a subject that moves a little still matches.
GRIDS = (1, 2, 4)


def validate(
    path: Path,
    dataset: Path,
    *,
    base: str | None = None,
    clip: str | None = None,
    overrides: Mapping[str, Any] = MappingProxyType({}),
    listeners: Sequence[Listener] = (),
) -> Validation:
    """Measure an adapter; writes validation.json and the report if `path` is a run folder.

    `clip` names a CLIP image encoder on this machine (`find_features`). `overrides` replace settings of the training.
    Raises LoraTrainError.
    """
    events = EventStream(listeners=[*listeners])
    features = find_features(clip)
    if is_slider_file(dataset):
        raise RequestError(
            f"{dataset} has the prompts of a slider, and an adapter is measured on images",
            fix="give a folder of images, or draw it at several strengths: lora-train sample --strength",
        )
    subject = evaluated_lora_of(path, base=base, overrides=overrides)
    prepared = prepare_again(subject, dataset)
    if prepared.dataset.pairs:
        raise RequestError(
            f"{dataset} has the pairs of a slider, and an adapter is measured at strength 1",
            fix="give other images, or draw it at several strengths: lora-train sample --strength",
        )
    records = (*prepared.held_out, *prepared.trained)
    # Different captions, those of held-out images first.
    prompts = list(dict.fromkeys(each.caption for each in records if each.caption))[:SAMPLES]
    captions, triggers = {record.caption for record in records}, prepared.config.data.triggers
    unrelated = [
        prompt
        for prompt in UNRELATED
        if prompt not in captions and not any(has_trigger(prompt, word) for word in triggers)
    ]
    with pinning(prepared, events):
        scene = build_evaluation(subject, prepared, prompts=(*prompts, *unrelated), events=events)
        notes = [f"image features: {features.name}", *_notes(scene)]
        findings = Validation(file=subject.file.name, notes=notes)
        measure_weights(scene.weights, findings)
        if scene.weights.finite:
            _measure_losses(scene, findings)
            events.emit(Phase(phase="sample", message="samples", done=0, total=0))
            _measure_samples(scene, prompts, features, findings)
            events.emit(Phase(phase="sample", message="unrelated prompts", done=0, total=0))
            if unrelated:
                images = scene.samples(unrelated, strength=0.0)
                change, base_loss = scene.drift(scene.elsewhere(unrelated, images))
                findings.parts["drift"] = score.drift_part(change=change, base_loss=base_loss)
                findings.figures |= {"drift": change, "drift_base_loss": base_loss}
            else:
                findings.leave_out("every unrelated prompt contains the trigger", "drift")
        else:
            findings.leave_out("the adapter holds NaN or infinity", *WEIGHTS.keys() - {"weights"})
    if subject.run is not None:
        write_atomic(subject.run / VALIDATION_FILE, json_bytes(findings.to_json()), durable=False)
        write_report(subject.run)
    return findings


def _notes(scene: Evaluation) -> Iterator[str]:
    subject = scene.subject
    if not subject.has_settings:
        yield "the file does not say which images it was trained on, so all count as held out"
    elif not subject.fingerprint:
        yield "the dataset is assumed to be the unchanged dataset of the training"
    elif subject.fingerprint != scene.prepared.dataset.fingerprint:
        yield (
            "images or captions changed since the training: "
            "images that count as held out may have been trained"
        )
    if scene.prepared.config.adapter.new_tokens:
        yield "the base is measured with the new tokens, so all parts rate the adapter's layers alone"
    if subject.has_settings and not scene.prepared.held_out:
        yield "no image is held out, so gain and strength are measured on trained images"


def _measure_losses(scene: Evaluation, findings: Validation) -> None:
    """Measure gain, strength and generalisation."""
    prepared = scene.prepared
    # Without the training's settings nobody knows which images were held out, so all of them are measured.
    has_held_out = bool(scene.subject.has_settings and prepared.held_out)
    unseen = prepared.held_out if has_held_out else (*prepared.held_out, *prepared.trained)
    batches = scene.batches(unseen)
    by_strength = {s: scene.losses(batches, strength=s) for s in STRENGTHS}
    means = {strength: fmean(losses) for strength, losses in by_strength.items()}
    gain = score.mean_gain(by_strength[0.0], by_strength[1.0])
    findings.parts["gain"] = score.gain_part(gain)
    findings.parts["strength"] = score.strength_part(means)
    findings.figures |= {
        "pictures": len(batches[0]),
        "gain": gain,
        "gain_by_timestep": [
            [int(batch[0].level.timestep), score.relative_gain(before, after)]
            for batch, before, after in zip(
                batches, by_strength[0.0], by_strength[1.0], strict=True
            )
        ],
        "loss_by_strength": [[strength, loss] for strength, loss in means.items()],
    }
    if not has_held_out:
        findings.leave_out("no image is known to be held out", "generalisation")
        return
    trained = scene.batches(prepared.trained)
    before, after = (fmean(scene.losses(trained, strength=s)) for s in (0.0, 1.0))
    gains = {
        "trained_gain": score.relative_gain(before, after),
        "held_out_gain": score.relative_gain(means[0.0], means[1.0]),
    }
    findings.parts["generalisation"] = score.generalisation_part(**gains)
    findings.figures |= gains


def _measure_samples(
    scene: Evaluation, prompts: Sequence[str], features: Features, findings: Validation
) -> None:
    """Measure similarity and memorisation."""
    prepared = scene.prepared
    records = (*prepared.held_out, *prepared.trained)[:MAX_ALBUM]
    both = ("similarity", "memorisation")
    if len(records) < LEAST_PICTURES or len(prompts) < LEAST_PICTURES:
        findings.leave_out("needs at least two images with different captions", *both)
        return
    album = features.encode(scene.pictures(records))
    images = [(record.caption, record not in prepared.held_out) for record in records]
    base, adapted = (
        features.encode(scene.samples(prompts, strength=strength)) for strength in (0.0, 1.0)
    )
    if not torch.cat((base, adapted)).isfinite().all():
        findings.leave_out("features of the samples hold NaN or infinity", *both)
        return
    base_distance, adapted_distance = (set_distance(each, album) for each in (base, adapted))
    findings.figures |= {"distance": adapted_distance, "base_distance": base_distance}
    if base_distance > 0:
        findings.parts["similarity"] = score.similarity_part(
            base_distance=base_distance, adapted_distance=adapted_distance
        )
    else:
        why = "the base's samples are already as near as the dataset itself"
        findings.leave_out(why, "similarity")
    before, after = (
        copy_ratio(each, prompts, album, images) if scene.subject.has_settings else None
        for each in (base, adapted)
    )
    if before is None or after is None:
        findings.leave_out("too few images are known to be held out", "memorisation")
        return
    findings.parts["memorisation"] = score.memorisation_part(base_ratio=before, adapted_ratio=after)
    findings.figures |= {"copy_ratio": after, "base_copy_ratio": before}


# ---- images as vectors


@dataclass(frozen=True, kw_only=True)
class Features:
    """An image encoder; the report names it, as numbers of different encoders cannot be compared."""

    name: str
    encode: Callable[[Sequence[Image.Image]], Tensor]


def find_features(clip: str | None = None) -> Features:
    """Return CLIP from `clip`, a folder or a Hub id in the local cache; None: the best encoder on the machine.

    Raises InputError where `clip` is named but not on this machine.
    """
    path = None if clip is None else Path(user_path(clip))
    folder = path if path and path.is_dir() else cached_snapshot(clip or CLIP, revision=None)
    if folder is not None:
        return clip_features(folder, name=clip or CLIP)
    if clip is not None:
        raise InputError(
            f"{clip} is neither a folder nor in the local Hub cache",
            fix="give a folder with a CLIP vision model, or leave --clip out",
        )
    # Means and deviations of the embedded VAE's latents over 1, 4 and 16 cells, D = 168.
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
    from transformers.utils.constants import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

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
    mean, std = (
        torch.tensor(values)[:, None, None] for values in (OPENAI_CLIP_MEAN, OPENAI_CLIP_STD)
    )

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
    return score.energy_distance(
        distances(first, second).flatten().tolist(),
        *(F.pdist(each).tolist() for each in (first, second)),
    )


def copy_ratio(
    samples: Tensor, prompts: Sequence[str], album: Tensor, images: Sequence[tuple[str, bool]]
) -> float | None:
    """Return the mean over samples of nearest trained distance / nearest held-out distance.

    `album` are the features [N, D] of the dataset's images, `images` their captions and whether each was trained.
    Both sets are compared at the size of the smaller one. None where no trained or no held-out image is left.
    """
    ratios = []
    for row, prompt in zip(distances(samples, album), prompts, strict=True):
        near: dict[bool, list[float]] = {True: [], False: []}
        for (caption, is_trained), distance in zip(images, row.tolist(), strict=True):
            if caption.strip() != prompt.strip():
                near[is_trained].append(distance)
        count = min(map(len, near.values()))
        if count == 0:
            return None
        held_out = score.expected_nearest(near[False], count=count)
        if held_out > 0:
            ratios.append(score.expected_nearest(near[True], count=count) / held_out)
    return fmean(ratios) if ratios else None
