"""A tiny random Chroma base: FLUX.1's VAE and T5, one joint and two single blocks."""

from __future__ import annotations

import warnings
from pathlib import Path

from diffusers import ChromaPipeline, ChromaTransformer2DModel

from tests.fakes.bases.flux import NETWORK, flux_scheduler, flux_vae
from tests.fakes.bases.parts import saved, t5_tokenizer, tiny_t5


def write_base(folder: Path, *, seed: int = 0) -> Path:
    """Write the base into `folder` and return it."""

    def build() -> ChromaPipeline:
        return ChromaPipeline(
            vae=flux_vae(),
            text_encoder=tiny_t5(),
            tokenizer=t5_tokenizer(),
            transformer=ChromaTransformer2DModel(
                **NETWORK,
                approximator_num_channels=16,
                approximator_hidden_dim=32,
                approximator_layers=2,
            ),
            scheduler=flux_scheduler(dynamic=True),
        )

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`FluxPosEmbed` is deprecated")  # by diffusers
        return saved(folder, seed=seed, build=build)
