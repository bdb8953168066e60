"""The tracer against the real thing: what autograd's own hooks see kept on the CPU, byte for byte."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from lora_trainer import families
from lora_trainer.config.learning import AdapterSettings
from lora_trainer.costs.sample_cost import SampleCost, Workload
from lora_trainer.costs.trace import (
    StepTrace,
    TracedNetwork,
    add_adapters,
    host_bytes,
    trace_forward,
    trace_step,
    traced_network,
)
from lora_trainer.families.base import Conditioning, Geometry
from lora_trainer.lora.adapter import inject
from lora_trainer.network.gradient_checkpointing import BlockRunner, apply_checkpointing
from lora_trainer.network.live_storages import FusedKernels, LiveStorages, MetaAnswers, storage_key
from tests.fakes.family_bases import CPU, facts_of

RANK = 4
FAMILIES = pytest.mark.parametrize("name", [name for name in families.MODULES if name != "sd2"])
"""The network of SD 2.x is one of SD 1.x with the linear projections of SDXL."""
DTYPES = {2: torch.bfloat16, 4: torch.float32}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors on several threads are slower, many times so beside another training."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def workload(name: str, **changes: Any) -> Workload:
    facts = facts_of(name)
    given: dict[str, Any] = {
        "height_px": 4 * facts.bucket_step_px,
        "width_px": 6 * facts.bucket_step_px,
        "element_bytes": 4,
        "rank": RANK,
        "targets": "transformer",
        "checkpointing": "none",
    }
    return Workload(**given | changes)


@cache
def text_of(name: str) -> Conditioning:
    """Return one encoded prompt."""
    encoder = families.family(name).load_text_encoder(
        facts_of(name), dtype=torch.float32, device=CPU
    )
    return encoder.encode_prompts(["a red square"])


@cache
def network_of(name: str, targets: Any, element_bytes: int, *, wide: bool) -> TracedNetwork:
    given = workload(name, targets=targets, element_bytes=element_bytes, wide_adapter=wide)
    prompt = {key: tuple(tensor.shape) for key, tensor in text_of(name).items()}
    return traced_network(families.family(name), facts_of(name), given, prompt=prompt)


@cache
def traced(name: str, given: Workload) -> SampleCost:
    wide = given.wide_adapter
    network = network_of(name, given.targets, given.element_bytes, wide=wide)
    return network.sample_cost(given, kernels_of="cpu")


@cache
def trained_network(name: str, targets: Any, element_bytes: int, *, wide: bool) -> nn.Module:
    """Return the tiny base in memory with a real adapter, or for a wide one with peft's."""
    family, dtype = families.family(name), DTYPES[element_bytes]
    network = family.load_denoiser(facts_of(name), dtype=dtype, device=CPU).train()
    if wide:
        add_adapters(network, family.lora_targets(network, targets), rank=RANK, wide=True)
        return network
    inject(
        {"denoiser": network},
        modules={"denoiser": family.lora_targets(network, targets)},
        settings=AdapterSettings(rank=RANK, targets=targets),
        alpha=RANK,
        seed=0,
    )
    for parameter in network.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    return network


class Real:
    """The tiny base in memory with a real adapter, and one micro-batch of random inputs."""

    def __init__(self, name: str, given: Workload) -> None:
        family, facts, dtype = families.family(name), facts_of(name), DTYPES[given.element_bytes]
        count, factor = given.micro_batch, facts.vae_factor
        size = (given.height_px // factor, given.width_px // factor)
        self.noisy = torch.randn(count, facts.latent_channels, *size).to(dtype)
        flow = facts.prediction == "flow"
        self.timesteps = torch.full((count,), 500, dtype=torch.float32 if flow else torch.int64)
        whole = Geometry(original_px=(64, 64), corner_px=(0, 0), target_px=(64, 64))
        told = {
            **text_of(name),
            **facts.geometry_conditioning(whole),
            **facts.guidance.conditioning(1.0),
        }
        self.conditioning: Conditioning = {
            key: (tensor.to(dtype) if tensor.is_floating_point() else tensor).repeat_interleave(
                count, 0
            )
            for key, tensor in told.items()
        }
        self.family = family
        self.network = trained_network(
            name, given.targets, given.element_bytes, wide=given.wide_adapter
        )
        self.inputs = [self.noisy, self.timesteps, *self.conditioning.values()]
        apply_checkpointing(self.network, given.checkpointing)

    def __call__(self) -> Tensor:
        return self.family.predict(self.network, self.noisy, self.timesteps, self.conditioning)

    def kept(self) -> dict[int, torch.UntypedStorage]:
        """Run forward and return the storages that hooks or checkpoints were given and that are held."""
        packed: weakref.WeakSet[Packed] = weakref.WeakSet()

        def pack(tensor: Tensor) -> Packed:
            packed.add(found := Packed(tensor.detach()))
            return found

        hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda found: found.tensor)
        with hooks, inputs_of_blocks(self.network) as handed:
            prediction = self()
        tensors = [*(found.tensor for found in packed), *handed]
        del prediction  # what a branch keeps that leads to no output was freed before
        return {storage_key(tensor): tensor.untyped_storage() for tensor in tensors}


