"""Everything a validation needs: the base with an adapter of adjustable strength, cached data, a sampler.

Input: an EvaluatedLora and a dataset; output: an Evaluation. It is prepared like a training, so devices, precisions and
caches are the plan's; text encoders run in every pass where the adapter changes them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from lora_trainer.cache.cache_plan import SampleSource
from lora_trainer.common.event_kinds import Phase
from lora_trainer.common.events import EventStream
from lora_trainer.common.randomness import Stream, draw_seed
from lora_trainer.config.config import all_settings, flatten
from lora_trainer.dataset.buckets import cut
from lora_trainer.dataset.caption_rules import new_word
from lora_trainer.dataset.images import decode
from lora_trainer.dataset.records import ImageRecord, Reference
from lora_trainer.families.base.facts import Conditioning, Geometry
from lora_trainer.families.base.noise_levels import Level
from lora_trainer.families.base.sampling import Sampler, build_sampler
from lora_trainer.lora.adapter import Adapter
from lora_trainer.lora.lora_hooks import LoraStrength, attach_lora
from lora_trainer.lora_file.base_layers import LayerNames
from lora_trainer.lora_file.embedding import trained_vectors
from lora_trainer.lora_file.read import read_contents
from lora_trainer.lora_file.tensor_file import holds_adapter
from lora_trainer.run import build
from lora_trainer.run.device import check_allocator, planned_device, setup_torch
from lora_trainer.run.prepare import Prepared, Request, prepare_with_base
from lora_trainer.run.run_folder import TrainingJob, read_run
from lora_trainer.run.samples import (
    OF_THE_BASE,
    file_and_base,
    is_own_base,
    reference_pictures,
)
from lora_trainer.run.saving import WeightFigures, weight_figures
from lora_trainer.training.dataloader import Sample, TrainingDataLoader, split
from lora_trainer.training.distributed.process_group import ProcessGroup
from lora_trainer.training.loss import Model, add_noise, target

QUANTILES = 16
# Most trained and most held-out images whose losses are measured: enough for a mean, in bounded time.
MAX_PICTURES = 16
SAMPLE_STEPS = 12


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A prepared validation: a model, the strength control of its adapter, and the dataset's cache entries.

    `sources` are the entries of the records by sample id.
    """

    subject: EvaluatedLora
    prepared: Prepared
    model: Model
    dial: LoraStrength
    weights: WeightFigures
    feeder: TrainingDataLoader
    sampler: Sampler
    sources: Mapping[str, SampleSource]

    @torch.no_grad()
    def losses(self, batches: Sequence[Sequence[Sample]], *, strength: float) -> list[float]:
        """Return the mean loss of each batch; a batch has one timestep."""
        losses = self.model.losses
        with self.dial.at(strength):
            rows = [[losses(part).cpu() for part in self._split(batch)] for batch in batches]
        return [float(torch.cat(row).double().mean()) for row in rows]

    @torch.no_grad()
    def drift(self, batches: Sequence[Sequence[Sample]]) -> tuple[float, float]:
        """Return (mean squared change of the predictions at strength 1, the base's mean squared error)."""
        model, changes, errors = self.model, list[Tensor](), list[Tensor]()
        for samples in (part for batch in batches for part in self._split(batch)):
            batch = model.collate(samples).on(model.device)
            alpha, sigma, _, _ = batch.numbers
            noisy = add_noise(batch.latents, batch.noise, alpha, sigma).to(model.precision)
            true = target(batch.latents, batch.noise, alpha, sigma, model.prediction).float()
            predicted = []
            for strength in (0.0, 1.0):
                with self.dial.at(strength):
                    conditioning = model.embed(batch.conditioning)
                    prediction = model.predict(model.denoiser, noisy, batch.timesteps, conditioning)
                    predicted.append(prediction.float())
            base, adapted = predicted
            changes.append((adapted - base).square().flatten(1).mean(1).cpu())
            errors.append((base - true).square().flatten(1).mean(1).cpu())
        return fmean(torch.cat(changes).tolist()), fmean(torch.cat(errors).tolist())

    def _split(self, samples: Sequence[Sample]) -> list[tuple[Sample, ...]]:
        at_once = self.prepared.config.memory.micro_batch
        return split(samples, cap=at_once, group_key=self.model.batch_group_key)

    def batches(self, records: Sequence[ImageRecord]) -> list[tuple[Sample, ...]]:
        """Return a batch of images for each quantile of the timesteps; the noise depends on image content only."""
        chosen = sorted(records, key=lambda record: record.content_hash)[:MAX_PICTURES]
        names = [record.sample_ids()[0] for record in chosen]
        keys = [(name, self.sources[name]) for name in names]
        return self.feeder.validation(keys, quantiles=QUANTILES)

    def samples(self, prompts: Sequence[str], *, strength: float) -> list[Image.Image]:
        """Draw an image for each prompt, with the seeds of a training's sample images."""
        settings, prepared = self.prepared.config.sampling, self.prepared
        model, read = self.model, self.feeder.entries.read
        side, references = prepared.config.data.resolution, references_by_caption(prepared)

        def text(words: str, prompt: str) -> Conditioning:
            own = references.get(prompt, ())
            return model.embed(read(build.sample_text(prepared, words, own).key))

        with self.dial.at(strength), torch.no_grad():
            return [
                self.sampler.image(
                    text(prompt, prompt),
                    text(settings.negative_prompt, prompt),
                    seed=settings.seed + index,
                    size_px=(side, side),
                    # A few-step base is not drawn in more steps than it was distilled to.
                    steps=min(SAMPLE_STEPS, settings.steps),
                    guidance_scale=settings.guidance_scale,
                    references=reference_pictures(self.prepared, references.get(prompt, ())),
                )
                for index, prompt in enumerate(prompts)
            ]

    def elsewhere(
        self, prompts: Sequence[str], images: Sequence[Image.Image]
    ) -> list[tuple[Sample, ...]]:
        """Return batches as `batches` does, of generated images that are not in the dataset."""
        encoder = self.prepared.family.latents.encoder(
            self.prepared.facts, device=planned_device(self.prepared)
        )
        side = self.prepared.config.data.resolution
        latents = [
            encoder.encode_images(pixels(image, side_px=side) * 2 - 1)[0].mean for image in images
        ]
        whole = Geometry(original_px=(side, side), corner_px=(0, 0), target_px=(side, side))
        shared = {
            **self.prepared.facts.release.geometry_conditioning(whole),
            **self.feeder.shared_conditioning,
        }

        def sample(prompt: str, latent: Tensor, level: Level) -> Sample:
            seed = draw_seed(self.feeder.seed, Stream.DRIFT_NOISE, prompt, int(level.timestep))
            return Sample(
                sample=prompt,
                latents=latent,
                noise=torch.randn(latent.shape, generator=torch.Generator().manual_seed(seed)),
                level=level,
                weight=1.0,
                conditioning={**self.feeder.entries.read(text_key(prompt)), **shared},
            )

        text_key, at = build.texts_as(self.prepared).key, self.feeder.levels.at
        return [
            tuple(
                sample(prompt, latent, at((quantile + 0.5) / QUANTILES))
                for prompt, latent in zip(prompts, latents, strict=True)
            )
            for quantile in range(QUANTILES)
        ]

    def pictures(self, records: Sequence[ImageRecord]) -> list[Image.Image]:
        """Return the dataset's images as they are trained: scaled and cropped."""
        data = self.prepared.config.data
        return [
            cut(
                decode(
                    record.path, settings=data, content_hash=record.content_hash, crop=record.crop
                ).image,
                record.placement,
                flip=False,
            )
            for record in records
        ]


