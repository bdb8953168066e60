"""The components of a training: networks with their adapter, the dataloader, the optimizer, hooks beside the steps.

Input is a job whose caches are filled. The networks are loaded, quantised, given their adapter and streamed as the
plan says; the dataloader has the samples with their cache entries and noise levels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from lora_trainer.cache.cache_plan import Entries, Needs
from lora_trainer.cache.store import Cache
from lora_trainer.checkpoint.states import TrainingState
from lora_trainer.common.errors import RequestError
from lora_trainer.config.choices import QUANTIZATIONS, BasePrecision
from lora_trainer.config.declare import SCHEDULE_FREE
from lora_trainer.config.running import RunConfig
from lora_trainer.dataset.caption_lengths import new_word
from lora_trainer.families.base import DENOISER, WEIGHTS, Conditioning, TextEncoder
from lora_trainer.lora.adapter import Adapter, denoiser_layers, inject, layer_shapes
from lora_trainer.lora.adapter_kinds import add_new_tokens
from lora_trainer.lora.lora_hooks import LoraStrength, attach_assistant
from lora_trainer.lora.tensors import split_key
from lora_trainer.lora_file.names import LayerNames
from lora_trainer.lora_file.read_tensors import read_tensors
from lora_trainer.network.block_swap import Streamed, stream_blocks
from lora_trainer.network.compiling import CompiledBlocks, apply_attention
from lora_trainer.network.gradient_checkpointing import apply_checkpointing
from lora_trainer.network.quantize import quantize
from lora_trainer.planning.speedups import MOST_SHAPES, pass_shapes
from lora_trainer.run.caching import runs_text_encoders, texts_as
from lora_trainer.run.device import CPU, DTYPES, planned_device
from lora_trainer.run.oom_fallbacks import oom_as_error
from lora_trainer.run.prepare import Prepared
from lora_trainer.run.run_folder import TrainingJob
from lora_trainer.training.dataloader import TrainingDataLoader
from lora_trainer.training.guards import GuardState
from lora_trainer.training.loss import Model
from lora_trainer.training.optimizers import averaged_weights, build_optimizer, restore_optimizer
from lora_trainer.training.timesteps import Levels, flow_levels, table_levels
from lora_trainer.training.training import FreezeAfter, Progress


@dataclass(frozen=True, kw_only=True)
class Networks:
    """Networks on the device while training: the denoiser, trained text encoders, an assistant."""

    denoiser: nn.Module
    text: TextEncoder | None
    assistant: LoraStrength | None

    @property
    def by_component(self) -> dict[str, nn.Module]:
        """The networks that an adapter may change, by the names of their components."""
        return {DENOISER: self.denoiser, **(self.text.networks if self.text is not None else {})}


def load_networks(prepared: Prepared) -> Networks:
    config, device, family = prepared.config, planned_device(prepared), prepared.family
    precision = DTYPES[config.train.precision]
    # A base that will be streamed or quantised is loaded into host memory first: as a whole and
    # unquantised it might not fit on the device.
    streamed = config.memory.streamed_blocks
    base_precision: BasePrecision = config.memory.base_precision
    smaller = streamed or base_precision in QUANTIZATIONS
    load_device = CPU if smaller else device
    denoiser = family.load_denoiser(prepared.facts, dtype=precision, device=load_device)
    apply_attention(denoiser, config.memory.attention)
    if base_precision in ("int8", "fp8", "nf4"):
        skip = family.traits.quantization_skip
        quantize(denoiser, base_precision, device=device, skip=skip)
    if not streamed:
        denoiser.to(device)
    text = None
    if runs_text_encoders(config):
        text = family.load_text_encoder(prepared.facts, dtype=precision, device=device)
        if word := new_word(config):
            text.learn(word)
    return Networks(denoiser=denoiser, text=text, assistant=_assistant(prepared, denoiser))


def _assistant(prepared: Prepared, denoiser: nn.Module) -> LoraStrength | None:
    file = prepared.config.base.assistant
    if file is None:
        return None
    names = LayerNames(prepared.family, _layers(prepared, None))
    return attach_assistant(denoiser, read_tensors(Path(file).expanduser(), names=names))


def with_adapter(prepared: Prepared, networks: Networks, state: TrainingState | None) -> Adapter:
    config, family = prepared.config, prepared.family
    text = config.adapter.text_encoder
    inside = networks.by_component if text else {DENOISER: networks.denoiser}
    modules = {
        name: family.lora_targets(
            network, config.adapter.targets if name == DENOISER else "text_encoder"
        )
        for name, network in inside.items()
    }
    starts = config.train.init_from if state is None else None
    # As they are without an adapter.
    layers = _layers(prepared, networks.text) if starts is not None else {}
    adapter = inject(
        inside,
        modules=modules,
        settings=config.adapter,
        alpha=_alpha(config),
        seed=config.train.seed,
        averaged=config.train.ema_decay is not None,
        new_tokens=_new_tokens(config, networks.text),
        keep_best=config.output.keep_best,
    )
    if starts is not None:
        names = LayerNames(family, layers)
        adapter.load_tensors(read_tensors(Path(starts).expanduser(), names=names))
    return adapter


def _layers(
    prepared: Prepared, text: TextEncoder | None
) -> dict[str, Mapping[str, tuple[int, ...]]]:
    """Return the shapes of all layers by component, those of loaded text encoders by their own names."""
    family = prepared.family
    return {
        DENOISER: denoiser_layers(family, prepared.facts.architecture),
        **family.text.layers,
        **{
            name: layer_shapes(network) for name, network in (text.networks if text else {}).items()
        },
    }


def _new_tokens(config: RunConfig, text: TextEncoder | None) -> dict[str, nn.Parameter]:
    word = new_word(config)
    if text is None or word is None:
        return {}
    return add_new_tokens(
        text, word.tokens, start=config.adapter.new_tokens_from, seed=config.train.seed
    )


def _alpha(config: RunConfig) -> float:
    """Return alpha; OFT has none, so its setting stays at auto and the rank stands in."""
    alpha = config.adapter.alpha
    return float(config.adapter.rank) if alpha == "auto" else alpha


def arrange(prepared: Prepared, networks: Networks) -> Streamed | None:
    """Apply gradient checkpointing and block streaming, after the adapter is in place; return the streamer."""
    memory = prepared.config.memory
    apply_checkpointing(networks.denoiser, memory.gradient_checkpointing)
    if count := memory.streamed_blocks:
        return stream_blocks(networks.denoiser, count=count, device=planned_device(prepared))
    return None


def build_model(prepared: Prepared, networks: Networks, adapter: Adapter) -> Model:
    return Model(
        denoiser=networks.denoiser,
        predict=prepared.family.predict,
        embed=_embedding(networks.text),
        prediction=prepared.facts.prediction,
        precision=DTYPES[prepared.config.train.precision],
        device=planned_device(prepared),
        masks=adapter.masks,
        batch_group_key=prepared.family.text.batch_group_key,
        without_adapter=adapter.off,
    )


def _embedding(text: TextEncoder | None) -> Callable[[Conditioning], Conditioning]:
    """Return a function from a batch's texts to conditioning: cached outputs pass, tokens are encoded."""
    if text is None:
        return lambda conditioning: conditioning
    tokenized = text.tokenize([""])
    names = frozenset(tokenized) | {name + WEIGHTS for name in tokenized}

    def embed(conditioning: Conditioning) -> Conditioning:
        tokens = {name: value for name, value in conditioning.items() if name in names}
        cached = {name: value for name, value in conditioning.items() if name not in names}
        return {**text.embed(tokens), **cached}

    return embed


