"""The list of all settings with their documentation and form fields, and conversion between values and a Config.

Each setting is declared once, in a module of this folder (learning.py, running.py, ...). The command line
(`--set section.key=value`), config files, presets, the JSON Schema, the GUI form, the docs table, run.json
and the metadata of exported files derive from these declarations through this module. An unknown key is an
error that names the nearest setting.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal, TypeVar, cast

from pydantic import ValidationError

from lora_trainer.common.errors import RequestError, did_you_mean
from lora_trainer.common.files import user_path
from lora_trainer.common.wording import secret_keys
from lora_trainer.config.constraints import by_key, contradictions, typed
from lora_trainer.config.declare import Handling, Needs, Section
from lora_trainer.config.inputs import FolderSettings
from lora_trainer.config.running import Config, RunConfig

C = TypeVar("C", bound=Config)

# ---- the list of all settings

Kind = Literal["switch", "choice", "number", "text", "list", "mapping"]
Word = str | bool

_KINDS: Mapping[str, Kind] = {
    "integer": "number",
    "number": "number",
    "array": "list",
    "object": "mapping",
    "string": "text",
}


@dataclass(frozen=True, kw_only=True)
class Form:
    """The form field of one setting."""

    kind: Kind
    words: tuple[Word, ...] = ()
    """All values of a choice, or the words that a number also accepts (`auto`)."""
    whole: bool = False
    """A number must be an integer."""
    low: float | None = None
    """Lower bound in the setting's unit, included unless `above_low`."""
    high: float | None = None
    """Upper bound in the setting's unit, included unless `below_high`."""
    above_low: bool = False
    below_high: bool = False
    nullable: bool = False
    """The setting may be null."""

    @property
    def allowed(self) -> str:
        """The allowed values in words; "" for kinds that need no explanation."""
        parts: list[str] = []
        if self.kind == "number":
            bounds = {
                "above" if self.above_low else "from": self.low,
                "below" if self.below_high else "to": self.high,
            }
            figures = [
                f" {word} {bound:,.16g}" for word, bound in bounds.items() if bound is not None
            ]
            noun = "a whole number" if self.whole else "a number"
            parts = ["".join([noun, *figures]), *map(str, self.words)]
        elif self.kind == "text":
            parts = [", ".join(map(str, self.words))] if self.words else []
        return " or ".join([*parts, *(["empty: none"] if self.nullable else [])])


@dataclass(frozen=True, kw_only=True)
class SettingInfo:
    """One setting as tables, GUI form and docs show it; see `declare.setting` for the conditions."""

    key: str
    default: Any
    unit: str
    doc: str
    form: Form
    detail: str = ""
    source: str = ""
    own_label: str = ""
    only_for: Needs = field(default_factory=dict)
    not_for: Needs = field(default_factory=dict)
    idle_with: Needs = field(default_factory=dict)
    enforced: bool = False
    path: bool = False
    hub: bool = False
    headline: bool = False
    handling: Handling = Handling()

    @property
    def section(self) -> str:
        return self.key.partition(".")[0]

    @property
    def label(self) -> str:
        """The name for display, without section and unit: "Min SNR gamma", "Save every N steps"."""
        if self.own_label:
            return self.own_label
        words = self.key.partition(".")[2].split("_")
        if self.unit and len(words) > 1 and words[-1] == self.unit.lower():
            words.pop()  # the unit is shown beside the value
        text = " ".join(_SPELLED.get(word, word) for word in words).replace("every ", "every N ")
        has_own_case = any(
            letter.isupper() for letter in text.split()[0]
        )  # rsLoRA keeps its small r
        return text if has_own_case else text[:1].upper() + text[1:]

    def unused(self, values: Mapping[str, Any]) -> str:
        """Return the reason why the setting has no effect with these values of others, else "".

        `values` are by `section.name`; a missing value or `auto` may still become any value.
        """
        decided = {key: value for key, value in values.items() if value != "auto"}
        for key, allowed in self.only_for.items():
            if key in decided and decided[key] not in allowed:
                alternatives = " or ".join(map(typed, allowed))
                return f"needs {key}={alternatives}, but it is {_said(decided[key])}"
        for key, refused in self.not_for.items():
            if key in decided and decided[key] in refused:
                return f"without effect while {key} is {_said(decided[key])}"
        if self.idle_with and all(decided.get(key) in no for key, no in self.idle_with.items()):
            idle = (f"{key} is {_said(decided[key])}" for key in self.idle_with)
            return f"without effect while {' and '.join(idle)}"
        return ""


