"""docs/troubleshooting.md quotes texts that the program really prints, and names settings that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from lora_trainer.config.config import flatten
from lora_trainer.config.running import Config
from scripts.error_table import error_texts, page, template, trees

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
OURS = PAGE.partition("\n## From other programs\n")[0]
QUOTED = re.findall(r"^\| `([^`]+)` \|", OURS, re.MULTILINE)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Return every string of the code and of its table of findings, with `…` for what a run fills in."""
    nodes = (node for tree in trees() for node in ast.walk(tree))
    findings = (ROOT / "lora_trainer/dataset/finding_texts.toml").read_text(encoding="utf-8")
    return [
        *(template(node) for node in nodes if isinstance(node, ast.Constant | ast.JoinedStr)),
        *(re.sub(r"{[^}]*}", "…", text) for text in re.findall(r'^what = "(.*)"$', findings, re.M)),
    ]


def occurs(quoted: str, texts: list[str]) -> bool:
    """Say whether the parts of a quotation stand in one text of the code, in this order."""
    parts = [re.escape(part) for part in quoted.split("…")]
    return any(re.search(".*".join(parts), text, re.DOTALL) for text in texts)


def test_every_quoted_text_is_one_of_the_code(texts: list[str]) -> None:
    assert len(QUOTED) > 60
    assert not [quoted for quoted in QUOTED if not occurs(quoted, texts)]
    assert not occurs("this text … is not printed", texts)


def test_the_settings_it_names_exist() -> None:
    sections = {key.partition(".")[0] for key in flatten(Config())}
    named = set(re.findall(r"\b([a-z]+\.[a-z_]+)\b(?![/.])", PAGE))
    keys = {name for name in named if name.partition(".")[0] in sections}
    assert keys and keys <= flatten(Config()).keys()


def test_the_table_of_all_errors_has_text_fix_and_code() -> None:
    errors = {error.text: error for error in error_texts()}
    assert len(errors) > 250
    gated = errors["… … is gated"]
    assert gated.exit_code == "4" and gated.fix.startswith("accept its licence")
    assert "| 2 | `unknown preset ….… Presets are …` |" in page()
