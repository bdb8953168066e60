"""One training in one run folder: caches, model, loop, exports. The order of this file is the order of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from lora_trainer.best_export import BestExport
from lora_trainer.caching import fill_caches, open_cache, texts_as
from lora_trainer.config import SCHEDULE_FREE, Config, concrete
from lora_trainer.data.cache import Cache
from lora_trainer.data.encode import Needs
from lora_trainer.data.loader import Feeder
from lora_trainer.data.sources import Entries
from lora_trainer.device import DTYPES, encoder_device
from lora_trainer.errors import RequestError
from lora_trainer.events import read_events
from lora_trainer.exporting import Job, copied, copied_words, export, exporter, upload
from lora_trainer.families.base import DENOISER
from lora_trainer.model.adapters import Adapter
from lora_trainer.model.norm_limit import limit_norms
from lora_trainer.networks import Networks, arrange, build_model, load_networks, with_adapter
from lora_trainer.output.adapter_tensors import split_key
from lora_trainer.output.checkpoints import TrainingState, freeze, state_bytes, state_of
from lora_trainer.output.export import final_export_name, prune_exports, step_export_name
from lora_trainer.output.samples import SampleAction
from lora_trainer.output.state_codec import Copy
from lora_trainer.output.state_writer import Export, StateWriter
from lora_trainer.output.status import Control
from lora_trainer.prepare import Prepared
from lora_trainer.redaction import without_secrets
from lora_trainer.remedies import remedies, told_if_full
from lora_trainer.run_folder import EVENTS_FILE, RunFolder, cut_events
from lora_trainer.train.actions import CompareAction, SaveAction, ValidateAction, load_scaler
from lora_trainer.train.guards import GuardState, from_plain
from lora_trainer.train.levels import Levels, flow_levels, table_levels
from lora_trainer.train.loop import run
from lora_trainer.train.optim import (
    averaged_weights,
    build_optimizer,
    learning_rate,
    restore_optimizer,
)
from lora_trainer.train.progress import Action, Progress
from lora_trainer.train.ranks import Ranks
from lora_trainer.train.stages import Stage, end_step
from lora_trainer.train.training import Model, Training
from lora_trainer.validation.at_the_end import validate_at_the_end

VALIDATION_QUANTILES = 8


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """What is trained and with what: the same in every process."""

    networks: Networks
    adapter: Adapter
    model: Model
    optimizer: torch.optim.Optimizer
    parameters: Sequence[nn.Parameter]
    scaler: torch.amp.GradScaler
    chosen: Callable[[], AbstractContextManager[None]]
    """Puts the weights that are exported, sampled and validated in force while a block runs."""

    def restored(self, state: TrainingState, *, micro_batch: int) -> Progress:
        """Put adapter, optimizer and loss scale where `state` has them; return where that is."""
        self.adapter.load_state(state.adapter)
        restore_optimizer(self.optimizer, state.optimizer)
        load_scaler(self.scaler, state.extras)
        guard = from_plain(state.extras["guard"])
        guard = replace(guard, micro_batch=min(micro_batch, guard.micro_batch))
        return Progress(step=state.step, images=state.images_seen, guard=guard)


def train_job(job: Job) -> Path:
    """Cache, train, export; return the exported file. Raises LoraTrainError."""
    prepared, config, events = job.prepared, job.prepared.config, job.events
    micro_batch = concrete(config.memory.micro_batch)

    # ---- caches: encoders are loaded only if something is missing, and dropped before the denoiser
    cache = open_cache(prepared, events)
    wanted = fill_caches(job, cache)

    # ---- model, adapter, optimizer
    events.emit("phase", phase="load", message=prepared.facts.source, done=0, total=0)
    _share(job.ranks, job.state)
    parts = _parts(job)
    start = Progress(step=0, images=0, guard=GuardState(micro_batch=micro_batch))
    writer = StateWriter(folder=job.folder.states, keep=config.output.keep_states, events=events)
    best = BestExport(job=job, adapter=parts.adapter)
    saves = _saves(job, writer, parts, best)
    with told_if_full("preparing the first step", events=events):
        if job.state is not None:
            start = parts.restored(job.state, micro_batch=micro_batch)
        writer.remember(saves.state(start))

    # ---- train
    feeder = build_feeder(job, wanted, cache)
    _share(job.ranks, writer.newest())

    def restore() -> Progress:
        writer.wait()
        state = writer.newest()
        cut_events(job.folder, step=state.step)
        _share(job.ranks, state)
        return parts.restored(state, micro_batch=start.guard.micro_batch)

    training = _training(
        job,
        parts,
        feeder,
        start,
        actions=[
            *job.watchers,
            _validation(job, wanted, feeder, parts),
            _samples(job, feeder.entries, parts),
            CompareAction(saves=saves, ranks=job.ranks),
            saves,
        ],
        restore=restore,
    )
    events.emit("phase", phase="train", message="training", done=start.step, total=training.steps)
    began = time.monotonic()
    with writer:
        end = run(training, start)

    # ---- export
    file = job.folder.path / final_export_name(job.folder.name)
    events.emit("phase", phase="export", message=file.name, done=0, total=0)
    with told_if_full("exporting", events=events):
        with parts.chosen():
            export(job, parts.adapter, file, end)
        best.prepared(end, lambda _, tensor: tensor.detach().cpu().clone())()
    seconds = time.monotonic() - began
    if config.output.measure:
        with parts.chosen():
            validate_at_the_end(job, parts.networks, parts.adapter, file, end)
    base_loss, last_loss = _validation_losses(job.folder)
    events.emit(
        "finished",
        step=end.step,
        early=_early(end, config),
        seconds=seconds,
        export=file.name,
        validation_loss=last_loss,
        base_validation_loss=base_loss,
    )
    upload(job, parts.adapter, file)
    job.ranks.end_together()
    return file


def _early(end: Progress, config: Config) -> str:
    """Return why a training ended before its last step; empty where it did not."""
    if end.step == concrete(config.train.steps):
        return ""
    best = end.guard.best
    return (
        f"the validation loss has not fallen for {best.stale} validations, "
        f"it was lowest at step {best.step}"
    )


def follow_job(job: Job) -> None:
    """Do this process's share of a training that another one leads: nothing is written but caches."""
    ranks, cache = job.ranks, open_cache(job.prepared, job.events)
    wanted = fill_caches(job, cache)
    parts = _parts(replace(job, state=_shared(ranks)))
    micro_batch = concrete(job.prepared.config.memory.micro_batch)

    def restore() -> Progress:
        state = _shared(ranks)
        assert state is not None
        return parts.restored(state, micro_batch=micro_batch)

    start = restore()
    feeder = build_feeder(job, wanted, cache)
    unwritten = StateWriter(folder=job.folder.states, keep=0, events=job.events)
    actions: list[Action] = [
        _validation(job, wanted, feeder, parts),
        CompareAction(
            saves=_saves(job, unwritten, parts, BestExport(job=job, adapter=parts.adapter)),
            ranks=ranks,
        ),
    ]
    run(_training(job, parts, feeder, start, actions=actions, restore=restore), start)
    ranks.end_together()


