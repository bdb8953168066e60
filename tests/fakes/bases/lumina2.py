"""A tiny random Lumina-Image 2.0 base, written by the real pipeline: 4-channel latents, 16 channels inside.

The VAE has the real one's factor of 8, which the pipeline assumes.
"""

from __future__ import annotations

from pathlib import Path

from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    Lumina2Pipeline,
    Lumina2Transformer2DModel,
)
from transformers import Gemma2Config, Gemma2Model

from tests.fakes.bases.parts import WIDTH, enliven, flow_vae, gemma_tokenizer, saved


def write_base(folder: Path, *, seed: int = 0) -> Path:
    """Write the base and return its folder."""
    return saved(folder, seed=seed, build=_pipeline)


def _pipeline() -> Lumina2Pipeline:
    transformer = Lumina2Transformer2DModel(
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
    text_config = Gemma2Config(
        vocab_size=len(gemma_tokenizer()),
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        query_pre_attn_scalar=8,
        max_position_embeddings=1024,
    )
    return Lumina2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0),
        vae=flow_vae(levels=4, latent_channels=4),
        text_encoder=enliven(Gemma2Model(text_config)),
        tokenizer=gemma_tokenizer(),
        transformer=enliven(transformer),
    )
