"""A tiny random Z-Image base, written by the real pipeline: 4-channel latents, 16 channels inside."""

from __future__ import annotations

from pathlib import Path

from diffusers import FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from transformers import Qwen3Model

from tests.fakes.bases.parts import (
    WIDTH,
    enliven,
    flow_vae,
    qwen3_config,
    qwen3_tokenizer,
    saved,
)


def write_base(folder: Path, *, seed: int = 0, shift: float = 6.0) -> Path:
    """Write the base and return its folder; `shift` 3 makes it a Turbo."""

    def build() -> ZImagePipeline:
        transformer = ZImageTransformer2DModel(
            in_channels=4,
            dim=16,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=2,
            n_kv_heads=2,
            cap_feat_dim=WIDTH,
            axes_dims=[4, 2, 2],
            axes_lens=[1024, 64, 64],
        )
        vae = flow_vae(latent_channels=4)
        return ZImagePipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(shift=shift),
            vae=vae,
            text_encoder=enliven(Qwen3Model(qwen3_config(layers=3))),
            tokenizer=qwen3_tokenizer(),
            transformer=enliven(transformer),
        )

    return saved(folder, seed=seed, build=build)
