"""How adapter files spell their keys: ends of keys by kind and role, prefixes by format, and what a format can hold.

Input is a key, or the contents of an adapter, planned or trained; output plain names, or a RequestError before any
work is done. Torch-free. The same ends serve inspecting, reading, converting and exporting.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from lora_trainer.common.errors import RequestError
from lora_trainer.config.learning import AdapterSettings
from lora_trainer.families.base.family import Family
from lora_trainer.families.base.layout import DENOISER
from lora_trainer.families.base.traits import FileFormat
from lora_trainer.lora.adapter_size import KIND_NAMES, AdapterKind
from lora_trainer.lora_file.tensor_file import packaged

# What a tensor is to its module: `down`, `alpha`, `w1_a` and others, see `ENDINGS`.
Role = str

# Ends of keys as kohya and LyCORIS write them, by kind and role; files with dotted names of ComfyUI's own use
# them too, but for the two factors of a LoRA.
ENDINGS: Mapping[AdapterKind, Mapping[Role, str]] = {
    "lora": {
        "down": ".lora_down.weight",
        "up": ".lora_up.weight",
        "mid": ".lora_mid.weight",
        "magnitude": ".dora_scale",
    },
    "loha": {
        **{role: f".hada_{role}" for role in ("w1_a", "w1_b", "w2_a", "w2_b", "t1", "t2")},
        "magnitude": ".dora_scale",
    },
    "lokr": {
        **{role: f".lokr_{role}" for role in ("w1", "w1_a", "w1_b", "w2", "w2_a", "w2_b", "t2")},
        "magnitude": ".dora_scale",
    },
    "oft": {"blocks": ".oft_blocks", "rescale": ".rescale"},
    "oft_in": {"skew": ".oft_R.weight", "scaled": ".oft_R.scaled_oft"},
    "glora": {role: f".{role}.weight" for role in ("a1", "a2", "b1", "b2", "bm")},
    "ia3": {"by_output": ".weight", "by_input": ".weight", "on_input": ".on_input"},
    "full": {"difference": ".diff"},
    "norm": {"difference": ".w_norm", "bias": ".b_norm"},
}
# The factors that make a module of a kind whole: one of these sets of roles. Of two kinds in one module the
# first counts: the other is its mere companion (a magnitude, a bias).
NEEDED: Mapping[AdapterKind, tuple[str, ...]] = {
    "loha": ("w1_a w1_b w2_a w2_b", "w1_a w1_b w2_a w2_b t1 t2"),
    "lokr": tuple(
        f"{first} {second}"
        for first in ("w1", "w1_a w1_b")
        for second in ("w2", "w2_a w2_b", "w2_a w2_b t2")
    ),
    "oft": ("blocks",),
    "oft_in": ("skew",),
    "glora": ("a1 a2 b1 b2", "a1 a2 b1 b2 bm"),
    "ia3": ("factor on_input",),
    "norm": ("difference",),
    "full": ("difference",),
    "lora": ("down up", "down up mid"),
}
# Kinds whose modules of several layers can be written as one of the weight that joins them (`joined_rows`).
JOINABLE: frozenset[AdapterKind] = frozenset({"lora", "loha", "full", "norm"})
# Roles that may stand beside the factors.
BESIDE: frozenset[Role] = frozenset({"alpha", "magnitude", "bias", "up_bias", "rescale", "scaled"})
# The change of a bias, beside any kind but a norm.
BIAS = ".diff_b"
PEFT_ENDINGS: Mapping[Role, str] = {
    "down": ".lora_A.weight",
    "up": ".lora_B.weight",
    "magnitude": ".lora_magnitude_vector",
}
ALPHA = ".alpha"
# Kinds whose alpha is a strength.
SCALED: frozenset[AdapterKind] = frozenset({"lora", "loha", "lokr", "glora"})
# The factors that take the strength that a file does not state: each product has one of these.
STRONG = frozenset({"up", "w1", "w1_a", "a1", "b1"})

# peft's name of an adapter, such as `.default`.
_NAME = r"(?:\.(?!weight|bias|alpha)\w+)?"


def _factor(side: str, letter: str, role: Role) -> str:
    """Return the end of a LoRA factor's key in the names of kohya, of peft and of diffusers before it."""
    return (
        rf"(?:\.lora_{side}|\.lora_{letter}|[._]lora(?P<digit_{role}>\d?)\.{side}"
        rf"|\.lora_linear_layer\.{side})(?:\.(?P<part_{role}>\d+)|{_NAME})"
    )


