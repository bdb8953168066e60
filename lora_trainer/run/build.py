"""What a training consists of: networks with their adapter, the dataloader, the optimizer.

The networks of a training: loaded, quantised, streamed and given their adapter, as the plan says.

The feeder of a training: its samples, their cache entries and the noise levels they are trained at.

What is trained and with what: networks, adapter, optimizer, and what is done to them beside a step.
"""

from __future__ import annotations

import math
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
from lora_trainer.common.events import EventStream
from lora_trainer.config.base_precision import QUANTIZATIONS, BaseMatmul, BasePrecision
from lora_trainer.config.config import SCHEDULE_FREE, Config, concrete
from lora_trainer.dataset.tokens import new_word
from lora_trainer.families.base import DENOISER, WEIGHTS, Conditioning, TextEncoder
from lora_trainer.lora.adapter import Adapter, denoiser_layers, inject, layer_shapes
from lora_trainer.lora.lora_hooks import Assistant, attach
from lora_trainer.lora.new_tokens import add_new_tokens
from lora_trainer.lora.norm_limit import limit_norms
from lora_trainer.lora.tensors import split_key
from lora_trainer.lora_file.names import file_names
from lora_trainer.lora_file.read_tensors import read_tensors
from lora_trainer.network.attention import apply_attention
from lora_trainer.network.block_swap import Streamed, stream_blocks
from lora_trainer.network.checkpointing import apply_checkpointing
from lora_trainer.network.compiling import CompiledBlocks
from lora_trainer.network.cuda_graph import CudaCapture
from lora_trainer.network.modulation import ModulatedNetwork
from lora_trainer.network.quantize import quantize
from lora_trainer.network.quantized_matmul import Int8Layouts
from lora_trainer.planning.speedups import MOST_SHAPES, pass_shapes
from lora_trainer.run.caching import runs_text_encoders, texts_as
from lora_trainer.run.device import CPU, DTYPES, planned_device
from lora_trainer.run.job import TrainingJob
from lora_trainer.run.oom_fallbacks import oom_as_error
from lora_trainer.run.prepare import Prepared
from lora_trainer.training.actions import load_scaler
from lora_trainer.training.dataloader import TrainingDataLoader, UpcomingWindow
from lora_trainer.training.freeze import FreezeAfter, end_step
from lora_trainer.training.graphed import Speedups, StepGraphs
from lora_trainer.training.guards import GuardState, from_plain
from lora_trainer.training.modulation_prefetch import ModulationPrefetch
from lora_trainer.training.optimizers import averaged_weights, build_optimizer, restore_optimizer
from lora_trainer.training.progress import Progress
from lora_trainer.training.timesteps import Levels, flow_levels, table_levels
from lora_trainer.training.training import Model


@dataclass(frozen=True, kw_only=True)
class Networks:
    """What is on the device while training: the denoiser, text encoders trained along, an assistant.

    `modulation` are the denoiser's layers that are not on it; `int8` are the products its device has with
    a base of int8 codes, where such were asked for.
    """

    denoiser: nn.Module
    text: TextEncoder | None
    assistant: Assistant | None
    modulation: ModulatedNetwork | None = None
    int8: Int8Layouts | None = None


def load_networks(prepared: Prepared) -> Networks:
    config, device, family = prepared.config, planned_device(prepared), prepared.family
    precision = DTYPES[concrete(config.train.precision)]
    # A base that will be smaller on the device than as it is loaded is never whole there.
    streamed = concrete(config.memory.streamed_blocks)
    kept: BasePrecision = concrete(config.memory.base_precision)
    cached = concrete(config.memory.modulation_cache)
    smaller = streamed or cached or kept in QUANTIZATIONS
    place = CPU if smaller else device
    denoiser = family.load_denoiser(prepared.facts, dtype=precision, device=place)
    apply_attention(denoiser, concrete(config.memory.attention))
    layouts = None
    if kept in ("int8", "fp8", "nf4"):
        matmul: BaseMatmul = concrete(config.memory.base_matmul)
        layouts = quantize(
            denoiser, kept, device=device, skip=family.quantization_skip, matmul=matmul
        )
    modulation = _modulation(prepared, denoiser) if cached else None
    if not streamed:
        denoiser.to(device)
    text = None
    if runs_text_encoders(config):
        text = family.load_text_encoder(prepared.facts, dtype=precision, device=device)
        if word := new_word(config):
            text.learn(word)
    return Networks(
        denoiser=denoiser,
        text=text,
        assistant=_assistant(prepared, denoiser),
        modulation=modulation,
        int8=layouts,
    )


