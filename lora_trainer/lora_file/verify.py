"""How far an exported file is from the live adapter, and whether rounding alone explains it.

Input is a file and the live tensors, output norms per module. The file is read as a stranger's
would be (`adapter_read`): strength from the file itself, every module present, none unknown.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from lora_trainer.common.errors import InputError, TrainingStopped
from lora_trainer.config.config import Precision
from lora_trainer.families.base import Family
from lora_trainer.lora.tensors import (
    DTYPES,
    AdapterTensors,
    ModuleTensors,
    rotation,
    split_key,
    update,
)
from lora_trainer.lora_file.names import SCALED, STRONG, file_names
from lora_trainer.lora_file.norms import product_norm
from lora_trainer.lora_file.read_tensors import OpenAdapter, open_adapter

_ALPHA_ROUNDING = 2e-7
"""A LoRA's alpha is a float32 in the file, by which its numbers are off on top of their own rounding."""
_CHUNK_ELEMENTS = 2**22
"""Elements of a LoHa's update formed at a time: 32 MiB in float64."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """One module read back: norms of read - live and of live, and whether rounding explains the former.

    Norms are Frobenius norms of the update; of an OFT, of its rotations less the identity.
    """

    key: str
    error: float
    size: float
    explained: bool

    @property
    def relative_error(self) -> float:
        """|read - live| / |live|; infinite where the live update is zero and the file's is not."""
        if self.error == 0:
            return 0.0
        return self.error / self.size if self.size > 0 else float("inf")


def matches(
    source: bytes | Path, tensors: AdapterTensors, *, family: Family, precision: Precision
) -> Iterator[Match]:
    """Compare every module; raises TrainingStopped when the file does not hold these modules."""
    modules: dict[str, list[str]] = {}
    for key in tensors:
        component, module = split_key(key)
        modules.setdefault(component, []).append(module)
    try:
        with open_adapter(source, names=file_names(family, modules)) as adapter:
            for key, live in tensors.items():
                yield _match(key, live, _read(adapter, key, live), precision=precision)
    except InputError as error:
        raise _not_the_adapter(error.found) from None


def _read(adapter: OpenAdapter, key: str, live: ModuleTensors) -> ModuleTensors:
    if key not in adapter:
        raise _not_the_adapter(f"{key} is missing")
    read = adapter[key]
    if read.kind != live.kind or _shapes(read) != _shapes(live):
        raise _not_the_adapter(f"{key} has other tensors or shapes")
    return read


def _shapes(module: ModuleTensors) -> dict[str, tuple[int, ...]]:
    """Kernels may be flattened: readers take factors as matrices."""
    return {
        name: (tensor.shape[0], math.prod(tensor.shape[1:]))
        for name, tensor in sorted(module.tensors.items())
    }


def _not_the_adapter(fault: str) -> TrainingStopped:
    return TrainingStopped(
        f"the exported file does not hold the adapter: {fault}", fix="report this as a bug"
    )


def _match(key: str, live: ModuleTensors, read: ModuleTensors, *, precision: Precision) -> Match:
    live, read = _float64(live), _float64(read)
    error, size = _NORMS.get(live.kind, _tensor_norms)(live, read)
    # The numbers are compared and not the norm of the update: LoHa and LoKr multiply factors element by
    # element, where a bound on the norm would pass anything.
    slack = _ALPHA_ROUNDING if live.kind == "lora" else 0.0
    explained = all(
        _is_rounding(read.tensors[name].reshape(exact.shape), exact, precision, slack=slack)
        for name, exact in _at_scale(live, read.scale).items()
    )
    return Match(key=key, error=error, size=size, explained=explained)


def _at_scale(module: ModuleTensors, scale: float) -> Mapping[str, Tensor]:
    """Return the tensors of a module as a file of this strength must hold them."""
    if scale == module.scale or module.kind not in SCALED:
        return module.tensors
    factor = module.scale / scale if scale else math.inf  # nothing explains a strength that is lost
    strong = STRONG & module.tensors.keys()
    return {**module.tensors, **{name: module.tensors[name] * factor for name in strong}}


def _float64(module: ModuleTensors) -> ModuleTensors:
    tensors = {
        name: tensor.detach().cpu().to(torch.float64)  # MPS has no float64
        for name, tensor in module.tensors.items()
    }
    return replace(module, tensors=tensors)


