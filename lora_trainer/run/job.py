"""Writes a run's adapter files, with their header; `TrainingJob` is the run's context."""

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
from lora_trainer.common.memo import HashMemo
from lora_trainer.config.config import flatten
from lora_trainer.dataset.run_dataset import bucket_bounds, bucket_counts, mean_aspect_error
from lora_trainer.families.base import FileFormat
from lora_trainer.lora.adapter import Adapter
from lora_trainer.lora.tensors import AdapterTensors
from lora_trainer.lora_file.embedding import WORD, embedding_path, write_embedding
from lora_trainer.lora_file.metadata import ExportInfo, SubsetSummary, file_hashes, metadata
from lora_trainer.lora_file.write import contents_of, write_export
from lora_trainer.reporting.sample_files import last_samples, thumbnail_jpeg
from lora_trainer.run.hub_upload import push_finished, release_of
from lora_trainer.run.prepare import Prepared
from lora_trainer.run.run_folder import RunFolder
from lora_trainer.training.distributed.process_group import ProcessGroup
from lora_trainer.training.progress import Action, Progress


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """The context of a training beside its plan: run folder, events, stop signal, processes.

    `state` is the resume state, None for a new run; `watchers` are actions that run between steps;
    `ranks` are the processes that share the work; `cache_needs` are the cache entries to read, None to
    compute them.
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
    cache_needs: Needs | None = None


def export(job: TrainingJob, adapter: Adapter, file: Path, progress: Progress) -> None:
    """Write the adapter with its current weights; raises as `write_export` and `write_embedding`."""
    exporter(job, adapter.tensors(), file, progress, words=adapter.words())()


def exporter(
    job: TrainingJob,
    tensors: AdapterTensors,
    file: Path,
    progress: Progress,
    *,
    words: Mapping[str, Tensor],
) -> Callable[[], None]:
    """Return a function that writes `tensors` to `file` and `words` beside it; it raises as `export`.

    It may run in any thread while training goes on, so the sample images for the thumbnail are listed now.
    """
    images = last_samples(job.folder.path / "samples")

    def write() -> None:
        info = _export_info(job, tensors, progress, images)
        if words:  # first, so that a crash leaves no adapter without its new tokens
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
    keys = job.prepared.family.text.new_token_keys
    architecture, _, _ = info.architecture.rpartition("/")
    header = {
        key: value for key, value in metadata(info).items() if key.startswith("modelspec.")
    } | {
        "modelspec.architecture": f"{architecture}/textual-inversion",
        WORD: info.trigger or "",
    }
    header["modelspec.usage_hint"] = (
        f"Belongs to {info.title}: load both, and use this word in the prompt."
    )
    vectors = {keys[component]: values.cpu().numpy() for component, values in words.items()}
    write_embedding(file, vectors, metadata=header)


def copied_words(words: Mapping[str, Tensor], copy: Copy) -> dict[str, Tensor]:
    """Return copies of the new tokens' vectors, as `copied` does for the adapter."""
    return {name: copy(f"export.new_tokens.{name}", tensor) for name, tensor in words.items()}


def copied(tensors: AdapterTensors, copy: Copy) -> AdapterTensors:
    """Return copies of the tensors in memory that training does not change."""
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
    """Upload a finished file if the settings name a repository; a failure is an event, not an error."""
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
    return prepared.config.output.format


def _export_info(
    job: TrainingJob, tensors: AdapterTensors, progress: Progress, images: Sequence[Path]
) -> ExportInfo:
    prepared, output = job.prepared, job.prepared.config.output
    settings: Mapping[str, Any] = flatten(prepared.config)
    by_repeats: dict[int, list[str]] = {}
    for record in prepared.trained:
        by_repeats.setdefault(record.repeats, []).append(record.caption)
    name = prepared.dataset.folder.resolve().name
    # The memo of the start of the run: its file has the hash of a base that was read then.
    memo = HashMemo.load(prepared.cache_root)
    base, vae = prepared.config.base.model, prepared.config.base.vae
    widths = Counter((module.rank, module.rank * module.scale) for module in tensors.values())
    # Layers may differ in rank and alpha; the header has room for one pair, so the most common one.
    ((rank, alpha), _), *_ = widths.most_common(1)
    return ExportInfo(
        title=job.folder.name,
        rank=rank,
        alpha=alpha,
        base_name=Path(prepared.facts.source).name,
        base_identity=prepared.facts.parts["denoiser"].identity,
        base_model_version=prepared.family.adapter_names(prepared.facts).kohya,
        architecture=prepared.family.adapter_names(prepared.facts).modelspec,
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
        base_hashes=file_hashes(Path(base).expanduser(), memo),
        vae_hashes=None if vae is None else file_hashes(Path(vae).expanduser(), memo),
        bucket_bounds_px=bucket_bounds(prepared.config, prepared.facts),
        mean_aspect_error=mean_aspect_error(prepared.trained, prepared.placements)
        if prepared.config.data.buckets
        else None,
    )


def _thumbnail(image: Path, events: EventStream) -> bytes | None:
    """Return the thumbnail of a sample image; None and an event if the image cannot be read."""
    try:
        return thumbnail_jpeg(image)
    except OSError as error:
        events.problem(
            f"the exported file has no thumbnail: {image.parent.name}/{image.name} cannot be read "
            f"({error.strerror or type(error).__name__})",
            fix="no action needed: the adapter itself is complete",
            severity="note",
        )
        return None
