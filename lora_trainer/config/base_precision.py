"""Formats of the frozen base's weights and their sizes in bytes. Torch-free.

Memory plan and network call the same functions, so predicted and stored bytes are equal.
`network/quantize.py` implements the formats.
"""

from __future__ import annotations

from typing import Literal, get_args

Quantization = Literal["int8", "fp8", "nf4"]
BasePrecision = Literal["fp32", "bf16", "fp16", Quantization]
BaseMatmul = Literal["dequantized", "int8"]
"""Matrix product of an int8 base: with weights dequantized to the network's dtype, or int8 by int8."""
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)

INT8_MAX = 127.0
INT8_TEMPORARY_BYTES = 128 * 2**20
"""Limit on the temporary memory of an integer product."""
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
    """Return whether `torch._int_mm` multiplies this shape: it needs multiples of eight."""
    return fan_in % 8 == 0 and out % 8 == 0


def int8_rows_at_once(inner: int, columns: int) -> int:
    """Return the number of rows of `inner` elements to multiply at once within `INT8_TEMPORARY_BYTES`.

    First a row needs two float32 copies and its int8 codes (9 bytes an element), then one float32 copy and
    codes (5) beside `columns` sums in int32 and in float32 (8 bytes a column).
    """
    row_bytes = max(9 * inner, 5 * inner + 8 * columns)
    return max(1, INT8_TEMPORARY_BYTES // row_bytes // _ROW_STEP) * _ROW_STEP
