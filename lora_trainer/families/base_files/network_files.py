"""Networks of a base in single files or folders: image VAEs, diffusion transformers, their text encoders.

ComfyUI's all-in-one files put `model.diffusion_model.`, `vae.` or `first_stage_model.` and
`text_encoders.` before the names of each part; files of one part have none. A VAE has the names of the
latent diffusion code, of Wan, the video model that Qwen-Image's comes from, or diffusers'. A file of another
size than its companion folder raises InputError before a weight is loaded, one that lacks tensors while
loading. Torch-free to import.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lora_trainer.common.errors import InputError
from lora_trainer.families.base_files.base_folder import (
    COMPANION,
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
from lora_trainer.families.facts import BaseRelease, Header, Layout

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

VAE = "first_stage_model."
VAE_PREFIXES = (VAE, "vae.")
VAE_MODULES = ("encoder.", "decoder.", "quant_conv.", "post_quant_conv.")
_EXTRAS = ("loss.", "model_ema.", VAE + "loss.", VAE + "model_ema.")
"""Starts of tensors that VAE training code left in files of a VAE alone."""


def part_names(header: Header, *prefixes: str) -> dict[str, str]:
    """Return the tensors behind the first of the prefixes that a file has, name without it -> name in the file.

    A file of one part alone has no prefix, and then all tensors are returned.
    """
    for prefix in prefixes:
        if names := {name.removeprefix(prefix): name for name in header if name.startswith(prefix)}:
            return names
    return {name: name for name in header}


def vae_names(header: Header) -> dict[str, str]:
    """Return the VAE's tensors, name without prefix -> name in the file."""
    names = part_names(header, *VAE_PREFIXES).items()
    return {name: full for name, full in names if name.startswith(VAE_MODULES)}


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


def load_base_vae(layout: Layout) -> Any:
    """Load the VAE frozen, on the CPU, in float32; raises InputError when weights do not fit."""
    import diffusers
    import torch
    from accelerate import init_empty_weights

    folder, single = part_folder(layout, "vae", "vae"), part_file(layout, "vae")
    # The class is the folder's, not the family's: `base.vae` may name another VAE with the same latents.
    config = read_json(folder / "config.json")
    kind = getattr(diffusers, str(config.get("_class_name", "AutoencoderKL")))
    vae: Any
    if single is None:
        vae = whole(kind, folder, dtype=torch.float32, variant=variant(folder))
    else:
        with init_empty_weights():
            vae = kind.from_config(config)
        fill(
            vae, _tensors(single, vae), file=single, part="vae", fix="give a VAE made for this base"
        )
    return vae.requires_grad_(False).eval()


def _tensors(file: Path, vae: Any) -> dict[str, Tensor]:
    """Return a file's tensors in diffusers' names, float32."""
    import torch
    from diffusers.loaders.single_file_utils import (
        convert_ldm_vae_checkpoint,
        convert_wan_vae_to_diffusers,
    )

    header = read_header(file)
    if type(vae).__name__ == "AutoencoderKLQwenImage":
        tensors = read_tensors(file, {name: name for name in header}, dtype=torch.float32)
        is_wan = "conv1.weight" in tensors
        return converted(file, lambda: convert_wan_vae_to_diffusers(tensors)) if is_wan else tensors
    tensors = read_tensors(file, vae_names(header), dtype=torch.float32)
    if any(".down_blocks." in name for name in tensors):
        vae._fix_state_dict_keys_on_load(tensors)  # old diffusers files: attention's former names
        return tensors
    prefixed = {VAE + name: tensor for name, tensor in tensors.items()}
    return converted(file, lambda: convert_ldm_vae_checkpoint(prefixed, vae.config))


# ---- transformers and text encoders

DENOISER_PREFIXES = ("model.diffusion_model.", "diffusion_model.")
ENCODER_PREFIX = "text_encoders.{role}.transformer."
"""`role` is ComfyUI's name of the encoder in an all-in-one file."""
_OTHERS = ("text_encoders.", "text_encoder.", "conditioner.", "cond_stage_model.")


def denoiser_names(header: Header) -> dict[str, str]:
    """Return the denoiser's tensors, name without prefix -> name in the file."""
    # A file of a transformer alone has no prefix: its tensors are all that belong to no other part.
    other = (*VAE_PREFIXES, *_OTHERS, *VAE_MODULES)
    names = part_names(header, *DENOISER_PREFIXES).items()
    return {name: full for name, full in names if not name.startswith(other)}


def denoiser_shapes(header: Header) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the denoiser's tensors, by name without prefix."""
    return {name: header[full].shape for name, full in denoiser_names(header).items()}


def denoiser_parameters(header: Header) -> int:
    """Count the parameters of a checkpoint's denoiser."""
    return sum(map(math.prod, denoiser_shapes(header).values()))


def check_companion(file: Path, config: Mapping[str, Any], releases: Iterable[BaseRelease]) -> None:
    """Compare the size of a file's denoiser with its companion's, where that is a release's.

    Raises InputError for another size; a companion of no release is compared when weights are loaded.
    """
    count = denoiser_parameters(read_header(file))
    for release in releases:
        companion_count = release.parameters["denoiser"]
        if release.architecture.items() <= config.items() and not math.isclose(
            count, companion_count, rel_tol=0.02
        ):
            raise _unlike(file, f"it has {count:,} parameters, the companion {companion_count:,}")


def encoder_parameters(file: Path, role: str, *, unread: tuple[str, ...]) -> int:
    """Count the parameters of a text encoder in a file, those that start with `unread` left out."""
    header = read_header(file)
    names = part_names(header, ENCODER_PREFIX.format(role=role)).items()
    return sum(math.prod(header[full].shape) for name, full in names if not name.startswith(unread))


def load_encoder_file(
    kind: Any, file: Path, folder: Path, *, role: str, unread: tuple[str, ...], dtype: torch.dtype
) -> nn.Module:
    """Build a text encoder of transformers' class `kind` from its file and the configuration in `folder`.

    Raises InputError when tensors are missing or have other shapes.
    """
    import torch

    config = kind.config_class.from_pretrained(folder, local_files_only=True)
    names = part_names(read_header(file), ENCODER_PREFIX.format(role=role))
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
