"""Names of cache entries: a digest of everything that an entry's arrays depend on, so that none is stale.

Inputs are hashes of content, identities of encoders and where a picture goes; outputs are keys.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any, Final, Literal

from lora_trainer.data.buckets import Placement
from lora_trainer.files import sha256_bytes

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
        """What the arrays depend on, by name."""
        return dict(zip(self._names, self._values, strict=True))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CacheKey) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        return f"CacheKey(kind={self.kind!r}, fields={self.fields!r})"


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


def digest_of(kind: str, fields: Mapping[str, str | int]) -> str:
    """Return the digest of a key; raises ValueError or TypeError for what is no JSON."""
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
    """Return what a picture's place in its bucket adds to a key."""
    return {
        "bucket": str(placement.bucket),
        "scaled": f"{placement.scaled_width_px}x{placement.scaled_height_px}",
        "crop": f"{placement.left_px},{placement.top_px}",
        "flip": int(flip),
    }
