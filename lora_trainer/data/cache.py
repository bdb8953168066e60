"""The shared cache of latents, text embeddings and masks: keyed by content, checked on every read.

An entry is one safetensors file of float32 arrays at ROOT/KIND/ab/DIGEST.safetensors. Its digest is
a hash of everything the arrays depend on, so it is never stale; its header carries that key and
a checksum over the key, names, shapes and bytes, so it is never wrong: a damaged or swapped entry is
moved aside, reported and encoded again. Writes are atomic but not flushed: they can be repeated.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as parse_safetensors
from safetensors.numpy import save as build_safetensors

from lora_trainer.data.buckets import Placement
from lora_trainer.errors import MachineError
from lora_trainer.files import (
    TEMPORARY_PREFIX,
    CappedFolder,
    disk_error,
    sha256_bytes,
    write_atomic,
)

FORMAT_VERSION = 3
"""Part of every key: raise it when decoding, cutting or the layout of entries changes."""
DTYPES = (np.float32, np.int64)
"""Numbers of the encoders, and tokens and masks."""
DAMAGED_FOLDER = "damaged"
# One metadata key holding JSON: safetensors writes several keys in random order, and equal entries
# should be equal files.
_METADATA_KEY = "lora-train cache entry"
_LEFTOVER_AGE_S = 3600.0

Arrays = dict[str, NDArray[np.float32]]
Kind = Literal["latents", "text", "masks"]


class ProblemListener(Protocol):
    """What `EventStream.problem` is: takes one sentence on what happened and one on what to do."""

    def __call__(self, what: str, *, fix: str, file: str | None = None, code: str = "") -> None: ...


@dataclass(frozen=True, kw_only=True)
class CacheKey:
    """Everything the arrays of one entry depend on."""

    kind: Kind
    fields: Mapping[str, str | int]

    @cached_property
    def digest(self) -> str:
        """SHA-256 over the canonical JSON of format version, kind and fields."""
        return _digest(self.kind, self.fields)

    def __hash__(self) -> int:
        return hash(self.digest)


def latent_key(
    *,
    content_hash: str,
    encoder_identity: str,
    placement: Placement,
    flip: bool,
    alpha_background: str | None,
) -> CacheKey:
    """Return the key of one picture's latents; `alpha_background` is None for an opaque picture."""
    fields: dict[str, str | int] = {
        "image": content_hash,
        "encoder": encoder_identity,
        **_place(placement, flip=flip),
        "background": alpha_background or "",
    }
    return CacheKey(kind="latents", fields=fields)


def mask_key(
    *, content_hash: str, of_alpha: bool, placement: Placement, flip: bool, factor: int
) -> CacheKey:
    """Return the key of one mask at the size of latents, `factor` pixels a side.

    `content_hash` is of the mask's file, or of the picture whose transparency it is.
    """
    fields: dict[str, str | int] = {
        "mask": content_hash,
        "channel": "alpha" if of_alpha else "brightness",
        **_place(placement, flip=flip),
        "factor": factor,
    }
    return CacheKey(kind="masks", fields=fields)


def text_key(*, text: str, encoder_identity: str, max_tokens: int, content: str) -> CacheKey:
    """Return the key of one text's entry; `content` is "tokens", or the dtype that embedded it."""
    fields: dict[str, str | int] = {
        "text": text,
        "encoder": encoder_identity,
        "max_tokens": max_tokens,
        "content": content,
    }
    return CacheKey(kind="text", fields=fields)


