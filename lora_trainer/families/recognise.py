"""What a file is: the family of an adapter by module names, widths and metadata, any weight file by its tensors.

Names of modules are compared with `_` for `.`, which makes kohya's, diffusers' and ComfyUI's spelling equal. Some
families that this program cannot train are recognised too. Torch-free; the input is a file's header.
"""

from __future__ import annotations

import fnmatch
import re
import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal

from lora_trainer.families.facts import Header

UNKNOWN = "unknown"
Shapes = Mapping[str, tuple[int, ...]]
"""Module name -> shape of its down matrix, [rank, in, ...]."""

_UNET = re.compile(
    r"(?:(?:down|up)_blocks_\d+|mid_block)_(?:attentions|resnets|downsamplers|upsamplers)_"
    r"|(?:input|output)_blocks_\d+_\d|middle_block_\d"
)
_CROSS_ATTENTION = re.compile(r"transformer_blocks_\d+_attn2(?:_processor)?_to_[kv]$")
_TEXT_WIDTHS = {768: "sd15", 1024: "sd2", 2048: "sdxl"}
_DEEP = re.compile(r"_transformer_blocks_[1-9]")
"""Only SDXL's U-Net has more than one transformer block in a row."""
_SECOND_ENCODER = re.compile(r"lora_te2_|text_encoder_2_")
_IN_A1111 = {"sd15": "SD1", "sd2": "SD2", "sdxl": "SDXL"}

_FLUX = re.compile(r"(?:double|single)_blocks_\d+_|single_transformer_blocks_\d+_")
_HUNYUAN_WIDTH = 3584
_FLUX2_WIDTHS = {4096, 6144}  # klein 9B, dev; klein 4B has the width of FLUX.1
_JOINT = re.compile(r"(?:^|lora_unet_|transformer_|model_)transformer_blocks_(\d+)_attn_")
"""Blocks that attend to image and text at once: SD 3, FLUX.1 without its single blocks, Qwen-Image."""
_SD3_WIDTHS = {1536, 2432}
_FLUX_DOUBLE_BLOCKS = 19
_SINGLE_STREAM = re.compile(r"(?:^|_)layers_\d+_(?:attention_(?:qkv|out)$|feed_forward_w[123]$)")
_LUMINA2_WIDTH = 2304


@cache
def _patterns(table: Literal["modules", "versions"]) -> tuple[tuple[str, re.Pattern[str]], ...]:
    """Return (family, pattern) of the table `adapters` in signatures.toml, in its order."""
    rows = signature_tables()["adapters"][table]
    return tuple((family, re.compile(pattern)) for family, pattern in rows)


def adapter_family(shapes: Shapes, *, metadata: Mapping[str, str]) -> str:
    """Return the family of an adapter, `unknown` where names, widths and metadata leave it open."""
    modules = {module.replace(".", "_"): shape for module, shape in shapes.items()}
    metadata_family = stated_version(metadata)
    if any(_UNET.search(name) for name in modules):
        return _unet_family(modules) or metadata_family or _small_unet(modules)
    return (
        _transformer_family(modules, metadata_family)
        or _text_family(modules)
        or metadata_family
        or UNKNOWN
    )


def stated_family(metadata: Mapping[str, str]) -> str | None:
    """Return the family that `ss_base_model_version` names, None where the key is absent or unknown."""
    return _version(metadata.get("ss_base_model_version", ""))


def stated_version(metadata: Mapping[str, str]) -> str | None:
    """Return the family named in any trainer's metadata keys, None where no key names a known family."""
    keys = ("ss_base_model_version", "modelspec.architecture", "base_model", "model_type")
    return next((family for key in keys if (family := _version(metadata.get(key, "")))), None)


def a1111_version(family: str) -> str | None:
    """Return A1111's and Forge's name of a family's base models, None where they have none."""
    return _IN_A1111.get(family)


def _version(text: str) -> str | None:
    normal = text.lower().replace("_", "-")
    return next((family for family, start in _patterns("versions") if start.match(normal)), None)


# ---- U-Nets


def _unet_family(modules: Shapes) -> str | None:
    widths = _widths(modules, _CROSS_ATTENTION)
    candidates = {_TEXT_WIDTHS[width] for width in widths & _TEXT_WIDTHS.keys()}
    if len(candidates) == 1:
        return candidates.pop()
    deep = any(_DEEP.search(name) or _SECOND_ENCODER.search(name) for name in modules)
    return "sdxl" if deep else None


def _small_unet(modules: Shapes) -> str:
    """Return sd15 for any U-Net with cross-attention: miniature bases have text embeddings of any width."""
    return "sd15" if _widths(modules, _CROSS_ATTENTION) else UNKNOWN


# ---- transformers


def _transformer_family(modules: Shapes, metadata_family: str | None) -> str | None:
    for family, pattern in _patterns("modules"):
        if any(pattern.search(name) for name in modules):
            return family
    if any(_FLUX.search(name) for name in modules):
        return _flux_family(modules, metadata_family)
    if any(_JOINT.search(name) for name in modules):
        return _joint_family(modules, metadata_family)
    if any(_SINGLE_STREAM.search(name) for name in modules):
        # Lumina 2 has the same module names as Z-Image; only its width differs.
        return metadata_family or (
            "lumina2" if _LUMINA2_WIDTH in _widths(modules, _SINGLE_STREAM) else "zimage"
        )
    return None