def pixels(image: Image.Image, *, side_px: int) -> Tensor:
    """Return the central square of an image, float32 [1, 3, side, side] in [0, 1]."""
    square = ImageOps.fit(image.convert("RGB"), (side_px, side_px), Image.Resampling.LANCZOS)
    return torch.from_numpy(np.array(square, dtype=np.float32)).permute(2, 0, 1)[None] / 255


def prepare_again(subject: EvaluatedLora, dataset: Path) -> Prepared:
    """Prepare the dataset as the adapter's training did; raises as `prepare` does."""
    prepared = prepare_with_base(Request(dataset=dataset, overrides=subject.settings))
    spellings = LayerNames(prepared.family, prepared.family.text.layers)
    parts = read_contents(subject.file).parts
    changes_text = any(spellings.find(name, size=part.size) for name, part in parts.items())
    if changes_text != prepared.config.adapter.text_encoder:
        settings = {**subject.settings, "adapter.text_encoder": changes_text}
        prepared = prepare_with_base(Request(dataset=dataset, overrides=settings))
    return prepared


def references_by_caption(prepared: Prepared) -> Mapping[str, tuple[Reference, ...]]:
    """Return the reference images that go with each caption."""
    records = (*prepared.held_out, *prepared.trained)
    return {one.caption: one.references for one in reversed(records)}


