"""Single files of Qwen-Image: transformers with diffusers' names, VAEs with diffusers' or Wan's names.

Names and shapes in a header decide the kind of a file. Torch-free to import.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.common.errors import InputError
from lora_trainer.families.base import Header
from lora_trainer.families.base_files.transformer_file import part_tensors

if TYPE_CHECKING:
    import torch
    from torch import nn

LATENT_CHANNELS = 16
_OWN = frozenset({"img_in.weight", "txt_norm.weight", "transformer_blocks.0.img_mod.1.weight"})
_EDITING = frozenset({"__index_timestep_zero__", "time_text_embed.addition_t_embedding.weight"})


def is_text_to_image(header: Header) -> bool:
    """Return whether a file holds a denoiser without the tensors of editing and layered models."""
    names = part_tensors(header, "denoiser").keys()
    return names >= _OWN and not names & _EDITING


def is_vae(header: Header) -> bool:
    """Return whether a file holds a 16-channel Qwen-Image VAE, by its first and its middle layers."""
    for first, middle in (
        ("conv1.weight", "decoder.middle.0.residual.0.gamma"),
        ("quant_conv.weight", "decoder.mid_block.resnets.0.norm1.gamma"),
    ):
        if first in header and middle in header:
            # Mean and log variance of each latent channel go through this 1x1x1 convolution.
            return header[first].shape[:2] == (2 * LATENT_CHANNELS, 2 * LATENT_CHANNELS)
    return False


def count_blocks(header: Header) -> int:
    """Count the denoiser's blocks; pruned releases have fewer than 60."""
    pattern = re.compile(r"transformer_blocks\.(\d+)\.")
    return len(
        {match[1] for name in part_tensors(header, "denoiser") if (match := pattern.match(name))}
    )


def load_frame_vae(
    file: Path, config: Mapping[str, Any], *, dtype: torch.dtype | None
) -> nn.Module:
    """Load a VAE in `dtype` (None: float32); raises InputError when it does not match its configuration."""
    import torch
    from accelerate import init_empty_weights
    from diffusers import AutoencoderKLQwenImage
    from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers
    from safetensors.torch import load_file

    with init_empty_weights():
        network: nn.Module = AutoencoderKLQwenImage.from_config(dict(config))
    tensors = {name: tensor.to(dtype or torch.float32) for name, tensor in load_file(file).items()}
    if "conv1.weight" in tensors:  # names of Wan, the video model that the VAE comes from
        tensors = convert_wan_vae_to_diffusers(tensors)
    try:
        # The parameters are on meta: assign=True makes the file's tensors the parameters, without a copy.
        network.load_state_dict(tensors, strict=True, assign=True)
    except RuntimeError as error:
        detail = " ".join(str(error).split())[:300]
        raise InputError(
            f"the VAE in {file} is not that of its companion's configuration: {detail}",
            fix="give a VAE made for this base, or leave base.vae out",
        ) from None
    return network
