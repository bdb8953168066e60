"""Diffusion transformers in single files: the parts that a header names, and loading them.

ComfyUI's all-in-one files put `model.diffusion_model.`, `vae.` or `first_stage_model.` and
`text_encoders.` before the names of each part; files of one part have none. A file that does not match
the configuration of its companion folder raises InputError before a weight is loaded, or while loading
where single tensors are missing. Torch-free to import.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lora_trainer.common.errors import InputError
from lora_trainer.families.base import Header, TensorInfo
from lora_trainer.families.base_files.base_folder import AGAIN, read_header, read_tensors

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

FilePart = Literal["denoiser", "vae"]
PARTS_IN_FILES: tuple[FilePart, ...] = ("denoiser", "vae")
"""Parts that are read from single files; text encoders come from folders."""
DENOISER_PREFIXES = ("model.diffusion_model.", "diffusion_model.")
ENCODER_PREFIX = "text_encoders.{role}.transformer."
VAE_PREFIXES = ("vae.", "first_stage_model.")
_OTHERS = ("text_encoders.", "text_encoder.", "conditioner.", "cond_stage_model.")
_VAE_MODULES = ("encoder.", "decoder.", "quant_conv.", "post_quant_conv.")


def part_tensors(header: Header, part: FilePart) -> Mapping[str, TensorInfo]:
    """Return the tensors of one part, names without the part's prefix."""
    if part == "denoiser":
        for prefix in DENOISER_PREFIXES:
            if tensors := _without(header, prefix):
                return tensors
        # A file of a transformer alone has no prefix: its tensors are all that belong to no other part.
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


def _without(header: Header, prefix: str) -> dict[str, TensorInfo]:
    return {
        name.removeprefix(prefix): info for name, info in header.items() if name.startswith(prefix)
    }


Convert = Callable[[dict[str, "Tensor"]], Mapping[str, "Tensor"]]
COMPANION = "name the base model it was made from with --set base.companion=..."


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
    tensors = part_tensors(read_header(file), "denoiser")
    for name, shape in shapes.items():
        if name in tensors and tensors[name].shape != shape:
            raise _unlike(
                file, f"{name} is {list(tensors[name].shape)}, the companion's {list(shape)}"
            )
    for start, count in blocks.items():
        numbers = {name.split(".")[1] for name in tensors if name.startswith(start + ".")}
        if numbers and len(numbers) != count:
            raise _unlike(file, f"it has {len(numbers)} {start}, the companion {count}")


def whole(kind: Any, folder: Path, **settings: Any) -> nn.Module:
    """Load a network of diffusers or transformers from its folder; raises InputError when tensors are missing.

    Both libraries would leave missing tensors random or uninitialised and only log a warning.
    """
    network: nn.Module
    network, report = kind.from_pretrained(
        folder, output_loading_info=True, use_safetensors=True, **settings
    )
    if missing := sorted(report["missing_keys"]):
        raise InputError(
            f"base model part {folder} lacks {len(missing)} tensors, first {missing[0]}", fix=AGAIN
        )
    return network


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


def original_names(network: str, architecture: Mapping[str, Any]) -> Convert:
    """Return diffusers' own conversion from the original layout of a transformer class."""
    from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES

    convert = SINGLE_FILE_LOADABLE_CLASSES[network]["checkpoint_mapping_fn"]

    def converted(state: dict[str, Tensor]) -> Mapping[str, Tensor]:
        tensors: Mapping[str, Tensor] = convert(checkpoint=state, config=dict(architecture))
        return tensors

    return converted


def load_transformer(
    kind: Any, file: Path, architecture: Mapping[str, Any], *, convert: Convert, dtype: torch.dtype
) -> nn.Module:
    """Build a diffusers transformer of class `kind` and fill it from a file, in `dtype`, on the CPU.

    `convert` renames and splits tensors; it is skipped for a file that has diffusers' own names.
    """
    from accelerate import init_empty_weights

    # Not under torch.device("meta"): accelerate's context leaves buffers real, and a
    # buffer that no file holds would stay without values.
    with init_empty_weights():
        network: nn.Module = kind.from_config(dict(architecture))
    state = _read(file, dtype=dtype)
    try:
        # A file in diffusers' own names; tensors it lacks are reported by the strict loading.
        if not state.keys() <= network.state_dict().keys():
            state = dict(convert(state))
        # The parameters are on meta: assign=True makes the file's tensors the parameters, without a copy.
        network.load_state_dict(state, strict=True, assign=True)
    except (KeyError, IndexError, RuntimeError) as error:  # RuntimeError: names or shapes differ
        raise _unlike(file, " ".join(str(error).split())[:300]) from None
    return network


def _read(file: Path, *, dtype: torch.dtype) -> dict[str, Tensor]:
    header = read_header(file)
    starts = (
        start for start in DENOISER_PREFIXES if any(name.startswith(start) for name in header)
    )
    prefix = next(starts, "")
    names = {name: prefix + name for name in part_tensors(header, "denoiser")}
    return read_tensors(file, names, dtype=dtype)


def _unlike(file: Path, detail: str) -> InputError:
    return InputError(
        f"the denoiser in {file} is not that of its companion's configuration: {detail}",
        fix=COMPANION,
    )
