"""The cost of a training step, measured by running forward and backward passes on meta tensors.

Every kernel passes through a dispatch mode, `LiveStorages`, that tracks the live storages, so bytes are exact where
formulas are not: casts, views that become copies, recomputation by checkpoints. Neither weights nor a GPU are
needed. Inputs are a network on the `meta` device and a call of it; outputs are bytes, FLOPs and kernels.

On `meta` torch falls back to unfused formulas, which save far more for the backward pass (attention: every score), so
`FusedKernels` runs the fused kernels of a device there.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lora_trainer.costs import meta_kernels
from lora_trainer.costs.sample_cost import SampleCost, Workload
from lora_trainer.families.base.facts import (
    IMAGE_PLACES,
    TEXT_LENGTHS,
    BaseFacts,
    Conditioning,
    Geometry,
)
from lora_trainer.families.base.family import Family, fp32_parts
from lora_trainer.families.base.references import with_references
from lora_trainer.lora.adapter_layers import CUSTOM
from lora_trainer.network.gradient_checkpointing import (
    BlockRunner,
    apply_checkpointing,
    storage_key,
)

# The device whose fused kernels are traced. `cpu` gives the memory of a float32 run on the CPU to the byte.
KernelsOf = Literal["cuda", "cpu"]
_ATEN = torch.ops.aten
# By this name blocks that keep results have another function while they are called.
_TORCH_ATTENTION = F.scaled_dot_product_attention


class FusedKernels(TorchFunctionMode):
    """Redirects calls on meta tensors to fused kernels; calls on other tensors are unchanged."""

    def __init__(self, kernels_of: KernelsOf) -> None:
        super().__init__()
        self._cuda = kernels_of == "cuda"

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if function is _TORCH_ATTENTION and _on_meta(*args, **kwargs):
            return _attention(self._cuda, *args, **kwargs)
        if function is F.rms_norm and self._cuda and _on_meta(*args, **kwargs):
            return _rms_norm(*args, **kwargs)
        return function(*args, **kwargs)


def _on_meta(*args: Any, **kwargs: Any) -> bool:
    first: Tensor = next(iter((*args, *kwargs.values())))
    return first.is_meta


def _attention(
    on_cuda: bool,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return `scaled_dot_product_attention` by a fused kernel of CUDA or of the CPU, [B, heads, queries, C].

    On CUDA that is flash attention for 16 bits without a mask, else the memory-efficient kernel.
    """
    bias = attn_mask
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        bias = torch.empty_like(attn_mask, dtype=query.dtype)
    if not on_cuda:
        assert not enable_gqa, "grouped queries run unfused on the CPU"
        outputs = _ATEN._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=bias, scale=scale
        )
    elif bias is None and query.element_size() == 2:
        outputs = _ATEN._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )
    else:
        if enable_gqa:
            groups = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        if bias is not None:  # broadcast without memory
            bias = bias.expand(*query.shape[:3], key.shape[2])
        outputs = _ATEN._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, dropout_p, is_causal, scale=scale
        )
    result: Tensor = outputs[0]
    return result


