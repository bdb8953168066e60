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
from dataclasses import dataclass, field
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


@dataclass(kw_only=True)
class BodyHashes:
    """Takes the tensor bytes in file order; `entries` are then the hashes that readers look for."""

    _digest: Any = field(default_factory=sha256)
    _start: bytearray = field(default_factory=bytearray)

    def update(self, data: Body) -> None:
        self._digest.update(data)
        if len(self._start) < _LEGACY_END:
            self._start += memoryview(data).cast("B")[: _LEGACY_END - len(self._start)]

    def entries(self, tensors: Header, metadata: Mapping[str, str]) -> dict[str, str]:
        """Return the entries of `HASHES`; `metadata` are the other entries of the file."""
        digest = self._digest.hexdigest()
        # kohya's legacy hash: 64 KiB at 1 MiB of the file as it would be with the ss_ entries alone.
        training = {key: value for key, value in metadata.items() if key.startswith("ss_")}
        as_kohya = header_bytes(tensors, training) + self._start
        legacy = sha256(as_kohya[_LEGACY_START:_LEGACY_END]).hexdigest()[:8]
        return {MODELSPEC_HASH: f"0x{digest}", MODEL_HASH: digest, LEGACY_HASH: legacy}


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
    body_hashes = BodyHashes()
    stale = () if hashes is None else HASHES
    others = {key: value for key, value in metadata.items() if key not in stale}
    with whole_or_absent(path, force=force) as file:
        room = header_bytes(tensors, others | _chosen(body_hashes.entries({}, {}), hashes))
        file.write(room)
        for (name, info), body in zip(tensors.items(), bodies, strict=True):
            view, size_bytes = memoryview(body).cast("B"), _size_bytes(info)
            if len(view) != size_bytes:
                raise ValueError(f"{name} has {len(view)} bytes, planned were {size_bytes}")
            body_hashes.update(view)
            file.write(view)
        file.seek(0)
        entries = body_hashes.entries(tensors, others)
        header = header_bytes(tensors, others | _chosen(entries, hashes))
        assert len(header) == len(room)
        file.write(header)
        _require_body(file, path, start=len(room), sha256_hex=entries[MODEL_HASH])
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


def _require_body(file: BinaryIO, path: Path, *, start: int, sha256_hex: str) -> None:
    """Read back the bytes from `start` on; raises MachineError for others than were written."""
    file.flush()
    if _body_sha256(file, start=start) != sha256_hex:
        raise MachineError(
            f"{path} reads back with other bytes than were written",
            fix="check the disk or choose another folder with --output",
        )


def _chosen(entries: Mapping[str, str], hashes: Collection[str] | None) -> dict[str, str]:
    return {key: entries[key] for key in hashes or ()}


def _body_sha256(file: BinaryIO, *, start: int) -> str:
    file.seek(start)
    return file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]  # files have readinto
