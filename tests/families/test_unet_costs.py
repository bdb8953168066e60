"""Cost formulas against the real network: parameters exactly, memory by counting live tensors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from peft import LoraConfig
from torch import Tensor

from lora_trainer.common.errors import InputError
from lora_trainer.config.config import CHECKPOINTING, Checkpointing
from lora_trainer.costs.sample_cost import SampleCost, Targets, Workload
from lora_trainer.costs.unet_cost import (
    adapter_layers,
    adapter_parameters,
    layers,
    parameters,
    prompt_shapes,
    sample_cost,
)
from lora_trainer.families import family
from lora_trainer.families.sdxl import ARCHITECTURE as SDXL_UNET
from lora_trainer.network.checkpointing import apply_checkpointing
from lora_trainer.tracing.trace import (
    StepTrace,
    TracedNetwork,
    add_adapters,
    trace_forward,
    trace_step,
    traced_network,
)
from tests.fakes.stable_diffusion import MINI_UNET, SD15_UNET

SMALL_UNET = {
    "block_out_channels": [32, 64],
    "layers_per_block": 1,
    "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
    "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
    "cross_attention_dim": 48,
    "attention_head_dim": 4,
    "norm_num_groups": 8,
    "sample_size": 16,
    "use_linear_projection": True,
}
MID_UNET = {
    **SD15_UNET,
    "block_out_channels": [32, 64, 96, 96],
    "layers_per_block": [1, 2, 1, 1],
    "cross_attention_dim": 40,
    "attention_head_dim": 4,
    "norm_num_groups": 8,
    "transformer_layers_per_block": [1, 2, 1, 1],
}
XL_UNET = {
    **SDXL_UNET,
    "block_out_channels": [16, 32, 64],
    "transformer_layers_per_block": [1, 1, 3],
    "cross_attention_dim": 24,
    "attention_head_dim": [1, 2, 4],
    "norm_num_groups": 8,
    "addition_time_embed_dim": 8,
    "projection_class_embeddings_input_dim": 6 * 8 + 20,
}
SD2_UNET = {
    **SD15_UNET,
    "cross_attention_dim": 1024,
    "attention_head_dim": [5, 10, 20, 20],
    "use_linear_projection": True,
}
UNETS: Mapping[str, Mapping[str, Any]] = {
    "small": SMALL_UNET,
    "mini": MINI_UNET,
    "mid": MID_UNET,
    "xl": XL_UNET,
}
REAL: Mapping[str, Mapping[str, Any]] = {"sd15": SD15_UNET, "sd2": SD2_UNET, "sdxl": SDXL_UNET}
EACH = pytest.mark.parametrize("config", [*REAL.values(), *UNETS.values()], ids=[*REAL, *UNETS])
WORKLOAD = Workload(
    height_px=512, width_px=512, element_bytes=2, rank=16, targets="attention", checkpointing="none"
)
RANK, TOKENS, BATCH, VAE_FACTOR = 4, 24, 2, 8


def sd15_cost(**changes: Any) -> SampleCost:
    return sample_cost(SD15_UNET, replace(WORKLOAD, **changes), vae_factor=8, text_tokens=77)


def xl_cost(**changes: Any) -> SampleCost:
    return sample_cost(SDXL_UNET, replace(WORKLOAD, **changes), vae_factor=8, text_tokens=77)


@EACH
def test_parameters_are_those_of_the_real_network_module_by_module(
    config: Mapping[str, Any],
) -> None:
    with torch.device("meta"):
        unet = UNet2DConditionModel(**config)
    real = {
        name: sum(parameter.numel() for parameter in module.parameters(recurse=False))
        for name, module in unet.named_modules()
        if list(module.parameters(recurse=False))
    }
    assert {layer.name: layer.parameters for layer in layers(config)} == real


@pytest.mark.parametrize(
    ("name", "count"), [("sd15", 859_520_964), ("sd2", 865_910_724), ("sdxl", 2_567_463_684)]
)
def test_releases_have_their_published_parameter_counts(name: str, count: int) -> None:
    assert sum(parameters(REAL[name]).values()) == count


def test_sdxl_adapts_the_modules_that_sd_scripts_adapts() -> None:
    """722 linear layers, 42.6 million parameters at rank 16: counted on its network."""
    assert len(adapter_layers(SDXL_UNET, targets="transformer")) == 722
    found = adapter_parameters(SDXL_UNET, rank=16, targets="transformer")
    assert found == 42_557_440


@pytest.mark.parametrize("targets", ["attention", "transformer", "all"])
def test_adapter_parameters_are_those_of_peft(targets: Targets) -> None:
    adapted = adapter_layers(MID_UNET, targets=targets)
    with torch.device("meta"):
        unet = UNet2DConditionModel(**MID_UNET)
        unet.add_adapter(LoraConfig(r=8, target_modules=[layer.name for layer in adapted]))
    real = sum(p.numel() for name, p in unet.named_parameters() if "lora_" in name)
    assert adapter_parameters(MID_UNET, rank=8, targets=targets) == real


@pytest.mark.parametrize("targets", ["attention", "transformer", "all"])
@EACH
def test_the_layers_counted_are_those_that_get_an_adapter(
    config: Mapping[str, Any], targets: Targets
) -> None:
    with torch.device("meta"):
        unet = UNet2DConditionModel(**config)
    counted = {layer.name for layer in adapter_layers(config, targets=targets)}
    assert set(family("sd15").lora_targets(unet, targets)) == counted


def test_targets_grow_and_all_is_everything_but_norms_time_and_the_ends() -> None:
    names = {
        targets: {layer.name for layer in adapter_layers(SD15_UNET, targets=targets)}
        for targets in ("attention", "transformer", "all")
    }
    assert names["attention"] < names["transformer"] < names["all"]
    left = {layer.name for layer in layers(SD15_UNET) if layer.group != "norm"} - names["all"]
    assert left == {"conv_in", "conv_out", "time_embedding.linear_1", "time_embedding.linear_2"}


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Tiny tensors on several threads are slower, many times so beside another training."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def measure(config: Mapping[str, Any], workload: Workload) -> tuple[StepTrace, int]:
    """Trace a step, and the peak of a pass without gradients, of `BATCH` samples on a GPU's kernels.

    tests/model/test_trace.py holds the tracer against what autograd keeps of a network in memory.
    """
    dtype = torch.float32 if workload.element_bytes == 4 else torch.bfloat16
    with torch.device("meta"):
        unet = UNet2DConditionModel(**config).requires_grad_(False).train()
    for parameter in unet.parameters():
        parameter.data = parameter.data.to(dtype)
    names = [layer.name for layer in adapter_layers(config, targets=workload.targets)]
    add_adapters(unet, names, rank=workload.rank, wide=workload.wide_adapter)
    apply_checkpointing(unet, workload.checkpointing)
    height, width = workload.height_px // VAE_FACTOR, workload.width_px // VAE_FACTOR
    with torch.device("meta"):
        inputs = (
            torch.empty(BATCH, 4, height, width, dtype=dtype),
            torch.empty(BATCH, dtype=torch.int64),
            torch.empty(BATCH, TOKENS, config["cross_attention_dim"], dtype=dtype),
        )
        added = _added(config, dtype)

    def forward() -> Tensor:
        prediction: Tensor = unet(*inputs, added_cond_kwargs=added).sample
        return prediction

    given = [*inputs, *added.values()]
    return trace_step(unet, forward, inputs=given), trace_forward(unet, forward, inputs=given)


def _added(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Tensor]:
    if not config.get("addition_embed_type"):
        return {}
    width = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
    return {
        "text_embeds": torch.empty(BATCH, width, dtype=dtype),
        "time_ids": torch.empty(BATCH, 6, dtype=torch.int64),
    }


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize(
    ("name", "targets", "element_bytes", "size", "wide"),
    [
        ("small", "attention", 4, (128, 128), True),
        ("small", "all", 2, (128, 192), False),
        ("mini", "transformer", 4, (128, 128), False),
        ("mid", "attention", 2, (128, 128), True),
        ("mid", "attention", 2, (128, 128), False),
        ("xl", "transformer", 2, (128, 160), False),
        # 9 x 13 latents: halving rounds up, the way up matches
        ("mid", "all", 4, (72, 104), False),
        ("mid", "all", 2, (72, 104), True),
    ],
)
def test_memory_is_what_a_trace_of_the_network_counts(
    name: str,
    targets: Targets,
    element_bytes: int,
    size: tuple[int, int],
    wide: bool,
    checkpointing: Checkpointing,
) -> None:
    workload = Workload(
        wide_adapter=wide,
        height_px=size[0],
        width_px=size[1],
        element_bytes=element_bytes,
        rank=RANK,
        targets=targets,
        checkpointing=checkpointing,
    )
    step, forward_bytes = measure(UNETS[name], workload)
    cost = sample_cost(UNETS[name], workload, vae_factor=VAE_FACTOR, text_tokens=TOKENS)
    assert BATCH * cost.saved_bytes == pytest.approx(step.saved_bytes, rel=0.01)
    assert BATCH * (cost.saved_bytes + cost.temporary_bytes) == pytest.approx(
        step.peak_bytes, rel=0.03
    )
    assert BATCH * cost.forward_bytes == pytest.approx(forward_bytes, rel=0.03)
    assert BATCH * cost.step_flops == pytest.approx(step.step_flops, rel=0.01)


@cache
def network_of(name: str) -> TracedNetwork:
    given = family(name)
    facts = given.facts_from_hub_id(given.default_source)
    assert facts is not None
    prompt = prompt_shapes(facts.architecture, text_tokens=facts.max_tokens)
    return traced_network(given, facts, replace(WORKLOAD, targets="transformer"), prompt=prompt)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("name", "checkpointing"), [*(("sd15", kind) for kind in CHECKPOINTING), ("sdxl", "full")]
)
def test_the_true_size_costs_what_a_trace_of_it_says(
    name: str, checkpointing: Checkpointing
) -> None:
    traced = network_of(name)
    workload = replace(
        WORKLOAD,
        width_px=832,
        height_px=640,
        targets="transformer",
        checkpointing=checkpointing,
        micro_batch=2,
    )
    fresh, cost = traced.sample_cost(workload), family(name).sample_cost(traced.facts, workload)
    assert cost.saved_bytes == pytest.approx(fresh.saved_bytes, rel=0.005)
    assert cost.adapter_saved_bytes == pytest.approx(fresh.adapter_saved_bytes, rel=0.005)
    assert cost.saved_bytes + cost.temporary_bytes == pytest.approx(
        fresh.saved_bytes + fresh.temporary_bytes, rel=0.005
    )
    assert cost.forward_bytes == pytest.approx(fresh.forward_bytes, rel=0.005)
    assert cost.host_bytes == pytest.approx(fresh.host_bytes, rel=0.005)
    assert cost.forward_flops == pytest.approx(fresh.forward_flops, rel=0.001)
    assert cost.step_flops == pytest.approx(fresh.step_flops, rel=0.001)
    assert cost.kernels == pytest.approx(fresh.kernels, rel=0.15)


def test_nothing_is_kept_without_an_adapter() -> None:
    assert sd15_cost(rank=0).saved_bytes == 0
    assert sd15_cost(rank=0).step_flops == sd15_cost(rank=0).forward_flops


def test_only_a_wide_adapter_keeps_fp32_copies_and_only_beside_a_16_bit_base() -> None:
    half, full = sd15_cost(wide_adapter=True), sd15_cost(wide_adapter=True, element_bytes=4)
    tokens, middles = 4096 + 1024 + 256 + 64, 4 * 16
    assert half.adapter_saved_bytes > 10 * full.adapter_saved_bytes > 0
    assert full.adapter_saved_bytes > tokens * middles
    assert sd15_cost().adapter_saved_bytes == sd15_cost(element_bytes=4).adapter_saved_bytes == 0
    assert sd15_cost().saved_bytes < half.saved_bytes - half.adapter_saved_bytes / 2


def test_flops_agree_with_those_counted_on_the_real_network() -> None:
    """Traced with torch's FlopCounterMode at 512 px: 0.81 forward, 1.80 for the whole step, 2.38 recomputing."""
    cost = sd15_cost()
    assert cost.forward_flops / 1e12 == pytest.approx(0.81, rel=0.02)
    assert cost.step_flops / 1e12 == pytest.approx(1.80, rel=0.02)
    recomputed = sd15_cost(checkpointing="full").step_flops
    assert recomputed / 1e12 == pytest.approx(2.38, rel=0.01)


