"""Every `lora-train` command in a block of the documentation is one that the command line accepts."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from lora_trainer.cli import main
from lora_trainer.config import config
from lora_trainer.config.config import parse_assignment

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
BLOCK = re.compile(r"^ *```(?:sh|powershell)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)


def commands(page: Path) -> list[list[str]]:
    """Return the words of each command of the program in a page, those after `&&` too."""
    lines = (
        part.strip()
        for block in BLOCK.findall(page.read_text(encoding="utf-8"))
        for line in block.replace("\\\n", " ").splitlines()
        for part in line.partition(" #")[0].split("&&")
    )
    words = [shlex.split(line) for line in lines if line.startswith("lora-train ")]
    return [each[1:] for each in words]


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda p: p.name)
def test_commands_of_a_page_are_accepted(page: Path) -> None:
    for words in commands(page):
        main.app.parse_args(words, exit_on_error=False, print_error=False)  # raises CycloptsError
        settings = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
        config.check_keys(dict(map(parse_assignment, settings)))


def test_there_are_commands_to_check() -> None:
    assert sum(len(commands(page)) for page in PAGES) > 20
