"""A tiny random Lumina-Image 2.0 base, written by the real pipeline: 4-channel latents, 16 channels inside.

The VAE has the real one's factor of 8, which the pipeline assumes.
"""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    Lumina2Pipeline,
    Lumina2Transformer2DModel,
)
from transformers import Gemma2Config, Gemma2Model

from tests.fakes.bases.qwen3 import enliven
from tests.fakes.bases.tokenizers import gemma_tokenizer

WIDTH = 16


def write_base(folder: Path, *, seed: int = 0) -> Path:
    """Write the base and return its folder."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tokenizer = gemma_tokenizer()
        transformer, vae = _transformer(), _vae()
        text_encoder = Gemma2Model(_text_config(vocabulary=len(tokenizer)))
        for network in (transformer, text_encoder):
            enliven(network)
    Lumina2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0),
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer,
    ).save_pretrained(folder)
    return folder


def _transformer() -> Lumina2Transformer2DModel:
    return Lumina2Transformer2DModel(
        in_channels=4,
        hidden_size=WIDTH,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=2,
        num_kv_heads=1,
        multiple_of=8,
        axes_dim_rope=(4, 2, 2),
        axes_lens=(300, 64, 64),
        cap_feat_dim=WIDTH,
    )


def _text_config(*, vocabulary: int) -> Gemma2Config:
    return Gemma2Config(
        vocab_size=vocabulary,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        query_pre_attn_scalar=8,
        max_position_embeddings=1024,
    )


def _vae() -> AutoencoderKL:
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(8,) * 4,
        norm_num_groups=4,
        latent_channels=4,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
