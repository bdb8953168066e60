"""From a job to its components: filled caches, networks with their adapter, the dataloader, the optimizer, hooks.

The caches are filled first, by encoders on the devices that the plan chose. Then the networks are loaded, quantised,
given their adapter and streamed as the plan says; the dataloader has the samples with their cache entries and noise
levels.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lora_trainer.cache.cache_plan import Entries, Needs, SeenReference, TextEntries, TextJob, needs
from lora_trainer.cache.encode import fill
from lora_trainer.cache.store import Cache
from lora_trainer.common.event_kinds import Cached
from lora_trainer.common.events import EventStream
from lora_trainer.config.declare import BasePrecision
from lora_trainer.config.inputs import NO_ASSISTANT
from lora_trainer.config.optimizers import SCHEDULE_FREE
from lora_trainer.config.prompt_line import SamplePrompt
from lora_trainer.config.running import RunConfig
from lora_trainer.dataset.caption_rules import new_word
from lora_trainer.dataset.records import Reference
from lora_trainer.dataset.scan import cache_in
from lora_trainer.families.base.facts import Conditioning
from lora_trainer.families.base.layout import DENOISER
from lora_trainer.families.base.noise_levels import levels_of
from lora_trainer.families.base.texts import WEIGHTS, TextEncoder
from lora_trainer.families.files.assistants import local_assistant
from lora_trainer.lora.adapter import Adapter, add_new_tokens, denoiser_layers, inject, layer_shapes
from lora_trainer.lora.lora_hooks import LoraStrength, attach_assistant
from lora_trainer.lora.tensors import DTYPES, AdapterTensors
from lora_trainer.lora_file.base_layers import LayerNames
from lora_trainer.lora_file.read_tensors import open_adapter, read_tensors
from lora_trainer.network.block_swap import Streamed, stream_blocks
from lora_trainer.network.compiling import apply_attention
from lora_trainer.network.gradient_checkpointing import apply_checkpointing
from lora_trainer.network.offload import Offloaded
from lora_trainer.network.out_of_memory import free_memory
from lora_trainer.network.quantize import quantize
from lora_trainer.run.device import CPU, oom_as_error, planned_device
from lora_trainer.run.prepare import Prepared
from lora_trainer.run.run_folder import TrainingJob
from lora_trainer.training.dataloader import TrainingDataLoader
from lora_trainer.training.distributed.process_group import ProcessGroup
from lora_trainer.training.loss import Model
from lora_trainer.training.optimizers import averaged_weights, build_optimizer
from lora_trainer.training.slider import SliderDataLoader


def open_cache(prepared: Prepared, events: EventStream) -> Cache:
    folder = cache_in(prepared.config.data)
    folder.create()
    return Cache(folder=folder, on_problem=events.problem)


def refuse_small_cache(prepared: Prepared, cache_needs: Needs) -> None:
    """Raise MachineError if the disk has no room for the missing cache entries (CAC-05 in docs/reliability.md).

    Missing entries are counted; their size is the planner's, in proportion.
    """
    cache, keys = open_cache(prepared, EventStream()), cache_needs.keys()
    missing = sum(not cache.has(key) for key in keys)
    needed_bytes = prepared.plan.disk_bytes["cache"]
    cache.check_room(needed_bytes, missing_bytes=needed_bytes * missing // len(keys))


def fill_caches(job: TrainingJob, cache: Cache) -> None:
    prepared, cache_needs = job.prepared, job.cache_needs
    devices = tuple(dict.fromkeys((planned_device(prepared), CPU)))
    encoders, events = encoder_arguments(prepared), job.events
    began = time.monotonic()
    results = [
        fill(share, cache, devices=devices, events=events, stop=job.stop, **encoders)
        for share in shares(cache_needs, job.ranks)
    ]
    job.events.emit(
        Cached(
            latents=sum(part["latents"] for part in results),
            texts=sum(part["texts"] for part in results),
            masks=sum(part["masks"] for part in results),
            found=results[-1]["found"],
            seconds=time.monotonic() - began,
        )
    )
    if job.ranks.dist_env.local_rank == 0:  # one process per machine deletes old entries
        cache.prune(cache_needs.keys())


def encoder_arguments(prepared: Prepared) -> dict[str, Any]:
    """Return the arguments of `fill` that say how images and texts are encoded."""
    family, facts, memory = prepared.family, prepared.facts, prepared.config.memory
    dtype = DTYPES[memory.text_encoder_precision]

    def load_text_encoder(device: torch.device) -> TextEncoder:
        # Offloaded: in host memory, with blocks copied to the device one at a time for many texts.
        is_offloaded = memory.text_encoder_offload and device != CPU
        load_device = CPU if is_offloaded else device
        encoder = family.load_text_encoder(facts, dtype=dtype, device=load_device)
        if is_offloaded:
            encoder.together = Offloaded(tuple(encoder.networks.values()), device).together
        if (word := new_word(prepared.config)) and not memory.text_encoder_offload:
            encoder.learn(word)
        return encoder

    return {
        "settings": prepared.config.data,
        "load_image_encoder": lambda place: family.latents.encoder(facts, device=place),
        "load_text_encoder": load_text_encoder,
        "texts_as": texts_as(prepared),
    }


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


def plan_cache(
    prepared: Prepared, prompts: Sequence[str], *, seeing: Iterable[TextJob] = ()
) -> Needs:
    """Return every cache entry the run reads.

    `prompts` belong to its sample images, as does `seeing`: texts that are read with reference images.
    """
    config, data = prepared.config, prepared.config.data
    if not config.objective.preservation_weight:
        # Without preservation no sample uses the class word, so its texts need no cache entries.
        data = data.model_copy(update={"class_word": None})
    return needs(
        (*prepared.trained, *prepared.held_out, *prepared.dataset.regularisation),
        prompts=(*prompts, config.sampling.negative_prompt),
        facts=prepared.facts,
        texts_as=texts_as(prepared),
        geometry=prepared.facts.release.geometry_conditioning,
        settings=data,
        seed=config.train.seed,
        directions=prepared.dataset.directions,
        sizes_px=prepared.inputs.buckets if prepared.dataset.directions else (),
        more_texts=seeing,
    )


def sample_text(prepared: Prepared, text: str, references: Sequence[Reference]) -> TextJob:
    """Return how the prompt, or the negative one, of a sample image with references is encoded."""
    seen = [SeenReference(record=one, placement=one.placements[0]) for one in references]
    return texts_as(prepared).job(text, seen, settings=prepared.config.data)


def sample_texts(prepared: Prepared) -> list[TextJob]:
    """Return how all texts of the run's sample images are encoded."""
    return [
        sample_text(prepared, text, references)
        for prompt, references in zip(
            prepared.drawn_prompts, prepared.sample_references, strict=True
        )
        for text in (prompt.text, negative_of(prompt, prepared))
    ]