def _share(ranks: Ranks, state: TrainingState | None) -> None:
    """Give a state, or that there is none, to all other processes."""
    if not ranks.alone:
        ranks.from_leader(b"" if state is None else state_bytes(freeze(state)))


def _shared(ranks: Ranks) -> TrainingState | None:
    data = ranks.from_leader(None)
    return state_of(data) if data else None


def _parts(job: Job) -> _Parts:
    prepared, config = job.prepared, job.prepared.config
    with told_if_full(f"loading {prepared.facts.source}", events=job.events):
        networks = load_networks(prepared)
        adapter = with_adapter(prepared, networks, job.state)
        arrange(prepared, networks.denoiser)
        groups = adapter.groups(config.optimizer)
        optimizer = build_optimizer(groups, config.optimizer)
    model = build_model(prepared, networks, adapter)
    return _Parts(
        networks=networks,
        adapter=adapter,
        model=model,
        optimizer=optimizer,
        parameters=[parameter for group in groups for parameter in group["params"]],
        scaler=torch.amp.GradScaler(model.device.type, enabled=config.train.precision == "fp16"),
        chosen=_chosen(config, adapter, optimizer),
    )


def _chosen(
    config: Config, adapter: Adapter, optimizer: torch.optim.Optimizer
) -> Callable[[], AbstractContextManager[None]]:
    """Return what puts the weights that a run is for in force; Schedule-Free's are its averages."""
    if config.optimizer.name == SCHEDULE_FREE:
        return partial(averaged_weights, optimizer)
    return adapter.averaged if config.output.weights == "ema" else nullcontext


