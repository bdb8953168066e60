"""How far an exported file is from the live adapter, and how far rounding alone can take it.

Input is a file's bytes and the live tensors, output norms per module. The file is read as a loader
reads it: strength from the file itself, every module present, none unknown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from safetensors.torch import load
from torch import Tensor

from lora_trainer.config import Precision
from lora_trainer.errors import TrainingStopped
from lora_trainer.families.base import Family
from lora_trainer.output.adapter_tensors import DTYPES, PEFT_METADATA, AdapterTensors, LoraPair

# Norms are roots of float64 sums of products: below 1e-8 of the factors' sizes they are noise.
_NOISE = 1e-7


@dataclass(frozen=True, kw_only=True)
class Match:
    """One module read back: Frobenius norms of read - live and of live, and live alpha / rank."""

    module: str
    error: float
    size: float
    scale: float

    @property
    def relative_error(self) -> float:
        """|read - live| / |live|; infinite where the live update is zero and the file's is not."""
        if self.error == 0:
            return 0.0
        return self.error / self.size if self.size > 0 else float("inf")


def matches(
    data: bytes, tensors: AdapterTensors, *, alpha: float, family: Family
) -> Iterator[Match]:
    """Compare the merged update of every module; raises TrainingStopped when the modules differ."""
    entries, named = header(data), load(data)
    for module, live in tensors.items():
        read, read_alpha = _take_pair(named, entries, module=module, family=family)
        if (read.down.shape, read.up.shape) != (live.down.shape, live.up.shape):
            raise _not_the_adapter(f"{module} has other shapes")
        scale = alpha / live.rank
        error, size = _norms(live, read, scale=scale, read_scale=read_alpha / read.rank)
        yield Match(module=module, error=error, size=size, scale=scale)
    if named:
        raise _not_the_adapter(f"{min(named)} belongs to no module")


def header(data: bytes) -> dict[str, str]:
    """Return the metadata of safetensors bytes that this program made."""
    length = int.from_bytes(data[:8], "little")
    entries: dict[str, str] = json.loads(data[8 : 8 + length])["__metadata__"]
    return entries


def explained_by_rounding(pair: LoraPair, *, scale: float, precision: Precision) -> float:
    """Return the largest |read - live| that rounding both factors to `precision` can cause.

    An element moves by at most eps / 2 of itself, or half a subnormal spacing near zero. A fixed
    percentage would refuse the tiny values of a first step and pass a wrong alpha in bf16.
    """
    up, down = _matrix(pair.up), _matrix(pair.down)
    up_size, down_size = float(up.norm()), float(down.norm())
    moved_up, moved_down = _rounding(up, precision), _rounding(down, precision)
    moved = moved_up * down_size + (up_size + moved_up) * moved_down
    return abs(scale) * (moved + _NOISE * up_size * down_size)


def _rounding(matrix: Tensor, precision: Precision) -> float:
    limits = torch.finfo(DTYPES[precision])
    near_zero = limits.tiny * limits.eps / 2 * float(matrix.numel() ** 0.5)
    return limits.eps / 2 * float(matrix.norm()) + near_zero


def _take_pair(
    named: dict[str, Tensor], entries: Mapping[str, str], *, module: str, family: Family
) -> tuple[LoraPair, float]:
    """Remove one module's tensors from `named`; return them with the alpha the file states."""
    kohya, diffusers = family.kohya_module(module), family.diffusers_module(module)
    try:
        if f"{kohya}.lora_down.weight" in named:
            down, up = named.pop(f"{kohya}.lora_down.weight"), named.pop(f"{kohya}.lora_up.weight")
            return LoraPair(down=down, up=up), float(named.pop(f"{kohya}.alpha"))
        down, up = named.pop(f"{diffusers}.lora_A.weight"), named.pop(f"{diffusers}.lora_B.weight")
        component = diffusers.partition(".")[0]
        alpha = json.loads(entries[PEFT_METADATA])[f"{component}.lora_alpha"]
        return LoraPair(down=down, up=up), float(alpha)
    except KeyError as error:
        raise _not_the_adapter(f"{module} lacks {error.args[0]}") from None


def _not_the_adapter(what: str) -> TrainingStopped:
    return TrainingStopped(
        f"the exported file does not hold the adapter: {what}", fix="report this as a bug"
    )


def _norms(
    live: LoraPair, read: LoraPair, *, scale: float, read_scale: float
) -> tuple[float, float]:
    """Return |read - live| and |live| without forming the [out, in] matrices.

    read - live = (U' - U) D' + U (D' - D) is one product of thin factors. Differences are taken
    before products, so equal files give exactly zero.
    """
    up, up_read = _matrix(live.up) * scale, _matrix(read.up) * read_scale
    down, down_read = _matrix(live.down), _matrix(read.down)
    left = torch.cat([up_read - up, up], dim=1)
    right = torch.cat([down_read, down_read - down], dim=0)
    return _product_norm(left, right), _product_norm(up, down)


def _matrix(tensor: Tensor) -> Tensor:
    return tensor.detach().to(device="cpu", dtype=torch.float64).flatten(1)


def _product_norm(left: Tensor, right: Tensor) -> float:
    """|A B| from |A B|^2 = sum of (A^T A) * (B B^T), elementwise."""
    squared = ((left.T @ left) * (right @ right.T)).sum()
    return float(squared.clamp_min(0).sqrt())
