"""Settings in layers, from presets and settings files to the command line, each with its origin.

Settings files that users write are JSON or TOML, with nested sections or flat `section.key` names. Each mistake is a
RequestError that names the file and the key, and for an unknown key the nearest setting. A file may also hold its
settings under `settings`, as `plan --json`, run.json and shared presets do.

Layers are merged in the order family, tier, priority, cell, concept, slider, files, command line; later wins. This
happens in two stages. `AskedFor` holds the layers that the user gives; base and hardware are chosen by them. `resolve`
puts the presets of the base's family and of the hardware's tier below; its output is one `Config` and, for each
setting, the layer that set it last. `auto` values stay; the planner replaces them.

Presets are JSON in the package `lora_trainer.presets`, one file per family; `scripts/write_schema.py` makes their JSON
Schema from `Config`.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from lora_trainer.common.errors import RequestError, did_you_mean
from lora_trainer.common.files import json_object
from lora_trainer.config import Priority
from lora_trainer.config.config import (
    SEE_ALL_SETTINGS,
    build_config,
    overlaid,
    refuse_removed,
    setting_keys,
    setting_of,
    unknown_setting,
    without_retired,
)
from lora_trainer.config.declare import concepts
from lora_trainer.config.inputs import BaseSettings
from lora_trainer.config.running import Config

_IMPORT = "if it is of another trainer, `lora-train import FILE` makes a settings file of it"


@dataclass(frozen=True, kw_only=True)
class SettingsFile:
    """The settings of a file."""

    name: str
    """Name of the file."""
    values: Mapping[str, Any]
    family: str | None = None
    """The family, if the file names one."""


def read_settings_file(file: Path) -> SettingsFile:
    """Read a settings file; raises RequestError for an unreadable file, bad syntax and unknown keys."""
    if file.suffix.lower() in (".yaml", ".yml"):
        raise RequestError(f"{file} is YAML, settings files are JSON or TOML", fix=_IMPORT)
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            f"cannot read {file}: {error}", fix="give a readable UTF-8 file"
        ) from None
    return read_settings_text(text, name=str(file), toml=file.suffix.lower() == ".toml")


def read_settings_text(text: str, *, name: str, toml: bool = False) -> SettingsFile:
    """Read the text of a settings file called `name`; raises RequestError as for a file."""
    try:
        data = tomllib.loads(text) if toml else json_object(text, name=name)
    except tomllib.TOMLDecodeError as error:
        raise RequestError(f"{name}: not TOML: {error}", fix="correct that line") from None
    except RecursionError:
        raise RequestError(f"{name}: nested too deeply", fix="correct the file") from None
    family, wrapped = data.get("family"), data.get("settings")
    if isinstance(wrapped, dict):
        settings = {key: _unwrapped(value) for key, value in wrapped.items()}
    else:
        settings = {key: value for key, value in data.items() if key not in ("$schema", "family")}
    family = family if isinstance(family, str) else None
    return SettingsFile(name=name, values=_flat(settings, name), family=family)


def _unwrapped(value: Any) -> Any:
    """Return the value inside `plan --json`'s {"value": ..., "origin": ...}, any other value unchanged."""
    wrapped = isinstance(value, dict) and {"value", "origin"} <= value.keys()
    return value["value"] if wrapped else value


