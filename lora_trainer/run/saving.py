"""The files that a run leaves of its adapter: states, rolling exports, the best step's, the final one and its scores.

Input: the adapter at a step of a job; output: files with their header. An export is copied while training waits,
and written by any thread while it goes on. The scores of a finished LoRA are size and rank of its updates and the gain
over the base, from the losses that the run has logged. No pass of the model is needed, and memory stays small: one
module at a time, for a plain LoRA only the small products of its factors. `lora-train validate` does the rest.
"""

from __future__ import annotations

import io
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from PIL import Image
from torch import nn

from lora_trainer.checkpoint.states import Copy
from lora_trainer.checkpoint.writer import Export, StateWriter
from lora_trainer.common.errors import LoraTrainError, first_line
from lora_trainer.common.event_kinds import Measured
from lora_trainer.common.events import EventStream
from lora_trainer.common.files import json_bytes, open_regular, user_path, write_atomic
from lora_trainer.common.memo import HashMemo
from lora_trainer.config.config import flatten
from lora_trainer.dataset.buckets import bucket_bounds
from lora_trainer.dataset.records import Dataset, bucket_counts, mean_aspect_error
from lora_trainer.lora.adapter import Adapter, denoiser_layers
from lora_trainer.lora.lora_hooks import change_of, layer_of
from lora_trainer.lora.low_rank import NotLowRank, product, singular
from lora_trainer.lora.tensors import AdapterTensors
from lora_trainer.lora_file.embedding import WORD, embedding_path, write_embedding
from lora_trainer.lora_file.metadata import ExportInfo, SubsetSummary, file_hashes, metadata
from lora_trainer.lora_file.write import (
    best_export_name,
    prune_exports,
    step_export_name,
    write_export,
)
from lora_trainer.network.quantize import weight_on
from lora_trainer.reporting.control import Control
from lora_trainer.reporting.history import read_history
from lora_trainer.reporting.sample_files import SAMPLES, own_samples
from lora_trainer.reporting.score import (
    DEAD_BELOW,
    SANE_UP_TO,
    VALIDATION_FILE,
    WEIGHTS,
    Validation,
    effective_rank,
    gain_part,
    mean_gain,
    rank_part,
    relative_gain,
    weights_part,
)
from lora_trainer.run.build import Networks, TrainComponents
from lora_trainer.run.device import planned_device
from lora_trainer.run.run_folder import BEST_RECORD, TrainingJob
from lora_trainer.training.actions import Progress, SaveAction


def exporter(
    job: TrainingJob, adapter: Adapter, file: Path, progress: Progress, copy: Copy
) -> Callable[[], None]:
    """Copy the adapter's current weights; return a function that writes them to `file`, new tokens beside it.

    It raises as `write_export` and `write_embedding`. It may run in any thread while training goes on, so the
    sample images for the thumbnail are listed now.
    """
    images = own_samples(job.folder / SAMPLES, up_to=progress.step)
    tensors = {
        key: replace(
            module,
            tensors={
                name: copy(f"export.{key}.{name}", tensor)
                for name, tensor in module.tensors.items()
            },
        )
        for key, module in adapter.tensors().items()
    }
    words = {
        name: copy(f"export.new_tokens.{name}", tensor) for name, tensor in adapter.words().items()
    }

    def write() -> None:
        info = _export_info(job, tensors, progress, images)
        if words:  # first, so that a crash leaves no adapter without its new tokens
            architecture, _, _ = info.architecture.rpartition("/")
            header = {
                **{
                    key: text
                    for key, text in metadata(info).items()
                    if key.startswith("modelspec.")
                },
                "modelspec.architecture": f"{architecture}/textual-inversion",
                WORD: info.trigger or "",
                "modelspec.usage_hint": (
                    f"Belongs to {info.title}: load both, and use this word in the prompt."
                ),
            }
            keys = job.prepared.family.text.new_token_keys
            vectors = {keys[name]: values.cpu().numpy() for name, values in words.items()}
            write_embedding(embedding_path(file), vectors, metadata=header)
        write_export(
            file,
            tensors,
            family=job.prepared.family,
            info=info,
            format=job.prepared.config.output.format,
            precision=job.prepared.config.output.precision,
            layers=denoiser_layers(job.prepared.family, job.prepared.facts.release.architecture)
            if job.prepared.config.output.format in job.prepared.family.formats.original
            else {},
        )

    return write


