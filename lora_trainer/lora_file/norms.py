"""Frobenius norms of updates from their factors, without torch.

Input is an `Update`, output its norm; the [out, in] matrices are never formed but for LoHa, and there
a slice at a time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from lora_trainer.lora.adapter_size import BASED
from lora_trainer.lora_file.module_update import Update

Matrix = np.ndarray[Any, np.dtype[np.float64]]
MAX_RANK = 512
MAX_LOHA_ELEMENTS = 2**28
"""Modules beyond these get no norm: it would take minutes, and a hostile file could ask for years."""
_SLICE_ELEMENTS = 2**21
_INNER = frozenset({"down", "w1_b", "w2_b"})
"""Factors whose first dimension is the rank."""
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
    if update.kind in BASED or update.rows is not None:
        return None
    with np.errstate(all="ignore"):
        norm = _norm(update)
    if norm is None:
        return None
    norm *= abs(update.scale)
    return norm if math.isfinite(norm) else None


def _norm(update: Update) -> float | None:
    arrays = update.arrays
    if any(array.shape[0] > MAX_RANK for name, array in arrays.items() if name in _INNER):
        return None
    match update.kind:
        case "lora":
            return product_norm(arrays["up"], arrays["down"])
        case "loha":
            return _loha_norm(arrays)
        case "lokr":
            # Each number of A x B is one of A times one of B, so the squares of the norms multiply.
            return _factor_norm(arrays, "w1") * _factor_norm(arrays, "w2")
    difference = arrays.get("difference")
    return 0.0 if difference is None else float(np.linalg.norm(difference.astype(np.float64)))


def product_norm(first: Matrix, second: Matrix) -> float:
    """Return the norm of A B, from `first` [out, r, ...] and `second` [r, in, ...]; NaN where a number is NaN."""
    # |A B|^2 = tr(B^T A^T A B) = sum of (A^T A) * (B B^T), elementwise: only [r, r] matrices are formed, and
    # float64 keeps 8 digits after the root.
    tall = np.asarray(first.reshape(first.shape[0], -1), dtype=np.float64)
    wide = np.asarray(second.reshape(second.shape[0], -1), dtype=np.float64)
    squared = float(((tall.T @ tall) * (wide @ wide.T)).sum())
    # Rounding can put the sum for a product of zero a little below zero.
    return math.nan if math.isnan(squared) else math.sqrt(max(0.0, squared))


def _factor_norm(arrays: Mapping[str, Matrix], name: str) -> float:
    if name in arrays:
        return float(np.linalg.norm(arrays[name].astype(np.float64)))
    return product_norm(arrays[f"{name}_a"], arrays[f"{name}_b"])


def _loha_norm(arrays: Mapping[str, Matrix]) -> float | None:
    # (A B) * (C D) as one product of factors has the rank r^2, so the matrix is made some rows at a time.
    outputs, inputs = arrays["w1_a"].shape[0], arrays["w1_b"].shape[1]
    if outputs * inputs > MAX_LOHA_ELEMENTS or not inputs:
        return None
    a, b, c, d = (arrays[name].astype(np.float64) for name in ("w1_a", "w1_b", "w2_a", "w2_b"))
    rows = max(1, _SLICE_ELEMENTS // inputs)
    squared = 0.0
    for start in range(0, outputs, rows):
        part = slice(start, start + rows)
        product = (a[part] @ b) * (c[part] @ d)
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
