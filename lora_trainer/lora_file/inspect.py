"""An adapter file at a glance: key format, model family, kind, rank, alpha, norms, metadata, problems.

Input is a safetensors file from any trainer, output an Inspection. Torch-free. Each problem says
where a reader of the file would stumble and how to mend it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from lora_trainer.common.errors import InputError
from lora_trainer.lora_file.embedding import KEYS, WORD, read_embedding
from lora_trainer.lora_file.fitting_base import recognise
from lora_trainer.lora_file.header import refuse
from lora_trainer.lora_file.names import KeyFormat, key_format, kind_of_others
from lora_trainer.lora_file.norms import block_of, update_norm
from lora_trainer.lora_file.problems import Body, Problem, find_problems, problem
from lora_trainer.lora_file.read import Contents, SpeltAdapter, numbers, open_spelt


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
    """Look into an adapter file; raises InputError for a file that is unreadable or holds no adapter."""
    with open_spelt(path) as spelt:
        contents = spelt.contents
        whole = contents.whole
        if not contents.parts and contents.unknown and set(contents.unknown) <= set(KEYS):
            return _embedding(path)
        if not whole:
            refuse(
                path, f"holds {_describe(contents)}, but no LoRA{kind_of_others(contents.unknown)}"
            )
        fit = recognise(whole, contents.metadata)
        body, norms = _read(spelt)
    return Inspection(
        family=fit.family,
        format=key_format(whole),
        rank=_spread(rank for part in whole.values() for rank in part.ranks),
        alpha=_spread([*body.alphas.values(), *contents.strengths.alphas()]),
        modules=len(whole),
        metadata=contents.metadata,
        problems=tuple(find_problems(contents, body, fit)),
        kinds=tuple(sorted({str(part.kind) for part in whole.values()})),
        norms=norms,
    )


def _embedding(path: Path) -> Inspection:
    embedding = read_embedding(path)
    architecture, _, _ = embedding.metadata.get("modelspec.architecture", "").rpartition("/")
    word = embedding.metadata.get(WORD)
    named = f"the word {word!r}" if word else "a word"
    return Inspection(
        family=architecture or "unknown",
        format="unknown",
        rank=None,
        alpha=None,
        modules=0,
        metadata=embedding.metadata,
        problems=(problem("embedding", word=named, stem=path.stem),),
        kinds=("embedding",),
        embeddings={key: (vec.shape[0], vec.shape[1]) for key, vec in embedding.vectors.items()},
    )


def _spread(values: Iterable[float]) -> Spread | None:
    numbers = list(values)
    return Spread(low=min(numbers), high=max(numbers)) if numbers else None


def _describe(contents: Contents) -> str:
    names = [
        *contents.unknown,
        *(entry.key for part in contents.parts.values() for entry in part.entries.values()),
    ]
    return f"{len(names):,} tensors such as {names[0]!r}" if names else "no tensors"


def _read(spelt: SpeltAdapter) -> tuple[Body, dict[str, float]]:
    """Return the facts in a file's tensors, and the norm of its update by block."""
    digest, alphas, not_finite, misshapen = sha256(), dict[str, float](), [], dict[str, str]()
    squares: dict[str, float] = {}
    for entry in spelt.opened.entries:
        data = spelt.opened.read(entry)
        digest.update(data)
        values = numbers(data, entry)
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            not_finite.append(entry.key)
    spoilt = set(not_finite)
    for module, part in spelt.contents.parts.items():
        alpha = part.entries.get("alpha")
        if alpha is not None and math.prod(alpha.shape) == 1 and alpha.key not in spoilt:
            alphas[module] = float(spelt.array(alpha).reshape(()))
        if not part.complete or spoilt & {entry.key for entry in part.entries.values()}:
            continue
        try:
            norm = update_norm(spelt.update(module))
        except InputError as error:
            misshapen[module] = error.found.partition(f"{module!r} ")[2] or error.found
            continue
        if norm is not None:
            block = block_of(module)
            squares[block] = squares.get(block, 0.0) + norm**2
    body = Body(
        alphas=alphas,
        not_finite=tuple(not_finite),
        misshapen=misshapen,
        sha256=digest.hexdigest(),
    )
    norms = {
        block: math.sqrt(squares[block])
        for block in sorted(squares, key=_natural)
        if math.isfinite(squares[block])
    }
    return body, norms


def _natural(block: str) -> tuple[str, int]:
    name, _, number = block.rpartition(".")
    return (name, int(number)) if number.isdigit() else (block, 0)
