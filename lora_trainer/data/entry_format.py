"""Bytes of a cache entry: a safetensors file whose header carries the key and a checksum.

The checksum is over key, names, shapes and bytes: neither a damaged entry nor that of another key passes
for the one that is wanted.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load as parse_safetensors
from safetensors.numpy import save as build_safetensors

from lora_trainer.data import cache_keys
from lora_trainer.data.cache_keys import CacheKey, canonical, digest_of

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
        "format_version": cache_keys.FORMAT_VERSION,
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
