"""The feeder of a training: its samples, their cache entries and the noise levels they are trained at."""

from __future__ import annotations

from lora_trainer.caching import texts_as
from lora_trainer.data.cache import Cache
from lora_trainer.data.loader import Feeder
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
        place=job.ranks.place,
    )


def _levels(prepared: Prepared) -> Levels:
    family, facts, settings = prepared.family, prepared.facts, prepared.config.objective
    if facts.prediction != "flow":
        return table_levels(family.alphas_cumprod(facts).tolist(), settings)
    return flow_levels(
        settings,
        base_shift=lambda size: family.flow_shift(facts, width_px=size[0], height_px=size[1]),
    )
