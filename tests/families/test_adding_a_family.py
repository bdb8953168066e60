"""docs/adding-a-family.md names what is there: every member to fill, existing tests, files and scripts."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from lora_trainer import families

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "adding-a-family.md").read_text(encoding="utf-8")
TRANSFORMERS, U_NETS = PAGE.split("## U-Nets")
FLOW, U_NET = (type(families.family(name)).__bases__[0] for name in ("zimage", "sd15"))
"""The classes that a new family is a subclass of."""


def annotated(kind: type) -> set[str]:
    """Return the attributes that a family must set: annotated, and without a value."""
    names = {name for owner in kind.__mro__ for name in inspect.get_annotations(owner)}
    return {name for name in names if not hasattr(kind, name)}


@pytest.mark.parametrize(("kind", "text"), [(FLOW, TRANSFORMERS), (U_NET, U_NETS)])
def test_every_member_to_fill_is_named(kind: Any, text: str) -> None:
    wanted = annotated(kind) | kind.__abstractmethods__
    assert len(wanted) >= 2
    assert not {name for name in wanted if not re.search(rf"\b{name}\b", text)}


def test_six_files_are_written_by_hand() -> None:
    rows = PAGE.partition("Six files are written by hand:")[2].partition("\n\nEverything else")[0]
    assert rows.count("\n| `") == 6


def test_named_files_and_tests_exist() -> None:
    folders = "docs|lora_trainer|presets|scripts|tests"
    files = {
        name.replace("NAME", "zimage")
        for name in re.findall(rf"\b((?:{folders})/[\w./-]*\w)", PAGE)
    }
    assert len(files) > 10
    assert not [name for name in sorted(files) if not (ROOT / name).exists()]
    written = "".join(path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    tests = {name for name in re.findall(r"\btest_\w+\b", PAGE) if not (PAGE.count(f"{name}.py"))}
    assert len(tests) > 5
    assert not [name for name in sorted(tests) if f"def {name}(" not in written]


def test_named_members_exist() -> None:
    places = (
        f"{folder}/**/*.{end}"
        for folder in ("lora_trainer", "scripts", "tests/fakes", "tests/families")
        for end in ("py", "toml")
    )
    files = [file for place in places for file in ROOT.glob(place)]
    words = {word for file in files for word in re.findall(r"\w+", file.read_text("utf-8"))}
    named = {name for name in re.findall(r"`(\w+)`", PAGE) if not name.startswith("test_")}
    assert len(named) > 50
    assert named <= words
