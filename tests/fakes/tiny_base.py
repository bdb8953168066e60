"""A tiny random Stable Diffusion 1.x base in diffusers layout: real classes, no download, under 1 MB.

16 px native, VAE 2x down, one attention head; a training step takes milliseconds. Its tokenizer is
the embedded base's. `seed` changes all weights, and so the identity of every part.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from lora_trainer.families.locate import EMBEDDED_FOLDER


def write_tiny_base(folder: Path, *, seed: int = 0, prediction: str = "epsilon") -> Path:
    """Write the base into `folder` and return it."""
    tokenizer = CLIPTokenizer.from_pretrained(EMBEDDED_FOLDER, subfolder="tokenizer")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        pipeline = StableDiffusionPipeline(
            vae=_vae(),
            text_encoder=_text_encoder(len(tokenizer)),
            tokenizer=tokenizer,
            unet=_unet(),
            scheduler=DDIMScheduler(
                beta_start=0.00085,
                beta_end=0.012,
                beta_schedule="scaled_linear",
                clip_sample=False,
                set_alpha_to_one=False,
                steps_offset=1,
                prediction_type=prediction,
            ),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
    pipeline.save_pretrained(folder)
    return folder


def copy_base(base: Path, folder: Path) -> Path:
    """Copy a base, for a test that changes it."""
    shutil.copytree(base, folder)
    return folder


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
        scaling_factor=0.5,
    )


def _unet() -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),  # as the last level of a release
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        block_out_channels=(8, 16),
        layers_per_block=1,
        cross_attention_dim=16,
        attention_head_dim=2,
        norm_num_groups=4,
    )


def _text_encoder(vocabulary: int) -> CLIPTextModel:
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=vocabulary,
            hidden_size=16,
            intermediate_size=32,
            projection_dim=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=77,
            bos_token_id=vocabulary - 2,
            eos_token_id=vocabulary - 1,
            pad_token_id=vocabulary - 1,
        )
    )