def build_dataloader(job: TrainingJob, cache_needs: Needs, cache: Cache) -> TrainingDataLoader:
    prepared, config = job.prepared, job.prepared.config
    trained, regularisation = (
        [sample for record in records for sample in record.sample_ids()]
        for records in (prepared.trained, prepared.dataset.regularisation)
    )
    return TrainingDataLoader(
        sources={sample: cache_needs.sources[sample] for sample in (*trained, *regularisation)},
        empty_text=texts_as(prepared).key(""),
        entries=Entries(cache=cache),
        levels=_levels(prepared),
        prediction=prepared.facts.prediction,
        shared_conditioning=prepared.facts.guidance.conditioning(config.objective.guidance_scale),
        data=config.data,
        objective=config.objective,
        batch_size=config.train.batch_size,
        seed=config.train.seed,
        regularisation=regularisation,
        regularisation_per_epoch=prepared.regularisation_per_epoch,
        dist_env=job.ranks.dist_env,
    )


def _levels(prepared: Prepared) -> Levels:
    facts, settings = prepared.facts, prepared.config.objective
    if facts.prediction != "flow":
        return table_levels(facts.alphas_cumprod().tolist(), settings)
    return flow_levels(
        settings,
        base_shift=lambda size: facts.flow_shift(width_px=size[0], height_px=size[1]),
    )


