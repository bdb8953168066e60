"""Keys of cache entries, and the format of the files that hold them.

A key is a digest of everything that an entry's arrays depend on, so that none is stale. An entry is a safetensors
file whose header carries the key and a checksum over key, names, shapes and bytes: neither a damaged entry nor that
of another key passes for the one that is wanted.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from functools import cache
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as parse_safetensors
from safetensors.numpy import save as build_safetensors

from lora_trainer.common.files import sha256_bytes
from lora_trainer.dataset.buckets import Placement

FORMAT_VERSION = 3
"""Part of every key: raise it when decoding, cutting or the layout of entries changes."""

Kind = Literal["latents", "text", "masks"]


class CacheKey:
    """Everything the arrays of one entry depend on; keys are equal where all of it is.

    Kept as the names of the fields, shared by all keys of a kind, their values, and the digest: a
    dictionary in each of 200,000 keys takes 100 MB.
    """

    __slots__ = ("_names", "_values", "digest", "kind")

    digest: Final[str]
    """SHA-256 over the canonical JSON of format version, kind and fields."""

    def __init__(self, *, kind: Kind, fields: Mapping[str, str | int]) -> None:
        self.kind: Final[Kind] = kind
        self.digest = digest_of(kind, fields)
        self._names = _shared(tuple(fields))
        self._values = tuple(fields.values())

    @property
    def fields(self) -> Mapping[str, str | int]:
        """Everything that the arrays depend on, by name."""
        return dict(zip(self._names, self._values, strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CacheKey) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


@cache
def _shared(names: tuple[str, ...]) -> tuple[str, ...]:
    return names


def latent_key(
    *,
    content_hash: str,
    encoder_identity: str,
    placement: Placement,
    flip: bool,
    alpha_background: str | None,
) -> CacheKey:
    """Return the key of one image's latents; `alpha_background` is None for an opaque image."""
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

    `content_hash` is of the mask's file, or of the image whose transparency it is.
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


def digest_of(kind: str, fields: Mapping[str, str | int]) -> str:
    """Return the digest of a key; raises ValueError or TypeError for a value that JSON cannot hold."""
    return sha256_bytes(
        canonical({"format": FORMAT_VERSION, "kind": kind, "fields": dict(fields)}).encode()
    )


_ENCODER: Final = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
)


def canonical(value: Any) -> str:
    """Return the one JSON text of a value."""
    return _ENCODER.encode(value)


def _place(placement: Placement, *, flip: bool) -> dict[str, str | int]:
    """Return the part of a key that states an image's scale and crop in its bucket."""
    return {
        "bucket": str(placement.bucket),
        "scaled": f"{placement.scaled_width_px}x{placement.scaled_height_px}",
        "crop": f"{placement.left_px},{placement.top_px}",
        "flip": int(flip),
    }


DTYPES = (np.float32, np.int64)
"""Numbers of the encoders, and tokens and masks."""
# One metadata key holding JSON: safetensors writes several keys in random order, and equal entries
# should be equal files.
_METADATA_KEY = "lora-train cache entry"

Arrays = dict[str, NDArray[np.float32]]


class Damaged(Exception):
    """The bytes are not a whole entry of the wanted key; the message says how."""


def build(key: CacheKey, arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Return the bytes of an entry; raises TypeError for other arrays than float32 and int64."""
    wrong = {name: str(array.dtype) for name, array in arrays.items() if array.dtype not in DTYPES}
    if wrong or not arrays:
        raise TypeError(f"cache entries are float32 or int64 arrays, got {wrong or 'none'}")
    # safetensors reads the memory behind a transposed array as if it were in order.
    ordered = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    header = _header(key.kind, key.fields, ordered)
    return build_safetensors(ordered, metadata={_METADATA_KEY: canonical(header)})


def _header(
    kind: str, fields: Mapping[str, str | int], arrays: Mapping[str, NDArray[Any]]
) -> dict[str, Any]:
    key = digest_of(kind, fields)
    return {
        "format_version": FORMAT_VERSION,
        "kind": kind,
        "key": key,
        "fields": dict(fields),
        "sha256": _checksum(key, arrays),
    }


def parse(data: bytes, *, digest: str) -> Arrays:
    """Return the arrays of a whole entry of that key; raises Damaged for anything else."""
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
        raise Damaged(f"unreadable header: {type(error).__name__}") from None
    if key != digest:
        raise Damaged("it holds another entry")
    if header != whole:
        raise Damaged("its checksum does not match")
    return arrays


def _checksum(key: str, arrays: Mapping[str, NDArray[Any]]) -> str:
    digest = hashlib.sha256(key.encode())
    for name in sorted(arrays):
        array = arrays[name]
        digest.update(canonical([name, array.dtype.name, list(array.shape)]).encode())
        little = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
        digest.update(little.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
