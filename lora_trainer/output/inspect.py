"""What is in an adapter file: key format, model family, kind, rank, alpha, norms, metadata, and what is wrong.

Input is a safetensors file from any trainer, output an Inspection. Torch-free. Each problem says
what a reader of the file would stumble over and what to do about it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_trainer.families.recognise import adapter_family
from lora_trainer.output.adapter_file import AdapterFile, read_adapter
from lora_trainer.output.adapter_norms import block_of
from lora_trainer.output.adapter_problems import KeyFormat, Problem, find_problems, key_format
from lora_trainer.output.adapter_strength import Strengths, read_strengths
from lora_trainer.output.checked_header import refuse
from lora_trainer.output.embedding_file import KEYS, WORD, read_embedding

__all__ = ["Inspection", "KeyFormat", "Problem", "Spread", "inspect_file"]


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Smallest and largest value over the modules."""

    low: float
    high: float

    def to_json(self) -> float | dict[str, float]:
        """Return the value, or {"min", "max"} where modules differ."""
        return self.low if self.low == self.high else {"min": self.low, "max": self.high}


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """An adapter file at a glance; `alpha` is None where the file does not say it.

    `rank` is the size of a block for OFT, and None where all factors of a LoKr are whole. `norms` has
    the Frobenius norm of the update by block, as far as it can be told without the base. `embeddings`
    has (tokens, width) by key where the file holds the vectors of a new word instead.
    """

    family: str
    format: KeyFormat
    rank: Spread | None
    alpha: Spread | None
    modules: int
    metadata: Mapping[str, str]
    problems: tuple[Problem, ...]
    kinds: tuple[str, ...] = ("lora",)
    embeddings: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    norms: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        vectors = {key: list(shape) for key, shape in self.embeddings.items()}
        return {
            "family": self.family,
            "format": self.format,
            "kinds": list(self.kinds),
            "rank": self.rank.to_json() if self.rank else None,
            "alpha": self.alpha.to_json() if self.alpha else None,
            "modules": self.modules,
            "norms": dict(self.norms),
            **({"embeddings": vectors} if vectors else {}),
            "metadata": dict(self.metadata),
            "problems": [problem.to_json() for problem in self.problems],
        }


def inspect_file(path: Path) -> Inspection:
    """Look into an adapter file; raises InputError for what is unreadable or holds no adapter."""
    contents = read_adapter(path)
    whole = contents.whole
    if not contents.parts and contents.unknown and set(contents.unknown) <= set(KEYS):
        return _embedding(path)
    if not whole:
        refuse(path, f"holds {_describe(contents)}, but no LoRA")
    strengths = read_strengths(contents.metadata, path)
    family = adapter_family(
        {name: part.down_shape for name, part in whole.items()}, metadata=contents.metadata
    )
    return Inspection(
        family=family,
        format=key_format(whole),
        rank=_spread(rank for part in whole.values() for rank in part.ranks),
        alpha=_spread([*contents.alphas.values(), *strengths.alphas()]),
        modules=len(whole),
        metadata=contents.metadata,
        problems=tuple(find_problems(contents, family=family, strengths=strengths)),
        kinds=tuple(sorted({str(part.kind) for part in whole.values()})),
        norms=_norms(contents, strengths),
    )


def _embedding(path: Path) -> Inspection:
    found = read_embedding(path)
    architecture, _, _ = found.metadata.get("modelspec.architecture", "").rpartition("/")
    word = found.metadata.get(WORD)
    problem = Problem(
        kind="embedding",
        severity="note",
        what="this is no LoRA but the new tokens of "
        + (f"the word {word!r}" if word else "a word"),
        advice=f"put it into the folder of embeddings and {path.stem} into the prompt",
    )
    return Inspection(
        family=architecture or "unknown",
        format="unknown",
        rank=None,
        alpha=None,
        modules=0,
        metadata=found.metadata,
        problems=(problem,),
        kinds=("embedding",),
        embeddings={key: (vec.shape[0], vec.shape[1]) for key, vec in found.vectors.items()},
    )


def _spread(values: Iterable[float]) -> Spread | None:
    found = list(values)
    return Spread(low=min(found), high=max(found)) if found else None


def _describe(contents: AdapterFile) -> str:
    names = [
        *contents.unknown,
        *(entry.key for part in contents.parts.values() for entry in part.entries.values()),
    ]
    return f"{len(names):,} tensors such as {names[0]!r}" if names else "no tensors"


def _norms(contents: AdapterFile, strengths: Strengths) -> dict[str, float]:
    """Add up the squares of the modules' norms by block, blocks in their order."""
    squares: dict[str, float] = {}
    for module, norm in contents.norms.items():
        rank = max(contents.parts[module].ranks, default=0)
        alpha = contents.alphas.get(module)
        if rank == 0:
            scale = 1.0  # of two whole LoKr factors, readers ignore the alpha
        elif alpha is not None:
            scale = alpha / rank
        else:
            scale = strengths.scale_of(module, rank=rank)
        block = block_of(module)
        squares[block] = squares.get(block, 0.0) + (norm * scale) ** 2
    return {
        block: math.sqrt(squares[block])
        for block in sorted(squares, key=_natural)
        if math.isfinite(squares[block])
    }


def _natural(block: str) -> tuple[str, int]:
    name, _, number = block.rpartition(".")
    return (name, int(number)) if number.isdigit() else (block, 0)