def _flux_family(modules: Shapes, metadata_family: str | None) -> str:
    """Return flux, flux2 or chroma for a network with FLUX.1's block names.

    FLUX.2's MLP is 3 times as wide as its tokens, FLUX.1's 4 times. Chroma's blocks equal FLUX.1's in
    every name and width, so only metadata distinguishes them.
    """
    if _widths(modules, _FLUX) & _FLUX2_WIDTHS:
        return "flux2"
    if _HUNYUAN_WIDTH in _widths(modules, _FLUX):
        return "hunyuan"
    outer, inner = (
        _widths(modules, re.compile(r"qkv$|linear1$")),
        _widths(modules, re.compile(r"img_mlp_2$")),
    )
    joined = _widths(modules, re.compile(r"single_blocks_\d+_linear2$"))
    if any(wide == 3 * width for width in outer for wide in inner) or any(
        wide == 4 * width for width in outer for wide in joined
    ):
        return "flux2"
    return metadata_family if metadata_family in ("flux2", "chroma") else "flux"


def _joint_family(modules: Shapes, metadata_family: str | None) -> str:
    if _widths(modules, _JOINT) & _SD3_WIDTHS:
        return "sd3"
    numbers = [int(match[1]) for name in modules if (match := _JOINT.search(name))]
    if metadata_family:
        return metadata_family
    # FLUX.1 and Qwen-Image are both 3072 wide; FLUX.1 has 19 joint blocks, Qwen-Image 60.
    if 3072 in _widths(modules, _JOINT):
        return "qwen" if max(numbers) >= _FLUX_DOUBLE_BLOCKS else "flux"
    return "sd3"


def _text_family(modules: Iterable[str]) -> str | None:
    """Return the family of an adapter of text encoders alone: SD 3 has three encoders, SDXL two."""
    if any(re.search(r"lora_te3_|text_encoder_3_", name) for name in modules):
        return "sd3"
    return "sdxl" if any(_SECOND_ENCODER.search(name) for name in modules) else None


def _widths(modules: Shapes, pattern: re.Pattern[str]) -> set[int]:
    """Return the input widths of the modules whose name matches the pattern."""
    return {shape[1] for name, shape in modules.items() if len(shape) > 1 and pattern.search(name)}


# ---- weight files, by the marks of signatures.toml, which says how they are written

# The longest first: "model." also starts "model.diffusion_model.".
PREFIXES = ("model.diffusion_model.", "diffusion_model.", "net.", "model.")
_MARK = re.compile(r"(!?)(.+?)(?:\[(\d)\]=(\d+))?")


def other_model(header: Header, *, family: str, file_name: str) -> str | None:
    """Return which model without a text-to-image family of ours a file is; `family` is the one it resembles."""
    tensors = _unprefixed(header)
    model_names = (
        model
        for model, base, pattern in signature_tables()["named_models"]
        if base == family and re.search(pattern, file_name.lower())
    )
    return first_fit(tensors, "other_models") or next(model_names, None)


def text_encoder_in(header: Header) -> tuple[str, str, int] | None:
    """Return name, kind and width of the text encoder that a file holds, None where it holds none.

    The width is 0 where the table names no tensor of that length.
    """
    for name, marks, kind, width_ending in signature_tables()["text_encoders"]:
        if fits(header, marks):
            shapes = [header[key].shape for key in header if key.endswith(width_ending or "?")]
            return name, kind, next((shape[0] for shape in shapes if shape), 0)
    return None


@cache
def signature_tables() -> Mapping[str, Any]:
    """Return the contents of signatures.toml."""
    tables: Mapping[str, Any] = tomllib.loads(
        Path(__file__).with_name("signatures.toml").read_text(encoding="utf-8")
    )
    return tables


def _unprefixed(header: Header) -> Header:
    for prefix in PREFIXES:
        # One stray tensor ("model.x" beside a network without prefix) makes no prefix.
        if sum(name.startswith(prefix) for name in header) > len(header) // 10:
            return {name.removeprefix(prefix): info for name, info in header.items()}
    return header


def first_fit(tensors: Header, table: str) -> str | None:
    """Return the model of the first row of a table whose marks fit, None where none does."""
    return next((model for model, marks in signature_tables()[table] if fits(tensors, marks)), None)


def fits(tensors: Header, marks: str) -> bool:
    """Return whether a file with these tensors has all marks, as signatures.toml writes them."""
    return all(
        _has(tensors, mark) for mark in marks.format(**signature_tables()["abbreviations"]).split()
    )


def _has(tensors: Header, mark: str) -> bool:
    match = _MARK.fullmatch(mark)
    assert match is not None
    absent, name, axis, size = match.groups()
    names: Iterable[str] = fnmatch.filter(tensors, name) if "*" in name else {name} & tensors.keys()
    shapes = [tensors[each].shape for each in names]
    if size:
        shapes = [shape for shape in shapes if shape[int(axis) : int(axis) + 1] == (int(size),)]
    return bool(shapes) != bool(absent)
