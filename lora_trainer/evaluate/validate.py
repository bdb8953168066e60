"""Validate an adapter against a dataset: measure every part that can be measured, give reasons for the others.

Input: a run folder or an adapter file, and the dataset it was trained on; output: a Validation, also
as RUN/validation.json and in the run's report. Nothing is written beside a file or into the dataset.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

import torch

from lora_trainer.common.events import EventStream, Listener
from lora_trainer.common.files import json_bytes, write_atomic
from lora_trainer.dataset.caption_rules import has_trigger
from lora_trainer.evaluate.evaluation import (
    Evaluation,
    build_evaluation,
    evaluated_lora_of,
    plan_of,
)
from lora_trainer.evaluate.features import (
    LEAST_PICTURES,
    Features,
    ReferenceImages,
    copy_ratio,
    find_features,
    set_distance,
)
from lora_trainer.reporting import score
from lora_trainer.reporting.report import write_report
from lora_trainer.reporting.score import VALIDATION_FILE, WEIGHTS, Validation
from lora_trainer.run.device import pinning
from lora_trainer.run.saving import measure_weights

STRENGTHS = (0.0, 0.5, 1.0, 1.5)
SAMPLES = 8
MAX_ALBUM = 64
UNRELATED = (
    "a red circle on a white background",
    "a blue square on a yellow background",
    "a photo of a mountain lake",
    "a bowl of fruit on a wooden table",
)
"""Prompts for subjects that a dataset is unlikely to hold; the miniature base was trained on the first two."""


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
    subject = evaluated_lora_of(path, base=base, overrides=overrides)
    plan = plan_of(subject, dataset)
    records = (*plan.held_out, *plan.trained)
    # Different captions, those of held-out images first.
    prompts = list(dict.fromkeys(each.caption for each in records if each.caption))[:SAMPLES]
    captions, triggers = {record.caption for record in records}, plan.config.data.triggers
    unrelated = [
        prompt
        for prompt in UNRELATED
        if prompt not in captions and not any(has_trigger(prompt, word) for word in triggers)
    ]
    with pinning(plan, events):
        scene = build_evaluation(subject, plan, prompts=(*prompts, *unrelated), events=events)
        notes = [f"image features: {features.name}", *_notes(scene)]
        findings = Validation(file=subject.file.name, notes=notes)
        measure_weights(scene.weights, findings)
        if scene.weights.finite:
            _measure_losses(scene, findings)
            events.emit("phase", phase="sample", message="samples", done=0, total=0)
            _measure_samples(scene, prompts, features, findings)
            events.emit("phase", phase="sample", message="unrelated prompts", done=0, total=0)
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
    elif subject.fingerprint != scene.plan.dataset.fingerprint:
        yield (
            "images or captions changed since the training: "
            "images that count as held out may have been trained"
        )
    if scene.plan.config.adapter.new_tokens:
        yield "the base is measured with the new tokens, so all parts rate the adapter's layers alone"
    if subject.has_settings and not scene.plan.held_out:
        yield "no image is held out, so gain and strength are measured on trained images"


def _measure_losses(scene: Evaluation, findings: Validation) -> None:
    """Measure gain, strength and generalisation."""
    plan = scene.plan
    # Without the training's settings nobody knows which images were held out, so all of them are measured.
    has_held_out = bool(scene.subject.has_settings and plan.held_out)
    unseen = plan.held_out if has_held_out else (*plan.held_out, *plan.trained)
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
            [int(batch[0].level.timestep), 1 - after / before]
            for batch, before, after in zip(
                batches, by_strength[0.0], by_strength[1.0], strict=True
            )
        ],
        "loss_by_strength": [[strength, loss] for strength, loss in means.items()],
    }
    if not has_held_out:
        findings.leave_out("no image is known to be held out", "generalisation")
        return
    trained = scene.batches(plan.trained)
    before, after = (fmean(scene.losses(trained, strength=s)) for s in (0.0, 1.0))
    gains = {"trained_gain": 1 - after / before, "held_out_gain": 1 - means[1.0] / means[0.0]}
    findings.parts["generalisation"] = score.generalisation_part(**gains)
    findings.figures |= gains


def _measure_samples(
    scene: Evaluation, prompts: Sequence[str], features: Features, findings: Validation
) -> None:
    """Measure similarity and memorisation."""
    plan = scene.plan
    records = (*plan.held_out, *plan.trained)[:MAX_ALBUM]
    both = ("similarity", "memorisation")
    if len(records) < LEAST_PICTURES or len(prompts) < LEAST_PICTURES:
        findings.leave_out("needs at least two images with different captions", *both)
        return
    album = ReferenceImages(
        features=features.encode(scene.pictures(records)),
        captions=[record.caption for record in records],
        trained=[record not in plan.held_out for record in records],
    )
    base, adapted = (
        features.encode(scene.samples(prompts, strength=strength)) for strength in (0.0, 1.0)
    )
    if not torch.cat((base, adapted)).isfinite().all():
        findings.leave_out("features of the samples hold NaN or infinity", *both)
        return
    base_distance, adapted_distance = (
        set_distance(images, album.features) for images in (base, adapted)
    )
    findings.figures |= {"distance": adapted_distance, "base_distance": base_distance}
    if base_distance > 0:
        findings.parts["similarity"] = score.similarity_part(
            base_distance=base_distance, adapted_distance=adapted_distance
        )
    else:
        why = "the base's samples are already as near as the dataset itself"
        findings.leave_out(why, "similarity")
    before, after = (
        copy_ratio(images, prompts, album) if scene.subject.has_settings else None
        for images in (base, adapted)
    )
    if before is None or after is None:
        findings.leave_out("too few images are known to be held out", "memorisation")
        return
    findings.parts["memorisation"] = score.memorisation_part(base_ratio=before, adapted_ratio=after)
    findings.figures |= {"copy_ratio": after, "base_copy_ratio": before}
