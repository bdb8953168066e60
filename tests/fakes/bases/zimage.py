"""A tiny random Z-Image base, written by the real pipeline: 4-channel latents, 16 channels inside."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    ZImagePipeline,
    ZImageTransformer2DModel,
)
from transformers import Qwen3Model

from tests.fakes.bases import qwen3


def write_base(folder: Path, *, seed: int = 0, shift: float = 6.0) -> Path:
    """Write the base and return its folder; `shift` 3 makes it a Turbo."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tokenizer = qwen3.tokenizer()
        transformer, vae = _transformer(), _vae()
        text_encoder = Qwen3Model(qwen3.config(layers=3, vocabulary=len(tokenizer)))
        for network in (transformer, text_encoder):
            qwen3.enliven(network)
    ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=shift),
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        transformer=transformer,
    ).save_pretrained(folder)
    return folder


def _transformer() -> ZImageTransformer2DModel:
    return ZImageTransformer2DModel(
        in_channels=4,
        dim=16,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=qwen3.WIDTH,
        axes_dims=[4, 2, 2],
        axes_lens=[1024, 64, 64],
    )


def _vae() -> AutoencoderKL:
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        latent_channels=4,
        scaling_factor=0.3611,
        shift_factor=0.1159,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
