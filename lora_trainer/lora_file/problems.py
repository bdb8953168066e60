"""The faults of an adapter file that its readers will stumble over, in its keys, alphas and metadata.

Input is the header and the tensors' numbers, output Problems with advice. Torch-free.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from lora_trainer.common.events import Severity
from lora_trainer.families.recognise import stated_family
from lora_trainer.lora_file.embedding import BUNDLED, bundled, trained_words
from lora_trainer.lora_file.fitting_base import Fit, sized
from lora_trainer.lora_file.names import SCALED
from lora_trainer.lora_file.read import Contents
from lora_trainer.lora_file.strength import DIFFUSERS_METADATA, FOLDED

KeyFormat = Literal["kohya", "diffusers", "peft", "comfyui", "mixed", "unknown"]

_FORMATS: tuple[tuple[KeyFormat, re.Pattern[str]], ...] = (
    ("kohya", re.compile(r"(?:lora|lycoris)_[a-z0-9]+_[^.]+")),
    ("comfyui", re.compile(r"(?:diffusion_model|text_encoders)\..+")),
    ("peft", re.compile(r"base_model\.model\..+")),
    ("diffusers", re.compile(r"(?:unet|transformer|text_encoder(?:_\d)?)\..+")),
)


@dataclass(frozen=True)
class Problem:
    """Something that readers of the file will stumble over; `kind` is for scripts."""

    kind: str
    severity: Severity
    what: str
    advice: str

    def to_json(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Body:
    """The facts that are in a file's tensors and not in its header.

    `not_finite` has the keys of tensors with NaN or infinity, `misshapen` the reason by module where the
    tensors do not fit together; `sha256` is the hash of all tensor bytes.
    """

    alphas: Mapping[str, float]
    not_finite: tuple[str, ...]
    misshapen: Mapping[str, str]
    sha256: str


def key_format(modules: Iterable[str]) -> KeyFormat:
    """Return the key format all modules share; bare names without a prefix are of no format."""
    formats: set[KeyFormat] = {
        next((name for name, pattern in _FORMATS if pattern.fullmatch(module)), "unknown")
        for module in modules
    }
    return formats.pop() if len(formats) == 1 else "mixed"


def find_problems(contents: Contents, body: Body, fit: Fit) -> Iterator[Problem]:
    """Yield every fault and oddity of a file; `fit` is the base that its tensors are for."""
    yield from _tensor_problems(contents, body)
    yield from _factor_problems(contents, body)
    yield from _family_problems(fit)
    yield from _reader_problems(contents)
    yield from _alpha_problems(contents, body)
    yield from _metadata_problems(contents, body, fit.family)
    if words := trained_words(contents.metadata):
        yield Problem(
            "needs-embedding",
            "note",
            f"it was trained with {words.tokens} new tokens for {words.text!r}",
            "load the file of these, whose name ends with _emb, beside it",
        )


def _tensor_problems(contents: Contents, body: Body) -> Iterator[Problem]:
    if body.not_finite:
        yield Problem(
            "not-finite",
            "error",
            f"{len(body.not_finite)} tensors hold NaN or infinity, first {body.not_finite[0]!r}",
            "images will be black or noise; train again",
        )
    stated_hash = contents.metadata.get("modelspec.hash_sha256")
    if stated_hash is not None and stated_hash.lower().removeprefix("0x") != body.sha256:
        yield Problem(
            "hash-differs",
            "warning",
            "the tensors are not those that modelspec.hash_sha256 was computed from",
            "download the file again, or ignore this if a tool changed it",
        )


def _factor_problems(contents: Contents, body: Body) -> Iterator[Problem]:
    roles = {name: part.entries.keys() for name, part in sorted(contents.parts.items())}
    for have, lack in (("down", "up"), ("up", "down")):
        if alone := [name for name, keys in roles.items() if have in keys and lack not in keys]:
            yield Problem(
                f"{have}-without-{lack}",
                "error",
                f"{len(alone)} modules have {have} without {lack}, first {alone[0]!r}",
                "the file is incomplete; make it again",
            )
    broken = [
        name
        for name, keys in roles.items()
        if not contents.parts[name].complete and not {"down", "up"} & keys
    ]
    if broken:
        yield Problem(
            "factors-missing",
            "error",
            f"{len(broken)} modules lack tensors, first {broken[0]!r}",
            "the file is incomplete; make it again",
        )
    unequal = [
        name
        for name, part in contents.whole.items()
        if len(part.ranks) > 1
        and part.kind != "glora"  # LyCORIS before 2.0 has a GLoRA's pairs swapped
    ]
    if unequal:
        yield Problem(
            "rank-differs",
            "error",
            f"{len(unequal)} modules have factors of different rank, first {unequal[0]!r}",
            "the file is broken; make it again",
        )
    others = {name: why for name, why in body.misshapen.items() if name not in unequal}
    if others:
        name, why = next(iter(others.items()))
        yield Problem(
            "misshapen",
            "error",
            f"{len(others)} modules cannot be used, first {name!r}: it {why}",
            "the file is broken, or of a kind that no reader here knows",
        )
    if key_format(contents.whole) == "mixed":
        yield Problem(
            "mixed-formats",
            "error",
            "keys are in several formats",
            "diffusers drops all but one of them; export again in one format",
        )


def _family_problems(fit: Fit) -> Iterator[Problem]:
    if fit.others:
        yield Problem(
            "family-unsure",
            "note",
            f"its layers are those of {fit.family}, but of {' and '.join(fit.others)} as well",
            "nothing in the file tells which; --base names the one it was made for",
        )
    if fit.misfits:
        first = fit.misfits[0]
        yield Problem(
            "shapes-differ",
            "error",
            f"{len(fit.misfits)} modules have sizes that no layer of {fit.family} has, first "
            f"{first.module!r}: {sized(first.size)}, the layer is {sized(first.expected)}",
            "the file is broken or was put together from two; make it again",
        )


def _reader_problems(contents: Contents) -> Iterator[Problem]:
    parts = contents.parts.values()
    dora = [part.entries["magnitude"] for part in parts if "magnitude" in part.entries]
    if any(entry.key.endswith("dora_scale") for entry in dora):
        yield Problem(
            "dora",
            "note",
            f"{len(dora)} modules have DoRA scales",
            "diffusers ignores dora_scale",
        )
    if words := bundled(contents.unknown):
        yield Problem(
            "bundled-embeddings",
            "warning",
            f"it holds the new tokens of {', '.join(map(repr, words))} too",
            "A1111, Forge and ComfyUI read them, diffusers refuses the file",
        )
    if unknown := [key for key in contents.unknown if not key.startswith(BUNDLED)]:
        yield Problem(
            "unknown-keys",
            "warning",
            f"{len(unknown)} tensors belong to no adapter, first {unknown[0]!r}",
            "readers may refuse or ignore them",
        )


def _alpha_problems(contents: Contents, body: Body) -> Iterator[Problem]:
    # The alpha of an OFT is no strength; that of a LoKr counts only beside a decomposed factor.
    scaled = [name for name, part in contents.whole.items() if part.kind in SCALED and part.ranks]
    missing = [name for name in scaled if "alpha" not in contents.parts[name].entries]
    if missing and not contents.strengths.stated and FOLDED not in contents.metadata:
        yield Problem(
            "missing-alpha",
            "warning" if body.alphas or key_format(contents.whole) == "kohya" else "note",
            f"{len(missing)} modules have no alpha, first {missing[0]!r}",
            "readers take alpha = rank; make sure that it was trained so",
        )
    if body.alphas and DIFFUSERS_METADATA in contents.metadata:
        yield Problem(
            "alpha-twice",
            "error",
            f"alphas are both tensors and {DIFFUSERS_METADATA}",
            "diffusers refuses such a file; remove one of them",
        )


def _metadata_problems(contents: Contents, body: Body, family: str) -> Iterator[Problem]:
    parts, metadata = contents.whole.values(), contents.metadata
    tensors = {"ss_network_dim": {float(rank) for part in parts for rank in part.ranks}}
    # The alpha of an OFT is a limit on its rotations, that of an rsLoRA is alpha sqrt(rank) of the training.
    rslora = "rs_lora" in metadata.get("ss_network_args", "")
    if not rslora and all(part.kind != "oft" for part in parts):
        tensors["ss_network_alpha"] = {*body.alphas.values(), *contents.strengths.alphas()}
    for key, values in sorted(tensors.items()):
        stated_number = _number(metadata, key)
        if stated_number is None or not values:
            continue
        if not any(math.isclose(stated_number, value, rel_tol=1e-2) for value in values):
            listed = ", ".join(f"{value:g}" for value in sorted(values))
            yield Problem(
                "metadata-disagrees",
                "warning",
                f"{key} says {stated_number:g}, the tensors say {listed}",
                "readers use the tensors",
            )
    stated_name = stated_family(metadata)
    if stated_name and stated_name != family:
        yield Problem(
            "metadata-disagrees",
            "warning",
            f"ss_base_model_version says {stated_name}, the tensors say {family}",
            "A1111 lists the file under the former",
        )


def _number(metadata: Mapping[str, str], key: str) -> float | None:
    try:
        return float(metadata[key])
    except (KeyError, ValueError):
        return None
