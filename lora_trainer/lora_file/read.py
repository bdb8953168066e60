"""Reading an adapter file from any trainer without torch: checked header, roles of the keys, sizes.

Input is a path nobody vouches for, output the modules as they are spelt there. Every size is
checked before it is believed, and nothing in the file is used as a path.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lora_trainer.common.errors import InputError
from lora_trainer.families.base.layout import DENOISER
from lora_trainer.lora.adapter_size import AdapterKind, update_size
from lora_trainer.lora_file.key_formats import BESIDE, NEEDED, PART_MARK, Role, parse_key
from lora_trainer.lora_file.module_update import Update, normal_form, ranks_of
from lora_trainer.lora_file.tensor_file import (
    PEFT_FILE,
    Array,
    HeaderEntry,
    Opened,
    json_object,
    numbers,
    open_checked,
    refuse,
)


@dataclass(frozen=True, kw_only=True)
class ModuleFactors:
    """All tensors of one module by role."""

    kind: AdapterKind | None
    """None if the module has no factors."""
    entries: Mapping[Role, HeaderEntry]

    @property
    def complete(self) -> bool:
        """Whether the factors of its kind are all there, and no others."""
        have = self.entries.keys() - BESIDE
        # LyCORIS trains the bias of a layer alone too, where its weight stays.
        if self.kind == "full" and not have:
            return "bias" in self.entries
        return self.kind is not None and any(have == {*each.split()} for each in NEEDED[self.kind])

    @property
    def ranks(self) -> frozenset[int]:
        """The ranks that factors state, one where they agree; of an OFT, the size of a block.

        A LoKr of two whole factors has none, nor has an update that is not a product.
        """
        shapes = {role: entry.shape for role, entry in self.entries.items()}
        return ranks_of({role: shape for role, shape in shapes.items() if len(shape) > 1})

    @property
    def size(self) -> tuple[int, int]:
        """(out, fan in) of the update, kernels counted, 0 for a side that the tensors do not tell."""
        shapes = {role: entry.shape for role, entry in self.entries.items()}
        try:
            return update_size(self.kind, shapes)
        except (KeyError, IndexError, ValueError):
            return (0, 0)


@dataclass(frozen=True, kw_only=True)
class Contents:
    """The contents of an adapter file. Tensors are read when they are needed, while the file is open."""

    name: str
    opened: Opened
    parts: Mapping[str, ModuleFactors]
    """The modules by their spelling in the file."""
    unknown: tuple[str, ...]
    """Keys that belong to no adapter."""
    peft_settings: Mapping[str, Mapping[str, Any]]
    """peft settings by component, from the header; the key "" holds those of `adapter_config.json`."""

    @property
    def metadata(self) -> Mapping[str, str]:
        """The header's entries."""
        return self.opened.metadata

    @property
    def whole(self) -> Mapping[str, ModuleFactors]:
        """The modules whose tensors are all there, by name."""
        return {name: part for name, part in sorted(self.parts.items()) if part.complete}

    def array(self, entry: HeaderEntry) -> Array:
        """Return a tensor's numbers, float32 for dtypes that numpy has not; raises InputError."""
        return numbers(self.opened.read(entry), entry)

    def update(self, spelling: str) -> Update:
        """Return a module in its normal form; raises InputError for one whose tensors do not fit."""
        part = self.parts[spelling]
        arrays = {role: self.array(entry) for role, entry in part.entries.items()}
        # A column [1, n] is a magnitude of inputs in LyCORIS's files and of a convolution's outputs in peft's.
        peft = any("lora_magnitude_vector" in entry.key for entry in part.entries.values())
        try:
            assert part.kind is not None
            with np.errstate(all="ignore"):
                return normal_form(
                    part.kind,
                    arrays,
                    strength_of=lambda rank: self._scale_of(spelling, rank=rank),
                    magnitude_of_outputs=peft,
                )
        except (ValueError, IndexError, KeyError) as error:
            raise InputError(
                f"{self.name} cannot be used: {spelling!r} {str(error).splitlines()[0]}",
                fix="give a complete adapter made for this base model",
            ) from None

    def stated_alphas(self) -> Iterator[float]:
        """Yield every alpha of peft's settings, patterns included."""
        for settings in self.peft_settings.values():
            values = (_alpha(settings), *_patterns(settings).values())
            yield from (value for value in map(_number, values) if value is not None)

    def _scale_of(self, spelling: str, *, rank: int) -> float:
        """Return alpha / rank, or alpha / sqrt(rank) for rsLoRA; 1 where no alpha is stated.

        `spelling` is the module's name in the file ("unet.down_blocks..."); `rank` 0: the tensors do not
        tell it, as of a LoKr of whole factors.
        """
        prefix, _, module = spelling.partition(".")
        component = prefix if prefix.startswith("text_encoder") else DENOISER
        # The settings beside a file of peft are of no component, those in a header of diffusers are of each.
        settings = self.peft_settings.get(component, self.peft_settings.get("", {}))
        alpha = _number(_alpha(settings))
        for pattern, value in _patterns(settings).items():
            # As in peft, the last pattern that matches wins.
            if _names(pattern, module) and (own_alpha := _number(value)) is not None:
                alpha = own_alpha
        rank = rank or int(_number(settings.get("r")) or 0)
        if alpha is None or rank < 1:
            return 1.0
        # rsLoRA (Kalajdzievski 2023, arXiv 2312.03732): updates of every rank get the same size.
        return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


