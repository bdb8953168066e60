"""One training in one run folder: caches, model, loop, exports, in the order of this file.

In a training of several processes the first one leads, the others do their share (`follow`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from lora_trainer.cache.cache_plan import Needs
from lora_trainer.cache.store import in_use
from lora_trainer.checkpoint.states import TrainingState, freeze, state_files, state_of
from lora_trainer.checkpoint.writer import StateWriter
from lora_trainer.common.errors import InputError
from lora_trainer.common.events import EventStream, read_events
from lora_trainer.common.processes import made_to_stay
from lora_trainer.config.config import flatten
from lora_trainer.config.declare import Checkpointing
from lora_trainer.config.running import RunConfig
from lora_trainer.hardware.device_calls import kind_of
from lora_trainer.hardware.machine import detect, hardware_from
from lora_trainer.lora_file.write import final_export_name
from lora_trainer.network.gradient_checkpointing import apply_checkpointing
from lora_trainer.planning.optimizer_facts import OPTIMIZERS
from lora_trainer.planning.run_time import VALIDATION_QUANTILES
from lora_trainer.reporting.control import StopFlag, taking_signals
from lora_trainer.run.build import (
    TrainComponents,
    afterwards,
    build_components,
    build_dataloader,
    compiled_blocks,
    stages,
)
from lora_trainer.run.caching import fill_caches, open_cache
from lora_trainer.run.device import pinning, planned_device, setup_torch
from lora_trainer.run.final_scores import validate_at_the_end
from lora_trainer.run.hub_upload import push_finished
from lora_trainer.run.oom_fallbacks import oom_as_error, oom_fallbacks
from lora_trainer.run.prepare import Prepared, Request, prepare_with_base
from lora_trainer.run.run_folder import EVENTS_FILE, RunFolder, TrainingJob, cut_events
from lora_trainer.run.samples import SampleAction
from lora_trainer.run.saving import BestExport, exporter, save_action
from lora_trainer.training.actions import (
    CompareAction,
    FixedLosses,
    LearningAction,
    ValidateAction,
)
from lora_trainer.training.cores import shared_cores
from lora_trainer.training.dataloader import TrainingDataLoader
from lora_trainer.training.distributed.process_group import ProcessGroup
from lora_trainer.training.guards import GuardState, LearningContext, look_step
from lora_trainer.training.loop import report_lag, run
from lora_trainer.training.optimizers import learning_rate
from lora_trainer.training.training import Action, OomFallback, PlainWay, Progress, Training

LEARNING_PICTURES, LEARNING_QUANTILES = 2, 4
PLAIN: Checkpointing = "full"
"""torch's own checkpointing of whole blocks."""


def train_job(job: TrainingJob) -> Path:
    """Cache, train, export; return the exported file. Raises LoraTrainError.

    A process that follows does its share of the caches and steps, and writes and shows nothing else.
    """
    prepared, config, events, ranks = job.prepared, job.prepared.config, job.events, job.ranks
    leads = ranks.dist_env.is_main

    # ---- caches: encoders are loaded only if something is missing, and dropped before the denoiser
    cache = open_cache(prepared, events)
    cache_needs = fill_caches(job, cache)

    # ---- model, adapter, optimizer
    events.emit("phase", phase="load", message=prepared.facts.source, done=0, total=0)
    with made_to_stay():  # a follower keeps no state beyond this; it is None for a new run
        parts = build_components(replace(job, state=_shared(ranks, job.state)))
    micro_batch = config.memory.micro_batch
    start = Progress(step=0, images=0, guard=GuardState(micro_batch=micro_batch))
    writer = StateWriter(folder=job.folder.states, keep=config.output.keep_states, events=events)
    best = BestExport(job=job, adapter=parts.adapter)
    saves = save_action(job, writer, parts, best)
    if leads:
        with oom_as_error("preparing the first step", events=events):
            if job.state is not None:
                start = parts.restored(job.state, micro_batch=micro_batch)
            # A state in memory from the start: a rollback may come before the first save.
            writer.remember(saves.state(start))

    def restored(state: TrainingState | None) -> Progress:
        state = _shared(ranks, state)
        assert state is not None
        return parts.restored(state, micro_batch=micro_batch)

    def restore() -> Progress:
        if not leads:
            return restored(None)
        writer.wait()
        state = writer.newest()
        cut_events(job.folder, step=state.step)
        return restored(state)

    # ---- train
    feeder = build_dataloader(job, cache_needs, cache)
    # All processes start with the leader's weights and optimizer state.
    if not leads:
        start = restored(None)
    elif not ranks.is_single:
        _shared(ranks, writer.newest())
    # Those that every process runs; the leader's own stand around them.
    actions: list[Action] = [
        validate_action(job, cache_needs, feeder, parts),
        learning_action(job, cache_needs, feeder, parts),
        CompareAction(saves=saves, ranks=ranks),
    ]
    if leads:
        samples = SampleAction(job=job, parts=parts, entries=feeder.entries)
        actions = [*job.watchers, *actions[:-1], samples, actions[-1], saves]
    training = _training(job, parts, feeder, start, actions=actions, restore=restore)
    events.emit("phase", phase="train", message="training", done=start.step, total=training.steps)
    began = time.monotonic()
    with writer:
        end = run(training, start)
    file = job.folder.path / final_export_name(job.folder.name)
    if leads:
        _export(job, parts, best, file, end, began_s=began)
    ranks.end_together()
    return file


