"""Diffusion transformers in single files: what the header says they hold, and loading them.

Contents of a transformer family's single-file checkpoint, from its header: parts, sizes, quantisation.

ComfyUI's all-in-one files put `model.diffusion_model.`, `vae.` or `first_stage_model.` and
`text_encoders.` before the names of each part; files of one part have none. Torch-free.

Loads a diffusion transformer from one `.safetensors` file in ComfyUI's layout into diffusers' network.

Inputs are the file and the configuration of its companion folder. A file that does not match raises
InputError before a weight is loaded, or while loading where single tensors are missing. Torch-free to
import.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lora_trainer.common.errors import InputError
from lora_trainer.families.base import Header, TensorInfo
from lora_trainer.families.checkpoints.base_folder import AGAIN, read_header

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

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
    number of blocks. Raises InputError for the first difference, and for weights with scales.
    """
    tensors = part_tensors(read_header(file), "denoiser")
    refuse_scaled_weights(tensors)
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

    with init_empty_weights():
        network: nn.Module = kind.from_config(dict(architecture))
    state = _read(file, dtype=dtype)
    try:
        if not state.keys() <= network.state_dict().keys():
            state = dict(convert(state))
        # The parameters are on meta: assign=True makes the file's tensors the parameters, without a copy.
        network.load_state_dict(state, strict=True, assign=True)
    except (KeyError, IndexError, RuntimeError) as error:  # RuntimeError: names or shapes differ
        raise _unlike(file, " ".join(str(error).split())[:300]) from None
    return network


def _read(file: Path, *, dtype: torch.dtype) -> dict[str, Tensor]:
    from safetensors import safe_open

    header = read_header(file)
    prefix = DENOISER_PREFIX if any(name.startswith(DENOISER_PREFIX) for name in header) else ""
    with safe_open(file, framework="pt") as tensors:
        return {
            name: tensors.get_tensor(prefix + name).to(dtype)
            for name in part_tensors(header, "denoiser")
        }


def _unlike(file: Path, detail: str) -> InputError:
    return InputError(
        f"the denoiser in {file} is not that of its companion's configuration: {detail}",
        fix=COMPANION,
    )
