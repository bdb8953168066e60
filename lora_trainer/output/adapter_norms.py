"""Frobenius norms of what an adapter adds to the weights, from its factors, without torch.

Input is one tensor after the other, as a file has them; output a norm per module and per block.
The [out, in] matrices are never formed but for LoHa, and there a slice at a time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lora_trainer.output.adapter_names import Kind, Role

Matrix = np.ndarray[Any, np.dtype[np.float64]]
MAX_RANK = 512
MAX_LOHA_ELEMENTS = 2**28
"""Modules beyond these get no norm: it would take minutes, and a hostile file could ask for years."""
_SLICE_ELEMENTS = 2**21
_SIDES: Mapping[Kind, tuple[tuple[Role, Role], ...]] = {
    "lora": (("up", "down"),),
    "lokr": (("w1_a", "w1_b"), ("w2_a", "w2_b")),
}
_PREFIXES = re.compile(
    r"^(?:lora_unet_|lora_transformer_|lycoris_|unet\.|transformer\.|diffusion_model\.|base_model\.model\.)+"
)
_TEXT = re.compile(r"^(?:lora_te(?P<flat>\d?)_|text_encoder(?:_(?P<dotted>\d))?\.|text_encoders\.)")
_BLOCK = re.compile(
    r"(?:^|_)(?P<name>(?:(?:down|up|input|output|double|single|transformer|single_transformer)_)?"
    r"(?:blocks|layers))_(?P<number>\d+)(?:_|$)"
)
_MIDDLE = re.compile(r"(?:^|_)(mid|middle)_block(?:_|$)")


@dataclass(kw_only=True)
class Norms:
    """Collects tensors and tells the norm of each module's update at strength 1.

    OFT has none: what it changes depends on the base. The magnitudes of DoRA are left out likewise.
    """

    _grams: dict[str, dict[Role, Matrix]] = field(default_factory=dict)
    _squares: dict[str, dict[Role, float]] = field(default_factory=dict)
    _loha: dict[str, dict[Role, Matrix]] = field(default_factory=dict)
    _found: dict[str, float] = field(default_factory=dict)

    def add(self, module: str, kind: Kind, role: Role, values: Matrix) -> None:
        """Take one finite tensor of a module, of any shape."""
        if values.ndim < 2 or not values.size:
            return
        # What overflows gives no norm; a warning would say no more.
        with np.errstate(all="ignore"):
            self._add(module, kind, role, values.reshape(values.shape[0], -1))

    def _add(self, module: str, kind: Kind, role: Role, matrix: Matrix) -> None:
        if kind == "loha":
            held = self._loha.setdefault(module, {})
            held[role] = matrix
            if len(held) == 4:
                self._finish_loha(module, self._loha.pop(module))
        elif role in ("w1", "w2"):
            self._squares.setdefault(module, {})[role] = float((matrix * matrix).sum())
        elif role in ("up", "w1_a", "w2_a"):
            self._add_gram(module, role, matrix.T)
        elif role in ("down", "w1_b", "w2_b"):
            self._add_gram(module, role, matrix)

    def of(self, module: str, kind: Kind) -> float | None:
        """Return |update| at strength 1; None where tensors are missing or do not fit together."""
        norm = self._found.get(module) if kind == "loha" else self._product(module, kind)
        return norm if norm is not None and math.isfinite(norm) else None

    def _product(self, module: str, kind: Kind) -> float | None:
        product = 1.0
        for number, (left, right) in enumerate(_SIDES.get(kind, ()), 1):
            whole = self._squares.get(module, {}).get("w1" if number == 1 else "w2")
            grams = self._grams.get(module, {})
            if whole is not None and kind == "lokr":
                product *= whole
            elif left in grams and right in grams and grams[left].shape == grams[right].shape:
                # |A B|^2 = sum of (A^T A) * (B B^T), elementwise.
                with np.errstate(all="ignore"):
                    squared = float((grams[left] * grams[right]).sum())
                product *= squared if squared >= 0 or math.isnan(squared) else 0.0
            else:
                return None
        return math.sqrt(product) if kind in _SIDES and product >= 0 else None

    def _add_gram(self, module: str, role: Role, thin: Matrix) -> None:
        if thin.shape[0] <= MAX_RANK:
            self._grams.setdefault(module, {})[role] = thin @ thin.T

    def _finish_loha(self, module: str, factors: Mapping[Role, Matrix]) -> None:
        left, right = (factors["w1_a"], factors["w1_b"]), (factors["w2_a"], factors["w2_b"])
        shapes = {(a.shape[0], b.shape[1]) for a, b in (left, right)}
        if len(shapes) > 1 or any(a.shape[1] != b.shape[0] for a, b in (left, right)):
            return
        outputs, inputs = left[0].shape[0], left[1].shape[1]
        if outputs * inputs > MAX_LOHA_ELEMENTS or left[0].shape[1] > MAX_RANK:
            return
        rows = max(1, _SLICE_ELEMENTS // inputs)
        squared = 0.0
        for start in range(0, outputs, rows):
            part = slice(start, start + rows)
            product = (left[0][part] @ left[1]) * (right[0][part] @ right[1])
            squared += float((product * product).sum())
        self._found[module] = math.sqrt(squared)


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
