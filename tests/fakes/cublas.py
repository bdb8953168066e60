"""cuBLAS as it may be: integer products whose second factor is not transposed are refused, or wrong.

`torch._int_mm` on a processor computes any layout. What is emulated is a GPU of which PyTorch's own tests
say "NN case not yet supported by cuBLAS" (#169961), and one whose sums were wrong there (#106840).
"""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor

Missing = Literal["refused", "wrong", "everything"]
REFUSED = (
    "CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmul with transpose_mat1 0"
)


def without_layouts(monkeypatch: pytest.MonkeyPatch, missing: Missing) -> list[bool]:
    """Let `torch._int_mm` be that of such a GPU; the list fills with whether each call was transposed."""
    real, calls = torch._int_mm, list[bool]()

    def int_mm(rows: Tensor, codes: Tensor) -> Tensor:
        transposed = codes.stride(0) == 1
        calls.append(transposed)
        if missing == "everything" or (missing == "refused" and not transposed):
            raise RuntimeError(f"{REFUSED} transpose_mat2 {int(transposed)}")
        sums = real(rows, codes)
        return sums if transposed else sums.roll(1, dims=0)

    monkeypatch.setattr(torch, "_int_mm", int_mm)
    return calls
