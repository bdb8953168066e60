"""Every setting, declared once: type, default, unit and one line of documentation.

The command line (`--set section.key=value`), config files, presets, the JSON Schema, the GUI form, the
docs table, run.json and the metadata of exported files all derive from the model in `settings/`. Here
is what they derive: the list of settings with all that is said of each, and a Config from typed values
and back. Unknown keys are errors that name the nearest one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from lora_trainer.errors import RequestError, did_you_mean
from lora_trainer.redaction import secret_keys
from lora_trainer.setting_forms import Form, form_of, label_of
from lora_trainer.settings.declare import (
    CHECKPOINTING,
    CHUNK_TOKENS,
    FLOW_WEIGHTINGS,
    MIXABLE,
    SCHEDULE_FREE,
    SNR_WEIGHTINGS,
    Auto,
    Checkpointing,
    Needs,
    OptimizerName,
    Precision,
    Section,
    Weighting,
)
from lora_trainer.settings.inputs import OWN_FOLDER, BaseSettings, DataSettings, FolderSettings
from lora_trainer.settings.learning import (
    AdapterSettings,
    ObjectiveSettings,
    TrainSettings,
)
from lora_trainer.settings.model import Config
from lora_trainer.settings.optimizer import OptimizerSettings
from lora_trainer.settings.running import MemorySettings, OutputSettings, SamplingSettings

__all__ = [
    "CHECKPOINTING",
    "CHUNK_TOKENS",
    "FLOW_WEIGHTINGS",
    "MIXABLE",
    "OWN_FOLDER",
    "SCHEDULE_FREE",
    "SNR_WEIGHTINGS",
    "AdapterSettings",
    "Auto",
    "BaseSettings",
    "Checkpointing",
    "Config",
    "DataSettings",
    "FolderSettings",
    "MemorySettings",
    "ObjectiveSettings",
    "OptimizerName",
    "OptimizerSettings",
    "OutputSettings",
    "Precision",
    "SamplingSettings",
    "SettingInfo",
    "TrainSettings",
    "Weighting",
    "all_settings",
    "build_config",
    "check_keys",
    "concrete",
    "flatten",
    "near_keys",
    "overlaid",
    "parse_assignment",
    "refuse_secrets",
    "setting_keys",
    "setting_of",
    "setting_schemas",
]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class SettingInfo:
    """One setting as the tables, the form and the docs show it."""

    key: str
    default: Any
    unit: str
    doc: str
    form: Form
    only_for: Needs
    not_for: Needs
    idle_with: Needs
    path: bool
    headline: bool

    @property
    def section(self) -> str:
        return self.key.partition(".")[0]

    @property
    def label(self) -> str:
        """The name as people read it, without section and unit."""
        return label_of(self.key.partition(".")[2], unit=self.unit)

    def unused(self, values: Mapping[str, Any]) -> str:
        """Return why it does not matter with these values of other settings; empty where it may.

        `values` are by `section.name`; one that is missing or `auto` is not known yet.
        """
        known = {key: value for key, value in values.items() if value != "auto"}
        for key, wanted in self.only_for.items():
            if key in known and known[key] not in wanted:
                needed = " or ".join(map(_typed, wanted))
                return f"needs {key}={needed}, which is {_typed(known[key])}"
        for key, refused in self.not_for.items():
            if key in known and known[key] in refused:
                return f"without effect while {key} is {_typed(known[key])}"
        if self.idle_with and all(known.get(key) in idle for key, idle in self.idle_with.items()):
            idle = (f"{key} is {_typed(known[key])}" for key in self.idle_with)
            return f"without effect while {' and '.join(idle)}"
        return ""


def _typed(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def all_settings() -> list[SettingInfo]:
    """Return every setting in declaration order, keyed `section.name`."""
    return list(_settings())


@cache
def _settings() -> tuple[SettingInfo, ...]:
    schemas = setting_schemas()
    return tuple(
        SettingInfo(
            key=f"{section}.{name}",
            default=info.default,
            unit=schemas[f"{section}.{name}"]["unit"],
            doc=info.description or "",
            form=form_of(schemas[f"{section}.{name}"]),
            only_for=schemas[f"{section}.{name}"].get("only_for", {}),
            not_for=schemas[f"{section}.{name}"].get("not_for", {}),
            idle_with=schemas[f"{section}.{name}"].get("idle_with", {}),
            path=schemas[f"{section}.{name}"].get("path", False),
            headline=schemas[f"{section}.{name}"].get("headline", False),
        )
        for section, fields in sections().items()
        for name, info in fields.items()
    )


def sections() -> dict[str, dict[str, FieldInfo]]:
    """Return the fields of each section, both in declaration order."""
    found = {}
    for name, field in Config.model_fields.items():
        section = field.annotation
        assert isinstance(section, type) and issubclass(section, Section)
        found[name] = section.model_fields
    return found


def setting_schemas() -> dict[str, dict[str, Any]]:
    """Return the JSON Schema of every setting, by `section.name`."""
    schema = Config.model_json_schema()
    found: dict[str, dict[str, Any]] = {}
    for section, reference in schema["properties"].items():
        name = reference["$ref"].rpartition("/")[2]
        for key, value in schema["$defs"][name]["properties"].items():
            found[f"{section}.{key}"] = _standalone(value, schema["$defs"])
    return found


def _standalone(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> dict[str, Any]:
    """Return a field's schema with what it refers to put in, without pydantic's titles."""
    found = {part: value for part, value in schema.items() if part != "title"}
    entries = found.get("additionalProperties")
    if isinstance(entries, dict) and "$ref" in entries:
        entry = definitions[entries["$ref"].rpartition("/")[2]]
        properties = {
            name: {part: value for part, value in inner.items() if part != "title"}
            for name, inner in entry["properties"].items()
        }
        kept = {key: entry[key] for key in ("type", "additionalProperties")}
        found["additionalProperties"] = {**kept, "properties": properties}
    return found


@cache
def _entry_fields() -> Mapping[str, tuple[str, ...]]:
    """Return the settings that map names to settings of their own, each with the names of those."""
    entries = {key: schema.get("additionalProperties") for key, schema in setting_schemas().items()}
    return {
        key: tuple(entry["properties"])
        for key, entry in entries.items()
        if isinstance(entry, dict) and "properties" in entry
    }


def setting_of(key: str) -> str:
    """Return the setting that a key is of: `data.folders.NAME.repeats` is part of `data.folders`."""
    for setting, fields in _entry_fields().items():
        name, _, field = key.removeprefix(f"{setting}.").rpartition(".")
        if key.startswith(f"{setting}.") and name and field in fields:
            return setting
    return key


def overlaid(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Return all values, those of `upper` where both have one.

    A key `data.folders.NAME.repeats` sets that one thing in what `data.folders` is by then.
    """
    found = dict(lower)
    for key, value in upper.items():
        setting = setting_of(key)
        if setting == key:
            found[key] = value
            continue
        name, _, field = key.removeprefix(f"{setting}.").rpartition(".")
        entries = found.get(setting, {})
        # What is no mapping is left for validation to refuse.
        if isinstance(entries, Mapping) and isinstance(entries.get(name, {}), Mapping):
            found[setting] = {**entries, name: {**entries.get(name, {}), field: value}}
    return found


