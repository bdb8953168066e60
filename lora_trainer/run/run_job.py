"""One training in one run folder: caches, model, loop, exports, in the order of this file.

In a training of several processes the first one leads, the others do their share (`follow`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import nn

from lora_trainer.checkpoint.states import TrainingState, freeze, snapshot, state_files, state_of
from lora_trainer.checkpoint.writer import StateWriter
from lora_trainer.common.errors import LoraTrainError, RequestError, TrainingStopped, first_line
from lora_trainer.common.event_kinds import Finished, Phase, Uploaded, Validation
from lora_trainer.common.events import read_events
from lora_trainer.common.files import disk_error
from lora_trainer.common.processes import made_to_stay
from lora_trainer.common.wording import against_base, loss_text
from lora_trainer.config.declare import Checkpointing
from lora_trainer.config.optimizers import row_of
from lora_trainer.config.running import RunConfig
from lora_trainer.dataset.records import ImageRecord
from lora_trainer.families.base.layout import DENOISER
from lora_trainer.lora.adapter import Adapter
from lora_trainer.lora.tensors import split_key
from lora_trainer.lora_file.write import final_export_name
from lora_trainer.network.compiling import CompiledBlocks
from lora_trainer.network.convolutions import Convolutions
from lora_trainer.network.gradient_checkpointing import apply_checkpointing
from lora_trainer.planning.known_convolutions import remember_way, steps_alike
from lora_trainer.planning.plan import compiled_sizes
from lora_trainer.planning.run_time import VALIDATION_QUANTILES
from lora_trainer.reporting.run_record import RUN_FILE
from lora_trainer.run.build import (
    TrainComponents,
    build_components,
    build_dataloader,
    build_slider_dataloader,
    fill_caches,
    open_cache,
)
from lora_trainer.run.device import (
    oom_as_error,
    oom_fallbacks,
    training_gpu,
)
from lora_trainer.run.hub_upload import push
from lora_trainer.run.image_losses import measure_images
from lora_trainer.run.previews import Previews
from lora_trainer.run.run_folder import EVENTS_FILE, STATES, TrainingJob, cut_events
from lora_trainer.run.samples import SampleAction
from lora_trainer.run.saving import BestExport, exporter, save_action, validate_at_the_end
from lora_trainer.training.actions import (
    Action,
    CompareAction,
    FixedLosses,
    LearningAction,
    Progress,
    ValidateAction,
)
from lora_trainer.training.convolution_trial import ConvolutionTrial
from lora_trainer.training.dataloader import Feeder, TrainingDataLoader
from lora_trainer.training.distributed.process_group import ProcessGroup
from lora_trainer.training.guards import (
    BASE_STEP,
    CLEARLY_LOWER,
    GuardState,
    broken_start,
    look_step,
)
from lora_trainer.training.loop import train_steps
from lora_trainer.training.schedules import LearningRate, learning_rate
from lora_trainer.training.slider import SliderDataLoader, reach
from lora_trainer.training.step import OomFallback, Training

LEARNING_PICTURES, LEARNING_QUANTILES = 2, 4
# torch's own checkpointing of whole blocks.
PLAIN: Checkpointing = "full"


def run_job(job: TrainingJob) -> Path:
    """Cache, train, export; return the exported file. Raises LoraTrainError.

    A process that follows does its share of the caches and steps, and writes and shows nothing else.
    """
    prepared, config, events, ranks = job.prepared, job.prepared.config, job.events, job.ranks
    leads = ranks.dist_env.is_main
    # Made before anything is encoded: a schedule that cannot be made is refused at once.
    rate = learning_rate(config.optimizer, steps=config.train.steps)

    # ---- caches: encoders are loaded only if something is missing, and dropped before the denoiser
    cache = open_cache(prepared, events)
    fill_caches(job, cache)

    # ---- model, adapter, optimizer
    events.emit(Phase(phase="load", message=prepared.facts.source, done=0, total=0))
    with made_to_stay():
        parts = build_components(job, is_new=ranks.from_leader(job.state is None))
    micro_batch = config.memory.micro_batch
    start = Progress(step=0, images=0, guard=GuardState(micro_batch=micro_batch))
    writer = StateWriter(folder=job.folder / STATES, keep=config.output.keep_states, events=events)
    best = BestExport(job=job, adapter=parts.adapter)
    saves = save_action(job, writer, parts, best)
    if leads:
        with oom_as_error("preparing the first step", events=events):
            if job.state is not None:
                start = saves.restored(job.state, micro_batch=micro_batch)
            # A state in memory from the start: a rollback may come before the first save.
            writer.remember(saves.state(start))

    def restored(state: TrainingState | None) -> Progress:
        return saves.restored(_shared(ranks, state), micro_batch=micro_batch)

    def restore() -> Progress:
        if not leads:
            return restored(None)
        writer.wait()
        state = writer.last_good()
        cut_events(job.folder, step=state.step)
        return restored(state)

    # ---- train
    feeder: TrainingDataLoader | SliderDataLoader
    if prepared.dataset.directions:
        feeder, looks = build_slider_dataloader(job, cache), list[Action]()
    else:
        feeder = build_dataloader(job, cache)
        looks = list(fixed_loss_actions(job, feeder, parts, rate))
    # All processes start with the leader's weights and optimizer state.
    if not leads:
        start = restored(None)
    elif not ranks.is_single:
        _shared(ranks, saves.state(start))
    # Those that every process runs; the leader's own stand around them.
    actions: list[Action] = [*looks, CompareAction(saves=saves, ranks=ranks)]
    if leads:
        samples = SampleAction(job=job, parts=parts, entries=feeder.entries)
        actions = [*job.watchers, *actions[:-1], samples, actions[-1], saves]
    training = _training(job, parts, feeder, start, rate=rate, actions=actions, restore=restore)
    if leads:
        previews = Previews(job=job, samples=samples)
        samples.seen = previews.seen
        training = replace(training, look_on=previews)
    began = time.monotonic()
    with writer:
        end = train_steps(training, start)
    file = job.folder / final_export_name(job.folder.name)
    if leads:
        if isinstance(feeder, SliderDataLoader):
            job = _with_reach(job, feeder, parts, cap=end.guard.micro_batch)
        _export(job, parts, feeder, best, file, end, began_s=began)
    ranks.end_together()
    return file


def _with_reach(
    job: TrainingJob, feeder: SliderDataLoader, parts: TrainComponents, *, cap: int
) -> TrainingJob:
    """Return the job with the measured reach of its slider; a failure is an event, never the end of a run."""
    if not job.prepared.config.output.measure:
        return job
    try:
        with parts.chosen():
            return replace(job, reach=reach(feeder, parts.model, cap=cap))
    except (LoraTrainError, RuntimeError) as error:
        job.events.problem(
            f"how far the slider goes was not measured: {first_line(error)}",
            fix="no action needed: the adapter itself is complete",
            severity="note",
        )
        return job


def _export(
    job: TrainingJob,
    parts: TrainComponents,
    feeder: TrainingDataLoader | SliderDataLoader,
    best: BestExport,
    file: Path,
    end: Progress,
    *,
    began_s: float,
) -> None:
    """Write the final file, and whatever the settings ask for of a finished training."""
    output, events, best_step = job.prepared.config.output, job.events, end.guard.best
    refuse_worthless(parts.from_zero, end, start=job.prepared.config.train.init_from)
    events.emit(Phase(phase="export", message=file.name, done=0, total=0))
    make_folder_again(job)
    with oom_as_error("exporting", events=events):
        with parts.chosen():
            # Nothing trains any more, so the tensors themselves are written.
            exporter(job, parts.adapter, file, end, lambda _, tensor: tensor)()
        best.prepared(end, snapshot)()
    seconds = time.monotonic() - began_s
    if output.measure:
        with parts.chosen():
            validate_at_the_end(job, parts.networks, parts.adapter, file, end)
        if isinstance(feeder, TrainingDataLoader):  # a slider learns from words, and has no images
            measure_images(job, feeder, parts, end)
    # The first validation loss is the base's; they are read from the whole run with its resumes.
    recorded = read_events(job.folder / EVENTS_FILE)
    losses = [event.loss for event in recorded if isinstance(event, Validation)] or [math.nan]
    early = ""
    if end.step < job.prepared.config.train.steps:
        early = (
            f"the validation loss has not fallen for {best_step.stale} validations; "
            f"it was lowest at step {best_step.step}"
        )
    doubt = doubt_of(end.guard, losses)
    if doubt:
        events.problem(
            doubt,
            fix="train again with a lower optimizer.learning_rate or fewer --steps, or compare the saves of the run",
        )
    events.emit(
        Finished(
            step=end.step,
            early=early,
            doubt=doubt,
            seconds=seconds,
            export=file.name,
            validation_loss=losses[-1],
            base_validation_loss=losses[0],
        )
    )
    if output.hub_repo is not None:
        try:
            address = push(file, repository=output.hub_repo, private=output.hub_private)
        except LoraTrainError as error:  # its fix says how to try again
            events.problem(error.found, fix=error.fix, code="HUB-01")
        else:
            events.emit(Uploaded(address=address, private=output.hub_private))


def doubt_of(guard: GuardState, losses: Sequence[float]) -> str:
    """Return what speaks against the LoRA of a finished run, empty where nothing does.

    `losses` are those of its validations, the base's first; NaN is one that is not a number.
    """
    base, last, found = losses[0], losses[-1], list[str]()
    if math.isfinite(base) and math.isnan(last):
        found.append("the validation loss of the LoRA is not a number")
    elif last > base * (1 + CLEARLY_LOWER):
        compared = f"validation loss {loss_text(last)}, {against_base(last, base)}"
        found.append(f"the LoRA is worse than the base without it by validation: {compared}")
    if guard.rollbacks:
        times = "once" if guard.rollbacks == 1 else f"{guard.rollbacks} times"
        found.append(
            f"training became unstable and went back {times}; "
            f"it ended at {guard.lr_scale:g} of the learning rate"
        )
    return "; ".join(found)


def make_folder_again(job: TrainingJob) -> None:
    """Make the run folder again where somebody removed it: the LoRA is still in memory."""
    if (job.folder / RUN_FILE).is_file():  # a save may have made the folder again
        return
    try:
        job.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(job.folder, error) from error
    job.events.problem(
        f"{job.folder} was removed while the run trained; it was made again for the LoRA, and the samples, "
        "states and records from before are gone",
        fix="nothing: the LoRA is complete",
        code="CKP-03",
    )


def refuse_worthless(
    from_zero: Sequence[nn.Parameter], end: Progress, *, start: str | None
) -> None:
    """Raise the error of a run that has learned nothing: no step counted, or what began at zero is still zero.

    `start` is train.init_from, with which nothing begins at zero.
    """
    if end.step == 0:
        return
    if end.guard.skipped_in_row >= end.step:
        raise broken_start(end.step, file=start)
    if not from_zero or any(bool(each.detach().any()) for each in from_zero):
        return
    raise TrainingStopped(
        f"nothing was learned: after {end.step} steps the adapter is as it began",
        fix="check that the base alone makes usable images, as weights of zeros pass nothing on; if it does, use a "
        "higher optimizer.learning_rate or more --steps; the state is saved",
    )


def _shared(ranks: ProcessGroup, state: TrainingState | None) -> TrainingState:
    """Return the leader's state in every process; the others pass None."""
    if not ranks.is_single:
        files = ranks.from_leader(None if state is None else state_files(freeze(state)))
    return state_of(files) if state is None else state