# Ends that have other spellings than those in `ENDINGS`, of all trainers.
_OTHER_ENDS: Mapping[tuple[AdapterKind | None, Role], str] = {
    (None, "alpha"): r"\.(?:lora_)?alpha",
    (None, "bias"): re.escape(BIAS),
    ("lora", "down"): _factor("down", "A", "down") + r"\.weight",
    ("lora", "up"): _factor("up", "B", "up") + r"\.weight",
    ("lora", "up_bias"): _factor("up", "B", "up_bias") + r"\.bias",
    ("lora", "magnitude"): r"\.(?:dora_scale|lora_magnitude_vector)(?:\.\w+)*",
    ("oft_in", "skew"): rf"\.oft_R{_NAME}\.weight",
    ("oft_in", "scaled"): rf"\.oft_R{_NAME}\.scaled_oft",
}
_ENDS: Mapping[tuple[AdapterKind | None, Role], str] = {
    **{
        (kind, role): re.escape(end) + (_NAME if kind in ("loha", "lokr") else "")
        for kind, ends in ENDINGS.items()
        for role, end in ends.items()
        # The magnitude key is the same for every adapter kind, and IA3 factors have no suffix of their own.
        if role not in ("magnitude", "by_output", "by_input")
    },
    **_OTHER_ENDS,
}
# The lookahead is for speed: nearly all characters of a key begin no end.
_KEY = re.compile(
    r"(?P<module>.+?)(?=\.|_lora)(?:"
    + "|".join(f"(?P<end{number}>{end})" for number, end in enumerate(_ENDS.values()))
    + ")"
)
_MEANINGS = tuple(_ENDS)
# Between the name of a joined layer and the number of the part that a pair of factors is for.
PART_MARK = "#"


READERS = "readers.toml"


def other_kind(keys: Collection[str]) -> str:
    """Return the X if these keys look like those of X, which is not read here, else ""."""
    for pattern, kind in packaged(READERS)["other_kinds"].items():
        if any(re.fullmatch(pattern, key) for key in keys):
            return str(kind)
    return ""


def kind_of_others(keys: Collection[str]) -> str:
    """Return " (as in X)" if these keys look like those of X, else ""."""
    kind = other_kind(keys)
    return f" (as in {kind})" if kind else ""


def parse_key(key: str) -> tuple[str, AdapterKind | None, Role] | None:
    """Return (module as spelt, kind, role) of a tensor, None for a tensor of no adapter.

    The kind of an alpha is that of the tensors beside it. A magnitude is said to be a LoRA's, whatever
    it stands beside. Factors in a list (`lora_down.0`) are of a part of the module: `module#0`.
    """
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    assert match.lastgroup is not None
    kind, role = _MEANINGS[int(match.lastgroup.removeprefix("end"))]
    module: str = match["module"]
    if role in ("down", "up", "up_bias"):
        module += match[f"digit_{role}"] or ""
        part = match[f"part_{role}"]
        module += f"{PART_MARK}{part}" if part else ""
    return module, kind, role


# ---- formats


KeyFormat = Literal["kohya", "diffusers", "peft", "comfyui", "mixed", "unknown"]

_FORMATS: tuple[tuple[KeyFormat, re.Pattern[str]], ...] = (
    ("kohya", re.compile(r"(?:lora|lycoris)_[a-z0-9]+_[^.]+")),
    ("comfyui", re.compile(r"(?:diffusion_model|text_encoders)\..+")),
    ("peft", re.compile(r"base_model\.model\..+")),
    ("diffusers", re.compile(r"(?:unet|transformer|text_encoder(?:_\d)?)\..+")),
)


