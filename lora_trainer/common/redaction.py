"""Texts made fit to be shown or shared: without tokens, passwords and names of folders.

Removes tokens and passwords from text before it is printed, logged or shared.

Removed are tokens of well-known forms, passwords in addresses, and the values of environment variables with
names such as TOKEN or SECRET.

Texts that may leave this machine: without folders, tokens and passwords.

Input is any text a person or a program wrote, output the same made fit for a file that is shared.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

STRUCK = "[token]"
_MIN_LENGTH = 8
"""Shorter values of secret variables are not removed: they may be ordinary words of any text."""
_FORMS = (
    (re.compile(r"\b(?:hf|ghp|gho|github_pat|glpat|wandb_v1)[_-]\w{16,}"), STRUCK),
    (re.compile(r"\bsk-[\w-]{20,}"), STRUCK),
    (re.compile(r"(?<=://)[^/\s@]+@"), ""),
    (re.compile(r"(?i)([?&](?:token|access_token|api_?key|key)=)[^&\s]+"), rf"\1{STRUCK}"),
    (re.compile(r"(?i)\b(bearer\s+)[\w.~+/-]{16,}"), rf"\1{STRUCK}"),
)
_SECRET_NAME = re.compile(
    r"(?i)(?:^|_)(?:token|secret|password|passwd|pass|key|credentials?)(?:_|$)"
)


def without_secrets(text: str) -> str:
    """Return `text` with all tokens and passwords removed."""
    for pattern, substitute in _FORMS:
        text = pattern.sub(substitute, text)
    for value in secret_values(os.environ):
        text = text.replace(value, STRUCK)
    return text


def secret_values(environment: Mapping[str, str]) -> list[str]:
    """Return the values of variables with a secret's name, longest first.

    A short secret may be part of a longer one, which must be replaced before it.
    """
    values = (value.strip() for name, value in environment.items() if _SECRET_NAME.search(name))
    return sorted({value for value in values if len(value) >= _MIN_LENGTH}, key=len, reverse=True)


def secret_keys(values: Mapping[str, Any]) -> list[str]:
    """Return the keys whose value contains a secret at any depth."""
    return [
        key
        for key, value in values.items()
        if any(without_secrets(text) != text for text in _texts(value))
    ]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts([*value, *value.values()])
    elif isinstance(value, Iterable):
        for inner in value:
            yield from _texts(inner)


_START = r"(?:file:/+|/(?=[^/\s]+/)|~[\\/]|[A-Za-z]:[\\/](?!/)|\\\\|\.\.[\\/])"
_WHOLE_PATH = re.compile(_START)
_PATH_IN_TEXT = re.compile(rf"(?<![\w:/.~\\-]){_START}[^\s\"'<>|]*")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WEIGHTS = (".safetensors", ".ckpt", ".pt", ".gguf")


def public_text(value: str) -> str:
    """Reduce a path to its last name, strike paths and tokens out of text, make it valid UTF-8."""
    text = without_secrets(value.encode("utf-8", "replace").decode("utf-8"))
    if _WHOLE_PATH.match(text):
        return re.split(r"[\\/]+", text.rstrip("\\/"))[-1]
    return _PATH_IN_TEXT.sub("[path]", text)


def public_source(value: str) -> str:
    """Reduce a setting that names a model: a Hub id stays, of a file or folder the name is left.

    "owner/name" could be a folder too; it is taken for a Hub id.
    """
    text = public_text(value)
    if _HUB_ID.fullmatch(text) and not text.endswith(_WEIGHTS):
        return text
    return re.split(r"[\\/]+", text.rstrip("\\/"))[-1]
