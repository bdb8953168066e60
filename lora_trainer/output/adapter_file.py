"""Reading an adapter file from any trainer without torch: checked header, roles of the keys.

Input is a path nobody vouches for, output an AdapterFile. Every size is checked before it is
believed, the tensors are read once in file order, and nothing in the file is used as a path.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from lora_trainer.output.adapter_names import Kind, Role, parse_key
from lora_trainer.output.adapter_norms import Norms
from lora_trainer.output.checked_header import Entry, Opened, open_checked, refuse

_NUMPY = {"F16": "<f2", "F32": "<f4", "F64": "<f8", "I32": "<i4", "I64": "<i8"}
_NEEDED: Mapping[Kind, tuple[tuple[Role, ...], ...]] = {
    "lora": (("down", "up"),),
    "loha": (("w1_a", "w1_b", "w2_a", "w2_b"),),
    "lokr": (
        ("w1", "w2"),
        ("w1", "w2_a", "w2_b"),
        ("w1_a", "w1_b", "w2"),
        ("w1_a", "w1_b", "w2_a", "w2_b"),
    ),
    "oft": (("blocks",),),
}


@dataclass(frozen=True, kw_only=True)
class Part:
    """All tensors of one module by role; `kind` is None where there are no factors at all."""

    kind: Kind | None
    entries: Mapping[Role, Entry]

    @property
    def complete(self) -> bool:
        """Whether the factors of its kind are all there, and no others."""
        have = self.entries.keys() - {"alpha", "magnitude", "mid"}
        return self.kind is not None and any(have == set(roles) for roles in _NEEDED[self.kind])

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks that factors state, one where they agree; of an OFT, the size of a block.

        A LoKr of two whole factors has none.
        """
        pairs: tuple[tuple[Role, int], ...] = (
            ("up", 1), ("down", 0), ("w1_a", 1), ("w1_b", 0), ("w2_a", 1), ("w2_b", 0), ("blocks", -1),
        )  # fmt: skip
        return frozenset(
            self.entries[role].shape[place]
            for role, place in pairs
            if role in self.entries and len(self.entries[role].shape) > 1
        )

    @property
    def down_shape(self) -> tuple[int, ...]:
        """Shape [rank, in, ...] of the factor at the input, as far as it can be told."""
        shapes = {role: entry.shape for role, entry in self.entries.items()}
        if self.kind == "lokr":
            left, right = shapes.get("w1", shapes.get("w1_b")), shapes.get("w2", shapes.get("w2_b"))
            if not left or not right or len(left) < 2 or len(right) < 2:
                return ()
            return (max(self.ranks, default=1), left[1] * right[1])
        return shapes.get("down", shapes.get("w1_b", ()))


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What the header says: metadata, the modules as spelt there, and the keys of no adapter."""

    metadata: Mapping[str, str]
    parts: Mapping[str, Part]
    unknown: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class AdapterFile:
    """Tensors by module and role, and what one pass over the bytes showed.

    `alphas` are values by module and `norms` the Frobenius norm of what each module's factors make
    at strength 1; `not_finite` has the keys with NaN or infinity, `body_sha256` the hash
    of all tensor bytes.
    """

    metadata: Mapping[str, str]
    parts: Mapping[str, Part]
    unknown: tuple[str, ...]
    alphas: Mapping[str, float]
    norms: Mapping[str, float]
    not_finite: tuple[str, ...]
    body_sha256: str

    @property
    def whole(self) -> Mapping[str, Part]:
        """The modules whose tensors are all there, by name."""
        return {name: part for name, part in sorted(self.parts.items()) if part.complete}


def read_adapter(path: Path) -> AdapterFile:
    """Read and check a safetensors file, bytes and all; raises InputError saying what is wrong."""
    with open_checked(path) as opened:
        return _read_tensors(opened, _contents(opened))


def read_contents(source: Path | bytes) -> Contents:
    """Check a file's header and return what it lists, no tensor read; raises InputError."""
    with open_checked(source) as opened:
        return _contents(opened)


def _contents(opened: Opened) -> Contents:
    found: dict[str, dict[Role, Entry]] = {}
    kinds: dict[str, set[Kind]] = {}
    unknown = []
    for entry in opened.entries:
        parsed = parse_key(entry.key)
        if parsed is None:
            unknown.append(entry.key)
            continue
        module, kind, role = parsed
        if role in found.setdefault(module, {}):
            refuse(
                opened.path, f"has two tensors for the {role} of {module!r}, one is {entry.key!r}"
            )
        found[module][role] = entry
        if kind is not None:
            kinds.setdefault(module, set()).add(kind)
    # The magnitude of a LoKr with DoRA is no factor of a LoRA.
    parts = {
        module: Part(kind=_kind(kinds.get(module, set()), roles), entries=roles)
        for module, roles in found.items()
    }
    return Contents(metadata=opened.metadata, parts=parts, unknown=tuple(unknown))


def _kind(kinds: set[Kind], roles: Mapping[Role, Entry]) -> Kind | None:
    others = sorted(kinds - {"lora"})
    if others and not {"down", "up", "mid"} & roles.keys():
        return others[0]
    return "lora" if kinds else None


def _read_tensors(opened: Opened, contents: Contents) -> AdapterFile:
    """Read every tensor once, in file order."""
    places = {
        entry.key: (module, part.kind, role)
        for module, part in contents.parts.items()
        for role, entry in part.entries.items()
    }
    digest, norms, alphas, not_finite = sha256(), Norms(), {}, []
    for entry in opened.entries:
        data = opened.file.read(entry.end - entry.begin)
        digest.update(data)
        values = _values(data, entry)
        if values is not None and not np.isfinite(values).all():
            not_finite.append(entry.key)
            continue
        module, kind, role = places.get(entry.key, ("", None, None))
        if role == "alpha" and values is not None and values.size == 1:
            alphas[module] = float(values.reshape(()))
        elif role is not None and kind is not None and values is not None:
            norms.add(module, kind, role, values.astype(np.float64))
    found = {
        module: norms.of(module, part.kind)
        for module, part in contents.parts.items()
        if part.kind is not None and "mid" not in part.entries
    }
    return AdapterFile(
        metadata=contents.metadata,
        parts=contents.parts,
        unknown=contents.unknown,
        alphas=alphas,
        norms={module: norm for module, norm in found.items() if norm is not None},
        not_finite=tuple(not_finite),
        body_sha256=digest.hexdigest(),
    )


def _values(data: bytes, entry: Entry) -> np.ndarray[Any, Any] | None:
    """Return the numbers of a tensor, None for dtypes that no adapter has."""
    if entry.dtype == "BF16":  # numpy has none: the upper half of a float32
        wide = np.frombuffer(data, "<u2").astype("<u4") << 16
        return wide.view("<f4").reshape(entry.shape)
    layout = _NUMPY.get(entry.dtype)
    return None if layout is None else np.frombuffer(data, layout).reshape(entry.shape)
