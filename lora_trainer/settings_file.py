"""Settings files that users write: JSON or TOML, nested sections or flat `section.key` names.

Input is a path; output is {"section.key": value} with the line and column of each key. Each mistake is a
RequestError that names file, line and column, and for an unknown key the nearest setting. A file may also
hold its settings under `settings`, as `plan --json`, run.json and shared presets do.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_trainer.config import Config, near_keys, setting_keys, setting_of
from lora_trainer.errors import RequestError, did_you_mean
from lora_trainer.files import json_object

WRAPPER = "settings"
_JSON_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]:,]')
_TOML_HEADER = re.compile(r"^\s*\[([^\[\]]+)\]")
_TOML_KEY = re.compile(r"""^\s*((?:[\w-]+|"[^"]*"|'[^']*')(?:\s*\.\s*(?:[\w-]+|"[^"]*"))*)\s*=""")
_TOML_PLACE = re.compile(r"\(at line (\d+), column (\d+)\)")


@dataclass(frozen=True, kw_only=True)
class SettingsFile:
    """The settings of a file; `places` has file:line:column of each key, `family` the file's family if any."""

    values: Mapping[str, Any]
    places: Mapping[str, str]
    family: str | None = None


def read_settings_file(file: Path) -> SettingsFile:
    """Read a settings file; raises RequestError for an unreadable file, bad syntax and unknown keys."""
    try:
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(
            f"cannot read {file}: {error}", fix="give a readable UTF-8 file"
        ) from None
    return read_settings_text(text, name=str(file), toml=file.suffix.lower() == ".toml")


def read_settings_text(text: str, *, name: str, toml: bool = False) -> SettingsFile:
    """Read the text of a settings file called `name`; raises RequestError as for a file."""
    data = _toml_object(text, name) if toml else json_object(text, name=name)
    places = {
        key.removeprefix(f"{WRAPPER}."): f"{name}:{_line_and_column(text, offset)}"
        for key, offset in (_toml_keys(text) if toml else _json_keys(text))
    }
    family = data.get("family")
    wrapped = data.get(WRAPPER)
    if isinstance(wrapped, dict):
        settings = {key: _unwrapped(value) for key, value in wrapped.items()}
    else:
        settings = {key: value for key, value in data.items() if key not in ("$schema", "family")}
    values = _flat(settings, places, name)
    return SettingsFile(
        values=values,
        places={key: places.get(key, name) for key in values},
        family=family if isinstance(family, str) else None,
    )


def _unwrapped(value: Any) -> Any:
    """Return the value inside `plan --json`'s {"value": ..., "origin": ...}, any other value unchanged."""
    wrapped = isinstance(value, dict) and {"value", "origin"} <= value.keys()
    return value["value"] if wrapped else value


def _flat(settings: Mapping[str, Any], places: Mapping[str, str], name: str) -> dict[str, Any]:
    """Return {"section.key": value}; raises one RequestError that names all mistakes."""
    keys, values, wrong = setting_keys(), dict[str, Any](), list[str]()
    for key, value in _pairs(settings):
        position = places.get(key, name)
        if setting_of(key) not in keys:
            wrong.append(f"{position}: unknown setting {key!r}.{did_you_mean(key, near_keys(key))}")
        elif key in values:
            wrong.append(f"{position}: {key!r} is set twice.")
        values[key] = value
    if wrong:
        raise RequestError(" ".join(wrong), fix="see `lora-train plan DATASET` for all settings")
    return values


def _pairs(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in settings.items():
        if key in Config.model_fields and isinstance(value, dict):
            yield from ((f"{key}.{name}", _unwrapped(inner)) for name, inner in value.items())
        else:
            yield key, value


def _toml_object(text: str, name: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        match = _TOML_PLACE.search(str(error))
        position = f"{name}:{match[1]}:{match[2]}" if match else name
        message = _TOML_PLACE.sub("", str(error)).strip()
        raise RequestError(f"{position}: not TOML: {message}", fix="correct that line") from None
    except RecursionError:
        raise RequestError(f"{name}: nested too deeply", fix="correct the file") from None


def _json_keys(text: str) -> Iterator[tuple[str, int]]:
    """Yield each key's dotted path and offset in valid JSON text.

    json.loads reports no offsets, so the tokens are scanned a second time.
    """
    path: list[str] = []
    kinds: list[str] = []
    awaits_key = False
    for token in _JSON_TOKEN.finditer(text):
        mark = token[0]
        if mark in "{[":
            kinds.append(mark)
            path.append("")
            awaits_key = mark == "{"
        elif mark in "}]":
            kinds.pop()
            path.pop()
        elif mark == ",":
            awaits_key = kinds[-1] == "{"
        elif mark != ":" and awaits_key:
            path[-1] = json.loads(mark)
            awaits_key = False
            yield ".".join(part for part in path if part), token.start()


def _toml_keys(text: str) -> Iterator[tuple[str, int]]:
    """Yield dotted keys and offsets line by line.

    A line inside a multi-line string may look like a key; its offset is never looked up.
    """
    section, offset = "", 0
    for line in text.splitlines(keepends=True):
        if header := _TOML_HEADER.match(line):
            section = f"{_plain(header[1])}."
        elif key := _TOML_KEY.match(line):
            yield section + _plain(key[1]), offset + key.start(1)
        offset += len(line)


def _plain(key: str) -> str:
    return re.sub(r"[\s\"']", "", key)


def _line_and_column(text: str, offset: int) -> str:
    line = text.count("\n", 0, offset) + 1
    return f"{line}:{offset - (text.rfind(chr(10), 0, offset) + 1) + 1}"
