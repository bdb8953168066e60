"""Facts of Stable Diffusion 1.5 and of a miniature, and the costs of other trainers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from lora_trainer.costs.cost_table import sample_cost
from lora_trainer.costs.sample_cost import SampleCost, Workload
from lora_trainer.families import family
from lora_trainer.families.base import BY_TWO_PASSES, BaseFacts, PartFacts
from lora_trainer.planning.loads import RememberedCosts

SD15_UNET: Mapping[str, Any] = {
    "_class_name": "UNet2DConditionModel",
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
    "_class_name": "UNet2DConditionModel",
    "sample_size": 16,
    "down_block_types": ["CrossAttnDownBlock2D"] * 2,
    "up_block_types": ["CrossAttnUpBlock2D"] * 2,
    "block_out_channels": [64, 128],
    "layers_per_block": 1,
    "cross_attention_dim": 128,
    "attention_head_dim": [2, 4],
    "norm_num_groups": 16,
}


SD15 = family("sd15")


class WideCosts(RememberedCosts):
    """Costs in trainers that run every adapter as peft does."""

    @property
    def sample_cost(self) -> Callable[[Workload], SampleCost]:
        return lambda workload: sample_cost(
            self.family, self.facts, replace(workload, wide_adapter=True)
        )


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
        guidance=BY_TWO_PASSES,
        patch=1,
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
        max_tokens=77,
        prediction="epsilon",
        guidance=BY_TWO_PASSES,
        patch=1,
        parts={
            "denoiser": PartFacts(parameters=4_283_012),
            "vae": PartFacts(parameters=770_000),
            "text_encoder": PartFacts(parameters=300_000),
        },
        architecture=MINI_UNET,
    )