@contextmanager
def inputs_of_blocks(network: nn.Module) -> Iterator[list[Tensor]]:
    """List what recomputed blocks are given: a checkpoint holds tensors inside tuples unseen by hooks."""
    handed: list[Tensor] = []

    def noting(run: BlockRunner) -> Callable[..., Any]:
        def call(block: nn.Module, *args: Any) -> Any:
            outputs = run(block, *args)
            # Where no output has a gradient, the checkpoint holds nothing.
            if any(leaf.requires_grad for leaf in tensors_in(outputs)):
                handed.extend(tensors_in(args))
            return outputs

        return call

    runners = {
        module: vars(module)["_gradient_checkpointing_func"]
        for module in network.modules()
        if getattr(module, "gradient_checkpointing", False)
    }
    for module, run in runners.items():
        module._gradient_checkpointing_func = noting(run)  # type: ignore[assignment]
    yield handed
    for module, run in runners.items():
        module._gradient_checkpointing_func = run


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@dataclass(eq=False)
class Packed:
    """What autograd holds in place of a tensor."""

    tensor: Tensor


def saved_by_autograd(real: Real) -> int:
    before, now = real.kept(), real.kept()
    # What two passes share is no activation: parameters, inputs, tables of positions.
    return sum(storage.nbytes() for key, storage in now.items() if key not in before)


@FAMILIES
def test_saved_bytes_of_one_image_are_those_that_autograd_is_given(name: str) -> None:
    one = workload(name, checkpointing="full", micro_batch=1, targets="attention")
    assert traced(name, one).saved_bytes == saved_by_autograd(Real(name, one)) > 0


@pytest.mark.parametrize("checkpointing", ["none", "light", "selective", "full"])
@FAMILIES
def test_saved_bytes_are_those_of_autograd_and_of_the_allocator(
    name: str, checkpointing: Any
) -> None:
    """Hooks see nothing of results that checkpoints keep; the CPU's allocator reports every byte."""
    two = workload(name, checkpointing=checkpointing, micro_batch=2, targets="all")
    real, saved_bytes = Real(name, two), 2 * traced(name, two).saved_bytes
    if checkpointing in ("none", "full"):
        assert saved_bytes == saved_by_autograd(real) > 0
    else:
        real()  # tables are made here
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as made:
        edge = torch.autograd.graph.get_gradient_edge(real())
    assert edge is not None and made.profiler is not None
    events = made.profiler.kineto_results.events()
    left = sum(event.nbytes() for event in events if event.name() == "[memory]")
    # U-Nets divide by plain numbers, each a tensor of eight bytes that autograd keeps.
    numbers = left - saved_bytes
    assert numbers % 8 == 0 and 0 <= numbers < 512


