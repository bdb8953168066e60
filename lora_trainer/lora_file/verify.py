"""Whether an exported file holds the live adapter, as far as rounding explains the difference.

Input is a file and the live tensors. The file is read as a stranger's would be (`read_tensors`): strength
from the file itself, every module present, none unknown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from lora_trainer.common.errors import InputError, TrainingStopped
from lora_trainer.config.declare import Precision
from lora_trainer.families.base import Family
from lora_trainer.lora.tensors import DTYPES, AdapterTensors, ModuleTensors, split_key
from lora_trainer.lora_file.names import SCALED, STRONG, file_names
from lora_trainer.lora_file.read_tensors import open_adapter

_ALPHA_ROUNDING = 2e-7
"""A LoRA's alpha is a float32 in the file, by which its numbers are off on top of their own rounding."""


def check_written(
    source: bytes | Path, tensors: AdapterTensors, *, family: Family, precision: Precision
) -> None:
    """Read a file back; raises TrainingStopped when a module is missing, or differs by more than rounding."""
    modules: dict[str, list[str]] = {}
    for key in tensors:
        component, module = split_key(key)
        modules.setdefault(component, []).append(module)
    try:
        with open_adapter(source, names=file_names(family, modules)) as adapter:
            for key, live in tensors.items():
                if key not in adapter:
                    raise _not_the_adapter(f"{key} is missing")
                _check_module(key, live, adapter[key], precision=precision)
    except InputError as error:
        raise _not_the_adapter(error.found) from None


def _check_module(
    key: str, live: ModuleTensors, read: ModuleTensors, *, precision: Precision
) -> None:
    if read.kind != live.kind or _shapes(read) != _shapes(live):
        raise _not_the_adapter(f"{key} has other tensors or shapes")
    # The numbers are compared and not the norm of the update: LoHa and LoKr multiply factors element by
    # element, where a bound on the norm would pass anything.
    slack = _ALPHA_ROUNDING if live.kind == "lora" else 0.0
    live, read = _float64(live), _float64(read)
    for name, exact in _at_scale(live, read.scale).items():
        number = read.tensors[name].reshape(exact.shape)
        if not _is_rounding(number, exact, precision, slack=slack):
            error = float((number - exact).norm() / exact.norm())
            raise _not_the_adapter(f"{key} would differ by {error:.1e} in {name}")


def _shapes(module: ModuleTensors) -> dict[str, tuple[int, ...]]:
    """Kernels may be flattened: readers take factors as matrices."""
    return {
        name: (tensor.shape[0], math.prod(tensor.shape[1:]))
        for name, tensor in sorted(module.tensors.items())
    }


def _not_the_adapter(fault: str) -> TrainingStopped:
    return TrainingStopped(
        f"the exported file does not hold the adapter: {fault}",
        fix="report this as a bug; the saved states are unharmed",
    )


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
