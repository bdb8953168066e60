"""int8 products: which layouts the device has, what a product takes, how far off it is; and whole steps.

A layer's product is measured as the network computes it: made whole in 16 bits, or code by code; the
backward product also with the weight made whole for it. Steps are those of `ways.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from trainee import Case, Size

from benchmarks.gpu_day import ways
from benchmarks.gpu_day.device import Here, median_s
from lora_trainer.common.errors import first_line
from lora_trainer.config.choices import has_int8_product
from lora_trainer.network.quantize import QuantizedLinear, quantizable
from lora_trainer.network.quantized_matmul import (
    Int8Product,
    RestoredProduct,
    WeightMatmul,
    int8_layouts,
)

DTYPE = torch.bfloat16


def measure(values: dict[str, Any], here: Here) -> dict[str, Any]:
    """Measure the layers of a base, or a step in one way."""
    if "way" in values:
        return ways.measure(values, here)
    size: Size = "tiny" if here.tiny else "true size"
    case = Case.from_words(f"{values['base']}:64:1:bf16", device=here.device, size=size)
    shapes = layer_shapes(case)
    rows = values["rows"]
    return {
        "layers": [
            layer(fan_in, out, rows=count, device=here.device)
            for fan_in, out in shapes
            for count in rows
        ],
        "fallback": vars(int8_layouts(shapes, device=here.device)),
    }


def layer_shapes(case: Case) -> list[tuple[int, int]]:
    """Return (fan_in, out) of the layers of a base that can be multiplied code by code, each once."""
    with torch.device("meta"):
        network = case.family.empty_denoiser(case.facts.architecture)
    shapes = quantizable(network, skip=case.family.traits.quantization_skip).values()
    return sorted({shape for shape in shapes if has_int8_product(*shape)})


def layer(fan_in: int, out: int, *, rows: int, device: torch.device) -> dict[str, Any]:
    """Return seconds of the products of one layer, and the cosines of those code by code."""
    generator = torch.Generator(device).manual_seed(fan_in * out)

    def noise(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=DTYPE)

    plain = nn.Linear(fan_in, out, bias=False, device=device, dtype=DTYPE)
    plain.weight.data = noise(out, fan_in) * fan_in**-0.5
    quantized = QuantizedLinear(plain, "int8", device=device, matmul="int8")
    stored, x, gradient = quantized.stored(), noise(rows, fan_in), noise(rows, out)
    weight = plain.weight.detach()
    made_whole = RestoredProduct(quantized.restored)
    return {
        "fan_in": fan_in,
        "out": out,
        "rows": rows,
        "forward": _compared(made_whole, Int8Product(), x, stored, device=device),
        "backward": _compared(
            made_whole, Int8Product(), gradient, stored, device=device, backward=True
        ),
        "whole_forward_s": median_s(lambda: x @ weight.T, device=device),
        "whole_backward_s": median_s(lambda: gradient @ weight, device=device),
    }


def _compared(
    made_whole: WeightMatmul,
    coded: WeightMatmul,
    x: Tensor,
    stored: Sequence[Tensor],
    *,
    device: torch.device,
    backward: bool = False,
) -> dict[str, Any]:
    def product(kind: WeightMatmul) -> Tensor:
        return kind.backward(x, stored) if backward else kind.forward(x, stored)

    expected = product(made_whole).flatten().double()
    found = {"dequantized_s": median_s(lambda: product(made_whole), device=device)}
    try:
        result = product(coded).flatten().double()
    except RuntimeError as error:
        return {**found, "refused": first_line(error)}
    return {
        **found,
        "int8_s": median_s(lambda: product(coded), device=device),
        "cosine": float(F.cosine_similarity(result, expected, dim=0)),
    }
