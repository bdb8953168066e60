"""Torch tensors as safetensors files hold them: dtype by its name there, bytes in order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lora_trainer.output.stream_file import Slot

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""Floating-point dtypes by their names in files."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def slot(name: str, tensor: Tensor) -> Slot:
    """Return the place that a floating-point tensor takes in a file."""
    return Slot(name=name, dtype=_NAMES[tensor.dtype], shape=tuple(tensor.shape))


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor on the CPU, copied only where they do not lie in order."""
    flat = tensor.detach().contiguous().reshape(-1)
    data: Any = flat.view(torch.uint8).numpy()
    return memoryview(data)
