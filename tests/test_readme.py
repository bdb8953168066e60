"""README.md and the pages of docs/ say what is true: tables, tree, exit codes, the paths and commands they name."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from lora_trainer import families
from lora_trainer.cli import main
from lora_trainer.common import errors
from lora_trainer.config import config
from lora_trainer.config.running import Config
from scripts.error_table import error_texts, template, trees
from scripts.error_table import page as error_page

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")}
BLOCK = re.compile(r"^ *```(?:sh|powershell)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)


def test_commands_in_blocks_are_accepted_by_the_command_line() -> None:
    accepted = 0
    for block in (block for page in (README, *PAGES.values()) for block in BLOCK.findall(page)):
        for line in block.replace("\\\n", " ").splitlines():
            for part in line.partition(" #")[0].split("&&"):
                program, *words = shlex.split(part.strip()) or [""]
                if program == "lora-train":
                    main.app.parse_args(words, exit_on_error=False, print_error=False)
                    settings = [words[i + 1] for i, word in enumerate(words) if word == "--set"]
                    config.check_keys(dict(map(config.parse_assignment, settings)))
                    accepted += 1
    assert accepted > 20


def test_commands_are_one_line_each_and_ci_runs_that_of_the_readme() -> None:
    first, test = (
        README.partition(f"\n<!-- ci:{mark} -->\n```sh\n")[2].partition("```")[0]
        for mark in ("first", "test")
    )
    for command in (first, test):
        assert command.count("\n") == 1
        assert command.startswith('pip install "torch==2.13.0" && pip install -e ".[')
    assert first.endswith(" && lora-train datasets/example\n")
    assert test.endswith(" && scripts/test\n"), "as .ci/run expects it"
    program = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "<!-- ci:test -->" in program
    assert '".[test]"' not in program, "the install command is README's, not a copy of it"


def test_the_time_of_a_step_beside_a_bare_loop_is_that_of_the_measured_table() -> None:
    """And what others measured stands beside it, as on the page of the table."""
    table = PAGES["performance"].partition("## A step against the bare loop")[2].partition("![")[0]
    ours = [float(row.split("|")[5]) for row in table.splitlines() if "**ours**" in row]
    assert f"takes {min(ours):.2f} to {max(ours):.2f} of the time of a bare peft loop" in README
    for others in ("0.94 to 0.98", "1.00 with"):
        assert others in README and others in PAGES["performance"]


def test_the_comparison_with_others_counts_our_families_and_says_that_bases_that_edit_are_there() -> (
    None
):
    rows = [[cell.strip(" *") for cell in row.split("|")[1:3]] for row in README.splitlines()]
    ours = dict(row for row in rows if len(row) == 2)
    assert ours["families of models"] == f"{len(families.NAMES)}, images only"
    assert ours["editing models"] == ("yes" if families.editing() else "no")


def test_named_paths_and_linked_pages_exist() -> None:
    folders = "benchmarks|datasets|docs|gui|launch|lora_trainer|presets|scripts|tests"
    named = set(re.findall(rf"`((?:{folders})/[\w./-]*)`", README))
    linked = set(re.findall(r"\]\(([\w./-]+)\)", README))
    assert {"tests/planning", "docs/pictures/strip.jpg", "docs/plans.md"} <= named | linked
    assert not [name for name in sorted(named | linked) if not (ROOT / name).exists()]
    for page, text in PAGES.items():
        linked = set(re.findall(r"\]\(([\w./-]+)(?:#[\w-]*)?\)", text))
        assert not [name for name in linked if not (ROOT / "docs" / name).exists()], page
    for path in (ROOT / "docs" / "experiments").glob("*.md"):
        linked = set(re.findall(r"\]\(([\w./-]+)(?:#[\w-]*)?\)", path.read_text("utf-8")))
        assert not [name for name in linked if not (path.parent / name).exists()], path.name


def test_every_code_of_a_problem_is_explained() -> None:
    code = re.compile(r"\b[A-Z]{3}-\d{2}\b")
    findings = (ROOT / "lora_trainer/dataset/finding_texts.toml").read_text(encoding="utf-8")
    texts = [
        node.value
        for _, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
    ]
    written = {text for text in map(str, texts) if code.fullmatch(text)} | set(
        code.findall(findings)
    )
    assert set(code.findall(PAGES["faults"])) == written


def test_the_three_doors_and_the_menu_of_the_site_have_every_page_in_one_order() -> None:
    doors = PAGES["README"].split("\n## ")[1:]
    in_doors = [re.findall(r"^\| \[[^]]*\]\(([\w/-]+\.md)\)", door, re.MULTILINE) for door in doors]
    pages = sorted(f"{page}.md" for page in PAGES.keys() - {"README"})
    assert sorted(sum(in_doors, [])) == sorted([*pages, "experiments/README.md"])
    menu = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]["nav"]
    (_, home), *groups = (entry for group in menu for entry in group.items())
    assert [door.splitlines()[0] for door in doors] == [name for name, _ in groups]
    made_by_the_site = {"errors.md"}
    for door, (_, entries) in zip(in_doors, groups, strict=True):
        flat = [each if isinstance(each, str) else each["Experiments"] for each in entries]
        first = [each if isinstance(each, str) else each[0] for each in flat]
        assert [each for each in first if each not in made_by_the_site] == door
        for experiments in (each for each in flat if not isinstance(each, str)):
            there = (ROOT / "docs" / "experiments").glob("*.md")
            assert sorted(experiments) == sorted(f"experiments/{path.name}" for path in there)
    assert home == "index.md"


def test_tree_shows_what_is_there() -> None:
    tree = PAGES["architecture"].split("```")[1]
    modules = re.findall(r"^  (\S+(?: \S+)*)  ", tree, re.MULTILINE)
    named = {name.rstrip("/") for line in modules for name in line.split()}
    entries = (ROOT / "lora_trainer").iterdir()
    present = {path.name for path in entries if path.suffix == ".py" or path.is_dir()}
    assert named == present - {"__init__.py", "__pycache__"}


def test_every_exit_code_is_explained() -> None:
    rows = re.findall(r"^\| ([\d, ]+) \|", PAGES["commands"], re.MULTILINE)
    explained = {int(code) for row in rows for code in row.split(",")}
    branches = [errors.RequestError, errors.InputError, errors.MachineError, errors.TrainingStopped]
    assert explained == {0, 130, 143} | {branch.exit_code for branch in branches}


# ---- docs/troubleshooting.md quotes texts that the program really prints, and names settings that exist

PAGE = PAGES["troubleshooting"]
OURS = PAGE.partition("\n## From other programs\n")[0]
QUOTED = re.findall(r"^\| `([^`]+)` \|", OURS, re.MULTILINE)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Return every string of the code and of its table of findings, with `…` for what a run fills in."""
    nodes = (node for _, tree in trees() for node in ast.walk(tree))
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
    sections = {key.partition(".")[0] for key in config.flatten(Config())}
    named = set(re.findall(r"\b([a-z]+\.[a-z_]+)\b(?![/.])", PAGE))
    keys = {name for name in named if name.partition(".")[0] in sections}
    assert keys and keys <= config.flatten(Config()).keys()


def test_the_table_of_all_errors_has_text_fix_and_code() -> None:
    errors = {error.text: error for error in error_texts()}
    assert len(errors) > 250
    gated = errors["… … is gated"]
    assert gated.exit_code == "4" and gated.fix.startswith("accept its licence")
    assert "| 2 | `unknown preset ….… Presets are …` |" in error_page()