def _training(
    job: Job,
    parts: _Parts,
    feeder: Feeder,
    start: Progress,
    *,
    actions: Sequence[Action],
    restore: Callable[[], Progress],
) -> Training:
    config = job.prepared.config
    found = remedies(
        parts.networks.denoiser,
        config.memory,
        device=parts.model.device,
        sharing=job.ranks.place.local_count,
    )
    for remedy in found[: start.guard.remedies]:
        remedy.apply()  # what this run found out before it was interrupted
    return Training(
        model=parts.model,
        parameters=parts.parameters,
        optimizer=parts.optimizer,
        learning_rate=learning_rate(config.optimizer, steps=concrete(config.train.steps)),
        scaler=parts.scaler,
        feeder=feeder,
        steps=concrete(config.train.steps),
        batch_size=config.train.batch_size,
        micro_batch=concrete(config.memory.micro_batch),
        prefetch_steps=config.data.prefetch_steps,
        max_grad_norm=config.train.max_grad_norm,
        events=job.events,
        actions=actions,
        stop=job.stop,
        ranks=job.ranks,
        images_at_once=_latents_at_once(job.prepared),
        remedies=found,
        restore=restore,
        watch_spikes=config.train.tighten_on_spike,
        stages=_stages(config, parts.adapter),
        stop_after_validations=config.train.stop_after_validations,
        afterwards=_afterwards(config, parts.adapter),
    )


def _stages(config: Config, adapter: Adapter) -> list[Stage]:
    """Return what stops being trained before the end; what is frozen all along is in none of them."""
    steps = concrete(config.train.steps)
    text = [
        parameter
        for key, layer in adapter.layers.items()
        for parameter in layer.parameters.values()
        if split_key(key)[0] != DENOISER and parameter.requires_grad
    ]
    words = list(adapter.new_tokens.values())
    stages = [
        Stage(parameters=own, end_step=end_step(until, steps=steps))
        for own, until in (
            (text, config.train.text_encoder_until),
            (words, config.train.new_tokens_until),
        )
    ]
    ending = [stage for stage in stages if stage.parameters and stage.end_step < steps]
    if sum(len(stage.parameters) for stage in ending) == len(adapter.parameters()):
        raise RequestError(
            "nothing is left to train once the text encoders stop, as the denoiser is frozen",
            fix="leave train.text_encoder_until and new_tokens_until out",
        )
    return ending


def _afterwards(config: Config, adapter: Adapter) -> list[Callable[[int], None]]:
    """Return what is done to the weights after each optimizer step."""
    found: list[Callable[[int], None]] = []
    limit = config.optimizer.max_weight_norm
    if limit is not None:
        found.append(lambda step: limit_norms(adapter, limit))
    decay = config.train.ema_decay
    if decay is not None:
        found.append(lambda step: adapter.update_average(step, decay=decay))
    return found


def _validation_losses(folder: RunFolder) -> tuple[float | None, float | None]:
    """Return the validation loss of the base and the last one, also those of before a resume."""
    rows = read_events(folder.path / EVENTS_FILE)
    losses = [row["loss"] for row in rows if row["event"] == "validation" and "loss" in row]
    return (losses[0], losses[-1]) if losses else (None, None)