def build_evaluation(
    subject: EvaluatedLora, prepared: Prepared, *, prompts: Sequence[str], events: EventStream
) -> Evaluation:
    """Fill the caches and load the base with the adapter attached; raises LoraTrainError."""
    setup_torch(prepared)
    check_allocator(planned_device(prepared), events)
    references = references_by_caption(prepared)
    seeing = [
        build.sample_text(prepared, text, references.get(prompt, ()))
        for prompt in prompts
        for text in (prompt, prepared.config.sampling.negative_prompt)
    ]
    job = TrainingJob(
        prepared=prepared,
        folder=subject.file.parent,
        cache_needs=build.plan_cache(prepared, prompts, seeing=seeing),
        state=None,
        events=events,
        stop=lambda: None,
        started_at_s=time.time(),
        ranks=ProcessGroup(),
    )
    cache = build.open_cache(prepared, events)
    build.fill_caches(job, cache)
    events.emit(Phase(phase="load", message=prepared.facts.source, done=0, total=0))
    networks = build.load_networks(prepared)
    # New tokens that were trained with the adapter are added to the text encoders.
    word, words = new_word(prepared.config), build.new_tokens(prepared.config, networks.text)
    trained = trained_vectors(subject.file, word) if words and word is not None else {}
    for component, vectors in words.items():
        vectors.requires_grad_(False)
        vectors.copy_(torch.from_numpy(trained[prepared.family.text.new_token_keys[component]]))
    inside = networks.by_component
    tensors = build.adapter_in(subject.file, prepared, networks.text)
    weights = weight_figures(inside, tensors, device=planned_device(prepared))
    dial = attach_lora(inside, tensors)
    build.arrange(prepared, networks)
    model = replace(
        build.build_model(prepared, networks, Adapter(layers={}, rank=0, alpha=0.0)), masks=None
    )
    return Evaluation(
        subject=subject,
        prepared=prepared,
        model=model,
        dial=dial,
        weights=weights,
        feeder=build.build_dataloader(job, cache),
        sampler=build_sampler(
            prepared.family, prepared.facts, denoiser=networks.denoiser, device=model.device
        ),
        sources=job.cache_needs.sources,
    )


# Sections and settings of the training that a validation follows.
KEPT = (
    *("base.", "data.", "objective.", "adapter.", "sampling.", "hardware.threads"),
    *("train.seed", "train.precision", "memory.text_encoder_precision"),
)
OF_THIS_MACHINE = (
    "hardware.threads",
    "data.cache_dir",
    "data.cache_max_gib",
    "data.prefetch_steps",
)


@dataclass(frozen=True, kw_only=True)
class EvaluatedLora:
    """An adapter file, with the settings of its training that a validation needs.

    `has_settings`: the file or run states them. `fingerprint` is of the dataset at training time, "" where
    none is recorded.
    """

    file: Path
    run: Path | None
    settings: Mapping[str, Any]
    has_settings: bool
    fingerprint: str


def evaluated_lora_of(
    path: Path, *, base: str | None, overrides: Mapping[str, Any]
) -> EvaluatedLora:
    """Read the adapter's file and settings; raises InputError and RequestError, as `sample` does."""
    file, source, config = file_and_base(path, base=base)
    record = read_run(path) if path.is_dir() and not holds_adapter(path) else None
    settings = dict(record.settings) if record else flatten(config) if config else {}
    # Paths may be of another machine or base.
    elsewhere = record is None or base is not None
    is_own = is_own_base(str(settings.get("base.model")), source)
    keys = {
        info.key
        for info in all_settings()
        if info.key.startswith(KEPT)
        and not (elsewhere and (info.path or info.key in OF_THIS_MACHINE))
        and not (info.key in OF_THE_BASE and not is_own)
    }
    again = {key: value for key, value in settings.items() if key in keys and value != "auto"}
    return EvaluatedLora(
        file=file,
        run=path if record else None,
        settings={**again, "base.model": source, **overrides},
        has_settings=bool(settings),
        fingerprint=record.dataset.fingerprint if record else "",
    )
