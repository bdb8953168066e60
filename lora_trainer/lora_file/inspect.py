"""An adapter file at a glance: key format, model family, kind, rank, alpha, norms, metadata, problems.

Input is a safetensors file from any trainer, output an Inspection. Torch-free. Each problem, whose texts are in
`problems.json`, says where a reader of the file would stumble and how to mend it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from lora_trainer.common.errors import InputError
from lora_trainer.common.event_kinds import Severity
from lora_trainer.families.files.recognise import STATED, stated_version
from lora_trainer.lora.adapter_size import BASED, factored_norm
from lora_trainer.lora_file.base_layers import Fit, recognise, sized
from lora_trainer.lora_file.embedding import BUNDLED, WORD, holds_vectors, trained_words
from lora_trainer.lora_file.key_formats import SCALED, KeyFormat, key_format, kind_of_others
from lora_trainer.lora_file.module_update import Update
from lora_trainer.lora_file.read import DIFFUSERS_METADATA, FOLDED, Contents, open_contents
from lora_trainer.lora_file.tensor_file import numbers, packaged, refuse


@dataclass(frozen=True)
class Problem:
    """A problem that readers of the file will have."""

    kind: str
    """A name for scripts."""
    severity: Severity
    what: str
    advice: str


# Smallest and largest value over the modules.
Spread = tuple[float, float]


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """An adapter file at a glance."""

    family: str
    metadata: Mapping[str, str]
    problems: tuple[Problem, ...]
    kinds: tuple[str, ...]
    format: KeyFormat = "unknown"
    rank: Spread | None = None
    """For OFT the size of a block; None if all factors of a LoKr are whole."""
    alpha: Spread | None = None
    """None if the file does not state it."""
    modules: int = 0
    embeddings: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """(tokens, width) by key, if the file holds the vectors of a new word instead of an adapter."""
    norms: Mapping[str, float] = field(default_factory=dict)
    """The Frobenius norm of the update by block, as far as it is known without the base."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields, without `embeddings` where there are none."""
        fields = {key: value for key, value in asdict(self).items() if key != "embeddings" or value}
        return {**fields, "rank": _one_or_both(self.rank), "alpha": _one_or_both(self.alpha)}


def _one_or_both(spread: Spread | None) -> float | dict[str, float] | None:
    """Return the value of all modules, or {"min", "max"} where they differ."""
    if spread is None or spread[0] == spread[1]:
        return spread and spread[0]
    return {"min": spread[0], "max": spread[1]}


def inspect_file(path: Path) -> Inspection:
    """Look into an adapter file; raises InputError for a file that is unreadable or holds no adapter."""
    with open_contents(path) as contents:
        whole, keys = contents.whole, [*contents.opened.entries]
        if holds_vectors(contents.opened.entries):
            return _embedding(path, contents)
        if not whole:
            tensors = (
                f"{len(keys):,} tensors such as {keys[0]!r}, but" if keys else "no tensors and"
            )
            refuse(path, f"holds {tensors} no LoRA{kind_of_others(contents.unknown)}")
        fit = recognise(whole, contents.metadata)
        facts = _read(contents)
    return Inspection(
        family=fit.family,
        format=key_format(whole),
        rank=_spread(rank for part in whole.values() for rank in part.ranks),
        alpha=_spread([*facts.alphas.values(), *contents.stated_alphas()]),
        modules=len(whole),
        metadata=contents.metadata,
        problems=tuple(_problems(contents, facts, fit)),
        kinds=tuple(sorted({str(part.kind) for part in whole.values()})),
        norms=facts.norms,
    )


def _embedding(path: Path, contents: Contents) -> Inspection:
    architecture, _, _ = contents.metadata.get("modelspec.architecture", "").rpartition("/")
    word = contents.metadata.get(WORD)
    named = f"the word {word!r}" if word else "a word"
    return Inspection(
        family=architecture or "unknown",
        metadata=contents.metadata,
        problems=(_problem("embedding", word=named, stem=path.stem),),
        kinds=("embedding",),
        embeddings={key: each.shape for key, each in contents.opened.entries.items()},
    )


