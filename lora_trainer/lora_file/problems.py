"""What readers of an adapter file will stumble over, found in its keys, alphas and metadata.

Input is what header and bytes of a file say, output Problems with advice. Torch-free.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from lora_trainer.common.events import Severity
from lora_trainer.families.recognise import stated_family
from lora_trainer.lora_file.embedding import BUNDLED, bundled, trained_words
from lora_trainer.lora_file.fitting_base import Fit, sized
from lora_trainer.lora_file.names import SCALED
from lora_trainer.lora_file.read import Contents, ModuleFactors
from lora_trainer.lora_file.strength import DIFFUSERS_METADATA, FOLDED

KeyFormat = Literal["kohya", "diffusers", "peft", "comfyui", "mixed", "unknown"]

_FORMATS: tuple[tuple[KeyFormat, re.Pattern[str]], ...] = (
    ("kohya", re.compile(r"(?:lora|lycoris)_[a-z0-9]+_[^.]+")),
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
class Body:
    """What the bytes of a file say, beyond its header.

    `not_finite` has the keys of tensors with NaN or infinity, `misshapen` modules whose tensors do not fit
    together and why; `sha256` is the hash of all tensor bytes.
    """

    alphas: Mapping[str, float]
    not_finite: tuple[str, ...]
    misshapen: Mapping[str, str]
    sha256: str


def key_format(modules: Iterable[str]) -> KeyFormat:
    """Return the key format all modules share; bare names without a prefix are of no format."""
    found: set[KeyFormat] = {
        next((name for name, pattern in _FORMATS if pattern.fullmatch(module)), "unknown")
        for module in modules
    }
    return found.pop() if len(found) == 1 else "mixed"


def find_problems(contents: Contents, body: Body, fit: Fit) -> Iterator[Problem]:
    """Yield all that is wrong or odd; `fit` is what the tensors say about the base."""
    yield from _tensor_problems(contents, body)
    yield from _factor_problems(contents, body)
    yield from _family_problems(fit)
    yield from _reader_problems(contents)
    yield from _alpha_problems(contents, body)
    yield from _metadata_problems(contents, body, fit.family)
    if words := trained_words(contents.metadata):
        yield Problem(
            kind="needs-embedding",
            severity="note",
            what=f"it was trained with {words.tokens} new tokens for {words.text!r}",
            advice="load the file of these, whose name ends with _emb, beside it",
        )


def _tensor_problems(contents: Contents, body: Body) -> Iterator[Problem]:
    if body.not_finite:
        spoilt, first = len(body.not_finite), body.not_finite[0]
        what = f"{spoilt} tensors hold NaN or infinity, first {first!r}"
        yield Problem(
            kind="not-finite",
            severity="error",
            what=what,
            advice="images will be black or noise; train again",
        )
    stated = contents.metadata.get("modelspec.hash_sha256")
    if stated is not None and stated.lower().removeprefix("0x") != body.sha256:
        yield Problem(
            kind="hash-differs",
            severity="warning",
            what="the tensors are not those that modelspec.hash_sha256 was computed from",
            advice="download the file again, or ignore this if a tool changed it",
        )


def _factor_problems(contents: Contents, body: Body) -> Iterator[Problem]:
    parts = contents.parts
    for have, lack in (("down", "up"), ("up", "down")):
        alone = sorted(
            name
            for name, part in parts.items()
            if have in part.entries and lack not in part.entries
        )
        if alone:
            yield Problem(
                kind=f"{have}-without-{lack}",
                severity="error",
                what=f"{len(alone)} modules have {have} without {lack}, first {alone[0]!r}",
                advice="the file is incomplete; make it again",
            )
    broken = sorted(
        name
        for name, part in parts.items()
        if not part.complete and not {"down", "up"} & part.entries.keys()
    )
    if broken:
        yield Problem(
            kind="factors-missing",
            severity="error",
            what=f"{len(broken)} modules lack tensors, first {broken[0]!r}",
            advice="the file is incomplete; make it again",
        )
    unequal = [name for name, part in contents.whole.items() if _ranks_differ(part)]
    if unequal:
        yield Problem(
            kind="rank-differs",
            severity="error",
            what=f"{len(unequal)} modules have factors of different rank, first {unequal[0]!r}",
            advice="the file is broken; make it again",
        )
    others = {name: why for name, why in body.misshapen.items() if name not in unequal}
    if others:
        name, why = next(iter(others.items()))
        yield Problem(
            kind="misshapen",
            severity="error",
            what=f"{len(others)} modules cannot be used, first {name!r}: it {why}",
            advice="the file is broken, or of a kind that no reader here knows",
        )
    if key_format(contents.whole) == "mixed":
        yield Problem(
            kind="mixed-formats",
            severity="error",
            what="keys are in several formats",
            advice="diffusers drops all but one of them; export again in one format",
        )


def _ranks_differ(part: ModuleFactors) -> bool:
    return len(part.ranks) > 1 and part.kind != "glora"


def _family_problems(fit: Fit) -> Iterator[Problem]:
    if fit.others:
        yield Problem(
            kind="family-unsure",
            severity="note",
            what=f"its layers are those of {fit.family}, but of {' and '.join(fit.others)} as well",
            advice="nothing in the file tells which; --base names the one it was made for",
        )
    if fit.misfits:
        first = fit.misfits[0]
        yield Problem(
            kind="shapes-differ",
            severity="error",
            what=f"{len(fit.misfits)} modules have sizes that no layer of {fit.family} has, first "
            f"{first.module!r}: {sized(first.size)}, the layer is {sized(first.expected)}",
            advice="the file is broken or was put together from two; make it again",
        )


def _reader_problems(contents: Contents) -> Iterator[Problem]:
    dora = [
        part.entries["magnitude"] for part in contents.parts.values() if "magnitude" in part.entries
    ]
    if any(entry.key.endswith("dora_scale") for entry in dora):
        yield Problem(
            kind="dora",
            severity="note",
            what=f"{len(dora)} modules have DoRA scales",
            advice="diffusers ignores dora_scale",
        )
    if words := bundled(contents.unknown):
        yield Problem(
            kind="bundled-embeddings",
            severity="warning",
            what=f"it holds the new tokens of {', '.join(map(repr, words))} too",
            advice="A1111, Forge and ComfyUI read them, diffusers refuses the file",
        )
    unknown = [key for key in contents.unknown if not key.startswith(BUNDLED)]
    if unknown:
        what = f"{len(unknown)} tensors belong to no adapter, first {unknown[0]!r}"
        yield Problem(
            kind="unknown-keys",
            severity="warning",
            what=what,
            advice="readers may refuse or ignore them",
        )


def _alpha_problems(contents: Contents, body: Body) -> Iterator[Problem]:
    # The alpha of an OFT is no strength; that of a LoKr counts only beside a decomposed factor.
    scaled = [name for name, part in contents.whole.items() if part.kind in SCALED and part.ranks]
    missing = [name for name in scaled if "alpha" not in contents.parts[name].entries]
    if missing and not contents.strengths.stated and FOLDED not in contents.metadata:
        yield Problem(
            kind="missing-alpha",
            severity="warning" if body.alphas or key_format(contents.whole) == "kohya" else "note",
            what=f"{len(missing)} modules have no alpha, first {missing[0]!r}",
            advice="readers take alpha = rank; make sure that it was trained so",
        )
    if body.alphas and DIFFUSERS_METADATA in contents.metadata:
        yield Problem(
            kind="alpha-twice",
            severity="error",
            what=f"alphas are both tensors and {DIFFUSERS_METADATA}",
            advice="diffusers refuses such a file; remove one of them",
        )


def _metadata_problems(contents: Contents, body: Body, family: str) -> Iterator[Problem]:
    ranks = {float(rank) for part in contents.whole.values() for rank in part.ranks}
    alphas = (
        set() if _odd_alphas(contents) else {*body.alphas.values(), *contents.strengths.alphas()}
    )
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
    named = stated_family(contents.metadata)
    if named and named != family:
        yield Problem(
            kind="metadata-disagrees",
            severity="warning",
            what=f"ss_base_model_version says {named}, the tensors say {family}",
            advice="A1111 lists the file under the former",
        )


def _odd_alphas(contents: Contents) -> bool:
    """Say whether alphas are not what was trained with: a limit (OFT), or alpha sqrt(rank) (rsLoRA)."""
    kinds = {part.kind for part in contents.whole.values()}
    return "oft" in kinds or "rs_lora" in contents.metadata.get("ss_network_args", "")


def _listed(values: set[float]) -> str:
    return ", ".join(f"{value:g}" for value in sorted(values))


def _number(metadata: Mapping[str, str], key: str) -> float | None:
    try:
        return float(metadata[key])
    except (KeyError, ValueError):
        return None