def test_sdxl_flops_agree_with_those_counted_on_the_real_network() -> None:
    """Traced likewise at 1024 px with rank 16: 6.80 forward without the adapter, 14.69 a step."""
    size = {"height_px": 1024, "width_px": 1024, "targets": "transformer"}
    bare = xl_cost(rank=0, **size)
    assert bare.forward_flops / 1e12 == pytest.approx(6.80, rel=0.01)
    assert xl_cost(**size).step_flops / 1e12 == pytest.approx(14.69, rel=0.01)
    assert bare.conditioning_bytes == (77 * 2048 + 1280) * 4


def test_everything_grows_with_the_picture_and_the_text() -> None:
    small, large = sd15_cost(height_px=256), sd15_cost()
    assert small.saved_bytes < large.saved_bytes
    assert small.forward_flops < large.forward_flops
    assert large.conditioning_bytes == 77 * 768 * 4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"class_embed_type": "timestep"}, "class_embed_type='timestep'"),
        ({"addition_embed_type": "text"}, "addition_embed_type='text'"),
        ({"down_block_types": ["DownBlock2D", "AttnDownBlock2D"]}, "AttnDownBlock2D"),
    ],
)
def test_a_network_it_does_not_know_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        parameters({**SMALL_UNET, **change})


def test_it_needs_no_torch() -> None:
    code = "import sys, lora_trainer.costs.unet_cost; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
