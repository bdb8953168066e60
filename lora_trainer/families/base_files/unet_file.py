"""U-Net checkpoints in one `.safetensors` file, as ComfyUI and A1111 read and write them.

The layout is that of the latent diffusion code: `model.diffusion_model.`, `first_stage_model.`,
`cond_stage_model.` or `conditioner.`; a file may hold one part only. Names and shapes in the header
decide a file's family and parts. Loading reads the tensors of one part, casts them (fp8 too) and renames
them with diffusers' own conversion. Torch-free to import.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.common.errors import InputError
from lora_trainer.families.base_files.base_folder import (
    AGAIN,
    converted,
    fill,
    read_header,
    read_tensors,
    weights,
)
from lora_trainer.families.facts import Header

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

UNET = "model.diffusion_model."
UNET_MODULES = (
    *("input_blocks.", "middle_block.", "output_blocks.", "time_embed.", "out.", "label_emb."),
    *("down_blocks.", "mid_block.", "up_blocks.", "conv_in.", "conv_norm_out.", "conv_out."),
    *("time_embedding.", "add_embedding."),
)
"""Starts of tensor names in a file of a U-Net alone, in the checkpoints' layout or diffusers'."""
_NUMBERS: Mapping[str, str] = {"F16": "<e", "BF16": "<f", "F32": "<f", "F64": "<d"}


@dataclass(frozen=True, kw_only=True)
class UNetTraits:
    """The numbers that distinguish the U-Net families.

    `added_width` is the width of the vector beside the timestep (sizes, pooled text), 0 without it.
    """

    in_channels: int
    text_width: int
    linear_projection: bool
    added_width: int


def config_traits(architecture: Mapping[str, Any]) -> UNetTraits | None:
    """Return the traits of a U-Net from diffusers' configuration, None where a value is no number."""
    text_width = architecture.get("cross_attention_dim", 1280)  # diffusers' own defaults
    in_channels = architecture.get("in_channels", 4)
    added = architecture.get("addition_embed_type") is not None
    added_width = architecture.get("projection_class_embeddings_input_dim") if added else 0
    if isinstance(text_width, list) and text_width:
        text_width = text_width[0]
    if not (
        isinstance(text_width, int)
        and isinstance(in_channels, int)
        and isinstance(added_width, int)
    ):
        return None
    return UNetTraits(
        in_channels=in_channels,
        text_width=text_width,
        linear_projection=bool(architecture.get("use_linear_projection", False)),
        added_width=added_width,
    )


def header_traits(header: Header) -> UNetTraits | None:
    """Return the traits of the U-Net in a file, None for a file without a U-Net."""
    shapes = {name: header[full].shape for name, full in unet_names(header).items()}
    first = shapes.get("input_blocks.0.0.weight", shapes.get("conv_in.weight", ()))
    text = _first(shapes, "attn2.to_k.weight")
    projection = _first(shapes, "proj_in.weight")
    if len(first) != 4 or len(text) != 2 or not projection:
        return None
    added = shapes.get("label_emb.0.0.weight", shapes.get("add_embedding.linear_1.weight", (0,)))
    return UNetTraits(
        in_channels=first[1],
        text_width=text[1],
        # [out, in] of a linear layer, [out, in, 1, 1] of a convolution.
        linear_projection=len(projection) == 2,
        added_width=added[-1] if added else 0,
    )


def unet_names(header: Header) -> dict[str, str]:
    """Return the U-Net's tensors, name without prefix -> name in the file."""
    if any(name.startswith(UNET) for name in header):
        return {name.removeprefix(UNET): name for name in header if name.startswith(UNET)}
    return {name: name for name in header if name.startswith(UNET_MODULES)}


def read_numbers(file: Path, name: str) -> tuple[float, ...]:
    """Return the values of a small floating-point tensor, () where the file has no tensor of that name.

    Reads without torch because facts depend on it; a tensor narrower than 16 bits counts as absent.
    """
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            entry = json.loads(stream.read(length)).get(name)
            if entry is None or entry["dtype"] not in _NUMBERS:
                return ()
            start, end = entry["data_offsets"]
            stream.seek(8 + length + start)
            data = stream.read(end - start)
        if entry["dtype"] == "BF16":  # the upper half of a float32
            data = b"".join(b"\0\0" + data[at : at + 2] for at in range(0, len(data), 2))
        return tuple(value for (value,) in struct.iter_unpack(_NUMBERS[entry["dtype"]], data))
    except (OSError, ValueError, TypeError, KeyError, struct.error) as error:
        raise InputError(f"{name} in {file} is no tensor ({error})", fix=AGAIN) from None


# ---- loading


def load_unet_folder(folder: Path, network: Any, *, dtype: torch.dtype) -> nn.Module:
    """Fill a U-Net on `meta` with the weights of its folder; raises InputError when the weights do not fit."""
    tensors: dict[str, Tensor] = {}
    for file in weights(folder):
        tensors |= read_tensors(file, {name: name for name in read_header(file)}, dtype=dtype)
    network._fix_state_dict_keys_on_load(tensors)  # attention has other names in old files
    return fill(network, tensors, file=folder, part="denoiser", config="its config.json", fix=AGAIN)


def load_unet(file: Path, network: nn.Module, *, dtype: torch.dtype) -> nn.Module:
    """Fill a U-Net on `meta` with the weights of a file; raises InputError when the weights do not fit."""
    from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint

    names = unet_names(read_header(file))
    tensors = read_tensors(file, names, dtype=dtype)
    if "input_blocks.0.0.weight" in tensors:
        prefixed = {UNET + name: tensor for name, tensor in tensors.items()}
        tensors = converted(file, lambda: convert_ldm_unet_checkpoint(prefixed, network.config))
    return fill(network, tensors, file=file, part="denoiser")


def load_clip(file: Path, kind: Any, config: Any, *, prefix: str, dtype: torch.dtype) -> nn.Module:
    """Build a CLIP encoder from the tensors of a file that start with `prefix`."""
    from accelerate import init_empty_weights
    from diffusers.loaders.single_file_utils import convert_open_clip_checkpoint

    # accelerate's context leaves buffers real: CLIP's position ids are in no file and would stay on `meta`.
    with init_empty_weights():
        network: nn.Module = kind(config)
    names = {name: name for name in read_header(file) if name.startswith(prefix)}
    tensors = read_tensors(file, names, dtype=dtype)
    if prefix.endswith(".model."):
        full = tensors
        tensors = converted(
            file, lambda: convert_open_clip_checkpoint(network, full, prefix=prefix)
        )
    bare = {
        name.removeprefix(prefix).removeprefix("text_model."): tensors[name] for name in tensors
    }
    short_names = {name: name.removeprefix("text_model.") for name in network.state_dict()}
    # Files also hold layers beyond the configured number, projections and position ids: all unused here.
    return fill(
        network,
        {name: bare[short] for name, short in short_names.items() if short in bare},
        file=file,
        part="text_encoder",
    )


def _first(shapes: Mapping[str, tuple[int, ...]], ending: str) -> tuple[int, ...]:
    return next((shape for name, shape in shapes.items() if name.endswith(ending)), ())
