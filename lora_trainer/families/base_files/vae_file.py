"""Image VAEs of a base: in a folder, in a checkpoint, or in a file of their own. Torch-free to import.

Checkpoints have the names of the latent diffusion code behind `first_stage_model.` or `vae.`; Qwen-Image's VAE
has those of Wan, the video model that it comes from. Both may have diffusers' names too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lora_trainer.families.base_files.base_folder import (
    converted,
    fill,
    part_file,
    part_folder,
    read_header,
    read_json,
    read_tensors,
    variant,
    whole,
)
from lora_trainer.families.facts import Header, Layout

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor

VAE = "first_stage_model."
VAE_PREFIXES = (VAE, "vae.")
VAE_MODULES = ("encoder.", "decoder.", "quant_conv.", "post_quant_conv.")
_EXTRAS = ("loss.", "model_ema.", VAE + "loss.", VAE + "model_ema.")
"""Starts of tensors that VAE training code left in files of a VAE alone."""


def vae_names(header: Header) -> dict[str, str]:
    """Return the VAE's tensors, name without prefix -> name in the file."""
    prefixes = (start for start in VAE_PREFIXES if any(name.startswith(start) for name in header))
    prefix = next(prefixes, "")
    starts = tuple(prefix + start for start in VAE_MODULES)
    return {name.removeprefix(prefix): name for name in header if name.startswith(starts)}


def vae_shape(header: Header) -> tuple[int, int] | None:
    """Return (latent channels, channels of the first level) of an image VAE in a file, else None."""
    shapes = {name: header[full].shape for name, full in vae_names(header).items()}
    decoder = shapes.get("decoder.conv_in.weight", ())
    encoder = shapes.get("encoder.conv_in.weight", ())
    return (decoder[1], encoder[0]) if len(decoder) == len(encoder) == 4 else None


def holds_vae(header: Header, *, latent_channels: int, alone: bool = False) -> bool:
    """Return whether a file has a whole image VAE with `latent_channels`, with `alone` one and nothing else."""
    shape = vae_shape(header)
    if shape is None or shape[0] != latent_channels:
        return False
    rest = header.keys() - set(vae_names(header).values())
    return not alone or all(name.startswith(_EXTRAS) for name in rest)


def load_base_vae(layout: Layout, *, dtype: torch.dtype | None = None) -> Any:
    """Load the VAE frozen, on the CPU, in `dtype` (None: float32); raises InputError when weights do not fit."""
    import diffusers
    import torch
    from accelerate import init_empty_weights

    folder, single = part_folder(layout, "vae", "vae"), part_file(layout, "vae")
    # The class is the folder's, not the family's: `base.vae` may name another VAE with the same latents.
    config = read_json(folder / "config.json")
    kind = getattr(diffusers, str(config.get("_class_name", "AutoencoderKL")))
    vae: Any
    if single is None:
        vae = whole(kind, folder, dtype=dtype or torch.float32, variant=variant(folder))
    else:
        with init_empty_weights():
            vae = kind.from_config(config)
        tensors = _tensors(single, vae, dtype=dtype or torch.float32)
        fill(vae, tensors, file=single, part="vae", fix="give a VAE made for this base")
    return vae.requires_grad_(False).eval()


def _tensors(file: Path, vae: Any, *, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a file's tensors in diffusers' names."""
    from diffusers.loaders.single_file_utils import (
        convert_ldm_vae_checkpoint,
        convert_wan_vae_to_diffusers,
    )

    header = read_header(file)
    if type(vae).__name__ == "AutoencoderKLQwenImage":
        tensors = read_tensors(file, {name: name for name in header}, dtype=dtype)
        is_wan = "conv1.weight" in tensors
        return converted(file, lambda: convert_wan_vae_to_diffusers(tensors)) if is_wan else tensors
    tensors = read_tensors(file, vae_names(header), dtype=dtype)
    if any(".down_blocks." in name for name in tensors):
        vae._fix_state_dict_keys_on_load(tensors)  # old diffusers files: attention's former names
        return tensors
    prefixed = {VAE + name: tensor for name, tensor in tensors.items()}
    return converted(file, lambda: convert_ldm_vae_checkpoint(prefixed, vae.config))
