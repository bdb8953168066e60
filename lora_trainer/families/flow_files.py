"""Contents of a transformer family's single-file checkpoint, from its header: parts, sizes, quantisation.

ComfyUI's all-in-one files put `model.diffusion_model.`, `vae.` or `first_stage_model.` and
`text_encoders.` before the names of each part; files of one part have none. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from lora_trainer.errors import InputError
from lora_trainer.families.base import Header, TensorInfo
from lora_trainer.families.folder import read_header

FilePart = Literal["denoiser", "vae"]
PARTS_IN_FILES: tuple[FilePart, ...] = ("denoiser", "vae")
"""Parts that are read from single files; text encoders come from folders."""
DENOISER_PREFIX = "model.diffusion_model."
VAE_PREFIXES = ("vae.", "first_stage_model.")
_OTHERS = ("text_encoders.", "text_encoder.", "conditioner.", "cond_stage_model.")
_VAE_MODULES = ("encoder.", "decoder.", "quant_conv.", "post_quant_conv.")
_SCALES = frozenset(
    {"scale_weight", "weight_scale", "scale_input", "scaled_fp8", "absmax", "quant_map", "qweight"}
)


def part_tensors(header: Header, part: FilePart) -> Mapping[str, TensorInfo]:
    """Return the tensors of one part, names without the part's prefix."""
    if part == "denoiser":
        if any(name.startswith(DENOISER_PREFIX) for name in header):
            return _without(header, DENOISER_PREFIX)
        other = (*VAE_PREFIXES, *_OTHERS, *_VAE_MODULES)
        return {name: info for name, info in header.items() if not name.startswith(other)}
    for prefix in VAE_PREFIXES:
        if tensors := _without(header, prefix):
            return tensors
    return {name: info for name, info in header.items() if name.startswith(_VAE_MODULES)}


def parameters_in(file: Path, part: FilePart) -> int:
    """Count the parameters of one part of a checkpoint."""
    tensors = part_tensors(read_header(file), part)
    return sum(math.prod(info.shape) for info in tensors.values())


def holds_vae(header: Header, *, latent_channels: int) -> bool:
    """Return whether a file has a whole image VAE with `latent_channels`, in any of the VAE's layouts."""
    tensors = part_tensors(header, "vae")
    first = tensors.get("decoder.conv_in.weight")
    return (
        "encoder.conv_in.weight" in tensors
        and first is not None
        and len(first.shape) == 4
        and first.shape[1] == latent_channels
    )


def refuse_scaled_weights(tensors: Mapping[str, TensorInfo]) -> None:
    """Raise InputError for weights with separate scales: without their scales the weights are noise."""
    scale_name = next((name for name in tensors if name.rsplit(".", 1)[-1] in _SCALES), None)
    if scale_name is not None:
        raise InputError(
            f"the checkpoint is quantised with scales ({scale_name}); readable are fp32, bf16, fp16 and plain fp8",
            fix="use the bf16, fp16 or plain fp8 version of this base model",
        )


def _without(header: Header, prefix: str) -> dict[str, TensorInfo]:
    return {
        name.removeprefix(prefix): info for name, info in header.items() if name.startswith(prefix)
    }
