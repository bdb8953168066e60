"""Reading the adapter out of a file of any trainer, module by module, as tensors under this program's names.

Input is a safetensors file (or its bytes) and the spellings of `adapter_names.file_names`, output
ModuleTensors in the file's dtypes. Tensors are read when asked for, so that any number of files can
be worked on in the memory of one module.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor

from lora_trainer.errors import InputError
from lora_trainer.output.adapter_file import Part, read_contents
from lora_trainer.output.adapter_names import Role
from lora_trainer.output.adapter_strength import Strengths, read_strengths
from lora_trainer.output.adapter_tensors import AdapterKind, ModuleTensors, split_key
from lora_trainer.output.checked_header import refuse


class _Tensors(Protocol):
    def get_tensor(self, name: str) -> Tensor: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class OpenAdapter(Mapping[str, ModuleTensors]):
    """An adapter file that is open for reading: modules by "component.module", each read when looked up.

    Keys are sorted; `items()` holds one module at a time.
    """

    name: str
    metadata: Mapping[str, str]
    _tensors: _Tensors
    _parts: Mapping[str, tuple[str, Part]]
    _strengths: Strengths

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __contains__(self, key: object) -> bool:
        return key in self._parts  # the base class would read the module

    def __getitem__(self, key: str) -> ModuleTensors:
        """Return one module's tensors, in the file's dtype on the CPU; raises InputError for misshapen ones."""
        spelling, part = self._parts[key]
        tensors = {
            role: self._tensors.get_tensor(entry.key) for role, entry in part.entries.items()
        }
        alpha = tensors.pop("alpha", None)
        assert part.kind is not None
        try:
            return _module(part.kind, tensors, alpha=alpha, strengths=self._strengths, key=key)
        except (ValueError, RuntimeError, IndexError) as error:
            raise InputError(
                f"{self.name} cannot be used: {spelling!r} {str(error).splitlines()[0]}",
                fix="give an adapter made for this base model, whole",
            ) from None


@contextmanager
def open_adapter(source: Path | bytes, *, names: Mapping[str, str]) -> Iterator[OpenAdapter]:
    """Open an adapter file of any trainer; `names` has "component.module" by spelling.

    Raises InputError where the file is no whole safetensors file, where modules are unknown or lack
    tensors, and where a tensor belongs to no kind of adapter that is known.
    """
    name = source.name if isinstance(source, Path) else "the file in memory"
    contents = read_contents(source)
    parts = _known_parts(contents.parts, names, name=name)
    if contents.unknown:
        _refuse(
            name,
            f"holds {len(contents.unknown)} tensors of no known kind, first {contents.unknown[0]!r}",
        )
    if not parts:
        _refuse(name, "holds no adapter")
    strengths = read_strengths(contents.metadata, source if isinstance(source, Path) else None)
    with _tensors_of(source) as tensors:
        yield OpenAdapter(
            name=name,
            metadata=contents.metadata,
            _tensors=tensors,
            _parts=dict(sorted(parts.items())),
            _strengths=strengths,
        )


def read_tensors(source: Path | bytes, *, names: Mapping[str, str]) -> dict[str, ModuleTensors]:
    """Return all modules of an adapter file at once; see `open_adapter`."""
    with open_adapter(source, names=names) as adapter:
        return dict(adapter)


@contextmanager
def _tensors_of(source: Path | bytes) -> Iterator[_Tensors]:
    try:
        if isinstance(source, bytes):
            yield _Loaded(load(source))
            return
        with safe_open(source, framework="pt", device="cpu") as file:
            yield file
    except SafetensorError as error:
        refuse(Path(source if isinstance(source, Path) else "."), f"cannot be read ({error})")


@dataclass(frozen=True)
class _Loaded:
    tensors: Mapping[str, Tensor]

    def get_tensor(self, name: str) -> Tensor:
        return self.tensors[name]


def _known_parts(
    parts: Mapping[str, Part], names: Mapping[str, str], *, name: str
) -> dict[str, tuple[str, Part]]:
    unknown = sorted(spelling for spelling in parts if spelling not in names)
    if unknown:
        _refuse(
            name,
            f"has {len(unknown)} of {len(parts)} modules that the base model lacks, first {unknown[0]!r}",
            fix="give an adapter made for this base model, or name its base with --base",
        )
    found: dict[str, tuple[str, Part]] = {}
    for spelling, part in parts.items():
        key = names[spelling]
        if key in found:
            _refuse(name, f"names one module twice, {spelling!r} and {found[key][0]!r}")
        if not part.complete:
            _refuse(name, f"lacks tensors of {spelling!r}: it has only {', '.join(part.entries)}")
        found[key] = (spelling, part)
    return found


def _module(
    kind: AdapterKind,
    tensors: dict[Role, Tensor],
    *,
    alpha: Tensor | None,
    strengths: Strengths,
    key: str,
) -> ModuleTensors:
    """Build the module; raises ValueError, whose text follows the module's name, for odd shapes."""
    value = None if alpha is None else float(alpha)
    if kind == "oft":
        return _oft(tensors, constraint=value)
    if "mid" in tensors:
        # LyCORIS's Tucker form: two small products are the ordinary down matrix.
        tensors["down"] = _without_mid(tensors["down"], tensors.pop("mid"))
    if "magnitude" in tensors:
        if kind != "lora":
            raise ValueError(f"is a {kind} with magnitudes (DoRA), which only LoRA can have here")
        tensors["magnitude"] = _magnitude(tensors["magnitude"], outputs=tensors["up"].shape[0])
    rank = _rank(kind, tensors, alpha=value)
    return ModuleTensors(
        kind=kind,
        tensors={str(role): tensor for role, tensor in sorted(tensors.items())},
        rank=rank,
        scale=_scale(kind, tensors, alpha=value, rank=rank, strengths=strengths, key=key),
    )


