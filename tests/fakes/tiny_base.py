"""A tiny random Stable Diffusion 1.x base in diffusers layout: real classes, no download, under 1 MB.

16 px native, VAE 2x down, one attention head; a training step takes milliseconds. Its tokenizer is
the embedded base's. `seed` changes all weights, and so the identity of every part.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from diffusers import DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextModel

from tests.fakes.bases.parts import clip_tokenizer, saved, tiny_clip, tiny_vae


def write_tiny_base(
    folder: Path,
    *,
    seed: int = 0,
    prediction: str = "epsilon",
    text: Callable[[], Any] = lambda: tiny_clip(CLIPTextModel),
    vae_attention: bool = False,
    **unet: Any,
) -> Path:
    """Write the base into `folder` and return it; `unet` changes its U-Net's configuration."""

    def build() -> StableDiffusionPipeline:
        return StableDiffusionPipeline(
            vae=tiny_vae(
                latent_channels=4,
                sample_size=16,
                mid_block_add_attention=vae_attention,
                scaling_factor=0.5,
            ),
            text_encoder=text(),
            tokenizer=clip_tokenizer(),
            unet=tiny_unet(**unet),
            scheduler=ddim(prediction),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )

    return saved(folder, seed=seed, build=build)


def tiny_unet(**config: Any) -> UNet2DConditionModel:
    """Return a U-Net of two levels unless `config` has others; the last has no attention, as in a release."""
    options: dict[str, Any] = {
        "sample_size": 8,
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "block_out_channels": (8, 16),
        "layers_per_block": 1,
        "cross_attention_dim": 16,
        "attention_head_dim": 2,
        "norm_num_groups": 4,
    }
    return UNet2DConditionModel(**options | config)


def ddim(prediction: str) -> DDIMScheduler:
    """Return a sampler with the noise levels of Stable Diffusion."""
    return DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
        prediction_type=prediction,
    )
