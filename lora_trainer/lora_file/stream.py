"""Safetensors files written tensor by tensor: any size in the memory of one tensor, whole or absent.

Input is the name and the size of each tensor, then their bytes in the same order; output a
file that appears under its name when all of it is on the disk. Hashes of the tensor bytes have a fixed
length, so the header keeps room for them and gets them last. Torch-free.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any, BinaryIO

from lora_trainer.common.errors import MachineError, RequestError
from lora_trainer.common.files import TEMPORARY_PREFIX, disk_error, retry_while_open, sync_folder
from lora_trainer.families.base import Header, TensorInfo

Body = bytes | bytearray | memoryview
MODELSPEC_HASH = "modelspec.hash_sha256"
MODEL_HASH = "sshs_model_hash"
LEGACY_HASH = "sshs_legacy_hash"
HASHES = (MODELSPEC_HASH, MODEL_HASH, LEGACY_HASH)
"""Header entries that readers of adapters look for; all follow from the tensor bytes."""
_LEGACY_START, _LEGACY_END = 0x100000, 0x110000
ELEMENT_BYTES = {
    **dict.fromkeys(("U64", "I64", "F64"), 8),
    **dict.fromkeys(("F32", "U32", "I32"), 4),
    **dict.fromkeys(("BF16", "F16", "U16", "I16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
}
"""Bytes of a number, in the order in which safetensors itself writes: wide ones first, so that all are aligned."""


def hash_entries(
    tensors: Header, metadata: Mapping[str, str], *, sha256_hex: str, start: bytes
) -> dict[str, str]:
    """Return the entries of `HASHES` for the hash of all tensor bytes and the first of them.

    `metadata` are the other entries of the file.
    """
    # kohya's legacy hash: 64 KiB at 1 MiB of the file as it would be with the ss_ entries alone.
    training = {key: value for key, value in metadata.items() if key.startswith("ss_")}
    as_kohya = header_bytes(tensors, training) + start
    legacy = sha256(as_kohya[_LEGACY_START:_LEGACY_END]).hexdigest()[:8]
    return {MODELSPEC_HASH: f"0x{sha256_hex}", MODEL_HASH: sha256_hex, LEGACY_HASH: legacy}


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
    # Text from elsewhere may hold lone surrogates, which are no UTF-8.
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
        entries = hash_entries(tensors, others, sha256_hex=sha256_hex, start=start)
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
        if _body_sha256(file, start=len(room)) != digest.hexdigest():
            raise MachineError(
                f"{path} reads back with other bytes than were written",
                fix="check the disk or choose another folder with --output",
            )
        check(Path(file.name))


def temporary_beside(path: Path) -> Path:
    """Return a name in the folder of `path` that no other write has."""
    return path.with_name(
        f"{TEMPORARY_PREFIX}{os.getpid()}-{time.monotonic_ns()}-{path.name}"[:200]
    )


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


def _body_sha256(file: BinaryIO, *, start: int) -> str:
    file.seek(start)
    return file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # files have readinto
