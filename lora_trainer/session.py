"""One training in one run folder: caches, model, loop, exports. The order of this file is the order of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lora_trainer.config import concrete, flatten
from lora_trainer.data.cache import Cache
from lora_trainer.data.encode import Needs, fill, needs, prompt_key
from lora_trainer.data.loader import Entries, Feeder
from lora_trainer.errors import MachineError
from lora_trainer.events import EventStream, read_jsonl
from lora_trainer.files import CappedFolder
from lora_trainer.hardware import GIB
from lora_trainer.model.adapters import Adapter, inject
from lora_trainer.model.attention import apply_attention
from lora_trainer.output.checkpoints import TrainingState
from lora_trainer.output.export import (
    ExportInfo,
    SubsetSummary,
    final_export_name,
    prune_exports,
    step_export_name,
    write_export,
)
from lora_trainer.output.samples import SampleAction
from lora_trainer.output.status import Control
from lora_trainer.prepare import Prepared, bucket_counts
from lora_trainer.run_folder import EVENTS_FILE, RunFolder
from lora_trainer.train.actions import SaveAction, ValidateAction, load_scaler
from lora_trainer.train.guards import GuardState
from lora_trainer.train.loop import Model, Training, run
from lora_trainer.train.optim import build_optimizer, learning_rate
from lora_trainer.train.progress import Progress

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
VALIDATION_QUANTILES = 8


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


def setup_torch(prepared: Prepared) -> dict[str, Any]:
    """Set threads and determinism for the process; return what bit-exactness depends on.

    Raises MachineError when the planned device is not there for this torch.
    """
    config = prepared.config
    torch.set_num_threads(concrete(config.hardware.threads))
    device = _device(prepared)
    if config.train.deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name()
        if device.type == "cuda"
        else prepared.hardware.cpu_name,
        "deterministic": device.type == "cpu" or config.train.deterministic,
    }


def train_job(job: Job) -> Path:
    """Cache, train, export; return the exported file. Raises LoraTrainError."""
    prepared, config, events = job.prepared, job.prepared.config, job.events

    # ---- caches: encoders are loaded only if something is missing, and dropped before the denoiser
    cache = _cache(prepared, events)
    wanted = _fill_caches(job, cache)

    # ---- model, adapter, optimizer
    events.emit("phase", phase="load", message=prepared.facts.source, done=0, total=0)
    model = _load_model(prepared)
    adapter = inject(
        model.denoiser,
        modules=prepared.family.lora_targets(model.denoiser, config.adapter.targets),
        rank=config.adapter.rank,
        alpha=concrete(config.adapter.alpha),
        seed=config.train.seed,
    )
    optimizer = build_optimizer(adapter.parameters(), config.optimizer)
    scaler = torch.amp.GradScaler(model.device.type, enabled=config.train.precision == "fp16")
    start = _restore(
        job.state, adapter, optimizer, scaler, micro_batch=concrete(config.memory.micro_batch)
    )

    # ---- train
    feeder = _feeder(prepared, wanted, cache)
    training = Training(
        model=model,
        parameters=adapter.parameters(),
        optimizer=optimizer,
        learning_rate=learning_rate(config.optimizer, steps=concrete(config.train.steps)),
        scaler=scaler,
        feeder=feeder,
        steps=concrete(config.train.steps),
        batch_size=config.train.batch_size,
        prefetch_steps=config.data.prefetch_steps,
        max_grad_norm=config.train.max_grad_norm,
        events=events,
        actions=[
            _validation(job, wanted, feeder, model),
            _samples(job, feeder.entries, model, adapter),
            _saves(job, adapter, optimizer, scaler),
        ],
        stop=job.stop,
    )
    events.emit("phase", phase="train", message="training", done=start.step, total=training.steps)
    began = time.monotonic()
    end = run(training, start)

    # ---- export
    file = job.folder.path / final_export_name(job.folder.name)
    events.emit("phase", phase="export", message=file.name, done=0, total=0)
    _export(job, adapter, file, end)
    base_loss, last_loss = _validation_losses(job.folder)
    events.emit(
        "finished",
        step=end.step,
        seconds=time.monotonic() - began,
        export=file.name,
        validation_loss=last_loss,
        base_validation_loss=base_loss,
    )
    return file


def _validation_losses(folder: RunFolder) -> tuple[float | None, float | None]:
    """Return the validation loss of the base and the last one, also those of before a resume."""
    rows = [row for row in read_jsonl(folder.path / EVENTS_FILE) if row["event"] == "validation"]
    return (rows[0]["loss"], rows[-1]["loss"]) if rows else (None, None)


def sample_prompts(prepared: Prepared, *, count: int) -> tuple[str, ...]:
    """Return the prompts of the sample images: the setting, else captions, held-out ones first."""
    config = prepared.config
    if config.sampling.prompts:
        return config.sampling.prompts
    captions = dict.fromkeys(
        record.caption for record in (*prepared.held_out, *prepared.trained) if record.caption
    )
    return tuple(captions)[:count] or ("",)


def _device(prepared: Prepared) -> torch.device:
    if prepared.config.hardware.device != "cuda":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise MachineError(
            f"the machine has {prepared.hardware.gpus[0].name} but torch {torch.__version__} cannot use it",
            fix="install the CUDA build of torch, or use --set hardware.device=cpu",
        )
    return torch.device("cuda")


def _cache(prepared: Prepared, events: EventStream) -> Cache:
    folder = CappedFolder(
        root=prepared.cache_root, limit_bytes=int(prepared.config.data.cache_max_gib * GIB)
    )
    folder.create()
    return Cache(folder=folder, on_problem=events.problem)


def _fill_caches(job: Job, cache: Cache) -> Needs:
    prepared, config = job.prepared, job.prepared.config
    wanted = needs(
        (*prepared.trained, *prepared.held_out),
        prepared.placements,
        prompts=(*job.prompts, config.sampling.negative_prompt),
        facts=prepared.facts,
        settings=config.data,
        seed=config.train.seed,
    )
    done = fill(
        wanted,
        cache,
        settings=config.data,
        load_encoders=partial(
            prepared.family.load_encoders, prepared.facts, device=_device(prepared)
        ),
        max_tokens=prepared.facts.max_tokens,
        events=job.events,
    )
    job.events.emit("cached", latents=done.latents, texts=done.texts, found=done.found)
    cache.prune(wanted.keys())
    return wanted


def _load_model(prepared: Prepared) -> Model:
    config, device = prepared.config, _device(prepared)
    precision = DTYPES[concrete(config.train.precision)]
    denoiser = prepared.family.load_denoiser(prepared.facts, dtype=precision, device=device)
    apply_attention(denoiser, concrete(config.memory.attention))
    if concrete(config.memory.gradient_checkpointing):
        denoiser.enable_gradient_checkpointing()  # type: ignore[operator]
    return Model(
        denoiser=denoiser,
        predict=prepared.family.predict,
        prediction=prepared.facts.prediction,
        precision=precision,
        device=device,
    )


def _restore(
    state: TrainingState | None,
    adapter: Adapter,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
    *,
    micro_batch: int,
) -> Progress:
    if state is None:
        return Progress(step=0, images=0, guard=GuardState(micro_batch=micro_batch))
    adapter.load_state(state.adapter)
    optimizer.load_state_dict(dict(state.optimizer))
    load_scaler(scaler, state.extras)
    guard = GuardState(
        micro_batch=min(micro_batch, state.extras["micro_batch"]),
        skipped=state.extras["skipped"],
        skipped_in_row=state.extras["skipped_in_row"],
    )
    return Progress(step=state.step, images=state.images_seen, guard=guard)


def _feeder(prepared: Prepared, wanted: Needs, cache: Cache) -> Feeder:
    config = prepared.config
    samples = [sample for record in prepared.trained for sample in record.sample_ids()]
    return Feeder(
        sources={sample: wanted.sources[sample] for sample in samples},
        empty_text=prompt_key("", prepared.facts),
        entries=Entries(cache=cache),
        signal=prepared.family.alphas_cumprod(prepared.facts),
        prediction=prepared.facts.prediction,
        data=config.data,
        objective=config.objective,
        batch_size=config.train.batch_size,
        seed=config.train.seed,
    )


def _validation(job: Job, wanted: Needs, feeder: Feeder, model: Model) -> ValidateAction:
    held_out = [(record.sample_ids()[0], wanted) for record in job.prepared.held_out]
    last = len(feeder.signal)
    timesteps = [int((k + 0.5) / VALIDATION_QUANTILES * last) for k in range(VALIDATION_QUANTILES)]
    keys = [(sample, source.sources[sample]) for sample, source in held_out]
    return ValidateAction(
        batches=feeder.validation(keys, timesteps) if keys else (),
        model=model,
        every_steps=concrete(job.prepared.config.train.validate_every_steps),
        events=job.events,
    )


def _samples(job: Job, entries: Entries, model: Model, adapter: Adapter) -> SampleAction:
    prepared, config = job.prepared, job.prepared.config
    side = concrete(config.data.resolution)
    return SampleAction(
        sampler=prepared.family.build_sampler(
            prepared.facts, denoiser=model.denoiser, device=model.device
        ),
        adapter=adapter,
        precision=DTYPES[config.output.precision],
        entries=entries,
        prompts=[(prompt, prompt_key(prompt, prepared.facts)) for prompt in job.prompts],
        negative=prompt_key(config.sampling.negative_prompt, prepared.facts),
        settings=config.sampling,
        every_steps=concrete(config.sampling.every_steps),
        size_px=(side, side),
        folder=job.folder.path / "samples",
        events=job.events,
        asked=_asked(job, "sample"),
    )


def _saves(
    job: Job, adapter: Adapter, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler
) -> SaveAction:
    config = job.prepared.config
    per_epoch = sum(record.repeats for record in job.prepared.trained)
    every_epochs = config.output.save_every_epochs

    def export(progress: Progress) -> str:
        file = job.folder.path / step_export_name(job.folder.name, step=progress.step)
        _export(job, adapter, file, progress)
        prune_exports(job.folder.path, name=job.folder.name, keep_last=config.output.keep_last)
        return file.name

    return SaveAction(
        folder=job.folder.states,
        adapter=adapter,
        optimizer=optimizer,
        scaler=scaler,
        export=export,
        last_step=concrete(config.train.steps),
        every_steps=concrete(config.output.save_every_steps),
        every_images=None if every_epochs is None else every_epochs * per_epoch,
        batch_size=config.train.batch_size,
        keep_states=config.output.keep_states,
        fingerprint=job.prepared.dataset.fingerprint,
        events=job.events,
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


def _export(job: Job, adapter: Adapter, file: Path, progress: Progress) -> None:
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
        base_model_version=prepared.family.base_model_version,
        architecture=prepared.family.modelspec_architecture,
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
