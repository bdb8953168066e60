"""What a run writes into its adapter files: the job, its header information, the file itself."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from lora_trainer.cache.cache_plan import Needs
from lora_trainer.checkpoint.codec import Copy
from lora_trainer.checkpoint.states import TrainingState
from lora_trainer.common.events import EventStream
from lora_trainer.config.config import concrete, flatten
from lora_trainer.dataset.run_dataset import bucket_counts
from lora_trainer.families.base import FileFormat
from lora_trainer.lora.adapter import Adapter
from lora_trainer.lora.tensors import AdapterTensors
from lora_trainer.lora_file.embedding import WORD, embedding_path, write_embedding
from lora_trainer.lora_file.write import (
    ExportInfo,
    SubsetSummary,
    contents_of,
    metadata,
    write_export,
)
from lora_trainer.reporting.sample_files import last_samples, thumbnail_jpeg
from lora_trainer.run.hub_upload import push_finished, release_of
from lora_trainer.run.prepare import Prepared
from lora_trainer.run.run_folder import RunFolder
from lora_trainer.training.distributed.process_group import ProcessGroup
from lora_trainer.training.progress import Action, Progress


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """What a training needs besides its plan: where it writes, what it tells, when it should stop.

    `state` is what a resumed run goes on from, None at the start of one; `watchers` are asked between
    steps like any other action; `ranks` are the processes that share the work; `wanted` are the cache
    entries it reads, where these are known already.
    """

    prepared: Prepared
    folder: RunFolder
    prompts: Sequence[str]
    state: TrainingState | None
    events: EventStream
    stop: Callable[[], int | None]
    started_at_s: float
    ranks: ProcessGroup = field(default_factory=ProcessGroup)
    watchers: Sequence[Action] = ()
    wanted: Needs | None = None


def export(job: TrainingJob, adapter: Adapter, file: Path, progress: Progress) -> None:
    """Write the adapter as it is now; raises as `write_export` and `write_embedding`."""
    exporter(job, adapter.tensors(), file, progress, words=adapter.words())()


def exporter(
    job: TrainingJob,
    tensors: AdapterTensors,
    file: Path,
    progress: Progress,
    *,
    words: Mapping[str, Tensor],
) -> Callable[[], None]:
    """Return what writes `tensors` to `file` and `words` beside it; it raises as `export`, in any thread.

    Only the images of now are considered for the thumbnail: training may go on meanwhile.
    """
    images = last_samples(job.folder.path / "samples")

    def write() -> None:
        info = _export_info(job, tensors, progress, images)
        if words:  # first, so that no adapter is there without them
            _write_words(job, words, embedding_path(file), info)
        write_export(
            file,
            tensors,
            family=job.prepared.family,
            info=info,
            format=file_format(job.prepared),
            precision=job.prepared.config.output.precision,
        )

    return write


def _write_words(
    job: TrainingJob, words: Mapping[str, Tensor], file: Path, info: ExportInfo
) -> None:
    keys = job.prepared.family.new_token_keys
    architecture, _, _ = info.architecture.rpartition("/")
    told = {key: value for key, value in metadata(info).items() if key.startswith("modelspec.")} | {
        "modelspec.architecture": f"{architecture}/textual-inversion",
        WORD: info.trigger or "",
    }
    told["modelspec.usage_hint"] = (
        f"Belongs to {info.title}: load both, and name this in the prompt."
    )
    vectors = {keys[component]: values.cpu().numpy() for component, values in words.items()}
    write_embedding(file, vectors, metadata=told)


def copied_words(words: Mapping[str, Tensor], copy: Copy) -> dict[str, Tensor]:
    """Return the vectors as they are now, as `copied` does."""
    return {name: copy(f"export.new_tokens.{name}", tensor) for name, tensor in words.items()}


def copied(tensors: AdapterTensors, copy: Copy) -> AdapterTensors:
    """Return the tensors as they are now, in memory that training does not change."""
    return {
        key: replace(
            module,
            tensors={
                name: copy(f"export.{key}.{name}", tensor)
                for name, tensor in module.tensors.items()
            },
        )
        for key, module in tensors.items()
    }


def upload(job: TrainingJob, adapter: Adapter, file: Path) -> None:
    """Upload a finished file where the settings name a repository; a failure is a problem, not an end."""
    prepared, settings = job.prepared, job.prepared.config.output
    if settings.hub_repo is None:
        return
    release = release_of(
        job.folder.path,
        file=file,
        title=job.folder.name,
        settings=settings,
        trigger=", ".join(prepared.config.data.triggers) or None,
        family=prepared.family,
        facts=prepared.facts,
        format=file_format(prepared),
        contents=contents_of(adapter.tensors()),
    )
    push_finished(release, job.events)


def file_format(prepared: Prepared) -> FileFormat:
    """Return the planned key format of exported files."""
    return concrete(prepared.config.output.format)


def _export_info(
    job: TrainingJob, tensors: AdapterTensors, progress: Progress, images: Sequence[Path]
) -> ExportInfo:
    prepared, output = job.prepared, job.prepared.config.output
    settings: Mapping[str, Any] = flatten(prepared.config)
    by_repeats: dict[int, list[str]] = {}
    for record in prepared.trained:
        by_repeats.setdefault(record.repeats, []).append(record.caption)
    name = prepared.dataset.folder.resolve().name
    widths = Counter((module.rank, module.rank * module.scale) for module in tensors.values())
    ((rank, alpha), _), *_ = widths.most_common(1)
    return ExportInfo(
        title=job.folder.name,
        rank=rank,
        alpha=alpha,
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
        trigger=", ".join(prepared.config.data.triggers) or None,
        description=output.description,
        author=output.author,
        license=output.license,
        thumbnail_jpeg=_thumbnail(images[0], job.events) if images else None,
        regularisation_per_epoch=prepared.regularisation_per_epoch,
        zero_terminal_snr=prepared.facts.zero_terminal_snr,
    )


def _thumbnail(image: Path, events: EventStream) -> bytes | None:
    """Return the thumbnail of a sample; one that cannot be read is a problem, the file goes without."""
    try:
        return thumbnail_jpeg(image)
    except OSError as error:
        events.problem(
            f"the exported file has no thumbnail: {image.parent.name}/{image.name} cannot be read "
            f"({error.strerror or type(error).__name__})",
            fix="nothing to do: the adapter itself is whole",
            severity="note",
        )
        return None
