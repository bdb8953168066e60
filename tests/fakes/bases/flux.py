"""A tiny random FLUX.1 base in diffusers layout: real classes, no download, under 1 MB.

16 latent channels as in the real one, VAE 2x down; one joint and two single blocks. `seed` changes all
weights, and so the identity of every part; `guidance_embeds` makes it dev, else it is schnell.
"""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
)
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from tests.fakes.bases.tokenizers import clip_tokenizer, t5_tokenizer

WIDTH = 16


def write_base(folder: Path, *, seed: int = 0, guidance_embeds: bool = True) -> Path:
    """Write the base into `folder` and return it."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        pipeline = FluxPipeline(
            vae=flux_vae(),
            text_encoder=_clip(len(clip_tokenizer())),
            tokenizer=clip_tokenizer(),
            text_encoder_2=t5_encoder(len(t5_tokenizer())),
            tokenizer_2=t5_tokenizer(),
            transformer=FluxTransformer2DModel(
                in_channels=64,
                num_layers=1,
                num_single_layers=2,
                attention_head_dim=16,
                num_attention_heads=2,
                joint_attention_dim=WIDTH,
                pooled_projection_dim=WIDTH,
                guidance_embeds=guidance_embeds,
                axes_dims_rope=(4, 6, 6),
            ),
            scheduler=flux_scheduler(dynamic=guidance_embeds),
        )
    pipeline.save_pretrained(folder)
    return folder


def flux_vae() -> AutoencoderKL:
    """Return a tiny VAE with FLUX.1's latent statistics and layout."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        layers_per_block=1,
        latent_channels=16,
        norm_num_groups=4,
        sample_size=32,
        mid_block_add_attention=False,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )


def t5_encoder(vocabulary: int) -> T5EncoderModel:
    """Return a tiny T5 v1.1 encoder of `WIDTH` channels."""
    return T5EncoderModel(
        T5Config(
            vocab_size=vocabulary,
            d_model=WIDTH,
            d_kv=8,
            d_ff=32,
            num_layers=1,
            num_heads=2,
            feed_forward_proj="gated-gelu",
        )
    )


def flux_scheduler(*, dynamic: bool) -> FlowMatchEulerDiscreteScheduler:
    """Return the scheduler of dev (`dynamic`) or schnell."""
    return FlowMatchEulerDiscreteScheduler(
        shift=3.0 if dynamic else 1.0,
        use_dynamic_shifting=dynamic,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256,
        max_image_seq_len=4096,
    )


def _clip(vocabulary: int) -> CLIPTextModel:
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=vocabulary,
            hidden_size=WIDTH,
            intermediate_size=32,
            projection_dim=WIDTH,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=77,
            bos_token_id=vocabulary - 2,
            eos_token_id=vocabulary - 1,
            pad_token_id=vocabulary - 1,
        )
    )
