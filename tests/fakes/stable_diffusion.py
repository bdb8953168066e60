"""Facts and costs of Stable Diffusion 1.5 and of a miniature, without the family module."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lora_trainer.config.config import CHECKPOINTING, Checkpointing, Precision
from lora_trainer.costs.sample_cost import SampleCost, Targets, Workload
from lora_trainer.costs.unet_cost import adapter_layers, linear_shapes, parameters, sample_cost
from lora_trainer.families.base import BaseFacts, PartFacts
from lora_trainer.families.text.clip import ClipSize, target_shapes

SD15_UNET: Mapping[str, Any] = {
    "sample_size": 64,
    "in_channels": 4,
    "out_channels": 4,
    "down_block_types": ["CrossAttnDownBlock2D"] * 3 + ["DownBlock2D"],
    "up_block_types": ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 3,
    "block_out_channels": [320, 640, 1280, 1280],
    "layers_per_block": 2,
    "cross_attention_dim": 768,
    "attention_head_dim": 8,
}
MINI_UNET: Mapping[str, Any] = {
    "sample_size": 16,
    "down_block_types": ["CrossAttnDownBlock2D"] * 2,
    "up_block_types": ["CrossAttnUpBlock2D"] * 2,
    "block_out_channels": [64, 128],
    "layers_per_block": 1,
    "cross_attention_dim": 128,
    "attention_head_dim": [2, 4],
    "norm_num_groups": 16,
}


class UNetCosts:
    """The cost side of a family built on UNet2DConditionModel."""

    one_text_length = True
    encoding_elements_per_px = 640
    decoding_elements_per_px = 768
    blocked_elements_per_px = (640, 960)
    precisions: tuple[Precision, ...] = ("bf16", "fp16", "fp32")
    quantization_skip: tuple[str, ...] = ()
    block_pattern = r".*?\.transformer_blocks\.\d+(?=\.)"

    def adapter_shapes(
        self, facts: BaseFacts, *, targets: Targets
    ) -> Mapping[str, tuple[int, ...]]:
        found = adapter_layers(facts.architecture, targets=targets)
        return {layer.name: layer.shape for layer in found}

    def text_adapter_shapes(self, facts: BaseFacts) -> Mapping[str, Mapping[str, tuple[int, ...]]]:
        size = ClipSize(layers=12, width=768, inner=3072)
        return {"text_encoder": target_shapes(size)}

    def linear_shapes(self, facts: BaseFacts) -> Mapping[str, tuple[int, int]]:
        return linear_shapes(facts.architecture)

    def modulation_layers(self, facts: BaseFacts) -> tuple[str, ...]:
        return ()

    def guides_by_two_passes(self, facts: BaseFacts) -> bool:
        return True

    def known_checkpointing(
        self, facts: BaseFacts, *, element_bytes: int, targets: Targets, wide_adapter: bool
    ) -> tuple[Checkpointing, ...]:
        return CHECKPOINTING

    def sample_cost(self, facts: BaseFacts, workload: Workload) -> SampleCost:
        return sample_cost(
            facts.architecture,
            workload,
            vae_factor=facts.vae_factor,
            text_tokens=facts.max_tokens,
        )


class WideUNetCosts(UNetCosts):
    """What it costs in trainers that run adapters as peft does."""

    def sample_cost(self, facts: BaseFacts, workload: Workload) -> SampleCost:
        return super().sample_cost(facts, replace(workload, wide_adapter=True))


def sd15_facts() -> BaseFacts:
    """Return the facts of the public v1.5 release."""
    return BaseFacts(
        family="sd15",
        source="stable-diffusion-v1-5",
        layout=None,
        resolution_px=512,
        bucket_step_px=64,
        latent_channels=4,
        vae_factor=8,
        max_tokens=77,
        prediction="epsilon",
        parts={
            "denoiser": PartFacts(parameters=859_520_964),
            "vae": PartFacts(parameters=83_653_863),
            "text_encoder": PartFacts(parameters=123_060_480),
        },
        architecture=SD15_UNET,
    )


def mini_facts() -> BaseFacts:
    """Return the facts of a base like the embedded one: 64 px, VAE 4x down."""
    return BaseFacts(
        family="sd15",
        source="embedded",
        layout=None,
        resolution_px=64,
        bucket_step_px=8,
        latent_channels=4,
        vae_factor=4,
        max_tokens=32,
        prediction="epsilon",
        parts={
            "denoiser": PartFacts(parameters=sum(parameters(MINI_UNET).values())),
            "vae": PartFacts(parameters=770_000),
            "text_encoder": PartFacts(parameters=300_000),
        },
        architecture=MINI_UNET,
    )