def setting_keys() -> tuple[str, ...]:
    """Return all `section.name` keys."""
    return tuple(info.key for info in _settings())


def flatten(config: Config) -> dict[str, Any]:
    """Return {"section.name": JSON value} for every setting."""
    sections = config.model_dump(mode="json")
    return {
        f"{section}.{name}": value
        for section, values in sections.items()
        for name, value in values.items()
    }


def build_config(values: Mapping[str, Any]) -> Config:
    """Build a Config from {"section.name": value}; raises RequestError naming all that is wrong at once."""
    check_keys(values)
    refuse_secrets(values)
    nested: dict[str, dict[str, Any]] = {}
    for key, value in overlaid({}, values).items():
        section, name = key.split(".")
        nested.setdefault(section, {})[name] = value
    try:
        return Config.model_validate(nested)
    except ValidationError as error:
        raise RequestError(_explain(error), fix="change the values named") from None


def check_keys(values: Mapping[str, Any]) -> None:
    """Raise RequestError for the keys that are no setting, with the nearest name of each."""
    keys = setting_keys()
    unknown = [
        f"unknown setting {key!r}.{did_you_mean(key, near_keys(key))}"
        for key in values
        if setting_of(key) not in keys
    ]
    if unknown:
        raise RequestError(" ".join(unknown), fix="see `lora-train plan DATASET` for all settings")


def near_keys(key: str) -> tuple[str, ...]:
    """Return the keys that may have been meant: all settings, or what there is under the one named."""
    for setting, fields in _entry_fields().items():
        if key.startswith(f"{setting}."):
            rest = key.removeprefix(f"{setting}.")
            name = rest.rpartition(".")[0] or rest
            return tuple(f"{setting}.{name}.{field}" for field in fields)
    return setting_keys()


def refuse_secrets(values: Mapping[str, Any]) -> None:
    """Raise RequestError for settings that hold a token: they are written into files."""
    if found := secret_keys(values):
        raise RequestError(
            f"{', '.join(found)} holds what looks like a token or a password",
            fix="take it out; tokens belong in the environment (HF_TOKEN) or `hf auth login`",
        )


def parse_assignment(text: str) -> tuple[str, Any]:
    """Parse `section.key=value`; the value is JSON where it can be, else text. Raises RequestError."""
    key, equals, value = text.partition("=")
    if not equals:
        raise RequestError(f"--set {text!r} has no '='", fix="write --set section.key=value")
    try:
        return key.strip(), json.loads(value)
    except (ValueError, RecursionError):
        return key.strip(), value


def concrete(value: T | Auto) -> T:
    """Return a setting that planning has resolved; meeting `auto` here is a bug, not a user error."""
    if value == "auto":
        raise AssertionError("the planner left a setting at auto")
    return value


def _explain(error: ValidationError) -> str:
    found: dict[str, list[str]] = {}
    for problem in error.errors(include_url=False):
        place = [str(part) for part in problem["loc"]]
        key = ".".join(place[:2])
        if key in _entry_fields() and len(place) > 3:
            key = ".".join(place[:4])
        where = f"{key}={problem['input']!r}: " if key else ""
        message = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "extra_forbidden":
            message = f"unknown.{did_you_mean(key, near_keys(key))}"
        found.setdefault(where, []).append(message[:1].lower() + message[1:])
    return "; ".join(where + " or ".join(messages) for where, messages in found.items())
