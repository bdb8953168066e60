"""What is in an adapter file: key format, model family, rank, alpha, metadata, and what is wrong.

Input is a safetensors file from any trainer, output an Inspection. Torch-free. Each problem says
what a reader of the file would stumble over and what to do about it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lora_trainer.events import Severity
from lora_trainer.families.recognise import adapter_family, stated_family
from lora_trainer.output.adapter_file import AdapterFile, read_adapter, refuse

KeyFormat = Literal["kohya", "diffusers", "peft", "comfyui", "mixed", "unknown"]

_FORMATS: tuple[tuple[KeyFormat, re.Pattern[str]], ...] = (
    ("kohya", re.compile(r"lora_[a-z0-9]+_[^.]+")),
    ("comfyui", re.compile(r"(?:diffusion_model|text_encoders)\..+")),
    ("peft", re.compile(r"base_model\.model\..+")),
    ("diffusers", re.compile(r"(?:unet|transformer|text_encoder(?:_\d)?)\..+")),
)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Something that readers of the file will stumble over; `kind` is for scripts."""

    kind: str
    severity: Severity
    what: str
    advice: str

    def to_json(self) -> dict[str, str]:
        return {
            "kind": self.kind,
            "severity": self.severity,
            "what": self.what,
            "advice": self.advice,
        }


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
    """An adapter file at a glance; `alpha` is None where the file does not say it."""

    family: str
    format: KeyFormat
    rank: Spread
    alpha: Spread | None
    modules: int
    metadata: Mapping[str, str]
    problems: tuple[Problem, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "family": self.family,
            "format": self.format,
            "rank": self.rank.to_json(),
            "alpha": self.alpha.to_json() if self.alpha else None,
            "modules": self.modules,
            "metadata": dict(self.metadata),
            "problems": [problem.to_json() for problem in self.problems],
        }


def inspect_file(path: Path) -> Inspection:
    """Look into an adapter file; raises InputError for what is unreadable or holds no LoRA."""
    contents = read_adapter(path)
    if not contents.modules:
        refuse(path, f"holds {_describe(contents)}, but no LoRA")
    ranks = [contents.down[module].shape[0] for module in contents.modules]
    alphas = [*contents.alphas.values(), *_peft_alphas(contents.metadata)]
    return Inspection(
        family=_family(contents),
        format=_format(contents.modules),
        rank=Spread(low=min(ranks), high=max(ranks)),
        alpha=Spread(low=min(alphas), high=max(alphas)) if alphas else None,
        modules=len(ranks),
        metadata=contents.metadata,
        problems=tuple(_problems(contents)),
    )


def _describe(contents: AdapterFile) -> str:
    names = [*contents.unknown, *contents.down, *contents.up]
    return f"{len(names):,} tensors such as {names[0]!r}" if names else "no tensors"


def _format(modules: list[str]) -> KeyFormat:
    """Return the key format all modules share; bare peft names without a prefix count as peft."""
    found: set[KeyFormat] = {
        next((name for name, pattern in _FORMATS if pattern.fullmatch(module)), "unknown")
        for module in modules
    }
    return found.pop() if len(found) == 1 else "mixed"


def _family(contents: AdapterFile) -> str:
    shapes = {module: contents.down[module].shape for module in contents.modules}
    return adapter_family(shapes, metadata=contents.metadata)


def _peft_alphas(metadata: Mapping[str, str]) -> list[float]:
    """Return the alphas that diffusers' own metadata states, patterns included."""
    if "lora_adapter_metadata" not in metadata:
        return []
    try:
        config = json.loads(metadata["lora_adapter_metadata"])
        single = [value for key, value in config.items() if key.rpartition(".")[2] == "lora_alpha"]
        patterns = [
            value for key, value in config.items() if key.rpartition(".")[2] == "alpha_pattern"
        ]
        return [
            float(value)
            for value in (*single, *(v for pattern in patterns for v in pattern.values()))
        ]
    except (ValueError, TypeError, AttributeError):
        return []


def _problems(contents: AdapterFile) -> Iterator[Problem]:
    yield from _tensor_problems(contents)
    yield from _pairing_problems(contents)
    yield from _alpha_problems(contents)
    yield from _metadata_problems(contents)


