"""Declaration of a setting: one field with default, unit, limits, help and the settings it depends on.

Outputs: pydantic fields whose JSON Schema carries the whole declaration, and the words and value types that several
settings or rooms share. `auto` is an ordinary value here; the planner replaces it. The sizes of the base's weights
in bytes are those of memory plan and network alike, so predicted and stored bytes are equal;
`network/quantize.py` implements the formats.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache, partial
from importlib.resources import files
from types import MappingProxyType
from typing import Annotated, Any, Literal, Never, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    model_validator,
)
from pydantic.fields import FieldInfo
from typing_extensions import TypeVar  # the one of typing has no default before Python 3.13

from lora_trainer.common.files import user_path

Auto = Literal["auto"]
T = TypeVar("T")


def _refuse(value: Any) -> Never:
    raise ValueError("has to be decided")


# Takes the place of `Auto` in the settings of a planned run: no value has this type.
Decided = Annotated[Never, PlainValidator(_refuse)]
# What the field `steps: Count | A_co` may be besides a number: `Auto` in a request, `Decided` in a `RunConfig`.
#
# So each setting is declared once, and mypy knows the fields of a planned run without `auto`.
A_co = TypeVar("A_co", bound=Auto, covariant=True, default=Auto)


def settled(value: T | Auto) -> T:
    """Return a setting that the planner has decided already; only planning needs it, a `RunConfig` has no `auto`."""
    assert value != "auto", "planned before it was decided"
    return value


@cache
def concepts() -> Mapping[str, Any]:
    """Return sample prompts and presets of each kind of subject."""
    return tomllib.loads(files(__package__).joinpath("concepts.toml").read_text("utf-8"))


Precision = Literal["fp32", "bf16", "fp16"]
Quantization = Literal["int8", "fp8", "nf4"]
BasePrecision = Literal["fp32", "bf16", "fp16", Quantization]
QUANTIZATIONS: tuple[Quantization, ...] = get_args(Quantization)
# Prompt tokens in one chunk of CLIP, begin and end tokens excluded.
CHUNK_TOKENS = 75
Count = Annotated[int, Field(ge=1, le=10_000_000)]
Interval = Annotated[int, Field(ge=0, le=10_000_000)]
Factor = Annotated[float, Field(gt=0.0, le=100.0)]
Share = Annotated[float, Field(ge=0.0, le=1.0)]
Portion = Annotated[float, Field(gt=0.0, le=1.0)]
BelowOne = Annotated[float, Field(ge=0.0, lt=1.0)]
Seed = Annotated[int, Field(ge=0, le=2**53 - 1)]
Word = Annotated[str, Field(min_length=1, max_length=100)]
# Checkpointing levels. Beside their inputs, recomputed blocks keep for backward: `none` all activations;
# `light` the outputs of attention and of all frozen layers; `selective` the outputs of attention and of frozen
# layers with more inputs than outputs; `full` nothing; `offloaded` nothing, and the inputs are moved to host
# memory.
Checkpointing = Literal["none", "light", "selective", "full", "offloaded"]
# From the lightest level (most memory) to the heaviest (least memory).
CHECKPOINTING: tuple[Checkpointing, ...] = get_args(Checkpointing)
# Checkpointing levels that keep the output of attention in recomputed blocks.
KEEP_ATTENTION: tuple[Checkpointing, ...] = ("light", "selective")
# Layers of the denoiser that get an adapter.
Targets = Literal["attention", "transformer", "all"]
# From the fewest layers to the most; each includes the layers of the previous.
TARGETS: tuple[Targets, ...] = get_args(Targets)
Weighting = Literal["none", "min_snr", "soft_min_snr", "debiased", "p2", "sigma_sqrt", "cosmap"]
FLOW_WEIGHTINGS: tuple[Weighting, ...] = ("sigma_sqrt", "cosmap")
SNR_WEIGHTINGS: tuple[Weighting, ...] = ("min_snr", "soft_min_snr", "debiased", "p2")
# A class or function of an installed package, `package.module:Name`.
IMPORT_PATH = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"
ImportPath = Annotated[str, Field(pattern=IMPORT_PATH)]
CompileMode = Literal["default", "reduce-overhead", "max-autotune"]
# How a U-Net's convolutions are computed: `channels_last` is a layout of their weights, `benchmark` lets cuDNN time its
# algorithms, `both` does both.
ConvolutionWay = Literal["plain", "channels_last", "benchmark", "both"]
ScheduleName = Literal[
    "constant",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "one_cycle",
    "warmup_stable_decay",
]
Schedule = ScheduleName | ImportPath


def is_import_path(text: str) -> bool:
    """Say whether a text has the form `package.module:Name`."""
    return re.match(IMPORT_PATH, text) is not None


def _regular_expression(pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ValueError(f"{pattern!r} is not a regular expression ({error})") from None
    return pattern


# A regular expression on module names.
Pattern = Annotated[str, AfterValidator(_regular_expression)]
# A share of channels, ranks, layers or steps that leaves some over.
BelowAll = Annotated[float, Field(ge=0.0, le=0.9)]


# `section.name` of other settings -> the values that the condition lists.
Needs = Mapping[str, Sequence[Any]]
# What another value does to a resume. free: it does not influence the computation, so a resume stays bit-exact.
# rounding: it changes only rounding, so all random draws stay the same, not all bits. changed: the run goes on
# otherwise than it would have. forbidden: it decides shapes or first values of the adapter or the optimizer's state.
ResumeEffect = Literal["free", "rounding", "changed", "forbidden"]


@dataclass(frozen=True, kw_only=True)
class Handling:
    """What the trainer does with a setting, for code and not for the reader of a form or a schema."""

    resume: ResumeEffect = "changed"
    """What a changed value does to a resume."""
    replans: bool = False
    """Whether a changed value plans the memory of a resumed run again."""
    uses_validation: bool = False
    """Whether, with a value other than the default, validations influence the training."""
    follows_validation: bool = False
    """Free to change at a resume, unless a setting that `uses_validation` is on: then the resume is CHANGED."""
    packages: Mapping[Any, str] = field(default_factory=dict)
    """The package that a value needs, by value, as pip names it."""
    own_memory: bool = False
    """Values above 0 need a GPU with memory of its own."""
    works_anywhere: Any = None
    """The value to use if a need is not met; None: there is no such value."""
    is_wish: bool = False
    """Replaced even if the user set it, because the result is the same."""
    kohya: Sequence[str] = ()
    """Its entries in the metadata of exported files."""
    kohya_flow: Sequence[str] = ()
    """Further entries, for flow models only."""


_HANDLING = frozenset(each.name for each in fields(Handling))


def setting(
    default: Any,
    doc: str,
    *,
    unit: str = "",
    detail: str = "",
    source: str = "",
    label: str = "",
    only_for: Needs = MappingProxyType({}),
    not_for: Needs = MappingProxyType({}),
    idle_with: Needs = MappingProxyType({}),
    enforced: bool = False,
    path: bool = False,
    hub: bool = False,
    headline: bool = False,
    **more: Any,
) -> Any:
    """Declare one setting; `unit` is shown beside the value wherever it is printed.

    `doc` says in plain words what it does; `detail` adds what only some ask for, such as a formula, and `source` the
    papers that it is from, "Authors year, arXiv NUMBER" each, with a semicolon between. `label` is its name for
    display, where the key without its section and unit would say too little.

    The setting has an effect only while each setting in `only_for` has one of its listed values, no setting
    in `not_for` has, and not all settings in `idle_with` have; otherwise it changes nothing, or is refused
    (tests/config/test_unused_settings.py): `enforced` refuses every value but the default where it has no effect.
    `path`: the value, or each of its parts, names a file or folder of this machine; with `hub` it may be
    a repository on the Hub instead. `headline`: a plan shows the setting even
    when it is asked for the important settings only. `more` are the fields of `Handling`, and pydantic's
    constraints.
    """
    extra: dict[str, Any] = {"unit": unit}
    texts = {"detail": detail, "source": source, "own_label": label}
    extra |= {name: text for name, text in texts.items() if text}
    for name, needs in (("only_for", only_for), ("not_for", not_for), ("idle_with", idle_with)):
        if needs:
            extra[name] = {key: list(values) for key, values in needs.items()}
    marks = {"enforced": enforced, "path": path, "hub": hub, "headline": headline}
    extra |= {name: True for name, is_set in marks.items() if is_set}
    handling = Handling(**{name: more.pop(name) for name in _HANDLING & more.keys()})
    info = Field(default, description=doc, json_schema_extra=extra, **more)
    info.metadata.append(handling)
    return info


# Declare a setting that is refused where it has no effect.
enforced_setting = partial(setting, enforced=True)

# Conditions for `only_for`, `not_for` and `idle_with` that several settings share.
CARD = {"hardware.device": ("cuda", "mps", "xpu")}
WITHOUT_VALIDATION = {"data.validation_fraction": (0.0,)}
LORA = {"adapter.kind": ("lora",)}
NOT_OFT = {"adapter.kind": ("oft",)}
WITHOUT_NEW_TOKENS = {"adapter.new_tokens": (0,)}


def is_path(info: FieldInfo | None) -> bool:
    """Whether a setting names a file or folder."""
    extra = info.json_schema_extra if info is not None else None
    return isinstance(extra, dict) and bool(extra.get("path"))


def as_paths(value: Any) -> Any:
    """Return a value of a setting with each path in it as `user_path` reads it."""
    if isinstance(value, str):
        return user_path(value)
    return [as_paths(each) for each in value] if isinstance(value, list | tuple) else value


class Section(BaseModel):
    """Base of all sections: immutable, refuses unknown keys, validates defaults too."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,  # `--set data.trigger=123` is a word, not a number
    )

    @model_validator(mode="before")
    @classmethod
    def _with_paths(cls, values: Any) -> Any:
        """Take paths as people type and paste them, in all settings that name files or folders."""
        if not isinstance(values, dict):
            return values
        return {
            name: as_paths(value) if is_path(cls.model_fields.get(name)) else value
            for name, value in values.items()
        }


