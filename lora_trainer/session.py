"""One training in one run folder: caches, model, loop, exports. The order of this file is the order of a run."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lora_trainer.config import Config, concrete
from lora_trainer.data.cache import Cache
from lora_trainer.data.encode import Needs, TextEntries, fill, needs
from lora_trainer.data.loader import Entries, Feeder
from lora_trainer.errors import MachineError
from lora_trainer.events import EventStream, read_jsonl
from lora_trainer.exporting import Job, copied, export, exporter, upload
from lora_trainer.families.base import DENOISER, Conditioning, TextEncoder
from lora_trainer.files import CappedFolder
from lora_trainer.hardware import GIB
from lora_trainer.model.adapters import Adapter, inject, layer_names
from lora_trainer.model.assistant import Assistant, attach
from lora_trainer.model.attention import apply_attention
from lora_trainer.model.checkpointing import apply_checkpointing
from lora_trainer.model.memory_cap import cap_allocator
from lora_trainer.model.offload import offload
from lora_trainer.model.quantize import quantize
from lora_trainer.model.streaming import stream_blocks
from lora_trainer.output.adapter_names import file_names
from lora_trainer.output.adapter_read import read_tensors
from lora_trainer.output.checkpoints import TrainingState
from lora_trainer.output.export import final_export_name, prune_exports, step_export_name
from lora_trainer.output.samples import SampleAction
from lora_trainer.output.state_codec import Copy
from lora_trainer.output.state_writer import Export, StateWriter
from lora_trainer.output.status import Control
from lora_trainer.prepare import Prepared
from lora_trainer.quantization import QUANTIZATIONS, BasePrecision
from lora_trainer.remedies import remedies
from lora_trainer.run_folder import EVENTS_FILE, RunFolder, cut_events
from lora_trainer.train.actions import SaveAction, ValidateAction, load_scaler
from lora_trainer.train.guards import GuardState, from_plain
from lora_trainer.train.levels import Levels, flow_levels, table_levels
from lora_trainer.train.loop import Model, Training, run
from lora_trainer.train.optim import build_optimizer, learning_rate, restore_optimizer
from lora_trainer.train.progress import Progress

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
CPU = torch.device("cpu")
VALIDATION_QUANTILES = 8


def setup_torch(prepared: Prepared) -> dict[str, Any]:
    """Set threads and determinism for the process; return what bit-exactness depends on.

    Raises MachineError when the planned device is not there for this torch.
    """
    config = prepared.config
    torch.set_num_threads(concrete(config.hardware.threads))
    device = _device(prepared)
    if device.type == "cuda":
        _cap(prepared, device)
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
    networks = _load_networks(prepared)
    adapter = _inject(prepared, networks, job.state)
    _arrange(prepared, networks.denoiser)
    model = _model(prepared, networks)
    groups = adapter.groups(config.optimizer)
    optimizer = build_optimizer(groups, config.optimizer)
    scaler = torch.amp.GradScaler(model.device.type, enabled=config.train.precision == "fp16")
    start = _restore(
        job.state, adapter, optimizer, scaler, micro_batch=concrete(config.memory.micro_batch)
    )

    # ---- train
    feeder = _feeder(prepared, wanted, cache)
    writer = StateWriter(folder=job.folder.states, keep=config.output.keep_states, events=events)
    saves = _saves(job, writer, adapter, optimizer, scaler)
    writer.remember(saves.state(start))

    def restore() -> Progress:
        writer.wait()
        state = writer.newest()
        cut_events(job.folder, step=state.step)
        return _restore(state, adapter, optimizer, scaler, micro_batch=start.guard.micro_batch)

    found = remedies(networks.denoiser, config.memory, device=model.device)
    for remedy in found[: start.guard.remedies]:
        remedy.apply()  # what this run found out before it was interrupted
    training = Training(
        model=model,
        parameters=[parameter for group in groups for parameter in group["params"]],
        optimizer=optimizer,
        learning_rate=learning_rate(config.optimizer, steps=concrete(config.train.steps)),
        scaler=scaler,
        feeder=feeder,
        steps=concrete(config.train.steps),
        batch_size=config.train.batch_size,
        micro_batch=concrete(config.memory.micro_batch),
        prefetch_steps=config.data.prefetch_steps,
        max_grad_norm=config.train.max_grad_norm,
        events=events,
        actions=[
            *job.watchers,
            _validation(job, wanted, feeder, model),
            _samples(job, feeder.entries, model, networks, adapter),
            saves,
        ],
        stop=job.stop,
        images_at_once=_latents_at_once(prepared),
        remedies=found,
        restore=restore,
        watch_spikes=config.train.tighten_on_spike,
    )
    events.emit("phase", phase="train", message="training", done=start.step, total=training.steps)
    began = time.monotonic()
    with writer:
        end = run(training, start)

    # ---- export
    file = job.folder.path / final_export_name(job.folder.name)
    events.emit("phase", phase="export", message=file.name, done=0, total=0)
    export(job, adapter, file, end)
    base_loss, last_loss = _validation_losses(job.folder)
    events.emit(
        "finished",
        step=end.step,
        seconds=time.monotonic() - began,
        export=file.name,
        validation_loss=last_loss,
        base_validation_loss=base_loss,
    )
    upload(job, adapter, file)
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


def _cap(prepared: Prepared, device: torch.device) -> None:
    """Bound what the allocator may take to what was asked for, or to what the driver really has."""
    asked_gib, card = prepared.config.hardware.vram_limit_gib, prepared.hardware.gpus[0]
    cap_allocator(
        limit_bytes=None if asked_gib is None else int(asked_gib * GIB),
        free_bytes=card.free_bytes,
        device=device,
    )


def _device(prepared: Prepared) -> torch.device:
    if prepared.config.hardware.device != "cuda":
        return CPU
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
    prepared, config, family = job.prepared, job.prepared.config, job.prepared.family
    texts_as, device = _texts_as(prepared), _device(prepared)
    wanted = needs(
        (*prepared.trained, *prepared.held_out),
        prepared.placements,
        prompts=(*job.prompts, config.sampling.negative_prompt),
        facts=prepared.facts,
        texts_as=texts_as,
        geometry=partial(family.geometry_conditioning, prepared.facts),
        settings=config.data,
        seed=config.train.seed,
    )
    text_dtype = DTYPES[concrete(config.memory.text_encoder_precision)]
    began = time.monotonic()
    done = fill(
        wanted,
        cache,
        settings=config.data,
        load_image_encoder=lambda place: family.load_image_encoder(prepared.facts, device=place),
        load_text_encoder=partial(_caching_text_encoder, prepared, text_dtype),
        devices=tuple(dict.fromkeys((device, CPU))),
        texts_as=texts_as,
        events=job.events,
        stop=job.stop,
    )
    job.events.emit(
        "cached",
        latents=done.latents,
        texts=done.texts,
        found=done.found,
        seconds=time.monotonic() - began,
    )
    cache.prune(wanted.keys())
    return wanted


def _caching_text_encoder(
    prepared: Prepared, dtype: torch.dtype, device: torch.device
) -> TextEncoder:
    """Load the text encoders where they run, or beside it where they are too large to lie there."""
    family = prepared.family
    if not concrete(prepared.config.memory.text_encoder_offload):
        return family.load_text_encoder(prepared.facts, dtype=dtype, device=device)
    encoder = family.load_text_encoder(prepared.facts, dtype=dtype, device=CPU)
    for network in encoder.networks.values():
        offload(network, device)
    return encoder


def _texts_as(prepared: Prepared) -> TextEntries:
    return TextEntries(
        encoder_identity=prepared.facts.parts["text_encoder"].identity,
        max_tokens=prepared.facts.max_tokens,
        precision=concrete(prepared.config.memory.text_encoder_precision),
        tokens_only=prepared.config.adapter.text_encoder,
    )


@dataclass(frozen=True, kw_only=True)
class Networks:
    """What is on the device while training: the denoiser, text encoders trained along, an assistant."""

    denoiser: nn.Module
    text: TextEncoder | None
    assistant: Assistant | None


def _load_networks(prepared: Prepared) -> Networks:
    config, device, family = prepared.config, _device(prepared), prepared.family
    precision = DTYPES[concrete(config.train.precision)]
    # A base that will be smaller on the device than as it is loaded is never whole there.
    streamed = concrete(config.memory.streamed_blocks)
    kept: BasePrecision = concrete(config.memory.base_precision)
    smaller = streamed or kept in QUANTIZATIONS
    place = CPU if smaller else device
    denoiser = family.load_denoiser(prepared.facts, dtype=precision, device=place)
    apply_attention(denoiser, concrete(config.memory.attention))
    if kept in ("int8", "fp8", "nf4"):
        quantize(denoiser, kept, device=device, skip=family.unquantised)
    if not streamed:
        denoiser.to(device)
    text = None
    if config.adapter.text_encoder:
        text = family.load_text_encoder(prepared.facts, dtype=precision, device=device)
    return Networks(denoiser=denoiser, text=text, assistant=_assistant(prepared, denoiser))


def _assistant(prepared: Prepared, denoiser: nn.Module) -> Assistant | None:
    file = prepared.config.base.assistant
    if file is None:
        return None
    names = file_names(prepared.family, {DENOISER: layer_names(denoiser)})
    return attach(denoiser, read_tensors(Path(file).expanduser(), names=names))


def _inject(prepared: Prepared, networks: Networks, state: TrainingState | None) -> Adapter:
    config, family = prepared.config, prepared.family
    inside: dict[str, nn.Module] = {DENOISER: networks.denoiser}
    modules = {DENOISER: family.lora_targets(networks.denoiser, config.adapter.targets)}
    if networks.text is not None:
        inside |= networks.text.networks
        modules |= {
            name: family.text_targets(network) for name, network in networks.text.networks.items()
        }
    adapter = inject(
        inside,
        modules=modules,
        settings=config.adapter,
        alpha=_alpha(config),
        seed=config.train.seed,
        initial=state.adapter if state is not None else None,
    )
    if config.train.init_from is not None and state is None:
        names = file_names(family, modules)
        file = Path(config.train.init_from).expanduser()
        adapter.load_tensors(read_tensors(file, names=names))
    return adapter


def _arrange(prepared: Prepared, denoiser: nn.Module) -> None:
    """Let blocks be recomputed, and streamed; both with their adapters in place."""
    memory = prepared.config.memory
    apply_checkpointing(denoiser, concrete(memory.gradient_checkpointing))
    if count := concrete(memory.streamed_blocks):
        stream_blocks(denoiser, count=count, device=_device(prepared))


def _alpha(config: Config) -> float:
    """Return alpha; OFT has none, which leaves its setting at auto."""
    alpha = config.adapter.alpha
    return float(config.adapter.rank) if alpha == "auto" else alpha


def _latents_at_once(prepared: Prepared) -> dict[tuple[int, int], int]:
    """Return the planned micro-batch by size of the latents, (height, width)."""
    factor = prepared.facts.vae_factor
    return {
        (height_px // factor, width_px // factor): count
        for (width_px, height_px), count in prepared.plan.images_at_once.items()
    }


def _model(prepared: Prepared, networks: Networks) -> Model:
    return Model(
        denoiser=networks.denoiser,
        predict=prepared.family.predict,
        embed=_embedding(networks.text),
        prediction=prepared.facts.prediction,
        precision=DTYPES[concrete(prepared.config.train.precision)],
        device=_device(prepared),
    )


def _embedding(text: TextEncoder | None) -> Callable[[Conditioning], Conditioning]:
    """Return what turns a batch's texts into conditioning: cached outputs as they are, tokens by running."""
    if text is None:
        return lambda conditioning: conditioning
    names = frozenset(text.tokenize([""]))

    def embed(conditioning: Conditioning) -> Conditioning:
        tokens = {name: conditioning[name] for name in names}
        told = {name: value for name, value in conditioning.items() if name not in names}
        return {**text.embed(tokens), **told}

    return embed


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
    restore_optimizer(optimizer, state.optimizer)
    load_scaler(scaler, state.extras)
    guard = from_plain(state.extras["guard"])
    guard = replace(guard, micro_batch=min(micro_batch, guard.micro_batch))
    return Progress(step=state.step, images=state.images_seen, guard=guard)