def _tensor_problems(contents: AdapterFile) -> Iterator[Problem]:
    if contents.not_finite:
        spoilt, first = len(contents.not_finite), contents.not_finite[0]
        what = f"{spoilt} tensors hold NaN or infinity, first {first!r}"
        yield Problem(
            kind="not-finite",
            severity="error",
            what=what,
            advice="images will be black or noise; train again",
        )
    stated = contents.metadata.get("modelspec.hash_sha256")
    if stated is not None and stated.lower().removeprefix("0x") != contents.body_sha256:
        yield Problem(
            kind="hash-differs",
            severity="warning",
            what="the tensors are not those that modelspec.hash_sha256 was computed from",
            advice="download the file again, or ignore this if a tool changed it",
        )


def _pairing_problems(contents: AdapterFile) -> Iterator[Problem]:
    for have, lack, role in (
        (contents.down, contents.up, "down without up"),
        (contents.up, contents.down, "up without down"),
    ):
        if alone := sorted(have.keys() - lack.keys()):
            yield Problem(
                kind=role.replace(" ", "-"),
                severity="error",
                what=f"{len(alone)} modules have {role}, first {alone[0]!r}",
                advice="the file is incomplete; make it again",
            )
    unequal = [
        module
        for module in contents.modules
        if contents.up[module].shape[1:2] != contents.down[module].shape[:1]
    ]
    if unequal:
        what = f"{len(unequal)} modules have factors of different rank, first {unequal[0]!r}"
        yield Problem(
            kind="rank-differs",
            severity="error",
            what=what,
            advice="the file is broken; make it again",
        )
    if _format(contents.modules) == "mixed":
        yield Problem(
            kind="mixed-formats",
            severity="error",
            what="keys are in several formats",
            advice="diffusers drops all but one of them; export again in one format",
        )
    if contents.dora:
        what = f"{len(contents.dora)} modules have DoRA scales"
        yield Problem(
            kind="dora", severity="note", what=what, advice="diffusers ignores dora_scale"
        )
    if contents.unknown:
        what = f"{len(contents.unknown)} tensors belong to no LoRA, first {contents.unknown[0]!r}"
        yield Problem(
            kind="unknown-keys",
            severity="warning",
            what=what,
            advice="readers may refuse or ignore them",
        )


def _alpha_problems(contents: AdapterFile) -> Iterator[Problem]:
    stated = _peft_alphas(contents.metadata)
    missing = [module for module in contents.modules if module not in contents.alphas]
    if missing and not stated:
        yield Problem(
            kind="missing-alpha",
            severity="warning"
            if contents.alphas or _format(contents.modules) == "kohya"
            else "note",
            what=f"{len(missing)} modules have no alpha, first {missing[0]!r}",
            advice="readers take alpha = rank; make sure that it was trained so",
        )
    if contents.alphas and "lora_adapter_metadata" in contents.metadata:
        yield Problem(
            kind="alpha-twice",
            severity="error",
            what="alphas are both tensors and lora_adapter_metadata",
            advice="diffusers refuses such a file; remove one of them",
        )


def _metadata_problems(contents: AdapterFile) -> Iterator[Problem]:
    ranks = {float(contents.down[module].shape[0]) for module in contents.modules}
    alphas = {*contents.alphas.values(), *_peft_alphas(contents.metadata)}
    for key, found in (("ss_network_alpha", alphas), ("ss_network_dim", ranks)):
        stated = _number(contents.metadata, key)
        if (
            stated is not None
            and found
            and not any(math.isclose(stated, value, rel_tol=1e-2) for value in found)
        ):
            yield Problem(
                kind="metadata-disagrees",
                severity="warning",
                what=f"{key} says {stated:g}, the tensors say {_listed(found)}",
                advice="readers use the tensors",
            )
    named, family = stated_family(contents.metadata), _family(contents)
    if named and named != family:
        what = f"ss_base_model_version says {named}, the tensors say {family}"
        yield Problem(
            kind="metadata-disagrees",
            severity="warning",
            what=what,
            advice="A1111 lists the file under the former",
        )


def _listed(values: set[float]) -> str:
    return ", ".join(f"{value:g}" for value in sorted(values))


def _number(metadata: Mapping[str, str], key: str) -> float | None:
    try:
        return float(metadata[key])
    except (KeyError, ValueError):
        return None
