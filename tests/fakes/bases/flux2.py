"""A tiny random FLUX.2 klein base, written by the real pipeline: 2-channel latents in 2x2 squares."""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
)
from transformers import Qwen3ForCausalLM

from tests.fakes.bases import qwen3

TEXT_LAYERS = 28
"""The pipeline joins the hidden states 9, 18 and 27."""


def write_base(
    folder: Path, *, seed: int = 0, distilled: bool = False, guidance: bool = False
) -> Path:
    """Write the base and return its folder; `guidance` gives it the guidance embedding of FLUX.2-dev."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tokenizer = qwen3.tokenizer()
        transformer, vae = _transformer(guidance=guidance), _vae()
        text = Qwen3ForCausalLM(qwen3.config(layers=TEXT_LAYERS, vocabulary=len(tokenizer)))
        for network in (transformer, text):
            qwen3.enliven(network)
        vae.bn.running_mean.normal_()
        vae.bn.running_var.uniform_(0.5, 2.0)
    Flux2KleinPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
        vae=vae,
        text_encoder=text,
        tokenizer=tokenizer,
        transformer=transformer,
        is_distilled=distilled,
    ).save_pretrained(folder)
    return folder


def _transformer(*, guidance: bool) -> Flux2Transformer2DModel:
    return Flux2Transformer2DModel(
        in_channels=8,
        num_layers=1,
        num_single_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=3 * qwen3.WIDTH,
        timestep_guidance_channels=16,
        axes_dims_rope=(2, 2, 2, 2),
        guidance_embeds=guidance,
    )


def _vae() -> AutoencoderKLFlux2:
    return AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        latent_channels=2,
        layers_per_block=1,
    )
