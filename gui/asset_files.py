"""Reads the scripts and style sheets of the pages, which lie beside this module."""

from __future__ import annotations

from pathlib import Path

_FOLDER = Path(__file__).with_name("assets")


def asset(name: str) -> str:
    """Return the text of a script or style sheet."""
    return (_FOLDER / name).read_text(encoding="utf-8")


def style_sheets() -> list[Path]:
    """Return the style sheets, which every page gets."""
    return sorted(_FOLDER.glob("*.css"))