def _export(
    job: TrainingJob,
    parts: TrainComponents,
    best: BestExport,
    file: Path,
    end: Progress,
    *,
    began_s: float,
) -> None:
    """Write the final file, and whatever the settings ask for of a finished training."""
    output, events = job.prepared.config.output, job.events
    events.emit("phase", phase="export", message=file.name, done=0, total=0)
    with oom_as_error("exporting", events=events):
        with parts.chosen():
            exporter(job, parts.adapter, file, end)()
        # Copied and written at once: the writer's thread has ended.
        best.prepared(end, lambda _, tensor: tensor.detach().cpu().clone())()
    seconds = time.monotonic() - began_s
    if output.measure:
        with parts.chosen():
            validate_at_the_end(job, parts.networks, parts.adapter, file, end)
    _tell_finished(job, end, file, seconds=seconds)
    if output.hub_repo is not None:
        push_finished(file, repository=output.hub_repo, private=output.hub_private, events=events)


def _tell_finished(job: TrainingJob, end: Progress, file: Path, *, seconds: float) -> None:
    """Emit the last event of a training: where it ended and why, and its first and last validation loss."""
    # The first validation loss is the base's; they are read from the whole run with its resumes.
    rows = [
        row for row in read_events(job.folder.path / EVENTS_FILE) if row["event"] == "validation"
    ]
    losses = [row["loss"] for row in rows if "loss" in row] or [None]
    early, best_step = "", end.guard.best
    if end.step != job.prepared.config.train.steps:
        early = (
            f"the validation loss has not fallen for {best_step.stale} validations; "
            f"it was lowest at step {best_step.step}"
        )
    job.events.emit(
        "finished",
        step=end.step,
        early=early,
        seconds=seconds,
        export=file.name,
        validation_loss=losses[-1],
        base_validation_loss=losses[0],
    )


def _shared(ranks: ProcessGroup, state: TrainingState | None) -> TrainingState | None:
    """Return the leader's state, or None, in every process; the others pass None."""
    if ranks.is_single:
        return state
    files = ranks.from_leader(None if state is None else state_files(freeze(state)))
    return state if ranks.dist_env.is_main or files is None else state_of(files)