def _modulation(prepared: Prepared, denoiser: nn.Module) -> ModulatedNetwork:
    wanted = set(prepared.family.modulation_layers(prepared.facts))
    names = [name for name, _ in denoiser.named_modules() if name in wanted]
    return ModulatedNetwork(denoiser, names, device=planned_device(prepared))


def _assistant(prepared: Prepared, denoiser: nn.Module) -> Assistant | None:
    file = prepared.config.base.assistant
    if file is None:
        return None
    names = file_names(prepared.family, _layers(prepared, {}))
    return attach(denoiser, read_tensors(Path(file).expanduser(), names=names))


def with_adapter(prepared: Prepared, networks: Networks, state: TrainingState | None) -> Adapter:
    config, family = prepared.config, prepared.family
    inside: dict[str, nn.Module] = {DENOISER: networks.denoiser}
    modules = {DENOISER: family.lora_targets(networks.denoiser, config.adapter.targets)}
    if networks.text is not None and config.adapter.text_encoder:
        inside |= networks.text.networks
        modules |= {
            name: family.text_targets(network) for name, network in networks.text.networks.items()
        }
    starts = config.train.init_from if state is None else None
    text = {} if networks.text is None else networks.text.networks
    layers = _layers(prepared, text) if starts is not None else {}  # as they are without an adapter
    adapter = inject(
        inside,
        modules=modules,
        settings=config.adapter,
        alpha=_alpha(config),
        seed=config.train.seed,
        initial=state.adapter if state is not None else None,
        averaged=config.train.ema_decay is not None,
        new_tokens=_new_tokens(config, networks.text),
        keep_best=config.output.keep_best,
    )
    if starts is not None:
        names = file_names(family, layers)
        adapter.load_tensors(read_tensors(Path(starts).expanduser(), names=names))
    return adapter


def _layers(
    prepared: Prepared, text: Mapping[str, nn.Module]
) -> dict[str, Mapping[str, tuple[int, ...]]]:
    """Return the shapes of all layers by component, those of loaded text encoders by their own names."""
    family = prepared.family
    return {
        DENOISER: denoiser_layers(family, prepared.facts.architecture),
        **family.text_modules(),
        **{name: layer_shapes(network) for name, network in text.items()},
    }


def _new_tokens(config: Config, text: TextEncoder | None) -> dict[str, nn.Parameter]:
    word = new_word(config)
    if text is None or word is None:
        return {}
    return add_new_tokens(
        text, word.tokens, start=config.adapter.new_tokens_from, seed=config.train.seed
    )


def _alpha(config: Config) -> float:
    """Return alpha; OFT has none, which leaves its setting at auto."""
    alpha = config.adapter.alpha
    return float(config.adapter.rank) if alpha == "auto" else alpha


def arrange(prepared: Prepared, networks: Networks) -> Streamed | None:
    """Let blocks be recomputed, and streamed; both with their adapters in place. Return what streams them.

    Host memory is pinned in the order of how often it is copied.
    """
    memory = prepared.config.memory
    apply_checkpointing(
        networks.denoiser,
        concrete(memory.gradient_checkpointing),
        kept_share=concrete(memory.kept_share),
    )
    streamed = None
    if count := concrete(memory.streamed_blocks):
        streamed = stream_blocks(networks.denoiser, count=count, device=planned_device(prepared))
    if networks.modulation is not None:
        networks.modulation.pin()
    return streamed


def build_model(prepared: Prepared, networks: Networks, adapter: Adapter) -> Model:
    return Model(
        denoiser=networks.denoiser,
        predict=prepared.family.predict,
        embed=_embedding(networks.text),
        prediction=prepared.facts.prediction,
        precision=DTYPES[concrete(prepared.config.train.precision)],
        device=planned_device(prepared),
        masks=adapter.masks,
        batch_group_key=prepared.family.batch_group_key,
        without_adapter=adapter.off,
        foresight=_foresight(prepared, networks),
    )


