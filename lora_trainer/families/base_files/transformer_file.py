"""Diffusion transformers in single files: the parts that a header names, and loading them.

ComfyUI's all-in-one files put `model.diffusion_model.`, `vae.` or `first_stage_model.` and
`text_encoders.` before the names of each part; files of one part have none. A file that does not match
the configuration of its companion folder raises InputError before a weight is loaded, or while loading
where single tensors are missing. Torch-free to import.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lora_trainer.common.errors import InputError
from lora_trainer.families.base_files.base_folder import COMPANION, read_header, read_tensors
from lora_trainer.families.base_files.vae_file import VAE_MODULES, VAE_PREFIXES
from lora_trainer.families.facts import Header

if TYPE_CHECKING:
    import torch
    from torch import nn

DENOISER_PREFIXES = ("model.diffusion_model.", "diffusion_model.")
ENCODER_PREFIX = "text_encoders.{role}.transformer."
_OTHERS = ("text_encoders.", "text_encoder.", "conditioner.", "cond_stage_model.")


def denoiser_names(header: Header) -> dict[str, str]:
    """Return the denoiser's tensors, name without prefix -> name in the file."""
    for prefix in DENOISER_PREFIXES:
        if names := {name.removeprefix(prefix): name for name in header if name.startswith(prefix)}:
            return names
    # A file of a transformer alone has no prefix: its tensors are all that belong to no other part.
    other = (*VAE_PREFIXES, *_OTHERS, *VAE_MODULES)
    return {name: name for name in header if not name.startswith(other)}


def denoiser_shapes(header: Header) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the denoiser's tensors, by name without prefix."""
    return {name: header[full].shape for name, full in denoiser_names(header).items()}


def denoiser_parameters(header: Header) -> int:
    """Count the parameters of a checkpoint's denoiser."""
    return sum(map(math.prod, denoiser_shapes(header).values()))


def check_companion(
    file: Path,
    *,
    shapes: Mapping[str, tuple[int, ...]],
    blocks: Mapping[str, int],
) -> None:
    """Compare a file's header with the configuration of its companion.

    `shapes`: tensor name in the file -> expected shape. `blocks`: start of the blocks' names -> expected
    number of blocks. Raises InputError for the first difference.
    """
    in_file = denoiser_shapes(read_header(file))
    for name, shape in shapes.items():
        if in_file.get(name, shape) != shape:
            raise _unlike(file, f"{name} is {list(in_file[name])}, the companion's {list(shape)}")
    for start, count in blocks.items():
        numbers = {name.split(".")[1] for name in in_file if name.startswith(start + ".")}
        if numbers and len(numbers) != count:
            raise _unlike(file, f"it has {len(numbers)} {start}, the companion {count}")


def encoder_names(header: Header, role: str) -> dict[str, str]:
    """Return a text encoder's tensors, name without prefix -> name in the file.

    `role` is ComfyUI's name of the encoder in an all-in-one file; a file of the encoder alone has no prefix.
    """
    prefix = ENCODER_PREFIX.format(role=role)
    if not any(name.startswith(prefix) for name in header):
        return {name: name for name in header}
    return {name.removeprefix(prefix): name for name in header if name.startswith(prefix)}


def encoder_parameters(file: Path, role: str, *, unread: tuple[str, ...]) -> int:
    """Count the parameters of a text encoder in a file, those that start with `unread` left out."""
    header = read_header(file)
    names = encoder_names(header, role).items()
    return sum(math.prod(header[full].shape) for name, full in names if not name.startswith(unread))


def load_encoder_file(
    kind: Any, file: Path, folder: Path, *, role: str, unread: tuple[str, ...], dtype: torch.dtype
) -> nn.Module:
    """Build a text encoder of transformers' class `kind` from its file and the configuration in `folder`.

    Raises InputError when tensors are missing or have other shapes.
    """
    import torch

    config = kind.config_class.from_pretrained(folder, local_files_only=True)
    names = encoder_names(read_header(file), role)
    names = {
        name: full
        for name, full in names.items()
        if name.startswith("visual.") or not name.startswith(unread)
    }
    state = read_tensors(file, names, dtype=dtype)
    # CLIP-L's pooled vector is used unprojected and its files have no projection: insert the identity.
    if kind.__name__ == "CLIPTextModelWithProjection" and role == "clip_l":
        state.setdefault("text_projection.weight", torch.eye(config.hidden_size, dtype=dtype))
    if "shared.weight" in state and "encoder.embed_tokens.weight" not in state:
        state["encoder.embed_tokens.weight"] = state["shared.weight"]  # one table, stored once
    try:
        network: nn.Module
        network, report = kind.from_pretrained(
            None, config=config, state_dict=state, dtype=dtype, output_loading_info=True
        )
    except RuntimeError as error:
        detail = " ".join(str(error).split())[:300]
        raise InputError(
            f"the text encoder in {file} is not that of {folder / 'config.json'}: {detail}",
            fix=COMPANION,
        ) from None
    missing = sorted(name for name in report["missing_keys"] if not name.startswith(unread))
    if missing or report["mismatched_keys"]:
        first = (missing or sorted(map(str, report["mismatched_keys"])))[0]
        raise InputError(
            f"the text encoder in {file} lacks tensors of {folder / 'config.json'}, first {first}",
            fix=COMPANION,
        )
    return network


def load_transformer(
    file: Path, network: nn.Module, *, class_name: str, dtype: torch.dtype
) -> nn.Module:
    """Fill a diffusers transformer on `meta` from a file, in `dtype`, on the CPU.

    diffusers' own conversion renames and splits the tensors of the original layout.
    """
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    state = read_tensors(file, denoiser_names(read_header(file)), dtype=dtype)
    try:
        # A file in diffusers' own names; tensors it lacks are reported by the strict loading.
        if not state.keys() <= network.state_dict().keys():
            convert = SINGLE_FILE_LOADABLE_CLASSES[class_name]["checkpoint_mapping_fn"]
            state = dict(convert(checkpoint=state, config=dict(cast(Any, network).config)))
        # The parameters are on meta: assign=True makes the file's tensors the parameters, without a copy.
        network.load_state_dict(state, strict=True, assign=True)
    except (KeyError, IndexError, RuntimeError) as error:  # RuntimeError: names or shapes differ
        raise _unlike(file, " ".join(str(error).split())[:300]) from None
    return network


def _unlike(file: Path, detail: str) -> InputError:
    return InputError(
        f"the denoiser in {file} is not that of its companion's configuration: {detail}",
        fix=COMPANION,
    )
