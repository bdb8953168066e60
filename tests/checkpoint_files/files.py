"""Files with the header of a case and no numbers: their bodies are holes that take no room on the disk."""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import replace
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
    if case.layout:
        case = quantised(case)
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
    for name, (dtype, shape) in case.stored.items():
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


def quantised(case: Case) -> Case:
    """Return a case with the matrices of blocks in a layout of ComfyUI, stated as its publishers do: fp8 and nvfp4 in
    the metadata, the others beside each layer."""
    stored = dict[str, tuple[str, tuple[int, ...]]]()
    stated = dict[str, dict[str, object]]()
    for name, shape in case.shapes.items():
        rows, columns = shape if len(shape) == 2 else (0, 0)
        stem = name.removesuffix(".weight")
        if stem == name or not columns or columns % 256 or not re.search(r"\.\d+\.", name):
            stored[name] = (case.dtype, shape)
            continue
        scale: tuple[str, tuple[int, ...]] = ("F32", ())
        entry: dict[str, object] = {"format": case.layout}
        match case.layout:
            case "float8_e4m3fn":
                dtype = "F8_E4M3"
            case "int8_tensorwise":
                dtype, scale = "I8", ("F32", (rows, 1))
                entry |= {"convrot": True, "convrot_groupsize": 256}
            case "mxfp8":
                dtype, scale = "F8_E4M3", ("U8", tiles(rows, columns // 32))
            case "nvfp4":
                dtype, scale = "U8", ("F8_E4M3", tiles(rows, columns // 16))
                stored[f"{name}_scale_2"] = ("F32", ())
        stored[name] = (dtype, (rows, columns // 2) if case.layout == "nvfp4" else shape)
        stored |= {f"{name}_scale": scale, f"{stem}.input_scale": ("F32", ())}
        stated[stem] = entry
    assert stated
    if case.layout in ("float8_e4m3fn", "nvfp4"):
        metadata = {**case.metadata, "_quantization_metadata": json.dumps({"layers": stated})}
        return replace(case, shapes={}, stored=stored, metadata=metadata)
    texts = {stem: json.dumps(entry).encode() for stem, entry in stated.items()}
    beside = {f"{stem}.comfy_quant": ("U8", (len(text),), text) for stem, text in texts.items()}
    return replace(case, shapes={}, stored=stored, beside={**case.beside, **beside})


def tiles(rows: int, columns: int) -> tuple[int, int]:
    """Return the shape of a matrix of scales in tiles of 128 rows and 4 columns."""
    return -(-rows // 128) * 128, -(-columns // 4) * 4


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