def _rank(kind: AdapterKind, tensors: Mapping[Role, Tensor], *, alpha: float | None) -> int:
    pairs: tuple[tuple[Role, Role], ...] = (("up", "down"), ("w1_a", "w1_b"), ("w2_a", "w2_b"))
    found = {
        (tensors[left].shape[1], tensors[right].shape[0])
        for left, right in pairs
        if left in tensors
    }
    ranks = {rank for both in found for rank in both}
    if not ranks:  # two whole LoKr factors: LyCORIS states the rank as alpha
        return max(1, round(alpha)) if alpha is not None and math.isfinite(alpha) else 1
    if len(ranks) > 1 or 0 in ranks:
        raise ValueError(f"has factors of different rank ({', '.join(map(str, sorted(ranks)))})")
    return ranks.pop()


def _scale(
    kind: AdapterKind,
    tensors: Mapping[Role, Tensor],
    *,
    alpha: float | None,
    rank: int,
    strengths: Strengths,
    key: str,
) -> float:
    if kind == "lokr" and {"w1", "w2"} <= tensors.keys():
        return 1.0  # by LyCORIS's rule, alpha counts only where a factor is decomposed
    scale = alpha / rank if alpha is not None else strengths.scale(*split_key(key), rank=rank)
    if not math.isfinite(scale):
        raise ValueError(f"has an alpha of {alpha}")
    return scale


def _oft(tensors: Mapping[Role, Tensor], *, constraint: float | None) -> ModuleTensors:
    blocks = tensors["blocks"]
    if blocks.ndim != 3 or blocks.shape[1] != blocks.shape[2]:
        raise ValueError(f"has rotations of shape {tuple(blocks.shape)}, not (count, size, size)")
    if constraint:
        raise ValueError("is an OFT with a constraint on its rotations, which is not supported")
    return ModuleTensors(kind="oft", tensors={"blocks": blocks}, rank=blocks.shape[1], scale=1.0)


def _without_mid(down: Tensor, mid: Tensor) -> Tensor:
    product = torch.einsum("ij...,jn->in...", mid.double(), down.double().flatten(1))
    return product.to(down.dtype)


def _magnitude(tensor: Tensor, *, outputs: int) -> Tensor:
    """Flatten to [out]; DoRA files from before 2024's end can hold a norm for each input instead."""
    if tensor.numel() != outputs or (tensor.ndim == 2 and tensor.shape[0] != outputs):
        raise ValueError("has a magnitude for each input (old DoRA), not for each output")
    return tensor.flatten()


def _refuse(
    name: str, what: str, *, fix: str = "give an adapter of a kind that `lora-train inspect` knows"
) -> NoReturn:
    raise InputError(f"{name} {what}", fix=fix)
