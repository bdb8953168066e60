"""How a quantised base is multiplied, and what keeping its modulation away takes.

Whether products with an int8 base are computed code by code, and why. No torch.

Input is the load that fits and what it is judged by; output a choice with its reason. Both factors are
then rounded, so it is taken only where a step is predicted to be clearly faster, and never by priority
quality. It never makes a base int8.

Whether a base's modulation can be made ahead of the steps, its layers away from the device. Torch-free.

Input is the settings and what a family knows of the base; output why not, in words, or nothing.
`network/modulation.py` does it, `weight_bytes.py` counts it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from lora_trainer.common.errors import MachineError
from lora_trainer.config.base_precision import BaseMatmul, has_int8_product
from lora_trainer.families.base import BaseFacts
from lora_trainer.hardware.machine import Gpu
from lora_trainer.planning.loads import Load, RememberedCosts
from lora_trainer.planning.search import PRODUCTS_PAY_FROM, Evaluator

INT8_CAPABILITY = (8, 0)
"""Ampere and newer."""


@dataclass(frozen=True, kw_only=True)
class Matmul:
    """How the frozen weights are multiplied, and why."""

    value: BaseMatmul
    reason: str


def choose_matmul(load: Load, *, gpu: Gpu | None, priority: str, judge: Evaluator) -> Matmul:
    """Return what `memory.base_matmul=auto` becomes for a load that fits."""
    codes = replace(load, base_matmul="int8")
    obstacle = f"the base is kept in {load.base_precision}" if load.base_precision != "int8" else ""
    if obstacle := obstacle or against_products(gpu=gpu, priority=priority):
        return Matmul(value="dequantized", reason=obstacle)
    seconds, faster = judge.seconds(replace(load, base_matmul="dequantized")), judge.seconds(codes)
    told = f"about {faster:.3g} s a step int8 by int8, {seconds:.3g} s dequantized (estimates)"
    if seconds < PRODUCTS_PAY_FROM * faster:
        return Matmul(value="dequantized", reason=f"{told}: not clearly faster")
    if not judge.fits(codes):
        return Matmul(value="dequantized", reason=f"{told}, but the former does not fit")
    return Matmul(value="int8", reason=told)


def against_products(*, gpu: Gpu | None, priority: str) -> str:
    """Return why a base in int8 would not be multiplied so unasked; empty: it may be."""
    if gpu is None:
        return "for a card"
    if priority == "quality":
        return "quality: inputs and gradients are not rounded to 8 bits"
    if not _multiplies_int8(gpu):
        return f"{gpu.name} has no fast int8 products"
    return ""


def refuse_matmul(gpu: Gpu | None) -> None:
    """Raise MachineError where int8 products were asked for and the card has none; processors do."""
    if gpu is not None and not _multiplies_int8(gpu):
        found = gpu.compute_capability
        has = f"{found[0]}.{found[1]}" if found else "unknown"
        raise MachineError(
            "memory.base_matmul=int8 needs a card of compute capability 8.0 or higher, "
            f"and that of {gpu.name} is {has}",
            fix="use --set memory.base_matmul=dequantized",
        )


def _multiplies_int8(gpu: Gpu) -> bool:
    return gpu.compute_capability is not None and gpu.compute_capability >= INT8_CAPABILITY


def dequantized_layers(shapes: Mapping[str, tuple[int, int]]) -> int:
    """Return how many of these layers, (fan_in, out) by name, have no int8 product for their size."""
    return sum(not has_int8_product(*shape) for shape in shapes.values())


def against_modulation(
    values: Mapping[str, Any], *, facts: BaseFacts, costs: RememberedCosts
) -> str:
    """Return why modulation cannot be made ahead with these settings; empty: it can."""
    layers = set(costs.family.modulation_layers(facts))
    if not layers:
        return f"{facts.source} has no large layers that only noise levels and texts reach"
    if values["base.assistant"] is not None:
        return "an assistant runs beside layers that stay on the device"
    targets = values["adapter.targets"]
    if layers & costs.adapter_shapes(facts, targets=targets).keys():
        return f"adapter.targets={targets} trains adapters on these layers"
    return ""
