"""The cost of a training step, measured by running forward and backward passes on meta tensors.

Every kernel passes through a dispatch mode that tracks the live storages, so bytes are exact where formulas
are not: casts, views that become copies, recomputation by checkpoints. Neither weights nor a GPU are
needed. Inputs are a network on the `meta` device and a call of it; outputs are bytes, FLOPs and kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from lora_trainer.costs.sample_cost import SampleCost, Workload
from lora_trainer.families.base import BaseFacts, Conditioning, Family, Geometry
from lora_trainer.lora.fused import CUSTOM
from lora_trainer.network.gradient_checkpointing import BlockRunner, apply_checkpointing
from lora_trainer.network.live_storages import FusedKernels, KernelsOf, LiveStorages, storage_key


@dataclass(frozen=True, kw_only=True)
class StepTrace:
    """Bytes and work of one forward and backward pass of the whole batch.

    `saved_bytes` are held by autograd and checkpoints at the end of the forward pass, without inputs and
    parameters; `adapter_saved_bytes` of them belong to adapters. `peak_bytes` is the highest sum during the
    step, without the gradients of parameters.
    """

    saved_bytes: int
    adapter_saved_bytes: int
    peak_bytes: int
    forward_flops: int
    step_flops: int
    kernels: int


def add_adapters(
    network: nn.Module, modules: Sequence[str], *, rank: int, wide: bool = False
) -> None:
    """Put LoRA pairs on a network, float32 with allocated gradients as in training; values are undefined.

    `wide` is `Workload.wide_adapter`.
    """
    config = LoraConfig(r=rank, target_modules=list(modules), init_lora_weights=False)
    if not wide:
        config._register_custom_module(dict(CUSTOM))
    inject_adapter_in_model(config, network)
    for parameter in network.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
            parameter.grad = torch.empty_like(parameter)


def trace_forward(
    network: nn.Module,
    forward: Callable[[], Tensor],
    *,
    inputs: Iterable[Tensor],
    kernels_of: KernelsOf = "cuda",
) -> int:
    """Return the peak bytes of `forward` without gradients; inputs and parameters do not count."""
    live = LiveStorages([*_resident(network), *inputs])
    with torch.no_grad(), FusedKernels(kernels_of), live:
        forward()
    return live.peak_bytes


def trace_step(
    network: nn.Module,
    forward: Callable[[], Tensor],
    *,
    inputs: Iterable[Tensor],
    kernels_of: KernelsOf = "cuda",
) -> StepTrace:
    """Trace `forward` and its backward pass; the gradients of the adapters must be allocated.

    Trace a forward pass before: networks cache tables (of positions, say) in their first call, and those
    are no activations.
    """
    live = LiveStorages([*_resident(network), *inputs])
    with FusedKernels(kernels_of), live, _adapter_inputs_marked(network, live):
        prediction = forward()
        edge = torch.autograd.graph.get_gradient_edge(prediction)
        shape, dtype, device = prediction.shape, prediction.dtype, prediction.device
        del prediction  # from here only the graph may hold it, as in training
        saved, adapter, forward_flops = live.now_bytes, live.marked_bytes, live.flops
        torch.autograd.backward([edge], [torch.zeros(shape, dtype=dtype, device=device)])
    return StepTrace(
        saved_bytes=saved,
        adapter_saved_bytes=adapter,
        peak_bytes=live.peak_bytes,
        forward_flops=forward_flops,
        step_flops=live.flops,
        kernels=live.kernels,
    )


def _resident(network: nn.Module) -> Iterator[Tensor]:
    for tensor in (*network.parameters(), *network.buffers()):
        yield tensor
        if tensor.grad is not None:
            yield tensor.grad


@contextmanager
def _adapter_inputs_marked(network: nn.Module, live: LiveStorages) -> Iterator[None]:
    """Mark the storages that wide adapters create: copies of inputs, and the outputs of A."""
    input_keys: dict[nn.Module, int] = {}

    def before_layer(layer: nn.Module, args: tuple[Tensor, ...]) -> None:
        input_keys[layer] = storage_key(args[0])

    def before_down(layer: nn.Module, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        if storage_key(args[0]) != input_keys[layer]:
            live.mark(args[0])
        live.marking = True  # the output of A, and a copy of a non-contiguous input

    def after_down(*_: Any) -> None:
        live.marking = False

    handles = []
    for layer in network.modules():
        if isinstance(layer, LoraLayer):
            handles.append(layer.register_forward_pre_hook(before_layer))
            for down in layer.lora_A.values():
                handles.append(down.register_forward_pre_hook(partial(before_down, layer)))
                handles.append(down.register_forward_hook(after_down, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True, kw_only=True)
class TracedNetwork:
    """A frozen denoiser on `meta` with adapters, and its conditioning."""

    family: Family
    facts: BaseFacts
    network: nn.Module
    dtype: torch.dtype
    conditioning: Conditioning
    """Batch 1, on `meta`, in the dtypes of training."""
    forward_peaks: dict[tuple[Workload, KernelsOf], int] = field(default_factory=dict)
    """Peak bytes of passes without gradients, which are the same at every checkpointing level."""

    def sample_cost(self, workload: Workload, *, kernels_of: KernelsOf = "cuda") -> SampleCost:
        """Trace one micro-batch of this workload; its adapter and dtype are those the network was built for.

        `conditioning_bytes` are 0 here, as they belong to the text encoder.
        """
        count = workload.micro_batch
        noisy, timesteps, conditioning = self.inputs(workload)
        tensors = [noisy, timesteps, *conditioning.values()]

        def forward() -> Tensor:
            return self.family.predict(self.network, noisy, timesteps, conditioning)

        apply_checkpointing(self.network, workload.checkpointing)
        plain = (replace(workload, checkpointing="none"), kernels_of)
        if plain not in self.forward_peaks:
            self.forward_peaks[plain] = trace_forward(
                self.network, forward, inputs=tensors, kernels_of=kernels_of
            )
        step = trace_step(self.network, forward, inputs=tensors, kernels_of=kernels_of)
        return SampleCost(
            saved_bytes=step.saved_bytes // count,
            adapter_saved_bytes=step.adapter_saved_bytes // count,
            temporary_bytes=(step.peak_bytes - step.saved_bytes) // count,
            forward_bytes=self.forward_peaks[plain] // count,
            conditioning_bytes=0,
            forward_flops=step.forward_flops // count,
            step_flops=step.step_flops // count,
            kernels=step.kernels,
            host_bytes=host_bytes(self.network) // count,
        )

    def inputs(self, workload: Workload) -> tuple[Tensor, Tensor, Conditioning]:
        """Return noisy latents, timesteps and conditioning of one pass of a workload's micro-batch."""
        factor, count = self.facts.vae_factor, workload.micro_batch
        size = (workload.height_px // factor, workload.width_px // factor)
        flow = self.facts.prediction == "flow"
        return (
            torch.empty(count, self.facts.latent_channels, *size, dtype=self.dtype, device="meta"),
            torch.empty(count, dtype=torch.float32 if flow else torch.int64, device="meta"),
            {
                name: tensor.repeat_interleave(count, 0)
                for name, tensor in self.conditioning.items()
            },
        )


def traced_network(
    family: Family, facts: BaseFacts, workload: Workload, *, prompt: Mapping[str, tuple[int, ...]]
) -> TracedNetwork:
    """Build the denoiser of a base for tracing; `prompt` has the shapes of one encoded text, batch 1.

    Names that end in `mask` are int64, all others float in the dtype of the workload.
    """
    dtype = {2: torch.bfloat16, 4: torch.float32}[workload.element_bytes]
    with torch.device("meta"):
        network = family.empty_denoiser(facts.architecture)
    network.requires_grad_(False).train()
    for tensor in (*network.parameters(), *network.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
    modules = family.lora_targets(network, workload.targets)
    add_adapters(network, modules, rank=workload.rank, wide=workload.wide_adapter)
    return TracedNetwork(
        family=family,
        facts=facts,
        network=network,
        dtype=dtype,
        conditioning=empty_conditioning(family, facts, prompt=prompt, dtype=dtype),
    )


def empty_conditioning(
    family: Family,
    facts: BaseFacts,
    *,
    prompt: Mapping[str, tuple[int, ...]],
    dtype: torch.dtype,
) -> Conditioning:
    """Return a network's conditioning, batch 1 on `meta`, from the shapes of an encoded prompt."""
    whole = Geometry(original_px=(64, 64), corner_px=(0, 0), target_px=(64, 64))
    extra_tensors = {
        **facts.geometry_conditioning(whole),
        **facts.guidance.conditioning(1.0),
    }
    shapes = {name: (shape, name.endswith("mask")) for name, shape in prompt.items()} | {
        name: (tuple(tensor.shape), not tensor.is_floating_point())
        for name, tensor in extra_tensors.items()
    }
    return {
        name: torch.empty(shape, dtype=torch.int64 if whole_numbers else dtype, device="meta")
        for name, (shape, whole_numbers) in shapes.items()
    }


def host_bytes(network: nn.Module) -> int:
    """Return the bytes that gradient checkpointing has moved to host memory since it was applied."""
    runners = {vars(module).get("_gradient_checkpointing_func") for module in network.modules()}
    return sum(runner.host_bytes for runner in runners if isinstance(runner, BlockRunner))
