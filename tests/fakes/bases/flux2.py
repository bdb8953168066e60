"""A tiny random FLUX.2 klein base, written by the real pipeline: 2-channel latents in 2x2 squares."""

from __future__ import annotations

from pathlib import Path

from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Transformer2DModel,
)
from transformers import Qwen3ForCausalLM

from tests.fakes.bases.parts import (
    WIDTH,
    enliven,
    qwen3_config,
    qwen3_tokenizer,
    saved,
    tiny_vae,
)

TEXT_LAYERS = 28
"""The pipeline joins the hidden states 9, 18 and 27."""


def write_base(
    folder: Path, *, seed: int = 0, distilled: bool = False, guidance: bool = False
) -> Path:
    """Write the base and return its folder; `guidance` gives it the guidance embedding of FLUX.2-dev."""

    def build() -> Flux2KleinPipeline:
        transformer = Flux2Transformer2DModel(
            in_channels=8,
            num_layers=1,
            num_single_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            joint_attention_dim=3 * WIDTH,
            timestep_guidance_channels=16,
            axes_dims_rope=(2, 2, 2, 2),
            guidance_embeds=guidance,
        )
        vae = tiny_vae(AutoencoderKLFlux2, latent_channels=2)
        text = Qwen3ForCausalLM(qwen3_config(layers=TEXT_LAYERS))
        enliven(transformer)
        enliven(text)
        vae.bn.running_mean.normal_()
        vae.bn.running_var.uniform_(0.5, 2.0)
        return Flux2KleinPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True),
            vae=vae,
            text_encoder=text,
            tokenizer=qwen3_tokenizer(),
            transformer=transformer,
            is_distilled=distilled,
        )

    return saved(folder, seed=seed, build=build)
