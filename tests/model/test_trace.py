"""The tracer against the real thing: bytes of the CPU's allocator, a step in memory."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from lora_trainer import families
from lora_trainer.config.declare import CHECKPOINTING
from lora_trainer.config.learning import AdapterSettings
from lora_trainer.costs.sample_cost import Workload
from lora_trainer.costs.trace import (
    LiveStorages,
    add_adapters,
    trace_forward,
    trace_step,
    traced_network,
)
from lora_trainer.lora.adapter import inject
from lora_trainer.network.gradient_checkpointing import apply_checkpointing
from tests.fakes.family_bases import encoder_of, facts_of, told_of
from tests.fakes.family_bases import network_of as load

RANK, PROMPT = 4, "a red square"
OTHERS = [name for name in families.NAMES if name not in ("sd15", "sd2", "flux")]
"""The network of SD 2.x is one of SD 1.x with the linear projections of SDXL."""
DTYPES = {2: torch.bfloat16, 4: torch.float32}


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
def network_of(name: str, targets: Any, element_bytes: int, *, wide: bool) -> Any:
    given = workload(name, targets=targets, element_bytes=element_bytes, wide_adapter=wide)
    text = encoder_of(facts_of(name)).encode_prompts([PROMPT])
    prompt = {key: tuple(tensor.shape) for key, tensor in text.items()}
    return traced_network(families.family(name), facts_of(name), given, prompt=prompt)


@cache
def traced(name: str, given: Workload) -> Any:
    wide = given.wide_adapter
    network = network_of(name, given.targets, given.element_bytes, wide=wide)
    return network.sample_cost(given, kernels_of="cpu")


class Real:
    """The tiny base in memory with a real adapter, for a wide one peft's, and one micro-batch of random inputs."""

    def __init__(self, name: str, given: Workload) -> None:
        family, facts, dtype = families.family(name), facts_of(name), DTYPES[given.element_bytes]
        count, factor = given.micro_batch, facts.vae_factor
        size = (given.height_px // factor, given.width_px // factor)
        self.noisy = torch.randn(count, facts.latent_channels, *size).to(dtype)
        flow = facts.release.prediction == "flow"
        self.timesteps = torch.full((count,), 500, dtype=torch.float32 if flow else torch.int64)
        self.conditioning = {
            key: tensor.to(dtype) if tensor.is_floating_point() else tensor
            for key, tensor in told_of(name, (PROMPT,) * count).items()
        }
        self.family, self.network = family, load(facts, dtype).train()
        modules = family.lora_targets(self.network, given.targets)
        if given.wide_adapter:
            add_adapters(self.network, modules, rank=RANK, wide=True)
        else:
            settings = AdapterSettings(rank=RANK, targets=given.targets)
            by_part = {"denoiser": modules}
            inject(
                {"denoiser": self.network}, modules=by_part, settings=settings, alpha=RANK, seed=0
            )
            for parameter in self.network.parameters():
                if parameter.requires_grad:
                    parameter.grad = torch.zeros_like(parameter)
        self.inputs = [self.noisy, self.timesteps, *self.conditioning.values()]
        apply_checkpointing(self.network, given.checkpointing)

    def __call__(self) -> Tensor:
        return self.family.predict(self.network, self.noisy, self.timesteps, self.conditioning)


@pytest.mark.parametrize(
    ("name", "checkpointing"),
    [
        *itertools.product(("sd15", "flux"), CHECKPOINTING),
        *itertools.product(OTHERS, ("none",)),
        ("zimage", "selective"),
        ("qwen", "offloaded"),
        ("sd3", "light"),
    ],
)
def test_bytes_and_work_are_those_of_a_run_in_memory(name: str, checkpointing: Any) -> None:
    """What is saved is what the CPU's allocator reports, also of results that checkpoints keep.

    In memory offloaded inputs lie on the CPU too; on a GPU they are bytes of the host.
    """
    given = workload(name, checkpointing=checkpointing, micro_batch=2, targets="all")
    real, cost = Real(name, given), traced(name, given)
    with torch.no_grad():
        real()
    if checkpointing == "none":  # without gradients all levels are one
        forward_bytes = trace_forward(real.network, real, inputs=real.inputs)
        expected = pytest.approx(forward_bytes, rel=0.05)  # tables are made here
        assert 2 * cost.forward_bytes == expected
    step = trace_step(real.network, real, inputs=real.inputs)
    assert 2 * cost.host_bytes == step.host_bytes
    assert (cost.host_bytes > 0) == (checkpointing == "offloaded")
    assert 2 * (cost.saved_bytes + cost.host_bytes) == step.saved_bytes > 0
    assert 2 * cost.adapter_saved_bytes == step.adapter_saved_bytes
    assert (2 * cost.forward_flops, 2 * cost.step_flops) == (step.forward_flops, step.step_flops)
    # diffusers has ERNIE-Image's tokens before its samples: turned they are a view of one sample, a copy of several.
    assert cost.kernels == pytest.approx(step.kernels, rel=0.06 if name == "ernie" else 0.02)
    if checkpointing == "offloaded":
        full = traced(name, replace(given, checkpointing="full"))
        assert cost.saved_bytes <= full.saved_bytes <= cost.saved_bytes + cost.host_bytes
        return
    peak_bytes = step.saved_bytes + step.temporary_bytes
    assert 2 * (cost.saved_bytes + cost.temporary_bytes) == peak_bytes
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as made:
        edge = torch.autograd.graph.get_gradient_edge(real())
    assert edge is not None and made.profiler is not None
    events = made.profiler.kineto_results.events()
    left = sum(event.nbytes() for event in events if event.name() == "[memory]")
    # U-Nets divide by plain numbers, and adapters of convolutions multiply by one: eight bytes each in the graph.
    numbers = left - 2 * cost.saved_bytes
    assert numbers % 8 == 0 and 0 <= numbers < 1024


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("name", ["sd15", "flux"])
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
    assert step.temporary_bytes == 2 * 6 * 10 * 2, "gradients of its output and of its input"
    assert step.kernels == 2 + 1 + 2  # product and norm, the gradient they start from, and theirs


def test_a_backward_pass_of_an_adapter_holds_no_more_than_its_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lora_trainer.lora.adapter_layers.SMALL_LAYER", 0)
    rows, channels = 96, 8
    network = nn.Sequential(nn.Linear(channels, channels, bias=False, device="meta"))
    add_adapters(network.requires_grad_(False), ["0"], rank=RANK)
    source = torch.empty(2, rows // 2, channels, device="meta").requires_grad_()
    step = trace_step(network, lambda: network(source), inputs=[source])
    of_factors, of_middle = 2 * RANK * channels, rows * RANK
    assert step.temporary_bytes == 4 * (2 * rows * channels + of_middle + of_factors)


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


class Stack(nn.Sequential):
    """Six blocks of which each saves its input alone."""

    def __init__(self) -> None:
        super().__init__(*(nn.Linear(64, 64, bias=False, device="meta") for _ in range(6)))

    def enable_gradient_checkpointing(self, run: Any) -> None:
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        for block in self:
            x = self.run(block, x)
        return x


def test_offloaded_inputs_of_two_blocks_are_on_the_device_until_they_are_used() -> None:
    network = Stack().requires_grad_(False)
    apply_checkpointing(network, "offloaded")
    x = torch.zeros(1000, 64, device="meta", requires_grad=True)
    with LiveStorages() as live:
        y = network(x * 1)
        assert live.now_bytes == 3 * x.nbytes, "two inputs and the output"
        y.backward(torch.ones_like(y))
        assert live.peak_bytes == 4 * x.nbytes
