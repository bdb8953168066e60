"""Whether products with an int8 base are computed code by code, and why. No torch.

Input is the load that fits and what it is judged by; output a choice with its reason. Both factors are
then rounded, so it is taken only where a step is predicted to be clearly faster, and never by priority
quality. It never makes a base int8.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lora_trainer.errors import MachineError
from lora_trainer.hardware import Gpu
from lora_trainer.planning.fitting import PRODUCTS_PAY_FROM, Judge
from lora_trainer.planning.loads import Load
from lora_trainer.quantization import BaseMatmul, has_int8_product

INT8_CAPABILITY = (8, 0)
"""Ampere and newer."""


@dataclass(frozen=True, kw_only=True)
class Matmul:
    """How the frozen weights are multiplied, and why."""

    value: BaseMatmul
    reason: str


def choose_matmul(load: Load, *, gpu: Gpu | None, priority: str, judge: Judge) -> Matmul:
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