def _export_info(
    job: TrainingJob, tensors: AdapterTensors, progress: Progress, images: Sequence[Path]
) -> ExportInfo:
    prepared = job.prepared
    by_repeats: dict[int, list[str]] = {}
    for record in prepared.trained:
        by_repeats.setdefault(record.repeats, []).append(record.caption)
    name = prepared.dataset.folder.resolve().name
    # The memo of the start of the run: its file has the hash of a base that was read then.
    memo = HashMemo(prepared.cache_root)
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
        prediction=prepared.facts.release.prediction,
        settings=flatten(prepared.config),
        subsets=tuple(
            SubsetSummary(
                folder=name if len(by_repeats) == 1 else f"{repeats}_{name}",
                repeats=repeats,
                captions=tuple(captions),
            )
            for repeats, captions in by_repeats.items()
        ),
        buckets=bucket_counts(prepared.trained),
        step=progress.step,
        images_seen=progress.images,
        started_at_s=job.started_at_s,
        saved_at_s=time.time(),
        trigger=", ".join(prepared.config.data.triggers) or None,
        thumbnail_jpeg=_thumbnail(images[0], job.events) if images else None,
        slider=_slider(prepared.dataset),
        reach=job.reach,
        references=max((len(one.references) for one in prepared.trained), default=0),
        regularisation_per_epoch=prepared.inputs.regularisation_per_epoch,
        zero_terminal_snr=prepared.facts.release.zero_terminal_snr,
        base_hashes=file_hashes(Path(user_path(base)), memo),
        vae_hashes=None if vae is None else file_hashes(Path(user_path(vae)), memo),
        bucket_bounds_px=bucket_bounds(
            prepared.config.data,
            resolution_px=prepared.facts.resolution_px,
            step_px=prepared.facts.bucket_step_px,
        ),
        mean_aspect_error=mean_aspect_error(prepared.trained)
        if prepared.config.data.buckets
        else None,
    )


def _slider(dataset: Dataset) -> tuple[Mapping[str, Any], ...]:
    """Return what a file says of the slider that it is: its words, or how many pairs; nothing for another file."""
    return ({"pairs": dataset.pairs},) if dataset.pairs else tuple(map(asdict, dataset.directions))


def _thumbnail(image: Path, events: EventStream) -> bytes | None:
    """Return a sample image as JPEG of at most 256 px a side; None and an event if it cannot be read.

    Even noise takes less than 64 kB; ComfyUI ignores headers above 8 MiB.
    """
    try:
        with open_regular(image) as file, Image.open(file) as opened:
            small = opened.convert("RGB")
        small.thumbnail((256, 256), Image.Resampling.LANCZOS)
        buffer = io.BytesIO()
        small.save(buffer, format="JPEG", quality=85, optimize=True)
        return buffer.getvalue()
    except OSError as error:
        events.problem(
            f"the exported file has no thumbnail: {image.parent.name}/{image.name} cannot be read "
            f"({error.strerror or type(error).__name__})",
            fix="no action needed: the adapter itself is complete",
            severity="note",
        )
        return None


@dataclass(kw_only=True)
class BestExport:
    """Writes NAME-best.safetensors of the step with the lowest validation loss, once for each new best step.

    The adapter keeps those weights in its state, so the file follows from the resume state alone: a run that was
    killed writes what it would have written. best.json says of which step the file is.
    """

    job: TrainingJob
    adapter: Adapter
    written_step: int = 0

    def prepared(self, progress: Progress, copy: Copy) -> Callable[[], None]:
        """Copy the best weights; return the function that writes them, in any thread, or one that does nothing."""
        best = progress.guard.best
        if not self.adapter.best or best.step in (0, self.written_step):
            return lambda: None
        folder, batch_size = self.job.folder, self.job.prepared.config.train.batch_size
        file = folder / best_export_name(folder.name)
        then = replace(progress, step=best.step, images=best.step * batch_size)
        with self.adapter.swapped(self.adapter.best):
            write_file = exporter(
                self.job, self.adapter, file, then, lambda name, value: copy(f"best.{name}", value)
            )

        def write() -> None:
            write_file()
            record = {
                "step": best.step,
                "from": "the lowest validation loss",
                "file": file.name,
                "marked_at_s": time.time(),
            }
            write_atomic(folder / BEST_RECORD, json_bytes(record))
            self.written_step = best.step

        return write


def save_action(
    job: TrainingJob, writer: StateWriter, parts: TrainComponents, best: BestExport
) -> SaveAction:
    """Return the action that saves resume states, rolling exports and the best step's export."""
    config, folder, control = job.prepared.config, job.folder, Control(job.folder)
    every_epochs = config.output.save_every_epochs

    def export_step(progress: Progress, copy: Copy) -> Export:
        file = folder / step_export_name(folder.name, step=progress.step)
        with parts.chosen():
            write = exporter(job, parts.adapter, file, progress, copy)
        write_best = best.prepared(progress, copy)

        def write_and_prune() -> str:
            write()
            write_best()
            prune_exports(folder, name=folder.name, keep_last=config.output.keep_last)
            return file.name

        return write_and_prune

    def save_requested() -> bool:
        """Say whether the user has put a file `save` into control/, once for each."""
        requested = "save" in control.pending()
        if requested:
            control.done("save")
        return requested

    return SaveAction(
        writer=writer,
        adapter=parts.adapter,
        optimizer=parts.optimizer,
        scaler=parts.scaler,
        export=export_step,
        every_steps=config.output.save_every_steps,
        every_images=None if every_epochs is None else every_epochs * job.prepared.inputs.epoch,
        batch_size=config.train.batch_size,
        save_requested=save_requested,
    )


