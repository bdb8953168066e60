"""Stable Diffusion 1.x: one CLIP text encoder, a 4-channel VAE, a convolutional U-Net, epsilon prediction.

The embedded miniature base is of this family too: the same pipeline with small numbers. All sizes are
therefore read from the base's own configs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lora_trainer.families.base import AdapterNames, BaseRelease
from lora_trainer.families.base_files.unet_file import UNetTraits
from lora_trainer.families.facts import OPENRAIL
from lora_trainer.families.text.clip import ClipPart, ClipSize
from lora_trainer.families.unet import VAE, VAE_PARAMETERS, UNetFamily

ARCHITECTURE: Mapping[str, Any] = {
    "_class_name": "UNet2DConditionModel",
    "sample_size": 64,
    "in_channels": 4,
    "out_channels": 4,
    "down_block_types": [*["CrossAttnDownBlock2D"] * 3, "DownBlock2D"],
    "up_block_types": ["UpBlock2D", *["CrossAttnUpBlock2D"] * 3],
    "block_out_channels": [320, 640, 1280, 1280],
    "layers_per_block": 2,
    "cross_attention_dim": 768,
    # The number of heads in spite of the name (diffusers issue 2011).
    "attention_head_dim": 8,
    "norm_num_groups": 32,
}
SCHEDULER: Mapping[str, Any] = {
    "_class_name": "PNDMScheduler",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "num_train_timesteps": 1000,
    "set_alpha_to_one": False,
    "skip_prk_steps": True,
    "steps_offset": 1,
    "clip_sample": False,
}


class StableDiffusion1(UNetFamily):
    """The family of Stable Diffusion 1.1 to 1.5 and everything fine-tuned from them."""

    name = "sd15"
    texts = (
        ClipPart(
            role="clip_l",
            checkpoint="cond_stage_model.transformer.",
            released=ClipSize(layers=12, width=768, inner=3072),
        ),
    )
    published = (
        BaseRelease(
            ids=(
                "stable-diffusion-v1-5/stable-diffusion-v1-5",
                "runwayml/stable-diffusion-v1-5",
                "benjamin-paine/stable-diffusion-v1-5",
            ),
            architecture=ARCHITECTURE,
            vae=VAE,
            scheduler=SCHEDULER,
            parameters={
                "denoiser": 859_520_964,
                "vae": VAE_PARAMETERS,
                "text_encoder": 123_060_480,
            },
            max_tokens=77,
            download_bytes=4_265_000_000,
            licence=OPENRAIL,
            prediction="epsilon",
        ),
    )
    metadata = AdapterNames(kohya="sd_v1", modelspec="stable-diffusion-v1/lora")

    def owns(self, traits: UNetTraits) -> bool:
        """Return whether projections around attention are convolutions; miniature bases have any text width."""
        return traits.in_channels == 4 and not traits.linear_projection and not traits.added_width


FAMILY = StableDiffusion1()