def _foresight(prepared: Prepared, networks: Networks) -> ModulationPrefetch | None:
    family, facts = prepared.family, prepared.facts
    if networks.modulation is None:
        return None
    dtype = DTYPES[concrete(prepared.config.train.precision)]
    return ModulationPrefetch(
        network=networks.modulation,
        names=family.modulated_by(facts),
        inputs=partial(family.modulation_input, networks.denoiser, dtype=dtype),
        dtype=dtype,
        device=planned_device(prepared),
        most_samples=prepared.plan.modulation_samples,
    )


def _embedding(text: TextEncoder | None) -> Callable[[Conditioning], Conditioning]:
    """Return what turns a batch's texts into conditioning: cached outputs as they are, tokens by running."""
    if text is None:
        return lambda conditioning: conditioning
    tokenized = text.tokenize([""])
    names = frozenset(tokenized) | {name + WEIGHTS for name in tokenized}

    def embed(conditioning: Conditioning) -> Conditioning:
        tokens = {name: value for name, value in conditioning.items() if name in names}
        told = {name: value for name, value in conditioning.items() if name not in names}
        return {**text.embed(tokens), **told}

    return embed


def build_dataloader(job: TrainingJob, wanted: Needs, cache: Cache) -> TrainingDataLoader:
    prepared, config = job.prepared, job.prepared.config
    own, regularisation = (
        [sample for record in records for sample in record.sample_ids()]
        for records in (prepared.trained, prepared.dataset.regularisation)
    )
    return TrainingDataLoader(
        sources={sample: wanted.sources[sample] for sample in (*own, *regularisation)},
        empty_text=texts_as(prepared).key(""),
        entries=Entries(cache=cache),
        levels=_levels(prepared),
        prediction=prepared.facts.prediction,
        shared_conditioning=prepared.family.guidance_conditioning(
            prepared.facts, guidance_scale=config.objective.guidance_scale
        ),
        data=config.data,
        objective=config.objective,
        batch_size=config.train.batch_size,
        seed=config.train.seed,
        regularisation=regularisation,
        regularisation_per_epoch=prepared.regularisation_per_epoch,
        place=job.ranks.dist_env,
        window=_window(job),
    )


