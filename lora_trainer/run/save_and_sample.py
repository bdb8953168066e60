"""Builds the actions of a training between steps: validation, sample images, saves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial

from lora_trainer.cache.cache_plan import Entries, Needs
from lora_trainer.checkpoint.codec import Copy
from lora_trainer.checkpoint.writer import Export, StateWriter
from lora_trainer.config.config import RunConfig
from lora_trainer.hardware.device_calls import kind_of
from lora_trainer.lora_file.write import prune_exports, step_export_name
from lora_trainer.planning.optimizer_facts import OPTIMIZERS
from lora_trainer.planning.run_time import VALIDATION_QUANTILES
from lora_trainer.reporting.control import Control
from lora_trainer.run.best_export import BestExport
from lora_trainer.run.build import TrainComponents
from lora_trainer.run.caching import encode_prompt, texts_as
from lora_trainer.run.device import DTYPES, encoder_device
from lora_trainer.run.job import TrainingJob, copied, copied_words, exporter
from lora_trainer.run.samples import SampleAction
from lora_trainer.training.actions import FixedLosses, LearningAction, SaveAction, ValidateAction
from lora_trainer.training.dataloader import TrainingDataLoader
from lora_trainer.training.learning_check import LearningContext, look_step
from lora_trainer.training.optimizers import learning_rate
from lora_trainer.training.progress import Progress

LEARNING_PICTURES, LEARNING_QUANTILES = 2, 4


def validate_action(
    job: TrainingJob, cache_needs: Needs, feeder: TrainingDataLoader, parts: TrainComponents
) -> ValidateAction:
    """Return the action that validates on the held-out images; it does nothing without any."""
    held_out = [record.sample_ids()[0] for record in job.prepared.held_out]
    keys = [(sample, cache_needs.sources[sample]) for sample in held_out]
    batches = feeder.validation(keys, quantiles=VALIDATION_QUANTILES) if keys else ()
    return ValidateAction(
        fixed=FixedLosses(batches=batches, model=parts.model, ranks=job.ranks),
        chosen=parts.chosen,
        every_steps=job.prepared.config.train.validate_every_steps,
        events=job.events,
        watch_plateaus=job.prepared.config.train.lower_on_plateau,
        watch_best=_watches_best(job.prepared.config),
        on_best=parts.adapter.keep_as_best if parts.adapter.best else lambda: None,
    )


def learning_action(
    job: TrainingJob, cache_needs: Needs, feeder: TrainingDataLoader, parts: TrainComponents
) -> LearningAction:
    """Return the action that detects a run that learns nothing, from a few of its training images."""
    config = job.prepared.config
    steps, settings = config.train.steps, config.optimizer
    step = None
    if (
        OPTIMIZERS[settings.name].rate is None
    ):  # others find their rate themselves, at an unknown step
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


def _watches_best(config: RunConfig) -> bool:
    return config.output.keep_best or config.train.stop_after_validations is not None


def sample_action(job: TrainingJob, entries: Entries, parts: TrainComponents) -> SampleAction:
    """Return the action that draws sample images with the weights to export."""
    prepared, config = job.prepared, job.prepared.config
    side, key = config.data.resolution, texts_as(prepared).key
    assistant = parts.networks.assistant
    return SampleAction(
        sampler=cache(
            partial(
                prepared.family.build_sampler,
                prepared.facts,
                denoiser=parts.model.denoiser,
                device=parts.model.device,
                decode_on=encoder_device(prepared),
            )
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
        every_steps=config.sampling.every_steps,
        size_px=(side, side),
        folder=job.folder.path / "samples",
        events=job.events,
        asked=Control(job.folder.path).take_samples,
        encode=partial(encode_prompt, job, entries.cache),
        stop=job.stop,
    )


def save_action(
    job: TrainingJob, writer: StateWriter, parts: TrainComponents, best: BestExport
) -> SaveAction:
    """Return the action that saves resume states, rolling exports and the best step's export."""
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
        every_steps=config.output.save_every_steps,
        every_images=None if every_epochs is None else every_epochs * per_epoch,
        batch_size=config.train.batch_size,
        save_requested=_save_requested(job),
    )


def _save_requested(job: TrainingJob) -> Callable[[], bool]:
    """Return a function that is True once for each file `save` that the user puts into control/."""
    control = Control(job.folder.path)

    def save_requested() -> bool:
        if "save" not in control.pending():
            return False
        control.done("save")
        return True

    return save_requested
