"""Loads a diffusion transformer from one `.safetensors` file in ComfyUI's layout into diffusers' network.

Inputs are the file and the configuration of its companion folder. A file that does not match raises
InputError before a weight is loaded, or while loading where single tensors are missing. Torch-free to
import.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.errors import InputError
from lora_trainer.families.flow_files import DENOISER_PREFIX, part_tensors, refuse_scaled_weights
from lora_trainer.families.folder import AGAIN, read_header

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

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
