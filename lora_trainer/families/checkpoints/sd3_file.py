"""The denoiser's configuration of a Stable Diffusion 3 checkpoint in ComfyUI's layout. Torch-free."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_trainer.common.errors import InputError
from lora_trainer.families.checkpoints.base_folder import AGAIN, read_header
from lora_trainer.families.checkpoints.transformer_file import part_tensors


def file_architecture(file: Path, *, head_channels: int) -> Mapping[str, Any]:
    """Derive the configuration from the shapes in a file; raises InputError when tensors are missing."""
    tensors = part_tensors(read_header(file), "denoiser")
    shapes = {name: info.shape for name, info in tensors.items()}
    blocks = {
        int(match[1]) for name in shapes if (match := re.match(r"joint_blocks\.(\d+)\.", name))
    }
    dual = {block for block in blocks if f"joint_blocks.{block}.x_block.attn2.qkv.weight" in shapes}
    normed = "joint_blocks.0.x_block.attn.ln_q.weight" in shapes
    try:
        width, text_width = shapes["context_embedder.weight"]
        return {
            "num_layers": max(blocks) + 1,
            "num_attention_heads": width // head_channels,
            "joint_attention_dim": text_width,
            "caption_projection_dim": width,
            "pooled_projection_dim": shapes["y_embedder.mlp.0.weight"][1],
            "pos_embed_max_size": math.isqrt(shapes["pos_embed"][1]),
            "dual_attention_layers": sorted(dual),
            "qk_norm": "rms_norm" if normed else None,
        }
    except (KeyError, IndexError, ValueError) as error:
        raise InputError(f"the denoiser in {file} lacks tensors ({error})", fix=AGAIN) from None