def _said(value: Any) -> str:
    """Return a value as a sentence says it: what JSON has no word for by words."""
    if value is None:
        return "not set"
    return ("off", "on")[value] if isinstance(value, bool) else typed(value)


@cache
def all_settings() -> tuple[SettingInfo, ...]:
    """Return every setting in declaration order, keyed `section.name`."""
    settings = []
    for key, schema in setting_schemas().items():
        section, name = key.split(".")
        info = cast(type[Section], Config.model_fields[section].annotation).model_fields[name]
        # `declare.setting` puts the rest of the declaration into these two places.
        extra = cast(dict[str, Any], info.json_schema_extra)
        (handling,) = (each for each in info.metadata if isinstance(each, Handling))
        settings.append(
            SettingInfo(
                key=key,
                default=info.default,
                doc=info.description or "",
                form=_form_of(schema),
                handling=handling,
                **extra,
            )
        )
    return tuple(settings)


def setting_info(key: str) -> SettingInfo:
    """Return the setting called `section.name`."""
    return _by_key()[key]


def validation_users() -> tuple[str, ...]:
    """Return the settings with which validations influence the training."""
    return tuple(info.key for info in all_settings() if info.handling.uses_validation)


@cache
def _by_key() -> Mapping[str, SettingInfo]:
    return {info.key: info for info in all_settings()}


def setting_schemas() -> dict[str, dict[str, Any]]:
    """Return the JSON Schema of every setting, by `section.name`."""
    schema = Config.model_json_schema()
    schemas: dict[str, dict[str, Any]] = {}
    for section, reference in schema["properties"].items():
        name = reference["$ref"].rpartition("/")[2]
        for key, value in schema["$defs"][name]["properties"].items():
            # Without pydantic's titles, and with a `$ref` to the records of a mapping inlined.
            schemas[f"{section}.{key}"] = standalone = _without_title(value)
            entries = value.get("additionalProperties")
            if isinstance(entries, dict) and "$ref" in entries:
                entry = schema["$defs"][entries["$ref"].rpartition("/")[2]]
                records = {key: entry[key] for key in ("type", "additionalProperties")}
                fields = {name: _without_title(one) for name, one in entry["properties"].items()}
                standalone["additionalProperties"] = {**records, "properties": fields}
    return schemas