def negative_of(prompt: SamplePrompt, prepared: Prepared) -> str:
    """Return the negative prompt of a sample image."""
    own = prompt.negative
    return prepared.config.sampling.negative_prompt if own is None else own


def texts_as(prepared: Prepared) -> TextEntries:
    return TextEntries(
        encoder_identity=prepared.facts.parts["text_encoder"].identity,
        reading=prepared.facts.readings["text_encoder"],
        text_tokens=prepared.facts.text_tokens,
        precision=prepared.config.memory.text_encoder_precision,
        tokens_only=runs_text_encoders(prepared.config),
        word=new_word(prepared.config),
        emphasis=prepared.config.data.emphasis,
        clip_skip=prepared.facts.clip_skip,
        system_prompt=prepared.facts.system_prompt,
        sees=prepared.facts.sees_references,
    )


def runs_text_encoders(config: RunConfig) -> bool:
    """Say whether text encoders run in every step, because training changes their outputs."""
    return config.adapter.text_encoder or config.adapter.new_tokens > 0


@dataclass(frozen=True, kw_only=True)
class Networks:
    """Networks on the device while training: the denoiser, trained text encoders, an assistant."""

    denoiser: nn.Module
    text: TextEncoder | None
    assistant: LoraStrength | None

    @property
    def by_component(self) -> dict[str, nn.Module]:
        """The networks that an adapter may change, by the names of their components."""
        return {DENOISER: self.denoiser, **(self.text.networks if self.text is not None else {})}


