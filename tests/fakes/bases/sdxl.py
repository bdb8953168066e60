"""A tiny random SDXL base: two CLIP encoders, three levels of two resnets as the release has, 16 px native."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
)

from lora_trainer.families.locate import EMBEDDED_FOLDER

WIDTHS, POOLED, TIME_WIDTH = (8, 12), 16, 4


def write_base(folder: Path, *, seed: int = 0) -> Path:
    """Write the base into `folder` and return it."""
    tokenizers = [
        CLIPTokenizer.from_pretrained(EMBEDDED_FOLDER, subfolder="tokenizer") for _ in WIDTHS
    ]
    tokenizers[1].pad_token = "!"  # as in the release: only the first pads with the end of text
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config, second = [_text_config(tokenizers[0], width) for width in WIDTHS]
        pipeline = StableDiffusionXLPipeline(
            vae=_vae(),
            text_encoder=CLIPTextModel(config),
            text_encoder_2=CLIPTextModelWithProjection(second),
            tokenizer=tokenizers[0],
            tokenizer_2=tokenizers[1],
            unet=_unet(),
            scheduler=DDIMScheduler(
                beta_start=0.00085,
                beta_end=0.012,
                beta_schedule="scaled_linear",
                clip_sample=False,
                set_alpha_to_one=False,
                steps_offset=1,
            ),
            force_zeros_for_empty_prompt=True,
            add_watermarker=False,
        )
    pipeline.save_pretrained(folder)
    return folder


def _unet() -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=(4, 8, 8),
        layers_per_block=2,
        transformer_layers_per_block=[1, 1, 2],
        cross_attention_dim=sum(WIDTHS),
        attention_head_dim=[1, 2, 2],
        norm_num_groups=4,
        use_linear_projection=True,
        addition_embed_type="text_time",
        addition_time_embed_dim=TIME_WIDTH,
        projection_class_embeddings_input_dim=POOLED + 6 * TIME_WIDTH,
    )


def _vae() -> AutoencoderKL:
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=16,
        mid_block_add_attention=False,
        scaling_factor=0.13025,
        force_upcast=True,
    )


def _text_config(tokenizer: CLIPTokenizer, width: int) -> CLIPTextConfig:
    vocabulary = len(tokenizer)
    return CLIPTextConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=POOLED,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_factor=3.0,  # prompts should matter: the U-Net reads what no norm has scaled
        max_position_embeddings=77,
        bos_token_id=vocabulary - 2,
        eos_token_id=vocabulary - 1,
        pad_token_id=vocabulary - 1,
    )
