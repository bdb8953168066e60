"""The header of a safetensors file that nobody vouches for: safetensors checks it, within limits of this program.

Input is a path or bytes, output the tensors in file order and the metadata; InputError names the fault.
Torch-free.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
from safetensors import SafetensorError, deserialize, safe_open

from lora_trainer.common.errors import InputError
from lora_trainer.families.base import TensorInfo
from lora_trainer.families.base_files.base_folder import (
    MAX_DIMENSIONS,
    MAX_HEADER_BYTES,
    MAX_KEY_LENGTH,
    MAX_TENSORS,
    could_fill_memory,
)
from lora_trainer.lora_file.stream import ELEMENT_BYTES

Array = np.ndarray[Any, Any]
_NUMPY = {
    "F16": "<f2", "F32": "<f4", "F64": "<f8", "BOOL": "?",
    "I8": "i1", "U8": "u1", "I16": "<i2", "U16": "<u2", "I32": "<i4", "U32": "<u4", "I64": "<i8", "U64": "<u8",
}  # fmt: skip
PEFT_FILE = "adapter_model.safetensors"
FOLDER_FILES = (PEFT_FILE, "pytorch_lora_weights.safetensors")
"""The names under which peft and diffusers save a LoRA into a folder."""


@dataclass(frozen=True, kw_only=True)
class HeaderEntry(TensorInfo):
    """One tensor as the header describes it; `begin` and `end` count from the first tensor byte."""

    key: str
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True)
class Opened:
    """An open file whose header is checked.

    `entries` are by key in file order, `start` is the first tensor byte.
    """

    path: Path
    file: BinaryIO
    start: int
    entries: Mapping[str, HeaderEntry]
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
    if isinstance(source, bytes):
        path = Path("the file in memory")
        yield _opened(path, BytesIO(source), lambda: deserialize(source))  # type: ignore[no-untyped-call]  # no stub
        return
    path = file_of(source)
    try:
        if not path.is_file():  # a pipe would block
            refuse(
                path,
                "is no file" if path.exists() else "does not exist",
                fix="give the path of an adapter file",
            )
        with path.open("rb") as file:
            yield _opened(path, file, lambda: _check_file(path))
    except OSError as error:
        raise InputError(
            f"cannot read {path}: {error.strerror or error}", fix="give the path of an adapter file"
        ) from None


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


def _check_file(path: Path) -> None:
    with safe_open(path, framework="numpy"):
        pass


def _opened(path: Path, file: BinaryIO, check: Callable[[], object]) -> Opened:
    """Read a header within the limits of this program; `check` is the check of safetensors itself."""
    first = file.read(8)
    length = int.from_bytes(first, "little")
    if length > MAX_HEADER_BYTES:
        if first.startswith((b"PK", b"\x80")):
            fault = "is a pickle, which can run code when opened"
            refuse(path, fault, fix="convert it to safetensors where it was made")
        refuse(path, "is not a safetensors file")
    text = file.read(length)
    if could_fill_memory(text):
        refuse(path, f"names more tensors than the {MAX_TENSORS:,} any adapter has")
    try:
        check()
        header = json.loads(text)
        metadata = header.pop("__metadata__", None) or {}
        entries = [
            HeaderEntry(
                key=key,
                dtype=entry["dtype"],
                shape=tuple(entry["shape"]),
                begin=entry["data_offsets"][0],
                end=entry["data_offsets"][1],
            )
            for key, entry in header.items()
        ]
    except (SafetensorError, ValueError, RecursionError) as error:
        refuse(path, f"is not a safetensors file, or is cut off ({error})")
    if len(entries) > MAX_TENSORS or any(len(entry.key) > MAX_KEY_LENGTH for entry in entries):
        refuse(
            path, f"names more than {MAX_TENSORS:,} tensors or one of {MAX_KEY_LENGTH:,} characters"
        )
    for entry in entries:
        if entry.dtype not in ELEMENT_BYTES or len(entry.shape) > MAX_DIMENSIONS:
            refuse(path, f"has {entry.key!r} in {len(entry.shape)} dimensions of {entry.dtype}")
    return Opened(
        path=path,
        file=file,
        start=8 + length,
        entries={
            entry.key: entry for entry in sorted(entries, key=lambda each: (each.begin, each.end))
        },
        metadata=metadata,
    )


def json_object(text: str) -> dict[str, Any]:
    """Return the object in an entry of a header that nobody vouches for, {} where there is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def numbers(data: bytearray, entry: HeaderEntry) -> Array:
    """Return the numbers of a tensor; bf16 and fp8 as float32, which holds them all."""
    if not data:
        return np.zeros(entry.shape, "<f4")
    match entry.dtype:
        case "BF16":  # the upper half of a float32
            values: Array = (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4")
        case "F8_E5M2":  # the upper half of a float16
            values = (np.frombuffer(data, "u1").astype("<u2") << 8).view("<f2").astype("<f4")
        case "F8_E4M3":
            # OCP 8-bit floating point 1.0. Its sign, 4 bits of exponent and 3 of mantissa are those of a float16
            # that is 2^8 times smaller, but that it has one NaN and no infinity.
            codes = np.frombuffer(data, "u1").astype("<u2")
            halves = ((codes & 0x80) << 8 | (codes & 0x7F) << 7).view("<f2")
            values = np.where(codes & 0x7F == 0x7F, np.float32(np.nan), halves.astype("<f4") * 256)
        case _:
            values = np.frombuffer(data, _NUMPY[entry.dtype])
    return values.reshape(entry.shape)
