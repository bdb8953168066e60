"""A tiny random Stable Diffusion 2.x base: velocity prediction, linear projections, OpenCLIP's activation."""

from __future__ import annotations

from pathlib import Path

from transformers import CLIPTextModel

from tests.fakes.bases.parts import tiny_clip
from tests.fakes.tiny_base import write_tiny_base


def write_base(folder: Path, *, seed: int = 0) -> Path:
    """Write the base into `folder` and return it; its VAE has attention."""
    return write_tiny_base(
        folder,
        seed=seed,
        prediction="v_prediction",
        vae_attention=True,
        text=lambda: tiny_clip(
            CLIPTextModel, projection_dim=8, num_hidden_layers=2, hidden_act="gelu"
        ),
        attention_head_dim=[2, 4],
        use_linear_projection=True,
    )
