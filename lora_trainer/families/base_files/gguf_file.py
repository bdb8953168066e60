"""GGUF checkpoints: their header, read here without torch, and their tensors, read by diffusers and gguf.

The format is that of ggml (docs/gguf.md), with ComfyUI-GGUF's `comfy.gguf.orig_shape.NAME` for tensors that
were reshaped before quantisation. The package gguf is needed to load a file, not to plan with it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from importlib.util import find_spec
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.common.errors import MachineError
from lora_trainer.families.facts import TensorInfo

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SUFFIX = ".gguf"
_TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110), 12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18), 23: ("IQ4_XS", 256, 136),
}  # fmt: skip
"""Number of each type that diffusers can read -> its name, numbers and bytes of one block."""
TYPES = frozenset(name for name, _, _ in _TYPES.values())
_SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
"""Number of each type of value -> its code in struct."""
_STRING, _ARRAY = 8, 9
_MOST = 1_000_000
"""Most entries of a list: a broken length must not fill the memory."""


class _Cursor:
    """Reads values of a GGUF header; struct.error past its end, ValueError for impossible lengths."""

    def __init__(self, data: mmap) -> None:
        self.data, self.at = data, 0

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self.data, self.at)
        self.at += struct.calcsize(f"<{code}")
        return value

    def count(self) -> int:
        count = int(self.number("Q"))
        if count > _MOST:
            raise ValueError(f"a list of {count:,} entries")
        return count

    def text(self) -> str:
        length = self.count()
        if self.at + length > len(self.data):
            raise ValueError("a text beyond the header's end")
        self.at += length
        return self.data[self.at - length : self.at].decode("utf-8")

    def value(self) -> Any:
        return self._of_kind(int(self.number("I")))

    def _of_kind(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind != _ARRAY:
            return self.number(_SCALARS[kind])
        inner = int(self.number("I"))
        # The format nests without limit, and a broken file could exhaust the stack.
        if inner == _ARRAY:
            raise ValueError("a list of lists")
        return [self._of_kind(inner) for _ in range(self.count())]


def read_gguf_header(file: Path) -> dict[str, TensorInfo]:
    """Return a GGUF file's tensors.

    Raises OSError, struct.error, KeyError or ValueError (UnicodeDecodeError too) for a broken file.
    """
    # Mapped, not read: nobody knows the length of the header before its end.
    with (
        file.open("rb") as stream,
        mmap(stream.fileno(), 0, access=ACCESS_READ) as mapped,
    ):
        tensors, needed_bytes = _parsed(_Cursor(mapped))
        # A download that stopped early has a whole header; the last tensor of a whole file may be padded.
        if len(mapped) < needed_bytes:
            raise ValueError(f"{len(mapped):,} bytes, its header says {needed_bytes:,}")
        return tensors


def _parsed(cursor: _Cursor) -> tuple[dict[str, TensorInfo], int]:
    """Return the tensors, and the bytes that the file must have."""
    if cursor.data[:4] != b"GGUF" or struct.unpack_from("<I", cursor.data, 4)[0] not in (2, 3):
        raise ValueError("it is no GGUF of version 2 or 3")
    cursor.at = 8
    tensor_count, value_count = cursor.count(), cursor.count()
    values = {cursor.text(): cursor.value() for _ in range(value_count)}
    tensors, end = dict[str, TensorInfo](), 0
    for _ in range(tensor_count):
        name = cursor.text()
        dimensions = int(cursor.number("I"))
        if dimensions > 8:
            raise ValueError(f"a tensor of {dimensions} dimensions")
        # ggml lists the fastest dimension first, torch last.
        shape = tuple(int(cursor.number("Q")) for _ in range(dimensions))[::-1]
        kind, offset = int(cursor.number("I")), int(cursor.number("Q"))
        dtype, numbers, size = _TYPES.get(kind, (f"type {kind}", 1, 0))
        # Offsets count from the start of the tensors' data; a quantised tensor is whole blocks of numbers.
        end = max(end, offset + math.prod(shape) // numbers * size)
        original = values.get(f"comfy.gguf.orig_shape.{name}", shape)
        if math.prod(original) != math.prod(shape):
            raise ValueError(f"{name} has the shapes {list(shape)} and {list(original)}")
        tensors[name] = TensorInfo(dtype=dtype, shape=tuple(map(int, original)))
    alignment = max(1, int(values.get("general.alignment", 32)))
    # The data start at the next multiple of the alignment behind the header (-(-a // b) rounds up).
    return tensors, -(-cursor.at // alignment) * alignment + end


def require_gguf(file: Path) -> None:
    """Raise MachineError when the package that reads GGUF is not installed."""
    if find_spec("gguf") is None:
        raise MachineError(
            f"{file.name} is a GGUF, which the package gguf reads, and that is not installed",
            fix="pip install gguf, or give the base model as .safetensors",
        )


def read_gguf_tensors(
    file: Path, names: Mapping[str, str], shapes: Mapping[str, TensorInfo], *, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return tensors dequantised to `dtype`; `names` maps the wanted name to the one in the file."""
    require_gguf(file)
    from diffusers.models.model_loading_utils import load_gguf_checkpoint
    from diffusers.quantizers.gguf.utils import GGUFParameter, dequantize_gguf_tensor

    stored = load_gguf_checkpoint(str(file))
    tensors: dict[str, Tensor] = {}
    for name, stored_name in names.items():
        # Taken out, so that packed weights do not lie in memory beside their dequantised copies.
        tensor = stored.pop(stored_name)
        if isinstance(tensor, GGUFParameter):
            tensor = dequantize_gguf_tensor(tensor)
        tensors[name] = tensor.reshape(shapes[stored_name].shape).to(dtype)
    return tensors
