"""Files with the header of a case and no numbers: their bodies are holes that take no room on the disk."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

from tests.checkpoint_files.cases import Case

BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "F8_E8M0": 1}
GGUF_TYPES = {
    "F32": (0, 1, 4), "BF16": (30, 1, 2), "Q5_0": (6, 32, 22), "Q8_0": (8, 32, 34), "Q4_K": (12, 256, 144),
    "IQ2_XXS": (16, 256, 66),
}  # fmt: skip
"""Name of a ggml type -> its number, numbers and bytes in a block."""


def write(case: Case, folder: Path) -> Path:
    """Write the file of a case."""
    file = folder / case.file
    header, body_bytes = gguf(case) if file.suffix == ".gguf" else safetensors(case)
    with file.open("wb") as stream:
        stream.write(header + b"".join(content for _, _, content in case.beside.values()))
        stream.truncate(len(header) + body_bytes)
    return file


def safetensors(case: Case) -> tuple[bytes, int]:
    entries: dict[str, object] = {"__metadata__": dict(case.metadata)} if case.metadata else {}
    at = 0

    def add(name: str, dtype: str, shape: tuple[int, ...]) -> None:
        nonlocal at
        size = math.prod(shape) * BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size

    for name, (dtype, shape, content) in case.beside.items():
        assert len(content) == math.prod(shape) * BYTES[dtype]
        add(name, dtype, shape)
    for name, shape in case.shapes.items():
        scaled = bool(case.scales) and len(shape) > 1
        add(name, case.dtype if not case.scales or scaled else "BF16", shape)
        if scaled and name.endswith(".weight"):
            add(f"{name.removesuffix('weight')}{case.scales}", "F32", ())
    if case.scales == "scale_weight":
        add("scaled_fp8", "F8_E4M3", (2,))
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text, at


def gguf(case: Case) -> tuple[bytes, int]:
    """Return a GGUF as ComfyUI-GGUF's converter writes it: matrices quantised, the rest in float32."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    stated = {"general.architecture": "any", **case.metadata}
    rows, at = [], 0
    values = [text(key) + struct.pack("<I", 8) + text(value) for key, value in stated.items()]
    for name, shape in case.shapes.items():
        kind, count, size = GGUF_TYPES[case.dtype if len(shape) > 1 else "F32"]
        stored = shape
        if math.prod(shape) % count or (len(shape) > 1 and shape[-1] % count):
            stored = (math.prod(shape) // count, count) if math.prod(shape) % count == 0 else shape
            if stored == shape:
                kind, count, size = GGUF_TYPES["F32"]
            else:
                key = text(f"comfy.gguf.orig_shape.{name}")
                numbers = struct.pack(f"<{len(shape)}i", *shape)
                values.append(key + struct.pack("<IIQ", 9, 5, len(shape)) + numbers)
        dims = struct.pack(f"<I{len(stored)}Q", len(stored), *reversed(stored))
        rows.append(text(name) + dims + struct.pack("<IQ", kind, at))
        at += -(-math.prod(stored) // count * size // 32) * 32
    header = b"GGUF" + struct.pack("<IQQ", 3, len(rows), len(values)) + b"".join(values + rows)
    return header + bytes(-len(header) % 32), at