@dataclass(frozen=True, kw_only=True)
class WeightFigures:
    """By module: |update| / |weight| (infinite where the update is not finite), and effective rank / rank.

    `ranks_used` lacks modules whose update is not a product of thin matrices; `why_not` is the reason.
    """

    relative_norms: Mapping[str, float]
    ranks_used: Mapping[str, float] = field(default_factory=dict)
    why_not: str = ""

    @property
    def finite(self) -> bool:
        return all(map(math.isfinite, self.relative_norms.values()))

    @property
    def dead(self) -> list[str]:
        """Modules whose update is too small to change anything."""
        return [key for key, norm in self.relative_norms.items() if norm < DEAD_BELOW]

    @property
    def exploded(self) -> list[str]:
        """Modules whose update is larger than half their weight, or not finite."""
        return [key for key, norm in self.relative_norms.items() if not norm <= SANE_UP_TO]


@torch.no_grad()
def weight_figures(
    networks: Mapping[str, nn.Module], tensors: AdapterTensors, *, device: torch.device
) -> WeightFigures:
    """Measure every module; raises InputError where the adapter does not fit the networks.

    A weight is measured on `device`: of a streamed base it lies in the machine's memory, where that takes minutes.
    """
    norms: dict[str, float] = {}
    used: dict[str, float] = {}
    why_not = ""
    for key, module in tensors.items():
        layer = layer_of(networks, key, module)
        if not all(bool(tensor.isfinite().all()) for tensor in module.tensors.values()):
            norms[key] = math.inf
            continue
        # In float64, which MPS has not. The norm of a product is that of its singular values.
        on_host = {name: tensor.detach().cpu() for name, tensor in module.tensors.items()}
        try:
            values = singular(product(replace(module, tensors=on_host))).values
            norm = float(torch.linalg.vector_norm(values))
            used[key] = effective_rank(values.tolist()) / len(values)
        except NotLowRank as error:
            norm = float(torch.linalg.vector_norm(change_of(layer, module)))
            why_not = str(error)
        weight = float(torch.linalg.vector_norm(weight_on(layer, device), dtype=torch.float32))
        norms[key] = norm / weight if weight > 0 else (math.inf if norm > 0 else 0.0)
    return WeightFigures(relative_norms=norms, ranks_used=used, why_not=why_not)


def measure_weights(weights: WeightFigures, findings: Validation) -> None:
    """Add the parts that need only the adapter's tensors: weights and rank."""
    norms = list(weights.relative_norms.values())
    findings.parts["weights"] = weights_part(norms)
    findings.figures |= {
        "modules": len(norms),
        "relative_norm": spread(norms) if weights.finite else None,
        "dead": weights.dead,
        "exploded": weights.exploded,
    }
    if weights.ranks_used:
        used = list(weights.ranks_used.values())
        findings.parts["rank"] = rank_part(used)
        findings.figures["rank_used"] = spread(used)
    elif weights.finite:
        findings.left_out["rank"] = weights.why_not


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the minimum, the mean and the maximum."""
    return {"least": min(values), "mean": fmean(values), "most": max(values)}


def validate_at_the_end(
    job: TrainingJob, networks: Networks, adapter: Adapter, file: Path, end: Progress
) -> None:
    """Write the parts that need no pass to validation.json; a failure is an event, never the end of a run."""
    try:
        result = Validation(file=file.name)
        figures = weight_figures(
            networks.by_component, adapter.tensors(), device=planned_device(job.prepared)
        )
        measure_weights(figures, result)
        history = read_history(job.folder)
        base, last = history.base_validation, history.last_validation
        if (
            base
            and last
            and end.step == last.step
            and len(base.by_timestep) == len(last.by_timestep) > 0
        ):
            before, after = ([loss for _, loss in row.by_timestep] for row in (base, last))
            gain = mean_gain(before, after)
            result.parts["gain"] = gain_part(gain)
            result.figures["gain"] = gain
            result.figures["gain_by_timestep"] = [
                [timestep, relative_gain(old, new)]
                for (timestep, old), new in zip(base.by_timestep, after, strict=True)
            ]
        else:
            result.leave_out("the run did not validate the base and the last step alike", "gain")
        if job.reach is not None:
            result.figures["reach"] = [round(share, 3) for share in job.reach]
        missing = WEIGHTS.keys() - result.parts.keys() - result.left_out.keys()
        result.leave_out("needs samples or more losses: lora-train validate RUN DATASET", *missing)
        path = job.folder / VALIDATION_FILE
        write_atomic(path, json_bytes(result.to_json()), durable=False)
    except (LoraTrainError, RuntimeError) as error:
        job.events.problem(
            f"the finished adapter was not measured: {first_line(error)}",
            fix="no action needed: the adapter itself is complete",
            severity="note",
        )
        return
    reach = result.figures.get("reach", ())
    job.events.emit(Measured(step=end.step, parts=result.rounded_parts, reach=reach))