@dataclass(frozen=True, kw_only=True)
class Cache:
    """Entries in a size-capped folder shared by all runs, threads and processes."""

    folder: CappedFolder
    on_problem: ProblemListener

    def path(self, key: CacheKey) -> Path:
        """Return where the entry of `key` is or would be."""
        return self.folder.root / key.kind / key.digest[:2] / f"{key.digest}.safetensors"

    def has(self, key: CacheKey) -> bool:
        """Say whether there is an entry, without reading it; `read` may still find it damaged."""
        return self.path(key).exists()

    def read(self, key: CacheKey) -> Arrays | None:
        """Return the arrays that were written under `key`, or None when there are none to trust.

        A damaged entry is moved to `damaged/` and reported; the caller encodes it again.
        """
        path = self.path(key)
        try:
            arrays = _parse(path.read_bytes(), digest=key.digest)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._report(path, f"cannot be read ({error.strerror or error})")
            return None
        except _Damaged as error:
            self._report(path, f"is damaged ({error}){self._moved_aside(path)}")
            return None
        # Disks are mounted to note no reading: another run would prune what this one is using.
        with suppress(OSError):
            os.utime(path)
        return arrays

    def verify(self, key: CacheKey) -> bool:
        """Say whether the entry is there and whole; a damaged one is treated as by `read`."""
        return self.read(key) is not None

    def write(self, key: CacheKey, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Store float32 and int64 arrays; raises MachineError, TypeError for another dtype."""
        data = _build(key, arrays)
        path = self.path(key)
        if not path.parent.is_dir():
            self.folder.create()
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise disk_error(path, error) from error
        write_atomic(path, data, durable=False)

    def check_room(self, needed_bytes: int, *, missing_bytes: int | None = None) -> None:
        """Make the folder and raise MachineError unless a run's entries fit, before any is encoded.

        `needed_bytes` is what all entries of the run take, `missing_bytes` what is not yet there.
        """
        self.folder.create()
        limit_bytes = self.folder.limit_bytes
        if needed_bytes > limit_bytes:
            raise MachineError(
                f"this run's cache needs {needed_bytes:,} bytes, "
                f"data.cache_max_gib allows {limit_bytes:,}",
                fix=f"--set data.cache_max_gib={-(-needed_bytes // 2**30)}, or use fewer images",
            )
        missing_bytes = needed_bytes if missing_bytes is None else missing_bytes
        free_bytes = shutil.disk_usage(self.folder.root).free
        if missing_bytes > free_bytes:
            raise MachineError(
                f"this run's cache still needs {missing_bytes:,} bytes in {self.folder.root}, "
                f"{free_bytes:,} are free",
                fix="free some space or choose another folder with --set data.cache_dir=FOLDER",
            )

    def prune(self, keep: Iterable[CacheKey]) -> int:
        """Bring the folder under its limit, sparing entries in `keep`; return the bytes freed."""
        self._remove_leftovers()
        return self.folder.prune(self.path(key) for key in keep)

    def _remove_leftovers(self) -> None:
        # Only a killed run leaves a temporary file this long; the folder's size counts none.
        if (self.folder.root / self.folder.marker).exists():
            for path in _old_files(
                self.folder.root.glob(f"*/*/{TEMPORARY_PREFIX}*"), age_s=_LEFTOVER_AGE_S
            ):
                path.unlink(missing_ok=True)

    def _moved_aside(self, path: Path) -> str:
        aside = self.folder.root / DAMAGED_FOLDER / path.name
        try:
            aside.parent.mkdir(exist_ok=True)
            path.replace(aside)
        except OSError as error:
            return f" and cannot be moved aside ({error.strerror or error})"
        return f", moved to {DAMAGED_FOLDER}/"

    def _report(self, path: Path, what: str) -> None:
        name = path.relative_to(self.folder.root).as_posix()
        self.on_problem(
            f"cache entry {name} {what}; it is encoded again",
            fix="nothing to do; if this repeats, check the disk",
            file=name,
            code="CAC-01",
        )


def _place(placement: Placement, *, flip: bool) -> dict[str, str | int]:
    """Return what a picture's place in its bucket adds to a key."""
    return {
        "bucket": str(placement.bucket),
        "scaled": f"{placement.scaled_width_px}x{placement.scaled_height_px}",
        "crop": f"{placement.left_px},{placement.top_px}",
        "flip": int(flip),
    }


class _Damaged(Exception):
    """The bytes are not a whole entry of the wanted key; the message says how."""


def _digest(kind: str, fields: Mapping[str, str | int]) -> str:
    return sha256_bytes(
        _canonical({"format": FORMAT_VERSION, "kind": kind, "fields": dict(fields)}).encode()
    )


def _canonical(value: Any) -> str:
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )


def _build(key: CacheKey, arrays: Mapping[str, NDArray[Any]]) -> bytes:
    wrong = {name: str(array.dtype) for name, array in arrays.items() if array.dtype not in DTYPES}
    if wrong or not arrays:
        raise TypeError(f"cache entries are float32 or int64 arrays, got {wrong or 'none'}")
    # safetensors reads the memory behind a transposed array as if it were in order.
    ordered = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    header = _header(key.kind, key.fields, ordered)
    return build_safetensors(ordered, metadata={_METADATA_KEY: _canonical(header)})


def _header(
    kind: str, fields: Mapping[str, str | int], arrays: Mapping[str, NDArray[Any]]
) -> dict[str, Any]:
    key = _digest(kind, fields)
    return {
        "format_version": FORMAT_VERSION,
        "kind": kind,
        "key": key,
        "fields": dict(fields),
        "sha256": _checksum(key, arrays),
    }


def _parse(data: bytes, *, digest: str) -> Arrays:
    """Return the arrays of a whole entry of that key; raises _Damaged for anything else."""
    try:
        (header_bytes,) = struct.unpack_from("<Q", data)
        metadata = json.loads(data[8 : 8 + header_bytes])["__metadata__"]
        header = json.loads(metadata[_METADATA_KEY])
        arrays = parse_safetensors(data)
        key, whole = header["key"], _header(header["kind"], header["fields"], arrays)
    except (
        SafetensorError,
        struct.error,
        ValueError,
        LookupError,
        TypeError,
        RecursionError,
    ) as error:
        raise _Damaged(f"unreadable header: {type(error).__name__}") from None
    if key != digest:
        raise _Damaged("it holds another entry")
    if header != whole:
        raise _Damaged("its checksum does not match")
    return arrays


def _checksum(key: str, arrays: Mapping[str, NDArray[Any]]) -> str:
    digest = hashlib.sha256(key.encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(_canonical([name, array.dtype.name, list(array.shape)]).encode())
        digest.update(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
    return digest.hexdigest()


def _old_files(paths: Iterable[Path], *, age_s: float) -> Iterator[Path]:
    for path in paths:
        try:
            old = time.time() - path.stat().st_mtime > age_s
        except FileNotFoundError:  # another run finished it
            continue
        if old:
            yield path
