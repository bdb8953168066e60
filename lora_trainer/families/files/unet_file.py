"""U-Net bases in one `.safetensors` file, as ComfyUI and A1111 read and write them, or in a folder.

The layout of files is that of the latent diffusion code: `model.diffusion_model.`, `first_stage_model.`,
`cond_stage_model.` or `conditioner.`; a file may hold one part only. Names and shapes in the header
decide a file's family and parts. Counting compares a part with its companion's configuration before
anything is loaded. Loading reads the tensors of one part, casts them (fp8 too) and renames them with
diffusers' own conversion. Every function raises InputError with the part and the file that do not match.
Torch-free to import.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lora_trainer.common.errors import InputError
from lora_trainer.families.base.facts import BaseRelease
from lora_trainer.families.base.layout import DENOISER, Header, Layout, TensorInfo, WeightPlace
from lora_trainer.families.base.releases import text_layers
from lora_trainer.families.base.texts import TextInputs
from lora_trainer.families.base.unet_numbers import unet_numbers
from lora_trainer.families.files import base_parts
from lora_trainer.families.files.recognise import fits
from lora_trainer.families.files.weight_files import read_header, safetensors_header

if TYPE_CHECKING:
    from torch import Tensor

UNET = "model.diffusion_model."
# Starts of tensor names in a file of a U-Net alone, in the checkpoints' layout or diffusers'.
UNET_MODULES = (
    *("input_blocks.", "middle_block.", "output_blocks.", "time_embed.", "out.", "label_emb."),
    *("down_blocks.", "mid_block.", "up_blocks.", "conv_in.", "conv_norm_out.", "conv_out."),
    *("time_embedding.", "add_embedding."),
)
# The first convolution in the checkpoints' names and in diffusers'.
FIRST_CONVOLUTIONS = ("input_blocks.0.0", "conv_in")
_NUMBERS: Mapping[str, str] = {"F16": "<e", "BF16": "<f", "F32": "<f", "F64": "<d"}


def unet_names(header: Header) -> dict[str, str]:
    """Return the U-Net's tensors, name without prefix -> name in the file."""
    names = base_parts.part_names(header, UNET).items()
    return {name: full for name, full in names if full.startswith((UNET, *UNET_MODULES))}


def read_numbers(file: Path, name: str) -> tuple[float, ...]:
    """Return the values of a small floating-point tensor, () where the file has no tensor of that name.

    Reads without torch because facts depend on it; a tensor narrower than 16 bits counts as absent.
    """
    with file.open("rb") as stream:
        header, data_start = safetensors_header(stream)
        entry = header.get(name)
        if entry is None or entry["dtype"] not in _NUMBERS:
            return ()
        start, end = entry["data_offsets"]
        stream.seek(data_start + start)
        data = stream.read(end - start)
    if entry["dtype"] == "BF16":  # the upper half of a float32
        data = b"".join(b"\0\0" + data[at : at + 2] for at in range(0, len(data), 2))
    return tuple(value for (value,) in struct.iter_unpack(_NUMBERS[entry["dtype"]], data))


# ---- counting and checking

# diffusers' default scaling_factor, which the oldest VAE configurations leave out.
DEFAULT_SCALE = 0.18215
_OTHER_VAE = "use a VAE made for this base model"


def input_channels(single: Path) -> int:
    """Return the channels that the first convolution of a checkpoint's U-Net reads."""
    header = read_header(single)
    names = unet_names(header)
    first = next(name for name in FIRST_CONVOLUTIONS if f"{name}.weight" in names)
    return header[names[f"{first}.weight"]].shape[1]


def check_unet_file(
    single: Path, plain: BaseRelease, releases: Iterable[BaseRelease], *, folder: Path
) -> None:
    """Raise InputError for a checkpoint that the configuration in `folder` does not match.

    The number of parameters is compared where the configuration is a release's.
    """
    count, numbers = plain.parameters["denoiser"], unet_numbers(plain.architecture)
    released_counts = [
        release.parameters["denoiser"]
        for release in releases
        if unet_numbers(release.architecture) == numbers
    ]
    # Equal counts alone do not make equal networks.
    header = read_header(single)
    tensors = {name: header[full] for name, full in unet_names(header).items()}
    is_alike = any(fits(tensors, marks) for marks in _marks(numbers))
    if not is_alike or count not in (released_counts or [count]):
        raise base_parts.unlike(
            "the denoiser", single, count, folder, max(released_counts, default=0)
        )


def _marks(numbers: Mapping[str, Any]) -> Iterator[str]:
    """Yield the marks, as signatures.toml writes them, of a U-Net with these numbers in either layout of names."""
    for first, added in (
        ("input_blocks.0.0", "label_emb.0.0"),
        ("conv_in", "add_embedding.linear_1"),
    ):
        added_width = numbers["projection_class_embeddings_input_dim"]
        yield (
            f"{first}.weight[1]={numbers['in_channels']} "
            f"*attn2.to_k.weight[1]={numbers['cross_attention_dim']} "
            # [out, in] of a linear layer, [out, in, 1, 1] of a convolution.
            f"{'!' if numbers['use_linear_projection'] else ''}*proj_in.weight[3]=1 "
            + (f"{added}.weight[1]={added_width}" if added_width else f"!{added}.weight")
        )