def key_format(modules: Iterable[str]) -> KeyFormat:
    """Return the key format all modules share; bare names without a prefix are of no format."""
    formats: set[KeyFormat] = {
        next((name for name, pattern in _FORMATS if pattern.fullmatch(module)), "unknown")
        for module in modules
    }
    return formats.pop() if len(formats) == 1 else "mixed"


def file_endings(format: FileFormat, kind: AdapterKind, *, component: str) -> Mapping[Role, str]:
    """Return the ends of keys that a file of this format has for this kind.

    transformers loads the text encoders' layers and wants magnitudes with `.weight`, diffusers loads the
    others and wants them without.
    """
    ends = {"bias": BIAS, **ENDINGS[kind]}
    if kind == "lora" and format != "kohya":
        ends |= PEFT_ENDINGS
        if format == "comfyui":  # it knows the magnitude by LyCORIS's name only
            ends["magnitude"] = ENDINGS["lora"]["magnitude"]
        elif component != DENOISER:
            ends["magnitude"] += ".weight"
    return ends


# ---- what a format can hold


FormatRequest = Literal["auto"] | FileFormat


@dataclass(frozen=True, kw_only=True)
class AdapterContents:
    """The contents of an adapter that decide its format."""

    kinds: frozenset[AdapterKind]
    dora: bool
    text: bool
    """Whether text encoders are trained."""
    bias: bool = False
    input_dora: bool = False
    """Whether DoRA magnitudes of some layers are per input, as in OneTrainer's files."""
    rank: int = 0
    """The most frequent rank of an existing adapter."""
    lora_alpha: float = 1.0
    """The most frequent alpha of its LoRAs."""


def planned_contents(adapter: AdapterSettings) -> AdapterContents:
    """Return the contents of the adapter that these settings train."""
    return AdapterContents(
        kinds=frozenset({adapter.kind}), dora=adapter.dora, text=adapter.text_encoder
    )


def format_for(family: Family, requested: FormatRequest, contents: AdapterContents) -> FileFormat:
    """Return the format of a file; `auto` is the family's first format that can hold the adapter.

    Raises RequestError with the reason where the family or the kind does not allow the requested format.
    """
    others = sorted(contents.kinds - {"lora"})
    reasons = {"kind": bool(others), "bias": contents.bias, "input_dora": contents.input_dora}
    reason = next((name for name, is_so in reasons.items() if is_so), "")
    refused = dict[FileFormat, str]()
    if reason:
        text: str = packaged(READERS)["refused_in_diffusers"][reason]
        refused["diffusers"] = text.format(name=KIND_NAMES[others[0]] if others else "")
    apart = sorted(contents.kinds - JOINABLE)
    if apart or contents.input_dora:
        name = KIND_NAMES[apart[0]] if apart else "DoRA with a magnitude for each input"
        joined: str = packaged(READERS)["refused_joined"]
        refused |= dict.fromkeys(family.formats.joined, joined.format(name=name))
    possible = [format for format in family.formats.written if format not in refused]
    if not possible:
        listed = "; ".join(f"{each}: {refused[each]}" for each in family.formats.written)
        raise RequestError(
            f"no file format of {family.name} can hold this adapter ({listed})",
            fix="make a LoRA of it with `lora-train resize --rank`, or train with --set adapter.kind=lora",
        )
    if requested == "auto":
        return possible[0]
    if requested in possible:
        return requested
    written = requested in family.formats.written
    fault = (refused if written else family.formats.refused).get(requested, "no program reads it")
    raise RequestError(
        f"output.format={requested} is not possible for {family.name}: {fault}",
        fix=f"use --set output.format={possible[0]}",
    )


def format_notes(family: Family, format: FileFormat, contents: AdapterContents) -> tuple[str, ...]:
    """Return a sentence per loss that programs have when they read such a file."""
    names: list[str] = sorted(contents.kinds - {"lora"})
    if contents.text and format == "comfyui":
        names.insert(0, "text_in_comfyui")
    if contents.dora:
        names.insert(0, "dora_in_diffusers" if format == "diffusers" else "dora")
    losses = packaged(READERS)["losses"]
    unread = family.formats.unread.get(format)
    return (*([unread] if unread else []), *(losses[name] for name in names))