def _rms_norm(
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    if weight is not None and weight.dtype != input.dtype:  # unfused on CUDA as well
        return torch.rms_norm(input, normalized_shape, weight, eps)
    result: Tensor = _FrozenRmsNorm.apply(  # type: ignore[no-untyped-call]  # torch has no annotation
        input, len(normalized_shape)
    )
    return result


class _FrozenRmsNorm(torch.autograd.Function):
    """RMS norm in one kernel per direction; saves its input and one fp32 scale per normalised vector."""

    @staticmethod
    def forward(context: Any, input: Tensor, dimensions: int) -> Tensor:
        scale = input.new_empty(input.shape[:-dimensions], dtype=torch.float32)
        context.save_for_backward(input, scale)
        return torch.zeros_like(input)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return torch.zeros_like(gradient), None


_ALLOCATIONS = {
    _ATEN.empty,
    _ATEN.empty_like,
    _ATEN.empty_strided,
    _ATEN.new_empty,
    _ATEN.set_,
}


class LiveStorages(TorchDispatchMode):
    """Counts `now_bytes` of live storages that were created inside the mode, and their maximum `peak_bytes`.

    Storages of `ignored` do not count. `flops` are those of matrix products, attention included; `kernels`
    counts the kernels that a device would launch. Workspaces of CUDA kernels are not counted.
    """

    def __init__(self, ignored: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotation
        # The storages are held: a freed storage's address, which is its key, could be reused by another.
        self._ignored = {storage_key(tensor): tensor.untyped_storage() for tensor in ignored}
        self._alive: dict[int, tuple[int, weakref.ref[Any]]] = {}
        """Bytes of each storage; weakly, as a strong reference would keep it alive."""
        self._marked: set[int] = set()
        self.marking = False
        """Whether storages are marked as they are made."""
        self.now_bytes = self.peak_bytes = self.flops = self.kernels = 0

    @property
    def marked_bytes(self) -> int:
        """Bytes of the marked storages that are alive."""
        return sum(self._alive[key][0] for key in self._marked)

    def mark(self, tensor: Tensor) -> None:
        """Count the storage of `tensor` in `marked_bytes`, if it was created inside the mode."""
        key = storage_key(tensor)
        if key in self._alive:
            self._marked.add(key)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, packet = kwargs or {}, function.overloadpacket
        if function.is_view or packet is _ATEN._unsafe_view:
            return function(*args, **kwargs)
        self.kernels += packet not in _ALLOCATIONS
        result, flops = meta_kernels.run(function, args, kwargs)
        self.flops += flops
        if not function._schema.is_mutable:  # else it wrote to a storage that was there before
            for output in (result,) if isinstance(result, Tensor) else tree_leaves(result):
                if isinstance(output, Tensor):
                    self._watch(output)
        return result

    def _watch(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = int(storage._cdata)
        if key not in self._alive and key not in self._ignored:
            self._alive[key] = storage.nbytes(), weakref.ref(storage, lambda _: self.forget(key))
            self.create(key, storage.nbytes())

    def create(self, key: int, size: int) -> None:
        """Count a new storage."""
        self.now_bytes += size
        if self.marking:
            self._marked.add(key)
        self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def forget(self, key: int) -> None:
        """Count a storage no more."""
        size, _ = self._alive.pop(key)
        self.now_bytes -= size
        self._marked.discard(key)


def add_adapters(
    network: nn.Module, modules: Sequence[str], *, rank: int, wide: bool = False
) -> None:
    """Put LoRA pairs on a network, float32 with allocated gradients as in training; values are undefined.

    `wide` is `Workload.wide_adapter`.
    """
    # Alpha as in training by default: of a small layer another one is a kernel of its own in the backward pass.
    config = LoraConfig(
        r=rank, lora_alpha=rank, target_modules=list(modules), init_lora_weights=False
    )
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
    count: int = 1,
    forward_bytes: int = 0,
    kernels_of: KernelsOf = "cuda",
) -> SampleCost:
    """Trace `forward` of `count` samples and its backward pass; the gradients of the adapters must be allocated.

    `forward_bytes` are those of a sample in a pass without gradients. Bytes are without inputs, parameters and
    their gradients.

    Trace a forward pass before: networks cache tables (of positions, say) in their first call, and those
    are not activations.
    """
    live = LiveStorages([*_resident(network), *inputs])
    with FusedKernels(kernels_of), live, _adapter_inputs_marked(network, live):
        prediction = forward()
        edge = torch.autograd.graph.get_gradient_edge(prediction)
        shape, dtype, device = prediction.shape, prediction.dtype, prediction.device
        del prediction  # from here only the graph may hold it, as in training
        saved, adapter, forward_flops = live.now_bytes, live.marked_bytes, live.flops
        torch.autograd.backward([edge], [torch.zeros(shape, dtype=dtype, device=device)])
    return SampleCost(
        saved_bytes=saved // count,
        adapter_saved_bytes=adapter // count,
        temporary_bytes=(live.peak_bytes - saved) // count,
        forward_bytes=forward_bytes,
        forward_flops=forward_flops // count,
        step_flops=live.flops // count,
        kernels=live.kernels,
        host_bytes=_host_bytes(network) // count,
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

    with ExitStack() as hooks:
        for layer in network.modules():
            if isinstance(layer, LoraLayer):
                hooks.enter_context(layer.register_forward_pre_hook(before_layer))
                for down in layer.lora_A.values():
                    before = partial(before_down, layer)
                    hooks.enter_context(down.register_forward_pre_hook(before))
                    hooks.enter_context(down.register_forward_hook(after_down, always_call=True))
        yield


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
        """Trace one micro-batch of this workload; its adapter and dtype are those the network was built for."""
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
        return trace_step(
            self.network,
            forward,
            inputs=tensors,
            count=count,
            forward_bytes=self.forward_peaks[plain] // count,
            kernels_of=kernels_of,
        )

    def inputs(self, workload: Workload) -> tuple[Tensor, Tensor, Conditioning]:
        """Return noisy latents, timesteps and conditioning of one pass of a workload's micro-batch."""
        factor, count = self.facts.vae_factor, workload.micro_batch
        size = (workload.height_px // factor, workload.width_px // factor)
        flow = self.facts.release.prediction == "flow"

        def latents(height: int, width: int) -> Tensor:
            shape = (self.facts.latent_channels, height, width)
            return torch.empty(*shape, dtype=self.dtype, device="meta")

        references = [
            latents(high // factor, wide // factor) for wide, high in workload.references_px
        ]
        conditioning = {**self._text(workload), **with_references(references)}
        return (
            latents(*size).repeat(count, 1, 1, 1),
            torch.empty(count, dtype=torch.float32 if flow else torch.int64, device="meta"),
            {name: tensor.repeat_interleave(count, 0) for name, tensor in conditioning.items()},
        )

    def _text(self, workload: Workload) -> Conditioning:
        """Return the conditioning with a text that is longer by what text encoders see of the references."""
        reads, sizes = self.facts.references, workload.references_px
        if reads is None or not (more := reads.text_tokens(sizes)):
            return self.conditioning
        longer = {
            name: tensor.new_empty(1, tensor.shape[1] + more, *tensor.shape[2:])
            for name, tensor in self.conditioning.items()
            if name in {"text", "text_mask"}
        }
        if TEXT_LENGTHS in self.conditioning:
            longer[TEXT_LENGTHS] = self.conditioning[TEXT_LENGTHS] + more
        if reads.in_text:
            before = [reads.text_tokens(sizes[:count]) for count in range(1, len(sizes) + 1)]
            longer[IMAGE_PLACES] = torch.tensor([before])
        return {**self.conditioning, **longer}


def traced_network(
    family: Family, facts: BaseFacts, workload: Workload, *, prompt: Mapping[str, tuple[int, ...]]
) -> TracedNetwork:
    """Build the denoiser of a base for tracing; `prompt` has the shapes of one encoded text, batch 1.

    Names that end in `mask` are int64, all others float in the dtype of the workload.
    """
    dtype = {2: torch.bfloat16, 4: torch.float32}[workload.element_bytes]
    with torch.device("meta"):
        network = family.training_denoiser(
            facts.release.architecture, references=facts.has_reference_layers
        )
    network.requires_grad_(False).train()
    fp32 = fp32_parts(network)
    for name, tensor in (*network.named_parameters(), *network.named_buffers()):
        if tensor.is_floating_point() and set(fp32).isdisjoint(name.split(".")):
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
    """Return a network's conditioning, batch 1 on `meta`, from the shapes of an encoded prompt without padding."""
    whole = Geometry(original_px=(64, 64), corner_px=(0, 0), target_px=(64, 64))
    extra_tensors = {
        **facts.release.geometry_conditioning(whole),
        **facts.guidance.conditioning(1.0),
    }
    shapes = {name: (shape, name.endswith("mask")) for name, shape in prompt.items()} | {
        name: (tuple(tensor.shape), not tensor.is_floating_point())
        for name, tensor in extra_tensors.items()
    }
    conditioning = {
        name: torch.empty(shape, dtype=torch.int64 if whole_numbers else dtype, device="meta")
        for name, (shape, whole_numbers) in shapes.items()
    }
    if "text_mask" in prompt:
        conditioning[TEXT_LENGTHS] = torch.tensor(prompt["text_mask"][1:])
    return conditioning


def _host_bytes(network: nn.Module) -> int:
    """Return the bytes that gradient checkpointing has moved to host memory since it was applied."""
    runners = {vars(module).get("_gradient_checkpointing_func") for module in network.modules()}
    return sum(runner.host.moved_bytes for runner in runners if isinstance(runner, BlockRunner))
