"""Counting and checking the parts of a U-Net base, each in a folder or in a checkpoint, before loading.

Input is a `Layout` and its configurations; every function raises InputError with the part and the
file that do not match. Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from lora_trainer.common.errors import InputError
from lora_trainer.families.base_files import unet_file
from lora_trainer.families.base_files.base_folder import (
    COMPANION,
    count_parameters,
    part_file,
    part_folder,
    read_header,
    read_json,
    weights,
)
from lora_trainer.families.base_files.unet_file import config_traits, header_traits
from lora_trainer.families.base_files.vae_file import vae_names, vae_shape
from lora_trainer.families.facts import Header, Layout
from lora_trainer.families.text.clip import ClipPart, ClipSize

V_PREDICTION = "v_pred"
ZERO_TERMINAL_SNR = "ztsnr"
DEFAULT_SCALE = 0.18215
"""diffusers' default scaling_factor, which the oldest VAE configurations leave out."""
_OTHER_VAE = "use a VAE made for this base model"


def training_marks(single: Path | None) -> frozenset[str]:
    """Return a checkpoint's marker tensors: empty tensors whose names state how it was trained."""
    names = read_header(single).keys() if single else ()
    return frozenset(name for name in names if name in {V_PREDICTION, ZERO_TERMINAL_SNR})


def count_unet(
    layout: Layout,
    architecture: Mapping[str, Any],
    *,
    parameters_of: Callable[[Mapping[str, Any]], int],
) -> int:
    """Count a U-Net's parameters; raises InputError for a checkpoint that its configuration does not match.

    `parameters_of` counts those of a configuration; it is called for a checkpoint only.
    """
    single = part_file(layout, "denoiser")
    if single is None:
        return count_parameters(weights(part_folder(layout, "denoiser", "unet")))
    header = read_header(single)
    names = unet_file.unet_names(header).values()
    count, companion_count = _elements(header, names), parameters_of(architecture)
    # Equal counts alone do not make equal networks: the traits have the input channels and the text's width.
    if count != companion_count or header_traits(header) != config_traits(architecture):
        raise InputError(
            f"the denoiser in {single} has {count:,} parameters, "
            f"its companion's in {layout.folder} {companion_count:,}",
            fix=COMPANION,
        )
    return count


def count_vae(layout: Layout, config: Mapping[str, Any]) -> int:
    """Count a VAE's parameters; raises InputError for a separate VAE whose latents differ from the base's."""
    single, folder = part_file(layout, "vae"), part_folder(layout, "vae", "vae")
    if folder != layout.folder / "vae":
        _check_scale(folder, config, base_config=read_json(layout.folder / "vae" / "config.json"))
    if single is None:
        return count_parameters(weights(folder))
    header = read_header(single)
    file_shape, base_shape = (
        vae_shape(header),
        (int(config["latent_channels"]), *config["block_out_channels"][:1]),
    )
    if file_shape != base_shape:
        contents = (
            "no VAE"
            if file_shape is None
            else f"a VAE with (latent, first level) channels {file_shape}"
        )
        raise InputError(
            f"{single} holds {contents}; the base model's has {base_shape}", fix=_OTHER_VAE
        )
    return _elements(header, vae_names(header).values())


def _check_scale(
    folder: Path, config: Mapping[str, Any], *, base_config: Mapping[str, Any]
) -> None:
    """Raise InputError for latents of another scale or number of channels: training would silently go wrong."""
    used, base = [
        (int(each["latent_channels"]), float(each.get("scaling_factor", DEFAULT_SCALE)))
        for each in (config, base_config)
    ]
    # SDXL's VAE fits a Stable Diffusion 1 base in every shape, but its latents (scaled by 0.13025
    # instead of 0.18215) are others than the denoiser has learned.
    if used[0] != base[0] or not math.isclose(used[1], base[1], rel_tol=1e-3):
        raise InputError(
            f"the VAE in {folder} has {used[0]} channels scaled by {used[1]:g}, the base model's "
            f"{base[0]} scaled by {base[1]:g}",
            fix=_OTHER_VAE,
        )


def count_text(layout: Layout, part: ClipPart) -> int:
    """Count a text encoder's used parameters; a checkpoint may hold more layers, not fewer."""
    single, folder = part_file(layout, "text_encoder"), layout.folder / part.component
    if single is None:
        return count_parameters(weights(folder))
    header, needed_count = (
        read_header(single),
        clip_parameters(part, read_json(folder / "config.json")),
    )
    count = _elements(header, (name for name in header if name.startswith(part.checkpoint)))
    if count < needed_count:
        raise InputError(
            f"{part.component} in {single} has {count:,} parameters, "
            f"its companion's in {layout.folder} {needed_count:,}",
            fix=COMPANION,
        )
    return needed_count


def clip_size(layout: Layout | None, part: ClipPart) -> ClipSize:
    """Return the size of a text encoder; the releases' size where the base is not downloaded."""
    if layout is None:
        return part.released
    config = read_json(layout.folder / part.component / "config.json")
    return ClipSize(
        layers=int(config["num_hidden_layers"]),
        width=int(config["hidden_size"]),
        inner=int(config["intermediate_size"]),
    )


def clip_parameters(part: ClipPart, config: Mapping[str, Any]) -> int:
    """Count a CLIP text encoder's parameters from its configuration."""
    width, inner = int(config["hidden_size"]), int(config["intermediate_size"])
    positions = int(config["vocab_size"]) + int(config["max_position_embeddings"])
    # Query, key, value and output are square and have biases.
    attention = 4 * (width + 1) * width
    layer = attention + 2 * width * inner + inner + width + 4 * width  # two norms
    # The projection has no bias; the 2 x width below are the final norm.
    projection = width * int(config["projection_dim"]) if "Projection" in part.network else 0
    return positions * width + int(config["num_hidden_layers"]) * layer + 2 * width + projection


def _elements(header: Header, names: Iterable[str]) -> int:
    return sum(math.prod(header[name].shape) for name in names)
