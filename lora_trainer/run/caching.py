"""Filling the caches of a training, with the encoders where the plan puts them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from lora_trainer.cache.cache_plan import Needs, TextEntries, needs
from lora_trainer.cache.encode import fill
from lora_trainer.cache.store import Cache
from lora_trainer.common.events import EventStream
from lora_trainer.common.files import CappedFolder
from lora_trainer.config.config import Config, concrete
from lora_trainer.dataset.tokens import new_word
from lora_trainer.families.base import TextEncoder
from lora_trainer.hardware.machine import GIB
from lora_trainer.network.offload import offload
from lora_trainer.run.device import CPU, DTYPES, encoder_device, planned_device
from lora_trainer.run.job import TrainingJob
from lora_trainer.run.prepare import Prepared
from lora_trainer.training.distributed.process_group import ProcessGroup


def open_cache(prepared: Prepared, events: EventStream) -> Cache:
    folder = CappedFolder(
        root=prepared.cache_root, limit_bytes=int(prepared.config.data.cache_max_gib * GIB)
    )
    folder.create()
    return Cache(folder=folder, on_problem=events.problem)


def refuse_small_cache(prepared: Prepared, wanted: Needs) -> None:
    """Raise MachineError unless what a run still has to encode fits, before it begins (FAULTS CAC-05).

    Entries of the run are counted, the planner's size of them is taken.
    """
    cache, keys = open_cache(prepared, EventStream()), wanted.keys()
    missing = sum(not cache.has(key) for key in keys)
    needed_bytes = prepared.plan.disk_bytes["cache"]
    cache.check_room(needed_bytes, missing_bytes=needed_bytes * missing // len(keys))


def fill_caches(job: TrainingJob, cache: Cache) -> Needs:
    prepared, config, family = job.prepared, job.prepared.config, job.prepared.family
    device = planned_device(prepared)
    wanted = job.wanted or plan_cache(prepared, job.prompts)
    text_dtype = DTYPES[concrete(config.memory.text_encoder_precision)]
    began = time.monotonic()
    encode = partial(
        fill,
        cache=cache,
        settings=config.data,
        load_image_encoder=lambda place: family.load_image_encoder(prepared.facts, device=place),
        load_text_encoder=partial(_caching_text_encoder, prepared, text_dtype),
        devices=tuple(dict.fromkeys((encoder_device(prepared), device, CPU))),
        texts_as=texts_as(prepared),
        events=job.events,
        stop=job.stop,
    )
    done = [encode(share) for share in shares(wanted, job.ranks)]
    job.events.emit(
        "cached",
        latents=sum(part.latents for part in done),
        texts=sum(part.texts for part in done),
        masks=sum(part.masks for part in done),
        found=done[-1].found,
        seconds=time.monotonic() - began,
    )
    if job.ranks.dist_env.local_rank == 0:
        cache.prune(wanted.keys())
    return wanted


def shares(wanted: Needs, ranks: ProcessGroup) -> Iterator[Needs]:
    """Yield what this process encodes: its share, what its machine then still lacks, and what is left.

    Between them it waits until the others have done theirs, without a collective: a machine without
    the shared cache encodes what it needs.
    """
    place = ranks.dist_env
    if not ranks.is_single:
        yield wanted.share(place.rank, place.count)
        ranks.wait_for_all("encoded")
        yield wanted.share(place.local_rank, place.local_count)
        ranks.wait_for_all("encoded here")
    yield wanted


def plan_cache(prepared: Prepared, prompts: Sequence[str]) -> Needs:
    """Return every entry the run reads; `prompts` are those of its sample images."""
    config, data = prepared.config, prepared.config.data
    if not config.objective.preservation_weight:
        data = data.model_copy(update={"class_word": None})  # its texts would not be read
    return needs(
        (*prepared.trained, *prepared.held_out, *prepared.dataset.regularisation),
        prepared.placements,
        prompts=(*prompts, config.sampling.negative_prompt),
        facts=prepared.facts,
        texts_as=texts_as(prepared),
        geometry=partial(prepared.family.geometry_conditioning, prepared.facts),
        settings=data,
        seed=config.train.seed,
        more=prepared.more_placements,
    )


def _caching_text_encoder(
    prepared: Prepared, dtype: torch.dtype, device: torch.device
) -> TextEncoder:
    """Load the text encoders where they run, or beside it where they are too large to lie there."""
    family = prepared.family
    if not concrete(prepared.config.memory.text_encoder_offload):
        found = family.load_text_encoder(prepared.facts, dtype=dtype, device=device)
        if word := new_word(prepared.config):
            found.learn(word)
        return found
    encoder = family.load_text_encoder(prepared.facts, dtype=dtype, device=CPU)
    for network in encoder.networks.values():
        offload(network, device)
    return encoder


def texts_as(prepared: Prepared) -> TextEntries:
    return TextEntries(
        encoder_identity=prepared.facts.parts["text_encoder"].identity,
        text_tokens=prepared.facts.text_tokens,
        precision=concrete(prepared.config.memory.text_encoder_precision),
        tokens_only=runs_text_encoders(prepared.config),
        word=new_word(prepared.config),
        emphasis=prepared.config.data.emphasis,
        clip_skip=prepared.facts.clip_skip,
    )


def runs_text_encoders(config: Config) -> bool:
    """Say whether text encoders run in every step, as what they give changes."""
    return config.adapter.text_encoder or config.adapter.new_tokens > 0
