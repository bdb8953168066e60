"""What a run writes into its adapter files: the job, its header information, the file itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_trainer.config import flatten
from lora_trainer.events import EventStream
from lora_trainer.model.adapters import Adapter
from lora_trainer.output.checkpoints import TrainingState
from lora_trainer.output.export import ExportInfo, SubsetSummary, write_export
from lora_trainer.prepare import Prepared, bucket_counts
from lora_trainer.run_folder import RunFolder
from lora_trainer.train.progress import Progress


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a training needs besides its plan: where it writes, what it tells, when it should stop.

    `state` is what a resumed run goes on from, None at the start of one.
    """

    prepared: Prepared
    folder: RunFolder
    prompts: Sequence[str]
    state: TrainingState | None
    events: EventStream
    stop: Callable[[], int | None]
    started_at_s: float


def export(job: Job, adapter: Adapter, file: Path, progress: Progress) -> None:
    config = job.prepared.config
    write_export(
        file,
        adapter.tensors(),
        family=job.prepared.family,
        info=_export_info(job, adapter, progress),
        format=config.output.format,
        precision=config.output.precision,
    )


def _export_info(job: Job, adapter: Adapter, progress: Progress) -> ExportInfo:
    prepared = job.prepared
    settings: Mapping[str, Any] = flatten(prepared.config)
    by_repeats: dict[int, list[str]] = {}
    for record in prepared.trained:
        by_repeats.setdefault(record.repeats, []).append(record.caption)
    name = prepared.dataset.folder.resolve().name
    return ExportInfo(
        title=job.folder.name,
        rank=adapter.rank,
        alpha=adapter.alpha,
        base_name=Path(prepared.facts.source).name,
        base_identity=prepared.facts.parts["denoiser"].identity,
        base_model_version=prepared.family.base_model_version(prepared.facts),
        architecture=prepared.family.modelspec_architecture(prepared.facts),
        prediction=prepared.facts.prediction,
        settings=settings,
        subsets=tuple(
            SubsetSummary(
                folder=name if len(by_repeats) == 1 else f"{repeats}_{name}",
                repeats=repeats,
                captions=tuple(captions),
            )
            for repeats, captions in by_repeats.items()
        ),
        buckets=bucket_counts(prepared.trained, prepared.placements),
        step=progress.step,
        images_seen=progress.images,
        started_at_s=job.started_at_s,
        saved_at_s=time.time(),
        trigger=prepared.config.data.trigger,
    )