def load_networks(prepared: Prepared) -> Networks:
    config, device, family = prepared.config, planned_device(prepared), prepared.family
    precision = DTYPES[config.train.precision]
    # A base that will be streamed is loaded into host memory first: as a whole it might not fit on the device.
    streamed = config.memory.streamed_blocks
    base_precision: BasePrecision = config.memory.base_precision
    quantise = None
    if base_precision in ("int8", "fp8", "nf4"):
        skip = family.traits.quantization_skip
        quantise = partial(quantize, kind=base_precision, device=device, skip=skip)
    denoiser = family.load_denoiser(
        prepared.facts, dtype=precision, device=CPU if streamed else device, quantise=quantise
    )
    if quantise is not None:
        free_memory()  # each layer was there in 16 bits, and parts of it in 32
    apply_attention(denoiser, config.memory.attention)
    if not streamed:
        denoiser.to(device)
    text = None
    if runs_text_encoders(config):
        text = family.load_text_encoder(prepared.facts, dtype=precision, device=device)
        if word := new_word(config):
            text.learn(word)
    assistant = None
    if (source := config.base.assistant) != NO_ASSISTANT:
        file = local_assistant(source)
        assert file is not None, f"{source} was fetched before"
        assistant = attach_assistant(denoiser, adapter_in(file, prepared, None))
    return Networks(denoiser=denoiser, text=text, assistant=assistant)


def with_adapter(prepared: Prepared, networks: Networks, *, is_new: bool) -> Adapter:
    config, family = prepared.config, prepared.family
    text = config.adapter.text_encoder
    inside = networks.by_component if text else {DENOISER: networks.denoiser}
    modules = {
        name: family.lora_targets(
            network, config.adapter.targets if name == DENOISER else "text_encoder"
        )
        for name, network in inside.items()
    }
    modules[DENOISER] = family.without_refiners(modules[DENOISER], refiners=config.adapter.refiners)
    alpha = config.adapter.alpha
    start = None
    if (file := config.train.init_from) is not None and is_new:
        # Layers are named as they are without an adapter.
        names = layer_names(prepared, networks.text)
        with open_adapter(Path(file), names=names, must_be_finite=True) as opened:
            start = dict(opened)
    adapter = inject(
        inside,
        modules=modules,
        settings=config.adapter,
        # OFT has no alpha: its setting stays at auto, and the rank stands in.
        alpha=float(config.adapter.rank if alpha == "auto" else alpha),
        seed=config.train.seed,
        averaged=config.train.ema_decay is not None,
        new_tokens=new_tokens(config, networks.text),
        keep_best=config.output.keep_best,
    )
    if start is not None:
        adapter.load_tensors(start)
    return adapter


def adapter_in(file: Path, prepared: Prepared, text: TextEncoder | None) -> AdapterTensors:
    """Read an adapter that is not trained further, without layers that are not loaded.

    Those of reference images are not where none are read, and files of trainers that edit images have them.
    """
    tensors = read_tensors(file, names=layer_names(prepared, text))
    reads, references = prepared.family.traits.reads, prepared.facts.has_reference_layers
    return {key: module for key, module in tensors.items() if reads(key, references=references)}


def layer_names(prepared: Prepared, text: TextEncoder | None) -> LayerNames:
    """Return all layers of the base for adapter files, those of loaded text encoders by their own names."""
    family, loaded = prepared.family, text.networks if text else {}
    layers: dict[str, Mapping[str, tuple[int, ...]]] = {
        DENOISER: denoiser_layers(family, prepared.facts.release.architecture),
        **family.text.layers,
        **{name: layer_shapes(network) for name, network in loaded.items()},
    }
    return LayerNames(family, layers)


def new_tokens(config: RunConfig, text: TextEncoder | None) -> dict[str, nn.Parameter]:
    """Add vectors of the new word to the text encoders; return them by component, none without a word."""
    word = new_word(config)
    if text is None or word is None:
        return {}
    return add_new_tokens(
        text, word.tokens, start=config.adapter.new_tokens_from, seed=config.train.seed
    )


def arrange(prepared: Prepared, networks: Networks) -> Streamed | None:
    """Apply gradient checkpointing and block streaming, after the adapter is in place; return the streamer."""
    memory = prepared.config.memory
    apply_checkpointing(networks.denoiser, memory.gradient_checkpointing)
    if count := memory.streamed_blocks:
        return stream_blocks(networks.denoiser, count=count, device=planned_device(prepared))
    return None


def build_model(prepared: Prepared, networks: Networks, adapter: Adapter) -> Model:
    text = networks.text
    tokenized = text.tokenize([""]) if text is not None else {}
    names = frozenset(tokenized) | {name + WEIGHTS for name in tokenized}

    def embed(conditioning: Conditioning) -> Conditioning:
        """Turn a batch's texts into conditioning: cached outputs pass, tokens are encoded."""
        if text is None:
            return conditioning
        tokens = {name: value for name, value in conditioning.items() if name in names}
        cached = {name: value for name, value in conditioning.items() if name not in names}
        return {**text.embed(tokens), **cached}

    return Model(
        denoiser=networks.denoiser,
        predict=prepared.family.predict,
        embed=embed,
        prediction=prepared.facts.release.prediction,
        precision=DTYPES[prepared.config.train.precision],
        device=planned_device(prepared),
        masks=adapter.masks,
        batch_group_key=prepared.family.text.batch_group_key,
        without_adapter=adapter.off,
        at_strength=adapter.at,
    )


