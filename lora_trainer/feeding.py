"""The feeder of a training: its samples, their cache entries and the noise levels they are trained at."""

from __future__ import annotations

import math

from lora_trainer.caching import texts_as
from lora_trainer.config import concrete
from lora_trainer.data.cache import Cache
from lora_trainer.data.loader import Feeder, Window
from lora_trainer.data.needs import Needs
from lora_trainer.data.sources import Entries
from lora_trainer.exporting import Job
from lora_trainer.prepare import Prepared
from lora_trainer.train.levels import Levels, flow_levels, table_levels


def build_feeder(job: Job, wanted: Needs, cache: Cache) -> Feeder:
    prepared, config = job.prepared, job.prepared.config
    own, regularisation = (
        [sample for record in records for sample in record.sample_ids()]
        for records in (prepared.trained, prepared.dataset.regularisation)
    )
    return Feeder(
        sources={sample: wanted.sources[sample] for sample in (*own, *regularisation)},
        empty_text=texts_as(prepared).key(""),
        entries=Entries(cache=cache),
        levels=_levels(prepared),
        prediction=prepared.facts.prediction,
        told=prepared.family.guidance_conditioning(
            prepared.facts, guidance_scale=config.objective.guidance_scale
        ),
        data=config.data,
        objective=config.objective,
        batch_size=config.train.batch_size,
        seed=config.train.seed,
        regularisation=regularisation,
        regularisation_per_epoch=prepared.regularisation_per_epoch,
        place=job.ranks.dist_env,
        window=_window(job),
    )


def _window(job: Job) -> Window | None:
    """Return how far ahead samples are told of: as far as their modulation is made at once."""
    prepared = job.prepared
    facts, config = prepared.facts, prepared.config
    if not concrete(config.memory.modulation_cache):
        return None
    each = math.ceil(config.train.batch_size / job.ranks.dist_env.count)

    def latent_shape(size_px: tuple[int, int]) -> tuple[int, ...]:
        width_px, height_px = size_px
        return facts.latent_channels, height_px // facts.vae_factor, width_px // facts.vae_factor

    return Window(
        steps=max(1, prepared.plan.modulation_samples // each),
        names=prepared.family.modulated_by(facts),
        latent_shape=latent_shape,
    )


def _levels(prepared: Prepared) -> Levels:
    family, facts, settings = prepared.family, prepared.facts, prepared.config.objective
    if facts.prediction != "flow":
        return table_levels(family.alphas_cumprod(facts).tolist(), settings)
    return flow_levels(
        settings,
        base_shift=lambda size: family.flow_shift(facts, width_px=size[0], height_px=size[1]),
    )
