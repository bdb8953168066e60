"""Imported settings as a settings file with the origin of each in it, and what was not carried over.

Output is TOML, with all that was found as comments, or JSON, which has no room for them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from lora_trainer.importing.foreign import Imported


def settings_toml(imported: Imported) -> str:
    """Return the settings as TOML, and as comments where they come from and what is not in them."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in imported.values.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    lines = [f"# {line}" for line in remarks(imported)]
    for section, values in sections.items():
        tables = {name: value for name, value in values.items() if isinstance(value, Mapping)}
        lines += ["", f"[{section}]"]
        lines += [
            f"{name} = {_toml(value)}{_source(imported, f'{section}.{name}')}"
            for name, value in values.items()
            if name not in tables
        ]
        for name, entries in tables.items():
            lines += _tables(f"{section}.{name}", entries, imported)
    return "\n".join(lines).strip() + "\n"


def settings_json(imported: Imported) -> str:
    """Return the settings as JSON."""
    return json.dumps(dict(imported.values), indent=2, ensure_ascii=False) + "\n"


def report(imported: Imported) -> str:
    """Return where the settings come from, and what is not in them, as text."""
    rows = [_one_line(f"{key} from {source}") for key, source in imported.sources.items()]
    return "\n".join([*remarks(imported), "Settings:", *(f"  {row}" for row in rows)])


def remarks(imported: Imported) -> Iterator[str]:
    """Yield lines that say what to train on, and name each key that is not among the settings."""
    yield f"A settings file of {imported.trainer}"
    if imported.dataset is not None:
        yield _one_line(f"Train on: {imported.dataset}")
    parts = (
        ("The nearest that there is here:", imported.nearest),
        ("Without an equivalent here:", imported.without_equivalent),
        ("Nothing to set for:", imported.nothing_to_set),
    )
    for title, rows in parts:
        if rows:
            yield title
            yield from (_one_line(f"  {key} {why}") for key, why in sorted(rows.items()))
    if imported.unknown:
        yield _one_line(f"Not known: {', '.join(sorted(imported.unknown))}")


def _tables(key: str, entries: Mapping[str, Any], imported: Imported) -> Iterator[str]:
    for name, fields in entries.items():
        yield ""
        yield f"[{key}.{_text(name)}]"
        for field, value in fields.items():
            yield f"{field} = {_toml(value)}{_source(imported, f'{key}.{name}.{field}')}"


def _source(imported: Imported, key: str) -> str:
    return f"  # {_one_line(imported.sources[key])}" if key in imported.sources else ""


def _one_line(text: str) -> str:
    """Return a foreign text as a comment can hold it: TOML refuses control characters there."""
    return "".join(mark if mark.isprintable() else "\ufffd" for mark in text)


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return _text(value) if isinstance(value, str) else json.dumps(value)


def _text(value: str) -> str:
    # A JSON string is a TOML one, but for one control character that JSON leaves as it is.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