def _feeder(prepared: Prepared, wanted: Needs, cache: Cache) -> Feeder:
    config = prepared.config
    samples = [sample for record in prepared.trained for sample in record.sample_ids()]
    return Feeder(
        sources={sample: wanted.sources[sample] for sample in samples},
        empty_text=_texts_as(prepared).key(""),
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
    )


def _levels(prepared: Prepared) -> Levels:
    family, facts, settings = prepared.family, prepared.facts, prepared.config.objective
    if facts.prediction != "flow":
        return table_levels(family.alphas_cumprod(facts).tolist(), settings)
    return flow_levels(
        settings,
        base_shift=lambda size: family.flow_shift(facts, width_px=size[0], height_px=size[1]),
    )


def _validation(job: Job, wanted: Needs, feeder: Feeder, model: Model) -> ValidateAction:
    held_out = [record.sample_ids()[0] for record in job.prepared.held_out]
    keys = [(sample, wanted.sources[sample]) for sample in held_out]
    return ValidateAction(
        batches=feeder.validation(keys, quantiles=VALIDATION_QUANTILES) if keys else (),
        model=model,
        every_steps=concrete(job.prepared.config.train.validate_every_steps),
        events=job.events,
        watch_plateaus=job.prepared.config.train.lower_on_plateau,
    )


