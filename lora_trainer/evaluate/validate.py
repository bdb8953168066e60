"""Validate an adapter against a dataset: every part that can be measured, and why another cannot.

Input: a run folder or an adapter file, and the dataset it was trained on; output: a Validation, also
as RUN/validation.json and in the run's report. Nothing is written beside a file or into the dataset.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from types import MappingProxyType
from typing import Any

from lora_trainer.common.events import EventStream, Listener
from lora_trainer.common.files import json_bytes, write_atomic
from lora_trainer.dataset.captions import has_trigger
from lora_trainer.dataset.scan import ImageRecord
from lora_trainer.evaluate.evaluated_lora import EvaluatedLora, evaluated_lora_of
from lora_trainer.evaluate.evaluation import Evaluation, build_evaluation, plan_of
from lora_trainer.evaluate.features import Features, find_features
from lora_trainer.evaluate.losses import (
    LEAST_PICTURES,
    ReferenceImages,
    copy_ratio,
    finite,
    nearness,
)
from lora_trainer.reporting.report import write_report
from lora_trainer.reporting.score import (
    VALIDATION_FILE,
    WEIGHTS,
    Validation,
    drift_part,
    gain_part,
    generalisation_part,
    mean_gain,
    memorisation_part,
    similarity_part,
    strength_part,
)
from lora_trainer.run.device import pinning
from lora_trainer.run.final_scores import Found, measure_weights

STRENGTHS = (0.0, 0.5, 1.0, 1.5)
SAMPLES = 8
MAX_ALBUM = 64
UNRELATED = (
    "a red circle on a white background",
    "a blue square on a yellow background",
    "a photo of a mountain lake",
    "a bowl of fruit on a wooden table",
)
"""Prompts that ask for nothing a dataset is likely to hold; the miniature base knows the first two."""


def validate(
    path: Path,
    dataset: Path,
    *,
    base: str | None = None,
    clip: str | None = None,
    overrides: Mapping[str, Any] = MappingProxyType({}),
    listeners: Sequence[Listener] = (),
) -> Validation:
    """Measure an adapter; writes validation.json and the report where `path` is a run folder.

    `clip` names a CLIP image encoder on this machine; `overrides` are settings over those of the
    training. Raises LoraTrainError.
    """
    events = EventStream()
    for listener in listeners:
        events.subscribe(listener)
    subject = evaluated_lora_of(path, base=base)
    subject = replace(subject, settings={**subject.settings, **overrides})
    features = find_features(clip)
    plan = plan_of(subject, dataset)
    records = (*plan.held_out, *plan.trained)
    prompts = _prompts(records)
    unrelated = _unrelated(plan.config.data.triggers, records)
    with pinning(plan, events):
        scene = build_evaluation(subject, plan, prompts=(*prompts, *unrelated), events=events)
        found = Found(notes=list(_notes(subject, scene, features)))
        measure_weights(scene.weights, found)
        if scene.weights.finite:
            _measure_losses(subject, scene, found)
            _say(events, "samples")
            _measure_samples(subject, scene, features, prompts, found)
            _say(events, "unrelated prompts")
            _measure_drift(scene, unrelated, found)
        else:
            why = "the adapter holds numbers that are not finite"
            found.left_out |= dict.fromkeys(WEIGHTS.keys() - {"weights"}, why)
    result = found.result(subject.file.name)
    if subject.run is not None:
        write_atomic(subject.run / VALIDATION_FILE, json_bytes(result.to_json()), durable=False)
        write_report(subject.run)
    return result


def _notes(subject: EvaluatedLora, scene: Evaluation, features: Features) -> Iterator[str]:
    yield f"image features: {features.name}"
    if not subject.known:
        yield "the file does not say which pictures it was trained on: all count as held out"
    elif not subject.fingerprint:
        yield "the dataset is taken to be the one it was trained on, as it was then"
    elif subject.fingerprint != scene.plan.dataset.fingerprint:
        yield (
            "images or captions changed since the training: "
            "pictures that count as held out may have been trained"
        )
    if scene.plan.config.adapter.new_tokens:
        yield "new tokens are on in what counts as the base: the parts are of the layers alone"
    if subject.known and not scene.plan.held_out:
        yield "no picture is held out: gain and strength are measured on trained pictures"


def _measure_losses(subject: EvaluatedLora, scene: Evaluation, found: Found) -> None:
    """Measure gain, strength and generalisation."""
    plan = scene.plan
    known = bool(subject.known and plan.held_out)
    unseen = plan.held_out if known else (*plan.held_out, *plan.trained)
    batches = scene.batches(unseen)
    by_strength = {s: scene.probe.losses(batches, strength=s) for s in STRENGTHS}
    means = {strength: fmean(losses) for strength, losses in by_strength.items()}
    gain = mean_gain(by_strength[0.0], by_strength[1.0])
    found.parts["gain"] = gain_part(gain)
    found.parts["strength"] = strength_part(means)
    found.figures |= {
        "pictures": len(batches[0].samples),
        "gain": gain,
        "gain_by_timestep": [
            [batch.step, 1 - after / before]
            for batch, before, after in zip(
                batches, by_strength[0.0], by_strength[1.0], strict=True
            )
        ],
        "loss_by_strength": [[strength, loss] for strength, loss in means.items()],
    }
    if not known:
        found.left_out["generalisation"] = "no picture is known to be held out"
        return
    trained = scene.batches(plan.trained)
    before, after = (fmean(scene.probe.losses(trained, strength=s)) for s in (0.0, 1.0))
    gains = {"trained_gain": 1 - after / before, "held_out_gain": 1 - means[1.0] / means[0.0]}
    found.parts["generalisation"] = generalisation_part(**gains)
    found.figures |= gains


def _measure_samples(
    subject: EvaluatedLora,
    scene: Evaluation,
    features: Features,
    prompts: Sequence[str],
    found: Found,
) -> None:
    """Measure similarity and memorisation."""
    plan = scene.plan
    records = (*plan.held_out, *plan.trained)[:MAX_ALBUM]
    if len(records) < LEAST_PICTURES or len(prompts) < LEAST_PICTURES:
        why = "it takes at least two pictures with different captions"
        found.left_out |= {"similarity": why, "memorisation": why}
        return
    album = ReferenceImages(
        features=features.encode(scene.pictures(records)),
        captions=[record.caption for record in records],
        trained=[record not in plan.held_out for record in records],
    )
    base, adapted = (
        features.encode(scene.samples(prompts, strength=strength)) for strength in (0.0, 1.0)
    )
    if not (finite(base) and finite(adapted)):
        why = "samples could not be turned into finite features"
        found.left_out |= {"similarity": why, "memorisation": why}
        return
    base_distance, adapted_distance = nearness(base, adapted, album)
    found.figures |= {"distance": adapted_distance, "base_distance": base_distance}
    if base_distance > 0:
        found.parts["similarity"] = similarity_part(
            base_distance=base_distance, adapted_distance=adapted_distance
        )
    else:
        found.left_out["similarity"] = "samples of the base cannot be told from the pictures"
    before = copy_ratio(base, prompts, album) if subject.known else None
    after = copy_ratio(adapted, prompts, album) if subject.known else None
    if before is None or after is None:
        found.left_out["memorisation"] = "too few pictures are known to be held out"
        return
    found.parts["memorisation"] = memorisation_part(base_ratio=before, adapted_ratio=after)
    found.figures |= {"copy_ratio": after, "base_copy_ratio": before}


def _measure_drift(scene: Evaluation, prompts: Sequence[str], found: Found) -> None:
    if not prompts:
        found.left_out["drift"] = "every unrelated prompt holds the trigger"
        return
    images = scene.samples(prompts, strength=0.0)
    change, base_loss = scene.probe.drift(scene.elsewhere(prompts, images))
    found.parts["drift"] = drift_part(change=change, base_loss=base_loss)
    found.figures |= {"drift": change, "drift_base_loss": base_loss}


def _prompts(records: Sequence[ImageRecord]) -> list[str]:
    """Return captions, held-out pictures first."""
    return list(dict.fromkeys(record.caption for record in records if record.caption))[:SAMPLES]


def _unrelated(triggers: Sequence[str], records: Sequence[ImageRecord]) -> list[str]:
    captions = {record.caption for record in records}
    return [
        prompt
        for prompt in UNRELATED
        if prompt not in captions and not any(has_trigger(prompt, trigger) for trigger in triggers)
    ]


def _say(events: EventStream, what: str) -> None:
    events.emit("phase", phase="sample", message=what, done=0, total=0)