def _is_rounding(read: Tensor, live: Tensor, precision: Precision, *, slack: float) -> bool:
    """Say whether rounding to `precision` explains every number read."""
    # A number moves by at most eps / 2 of itself, or half a subnormal spacing near zero. A fixed percentage
    # would refuse the tiny values of a first step and pass a wrong alpha in bf16.
    limits = torch.finfo(DTYPES[precision])
    spacing = live.abs() * (limits.eps / 2 + slack) + limits.tiny * limits.eps / 2
    return bool(((read - live).abs() <= spacing).all())


# ---- norms, without forming the [out, in] matrices


def _low_rank_norms(live: ModuleTensors, read: ModuleTensors) -> tuple[float, float]:
    # read - live = U' D' - U D = (U' - U) D' + U (D' - D), which is one product of factors side by side.
    # Differences are taken before products, so that equal files give exactly zero.
    up, up_read = (module.tensors["up"].flatten(1) * module.scale for module in (live, read))
    down, down_read = live.tensors["down"].flatten(1), read.tensors["down"].flatten(1)
    columns = torch.cat([up_read - up, up], dim=1)
    rows = torch.cat([down_read, down_read - down], dim=0)
    return product_norm(columns.numpy(), rows.numpy()), product_norm(up.numpy(), down.numpy())


def _loha_norms(live: ModuleTensors, read: ModuleTensors) -> tuple[float, float]:
    # Factors multiplied element by element have no norm in closed form, so rows of both updates are formed.
    rows = max(1, _CHUNK_ELEMENTS // live.tensors["w1_b"].shape[1])
    error = size = 0.0
    for start in range(0, live.tensors["w1_a"].shape[0], rows):
        part = slice(start, start + rows)
        exact = update(_rows(live, part))
        error += float((update(_rows(read, part)) - exact).square().sum())
        size += float(exact.square().sum())
    return math.sqrt(error), math.sqrt(size)


def _rows(module: ModuleTensors, part: slice) -> ModuleTensors:
    tensors = {
        name: tensor[part] if name.endswith("_a") else tensor.flatten(1)
        for name, tensor in module.tensors.items()
        if name.startswith("w")  # a magnitude or a bias is no part of the product
    }
    return replace(module, tensors=tensors)


def _lokr_norms(live: ModuleTensors, read: ModuleTensors) -> tuple[float, float]:
    # read - live = A' x B' - A x B = dA x B' + A x dB, and <A x B, C x D> = <A, C> <B, D>, so the norm of
    # the sum follows from inner products of the small factors.
    first, second = _kron_factor(live, "w1") * live.scale, _kron_factor(live, "w2")
    first_read, second_read = _kron_factor(read, "w1") * read.scale, _kron_factor(read, "w2")
    moved_first, moved_second = first_read - first, second_read - second
    squared = (
        _dot(moved_first, moved_first) * _dot(second_read, second_read)
        + 2 * _dot(moved_first, first) * _dot(second_read, moved_second)
        + _dot(first, first) * _dot(moved_second, moved_second)
    )
    size = math.sqrt(_dot(first, first) * _dot(second, second))
    return math.sqrt(max(0.0, squared)), size


def _kron_factor(module: ModuleTensors, name: str) -> Tensor:
    if name in module.tensors:
        return module.tensors[name].flatten(1)
    return module.tensors[f"{name}_a"] @ module.tensors[f"{name}_b"].flatten(1)


def _dot(first: Tensor, second: Tensor) -> float:
    return float((first * second).sum())


def _oft_norms(live: ModuleTensors, read: ModuleTensors) -> tuple[float, float]:
    # The update is (R - I) W. Without W the rotations are compared, and R - I has the size of the update.
    rotations, rotations_read = rotation(live.tensors["blocks"]), rotation(read.tensors["blocks"])
    identity = torch.eye(rotations.shape[-1], dtype=torch.float64)
    return float((rotations_read - rotations).norm()), float((rotations - identity).norm())


def _tensor_norms(live: ModuleTensors, read: ModuleTensors) -> tuple[float, float]:
    """Norms over all numbers of a module, for kinds whose update is made of the weight, or is them."""
    pairs = [(exact, read.tensors[name]) for name, exact in _at_scale(live, read.scale).items()]
    error = sum(_dot(other - exact, other - exact) for exact, other in pairs)
    return math.sqrt(error), math.sqrt(sum(_dot(exact, exact) for exact, _ in pairs))


_NORMS = {"lora": _low_rank_norms, "loha": _loha_norms, "lokr": _lokr_norms, "oft": _oft_norms}