def _flat(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return {"section.key": value}; raises one RequestError that names all mistakes."""
    values, mistakes = dict[str, Any](), list[str]()
    for section, value in settings.items():
        pairs = {section: value}
        if section in Config.model_fields and isinstance(value, dict):
            pairs = {f"{section}.{key}": _unwrapped(inner) for key, inner in value.items()}
        for key in pairs:
            mistake = f"{key!r} is set twice." if key in values else unknown_setting(key)
            if mistake:
                mistakes.append(f"{name}: {mistake}")
        values |= pairs
    if mistakes:
        # Every setting here has a section; the settings of most other trainers have none.
        is_ours = all("." in key for key in values)
        fix = SEE_ALL_SETTINGS if is_ours else f"{SEE_ALL_SETTINGS}; {_IMPORT}"
        raise RequestError(" ".join(mistakes), fix=fix)
    return values


TIERS = ("cpu", "6-8", "10-12", "16-24")
RESUMED = "resumed run"
COMMAND_LINE = "command line"
CONCEPT = "train.concept"
# Presets of a slider by setting: (value, reason).
SLIDER: Mapping[str, tuple[Any, str]] = {
    "train.batch_size": (
        1,
        "a draw of a slider is several samples, which are denoised first: it takes as long as ten or more images",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The layer that set a value, and a reason where the layer has one."""

    layer: str
    reason: str = ""

    @property
    def is_users(self) -> bool:
        """Whether the user set the value, on the command line or in a settings file."""
        return self.layer == COMMAND_LINE or self.layer.startswith(("config ", "preset "))


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """One configuration, and the origin of each `section.key`."""

    config: Config
    origins: Mapping[str, Origin]
    family: str
    tier: str
    priority: str
    preset: str
    preset_batch_size: int = 1
    """The batch size that the presets' learning rate was chosen for."""


@dataclass(frozen=True, kw_only=True)
class FamilyPresets:
    """One file of `presets/`: values by tier, by priority and for single cells `tier/priority`."""

    family: str
    title: str
    base: Mapping[str, Any]
    tiers: Mapping[str, Mapping[str, Any]]
    priorities: Mapping[str, Mapping[str, Any]]
    cells: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def unsupported(self, tier: str, priority: str) -> str:
        """Return the reason why a pair of tier and priority cannot work, else ""."""
        cell = self.cells.get(f"{tier}/{priority}", {})
        return str(cell["unsupported"]) if "unsupported" in cell else ""


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """The name of a layer, and its values by setting."""

    name: str
    values: Mapping[str, Any]
    file: SettingsFile | None = None
    """The file that a user's layer was read from."""


@dataclass(frozen=True, kw_only=True)
class AskedFor:
    """The first stage: the layers that the user gives, from which the base is chosen.

    `preset` is `auto`, a tier, `family/tier` or a settings file. With `run_settings`, the settings of the
    run being resumed, no presets apply: only this command's files and overrides change them. `is_slider`: the dataset
    is a file of a slider, which has presets of its own.
    """

    preset: str = "auto"
    config_file: SettingsFile | None = None
    overrides: Mapping[str, Any] = field(default_factory=dict)
    run_settings: Mapping[str, Any] | None = None
    is_slider: bool = False

    @cached_property
    def layers(self) -> tuple[_Layer, ...]:
        """The layers of the user, later wins; raises RequestError for a preset file that cannot be read."""
        layers = list[_Layer]()
        if self.run_settings is not None:
            layers.append(_Layer(name=RESUMED, values=self.run_settings))
        elif file := _preset_file(self.preset):
            layers.append(_file_layer(read_settings_file(file), "preset"))
        if self.config_file is not None:
            layers.append(_file_layer(self.config_file, "config"))
        return (*layers, _Layer(name=COMMAND_LINE, values=self.overrides))

    def value(self, key: str) -> Any:
        """Return the value of a setting that is needed before the second stage, None where the user sets none."""
        return _last(self.layers, key, None)

    def base(self, *, model: str) -> BaseSettings:
        """Return the settings of the base, with that `base.model`; raises RequestError that names bad values."""
        keys = [f"base.{name}" for name in BaseSettings.model_fields]
        values = {key: value for key in keys if (value := self.value(key)) is not None}
        return build_config(values | {"base.model": model}).base


def resolve(asked: AskedFor, *, family: str, tier: str, priority: Priority) -> Resolved:
    """Merge all layers, later wins; raises RequestError that names each bad value and its origin."""
    tier = _preset_tier(asked.preset, family) or tier
    for layer in asked.layers:
        _refuse_other_family(layer, family)
    layers: Sequence[_Layer] = asked.layers
    presets, reasons = list[_Layer](), dict[str, str]()
    if asked.run_settings is None:
        presets = _preset_layers(family, tier, priority)
        # The concept's presets lie below the layer that names the concept, so it is looked up first.
        concept = str(asked.value(CONCEPT) or "")
        chosen = concepts().get(concept, {"settings": {}})  # validation refuses an unknown word
        reasons = {key: row["why"] for key, row in chosen["settings"].items()}
        of_concept = {key: row["value"] for key, row in chosen["settings"].items()}
        own = [_Layer(name=f"concept {concept}", values=of_concept)]
        if asked.is_slider:
            reasons |= {key: why for key, (_, why) in SLIDER.items()}
            own.append(_Layer(name="slider", values={key: row[0] for key, row in SLIDER.items()}))
        layers = [*presets, *own, *layers]
    origins = {key: Origin(layer="default") for key in setting_keys()}
    values: dict[str, Any] = {}
    for layer in layers:
        refuse_removed(layer.values)
        current = without_retired(layer.values)
        values = overlaid(values, current)
        for key in current:
            is_explained = layer.name == "slider" or layer.name.startswith("concept ")
            reason = reasons.get(key, "") if is_explained else ""
            origins[setting_of(key)] = Origin(layer=layer.name, reason=reason)
    file = _preset_file(asked.preset)
    return Resolved(
        config=_build(values, origins),
        origins=origins,
        family=family,
        tier=tier,
        priority=priority,
        preset=str(file) if file else f"{family}/{tier}",
        preset_batch_size=_last(presets, "train.batch_size", 1),
    )


def _last(layers: Sequence[_Layer], key: str, default: Any) -> Any:
    """Return the value of the last layer that sets a key."""
    return next((each.values[key] for each in reversed(layers) if key in each.values), default)


def lowered_to(resolved: Resolved, *, resolution_px: int) -> Resolved:
    """Return the settings with preset resolutions lowered to a base's native `resolution_px`.

    Presets fit the public releases of a family; a resolution set by the user stays.
    """
    side_key, more_key = "data.resolution", "data.more_resolutions"
    data, origins = resolved.config.data, dict(resolved.origins)
    if (
        not is_preset(origins[side_key].layer)
        or data.resolution == "auto"
        or data.resolution <= resolution_px
    ):
        return resolved
    reason = f"{data.resolution} is preset, the base was trained on {resolution_px}"
    origins[side_key] = replace(origins[side_key], reason=reason)
    lowered: dict[str, Any] = {"resolution": resolution_px}
    if is_preset(origins[more_key].layer):
        lowered["more_resolutions"] = tuple(
            side_px for side_px in data.more_resolutions if side_px < resolution_px
        )
    # Smaller numbers of the same kind: nothing to validate again.
    config = resolved.config.model_copy(update={"data": data.model_copy(update=lowered)})
    return replace(resolved, config=config, origins=origins)


def is_preset(layer: str) -> bool:
    """Return whether a layer is a shipped preset or a settings file given with --preset."""
    return layer.split()[0] in ("family", "preset", "priority", "cell", "concept", "slider")


def _build(values: Mapping[str, Any], origins: Mapping[str, Origin]) -> Config:
    try:
        return build_config(values)
    except RequestError as error:
        where = [
            f"{key} is from {origins[key].layer}"
            for key in values
            if (f"{key}=" in error.found or f"{key}." in error.found)
            and origins[key].layer != COMMAND_LINE
        ]
        raise RequestError("; ".join([error.found.rstrip("."), *where]), fix=error.fix) from None


def preset_families() -> tuple[str, ...]:
    """Return the families that have presets."""
    folder = resources.files("lora_trainer.presets")
    names = sorted(file.name for file in folder.iterdir() if file.name.endswith(".json"))
    return tuple(name.removesuffix(".json") for name in names if name != "schema.json")


def load_presets(family: str) -> FamilyPresets:
    """Read the presets of a family; raises RequestError for a family that has none."""
    if family not in preset_families():
        raise RequestError(
            f"no presets exist for {family!r}, only for {', '.join(preset_families())}",
            fix="use a base model of one of these families",
        )
    text = resources.files("lora_trainer.presets").joinpath(f"{family}.json").read_text("utf-8")
    data = json.loads(text)
    return FamilyPresets(**{key: value for key, value in data.items() if key != "$schema"})


def _preset_layers(family: str, tier: str, priority: Priority) -> list[_Layer]:
    presets = load_presets(family)
    if reason := presets.unsupported(tier, priority):
        raise RequestError(
            f"preset {family}/{tier} with priority {priority} is unsupported: {reason}",
            fix="choose another priority or tier",
        )
    cell = f"{tier}/{priority}"
    return [
        _Layer(name=f"family {family}", values=presets.base),
        _Layer(name=f"preset {tier}", values=presets.tiers[tier]),
        _Layer(name=f"priority {priority}", values=presets.priorities[priority]),
        _Layer(name=f"cell {cell}", values=presets.cells.get(cell, {})),
    ]


def _file_layer(file: SettingsFile, kind: str) -> _Layer:
    return _Layer(name=f"{kind} {file.name}", values=file.values, file=file)


def _refuse_other_family(layer: _Layer, family: str) -> None:
    """Raise RequestError for a settings file that names another family than the base's."""
    if layer.file is None or layer.file.family in (None, family):
        return
    kind, _, _ = layer.name.partition(" ")
    raise RequestError(
        f"{layer.name} is for {layer.file.family}, the base model is {family}",
        fix=f"use a {kind} made for {family} or remove its family",
    )


def _preset_file(preset: str) -> Path | None:
    """Return the settings file that `--preset` names, None for a shipped preset."""
    return Path(preset) if Path(preset).suffix.lower() in (".json", ".toml") else None


def _preset_tier(preset: str, family: str) -> str | None:
    """Return the tier that `--preset` names, if any; raises RequestError listing the names."""
    if preset == "auto" or _preset_file(preset):
        return None
    pairs = [f"{each}/{tier}" for each in preset_families() for tier in TIERS]
    if preset not in (names := ("auto", *TIERS, *pairs)):
        raise RequestError(
            f"unknown preset {preset!r}.{did_you_mean(preset, names)} Presets are {', '.join(names)}",
            fix="give one of these names or a .json file with settings",
        )
    named_family, _, tier = preset.rpartition("/")
    if named_family not in ("", family):
        raise RequestError(
            f"preset {preset} is for {named_family}, the base model is {family}",
            fix=f"use --preset {family}/{tier} or another base model",
        )
    return tier
