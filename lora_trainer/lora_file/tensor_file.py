"""Safetensors files: headers of strangers checked, tensors read and written one at a time, whole or absent.

A file that nobody vouches for is checked by safetensors itself and within limits of this program. A file is
written from the names and sizes of its tensors, then their bytes in the same order, and appears under its name
when all of it is on the disk. Hashes of the tensor bytes have a fixed length, so the header keeps room for them
and gets them last. Torch-free.
"""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np
from safetensors import SafetensorError

from lora_trainer.common.errors import InputError, MachineError, RequestError
from lora_trainer.common.files import disk_error, retry_while_open, sync_folder, temporary_beside
from lora_trainer.families.base.layout import Header, TensorInfo
from lora_trainer.families.files.foreign import ForeignFileError
from lora_trainer.families.files.weight_files import check_limits, safetensors_header

Array = np.ndarray[Any, Any]
PEFT_FILE = "adapter_model.safetensors"
# The names under which peft and diffusers save a LoRA into a folder.
FOLDER_FILES = (PEFT_FILE, "pytorch_lora_weights.safetensors")


@dataclass(frozen=True, kw_only=True)
class HeaderEntry(TensorInfo):
    """One tensor as the header describes it."""

    key: str
    begin: int
    """Offset of its first byte, from the first tensor byte."""
    end: int
    """Offset of the byte after its last byte, from the first tensor byte."""


@dataclass(frozen=True, kw_only=True)
class Opened:
    """An open file whose header is checked."""

    path: Path
    file: BinaryIO
    start: int
    """Offset of the first tensor byte in the file."""
    entries: Mapping[str, HeaderEntry]
    """Entries by key, in file order."""
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
def open_checked(path: Path) -> Iterator[Opened]:
    """Open a safetensors file; raises InputError for any other file and for a part of one."""
    path = file_of(path)
    try:
        if not path.is_file():  # a pipe would block
            fault = "is not a file" if path.exists() else "does not exist"
            refuse(path, fault, fix="give the path of an adapter file")
        with path.open("rb") as file:
            yield _opened(path, file)
    except OSError as error:
        raise InputError(
            f"cannot read {path}: {error.strerror or error}", fix="give the path of an adapter file"
        ) from None


def holds_adapter(folder: Path) -> bool:
    """Return whether peft or diffusers saved a LoRA into a folder."""
    return any((folder / name).is_file() for name in FOLDER_FILES)


def file_of(path: Path) -> Path:
    """Return the LoRA file in a folder as peft and diffusers write it, any other path as it is."""
    files = [path / name for name in FOLDER_FILES]
    if path.is_dir() and not holds_adapter(path):
        if any(file.with_suffix(".bin").is_file() for file in files):
            fault = "holds an adapter as a pickle only, which can run code when opened"
            refuse(path, fault, fix="save it with safe_serialization=True where it was made")
        fault = f"is a folder without {' or '.join(FOLDER_FILES)}"
        refuse(path, fault, fix="give a LoRA file")
    return next((file for file in files if file.is_file()), path)


def refuse(
    file: Path | str, fault: str, *, fix: str = "give a LoRA in a whole .safetensors file"
) -> NoReturn:
    """Raise InputError about a file, its path or its name; `fault` is the predicate of the sentence."""
    raise InputError(f"{file} {fault}", fix=fix)


def _opened(path: Path, file: BinaryIO) -> Opened:
    """Read a header within the limits of this program, once safetensors itself finds the file whole."""
    try:
        header, start = safetensors_header(file)
        metadata = header.pop("__metadata__", None) or {}
        entries = [
            HeaderEntry(
                key=key, dtype=each["dtype"], shape=tuple(each["shape"]), begin=begin, end=end
            )
            for key, each in header.items()
            for begin, end in [each["data_offsets"]]
        ]
        entries.sort(key=lambda each: (each.begin, each.end))
        by_key = {entry.key: entry for entry in entries}
    except ForeignFileError as error:
        refuse(path, f"{error.fault}, not weights", fix=error.fix)
    except (SafetensorError, ValueError, RecursionError) as error:
        refuse(path, f"is not a safetensors file, or is cut off ({error})")
    try:
        check_limits(by_key)
    except ValueError as error:
        refuse(path, f"is not an adapter: {error}")
    for entry in entries:
        if entry.dtype not in ELEMENT_BYTES:
            refuse(path, f"has numbers of {entry.dtype} in {entry.key!r}")
    return Opened(path=path, file=file, start=start, entries=by_key, metadata=metadata)


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
        case "BOOL":
            values = np.frombuffer(data, "?")
        case name:  # F32 is <f4, as in numpy
            values = np.frombuffer(data, f"<{name[0].lower()}{ELEMENT_BYTES[name]}")
    return values.reshape(entry.shape)


@cache
def packaged(name: str) -> dict[str, Any]:
    """Return the table of facts or texts in a JSON or TOML file that stands beside this one."""
    text = Path(__file__).with_name(name).read_text("utf-8")
    table: dict[str, Any] = (tomllib if name.endswith(".toml") else json).loads(text)
    return table


# ---- writing


