"""Reading an adapter file from any trainer without torch: checked header, roles of the keys.

Input is a path nobody vouches for, output an AdapterFile. Every size is checked before it is
believed, the tensors are read once in file order, and nothing in the file is used as a path.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from lora_trainer.errors import InputError

MAX_HEADER_BYTES = 100_000_000
MAX_TENSORS = 100_000
_ELEMENT_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64"), 8),
}
_SCALARS = {"F16": "<e", "F32": "<f", "F64": "<d", "I32": "<i", "I64": "<q"}
_NUMPY = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}
_KEY = re.compile(
    r"(?P<module>.+?)(?:"
    r"\.(?P<alpha>alpha)|"
    r"(?:\.lora_down|\.lora_A(?:\.\w+)?|[._]lora\.down|\.lora_linear_layer\.down)(?P<down>\.weight)|"
    r"(?:\.lora_up|\.lora_B(?:\.\w+)?|[._]lora\.up|\.lora_linear_layer\.up)(?P<up>\.weight)|"
    r"\.(?P<dora>dora_scale|lora_magnitude_vector)(?:\.\w+)*)"
)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor as the header describes it; `begin` and `end` count from the first tensor byte."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True)
class AdapterFile:
    """Tensors by module and role, and what one pass over the bytes showed.

    `alphas` are values by module, `dora` the modules with DoRA scales, `unknown` the keys of no
    LoRA, `not_finite` the keys with NaN or infinity, `body_sha256` the hash of all tensor bytes.
    """

    metadata: Mapping[str, str]
    down: Mapping[str, Entry]
    up: Mapping[str, Entry]
    alphas: Mapping[str, float]
    dora: frozenset[str]
    unknown: tuple[str, ...]
    not_finite: tuple[str, ...]
    body_sha256: str

    @property
    def modules(self) -> list[str]:
        """Names of the modules that have both factors."""
        return sorted(self.down.keys() & self.up.keys())


def read_adapter(path: Path) -> AdapterFile:
    """Read and check a safetensors file; raises InputError saying what is wrong with it."""
    try:
        if not path.is_file():
            refuse(
                path,
                "is no file" if path.exists() else "does not exist",
                fix="give the path of an adapter file",
            )
        with path.open("rb") as file:
            return _read(file, path)
    except OSError as error:
        raise InputError(
            f"cannot read {path}: {error.strerror or error}", fix="give the path of an adapter file"
        ) from None


def _read(file: BinaryIO, path: Path) -> AdapterFile:
    size = path.stat().st_size
    header, start = _read_header(file, path, size_bytes=size)
    entries = _checked_entries(header, path, body_bytes=size - start)
    roles: dict[str, dict[str, Entry]] = {"down": {}, "up": {}, "alpha": {}, "dora": {}}
    unknown = []
    for entry in entries:
        match = _KEY.fullmatch(entry.key)
        if match is None:
            unknown.append(entry.key)
        else:
            role = next(name for name in roles if match[name])
            roles[role][match["module"]] = entry
    alphas, not_finite, digest = _read_tensors(file, entries, alpha_modules=roles["alpha"])
    return AdapterFile(
        metadata=_checked_metadata(header, path),
        down={module: entry for module, entry in roles["down"].items() if entry.shape},
        up=roles["up"],
        alphas=alphas,
        dora=frozenset(roles["dora"]),
        unknown=tuple(unknown),
        not_finite=not_finite,
        body_sha256=digest,
    )


def _read_header(file: BinaryIO, path: Path, *, size_bytes: int) -> tuple[dict[str, Any], int]:
    """Return the header object and the offset of the first tensor byte."""
    first = file.read(8)
    length = int.from_bytes(first, "little")
    if len(first) < 8 or not 2 <= length <= MAX_HEADER_BYTES:
        if first.startswith((b"PK", b"\x80")):
            what = "is a pickle, which can run code when opened"
            refuse(path, what, fix="convert it to safetensors where it was made")
        refuse(path, "is not a safetensors file")
    text = file.read(length)
    if len(text) < length:
        refuse(
            path,
            f"is cut off or not a safetensors file: a header of {length:,} bytes in {size_bytes:,}",
        )
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        refuse(path, f"is not a safetensors file: its header is not JSON ({error})")
    if not isinstance(header, dict):
        refuse(path, "is not a safetensors file: its header is no JSON object")
    if len(header) > MAX_TENSORS:
        refuse(
            path, f"names {len(header):,} tensors, more than the {MAX_TENSORS:,} any adapter has"
        )
    return header, 8 + length


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("a key occurs twice")
    return dict(pairs)


def _checked_metadata(header: Mapping[str, Any], path: Path) -> dict[str, str]:
    entries = header.get("__metadata__", {})
    if not isinstance(entries, dict) or not all(
        isinstance(value, str) for value in entries.values()
    ):
        refuse(path, "has metadata that is not text by name")
    return entries


def _checked_entries(header: Mapping[str, Any], path: Path, *, body_bytes: int) -> list[Entry]:
    """Return the tensors in file order; they must cover the body without holes or overlaps."""
    entries = [
        _checked_entry(key, value, path) for key, value in header.items() if key != "__metadata__"
    ]
    entries.sort(key=lambda entry: (entry.begin, entry.end))
    expected = 0
    for entry in entries:
        if entry.begin != expected:
            refuse(path, f"has a hole or an overlap before tensor {entry.key!r}")
        expected = entry.end
    if expected > body_bytes:
        refuse(path, f"is cut off: its tensors take {expected:,} bytes, {body_bytes:,} are there")
    if expected < body_bytes:
        refuse(path, f"has {body_bytes - expected:,} bytes too many at its end")
    return entries


def _checked_entry(key: str, value: Any, path: Path) -> Entry:
    try:
        dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        wrong = not all(type(number) is int and number >= 0 for number in (*shape, begin, end))
        if wrong or end - begin != math.prod(shape) * _ELEMENT_BYTES[dtype]:
            refuse(path, f"describes tensor {key!r} wrongly")
    except (KeyError, TypeError, ValueError):
        refuse(path, f"describes tensor {key!r} wrongly")
    return Entry(key=key, dtype=dtype, shape=shape, begin=begin, end=end)


def _read_tensors(
    file: BinaryIO, entries: list[Entry], *, alpha_modules: Mapping[str, Entry]
) -> tuple[dict[str, float], tuple[str, ...], str]:
    """Return alphas by module, keys with NaN or infinity, and the SHA-256 of all tensor bytes."""
    module_of = {entry.key: module for module, entry in alpha_modules.items()}
    digest, alphas, not_finite = sha256(), {}, []
    for entry in entries:
        data = file.read(entry.end - entry.begin)
        digest.update(data)
        if not _all_finite(data, entry.dtype):
            not_finite.append(entry.key)
        if entry.key in module_of and (value := _scalar(data, entry.dtype)) is not None:
            alphas[module_of[entry.key]] = value
    return alphas, tuple(not_finite), digest.hexdigest()


def _scalar(data: bytes, dtype: str) -> float | None:
    if dtype == "BF16" and len(data) == 2:
        return float(struct.unpack("<f", b"\0\0" + data)[0])
    layout = _SCALARS.get(dtype)
    if layout is None or len(data) != struct.calcsize(layout):
        return None
    return float(struct.unpack(layout, data)[0])


def _all_finite(data: bytes, dtype: str) -> bool:
    if dtype in _NUMPY:
        return bool(np.isfinite(np.frombuffer(data, _NUMPY[dtype])).all())
    if dtype == "BF16":  # numpy has no bfloat16; all exponent bits set means infinity or NaN
        return bool(((np.frombuffer(data, "<u2") & 0x7F80) != 0x7F80).all())
    return True


def refuse(
    path: Path, what: str, *, fix: str = "give a LoRA in a whole .safetensors file"
) -> NoReturn:
    """Raise InputError about the file."""
    raise InputError(f"{path} {what}", fix=fix)
