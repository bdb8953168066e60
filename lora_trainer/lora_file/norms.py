"""Frobenius norms of what an adapter adds to the weights, from its factors, without torch.

Input is an `Update`, output its norm; the [out, in] matrices are never formed but for LoHa, and there
a slice at a time. Every command that says how large an update is asks here.
"""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np

from lora_trainer.lora_file.module_update import Update

Matrix = np.ndarray[Any, np.dtype[np.float64]]
MAX_RANK = 512
MAX_LOHA_ELEMENTS = 2**28
"""Modules beyond these get no norm: it would take minutes, and a hostile file could ask for years."""
_SLICE_ELEMENTS = 2**21
_BASED = frozenset({"oft", "oft_in", "glora", "ia3"})
"""Kinds whose update is made of the weight it changes."""
_PREFIXES = re.compile(
    r"^(?:lora_unet_|lora_transformer_|lycoris_|unet\.|transformer\.|diffusion_model\.|base_model\.model\.)+"
)
_TEXT = re.compile(r"^(?:lora_te(?P<flat>\d?)_|text_encoder(?:_(?P<dotted>\d))?\.|text_encoders\.)")
_BLOCK = re.compile(
    r"(?:^|_)(?P<name>(?:(?:down|up|input|output|double|single|joint|transformer|single_transformer)_)?"
    r"(?:blocks|layers))_(?P<number>\d+)(?:_|$)"
)
_MIDDLE = re.compile(r"(?:^|_)(mid|middle)_block(?:_|$)")


def update_norm(update: Update) -> float | None:
    """Return |update|; None where it depends on the base, is not finite or would take too long.

    The magnitudes of DoRA and changes of biases are left out.
    """
    if update.kind in _BASED or update.rows is not None:
        return None
    with np.errstate(all="ignore"):
        norm = _norm(update)
    if norm is None:
        return None
    norm *= abs(update.scale)
    return norm if math.isfinite(norm) else None


def _norm(update: Update) -> float | None:
    arrays = update.arrays
    match update.kind:
        case "lora":
            return product_norm(arrays["up"], arrays["down"])
        case "loha":
            return _loha_norm(arrays)
        case "lokr":
            first, second = (_factor_norm(arrays, name) for name in ("w1", "w2"))
            return None if first is None or second is None else first * second
    whole = arrays.get("difference")
    return 0.0 if whole is None else float(np.linalg.norm(whole.astype(np.float64)))


def product_norm(left: Matrix, right: Matrix) -> float | None:
    """|A B| from |A B|^2 = sum of (A^T A) * (B B^T), elementwise; kernels may be unflattened."""
    tall = np.asarray(left.reshape(left.shape[0], -1), dtype=np.float64)
    wide = np.asarray(right.reshape(right.shape[0], -1), dtype=np.float64)
    if wide.shape[0] > MAX_RANK:
        return None
    squared = float(((tall.T @ tall) * (wide @ wide.T)).sum())
    return math.sqrt(squared) if squared >= 0 else (0.0 if squared < 0 else math.nan)


def _factor_norm(arrays: Any, name: str) -> float | None:
    if name in arrays:
        return float(np.linalg.norm(arrays[name].astype(np.float64)))
    return product_norm(arrays[f"{name}_a"], arrays[f"{name}_b"])


def _loha_norm(arrays: Any) -> float | None:
    left, right = (arrays["w1_a"], arrays["w1_b"]), (arrays["w2_a"], arrays["w2_b"])
    outputs, inputs = left[0].shape[0], left[1].shape[1]
    if outputs * inputs > MAX_LOHA_ELEMENTS or left[0].shape[1] > MAX_RANK or not inputs:
        return None
    wide = [np.asarray(array, dtype=np.float64) for pair in (left, right) for array in pair]
    rows = max(1, _SLICE_ELEMENTS // inputs)
    squared = 0.0
    for start in range(0, outputs, rows):
        part = slice(start, start + rows)
        product = (wide[0][part] @ wide[1]) * (wide[2][part] @ wide[3])
        squared += float((product * product).sum())
    return math.sqrt(squared) if squared >= 0 else math.nan


def block_of(module: str) -> str:
    """Return the block that a module as spelt in a file belongs to, such as "down_blocks.1"."""
    text = _TEXT.match(module)
    prefix = ""
    if text:
        number = text["flat"] or text["dotted"] or "1"
        prefix = "text_encoder." if number == "1" else f"text_encoder_{number}."
        module = module[text.end() :]
    name = _PREFIXES.sub("", module).replace(".", "_")
    if _MIDDLE.search(name):
        return f"{prefix}mid_block"
    match = _BLOCK.search(name)
    return f"{prefix}{match['name']}.{match['number']}" if match else f"{prefix}other"