def _without_title(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {part: value for part, value in schema.items() if part != "title"}


def _form_of(schema: Mapping[str, Any]) -> Form:
    """Return the form of a field's schema; raises ValueError for a union of two open types."""
    words: list[Word] = []
    open_ended, nullable = [], False
    for part in schema.get("anyOf", [schema]):
        match part:
            case {"type": "null"}:
                nullable = True
            case {"type": "boolean"}:
                words += [True, False]
            case {"const": word}:
                words.append(word)
            case {"enum": choices}:
                words += choices
            case _:
                open_ended.append(part)
    if not open_ended:
        if words == [True, False]:
            return Form(kind="switch", nullable=nullable)
        return Form(kind="choice", words=tuple(words), nullable=nullable)
    (part,) = open_ended
    return Form(
        kind=_KINDS[part["type"]],
        words=tuple(words),
        whole=part["type"] == "integer",
        low=part.get("minimum", part.get("exclusiveMinimum")),
        high=part.get("maximum", part.get("exclusiveMaximum")),
        above_low="exclusiveMinimum" in part,
        below_high="exclusiveMaximum" in part,
        nullable=nullable,
    )


_SPELLED = {
    "conv": "convolution",
    "dir": "folder",
    "ema": "EMA",
    "grad": "gradient",
    "init": "start",
    "multires": "multi-resolution",
    "vae": "VAE",
    "p2": "P2",
    "snr": "SNR",
    "lora": "LoRA",
    "lokr": "LoKr",
    "dora": "DoRA",
    "rslora": "rsLoRA",
    "vram": "VRAM",
}


# ---- values by key

# The setting that maps names, of subfolders, to records.
FOLDERS = "data.folders"


def setting_of(key: str) -> str:
    """Return the setting that contains a key: `data.folders` for `data.folders.NAME.repeats`."""
    name, field = _folder_field(key)
    return FOLDERS if name and field in FolderSettings.model_fields else key


def _folder_field(key: str) -> tuple[str, str]:
    """Return NAME and FIELD of `data.folders.NAME.FIELD`, empty texts for any other key."""
    inside = key.removeprefix(f"{FOLDERS}.")
    name, _, field = inside.rpartition(".") if inside != key else ("", "", "")
    return name, field


def overlaid(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two layers of values; `upper` wins.

    A key `data.folders.NAME.repeats` changes one field of the merged `data.folders` and keeps the others.
    """
    merged = dict(lower)
    for key, value in upper.items():
        if setting_of(key) == key:
            merged[key] = value
            continue
        (name, field), entries = _folder_field(key), merged.get(FOLDERS, {})
        # A value that is not a mapping stays as it is: validation refuses it with a better message.
        if isinstance(entries, Mapping) and isinstance(entries.get(name, {}), Mapping):
            merged[FOLDERS] = {**entries, name: {**entries.get(name, {}), field: value}}
    return merged


@cache
def setting_keys() -> tuple[str, ...]:
    """Return all `section.name` keys."""
    return tuple(info.key for info in all_settings())


def flatten(config: Config) -> dict[str, Any]:
    """Return {"section.name": JSON value} for every setting."""
    sections = config.model_dump(mode="json")
    return {
        f"{section}.{name}": value
        for section, values in sections.items()
        for name, value in values.items()
    }


def value_of(config: Config, key: str) -> Any:
    """Return the value of a setting that a table names by `section.name`; known settings are attributes."""
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def with_value(config: C, key: str, value: Any) -> C:
    """Return the settings with another value, unchecked: `build_run_config` checks all when planning ends."""
    section, name = key.split(".")
    changed_section = getattr(config, section).model_copy(update={name: value})
    return config.model_copy(update={section: changed_section})


def build_config(values: Mapping[str, Any]) -> Config:
    """Build a Config from {"section.name": value}; raises one RequestError that names all mistakes."""
    return _validated(values, Config)


def build_run_config(values: Mapping[str, Any]) -> RunConfig:
    """Build the settings of a planned run; raises one RequestError that names all mistakes, `auto` too."""
    return _validated(values, RunConfig)


def _validated(values: Mapping[str, Any], kind: type[C]) -> C:
    check_keys(values)
    refuse_secrets(values)
    _refuse_empty_paths(values)
    nested: dict[str, dict[str, Any]] = {}
    for key, value in overlaid({}, without_retired(values)).items():
        section, name = key.split(".")
        nested.setdefault(section, {})[name] = value
    try:
        config = kind.model_validate(nested)
    except ValidationError as error:
        raise RequestError(_explain(error), fix=_fix(error)) from None
    by_name, sentences = by_key(config), list[str]()
    for info in all_settings():
        value = by_name[info.key]
        if info.enforced and value != info.default and (reason := info.unused(by_name)):
            is_idle = "is " if reason.startswith("without") else ""
            sentences.append(f"{info.key}={typed(value)} {is_idle}{reason}: leave {info.key} out.")
    if sentences := [*sentences, *contradictions(config)]:
        raise RequestError(" ".join(sentences), fix="change these values")
    return config


def _refuse_empty_paths(values: Mapping[str, Any]) -> None:
    """Raise RequestError for a path without a character: to the system it is the folder that a program runs in."""
    for info in all_settings():
        given = values.get(info.key) if info.path else None
        parts = given if isinstance(given, list | tuple) else [given]
        if any(isinstance(part, str) and not user_path(part) for part in parts):
            raise RequestError(
                f"{info.key} is empty, which is not a path",
                fix=f"give one, or leave {info.key} out",
            )


SEE_ALL_SETTINGS = "see `lora-train plan DATASET --all` for all settings"
RetiredEffect = Literal["rounding", "result", "refused"]
# Settings of earlier versions: read from old runs and settings files without effect. Each with what of a run is
# another without it, and the values for which nothing is.
RETIRED_SETTINGS: Mapping[str, tuple[RetiredEffect, tuple[object, ...]]] = {
    "memory.kept_share": ("rounding", ("auto", 0.0)),
    "memory.modulation_cache": ("rounding", ("auto", False)),
    "memory.base_matmul": ("rounding", ("auto", "dequantized")),
    "hardware.cuda_graphs": ("rounding", ("auto", False)),
    "adapter.init": ("refused", ("default",)),
    "train.tighten_on_spike": ("result", (False,)),
    "train.lower_on_plateau": ("result", (False,)),
}
# Values that settings had in earlier versions, each with the one that it is read as.
RETIRED_VALUES: Mapping[str, Mapping[object, object]] = {
    "memory.gradient_checkpointing": {True: "full", False: "none"},
}


def refuse_removed(values: Mapping[str, Any]) -> None:
    """Raise RequestError for a value of an earlier version without which the result would be another."""
    if "adapter.init" in retired_in(values, "refused"):
        raise RequestError(
            f"adapter.init={values['adapter.init']} is of an earlier version: adapters start at zero now",
            fix="leave adapter.init out and start a new run",
        )


def retired_in(values: Mapping[str, Any], effect: RetiredEffect) -> list[str]:
    """Return the settings of earlier versions whose value here had this effect, which is gone."""
    return [
        key
        for key, (lost, idle) in RETIRED_SETTINGS.items()
        if lost == effect and key in values and values[key] not in idle
    ]


def without_retired(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings without those of RETIRED_SETTINGS, each of RETIRED_VALUES replaced."""
    current = {key: value for key, value in values.items() if key not in RETIRED_SETTINGS}
    for key in RETIRED_VALUES.keys() & current.keys():
        if isinstance(current[key], bool | str):
            current[key] = RETIRED_VALUES[key].get(current[key], current[key])
    return current


def check_keys(values: Mapping[str, Any]) -> None:
    """Raise RequestError for unknown keys, with the nearest setting of each."""
    if unknown := " ".join(filter(None, map(unknown_setting, values))):
        raise RequestError(unknown, fix=SEE_ALL_SETTINGS)


def unknown_setting(key: str) -> str:
    """Return a sentence on a key that is not a setting, with the nearest setting; "" for a setting."""
    if setting_of(key) in setting_keys() or setting_of(key) in RETIRED_SETTINGS:
        return ""
    return f"unknown setting {key!r}.{did_you_mean(key, _near_keys(key))}"


def _near_keys(key: str) -> tuple[str, ...]:
    """Return the candidates for a misspelt key: all settings, or the fields of the setting it starts with."""
    if not key.startswith(f"{FOLDERS}."):
        return setting_keys()
    name, field = _folder_field(key)
    return tuple(f"{FOLDERS}.{name or field}.{each}" for each in FolderSettings.model_fields)


def refuse_secrets(values: Mapping[str, Any]) -> None:
    """Raise RequestError for settings that hold a token: settings are written into run and LoRA files."""
    if keys := secret_keys(values):
        raise RequestError(
            f"{', '.join(keys)} contains a token or a password",
            fix="remove it; put tokens into the environment (HF_TOKEN) or use `hf auth login`",
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


# How a value is written that pydantic calls by its type in Python.
_FORMS = {
    "tuple_type": 'input should be a list, such as ["one", "two"] or [1, 2]',
    "dict_type": 'input should be an object, such as {"name": 1}',
}


def _fix(error: ValidationError) -> str:
    """Return what to do about one wrong value, or several."""
    settings = {problem["loc"][:2] for problem in error.errors(include_url=False)}
    return "change this value" if len(settings) == 1 else "change these values"


# What a value is not, where the form of its setting says what it can be.
_NOT_ALLOWED = re.compile(
    r"(int|float|bool)_(parsing|type|from_float|parsing_size)|finite_number|(greater|less)_than(_equal)?|literal_error"
)


def _explain(error: ValidationError) -> str:
    messages_by_setting: dict[str, list[str]] = {}
    not_allowed: dict[str, str] = {}
    for problem in error.errors(include_url=False):
        path = [str(part) for part in problem["loc"]]
        key = ".".join(path[:2])
        if key == FOLDERS and len(path) > 3:  # data, folders, NAME, field
            key = ".".join(path[:4])
        where = f"{key}={problem['input']!r}: " if key else ""
        if _NOT_ALLOWED.fullmatch(problem["type"]) and (allowed := _allowed(key, problem["input"])):
            not_allowed[where] = f"{key}={problem['input']!r} is not possible, only {allowed}"
        message = _FORMS.get(problem["type"], problem["msg"].removeprefix("Value error, "))
        if problem["type"] == "extra_forbidden":
            message = f"unknown.{did_you_mean(key, _near_keys(key))}"
        messages_by_setting.setdefault(where, []).append(message[:1].lower() + message[1:])
    return "; ".join(
        not_allowed.get(where) or where + " or ".join(messages)
        for where, messages in messages_by_setting.items()
    )


def _allowed(key: str, value: object) -> str:
    """Return what a setting can be, in words; "" where its form does not say it, and for an undecided `auto`."""
    form = next((info.form for info in all_settings() if info.key == key), None)
    if form is None or value == "auto":
        return ""
    match form.kind:
        case "number":
            return replace(form, nullable=False).allowed
        case "choice":
            return f"one of {', '.join(map(str, form.words))}"
        case "switch":
            return "true or false"
    return ""
