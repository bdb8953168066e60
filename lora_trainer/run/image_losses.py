"""What the finished LoRA has learned of each image: its loss beside the base's, and beside another image's caption.

Input: a training that has ended, with the weights that were written. Output: the event `image_losses`, from which
reporting/coach.py tells which images and captions were not learned. All losses of an image have the same noise.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from lora_trainer.cache.cache_plan import SampleSource
from lora_trainer.common.errors import first_line
from lora_trainer.common.event_kinds import ImageLoss, ImageLosses, Phase
from lora_trainer.dataset.records import ImageRecord
from lora_trainer.planning.run_time import image_loss_extent
from lora_trainer.run.build import TrainComponents
from lora_trainer.run.run_folder import TrainingJob
from lora_trainer.training.actions import Progress
from lora_trainer.training.dataloader import TrainingDataLoader, split

# Fewer images have no peers to be compared with.
FEWEST_IMAGES = 4


def measure_images(
    job: TrainingJob, feeder: TrainingDataLoader, parts: TrainComponents, end: Progress
) -> None:
    """Emit the losses of the images; a failure is a problem of the run, never its end."""
    prepared = job.prepared
    count = len(prepared.trained) + len(prepared.held_out)
    most, quantiles = image_loss_extent(prepared.config, count)
    records = chosen_images(prepared.trained, prepared.held_out, most=most)
    if len(records) < FEWEST_IMAGES:
        return
    events, began_s = job.events, time.monotonic()
    events.emit(Phase(phase="export", message="what was learned of each image", done=0, total=0))
    try:
        with parts.chosen():
            found = _losses(
                job, feeder, parts, records, quantiles=quantiles, cap=end.guard.micro_batch
            )
    except RuntimeError as error:
        events.problem(
            f"what was learned of each image was not measured: {first_line(error)}",
            fix="no action needed: the LoRA itself is complete",
            severity="note",
        )
        return
    events.emit(
        ImageLosses(
            step=end.step,
            seconds=time.monotonic() - began_s,
            levels=quantiles,
            images=found,
        )
    )


def chosen_images(
    trained: Sequence[ImageRecord], held_out: Sequence[ImageRecord], *, most: int
) -> list[ImageRecord]:
    """Return the images to measure by name: all of them, of many an even choice with all that are held out."""
    held_out = sorted(held_out, key=lambda record: record.name)[:most]
    room = most - len(held_out)
    ordered = sorted(trained, key=lambda record: record.name)
    stride = max(1, -(-len(ordered) // room)) if room else len(ordered) + 1
    return sorted((*held_out, *ordered[::stride]), key=lambda record: record.name)


def _losses(
    job: TrainingJob,
    feeder: TrainingDataLoader,
    parts: TrainComponents,
    records: Sequence[ImageRecord],
    *,
    quantiles: int,
    cap: int,
) -> list[ImageLoss]:
    ids = [record.sample_ids()[0] for record in records]
    sources = [job.cache_needs.sources[sample] for sample in ids]
    own = list(zip(ids, sources, strict=True))
    swapped = list(zip(ids, _with_other_captions(records, sources), strict=True))

    @torch.no_grad()
    def losses(keys: Sequence[tuple[str, SampleSource]]) -> list[float]:
        """Return the mean loss of each image over the timesteps."""
        batches = feeder.validation(keys, quantiles=quantiles)
        sums = dict.fromkeys(ids, 0.0)
        for batch in batches:
            for passed in split(batch, cap=cap, group_key=parts.model.batch_group_key):
                found = parts.model.losses(passed).tolist()
                for sample, loss in zip(passed, found, strict=True):
                    sums[sample.sample] += loss / len(batches)
        return [sums[sample] for sample in ids]

    with parts.adapter.off():
        base = losses(own)
    adapted, elsewhere = losses(own), losses(swapped)
    held_out = {record.name for record in job.prepared.held_out}
    return [
        ImageLoss(
            image=record.name,
            held_out=record.name in held_out,
            base=before,
            lora=after,
            other_caption=other,
        )
        for record, before, after, other in zip(records, base, adapted, elsewhere, strict=True)
    ]


def _with_other_captions(
    records: Sequence[ImageRecord], sources: Sequence[SampleSource]
) -> list[SampleSource]:
    """Return each source with the caption of the next image that has another one, its own where all are alike.

    A text that was read with references has a place for each: it fits images with as many.
    """
    count, changed = len(sources), []
    for at, (record, source) in enumerate(zip(records, sources, strict=True)):
        places = ((at + step) % count for step in range(1, count))
        others = (
            place
            for place in places
            if records[place].caption != record.caption
            and _seen_count(sources[place]) == _seen_count(source)
        )
        other = sources[next(others, at)]
        # Where the text encoders see the references, the other text is the one that is read with its own references.
        # The first view alone is measured, and a folder without mirrored images has no other.
        view = replace(source.views[0], seeing=other.views[0].seeing)
        changed.append(replace(source, texts=other.texts, views=(view, *source.views[1:])))
    return changed


def _seen_count(source: SampleSource) -> int:
    """Return how many references a sample's texts are read with."""
    return 0 if source.views[0].seeing is None else len(source.references_px)