def check_vae(layout: Layout, config: Mapping[str, Any]) -> None:
    """Raise InputError for a separate VAE whose latents differ from the base's."""
    own_folder = layout.folder / "vae"
    folder = layout.part_folder("vae", "vae")
    if folder != own_folder:
        used, base = [
            (int(each["latent_channels"]), float(each.get("scaling_factor", DEFAULT_SCALE)))
            for each in (config, base_parts.read_json(own_folder / "config.json"))
        ]
        # SDXL's VAE fits a Stable Diffusion 1 base in every shape, but its latents (scaled by 0.13025
        # instead of 0.18215) are others than the denoiser has learned: training would silently go wrong.
        if used[0] != base[0] or not math.isclose(used[1], base[1], rel_tol=1e-3):
            raise InputError(
                f"the VAE in {folder} has {used[0]} channels scaled by {used[1]:g}, the base model's "
                f"{base[0]} scaled by {base[1]:g}",
                fix=_OTHER_VAE,
            )
    if (single := layout.part_file("vae")) is None:
        return
    file_shape = base_parts.vae_shape(read_header(single))
    base_shape = (int(config["latent_channels"]), *config["block_out_channels"][:1])
    if file_shape != base_shape:
        contents = f"a VAE with (latent, first level) channels {file_shape}"
        raise InputError(
            f"{single} holds {contents if file_shape else 'no VAE'}; the base model's has {base_shape}",
            fix=_OTHER_VAE,
        )


def count_text(layout: Layout, component: str, text: TextInputs, *, single: Path) -> int:
    """Count a text encoder's used parameters; a checkpoint may hold more layers, not fewer."""
    header = read_header(single)
    config = base_parts.read_json(layout.folder / component / "config.json")
    encoder, sizes = text.networks[component], clip_sizes(layout, component, text)
    positions = int(config["vocab_size"]) + int(config["max_position_embeddings"])
    needed_count = positions * sizes["width"]
    # All layers have a bias for each of their rows but the embeddings and the projection.
    needed_count += sum(
        math.prod(shape) + shape[0]
        for name, shape in text_layers("clip", **sizes).items()
        if name != "text_projection"
    )
    if "Projection" in encoder.network:
        needed_count += sizes["width"] * int(config["projection_dim"])
    prefix = text.prefixes[component]
    count = base_parts.elements(header, (name for name in header if name.startswith(prefix)))
    if count < needed_count:
        raise base_parts.unlike(component, single, count, layout.folder, needed_count)
    return needed_count


def clip_sizes(layout: Layout | None, component: str, text: TextInputs) -> dict[str, int]:
    """Return the numbers that fix the shapes of an encoder: layers, their width, and the width of their MLP.

    Those of the releases where the base is not downloaded.
    """
    if layout is None:
        return {"width": text.networks[component].width, **text.networks[component].sizes}
    config = base_parts.read_json(layout.folder / component / "config.json")
    return {
        "layers": int(config["num_hidden_layers"]),
        "width": int(config["hidden_size"]),
        "inner": int(config["intermediate_size"]),
    }


# ---- where a checkpoint keeps its weights

WEIGHT, TEXT_MODEL = ".weight", "text_model."
_DOWNSAMPLER = re.compile(r"input_blocks\.(\d+)\.0\.op\.weight")


