"""How the frozen base's weights may be kept, and how many bytes each way takes. Torch-free.

The memory plan and the network ask the same functions, so a predicted byte is a stored byte.
`model/quantize.py` does what is counted here.
"""

from __future__ import annotations

from typing import Literal, get_args

Quantization = Literal["int8", "fp8", "nf4"]
BasePrecision = Literal["fp32", "bf16", "fp16", Quantization]
BaseMatmul = Literal["dequantized", "int8"]
"""How a base in int8 is multiplied: as numbers of the network's dtype, or code by code."""
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)

INT8_MAX = 127.0
INT8_TEMPORARY_BYTES = 128 * 2**20
"""Bound on what lies beside an integer product while it is computed."""
_ROW_STEP = 32
NF4_BLOCK = 64
"""Weights that share a scale."""
NF4_SCALES_BLOCK = 256
"""Scales, themselves in 8 bits, that share a scale (double quantisation)."""
NF4_SCALE_LEVELS = 256


def weight_bytes(*, fan_in: int, out: int, precision: BasePrecision) -> int:
    """Return the bytes of one linear layer's weight [out, fan_in] with its scales, without its bias.

    int8 and fp8 keep a float32 scale per output. nf4 (Dettmers et al. 2023, arXiv 2305.14314, as
    bitsandbytes stores it) keeps 4 bits a weight, an 8-bit scale per block, a float32 scale per block
    of scales, their float32 mean and the float32 table of the 8-bit scales: 4.13 bits a weight.
    """
    elements = fan_in * out
    match precision:
        case "fp32":
            return 4 * elements
        case "bf16" | "fp16":
            return 2 * elements
        case "int8" | "fp8":
            return elements + 4 * out
        case "nf4":
            scales = -(-elements // NF4_BLOCK)
            outer = -(-scales // NF4_SCALES_BLOCK)
            return -(-elements // 2) + scales + 4 * (outer + 1 + NF4_SCALE_LEVELS)


def has_int8_product(fan_in: int, out: int) -> bool:
    """Say whether codes of this shape can be multiplied as they are: `torch._int_mm` wants eights."""
    return fan_in % 8 == 0 and out % 8 == 0


def int8_rows_at_once(inner: int, columns: int) -> int:
    """Return how many rows of an integer product are computed together, `inner` numbers in each.

    Beside a row lie two float32 copies and its codes; later one of the former, and its sums in int32
    and scaled in float32.
    """
    row_bytes = max(9 * inner, 5 * inner + 8 * columns)
    return max(1, INT8_TEMPORARY_BYTES // row_bytes // _ROW_STEP) * _ROW_STEP
