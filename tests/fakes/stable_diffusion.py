"""Facts of Stable Diffusion 1.5 and of a miniature, and the costs of other trainers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from lora_trainer import families
from lora_trainer.costs.base_costs import BaseCosts
from lora_trainer.families.facts import BaseFacts

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


SD15 = families.family("sd15")


class WideCosts(BaseCosts):
    """Costs in trainers that run every adapter as peft does."""

    @property
    def sample_cost(self) -> Callable[[Any], Any]:
        costs = BaseCosts(family=self.family, facts=self.facts)
        return lambda workload: costs.sample_cost(replace(workload, wide_adapter=True))


def sd15_facts() -> BaseFacts:
    """Return the facts of the public v1.5 release."""
    return replace(next(iter(SD15.releases.values())), source="stable-diffusion-v1-5")


def mini_facts() -> BaseFacts:
    """Return the facts of a base like the embedded one: 64 px, VAE 4x down."""
    counts = {"denoiser": 4_283_012, "vae": 770_000, "text_encoder": 300_000}
    facts = sd15_facts()
    return replace(
        facts,
        source="embedded",
        resolution_px=64,
        bucket_step_px=8,
        vae_factor=4,
        parts={name: replace(part, parameters=counts[name]) for name, part in facts.parts.items()},
        architecture=MINI_UNET,
    )
