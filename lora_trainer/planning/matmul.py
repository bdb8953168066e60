"""How a quantised base is multiplied: dequantised first, or int8 by int8, and why. No torch.

Input is the load that fits and its judge; output a choice with its reason. int8 products round inputs and
gradients to 8 bits too, so they are chosen only where a step is predicted to be clearly faster, and never
by priority quality. They never cause a base to be quantised.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lora_trainer.common.errors import MachineError
from lora_trainer.config.base_precision import BaseMatmul, has_int8_product
from lora_trainer.hardware.machine import Gpu
from lora_trainer.planning.loads import Load
from lora_trainer.planning.search import PRODUCTS_PAY_FROM, Evaluator

INT8_CAPABILITY = (8, 0)
"""Lowest CUDA compute capability with fast int8 products: Ampere."""


@dataclass(frozen=True, kw_only=True)
class Matmul:
    """How the frozen weights are multiplied, and why."""

    value: BaseMatmul
    reason: str


def choose_matmul(load: Load, *, gpu: Gpu | None, priority: str, judge: Evaluator) -> Matmul:
    """Return the value of `memory.base_matmul=auto` for a load that fits."""
    codes = replace(load, base_matmul="int8")
    obstacle = f"the base is in {load.base_precision}" if load.base_precision != "int8" else ""
    if obstacle := obstacle or against_products(gpu=gpu, priority=priority):
        return Matmul(value="dequantized", reason=obstacle)
    seconds, faster = judge.seconds(replace(load, base_matmul="dequantized")), judge.seconds(codes)
    comparison = (
        f"about {faster:.3g} s a step with int8 products, {seconds:.3g} s dequantized (estimates)"
    )
    if seconds < PRODUCTS_PAY_FROM * faster:
        return Matmul(value="dequantized", reason=f"{comparison}: not clearly faster")
    if not judge.fits(codes):
        return Matmul(value="dequantized", reason=f"{comparison}, but int8 products do not fit")
    return Matmul(value="int8", reason=comparison)


def against_products(*, gpu: Gpu | None, priority: str) -> str:
    """Return why `auto` never chooses int8 products here; empty: it may."""
    if gpu is None:
        return "chosen on a GPU only"
    if priority == "quality":
        return "quality: int8 products would round inputs and gradients to 8 bits"
    if not _multiplies_int8(gpu):
        return f"{gpu.name} has no fast int8 products"
    return ""


def refuse_matmul(gpu: Gpu | None) -> None:
    """Raise MachineError if the GPU has no int8 products, which the user asked for; processors have them."""
    if gpu is not None and not _multiplies_int8(gpu):
        capability = gpu.compute_capability
        has = f"{capability[0]}.{capability[1]}" if capability else "unknown"
        raise MachineError(
            "memory.base_matmul=int8 needs a GPU of compute capability 8.0 or higher, "
            f"but that of {gpu.name} is {has}",
            fix="use --set memory.base_matmul=dequantized",
        )


def _multiplies_int8(gpu: Gpu) -> bool:
    return gpu.compute_capability is not None and gpu.compute_capability >= INT8_CAPABILITY


def dequantized_layers(shapes: Mapping[str, tuple[int, int]]) -> int:
    """Return how many of these layers, (fan_in, out) by name, have no int8 product for their size."""
    return sum(not has_int8_product(*shape) for shape in shapes.values())
