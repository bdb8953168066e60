"""The values of settings as text in a field of a page, and back.

Inputs: a setting's declaration, a JSON value or what somebody typed. Every value that a setting can
have comes back as it was; what a text cannot mean is left to `build_config`, which says why.
"""

from __future__ import annotations

import json
import re
from typing import Any

from lora_trainer.common.files import json_object
from lora_trainer.config.config import SettingInfo, parse_assignment

_DECIMAL_COMMA = re.compile(r"-?\d+,\d+(?:[eE]-?\d+)?")
_THOUSANDS = re.compile(r"-?[1-9]\d{0,2}(?:([,.])\d{3})(?:\1\d{3})*")


def text_of(info: SettingInfo, value: Any) -> str:
    """Return the text that a field shows for a JSON value of the setting."""
    match info.form.kind:
        case "list" if isinstance(value, list | tuple):
            lines = "\n".join(map(str, value))
            # A list with an empty item or a line break in one is shown as JSON, which keeps it.
            exact = "\r" not in lines and _items(lines) == list(value)
            return lines if exact else _json(value)
        case "mapping":
            return _json(value)
        case "text" | "number" if value is None:
            return ""
        case "text":
            return str(value)
        case "number":
            whole = isinstance(value, float) and value.is_integer() and abs(value) < 2**53
            return value if isinstance(value, str) else json.dumps(int(value) if whole else value)
        case _:
            return json.dumps(value)


def value_of(info: SettingInfo, text: str) -> Any:
    """Return the JSON value that a text stands for; raises RequestError for what is not JSON."""
    form = info.form
    if form.nullable and not text.strip():
        return None
    match form.kind:
        case "text":
            return text
        case "list":
            return _items(text)
        case "mapping":
            return json_object(text, name=info.key) if text.strip() else {}
        case _:  # as `--set` reads it, so that a refusal reads the same
            typed = text.strip()
            if form.kind == "number":
                typed = _with_point(typed, whole=form.whole)
            return parse_assignment(f"{info.key}={typed}")[1]


def _with_point(text: str, *, whole: bool) -> str:
    """Return a number as Python reads it: half of the world writes 0,002, and 2,400 or 2.400 for a whole number."""
    if whole and _THOUSANDS.fullmatch(text):
        return text.replace(",", "").replace(".", "")
    return text.replace(",", ".") if not whole and _DECIMAL_COMMA.fullmatch(text) else text


def _items(text: str) -> list[Any]:
    """Return the lines that are not empty, or the items of a JSON list."""
    if text.lstrip().startswith("["):
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            pass  # "[portrait] of a cat" is a line
        else:
            if isinstance(found, list):
                return found
    return [line for line in text.split("\n") if line.strip()]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2)
