"""A tiny random SDXL base: two CLIP encoders, three levels of two resnets as the release has, 16 px native."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diffusers import StableDiffusionXLPipeline
from transformers import CLIPTextModel, CLIPTextModelWithProjection

from tests.fakes.bases.parts import clip_tokenizer, saved, tiny_clip, tiny_vae
from tests.fakes.tiny_base import ddim, tiny_unet

WIDTHS, POOLED, TIME_WIDTH = (8, 12), 16, 4


def write_base(folder: Path, *, seed: int = 0) -> Path:
    """Write the base into `folder` and return it."""
    return saved(folder, seed=seed, build=_pipeline)


def _pipeline() -> StableDiffusionXLPipeline:
    first, second = clip_tokenizer(), clip_tokenizer()
    second.pad_token = "!"  # as in the release: only the first pads with the end of text
    # Prompts should matter: the U-Net reads what no norm has scaled.
    options: dict[str, Any] = {
        "projection_dim": POOLED,
        "num_hidden_layers": 2,
        "initializer_factor": 3.0,
    }
    return StableDiffusionXLPipeline(
        vae=tiny_vae(
            latent_channels=4,
            sample_size=16,
            mid_block_add_attention=False,
            scaling_factor=0.13025,
            force_upcast=True,
        ),
        text_encoder=tiny_clip(CLIPTextModel, width=WIDTHS[0], **options),
        text_encoder_2=tiny_clip(CLIPTextModelWithProjection, width=WIDTHS[1], **options),
        tokenizer=first,
        tokenizer_2=second,
        unet=tiny_unet(
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
            block_out_channels=(4, 8, 8),
            layers_per_block=2,
            transformer_layers_per_block=[1, 1, 2],
            cross_attention_dim=sum(WIDTHS),
            attention_head_dim=[1, 2, 2],
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=TIME_WIDTH,
            projection_class_embeddings_input_dim=POOLED + 6 * TIME_WIDTH,
        ),
        scheduler=ddim("epsilon"),
        force_zeros_for_empty_prompt=True,
        add_watermarker=False,
    )