@dataclass(frozen=True, kw_only=True)
class TrainComponents:
    """Networks, adapter and optimizer of a training, the same in every process."""

    networks: Networks
    adapter: Adapter
    model: Model
    optimizer: torch.optim.Optimizer
    parameters: Sequence[nn.Parameter]
    scaler: torch.amp.GradScaler
    streamed: Streamed | None
    from_zero: Sequence[nn.Parameter]
    """Parameters that are zero at the start of a new adapter; empty for one loaded from a file."""
    chosen: Callable[[], AbstractContextManager[None]]
    """Context manager: while it runs, the adapter has the weights to export, sample and validate."""

    def restored(self, state: TrainingState, *, micro_batch: int) -> Progress:
        """Load adapter, optimizer and loss scale from `state`; return its progress."""
        self.adapter.load_state(state.adapter)
        restore_optimizer(self.optimizer, state.optimizer)
        state.loop.restore_loss_scale(self.scaler)
        guard = GuardState.from_plain(state.loop.guard)
        guard = replace(guard, micro_batch=min(micro_batch, guard.micro_batch))
        return Progress(step=state.step, images=state.images_seen, guard=guard)


def build_components(job: TrainingJob) -> TrainComponents:
    """Load the base, add the adapter and build the optimizer; `restored` loads a resume state afterwards."""
    prepared, config = job.prepared, job.prepared.config
    with oom_as_error(f"loading {prepared.facts.source}", events=job.events):
        networks = load_networks(prepared)
        adapter = with_adapter(prepared, networks, job.state)
        streamed = arrange(prepared, networks)
        groups = adapter.groups(config.optimizer)
        optimizer = build_optimizer(groups, config.optimizer)
    model = build_model(prepared, networks, adapter)
    parameters = [parameter for group in groups for parameter in group["params"]]
    return TrainComponents(
        networks=networks,
        adapter=adapter,
        model=model,
        optimizer=optimizer,
        parameters=parameters,
        from_zero=[parameter for parameter in parameters if not parameter.any()],
        scaler=torch.amp.GradScaler(model.device.type, enabled=config.train.precision == "fp16"),
        streamed=streamed,
        chosen=_chosen(config, adapter, optimizer),
    )


def _chosen(
    config: RunConfig, adapter: Adapter, optimizer: torch.optim.Optimizer
) -> Callable[[], AbstractContextManager[None]]:
    """Return a context manager that swaps in the weights to export; Schedule-Free's are its averages."""
    if config.optimizer.name == SCHEDULE_FREE:
        return partial(averaged_weights, optimizer)
    return adapter.averaged if config.output.weights == "ema" else nullcontext


def stages(config: RunConfig, adapter: Adapter) -> list[FreezeAfter]:
    """Return the parameters that are frozen before the end of the run, with the step of each group."""
    steps = config.train.steps
    text = [
        parameter
        for key, layer in adapter.layers.items()
        for parameter in layer.parameters.values()
        if split_key(key)[0] != DENOISER and parameter.requires_grad
    ]
    words = list(adapter.new_tokens.values())
    stages = [
        # At least one step, so that each part trains.
        FreezeAfter(parameters=parameters, end_step=max(1, round(until * steps)))
        for parameters, until in (
            (text, config.train.text_encoder_until),
            (words, config.train.new_tokens_until),
        )
    ]
    ending = [stage for stage in stages if stage.parameters and stage.end_step < steps]
    if sum(len(stage.parameters) for stage in ending) == len(adapter.parameters()):
        raise RequestError(
            "nothing is left to train once the text encoders stop, as the denoiser is frozen",
            fix="leave train.text_encoder_until and new_tokens_until out",
        )
    return ending


def compiled_blocks(
    job: TrainingJob,
    parts: TrainComponents,
    guard: GuardState,
    *,
    images_at_once: Mapping[tuple[int, int], int],
) -> CompiledBlocks | None:
    """Return the compiled blocks, None in a run without or where they failed before in this run.

    `images_at_once` is the micro-batch by (height, width) of the latents.
    """
    config = job.prepared.config
    if config.hardware.compile != "blocks" or guard.uncompiled or guard.plain:
        return None
    shapes = pass_shapes(
        images_at_once, batch_size=config.train.batch_size, processes=job.prepared.processes
    )[:MOST_SHAPES]
    return CompiledBlocks(parts.networks.denoiser, shapes=frozenset(shapes))


def afterwards(config: RunConfig, adapter: Adapter) -> list[Callable[[int], None]]:
    """Return functions of the step number that run after each optimizer step."""
    hooks: list[Callable[[int], None]] = []
    limit = config.optimizer.max_weight_norm
    if limit is not None:
        hooks.append(lambda step: adapter.limit_norms(limit))
    decay = config.train.ema_decay
    if decay is not None:
        # After the norm limit, so that the average is of the weights that stay.
        hooks.append(lambda step: adapter.update_average(step, decay=decay))
    return hooks
