"""Fills the caches of a training, with the encoders on the devices that the plan chose."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from lora_trainer.cache.cache_plan import Needs, TextEntries, needs
from lora_trainer.cache.encode import fill
from lora_trainer.cache.keys import CacheKey
from lora_trainer.cache.store import Cache
from lora_trainer.common.errors import MachineError
from lora_trainer.common.events import Event, EventStream
from lora_trainer.common.files import CappedFolder
from lora_trainer.config.running import RunConfig
from lora_trainer.dataset.caption_lengths import new_word
from lora_trainer.families.base import TextEncoder
from lora_trainer.hardware.machine import GIB, free_ram_bytes
from lora_trainer.network.block_swap import offload
from lora_trainer.run.device import CPU, DTYPES, planned_device
from lora_trainer.run.prepare import Prepared
from lora_trainer.run.run_folder import TrainingJob
from lora_trainer.training.distributed.process_group import ProcessGroup

_FREE_AFTERWARDS_BYTES = GIB


def open_cache(prepared: Prepared, events: EventStream) -> Cache:
    folder = CappedFolder(
        root=prepared.cache_root, limit_bytes=int(prepared.config.data.cache_max_gib * GIB)
    )
    folder.create()
    return Cache(folder=folder, on_problem=events.problem)


def refuse_small_cache(prepared: Prepared, cache_needs: Needs) -> None:
    """Raise MachineError if the disk has no room for the missing cache entries (FAULTS CAC-05).

    Missing entries are counted; their size is the planner's, in proportion.
    """
    cache, keys = open_cache(prepared, EventStream()), cache_needs.keys()
    missing = sum(not cache.has(key) for key in keys)
    needed_bytes = prepared.plan.disk_bytes["cache"]
    cache.check_room(needed_bytes, missing_bytes=needed_bytes * missing // len(keys))


def fill_caches(job: TrainingJob, cache: Cache) -> Needs:
    prepared = job.prepared
    cache_needs = job.cache_needs or plan_cache(prepared, job.prompts)
    devices = tuple(dict.fromkeys((planned_device(prepared), CPU)))
    encoders, events = _encoders(prepared), job.events
    began = time.monotonic()
    results = [
        fill(share, cache, devices=devices, events=events, stop=job.stop, **encoders)
        for share in shares(cache_needs, job.ranks)
    ]
    job.events.emit(
        "cached",
        latents=sum(part.latents for part in results),
        texts=sum(part.texts for part in results),
        masks=sum(part.masks for part in results),
        found=results[-1].found,
        seconds=time.monotonic() - began,
    )
    if job.ranks.dist_env.local_rank == 0:  # one process per machine deletes old entries
        cache.prune(cache_needs.keys())
    return cache_needs


def encode_prompt(job: TrainingJob, cache: Cache, prompt: str) -> CacheKey:
    """Encode a prompt in the middle of a training, unless the cache has it; return the key of its entry.

    The text encoders are loaded into host memory and run on the processor, because the GPU's memory is planned
    for the training. Raises MachineError where the host's free memory is too small for them.
    """
    prepared = job.prepared
    key = texts_as(prepared).key(prompt)
    if cache.has(key):
        return key
    dtype = DTYPES[prepared.config.memory.text_encoder_precision]
    needed_bytes = prepared.facts.parts["text_encoder"].parameters * dtype.itemsize
    free_bytes = free_ram_bytes()
    if needed_bytes + _FREE_AFTERWARDS_BYTES > free_bytes:
        raise MachineError(
            f"the text encoders need {needed_bytes / GIB:.1f} GiB beside the training, "
            f"{free_bytes / GIB:.1f} GiB of memory are free",
            fix="ask for one of the run's own prompts, or try the prompt when the training has ended",
        )
    # The phases of caching stay unsaid: the run is between two steps of its training.
    events = EventStream()
    events.subscribe(lambda event: _pass_on_problem(event, job.events))
    only = Needs(images={}, texts={key.digest: (prompt, key)}, sources={})
    fill(only, cache, devices=(CPU,), events=events, **_encoders(prepared))
    return key


def _encoders(prepared: Prepared) -> dict[str, Any]:
    """Return the arguments of `fill` that say how images and texts are encoded."""
    dtype = DTYPES[prepared.config.memory.text_encoder_precision]
    load_image_encoder = prepared.family.load_image_encoder
    return {
        "settings": prepared.config.data,
        "load_image_encoder": lambda place: load_image_encoder(prepared.facts, device=place),
        "load_text_encoder": partial(_caching_text_encoder, prepared, dtype),
        "texts_as": texts_as(prepared),
    }


def _pass_on_problem(event: Event, events: EventStream) -> None:
    if event.kind == "problem":
        events.emit(event.kind, **event.fields)


def shares(cache_needs: Needs, ranks: ProcessGroup) -> Iterator[Needs]:
    """Yield this process's share of the entries, then its share of its machine's, then all entries.

    Entries in the cache are skipped, so the later rounds encode only missing ones. In between it waits for
    the other processes, without a collective. A machine without the shared cache encodes all it needs.
    """
    process = ranks.dist_env
    if not ranks.is_single:
        yield cache_needs.share(process.rank, process.count)
        ranks.wait_for_all("encoded")
        yield cache_needs.share(process.local_rank, process.local_count)
        ranks.wait_for_all("encoded here")
    yield cache_needs


def plan_cache(prepared: Prepared, prompts: Sequence[str]) -> Needs:
    """Return every cache entry the run reads; `prompts` belong to its sample images."""
    config, data = prepared.config, prepared.config.data
    if not config.objective.preservation_weight:
        # Without preservation no sample uses the class word, so its texts need no cache entries.
        data = data.model_copy(update={"class_word": None})
    return needs(
        (*prepared.trained, *prepared.held_out, *prepared.dataset.regularisation),
        prompts=(*prompts, config.sampling.negative_prompt),
        facts=prepared.facts,
        texts_as=texts_as(prepared),
        geometry=prepared.facts.geometry_conditioning,
        settings=data,
        seed=config.train.seed,
    )


def _caching_text_encoder(
    prepared: Prepared, dtype: torch.dtype, device: torch.device
) -> TextEncoder:
    """Load the text encoders on their device, or in host memory with layers copied to it one at a time."""
    family = prepared.family
    if not prepared.config.memory.text_encoder_offload:
        encoder = family.load_text_encoder(prepared.facts, dtype=dtype, device=device)
        if word := new_word(prepared.config):
            encoder.learn(word)
        return encoder
    encoder = family.load_text_encoder(prepared.facts, dtype=dtype, device=CPU)
    for network in encoder.networks.values():
        offload(network, device)
    return encoder


def texts_as(prepared: Prepared) -> TextEntries:
    return TextEntries(
        encoder_identity=prepared.facts.parts["text_encoder"].identity,
        text_tokens=prepared.facts.text_tokens,
        precision=prepared.config.memory.text_encoder_precision,
        tokens_only=runs_text_encoders(prepared.config),
        word=new_word(prepared.config),
        emphasis=prepared.config.data.emphasis,
        clip_skip=prepared.facts.clip_skip,
    )


def runs_text_encoders(config: RunConfig) -> bool:
    """Say whether text encoders run in every step, because training changes their outputs."""
    return config.adapter.text_encoder or config.adapter.new_tokens > 0
