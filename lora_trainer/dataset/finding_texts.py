"""Findings about a dataset by name: their severity, case in FAULTS, sentence and advice are in finding_texts.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from functools import cache
from importlib.resources import files
from typing import Any

from lora_trainer.common.events import Finding, named


def finding(name: str, file: str | None = None, /, **words: object) -> Finding:
    """Return the finding of this name about a file, or about the dataset; `words` fill its sentence."""
    row = _texts()
    for part in name.split("."):
        row = row[part]
    what, advice, code = (row.get(key, "").format(**words) for key in ("what", "advice", "code"))
    kind = name.partition(".")[0]
    return Finding(
        kind=kind, severity=row["severity"], file=file, what=what, advice=advice, code=code
    )


def finding_of_all(name: str, names: Collection[str], /, **words: object) -> list[Finding]:
    """Return one finding that counts and names some files; none where there are no such files."""
    return [finding(name, count=len(names), names=named(names), **words)] if names else []


@cache
def _texts() -> dict[str, Any]:
    return tomllib.loads(files(__package__).joinpath("finding_texts.toml").read_text("utf-8"))
