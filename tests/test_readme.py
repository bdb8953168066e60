"""README.md and the pages of docs/ say what is true: tables, tree, exit codes, the paths they name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lora_trainer.common import errors
from scripts.preset_table import BEGIN, END, with_preset_tables

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PRESETS = (ROOT / "docs" / "presets.md").read_text(encoding="utf-8")


def page(name: str) -> str:
    """Return a page of the documentation."""
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def command_after(mark: str) -> str:
    """Return what the fenced block after a mark holds."""
    return README.partition(f"\n{mark}\n```sh\n")[2].partition("```")[0]


def test_preset_table_is_the_one_the_presets_give() -> None:
    assert with_preset_tables(PRESETS) == PRESETS, "run python scripts/preset_table.py"


def test_preset_table_shows_a_changed_preset(monkeypatch: pytest.MonkeyPatch) -> None:
    from scripts import preset_table

    monkeypatch.setattr(preset_table, "preset_tables", lambda: "other\n")
    assert f"{BEGIN}other\n{END}" in with_preset_tables(PRESETS)


def test_commands_are_one_line_each_and_install_from_the_clone() -> None:
    first, test = command_after("<!-- ci:first -->"), command_after("<!-- ci:test -->")
    for command in (first, test):
        assert command.count("\n") == 1
        assert command.startswith('pip install "torch==2.13.0" && pip install -e ".[')
    assert first.endswith(" && lora-train datasets/example\n")
    assert test.endswith(" && scripts/test\n"), "as .ci/run expects it"


def test_ci_runs_the_command_of_the_readme() -> None:
    program = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "<!-- ci:test -->" in program
    assert '".[test]"' not in program, "the install command is README's, not a copy of it"


def test_named_paths_exist() -> None:
    folders = "benchmarks|datasets|docs|gui|launch|lora_trainer|presets|scripts|tests"
    named = set(re.findall(rf"`((?:{folders})/[\w./-]*)`", README))
    linked = set(re.findall(r"\]\(([\w./-]+)\)", README))
    assert {"tests/planning", "docs/pictures/strip.jpg", "docs/plans.md"} <= named | linked
    assert not [name for name in sorted(named | linked) if not (ROOT / name).exists()]


def test_pages_link_to_pages_that_exist() -> None:
    for path in (ROOT / "docs").glob("*.md"):
        linked = re.findall(r"\]\(([\w./-]+)(?:#[\w-]*)?\)", path.read_text(encoding="utf-8"))
        assert not [name for name in linked if not (path.parent / name).exists()], path.name


def test_tree_shows_what_is_there() -> None:
    tree = page("architecture").split("```")[1]
    modules = re.findall(r"^  (\S+(?: \S+)*)  ", tree, re.MULTILINE)
    named = {name.rstrip("/") for line in modules for name in line.split()}
    entries = (ROOT / "lora_trainer").iterdir()
    present = {path.name for path in entries if path.suffix == ".py" or path.is_dir()}
    assert named == present - {"__init__.py", "__pycache__"}


def test_every_exit_code_is_explained() -> None:
    rows = re.findall(r"^\| ([\d, ]+) \|", page("commands"), re.MULTILINE)
    explained = {int(code) for row in rows for code in row.split(",")}
    branches = [errors.RequestError, errors.InputError, errors.MachineError, errors.TrainingStopped]
    assert explained == {0, 130, 143} | {branch.exit_code for branch in branches}