def sample_prompts(prepared: Prepared, *, count: int) -> tuple[str, ...]:
    """Return the prompts of the sample images: the setting, else captions, held-out ones first."""
    config = prepared.config
    if config.sampling.prompts:
        return config.sampling.prompts
    # Prompts stand in reports and images; a caption is trained as it is.
    captions = dict.fromkeys(
        without_secrets(record.caption)
        for record in (*prepared.held_out, *prepared.trained)
        if record.caption
    )
    return tuple(captions)[:count] or ("",)


def _latents_at_once(prepared: Prepared) -> dict[tuple[int, int], int]:
    """Return the planned micro-batch by size of the latents, (height, width)."""
    factor = prepared.facts.vae_factor
    return {
        (height_px // factor, width_px // factor): count
        for (width_px, height_px), count in prepared.plan.images_at_once.items()
    }


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


def _validation(job: Job, wanted: Needs, feeder: Feeder, parts: _Parts) -> ValidateAction:
    held_out = [record.sample_ids()[0] for record in job.prepared.held_out]
    keys = [(sample, wanted.sources[sample]) for sample in held_out]
    return ValidateAction(
        batches=feeder.validation(keys, quantiles=VALIDATION_QUANTILES) if keys else (),
        model=parts.model,
        chosen=parts.chosen,
        every_steps=concrete(job.prepared.config.train.validate_every_steps),
        events=job.events,
        ranks=job.ranks,
        watch_plateaus=job.prepared.config.train.lower_on_plateau,
        watch_best=_watches_best(job.prepared.config),
        on_best=parts.adapter.keep_as_best if parts.adapter.best else lambda: None,
    )


def _watches_best(config: Config) -> bool:
    return config.output.keep_best or config.train.stop_after_validations is not None


def _samples(job: Job, entries: Entries, parts: _Parts) -> SampleAction:
    prepared, config = job.prepared, job.prepared.config
    side, key = concrete(config.data.resolution), texts_as(prepared).key
    assistant = parts.networks.assistant
    return SampleAction(
        sampler=prepared.family.build_sampler(
            prepared.facts,
            denoiser=parts.model.denoiser,
            device=parts.model.device,
            decode_on=encoder_device(prepared),
        ),
        adapter=parts.adapter,
        chosen=parts.chosen,
        without=assistant.off if assistant else nullcontext,
        embed=parts.model.embed,
        precision=DTYPES[config.output.precision],
        entries=entries,
        prompts=[(prompt, key(prompt)) for prompt in job.prompts],
        negative=key(config.sampling.negative_prompt),
        settings=config.sampling,
        every_steps=concrete(config.sampling.every_steps),
        size_px=(side, side),
        folder=job.folder.path / "samples",
        events=job.events,
        asked=_asked(job, "sample"),
        stop=job.stop,
    )


def _saves(job: Job, writer: StateWriter, parts: _Parts, best: BestExport) -> SaveAction:
    config = job.prepared.config
    per_epoch = job.prepared.samples_per_epoch
    every_epochs = config.output.save_every_epochs

    def export_step(progress: Progress, copy: Copy) -> Export:
        file = job.folder.path / step_export_name(job.folder.name, step=progress.step)
        with parts.chosen():
            tensors = copied(parts.adapter.tensors(), copy)
            words = copied_words(parts.adapter.words(), copy)
        write = exporter(job, tensors, file, progress, words=words)
        write_best = best.prepared(progress, copy)

        def write_and_prune() -> str:
            write()
            write_best()
            prune_exports(job.folder.path, name=job.folder.name, keep_last=config.output.keep_last)
            return file.name

        return write_and_prune

    return SaveAction(
        writer=writer,
        adapter=parts.adapter,
        optimizer=parts.optimizer,
        scaler=parts.scaler,
        export=export_step,
        every_steps=concrete(config.output.save_every_steps),
        every_images=None if every_epochs is None else every_epochs * per_epoch,
        batch_size=config.train.batch_size,
        fingerprint=job.prepared.dataset.fingerprint,
        asked=_asked(job, "save"),
    )


def _asked(job: Job, name: str) -> Callable[[], bool]:
    """Return a question that is True once for each file of that name somebody puts into control/."""
    control = Control(job.folder.path)

    def asked() -> bool:
        if name not in control.pending():
            return False
        control.done(name)
        return True

    return asked
