"""The faults of an adapter file that its readers will stumble over, in its keys, alphas and metadata.

Input is the header and the tensors' numbers, output Problems with advice, whose texts are in
`problems.json`. Torch-free.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from lora_trainer.common.events import Severity
from lora_trainer.families.recognise import stated_family
from lora_trainer.lora_file.embedding import BUNDLED, bundled, trained_words
from lora_trainer.lora_file.fitting_base import Fit, sized
from lora_trainer.lora_file.names import SCALED, key_format
from lora_trainer.lora_file.read import DIFFUSERS_METADATA, FOLDED, Contents


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


def problem(kind: str, **facts: Any) -> Problem:
    """Return a problem of `problems.json` with these facts in its texts."""
    texts = {key: text.format(**facts) for key, text in _texts()[kind].items()}
    return Problem(kind, **texts)


@cache
def _texts() -> dict[str, Any]:
    file = resources.files("lora_trainer.lora_file").joinpath("problems.json")
    texts: dict[str, Any] = json.loads(file.read_text("utf-8"))
    return texts


def _several(kind: str, names: Collection[str], **facts: Any) -> Iterator[Problem]:
    """Yield a problem that some modules or tensors have, if there are any."""
    if names:
        yield problem(kind, count=len(names), first=next(iter(names)), **facts)


def find_problems(contents: Contents, body: Body, fit: Fit) -> Iterator[Problem]:
    """Yield every fault and oddity of a file; `fit` is the base that its tensors are for."""
    yield from _several("not-finite", body.not_finite)
    stated_hash = contents.metadata.get("modelspec.hash_sha256")
    if stated_hash is not None and stated_hash.lower().removeprefix("0x") != body.sha256:
        yield problem("hash-differs")
    yield from _factor_problems(contents, body)
    if fit.others:
        yield problem("family-unsure", family=fit.family, others=" and ".join(fit.others))
    for misfit in fit.misfits[:1]:
        yield from _several(
            "shapes-differ",
            [each.module for each in fit.misfits],
            family=fit.family,
            size=sized(misfit.size),
            expected=sized(misfit.expected),
        )
    parts = contents.parts.values()
    dora = [part.entries["magnitude"].key for part in parts if "magnitude" in part.entries]
    if any(key.endswith("dora_scale") for key in dora):
        yield from _several("dora", dora)
    if words := bundled(contents.unknown):
        yield problem("bundled-embeddings", words=", ".join(map(repr, words)))
    yield from _several(
        "unknown-keys", [key for key in contents.unknown if not key.startswith(BUNDLED)]
    )
    yield from _alpha_problems(contents, body)
    yield from _metadata_problems(contents, body, fit.family)
    if trained := trained_words(contents.metadata):
        yield problem("needs-embedding", count=trained.tokens, text=trained.text)


def _factor_problems(contents: Contents, body: Body) -> Iterator[Problem]:
    roles = {name: part.entries.keys() for name, part in sorted(contents.parts.items())}
    for have, lack in (("down", "up"), ("up", "down")):
        alone = [name for name, keys in roles.items() if have in keys and lack not in keys]
        yield from _several(f"{have}-without-{lack}", alone)
    broken = [name for name, keys in roles.items() if not {"down", "up"} & keys]
    yield from _several(
        "factors-missing", [name for name in broken if not contents.parts[name].complete]
    )
    unequal = [
        name
        for name, part in contents.whole.items()
        if len(part.ranks) > 1
        and part.kind != "glora"  # LyCORIS before 2.0 has a GLoRA's pairs swapped
    ]
    yield from _several("rank-differs", unequal)
    others = {name: why for name, why in body.misshapen.items() if name not in unequal}
    yield from _several("misshapen", others, why=next(iter(others.values()), ""))
    if key_format(contents.whole) == "mixed":
        yield problem("mixed-formats")


def _alpha_problems(contents: Contents, body: Body) -> Iterator[Problem]:
    # The alpha of an OFT is no strength; that of a LoKr counts only beside a decomposed factor.
    scaled = [name for name, part in contents.whole.items() if part.kind in SCALED and part.ranks]
    missing = [name for name in scaled if "alpha" not in contents.parts[name].entries]
    if not contents.strengths.stated and FOLDED not in contents.metadata:
        usual = body.alphas or key_format(contents.whole) == "kohya"
        for each in _several("missing-alpha", missing):
            yield each if usual else replace(each, severity="note")
    if body.alphas and DIFFUSERS_METADATA in contents.metadata:
        yield problem("alpha-twice", entry=DIFFUSERS_METADATA)


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
            yield problem(
                "metadata-disagrees", entry=key, stated=f"{stated_number:g}", tensors=listed
            )
    stated_name = stated_family(metadata)
    if stated_name and stated_name != family:
        disagrees = problem(
            "metadata-disagrees", entry="ss_base_model_version", stated=stated_name, tensors=family
        )
        yield replace(disagrees, advice="A1111 lists the file under the former")


def _number(metadata: Mapping[str, str], key: str) -> float | None:
    try:
        return float(metadata[key])
    except (KeyError, ValueError):
        return None