Body = bytes | bytearray | memoryview
# Header entries that readers of adapters look for; all follow from the tensor bytes.
HASHES = ("modelspec.hash_sha256", "sshs_model_hash", "sshs_legacy_hash")
_LEGACY_START, _LEGACY_END = 0x100000, 0x110000
# Bytes of a number, in the order in which safetensors itself writes: wide ones first, so that all are aligned.
ELEMENT_BYTES = {
    **dict.fromkeys(("U64", "I64", "F64"), 8),
    **dict.fromkeys(("F32", "U32", "I32"), 4),
    **dict.fromkeys(("BF16", "F16", "U16", "I16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
}


def ordered(tensors: Header) -> dict[str, TensorInfo]:
    """Sort as safetensors does: by dtype, the widest first, then by name."""
    order = list(ELEMENT_BYTES)
    return dict(sorted(tensors.items(), key=lambda item: (order.index(item[1].dtype), item[0])))


def header_bytes(tensors: Header, metadata: Mapping[str, str]) -> bytes:
    """Return the length prefix and the JSON header, padded so that tensors stay aligned.

    safetensors itself orders metadata by chance.
    """
    entries: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    offset = 0
    for name, info in tensors.items():
        end = offset + _size_bytes(info)
        entries[name] = {
            "dtype": info.dtype,
            "shape": list(info.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    # Text from elsewhere may hold lone surrogates, which are not UTF-8.
    text = json.dumps(entries, ensure_ascii=False).encode("utf-8", "replace")
    padded = text + b" " * (-len(text) % 8)
    return len(padded).to_bytes(8, "little") + padded


def _size_bytes(info: TensorInfo) -> int:
    return math.prod(info.shape) * ELEMENT_BYTES[info.dtype]


def refuse_existing(path: Path, *, force: bool) -> None:
    """Raise RequestError where a result cannot go: no folder for it, or something is there already."""
    if not path.parent.is_dir():
        raise RequestError(f"the folder {path.parent} does not exist", fix="create it first")
    if path.is_dir():
        raise RequestError(f"{path} is a folder", fix="give --output a file name")
    if path.exists() and not force:
        raise RequestError(f"{path} exists already", fix="give another --output, or --force")


def write_tensors(
    path: Path,
    tensors: Header,
    bodies: Iterable[Body],
    *,
    metadata: Mapping[str, str],
    hashes: Collection[str] | None = HASHES,
    force: bool = False,
    check: Callable[[Path], None] = lambda _: None,
) -> None:
    """Write a safetensors file of these tensors; `bodies` are their bytes, taken one at a time.

    `hashes` names the entries of `HASHES` that the header gets; None keeps those in `metadata`. `check` gets the
    whole file under another name, and what it raises keeps it from getting its own. Whatever interrupts it,
    `path` holds all of the new file or the file that was there before. Raises RequestError for a file that
    exists, unless `force`, and MachineError when the disk refuses or gives other bytes back.
    """
    stale = () if hashes is None else HASHES
    others = {key: value for key, value in metadata.items() if key not in stale}

    def header(sha256_hex: str, start: bytes) -> bytes:
        # kohya's legacy hash: 64 KiB at 1 MiB of the file as it would be with the ss_ entries alone.
        training = {key: value for key, value in others.items() if key.startswith("ss_")}
        as_kohya = header_bytes(tensors, training) + start
        legacy = sha256(as_kohya[_LEGACY_START:_LEGACY_END]).hexdigest()[:8]
        entries = dict(zip(HASHES, (f"0x{sha256_hex}", sha256_hex, legacy), strict=True))
        return header_bytes(tensors, others | {key: entries[key] for key in hashes or ()})

    digest = sha256()
    with whole_or_absent(path, force=force) as file:
        room = header(digest.hexdigest(), b"")
        file.write(room)
        for (name, info), body in zip(tensors.items(), bodies, strict=True):
            view, size_bytes = memoryview(body).cast("B"), _size_bytes(info)
            if len(view) != size_bytes:
                raise ValueError(f"{name} has {len(view)} bytes, planned were {size_bytes}")
            digest.update(view)
            file.write(view)
        file.seek(len(room))
        whole = header(digest.hexdigest(), file.read(_LEGACY_END))
        assert len(whole) == len(room)
        file.seek(0)
        file.write(whole)
        file.flush()
        file.seek(len(room))
        read_back = file_digest(file, "sha256")  # type: ignore[arg-type]  # files have readinto
        if read_back.hexdigest() != digest.hexdigest():
            raise MachineError(
                f"{path} reads back with other bytes than were written",
                fix="check the disk or choose another folder with --output",
            )
        check(Path(file.name))


@contextmanager
def whole_or_absent(path: Path, *, force: bool) -> Iterator[BinaryIO]:
    """Give a file to write that appears as `path` once it is on the disk; raises as `write_tensors`."""
    temporary, published = temporary_beside(path), False
    try:
        refuse_existing(path, force=force)
        with temporary.open("xb+") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        refuse_existing(path, force=force)  # it may have come into being meanwhile
        retry_while_open(lambda: temporary.replace(path))
        published = True
        sync_folder(path.parent)
    except OSError as error:
        raise disk_error(path, error) from error
    finally:
        if not published:
            with suppress(OSError):  # the first disk error is reported, not one on cleaning up
                temporary.unlink(missing_ok=True)