@pytest.mark.parametrize("checkpointing", ["none", "light", "selective", "full"])
@FAMILIES
def test_peaks_and_work_are_those_of_a_run_in_memory(name: str, checkpointing: Any) -> None:
    given = workload(name, checkpointing=checkpointing, micro_batch=2, targets="all")
    real, cost = Real(name, given), traced(name, given)
    with torch.no_grad():
        real()
    if checkpointing == "none":  # without gradients all levels are one
        forward_bytes = trace_forward(real.network, real, inputs=real.inputs)
        assert 2 * cost.forward_bytes == pytest.approx(
            forward_bytes, rel=0.05
        )  # tables are made here
    step = trace_step(real.network, real, inputs=real.inputs)
    assert 2 * (cost.saved_bytes + cost.temporary_bytes) == step.peak_bytes
    assert 2 * cost.adapter_saved_bytes == step.adapter_saved_bytes
    assert (2 * cost.forward_flops, 2 * cost.step_flops) == (step.forward_flops, step.step_flops)
    assert cost.kernels == pytest.approx(step.kernels, rel=0.02)


@FAMILIES
def test_offloaded_inputs_are_bytes_of_the_host_and_not_of_the_device(name: str) -> None:
    """In a run in memory both lie on the CPU."""
    given = workload(name, checkpointing="offloaded", micro_batch=2, targets="all")
    real, cost = Real(name, given), traced(name, given)
    with torch.no_grad():
        real()
    step = trace_step(real.network, real, inputs=real.inputs)
    assert 2 * cost.host_bytes == host_bytes(real.network) > 0
    assert 2 * cost.saved_bytes == step.saved_bytes - 2 * cost.host_bytes
    full = traced(name, replace(given, checkpointing="full"))
    assert cost.saved_bytes <= full.saved_bytes <= cost.saved_bytes + cost.host_bytes
    assert (cost.step_flops, full.host_bytes) == (full.step_flops, 0)


@pytest.mark.parametrize("wide", [False, True])
@FAMILIES
def test_a_16_bit_base_keeps_fp32_copies_for_a_wide_adapter_only(name: str, wide: bool) -> None:
    """CPU and meta differ in the dtype of a layer norm's statistics, which are small."""
    given = workload(name, element_bytes=2, wide_adapter=wide)
    real, cost = Real(name, given), traced(name, given)
    with torch.no_grad():
        real()
    middles: list[int] = []
    for layer in real.network.modules():
        for down in layer.lora_A.values() if isinstance(layer, LoraLayer) else ():
            down.register_forward_hook(lambda _, __, output: middles.append(output.nbytes))
    step = trace_step(real.network, real, inputs=real.inputs)
    assert cost.saved_bytes == pytest.approx(step.saved_bytes, rel=0.02)
    assert cost.adapter_saved_bytes == step.adapter_saved_bytes
    assert (cost.adapter_saved_bytes > 3 * sum(middles) > 0) == wide
    assert (cost.adapter_saved_bytes == 0) == (not wide)


@FAMILIES
def test_flops_are_torchs_own_count(name: str) -> None:
    given = workload(name, micro_batch=2, targets="all")
    real = Real(name, given)
    with FlopCounterMode(display=False) as counter:
        counter.flop_registry[torch.ops.aten.addmm_] = flop_registry[torch.ops.aten.addmm]
        real().float().mean().backward()
    assert 2 * traced(name, given).step_flops == counter.get_total_flops()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_attention_on_cuda_keeps_no_scores(masked: bool, element_bytes: int) -> None:
    tokens, channels, heads = 512, 32, 2
    shape = (1, heads, tokens, channels)
    kept = tuple(torch.empty(shape, dtype=DTYPES[element_bytes], device="meta") for _ in range(3))
    query, key, value = (tensor.requires_grad_() for tensor in kept)
    mask = torch.ones(1, 1, 1, tokens, dtype=torch.bool, device="meta") if masked else None

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    step = trace_step(nn.Module(), forward, inputs=kept)
    output = heads * tokens * channels * element_bytes
    log_sums = 4 * heads * tokens
    assert output <= step.saved_bytes <= output + log_sums + 4 * tokens + 64
    assert step.forward_flops == 4 * heads * tokens * tokens * channels


def test_rms_norm_on_cuda_is_one_kernel_that_keeps_its_input() -> None:
    x = torch.empty(6, 10, dtype=torch.bfloat16, device="meta")
    weight = torch.ones(10, dtype=torch.bfloat16, device="meta")
    source = torch.empty(6, 10, dtype=torch.bfloat16, device="meta").requires_grad_()
    step = trace_step(
        nn.Module(), lambda: F.rms_norm(source * x, (10,), weight), inputs=[x, weight, source]
    )
    assert step.saved_bytes == 6 * 10 * 2 + 6 * 4
    assert step.kernels == 2 + 1 + 2  # product and norm, the gradient they start from, and theirs