def _training(
    job: TrainingJob,
    parts: TrainComponents,
    feeder: Feeder,
    start: Progress,
    *,
    rate: LearningRate,
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
    plain, plain_remedies = plain_way(config, parts, sharing=job.ranks.dist_env.local_count)
    # A resumed run applies again what it had to give up before it was interrupted, in the same order,
    # or its first steps would run out of memory (or fail) once more.
    if start.guard.plain:
        for change in plain:
            change.apply()
    for remedy in (plain_remedies if start.guard.plain else fallbacks)[: start.guard.remedies]:
        remedy.apply()
    factor = job.prepared.facts.vae_factor
    images_at_once = {
        (height_px // factor, width_px // factor): count
        for (width_px, height_px), count in job.prepared.plan.images_at_once.items()
    }
    compiled = None  # nor in a run where they failed before
    if config.hardware.compile == "blocks" and not (start.guard.uncompiled or start.guard.plain):
        shapes, any_size = compiled_sizes(
            job.prepared.inputs, config, images_at_once=images_at_once
        )
        compiled = CompiledBlocks(
            parts.networks.denoiser,
            shapes=frozenset(shapes),
            any_size=any_size,
            layouts=job.prepared.facts.layouts,
            kept=config.memory.gradient_checkpointing,
            mode=config.hardware.compile_mode,
        )
    convolutions, trial = _convolutions(job, parts)
    adapter, afterwards = parts.adapter, list[Callable[[int], None]]()
    if (limit := config.optimizer.max_weight_norm) is not None:
        afterwards.append(lambda _: adapter.limit_norms(limit))
    if (decay := config.train.ema_decay) is not None:
        # After the norm limit, so that the average is of the weights that stay.
        afterwards.append(lambda step: adapter.update_average(step, decay=decay))
    return Training(
        settings=config.train,
        model=parts.model,
        parameters=parts.parameters,
        optimizer=parts.optimizer,
        learning_rate=rate,
        scaler=parts.scaler,
        feeder=feeder,
        micro_batch=config.memory.micro_batch,
        events=job.events,
        actions=(*trial, *actions),
        stop=job.stop,
        ranks=job.ranks,
        images_at_once=images_at_once,
        remedies=fallbacks,
        plain=plain,
        plain_remedies=plain_remedies,
        restore=restore,
        stages=stages(config, adapter),
        afterwards=afterwards,
        from_zero=parts.from_zero,
        compiled=compiled,
        convolutions=convolutions,
    )


def _convolutions(
    job: TrainingJob, parts: TrainComponents
) -> tuple[Convolutions | None, Sequence[ConvolutionTrial]]:
    """Return how convolutions are computed, None where it is as always, and the comparison of all ways if it is due.

    A resumed run does not compare again what it, or another run, has found meanwhile.
    """
    prepared, way, trials = (
        job.prepared,
        job.prepared.config.hardware.convolutions,
        list[ConvolutionTrial](),
    )
    if way == "plain":
        return None, trials
    compares = False
    if way == "fastest":
        known = prepared.inputs.fastest_way(prepared.config)
        compares, way = known is None, "plain" if known is None else known.way
    convolutions = Convolutions(parts.networks.denoiser, way)
    if compares and (gpu := training_gpu(prepared)) is not None:
        remember = partial(
            remember_way,
            prepared.cache_root,
            prepared.hardware,
            gpu=gpu,
            family=prepared.family.name,
            alike=steps_alike(prepared.config),
        )
        trials.append(
            ConvolutionTrial(convolutions=convolutions, events=job.events, remember=remember)
        )
    return convolutions, trials


def fixed_loss_actions(
    job: TrainingJob, feeder: TrainingDataLoader, parts: TrainComponents, rate: LearningRate
) -> tuple[ValidateAction, LearningAction]:
    """Return the action that validates on the held-out images, and the one that detects a run that learns nothing.

    The second looks at a few of the training images. Each does nothing without images.
    """
    config = job.prepared.config
    steps, settings = config.train.steps, config.optimizer

    def losses(records: Sequence[ImageRecord], quantiles: int) -> FixedLosses:
        samples = [record.sample_ids()[0] for record in records]
        keys = [(sample, job.cache_needs.sources[sample]) for sample in samples]
        batches = feeder.validation(keys, quantiles=quantiles) if keys else ()
        return FixedLosses(batches=batches, model=parts.model, ranks=job.ranks)

    validate = ValidateAction(
        fixed=losses(job.prepared.held_out, VALIDATION_QUANTILES),
        chosen=parts.chosen,
        every_steps=config.train.validate_every_steps,
        events=job.events,
        patience=config.train.lower_after_validations,
        lower_to=config.train.lower_to,
        watch_best=config.output.keep_best or config.train.stop_after_validations is not None,
        on_best=parts.adapter.keep_as_best if parts.adapter.best else lambda: None,
    )
    step = None
    # Some optimizers find their rate themselves, at an unknown step.
    if row_of(settings.name).rate is None:
        step = look_step(steps=steps, batch_size=config.train.batch_size)
    between = range(BASE_STEP, step or BASE_STEP)
    rate_sums = [sum(map(rate, indexes)) for indexes in (between, range(steps))]
    looked_at = job.prepared.trained[:LEARNING_PICTURES] if step is not None else ()
    learning = LearningAction(
        fixed=losses(looked_at, LEARNING_QUANTILES),
        step=step,
        so_far=rate_sums[0] / rate_sums[1] if rate_sums[1] else 0.0,
        rate=settings.learning_rate,
        alpha_over_rank=parts.adapter.alpha / parts.adapter.rank,
        events=job.events,
    )
    return validate, learning


def plain_way(
    config: RunConfig, parts: TrainComponents, *, sharing: int
) -> tuple[Sequence[OomFallback], Sequence[OomFallback]]:
    """Return the changes that lead to the plain way, and its out-of-memory fallbacks; nothing is applied yet.

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
    return changes, oom_fallbacks(denoiser, planned, device=parts.model.device, sharing=sharing)


def stages(config: RunConfig, adapter: Adapter) -> list[tuple[nn.Parameter, int]]:
    """Return the parameters that are frozen before the end of the run, with the step of each group."""
    steps = config.train.steps
    text = [
        parameter
        for key, layer in adapter.layers.items()
        for parameter in layer.parameters.values()
        if split_key(key)[0] != DENOISER and parameter.requires_grad
    ]
    words = list(adapter.new_tokens.values())
    parts = ((text, config.train.text_encoder_until), (words, config.train.new_tokens_until))
    # At least one step, so that each part trains.
    ends = [(part, max(1, round(until * steps))) for part, until in parts]
    ending = [(parameter, end) for part, end in ends if end < steps for parameter in part]
    if len(ending) == len(adapter.parameters()):
        raise RequestError(
            "nothing is left to train once the text encoders stop, as the denoiser is frozen",
            fix="leave train.text_encoder_until and new_tokens_until out",
        )
    return ending