# ---- formats of the frozen base's weights

INT8_MAX = 127.0
# Weights that share a scale.
NF4_BLOCK = 64
# Scales, themselves in 8 bits, that share a scale (double quantisation).
NF4_SCALES_BLOCK = 256
NF4_SCALE_LEVELS = 256
# Weights of a layer that are encoded at a time, whole blocks, and the bytes of temporaries for each: in nf4 five
# tensors of 4 bytes on a processor.
ENCODED_AT_ONCE = 2**23
ENCODING_BYTES = 20


def weight_bytes(*, fan_in: int, out: int, precision: BasePrecision) -> int:
    """Return the bytes of one linear layer's weight [out, fan_in] with its scales, without its bias.

    int8 and fp8 keep a float32 scale per output. nf4 (Dettmers et al. 2023, arXiv 2305.14314, as
    bitsandbytes stores it) keeps 4 bits a weight, an 8-bit scale per block, a float32 scale per block
    of scales, their float32 mean and the float32 table of the 8-bit scales: 4.13 bits a weight.
    """
    elements = fan_in * out
    match precision:
        case "fp32":
            return 4 * elements
        case "bf16" | "fp16":
            return 2 * elements
        case "int8" | "fp8":
            return elements + 4 * out
        case "nf4":
            scales = -(-elements // NF4_BLOCK)
            outer = -(-scales // NF4_SCALES_BLOCK)
            return -(-elements // 2) + scales + 4 * (outer + 1 + NF4_SCALE_LEVELS)


# ---- streamed blocks

# Streamed blocks on the device at a time: one computes while the next one is copied.
BUFFERS = 2


def streamed_indices(total: int, count: int) -> tuple[int, ...]:
    """Return the indices of `count` streamed blocks among `total` repeated ones, evenly spread.

    A copy hides behind the computation between two streamed blocks, so the gaps should be equally wide.
    """
    return tuple((2 * index + 1) * total // (2 * count) for index in range(count))


def moved_bytes(block_bytes: Sequence[int], count: int) -> int:
    """Return the host memory of `count` streamed blocks, which is also the most that a pass copies."""
    return sum(block_bytes[index] for index in streamed_indices(len(block_bytes), count))


def saved_bytes(block_bytes: Sequence[int], count: int) -> int:
    """Return the device memory that `count` streamed blocks free, net of their buffers.

    Below 0 where the buffers, each as large as the largest streamed block, take more than they replace.
    """
    chosen = [block_bytes[index] for index in streamed_indices(len(block_bytes), count)]
    return sum(chosen) - min(BUFFERS, count) * max(chosen, default=0)
