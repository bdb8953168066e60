"""Bases smaller than released: of middling size (half a second to a second a step on one core), and tiny.

Output is a diffusers folder with the denoiser of a small Stable Diffusion 1.x or SDXL and the tiny
encoders of the tests; `TINY` are denoisers that take a twentieth of a second. Weights are noise.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.random_bases import replace_part
from lora_trainer.families.files.locate import EMBEDDED_FOLDER
from tests.fakes.tiny_base import write_base

_CHANNELS = {"sample_size": 32, "block_out_channels": [64, 128, 256], "norm_num_groups": 32}
MID_SIZE: Mapping[str, Mapping[str, Any]] = {  # entries of the denoiser's configuration
    "sd15": {
        **_CHANNELS,
        "down_block_types": ["CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"],
        "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"],
        "layers_per_block": 2,
        "attention_head_dim": 8,
    },
    "sdxl": {
        **_CHANNELS,
        "attention_head_dim": [1, 2, 4],
        "transformer_layers_per_block": [1, 2, 4],
    },
}
NAMES = tuple(MID_SIZE)
_EMBEDDED = json.loads((EMBEDDED_FOLDER / "unet" / "config.json").read_text(encoding="utf-8"))
MINIATURE = {"sd15": {name: _EMBEDDED[name] for name in _EMBEDDED if not name.startswith("_")}}
"""Entries of the denoiser's configuration that make it the embedded base's."""
TINY: Mapping[str, Mapping[str, Any]] = {
    "sd15": {
        "sample_size": 8,
        "block_out_channels": [32, 64],
        "down_block_types": ["CrossAttnDownBlock2D", "DownBlock2D"],
        "up_block_types": ["UpBlock2D", "CrossAttnUpBlock2D"],
        "layers_per_block": 1,
        "cross_attention_dim": 32,
    },
    "zimage": {
        "dim": 48,
        "n_layers": 4,
        "n_refiner_layers": 1,
        "n_heads": 2,
        "n_kv_heads": 2,
        "cap_feat_dim": 32,
        "axes_dims": [8, 8, 8],
    },
    "flux": {
        "num_layers": 1,
        "num_single_layers": 2,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": 32,
        "pooled_projection_dim": 32,
        "axes_dims_rope": [4, 6, 6],
    },
}
"""Entries of the denoiser's configuration, so small that a step shows whether it runs, not how fast."""


def write_mid_size(name: str, folder: Path) -> Path:
    """Write the base of one of `NAMES` into `folder` and return it; the same bits every time."""
    write_base(name, folder)
    torch.manual_seed(0)
    replace_part(folder / "unet", MID_SIZE[name], device=torch.device("cpu"), dtype=torch.float32)
    return folder