def test_real_tensors_pass_through_the_modes() -> None:
    q = torch.randn(1, 2, 5, 8)
    plain = F.scaled_dot_product_attention(q, q, q)
    with FusedKernels("cuda"), LiveStorages():
        assert torch.equal(F.scaled_dot_product_attention(q, q, q), plain)
        assert torch.equal(F.rms_norm(q, (8,)), F.rms_norm(q.clone(), (8,)))
        assert torch.arange(3).tolist() == torch.arange(3).tolist() == [0, 1, 2]


class Seen(MetaAnswers):
    """Notes which kernels were really asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Any] = []

    def __call__(self, function: Any, args: Any, kwargs: Any) -> Any:
        def asking(*args: Any, **kwargs: Any) -> Any:
            self.asked.append(function)
            return function(*args, **kwargs)

        return super().__call__(_Named(function, asking), args, kwargs)


class _Named:
    """A function that counts and is told apart by what it counts."""

    def __init__(self, function: Any, call: Callable[..., Any]) -> None:
        self.function, self.call = function, call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)

    def __hash__(self) -> int:
        return hash(self.function)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Named) and self.function is other.function


def test_a_repeated_call_is_answered_from_memory_and_another_is_not() -> None:
    answers, add = Seen(), torch.ops.aten.add.Tensor
    whole = torch.empty(4, 6, dtype=torch.int64, device="meta")
    first = answers(add, (whole, 1), {})
    again = answers(add, (whole, 1), {})
    assert len(answers.asked) == 1
    assert (again.shape, again.stride(), again.dtype) == (first.shape, first.stride(), first.dtype)
    assert storage_key(again) != storage_key(first)
    assert answers(add, (whole, 1.0), {}).dtype == torch.float32
    assert answers(add, (whole.t(), 1), {}).stride() == (1, 6)
    assert answers(add, (whole.int(), 1), {}).dtype == torch.int32
    assert answers(add, (whole[:2], 1), {}).shape == (2, 6)
    assert answers(add, (torch.ones(2), 1), {}).tolist() == [2.0, 2.0]
    assert answers(add, (torch.zeros(2), 1), {}).tolist() == [1.0, 1.0]
    assert len(answers.asked) == 7


def test_live_storages_count_what_is_made_inside_once_and_while_it_lives() -> None:
    before, left, right = torch.zeros(10), torch.zeros(2, 3), torch.zeros(3, 5)
    with LiveStorages([torch.zeros(1)]) as live:
        doubled = before + before
        assert live.now_bytes == 40
        half = doubled[:5].view(5, 1)
        before.add_(1)
        assert (live.now_bytes, live.kernels) == (40, 2)
        wide = doubled.double()
        assert live.now_bytes == live.peak_bytes == 120
        live.mark(wide)
        live.mark(before)
        assert live.marked_bytes == 80
        del wide, doubled
        assert (live.now_bytes, live.marked_bytes) == (40, 0)  # a view holds its storage
        del half
        assert live.now_bytes == 0
        torch.mm(left, right)
    assert live.peak_bytes == 120
    assert live.flops == 2 * 2 * 3 * 5


def test_a_step_says_what_it_is() -> None:
    """One product: its factor is kept, the forward FLOPs come again for the gradient of that factor."""
    weight = torch.zeros(3, 5, requires_grad=True)
    x = torch.zeros(2, 3)
    step = trace_step(nn.Module(), lambda: (x + 1) @ weight, inputs=[x, weight])
    assert step == StepTrace(
        saved_bytes=2 * 3 * 4,
        adapter_saved_bytes=0,
        peak_bytes=step.peak_bytes,
        forward_flops=2 * 2 * 3 * 5,
        step_flops=2 * 2 * 2 * 3 * 5,
        kernels=step.kernels,
    )
    assert step.peak_bytes >= (2 * 3 + 2 * 5 + 3 * 5) * 4
