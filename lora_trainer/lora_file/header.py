"""The header of a safetensors file that nobody vouches for: every size is checked before it is believed.

Input is a path or bytes, output the tensors in file order and the metadata; InputError names the fault.
Torch-free.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from lora_trainer.common.errors import InputError
from lora_trainer.families.base_files.base_folder import (
    MAX_DIMENSIONS,
    MAX_HEADER_BYTES,
    MAX_KEY_LENGTH,
    MAX_TENSORS,
    is_crowded,
)

ELEMENT_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64"), 8),
}

PEFT_FILE = "adapter_model.safetensors"
FOLDER_FILES = (PEFT_FILE, "pytorch_lora_weights.safetensors")
"""The names under which peft and diffusers save a LoRA into a folder."""


@dataclass(frozen=True, kw_only=True)
class HeaderEntry:
    """One tensor as the header describes it; `begin` and `end` count from the first tensor byte."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Opened:
    """An open file whose header is checked; `entries` are in file order, `start` is the first tensor byte."""

    path: Path
    file: BinaryIO
    start: int
    entries: tuple[HeaderEntry, ...]
    metadata: Mapping[str, str]

    def read(self, entry: HeaderEntry) -> bytearray:
        """Return a tensor's bytes; raises InputError when the file became shorter or cannot be read."""
        data = bytearray(entry.end - entry.begin)
        try:
            self.file.seek(self.start + entry.begin)
            length = self.file.readinto(data)  # type: ignore[attr-defined]  # all binary files have it
        except OSError as error:
            raise InputError(
                f"cannot read {self.path}: {error.strerror}", fix="try again"
            ) from None
        if length != len(data):
            raise InputError(f"{self.path} changed while it was read", fix="start again")
        return data


@contextmanager
def open_checked(source: Path | bytes) -> Iterator[Opened]:
    """Open a safetensors file or one in memory; raises InputError for any other file and for a part of one."""
    path = file_of(source) if isinstance(source, Path) else Path("the file in memory")
    opened = _opened(path) if isinstance(source, Path) else _in_memory(source)
    with opened as (file, size_bytes):
        header, start = _read_header(file, path, size_bytes=size_bytes)
        entries = _checked_entries(header, path, body_bytes=size_bytes - start)
        yield Opened(
            path=path,
            file=file,
            start=start,
            entries=tuple(entries),
            metadata=_checked_metadata(header, path),
        )


def holds_adapter(folder: Path) -> bool:
    """Return whether peft or diffusers saved a LoRA into a folder."""
    return any((folder / name).is_file() for name in FOLDER_FILES)


def file_of(path: Path) -> Path:
    """Return the LoRA file in a folder as peft and diffusers write it, any other path as it is."""
    if path.is_dir() and not holds_adapter(path):
        if any((path / name).with_suffix(".bin").is_file() for name in FOLDER_FILES):
            fault = "holds an adapter as a pickle only, which can run code when opened"
            refuse(path, fault, fix="save it with safe_serialization=True where it was made")
        refuse(
            path,
            f"is no file but a folder without {' or '.join(FOLDER_FILES)}",
            fix="give a LoRA file",
        )
    return next((path / name for name in FOLDER_FILES if (path / name).is_file()), path)


def refuse(
    file: Path | str, fault: str, *, fix: str = "give a LoRA in a whole .safetensors file"
) -> NoReturn:
    """Raise InputError about a file, its path or its name; `fault` is the predicate of the sentence."""
    raise InputError(f"{file} {fault}", fix=fix)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """Open a file nobody vouches for; a pipe would block and is no file."""
    try:
        if not path.is_file():
            refuse(
                path,
                "is no file" if path.exists() else "does not exist",
                fix="give the path of an adapter file",
            )
        with path.open("rb") as file:
            yield file, path.stat().st_size
    except OSError as error:
        raise InputError(
            f"cannot read {path}: {error.strerror or error}", fix="give the path of an adapter file"
        ) from None


@contextmanager
def _in_memory(data: bytes) -> Iterator[tuple[BinaryIO, int]]:
    yield BytesIO(data), len(data)


def _read_header(file: BinaryIO, path: Path, *, size_bytes: int) -> tuple[dict[str, Any], int]:
    """Return the header object and the offset of the first tensor byte."""
    first = file.read(8)
    length = int.from_bytes(first, "little")
    if len(first) < 8 or not 2 <= length <= MAX_HEADER_BYTES:
        if first.startswith((b"PK", b"\x80")):
            fault = "is a pickle, which can run code when opened"
            refuse(path, fault, fix="convert it to safetensors where it was made")
        refuse(path, "is not a safetensors file")
    text = file.read(length)
    if len(text) < length:
        refuse(
            path,
            f"is cut off or not a safetensors file: a header of {length:,} bytes in {size_bytes:,}",
        )
    if is_crowded(text):
        refuse(path, f"names more tensors than the {MAX_TENSORS:,} any adapter has")
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
    if any(len(key) > MAX_KEY_LENGTH for key in header):
        refuse(path, f"has a tensor name of more than {MAX_KEY_LENGTH:,} characters")
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


def _checked_entries(
    header: Mapping[str, Any], path: Path, *, body_bytes: int
) -> list[HeaderEntry]:
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


def _checked_entry(key: str, value: Any, path: Path) -> HeaderEntry:
    try:
        dtype, shape, (begin, end) = value["dtype"], tuple(value["shape"]), value["data_offsets"]
        numbers = (*shape, begin, end)
        right = all(type(number) is int and 0 <= number < 1 << 63 for number in numbers)
        right = right and len(shape) <= MAX_DIMENSIONS
        right = right and end - begin == math.prod(shape) * ELEMENT_BYTES[dtype]
    except (KeyError, TypeError, ValueError):
        right = False
    if not right:
        refuse(path, f"describes tensor {key!r} wrongly")
    return HeaderEntry(key=key, dtype=dtype, shape=shape, begin=begin, end=end)
