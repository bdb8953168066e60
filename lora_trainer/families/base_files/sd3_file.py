"""The denoiser's configuration of a Stable Diffusion 3 checkpoint in ComfyUI's layout. Torch-free."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_trainer.common.errors import InputError
from lora_trainer.families.base_files.base_folder import AGAIN, read_header
from lora_trainer.families.base_files.transformer_file import part_tensors


def file_architecture(file: Path, *, head_channels: int) -> Mapping[str, Any]:
    """Derive the configuration from the shapes in a file; raises InputError when tensors are missing."""
    tensors = part_tensors(read_header(file), "denoiser")
    shapes = {name: info.shape for name, info in tensors.items()}
    in_diffusers = "pos_embed.proj.weight" in shapes
    start, dual_layer, norm, positions, pooled = (
        (
            "transformer_blocks",
            "attn2.to_q",
            "attn.norm_q",
            "pos_embed.pos_embed",
            "time_text_embed.text_embedder.linear_1.weight",
        )
        if in_diffusers
        else (
            "joint_blocks",
            "x_block.attn2.qkv",
            "x_block.attn.ln_q",
            "pos_embed",
            "y_embedder.mlp.0.weight",
        )
    )
    blocks = {int(match[1]) for name in shapes if (match := re.match(rf"{start}\.(\d+)\.", name))}
    dual = {block for block in blocks if f"{start}.{block}.{dual_layer}.weight" in shapes}
    normed = f"{start}.0.{norm}.weight" in shapes
    try:
        # The text is projected to the width of the tokens, so this layer's rows give it.
        width, text_width = shapes["context_embedder.weight"]
        return {
            "num_layers": max(blocks) + 1,
            "num_attention_heads": width // head_channels,
            "joint_attention_dim": text_width,
            "caption_projection_dim": width,
            "pooled_projection_dim": shapes[pooled][1],
            # The table is [1, side * side, width].
            "pos_embed_max_size": math.isqrt(shapes[positions][1]),
            "dual_attention_layers": sorted(dual),
            "qk_norm": "rms_norm" if normed else None,
        }
    except (KeyError, IndexError, ValueError) as error:
        raise InputError(f"the denoiser in {file} lacks tensors ({error})", fix=AGAIN) from None