def build_dataloader(job: TrainingJob, cache: Cache) -> TrainingDataLoader:
    prepared, config = job.prepared, job.prepared.config
    trained, regularisation = (
        [sample for record in records if not record.goes_along for sample in record.sample_ids()]
        for records in (prepared.trained, prepared.dataset.regularisation)
    )
    facts, objective = prepared.facts, config.objective
    return TrainingDataLoader(
        sources={sample: job.cache_needs.sources[sample] for sample in (*trained, *regularisation)},
        empty_text=texts_as(prepared).key(""),
        entries=Entries(cache=cache),
        levels=levels_of(facts, objective),
        prediction=facts.release.prediction,
        shared_conditioning=facts.guidance.conditioning(objective.guidance_scale),
        draws_latents=prepared.family.latents.are_drawn,
        reference_scale=1.0 if facts.references is None else facts.references.scale,
        data=config.data,
        objective=objective,
        batch_size=config.train.batch_size,
        seed=config.train.seed,
        regularisation=regularisation,
        regularisation_per_epoch=prepared.inputs.regularisation_per_epoch,
        dist_env=job.ranks.dist_env,
    )


def build_slider_dataloader(job: TrainingJob, cache: Cache) -> SliderDataLoader:
    """Return what prepares the steps of a slider, whose dataset has directions instead of images."""
    prepared, config = job.prepared, job.prepared.config
    return SliderDataLoader(
        sources=job.cache_needs.directions,
        empty_text=texts_as(prepared).key(""),
        entries=Entries(cache=cache),
        levels=levels_of(prepared.facts, config.objective),
        facts=prepared.facts,
        shared_conditioning=prepared.facts.guidance.conditioning(config.objective.guidance_scale),
        objective=config.objective,
        slider=config.slider,
        batch_size=config.train.batch_size,
        seed=config.train.seed,
        prefetch_steps=config.data.prefetch_steps,
        dist_env=job.ranks.dist_env,
    )


@dataclass(frozen=True, kw_only=True)
class TrainComponents:
    """Networks, adapter and optimizer of a training, the same in every process."""

    networks: Networks
    adapter: Adapter
    model: Model
    optimizer: torch.optim.Optimizer
    parameters: Sequence[nn.Parameter]
    scaler: torch.amp.GradScaler
    streamed: Streamed | None
    from_zero: Sequence[nn.Parameter]
    """Parameters that are zero at the start of a new adapter; empty for one loaded from a file."""
    chosen: Callable[[], AbstractContextManager[None]]
    """Context manager: while it runs, the adapter has the weights to export, sample and validate."""


def build_components(job: TrainingJob, *, is_new: bool) -> TrainComponents:
    """Load the base, add the adapter and build the optimizer; a resume state is loaded afterwards.

    In a run that is new the adapter may begin with a file.
    """
    prepared, config = job.prepared, job.prepared.config
    with oom_as_error(f"loading {prepared.facts.source}", events=job.events):
        networks = load_networks(prepared)
        adapter = with_adapter(prepared, networks, is_new=is_new)
        streamed = arrange(prepared, networks)
        groups = adapter.groups(config.optimizer)
        optimizer = build_optimizer(groups, config.optimizer)
    chosen: Callable[[], AbstractContextManager[None]] = nullcontext
    if config.output.weights == "ema":
        chosen = partial(adapter.swapped, adapter.average)
    if config.optimizer.name == SCHEDULE_FREE:  # its averages are the weights to export
        chosen = partial(averaged_weights, optimizer)
    model = build_model(prepared, networks, adapter)
    parameters = [parameter for group in groups for parameter in group["params"]]
    return TrainComponents(
        networks=networks,
        adapter=adapter,
        model=model,
        optimizer=optimizer,
        parameters=parameters,
        from_zero=[parameter for parameter in parameters if not parameter.any()],
        scaler=torch.amp.GradScaler(model.device.type, enabled=config.train.precision == "fp16"),
        streamed=streamed,
        chosen=chosen,
    )