@contextmanager
def open_contents(path: Path) -> Iterator[Contents]:
    """Open and check a safetensors file; raises InputError naming the fault."""
    with open_checked(path) as opened:
        parts, unknown = _modules(opened)
        # Settings of peft stand in the header, else in the file that peft writes beside its own.
        settings: dict[str, dict[str, Any]] = {}
        if text := opened.metadata.get(DIFFUSERS_METADATA):
            # "unet.lora_alpha" and the like
            for name, value in json_object(text).items():
                part, _, setting = name.rpartition(".")
                component = part if part.startswith("text_encoder") else DENOISER
                settings.setdefault(component, {})[setting] = value
        elif opened.path.name == PEFT_FILE:
            with suppress(OSError, UnicodeError):
                beside = opened.path.with_name(PEFT_CONFIG)
                settings[""] = json_object(beside.read_text("utf-8"))
        for each in settings.values():
            if reason := _unsupported(each):
                refuse(opened.path, reason, fix="merge it into its base where it was made")
        yield Contents(
            name=path.name,
            opened=opened,
            parts=parts,
            unknown=tuple(unknown),
            peft_settings=settings,
        )


def read_contents(path: Path) -> Contents:
    """Check a file's header and return its contents, no tensor read; raises InputError."""
    with open_contents(path) as contents:
        return contents


def _modules(opened: Opened) -> tuple[dict[str, ModuleFactors], list[str]]:
    """Return a file's modules as they are spelt there, and the keys of no adapter."""
    parts: dict[str, dict[Role, HeaderEntry]] = {}
    kinds: dict[str, set[AdapterKind]] = {}
    others, unknown = list[HeaderEntry](), list[str]()
    for entry in opened.entries.values():
        parsed = parse_key(entry.key)
        if parsed is None:
            others.append(entry)
            continue
        module, kind, role = parsed
        if role in parts.setdefault(module, {}):
            refuse(
                opened.path, f"has two tensors for the {role} of {module!r}, one is {entry.key!r}"
            )
        parts[module][role] = entry
        if kind is not None:
            kinds.setdefault(module, set()).add(kind)
    for entry in others:
        # The key of an IA3 factor ends like the key of any weight.
        module, _, last = entry.key.rpartition(".")
        if last == "weight" and "on_input" in parts.get(module, {}):
            parts[module]["factor"] = entry
        else:
            unknown.append(entry.key)
    # One alpha for a joined q/k/v layer applies to each of q, k and v.
    wholes = {module: module.partition(PART_MARK)[0] for module in parts if PART_MARK in module}
    for module, whole in wholes.items():
        if "alpha" in parts.get(whole, {}):
            parts[module].setdefault("alpha", parts[whole]["alpha"])
    for whole in set(wholes.values()):
        if parts.get(whole, {}).keys() == {"alpha"}:
            del parts[whole]
    modules: dict[str, ModuleFactors] = {}
    for module, roles in parts.items():
        own_kinds = kinds.get(module, set())
        one = next((kind for kind in NEEDED if kind in own_kinds), None)
        # Magnitude and bias keys do not tell the kind of adapter, so a LoRA's factors decide.
        if "lora" in own_kinds and {"down", "up", "mid"} & roles.keys():
            one = "lora"
        elif not own_kinds and "bias" in roles:
            one = "full"
        modules[module] = ModuleFactors(kind=one, entries=roles)
    return modules, unknown


# Header entry with peft's settings; diffusers refuses `.alpha` tensors beside it.
DIFFUSERS_METADATA = "lora_adapter_metadata"
# Header entry of files whose strength is multiplied into the tensors: they lack an alpha on purpose.
FOLDED = "lora_train.strength"
PEFT_CONFIG = "adapter_config.json"


def _unsupported(settings: Mapping[str, Any]) -> str:
    """Return why an adapter of peft's cannot be read, "" where it can."""
    kind = settings.get("peft_type", "LORA")
    if kind not in ("LORA", "LOHA", "LOKR", "OFT"):
        return f"is an adapter of peft's kind {kind}; LORA, LOHA, LOKR and OFT are read"
    # A rotation is the Cayley transform (I + Q)(I - Q)^-1 or, in peft, five terms of its series
    # (Neumann); other numbers of terms and coft's limit give other rotations.
    terms = settings.get("use_cayley_neumann", True) and settings.get("num_cayley_neumann_terms", 5)
    if kind == "OFT" and (settings.get("coft") or terms != 5):
        return "is an OFT of peft with settings of its own (coft, Cayley without 5 terms)"
    if settings.get("fan_in_fan_out"):
        return "was made with fan_in_fan_out for layers that no base here has"
    return ""


def _alpha(settings: Mapping[str, Any]) -> Any:
    """Return peft's alpha, which has another name for LoHa and LoKr."""
    return settings.get("lora_alpha", settings.get("alpha"))


def _patterns(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    patterns = settings.get("alpha_pattern")
    return patterns if isinstance(patterns, dict) else {}


def _names(pattern: str, module: str) -> bool:
    """Match as peft does, but the end of a name only: a hostile pattern could match for ever."""
    plain = pattern.replace("\\", "")
    if plain.startswith("^"):
        return module == plain[1:]
    return module == plain or module.endswith(f".{plain}")


def _number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        return None
    return float(value)