def _spread(values: Iterable[float]) -> Spread | None:
    ordered = sorted(values)
    return (ordered[0], ordered[-1]) if ordered else None


@dataclass(kw_only=True)
class _TensorFacts:
    """The facts that are in a file's tensors and not in its header."""

    sha256: str
    """Hash of all tensor bytes."""
    not_finite: list[str]
    """Keys of tensors with NaN or infinity."""
    alphas: dict[str, float] = field(default_factory=dict)
    misshapen: dict[str, str] = field(default_factory=dict)
    """By module, the reason why its tensors do not fit together."""
    norms: dict[str, float] = field(default_factory=dict)
    """Norm of the update by block."""
    zero: list[str] = field(default_factory=list)
    """The modules that change nothing."""


def _read(contents: Contents) -> _TensorFacts:
    digest, not_finite, squares = sha256(), list[str](), dict[str, float]()
    for entry in contents.opened.entries.values():
        data = contents.opened.read(entry)
        digest.update(data)
        values = numbers(data, entry)
        if values.dtype.kind == "f" and not np.isfinite(values).all():
            not_finite.append(entry.key)
    facts, spoilt = _TensorFacts(sha256=digest.hexdigest(), not_finite=not_finite), {*not_finite}
    for module, part in contents.parts.items():
        alpha = part.entries.get("alpha")
        if alpha is not None and math.prod(alpha.shape) == 1 and alpha.key not in spoilt:
            facts.alphas[module] = float(contents.array(alpha).reshape(()))
        if not part.complete or spoilt & {entry.key for entry in part.entries.values()}:
            continue
        try:
            update = contents.update(module)
            norm = update_norm(update)
        except InputError as error:
            facts.misshapen[module] = error.found.partition(f"{module!r} ")[2] or error.found
            continue
        if is_zero(update, norm):
            facts.zero.append(module)
        if norm is not None:
            block = block_of(module)
            squares[block] = squares.get(block, 0.0) + norm**2

    # 2 before 10.
    for block in sorted(squares, key=lambda name: re.sub(r"\d+", lambda n: n[0].zfill(9), name)):
        if math.isfinite(squares[block]):
            facts.norms[block] = math.sqrt(squares[block])
    return facts


# ---- norms


Matrix = np.ndarray[Any, np.dtype[np.float64]]
MAX_RANK = 512
# Modules beyond these get no norm: it would take minutes, and a hostile file could ask for years.
MAX_LOHA_ELEMENTS = 2**28
_SLICE_ELEMENTS = 2**21
# Factors whose first dimension is the rank.
_INNER = frozenset({"down", "w1_b", "w2_b"})
_PREFIXES = re.compile(
    r"^(?:lora_unet_|lora_transformer_|lycoris_|unet\.|transformer\.|diffusion_model\.|base_model\.model\.)+"
)
_TEXT = re.compile(r"^(?:lora_te(?P<flat>\d?)_|text_encoder(?:_(?P<dotted>\d))?\.|text_encoders\.)")
_BLOCK = re.compile(
    r"(?:^|_)(?P<name>(?:(?:down|up|input|output|double|single|joint|transformer|single_transformer)_)?"
    r"(?:blocks|layers))_(?P<number>\d+)(?:_|$)"
)
_MIDDLE = re.compile(r"(?:^|_)(mid|middle)_block(?:_|$)")


def update_norm(update: Update) -> float | None:
    """Return |update|; None where it depends on the base, is not finite or would take too long.

    The magnitudes of DoRA and changes of biases are left out.
    """
    is_large = any(len(each) > MAX_RANK for name, each in update.tensors.items() if name in _INNER)
    if update.kind in BASED or update.rows is not None or is_large:
        return None
    arrays = {name: np.asarray(array, np.float64) for name, array in update.tensors.items()}
    with np.errstate(all="ignore"):
        match update.kind:
            case "lora" | "lokr":  # float64 keeps 8 digits after the root
                norm = float(factored_norm(arrays, norm=np.linalg.norm))
            case "loha":
                norm = _loha_norm(arrays)
            case _:  # a bias that changes alone has no difference
                norm = float(np.linalg.norm(arrays.get("difference", np.zeros(1))))
    norm *= abs(update.scale)
    return norm if math.isfinite(norm) else None