def _training(
    job: TrainingJob,
    parts: TrainComponents,
    feeder: TrainingDataLoader,
    start: Progress,
    *,
    actions: Sequence[Action],
    restore: Callable[[], Progress],
) -> Training:
    config = job.prepared.config
    fallbacks = oom_fallbacks(
        parts.networks.denoiser,
        config.memory,
        device=parts.model.device,
        sharing=job.ranks.dist_env.local_count,
    )
    plain = plain_way(config, parts, sharing=job.ranks.dist_env.local_count)
    # A resumed run applies again what it had to give up before it was interrupted, in the same order,
    # or its first steps would run out of memory (or fail) once more.
    if start.guard.plain:
        for change in plain.changes:
            change.apply()
    for remedy in (plain.remedies if start.guard.plain else fallbacks)[: start.guard.remedies]:
        remedy.apply()
    images_at_once = _latents_at_once(job.prepared)
    return Training(
        model=parts.model,
        parameters=parts.parameters,
        optimizer=parts.optimizer,
        learning_rate=learning_rate(config.optimizer, steps=config.train.steps),
        scaler=parts.scaler,
        feeder=feeder,
        steps=config.train.steps,
        batch_size=config.train.batch_size,
        micro_batch=config.memory.micro_batch,
        prefetch_steps=config.data.prefetch_steps,
        max_grad_norm=config.train.max_grad_norm,
        events=job.events,
        actions=actions,
        stop=job.stop,
        ranks=job.ranks,
        images_at_once=images_at_once,
        remedies=fallbacks,
        plain=plain,
        restore=restore,
        stages=stages(config, parts.adapter),
        stop_after_validations=config.train.stop_after_validations,
        afterwards=afterwards(config, parts.adapter),
        from_zero=parts.from_zero,
        compiled=compiled_blocks(job, parts, start.guard, images_at_once=images_at_once),
    )