def _window(job: TrainingJob) -> UpcomingWindow | None:
    """Return how far ahead samples are told of: as far as their modulation is made at once."""
    prepared = job.prepared
    facts, config = prepared.facts, prepared.config
    if not concrete(config.memory.modulation_cache):
        return None
    each = math.ceil(config.train.batch_size / job.ranks.dist_env.count)

    def latent_shape(size_px: tuple[int, int]) -> tuple[int, ...]:
        width_px, height_px = size_px
        return facts.latent_channels, height_px // facts.vae_factor, width_px // facts.vae_factor

    return UpcomingWindow(
        steps=max(1, prepared.plan.modulation_samples // each),
        names=prepared.family.modulated_by(facts),
        latent_shape=latent_shape,
    )


def _levels(prepared: Prepared) -> Levels:
    family, facts, settings = prepared.family, prepared.facts, prepared.config.objective
    if facts.prediction != "flow":
        return table_levels(family.alphas_cumprod(facts).tolist(), settings)
    return flow_levels(
        settings,
        base_shift=lambda size: family.flow_shift(facts, width_px=size[0], height_px=size[1]),
    )


@dataclass(frozen=True, kw_only=True)
class TrainComponents:
    """What is trained and with what: the same in every process."""

    networks: Networks
    adapter: Adapter
    model: Model
    optimizer: torch.optim.Optimizer
    parameters: Sequence[nn.Parameter]
    scaler: torch.amp.GradScaler
    streamed: Streamed | None
    from_zero: Sequence[nn.Parameter]
    """Those of a new adapter that are zero; none of one that goes on from a file, or starts elsewhere."""
    chosen: Callable[[], AbstractContextManager[None]]
    """Puts the weights that are exported, sampled and validated in force while a block runs."""

    def restored(self, state: TrainingState, *, micro_batch: int) -> Progress:
        """Put adapter, optimizer and loss scale where `state` has them; return where that is."""
        self.adapter.load_state(state.adapter)
        restore_optimizer(self.optimizer, state.optimizer)
        load_scaler(self.scaler, state.extras)
        guard = from_plain(state.extras["guard"])
        guard = replace(guard, micro_batch=min(micro_batch, guard.micro_batch))
        return Progress(step=state.step, images=state.images_seen, guard=guard)


def build_components(job: TrainingJob) -> TrainComponents:
    """Load the base, put the adapter on it and build its optimizer; a resumed state is not in it yet."""
    prepared, config = job.prepared, job.prepared.config
    with oom_as_error(f"loading {prepared.facts.source}", events=job.events):
        networks = load_networks(prepared)
        if networks.int8 is not None:
            _tell_missing_products(networks.int8, job.events)
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


def _tell_missing_products(layouts: Int8Layouts, events: EventStream) -> None:
    """Say once which int8 products this device has not; the plan counts on those of forward passes."""
    if layouts.against_forward:
        found = "has no int8 products: each weight is made whole, which is slower"
    elif layouts.against_backward:
        found = "has no int8 products for the backward pass, where weights are made whole"
    else:
        return
    events.problem(
        f"this device {found} ({layouts.against_forward or layouts.against_backward})",
        fix="nothing; --set memory.base_matmul=dequantized does not try them",
        severity="warning" if layouts.against_forward else "note",
    )


def _chosen(
    config: Config, adapter: Adapter, optimizer: torch.optim.Optimizer
) -> Callable[[], AbstractContextManager[None]]:
    """Return what puts the weights that a run is for in force; Schedule-Free's are its averages."""
    if config.optimizer.name == SCHEDULE_FREE:
        return partial(averaged_weights, optimizer)
    return adapter.averaged if config.output.weights == "ema" else nullcontext


def stages(config: Config, adapter: Adapter) -> list[FreezeAfter]:
    """Return what stops being trained before the end; what is frozen all along is in none of them."""
    steps = concrete(config.train.steps)
    text = [
        parameter
        for key, layer in adapter.layers.items()
        for parameter in layer.parameters.values()
        if split_key(key)[0] != DENOISER and parameter.requires_grad
    ]
    words = list(adapter.new_tokens.values())
    stages = [
        FreezeAfter(parameters=own, end_step=end_step(until, steps=steps))
        for own, until in (
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


def speedups(
    job: TrainingJob,
    parts: TrainComponents,
    guard: GuardState,
    *,
    images_at_once: Mapping[tuple[int, int], int],
) -> Speedups:
    """Return what the plan has passes made faster by, without what this run has given up already.

    `images_at_once` is by (height, width) of the latents.
    """
    config = job.prepared.config
    shapes = pass_shapes(
        images_at_once, batch_size=config.train.batch_size, processes=job.prepared.processes
    )[:MOST_SHAPES]
    found = Speedups(
        compiled_shapes=frozenset(shapes), uncompiled=guard.uncompiled, ungraphed=guard.ungraphed
    )
    if config.hardware.compile == "blocks" and not (guard.uncompiled or guard.plain):
        found.compiled = CompiledBlocks(parts.networks.denoiser, shapes=len(shapes))
    if config.hardware.cuda_graphs is True and not (guard.ungraphed or guard.plain):
        found.graphs = StepGraphs(
            capture=CudaCapture(parts.model.device),
            parameters=parts.parameters,
            device=parts.model.device,
            most=MOST_SHAPES,
        )
    return found


def afterwards(config: Config, adapter: Adapter) -> list[Callable[[int], None]]:
    """Return what is done to the weights after each optimizer step."""
    found: list[Callable[[int], None]] = []
    limit = config.optimizer.max_weight_norm
    if limit is not None:
        found.append(lambda step: limit_norms(adapter, limit))
    decay = config.train.ema_decay
    if decay is not None:
        found.append(lambda step: adapter.update_average(step, decay=decay))
    return found
