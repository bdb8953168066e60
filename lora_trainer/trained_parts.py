"""What is trained and with what: networks, adapter, optimizer, and what is done to them beside a step."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from lora_trainer.config import SCHEDULE_FREE, Config, concrete
from lora_trainer.errors import RequestError
from lora_trainer.events import EventStream
from lora_trainer.exporting import Job
from lora_trainer.families.base import DENOISER
from lora_trainer.model.adapters import Adapter
from lora_trainer.model.compiling import CompiledBlocks
from lora_trainer.model.graph import CudaCapture
from lora_trainer.model.norm_limit import limit_norms
from lora_trainer.model.products import Int8Layouts
from lora_trainer.model.streaming import Streamed
from lora_trainer.networks import Networks, arrange, build_model, load_networks, with_adapter
from lora_trainer.output.adapter_tensors import split_key
from lora_trainer.output.checkpoints import TrainingState
from lora_trainer.planning.speedups import MOST_SHAPES, pass_shapes
from lora_trainer.remedies import told_if_full
from lora_trainer.train.actions import load_scaler
from lora_trainer.train.graphed import StepGraphs
from lora_trainer.train.guards import GuardState, from_plain
from lora_trainer.train.optim import (
    averaged_weights,
    build_optimizer,
    restore_optimizer,
)
from lora_trainer.train.progress import Progress
from lora_trainer.train.speedups import Speedups
from lora_trainer.train.stages import Stage, end_step
from lora_trainer.train.training import Model


@dataclass(frozen=True, kw_only=True)
class Parts:
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


def build_parts(job: Job) -> Parts:
    """Load the base, put the adapter on it and build its optimizer; a resumed state is not in it yet."""
    prepared, config = job.prepared, job.prepared.config
    with told_if_full(f"loading {prepared.facts.source}", events=job.events):
        networks = load_networks(prepared)
        if networks.int8 is not None:
            _tell_missing_products(networks.int8, job.events)
        adapter = with_adapter(prepared, networks, job.state)
        streamed = arrange(prepared, networks)
        groups = adapter.groups(config.optimizer)
        optimizer = build_optimizer(groups, config.optimizer)
    model = build_model(prepared, networks, adapter)
    parameters = [parameter for group in groups for parameter in group["params"]]
    return Parts(
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


def stages(config: Config, adapter: Adapter) -> list[Stage]:
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
        Stage(parameters=own, end_step=end_step(until, steps=steps))
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
    job: Job,
    parts: Parts,
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
