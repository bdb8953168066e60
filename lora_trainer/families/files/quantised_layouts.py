"""Quantised weights in a safetensors file: what the file states of its layers, and which layouts are read.

The facts, and where they are from (read in November 2026):

- A layer's layout stands in `LAYER.comfy_quant`, JSON as bytes, or for all layers in the file's metadata under
  `_quantization_metadata`, which then counts: ComfyUI's comfy/ops.py (`_load_quantized_module`), comfy/utils.py
  (`convert_old_quants`) and QUANTIZATION.md. Files of comfy-kitchen's converter name the layers there without the
  prefix of the denoiser.
- fp8: `weight_scale` (formerly `scale_weight`), a number; by row in `float8_e4m3fn_rowwise` of convert_to_quant 1.3.4
  (comfy/quant_ops.py), and in files without a word on their layout.
- int8_tensorwise: I8 and `weight_scale`, a number or one per row. With `convrot` each group of `convrot_groupsize`
  columns was turned by a regular Hadamard matrix before: comfy-kitchen 0.2.40, tensor/int8.py and int8_utils.py.
- mxfp8: F8_E4M3 and `weight_scale`, a power of two for 32 columns (E8M0, also as U8), in the blocked order of cuBLAS,
  rows padded to 128 and columns to 4: comfy-kitchen, tensor/mxfp8.py and float_utils.py (`to_blocked`).
- nvfp4: two E2M1 values in a byte, the first in the high half, `weight_scale` (E4M3, also as U8) for 16 columns in
  the same order, and `weight_scale_2`, a number: comfy-kitchen, tensor/nvfp4.py.
- `pre_quant_scale` multiplies a layer's inputs: comfy/ops.py. `input_scale` is for products in fp8 and not needed.

What states no layout and is not fp8 cannot be told from the layouts of other programs (NVIDIA's own NVFP4 has another
order of scales and halves), so it is refused. So is a turn in any layout but int8's, which ComfyUI does not know.
Torch-free.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from lora_trainer.families.base.layout import Header, TensorInfo

Kind = Literal["scaled", "int8", "mxfp8", "nvfp4"]
LAYOUT = "comfy_quant"
METADATA_KEY = "_quantization_metadata"
SCALES = ("weight_scale", "scale_weight")
SECOND_SCALE, INPUT_FACTORS = "weight_scale_2", "pre_quant_scale"
# Last parts of names of tensors that describe a weight beside them and are not weights themselves.
BESIDE_WEIGHTS = (
    *SCALES,
    *(SECOND_SCALE, INPUT_FACTORS, "scale_input", "input_scale", "scaled_fp8", LAYOUT),
)
MXFP8_BLOCK, NVFP4_BLOCK = 32, 16
# Rows and columns of one tile in cuBLAS's blocked order of scales.
TILE_ROWS, TILE_COLUMNS = 128, 4
# Group that a rotated layer has where it does not say its own.
CONVROT_GROUP = 256
_FLOATS = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})
_POWERS_OF_TWO = frozenset({"U8", "F8_E8M0"})


class UnreadLayoutError(ValueError):
    """A quantisation that is not read, as the words that follow "quantised"."""


@dataclass(frozen=True, kw_only=True)
class WeightLayout:
    """How one weight is stored; `scale` and the like are names of tensors of the file."""

    kind: Kind
    shape: tuple[int, ...]
    """The shape that the weight has in the network."""
    scale: str
    second_scale: str = ""
    input_factors: str = ""
    group: int = 0
    """Columns of each group that was rotated, 0: not rotated."""

    @property
    def beside(self) -> tuple[str, ...]:
        """The names of the tensors that are read with the weight."""
        return tuple(filter(None, (self.scale, self.second_scale, self.input_factors)))


def blocked_size(rows: int, columns: int) -> int:
    """Return how many scales a matrix of scales has in cuBLAS's order, with those that fill up its tiles."""
    return -(-rows // TILE_ROWS) * TILE_ROWS * (-(-columns // TILE_COLUMNS) * TILE_COLUMNS)


def stated_layers(
    tensors: Header, texts: Mapping[str, bytes], metadata: Mapping[str, Any]
) -> dict[str, Mapping[str, Any]]:
    """Return what a file states of its layers, weight -> its JSON; {} where that cannot be read.

    `texts` are the contents of the tensors `comfy_quant` by their names, `metadata` that of the file.
    """
    stated = {
        f"{name.removesuffix(LAYOUT)}weight": _object(content) for name, content in texts.items()
    }
    if (whole := metadata.get(METADATA_KEY)) is None:
        return stated
    layers = _object(whole).get("layers")
    if not isinstance(layers, dict):
        raise UnreadLayoutError(f"and its {METADATA_KEY} cannot be read")
    prefix = _prefix(tensors, layers)
    for layer, entry in layers.items():
        for name in (f"{layer}.weight", f"{prefix}{layer}.weight"):
            if name in tensors:  # a list may name layers that a file lacks
                stated[name] = entry if isinstance(entry, dict) else {}
    return stated


def _prefix(tensors: Header, layers: Mapping[str, Any]) -> str:
    """Return what stands before the names of layers in the file and not in the list of its metadata."""
    for layer in layers:
        if f"{layer}.weight" not in tensors:
            for name in tensors:
                if name.endswith(f".{layer}.weight"):
                    return name.removesuffix(f"{layer}.weight")
    return ""


def _object(text: str | bytes) -> Mapping[str, Any]:
    with suppress(ValueError, RecursionError):
        value = json.loads(text)
        if isinstance(value, dict):
            return value
    return {}


def quantised_weights(
    tensors: Header, stated: Mapping[str, Mapping[str, Any]]
) -> Iterator[tuple[str, WeightLayout | UnreadLayoutError]]:
    """Yield each weight that states a layout or has a scale, and its layout or why it is not read."""
    for name, info in tensors.items():
        stem = name.removesuffix("weight")
        scale = next((f"{stem}{end}" for end in SCALES if f"{stem}{end}" in tensors), "")
        if stem == name or (not scale and name not in stated):
            continue
        try:
            yield name, _layout(name, info, tensors, scale, stated.get(name))
        except UnreadLayoutError as error:
            yield name, error


def _layout(
    name: str, info: TensorInfo, tensors: Header, scale: str, entry: Mapping[str, Any] | None
) -> WeightLayout:
    """Return the layout of one weight; raises UnreadLayoutError. `entry` is what is stated of it, None: nothing."""
    kind: Kind = "scaled"
    group, called = 0, "fp8"
    if entry is not None:
        kind, group, called = _stated_kind(name, info, entry)
    elif info.dtype not in _FLOATS:
        raise UnreadLayoutError(f"without saying its layout ({name} is {info.dtype})")
    factors = f"{name.removesuffix('weight')}{INPUT_FACTORS}"
    second = f"{name.removesuffix('weight')}{SECOND_SCALE}" if kind == "nvfp4" else ""
    if not scale or (second and second not in tensors):
        raise UnreadLayoutError(f"as {called}, but the scale of {name} is missing")
    packed = 2 if kind == "nvfp4" else 1
    rows, columns = (info.shape[0], math.prod(info.shape[1:]) * packed) if info.shape else (1, 1)
    _check_scale(scale, tensors[scale], kind, rows, columns, called)
    if second and math.prod(tensors[second].shape) != 1:
        raise UnreadLayoutError(f"as {called} ({second} is {list(tensors[second].shape)})")
    if factors in tensors and math.prod(tensors[factors].shape) not in (1, columns):
        raise UnreadLayoutError(f"as {called} ({factors} is {list(tensors[factors].shape)})")
    shape = (rows, columns) if kind == "nvfp4" else info.shape
    if kind in ("mxfp8", "nvfp4"):
        bias = tensors.get(f"{name.removesuffix('weight')}bias")
        shape = _true_shape(name, (rows, columns), entry or {}, bias)
    return WeightLayout(
        kind=kind,
        shape=shape,
        scale=scale,
        second_scale=second,
        input_factors=factors if factors in tensors else "",
        group=group,
    )


def _stated_kind(name: str, info: TensorInfo, entry: Mapping[str, Any]) -> tuple[Kind, int, str]:
    """Return kind, group and the words for a stated layout; raises UnreadLayoutError for one that is not read."""
    called = str(entry.get("format") or "an unknown layout")[:40]
    # ComfyUI reads both, from a time when converters nested them.
    nested = entry.get("params")
    options = {**nested, **entry} if isinstance(nested, dict) else entry
    is_rotated = bool(options.get("convrot"))
    called += " ConvRot" if is_rotated else ""
    dtype, group = info.dtype, options.get("convrot_groupsize", CONVROT_GROUP)
    kind: Kind
    match entry.get("format"):
        case "float8_e4m3fn" | "float8_e4m3fn_rowwise" | "float8_e5m2" if not is_rotated:
            kind, is_it = "scaled", dtype in ("F8_E4M3", "F8_E5M2")
        case "int8_tensorwise":
            kind, is_it = "int8", dtype == "I8"
        case "mxfp8" if not is_rotated:
            kind = "mxfp8"
            is_it = dtype == "F8_E4M3" and len(info.shape) == 2 and not info.shape[1] % MXFP8_BLOCK
        case "nvfp4" if not is_rotated:
            kind = "nvfp4"
            is_it = dtype == "U8" and len(info.shape) == 2 and not 2 * info.shape[1] % NVFP4_BLOCK
        case _:
            raise UnreadLayoutError(f"as {called} ({name})")
    if not is_it:
        raise UnreadLayoutError(f"as {called} ({name} is {dtype} {list(info.shape)})")
    if not is_rotated:
        return kind, 0, called
    is_power_of_four = (
        isinstance(group, int) and group >= 4 and 4 ** round(math.log(group, 4)) == group
    )
    if not is_power_of_four or len(info.shape) != 2 or info.shape[1] % group:
        raise UnreadLayoutError(f"as {called} in groups of {group} ({name} is {list(info.shape)})")
    return kind, group, called


def _check_scale(
    name: str, scale: TensorInfo, kind: Kind, rows: int, columns: int, called: str
) -> None:
    """Raise UnreadLayoutError for scales of another number or type than a layout's."""
    count = math.prod(scale.shape)
    if kind == "mxfp8":
        is_it = count == blocked_size(rows, columns // MXFP8_BLOCK)
        is_it = is_it and scale.dtype in _POWERS_OF_TWO
    elif kind == "nvfp4":
        is_it = count == blocked_size(rows, columns // NVFP4_BLOCK)
        is_it = is_it and scale.dtype in ("U8", "F8_E4M3")
    else:
        is_it = count == 1 or (count == rows and scale.shape[0] == rows)
        if not is_it and kind == "scaled":
            called = f"{'mxfp8, fp8' if scale.dtype in _POWERS_OF_TWO else 'fp8'} in blocks"
        elif scale.dtype not in _FLOATS:
            is_it = False
    if not is_it:
        raise UnreadLayoutError(f"as {called} ({name} is {scale.dtype} {list(scale.shape)})")


def _true_shape(
    name: str, stored: tuple[int, int], entry: Mapping[str, Any], bias: TensorInfo | None
) -> tuple[int, ...]:
    """Return the shape in the network of a weight that may be padded: as its file says, or with its bias's rows."""
    stated = entry.get("orig_shape")
    if stated is None:
        rows = bias.shape[0] if bias is not None and len(bias.shape) == 1 else stored[0]
        # Rows are filled up to 32 at most (mxfp8); a bias of another length belongs to a damaged file.
        return (rows if 0 < stored[0] - rows < MXFP8_BLOCK else stored[0], stored[1])
    is_it = isinstance(stated, list) and len(stated) == 2 and all(type(n) is int for n in stated)
    if not is_it or not all(0 < n <= most for n, most in zip(stated, stored, strict=True)):
        raise UnreadLayoutError(f"({name} is {list(stored)}, its orig_shape {stated!r:.40})")
    return tuple(stated)