def _latents_at_once(prepared: Prepared) -> dict[tuple[int, int], int]:
    """Return the planned micro-batch by (height, width) of the latents."""
    factor = prepared.facts.vae_factor
    return {
        (height_px // factor, width_px // factor): count
        for (width_px, height_px), count in prepared.plan.images_at_once.items()
    }


def validate_action(
    job: TrainingJob, cache_needs: Needs, feeder: TrainingDataLoader, parts: TrainComponents
) -> ValidateAction:
    """Return the action that validates on the held-out images; it does nothing without any."""
    config = job.prepared.config
    held_out = [record.sample_ids()[0] for record in job.prepared.held_out]
    keys = [(sample, cache_needs.sources[sample]) for sample in held_out]
    batches = feeder.validation(keys, quantiles=VALIDATION_QUANTILES) if keys else ()
    return ValidateAction(
        fixed=FixedLosses(batches=batches, model=parts.model, ranks=job.ranks),
        chosen=parts.chosen,
        every_steps=config.train.validate_every_steps,
        events=job.events,
        watch_plateaus=config.train.lower_on_plateau,
        watch_best=config.output.keep_best or config.train.stop_after_validations is not None,
        on_best=parts.adapter.keep_as_best if parts.adapter.best else lambda: None,
    )


def learning_action(
    job: TrainingJob, cache_needs: Needs, feeder: TrainingDataLoader, parts: TrainComponents
) -> LearningAction:
    """Return the action that detects a run that learns nothing, from a few of its training images."""
    config = job.prepared.config
    steps, settings = config.train.steps, config.optimizer
    step = None
    # Some optimizers find their rate themselves, at an unknown step.
    if OPTIMIZERS[settings.name].rate is None:
        step = look_step(steps=steps, batch_size=config.train.batch_size)
    rates, batches = learning_rate(settings, steps=steps), []
    if step is not None:
        trained = [record.sample_ids()[0] for record in job.prepared.trained]
        keys = [(sample, cache_needs.sources[sample]) for sample in trained[:LEARNING_PICTURES]]
        batches = feeder.validation(keys, quantiles=LEARNING_QUANTILES)
    rate_sums = [sum(rates(index) for index in range(count)) for count in (step or 0, steps)]
    return LearningAction(
        fixed=FixedLosses(batches=batches, model=parts.model, ranks=job.ranks),
        step=step,
        so_far=rate_sums[0] / rate_sums[1] if rate_sums[1] else 0.0,
        about=LearningContext(
            device=kind_of(parts.model.device).name,
            rate=settings.learning_rate,
            rate_sum=rate_sums[0],
            loss_scale=None,
            alpha_over_rank=parts.adapter.alpha / parts.adapter.rank,
        ),
        events=job.events,
    )


def plain_way(config: RunConfig, parts: TrainComponents, *, sharing: int) -> PlainWay:
    """Return the plain way of a training whose networks are as planned; nothing is applied yet.

    It undoes memory and speed features: every change gives the same adapter up to rounding and takes no more
    device memory than planned.
    """
    denoiser, kind = parts.networks.denoiser, config.memory.gradient_checkpointing
    changes = list[OomFallback]()
    if kind != PLAIN:
        recompute = partial(apply_checkpointing, denoiser, PLAIN)
        key = "memory.gradient_checkpointing"
        changes.append(OomFallback(key=key, old=kind, new=PLAIN, apply=recompute))
    if parts.streamed is not None:
        key, apply = "copies of streamed blocks", parts.streamed.copy_when_due
        changes.append(OomFallback(key=key, old="ahead", new="when due", apply=apply))
    planned = config.memory.model_copy(update={"gradient_checkpointing": PLAIN})
    remedies = oom_fallbacks(denoiser, planned, device=parts.model.device, sharing=sharing)
    return PlainWay(changes=changes, remedies=remedies)


# ---- several processes: the first one plans and sends its decisions to the others, as JSON through the
# launcher's store, because no collective is possible yet


def gather(
    ranks: ProcessGroup,
    prepared: Prepared,
    folder: RunFolder,
    events: EventStream,
    *,
    prompts: Sequence[str],
) -> None:
    """Send the leader's decisions to the other processes, and connect to them."""
    if ranks.monitor is None:
        return
    ranks.monitor.timeout_s = prepared.config.hardware.process_timeout_s
    ranks.monitor.record(events)
    orders = {
        "settings": flatten(prepared.config),
        "at_once": prepared.at_once_by_size,
        "sharing": ranks.dist_env.local_count,
        "hardware": asdict(prepared.hardware),
        "fingerprint": prepared.dataset.fingerprint,
        "identities": prepared.identities,
        "prompts": list(prompts),
        "folder": str(folder.path),
    }
    ranks.monitor.give("orders", json.dumps(orders))
    _connect(ranks, prepared)
    if ranks.share_gpus:
        events.problem(
            "several processes compute on one GPU: their gradients are added in host memory",
            fix="nothing; one process for each GPU is faster",
            severity="note",
        )


def follow(request_here: Request, ranks: ProcessGroup) -> Path:
    """Do a share of a training that another process leads: same settings, data and base; writes no files."""
    assert ranks.monitor is not None
    orders = json.loads(ranks.monitor.take("orders"))
    ranks.monitor.timeout_s = float(orders["settings"]["hardware.process_timeout_s"])
    request = Request(
        dataset=request_here.dataset,
        run_settings=orders["settings"],
        run_at_once=orders["at_once"],
        processes=request_here.processes,
        sharing=orders["sharing"],
        fetches=True,
    )
    # GPUs are detected here, as this process may be on another machine than the leader.
    hardware = replace(hardware_from(orders["hardware"]), gpus=detect().gpus)
    prepared = prepare_with_base(request, hardware=hardware)
    same_base = prepared.identities == orders["identities"]
    if not (same_base and prepared.dataset.fingerprint == orders["fingerprint"]):
        part = "dataset" if same_base else "base"
        raise InputError(
            f"process {ranks.dist_env.rank} finds another {part} under the same name than process 0",
            fix="give all machines the same files",
        )
    setup_torch(prepared)
    _connect(ranks, prepared)
    events, folder = EventStream(), Path(orders["folder"])
    events.subscribe(ranks.monitor.tell)
    stop = StopFlag()
    with (
        taking_signals(stop),
        in_use(prepared.cache_root),
        shared_cores(events),
        pinning(prepared, events),
    ):
        return train_job(
            TrainingJob(
                prepared=prepared,
                folder=RunFolder(path=folder),
                prompts=orders["prompts"],
                state=None,
                events=events,
                stop=stop,
                started_at_s=time.time(),
                ranks=ranks,
            )
        )


def _connect(ranks: ProcessGroup, prepared: Prepared) -> None:
    device = planned_device(prepared)
    ranks.connect(device, lag=report_lag(device))