def is_zero(update: Update, norm: float | None) -> bool:
    """Say whether an update whose norm is known, or None, changes nothing."""
    if norm is not None:
        return norm == 0 and "bias" not in update.tensors
    # The norm of a rotation depends on the base; without angles it is none.
    return update.kind == "oft" and not any(np.any(each) for each in update.tensors.values())


def changes_nothing(contents: Contents) -> bool:
    """Say whether all modules of an adapter have updates of zeros; reads them up to the first that has not."""
    for module in contents.whole:
        update = contents.update(module)
        if not is_zero(update, update_norm(update)):
            return False
    return True


def _loha_norm(arrays: Mapping[str, Matrix]) -> float:
    """Return the norm of (A B) * (C D), NaN where it would take too long."""
    # As one product of factors it has the rank r^2, so the matrix is made some rows at a time.
    outputs, inputs = arrays["w1_a"].shape[0], arrays["w1_b"].shape[1]
    if outputs * inputs > MAX_LOHA_ELEMENTS or not inputs:
        return math.nan
    a, b, c, d = (arrays[name] for name in ("w1_a", "w1_b", "w2_a", "w2_b"))
    rows = max(1, _SLICE_ELEMENTS // inputs)
    squared = 0.0
    for start in range(0, outputs, rows):
        part = slice(start, start + rows)
        product = (a[part] @ b) * (c[part] @ d)
        squared += float((product * product).sum())
    return math.sqrt(squared)


def block_of(module: str) -> str:
    """Return the block that a module as spelt in a file belongs to, such as "down_blocks.1"."""
    text = _TEXT.match(module)
    prefix = ""
    if text:
        number = text["flat"] or text["dotted"] or "1"
        prefix = "text_encoder." if number == "1" else f"text_encoder_{number}."
        module = module[text.end() :]
    name = _PREFIXES.sub("", module).replace(".", "_")
    if _MIDDLE.search(name):
        return f"{prefix}mid_block"
    match = _BLOCK.search(name)
    return f"{prefix}{match['name']}.{match['number']}" if match else f"{prefix}other"


# ---- problems


def _problem(kind: str, **facts: Any) -> Problem:
    """Return a problem of `problems.json` with these facts in its texts."""
    texts = {key: text.format(**facts) for key, text in packaged("problems.json")[kind].items()}
    return Problem(kind, **texts)


def _several(kind: str, names: Collection[str], **facts: Any) -> Iterator[Problem]:
    """Yield a problem that some modules or tensors have, if there are any."""
    if names:
        yield _problem(kind, count=len(names), first=next(iter(names)), **facts)


def _problems(contents: Contents, tensors: _TensorFacts, fit: Fit) -> Iterator[Problem]:
    """Yield every fault and oddity of a file; `fit` is the base that its tensors are for."""
    yield from _several("not-finite", tensors.not_finite)
    zeros = "zeros" if len(tensors.zero) == len(contents.parts) else "some-zeros"
    yield from _several(zeros, tensors.zero, all=len(contents.parts))
    stated_hash = contents.metadata.get("modelspec.hash_sha256")
    if stated_hash is not None and stated_hash.lower().removeprefix("0x") != tensors.sha256:
        yield _problem("hash-differs")
    yield from _factor_problems(contents, tensors)
    if fit.others:
        yield _problem("family-unsure", family=fit.family, others=" and ".join(fit.others))
    for _, size, expected in fit.misfits[:1]:
        facts = {"family": fit.family, "size": sized(size), "expected": sized(expected)}
        yield from _several("shapes-differ", [module for module, *_ in fit.misfits], **facts)
    parts = contents.parts.values()
    dora = [part.entries["magnitude"].key for part in parts if "magnitude" in part.entries]
    if any(key.endswith("dora_scale") for key in dora):
        yield from _several("dora", dora)
    bundled = (key.removeprefix(BUNDLED) for key in contents.unknown if key.startswith(BUNDLED))
    if words := sorted({key.partition(".")[0] for key in bundled}):
        yield _problem("bundled-embeddings", words=", ".join(map(repr, words)))
    others = [key for key in contents.unknown if not key.startswith(BUNDLED)]
    yield from _several("unknown-keys", others)
    # The alpha of an OFT is not a strength; the alpha of a LoKr counts only with a decomposed factor.
    scaled = [name for name, part in contents.whole.items() if part.kind in SCALED and part.ranks]
    missing = [name for name in scaled if "alpha" not in contents.parts[name].entries]
    if not any(True for _ in contents.stated_alphas()) and FOLDED not in contents.metadata:
        usual = tensors.alphas or key_format(contents.whole) == "kohya"
        for each in _several("missing-alpha", missing):
            yield each if usual else replace(each, severity="note")
    if tensors.alphas and DIFFUSERS_METADATA in contents.metadata:
        yield _problem("alpha-twice", entry=DIFFUSERS_METADATA)
    yield from _metadata_problems(contents, tensors, fit.family)
    if trained := trained_words(contents.metadata):
        yield _problem("needs-embedding", count=trained.tokens, text=trained.text)


def _factor_problems(contents: Contents, tensors: _TensorFacts) -> Iterator[Problem]:
    broken = {name: part for name, part in sorted(contents.parts.items()) if not part.complete}
    roles = ", ".join(next(iter(broken.values())).entries) if broken else ""
    yield from _several("factors-missing", broken, roles=roles)
    unequal = [
        name
        for name, part in contents.whole.items()
        if len(part.ranks) > 1
        and part.kind != "glora"  # LyCORIS before 2.0 has a GLoRA's pairs swapped
    ]
    yield from _several("rank-differs", unequal)
    others = {name: why for name, why in tensors.misshapen.items() if name not in unequal}
    yield from _several("misshapen", others, why=next(iter(others.values()), ""))
    if key_format(contents.whole) == "mixed":
        yield _problem("mixed-formats")


def _number(text: str) -> float | None:
    """Return a finite number that is written in an entry, None where it is none."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _metadata_problems(contents: Contents, tensors: _TensorFacts, family: str) -> Iterator[Problem]:
    parts, metadata = contents.whole.values(), contents.metadata
    in_tensors = {"ss_network_dim": {float(rank) for part in parts for rank in part.ranks}}
    # The alpha of an OFT is a limit on its rotations, that of an rsLoRA is alpha sqrt(rank) of the training.
    rslora = "rs_lora" in metadata.get("ss_network_args", "")
    if not rslora and all(part.kind != "oft" for part in parts):
        in_tensors["ss_network_alpha"] = {*tensors.alphas.values(), *contents.stated_alphas()}
    for key, values in sorted(in_tensors.items()):
        # As sd-scripts writes what was not given, and ranks that its resizing makes differ by layer.
        if metadata.get(key, "None") in ("None", "Dynamic"):
            continue
        stated_number = _number(metadata[key])
        if stated_number is None:
            yield _problem("metadata-no-number", entry=key, stated=metadata[key][:40])
            continue
        if values and not any(math.isclose(stated_number, value, rel_tol=1e-2) for value in values):
            listed = ", ".join(f"{value:g}" for value in sorted(values))
            yield _problem(
                "metadata-disagrees", entry=key, stated=f"{stated_number:g}", tensors=listed
            )
    stated_name = stated_version(metadata, STATED[:1])
    if stated_name and stated_name != family:
        disagrees = _problem(
            "metadata-disagrees", entry="ss_base_model_version", stated=stated_name, tensors=family
        )
        yield replace(disagrees, advice="A1111 lists the file under the former")