def weight_places(header: Header, prefixes: Mapping[str, str]) -> dict[str, WeightPlace]:
    """Return the place of each weight of the U-Net and the text encoders in a checkpoint, norms included.

    diffusers' own conversions rename, and split, tensors of numbered rows. Raises InputError for a
    checkpoint that lacks tensors of its layout.
    """
    import torch
    from diffusers.loaders.single_file_utils import (
        convert_ldm_unet_checkpoint,
        convert_open_clip_checkpoint,
    )

    tensors = list(header)
    numbers = {name: number for number, name in enumerate(tensors)}

    def numbered(names: Mapping[str, str]) -> dict[str, Tensor]:
        """Return by wanted name (number of the tensor, number of the row) of each row, int64 [rows, 2]."""
        return {
            name: torch.cartesian_prod(
                torch.tensor([numbers[full]]), torch.arange(header[full].shape[0])
            )
            for name, full in names.items()
            if header[full].shape
        }

    places: dict[str, WeightPlace] = {}

    def add(component: str, prefix: str, rows_by_name: Mapping[str, Tensor]) -> None:
        for name, rows in rows_by_name.items():
            if name.endswith(WEIGHT) and rows.shape[1:] == (2,) and len(rows):
                tensor = tensors[int(rows[0, 0])]
                first, end = int(rows[0, 1]), int(rows[-1, 1]) + 1
                is_whole = (first, end) == (0, header[tensor].shape[0])
                module = name.removeprefix(prefix).removeprefix(TEXT_MODEL).removesuffix(WEIGHT)
                places[f"{component}.{module}"] = WeightPlace(
                    tensor=tensor, rows=None if is_whole else (first, end)
                )

    file, names = Path("the checkpoint"), unet_names(header)
    unet = numbered(names)
    if "conv_in.weight" not in names:
        # The first downsampler comes behind the resnets of the first level.
        samplers = [int(match[1]) for name in names if (match := _DOWNSAMPLER.fullmatch(name))]
        config = {
            "layers_per_block": min(samplers, default=len(names)) - 1,
            "addition_embed_type": "text_time" if "label_emb.0.0.weight" in names else None,
        }
        prefixed = {UNET + name: rows for name, rows in unet.items()}
        unet = base_parts.converted(file, lambda: convert_ldm_unet_checkpoint(prefixed, config))
    add(DENOISER, "", unet)
    for component, prefix in prefixes.items():
        rows = numbered({name: name for name in header if name.startswith(prefix)})
        if prefix.endswith(".model."):
            # OpenCLIP keeps query, key and value of a layer in one matrix; its projection is not used here.
            rows.pop(f"{prefix}text_projection", None)
            width = header.get(f"{prefix}ln_final.weight", TensorInfo(dtype="", shape=(0,)))
            encoder = SimpleNamespace(config=SimpleNamespace(hidden_size=width.shape[0]))
            convert = partial(convert_open_clip_checkpoint, encoder, rows, prefix=prefix)
            rows = base_parts.converted(file, convert)
        add(component, prefix, rows)
    return places


# ---- names of layers in checkpoints, without torch
#
# They come from the original code (Rombach et al. 2022, arXiv 2112.10752): blocks have consecutive numbers, a
# resnet's layers have their index in a sequence. SDXL's LoRA files use these names too.

_ENDS: Mapping[str, str] = {
    "conv_in": "input_blocks.0.0",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
}
_RESNET: Mapping[str, str] = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
_MIDDLE = ("resnets.0", "attentions.0", "resnets.1")


def ldm_module(module: str, *, architecture: Mapping[str, Any]) -> str:
    """Return the checkpoint's name of diffusers' module; raises KeyError for a module of another U-Net."""
    return _renamed(module, dict(_blocks(unet_numbers(architecture))))


def _renamed(module: str, blocks: Mapping[str, str]) -> str:
    """Rename by the tables of blocks, of layers outside blocks and of layers in resnets."""
    if module in _ENDS:
        return _ENDS[module]
    parts = module.split(".")
    # The longest matching block wins: a downsampler is a whole block.
    for count in range(len(parts), 0, -1):
        block, inner = ".".join(parts[:count]), ".".join(parts[count:])
        if block in blocks:
            renamed = _RESNET[inner] if inner and "resnets" in block else inner
            return f"{blocks[block]}.{renamed}" if renamed else blocks[block]
    raise KeyError(module)


def checkpoint_names(
    modules: Iterable[str], *, architecture: Mapping[str, Any]
) -> dict[str, tuple[str, ...]]:
    """Return checkpoint name -> (diffusers' module,), without modules that no release has."""
    blocks = dict(_blocks(unet_numbers(architecture)))
    modules_by_name: dict[str, tuple[str, ...]] = {}
    for module in modules:
        with suppress(KeyError):
            modules_by_name[_renamed(module, blocks)] = (module,)
    return modules_by_name


def _blocks(numbers: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (diffusers' name, checkpoint's name) of every resnet, transformer and sampler."""
    last = len(numbers["layers_per_block"]) - 1
    number = 1  # 0 is conv_in
    for level, (resnets, kind) in enumerate(
        zip(numbers["layers_per_block"], numbers["down_block_types"], strict=True)
    ):
        for index in range(resnets):
            yield f"down_blocks.{level}.resnets.{index}", f"input_blocks.{number}.0"
            if kind.startswith("CrossAttn"):
                yield f"down_blocks.{level}.attentions.{index}", f"input_blocks.{number}.1"
            number += 1
        if level < last:
            yield f"down_blocks.{level}.downsamplers.0.conv", f"input_blocks.{number}.0.op"
            number += 1
    for middle, name in enumerate(_MIDDLE):
        yield f"mid_block.{name}", f"middle_block.{middle}"
    number = 0
    for up, (resnets, kind) in enumerate(
        zip(reversed(numbers["layers_per_block"]), numbers["up_block_types"], strict=True)
    ):
        attention = kind.startswith("CrossAttn")
        for index in range(resnets + 1):  # one more than on the way down
            yield f"up_blocks.{up}.resnets.{index}", f"output_blocks.{number}.0"
            if attention:
                yield f"up_blocks.{up}.attentions.{index}", f"output_blocks.{number}.1"
            number += 1
        if up < last:  # in the same block as the level's last resnet, behind its transformer
            sampler = f"output_blocks.{number - 1}.{1 + attention}.conv"
            yield f"up_blocks.{up}.upsamplers.0.conv", sampler
