"""Products with a frozen weight W [out, in]: x W^T in the forward pass, dY W in the backward pass.

Either W is restored from its stored form for each product, or its int8 codes are multiplied directly
(W8A8): the other factor is rounded to 8 bits as well, with one scale per row, sums are exact in int32, and
one set of codes serves both passes. Input is the other factor and the stored tensors; output is the
product in that factor's dtype.

cuBLAS documents only the layout of the forward product (codes transposed). In the backward pass neither
factor is transposed; kernels for that exist for some GPUs and versions only, and some of them return wrong
sums (PyTorch #106840, #169961). `int8_layouts` therefore tries both layouts on the device itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from lora_trainer.common.errors import first_line
from lora_trainer.config.choices import INT8_MAX, int8_rows_at_once
from lora_trainer.network.out_of_memory import is_out_of_memory

Restored = Callable[[Sequence[Tensor]], Tensor]
"""Restores a frozen weight [out, in] from its stored tensors."""
_ROWS_STEP = 32
"""Rows of an integer product are padded with zeros to a multiple of this: cuBLAS refuses fewer than 17 rows,
and its versions differ in the odd numbers of rows that they multiply correctly. No result depends on it."""
_LEAST_SCALE = 1e-30
_PROBED_ROWS = (_ROWS_STEP, 33 * _ROWS_STEP)
"""Rows of the trial products: cuBLAS chooses other kernels for few rows than for many."""
_CHECKED_ROWS = 16
"""Rows at either end whose sums are compared with float64; more would take long on consumer GPUs."""


@dataclass(frozen=True)
class RestoredProduct:
    """Restores W for each product, which then runs in the network's dtype.

    `forward` returns x W^T + plus, x [rows, in]; `backward` returns dY W + plus, dY [rows, out]. A vector
    `plus` is only read; one of the result's shape may be overwritten and returned.
    """

    restored: Restored

    def forward(self, x: Tensor, stored: Sequence[Tensor], plus: Tensor | None = None) -> Tensor:
        return _matmul(x, self.restored(stored).T, plus)

    def backward(
        self, gradient: Tensor, stored: Sequence[Tensor], plus: Tensor | None = None
    ) -> Tensor:
        return _matmul(gradient, self.restored(stored), plus)


def _matmul(a: Tensor, b: Tensor, plus: Tensor | None) -> Tensor:
    if plus is None:
        return a @ b
    # In place where the addend has the shape of the product: it is a temporary, and another of [rows, out] is saved.
    return plus.addmm_(a, b) if plus.dim() == 2 else torch.addmm(plus, a, b)


@dataclass(frozen=True)
class Int8Product:
    """The same two products by the int8 codes q of W = s q, with one scale s per output.

    In the backward pass the scales are applied to dY before it is rounded: (dY s) q = dY (s q), so the
    codes need no other layout. On a device without that product, `restored_backwards` restores W instead.
    """

    restored_backwards: Restored | None = None

    def forward(self, x: Tensor, stored: Sequence[Tensor], plus: Tensor | None = None) -> Tensor:
        codes, scale = stored
        if torch.compiler.is_compiling():  # as separate operations, which the compiler fuses
            return _product(x, codes.T, of_columns=scale.T, plus=plus)
        outputs: Tensor = int8_product(x, codes.T, scale.T, plus)
        return outputs

    def backward(
        self, gradient: Tensor, stored: Sequence[Tensor], plus: Tensor | None = None
    ) -> Tensor:
        if self.restored_backwards is not None:
            return _matmul(gradient, self.restored_backwards(stored), plus)
        codes, scale = stored
        in_place_output = plus if plus is not None and plus.dim() == 2 else None
        return _product(gradient, codes, of_inputs=scale.T, plus=plus, out=in_place_output)


WeightMatmul = RestoredProduct | Int8Product


@torch.library.custom_op("lora_train::int8_product", mutates_args=())
def int8_product(x: Tensor, codes: Tensor, scale: Tensor, plus: Tensor | None) -> Tensor:
    """Return x (codes scale) + plus; x [rows, in], int8 codes [in, out], float32 scale [1, out].

    A custom operator, so that dispatch modes (selective checkpointing, traces) see one product.
    """
    return _product(x, codes, of_columns=scale, plus=plus)


@int8_product.register_fake
def _(x: Tensor, codes: Tensor, scale: Tensor, plus: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], codes.shape[1])


INT8_PRODUCT = torch.ops.lora_train.int8_product.default
"""The operator as a dispatch mode sees it."""


def _product(
    values: Tensor,
    codes: Tensor,
    *,
    of_inputs: Tensor | None = None,
    of_columns: Tensor | None = None,
    plus: Tensor | None,
    out: Tensor | None = None,
) -> Tensor:
    """Return (values of_inputs) (codes of_columns) + plus.

    The rows are processed in pieces, which bounds the memory of the int8 copy and the int32 sums. `out` may
    be `plus`.
    """
    (rows, _), (inner, columns) = values.shape, codes.shape
    outputs = values.new_empty(rows, columns) if out is None else out
    step = int8_rows_at_once(inner, columns)
    for start in range(0, rows, step):
        piece = slice(start, start + step)
        # A slice is a view: of the size of a piece are only the int8 copy and the int32 sums.
        piece_values = values[piece] if of_inputs is None else values[piece] * of_inputs
        quantized, scale = quantized_rows(piece_values)
        # cuBLAS takes int8 rows in such steps only; the filled rows are cut off the sums, exact in int32.
        missing = -len(quantized) % _ROWS_STEP
        filled = F.pad(quantized, (0, 0, 0, missing)) if missing else quantized
        sums = torch._int_mm(filled, codes)[: len(piece_values)]
        one, other = (sums, scale) if of_columns is None else (sums * scale, of_columns)
        if plus is None:
            torch.mul(one, other, out=outputs[piece])
        else:
            # One kernel for product and addend: apart, a 16-bit output would be rounded twice.
            beside = plus[piece] if plus.dim() == 2 else plus
            torch.addcmul(beside, one, other, out=outputs[piece])
    return outputs


@dataclass(frozen=True, kw_only=True)
class Int8Layouts:
    """The reasons why a device cannot use the int8 products of either pass; empty if it can."""

    against_forward: str = ""
    against_backward: str = ""


def int8_layouts(shapes: Iterable[tuple[int, int]], *, device: torch.device) -> Int8Layouts:
    """Multiply random codes of each (fan_in, out) on a device, and compare the sums with exact ones.

    Takes milliseconds a shape. Raises RuntimeError where the device is out of memory.
    """
    forward = backward = ""
    for fan_in, out in sorted(set(shapes)):
        # Random codes: with a wrong layout or stride their sums differ with near certainty.
        # Seeded by the shape: every start judges a device by the same numbers.
        generator = torch.Generator().manual_seed(fan_in * out)
        codes = _random_codes(out, fan_in, generator).to(device)
        for count in _PROBED_ROWS:
            x, gradient = (
                _random_codes(count, width, generator).to(device) for width in (fan_in, out)
            )
            forward = forward or _against(x, codes.T)
            backward = backward or _against(gradient, codes)
    return Int8Layouts(against_forward=forward, against_backward=backward)


def _random_codes(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    low, high = -int(INT8_MAX), int(INT8_MAX) + 1
    return torch.randint(low, high, (rows, columns), generator=generator, dtype=torch.int8)


def _against(rows: Tensor, codes: Tensor) -> str:
    """Return why this product of int8 codes cannot be used, empty if its sums are right."""
    product_name = f"[{rows.shape[0]}, {rows.shape[1]}] by [{codes.shape[0]}, {codes.shape[1]}]"
    try:
        sums = torch._int_mm(rows, codes)
        checked = torch.cat([sums[:_CHECKED_ROWS], sums[-_CHECKED_ROWS:]])
        ends = torch.cat([rows[:_CHECKED_ROWS], rows[-_CHECKED_ROWS:]])
        # Exact in double: sums of products of 8-bit numbers stay far below 2^53.
        is_right = torch.equal(checked.double(), ends.double() @ codes.double())
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        return f"{product_name} is refused: {first_line(error)}"
    return "" if is_right else f"{product_name} gives wrong sums"


def quantized_rows(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return int8 codes [rows, n] and float32 scales [rows, 1]; a row's largest number becomes 127.

    Each row is rounded by itself, so the rounding of a sample does not depend on its batch. A row that is
    not finite gets a non-finite scale, and so its product is not finite either.
    """
    largest = torch.linalg.vector_norm(
        values, float("inf"), dim=1, keepdim=True, dtype=torch.float32
    )
    # The clamp keeps rows of zeros from 0 / 0.
    scale = largest.div_(INT8_MAX).clamp_(min=_LEAST_SCALE)
    return (values / scale).round_().to(torch.int8), scale