def _samples(
    job: Job, entries: Entries, model: Model, networks: Networks, adapter: Adapter
) -> SampleAction:
    prepared, config = job.prepared, job.prepared.config
    side, key = concrete(config.data.resolution), _texts_as(prepared).key
    return SampleAction(
        sampler=prepared.family.build_sampler(
            prepared.facts, denoiser=model.denoiser, device=model.device
        ),
        adapter=adapter,
        without=networks.assistant.off if networks.assistant else nullcontext,
        embed=model.embed,
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


def _saves(
    job: Job,
    writer: StateWriter,
    adapter: Adapter,
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler,
) -> SaveAction:
    config = job.prepared.config
    per_epoch = sum(record.repeats for record in job.prepared.trained)
    every_epochs = config.output.save_every_epochs

    def export_step(progress: Progress, copy: Copy) -> Export:
        file = job.folder.path / step_export_name(job.folder.name, step=progress.step)
        write = exporter(job, copied(adapter.tensors(), copy), file, progress)

        def write_and_prune() -> str:
            write()
            prune_exports(job.folder.path, name=job.folder.name, keep_last=config.output.keep_last)
            return file.name

        return write_and_prune

    return SaveAction(
        writer=writer,
        adapter=adapter,
        optimizer=optimizer,
        scaler=scaler,
        export=export_step,
        last_step=concrete(config.train.steps),
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
