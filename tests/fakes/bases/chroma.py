"""A tiny random Chroma base in diffusers layout: real classes, no download, under 1 MB.

16 latent channels as in the real one, VAE 2x down; one joint and two single blocks. `seed` changes all
weights, and so the identity of every part.
"""

from __future__ import annotations

import warnings
from pathlib import Path

import torch
from diffusers import ChromaPipeline, ChromaTransformer2DModel

from tests.fakes.bases.flux import WIDTH, flux_scheduler, flux_vae, t5_encoder
from tests.fakes.bases.tokenizers import t5_tokenizer


def write_base(folder: Path, *, seed: int = 0) -> Path:
    """Write the base into `folder` and return it."""
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`FluxPosEmbed` is deprecated")  # by diffusers
        torch.manual_seed(seed)
        pipeline = ChromaPipeline(
            vae=flux_vae(),
            text_encoder=t5_encoder(len(t5_tokenizer())),
            tokenizer=t5_tokenizer(),
            transformer=ChromaTransformer2DModel(
                in_channels=64,
                num_layers=1,
                num_single_layers=2,
                attention_head_dim=16,
                num_attention_heads=2,
                joint_attention_dim=WIDTH,
                axes_dims_rope=(4, 6, 6),
                approximator_num_channels=16,
                approximator_hidden_dim=32,
                approximator_layers=2,
            ),
            scheduler=flux_scheduler(dynamic=True),
        )
    pipeline.save_pretrained(folder)
    return folder
