"""A tiny random FLUX.1 base: 16 latent channels as in the real one, one joint and two single blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from transformers import CLIPTextModel

from tests.fakes.bases.parts import (
    WIDTH,
    clip_tokenizer,
    flow_vae,
    saved,
    t5_tokenizer,
    tiny_clip,
    tiny_t5,
)

NETWORK: dict[str, Any] = {
    "in_channels": 64,
    "num_layers": 1,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": WIDTH,
    "axes_dims_rope": (4, 6, 6),
}


def write_base(folder: Path, *, seed: int = 0, guidance_embeds: bool = True) -> Path:
    """Write the base into `folder` and return it; `guidance_embeds` makes it dev, else it is schnell."""

    def build() -> FluxPipeline:
        return FluxPipeline(
            vae=flux_vae(),
            text_encoder=tiny_clip(CLIPTextModel),
            tokenizer=clip_tokenizer(),
            text_encoder_2=tiny_t5(),
            tokenizer_2=t5_tokenizer(),
            transformer=FluxTransformer2DModel(
                **NETWORK, pooled_projection_dim=WIDTH, guidance_embeds=guidance_embeds
            ),
            scheduler=flux_scheduler(dynamic=guidance_embeds),
        )

    return saved(folder, seed=seed, build=build)


def flux_vae() -> Any:
    return flow_vae(latent_channels=16, sample_size=32, mid_block_add_attention=False)


def flux_scheduler(*, dynamic: bool) -> FlowMatchEulerDiscreteScheduler:
    """Return the scheduler of dev (`dynamic`) or schnell."""
    return FlowMatchEulerDiscreteScheduler(
        shift=3.0 if dynamic else 1.0, use_dynamic_shifting=dynamic
    )
