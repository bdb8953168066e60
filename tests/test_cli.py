"""The command line as scripts rely on it: names, exit codes, JSON keys, one line per error, no torch."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.common.files import CappedFolder
from tests.fakes.lora_library import lora
from tests.fakes.runs import ROOT, Toy, python, run_cli, start, toy

FACTS = tomllib.loads(Path(__file__).with_name("command_line.toml").read_text(encoding="utf-8"))
FLAGS, REFUSED = FACTS["flags"], FACTS["refused"]
TOOLS = {"convert", "describe", "extract", "merge", "resize"}
WITHOUT_TORCH = """
import json, sys
from lora_trainer.cli.main import run

for arguments in json.loads(sys.argv[1]):
    code = run(arguments)
    heavy = sorted({"torch", "diffusers", "transformers", "accelerate"} & sys.modules.keys())
    if code or heavy:
        sys.exit(f"{arguments}: exit code {code}, imported {heavy}")
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """A dataset; the base is the embedded one, so that nothing here needs torch."""
    return toy(tmp_path_factory.mktemp("cli"))


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Command:
    """The command line in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def run(self, *words: str | Path) -> tuple[int, str, str]:
        """Return exit code, stdout and stderr of a command."""
        code = run_cli([str(word) for word in words])
        return code, *self.capsys.readouterr()

    def refused(self, *words: str | Path) -> tuple[int, str]:
        """Return exit code and the error, having checked that it is one line and nothing else."""
        code, out, error = self.run(*words)
        assert out == "" and error.startswith("error: ") and error.count("\n") == 1, error
        return code, error

    def json(self, *words: str | Path) -> dict[str, Any]:
        code, out, error = self.run(*words)
        assert (code, error) == (0, "")
        value = json.loads(out)
        assert isinstance(value, dict)
        return value


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys)


def flags(text: str) -> set[str]:
    rows = re.findall(r"^│ (?:\* )?\s*((?:-\S+ ?)+)", text, flags=re.MULTILINE)
    return {flag.strip("()") for row in rows for flag in row.split() if flag.startswith("--")}


# ---- names


@pytest.mark.parametrize("name", FLAGS)
def test_the_flags_of_a_command_are_these(name: str, command: Command) -> None:
    code, out, _ = command.run(*name.split(), "--help")
    assert code == 0
    assert flags(out) - {"--help", "--version"} == set(FLAGS[name].split())
    if name:
        return
    commands = out[out.index("Commands") : out.index("Arguments")]
    lines = re.findall(r"^│ ([a-z]\S*)  +(\S+ \S+)", commands, flags=re.MULTILINE)
    assert {name for name, _ in lines} == FLAGS.keys() - {""}
    assert ("queue", "Queue trainings,") in lines and ("plan", "Predict memory,") in lines


def test_the_help_imports_only_what_it_shows() -> None:
    program = """
import sys
from lora_trainer.cli.main import run

code = run(["--help"])
heavy = {"numpy", "PIL", "pydantic", "psutil", "lora_trainer.config.config", "lora_trainer.queue.commands"}
sys.exit(code or ", ".join(sorted(heavy & sys.modules.keys())) or 0)
"""
    assert python(program).stderr == ""


def test_what_only_looks_around_imports_no_torch(place: Toy, tmp_path: Path) -> None:
    cache = ["--set", f"data.cache_dir={tmp_path / 'cache'}"]
    dataset = str(place.dataset)
    commands = [
        ["--version"],
        ["presets"],
        ["doctor"],
        ["queue", "list"],
        ["plan", dataset, "--vram", "12", *cache],
        ["check", dataset, *cache],
        ["inspect", str(lora(tmp_path / "lora.safetensors"))],
        ["import", str(ROOT / "tests/importing/corpus/sd-scripts/few/usual.toml")],
        *([tool, "--help"] for tool in sorted(TOOLS)),
        [dataset, "--dry-run", *cache],
    ]
    done = python(WITHOUT_TORCH, json.dumps(commands))
    assert (done.returncode, done.stderr) == (0, "")


# ---- refusals


@pytest.mark.parametrize("line", REFUSED)
def test_what_cannot_be_is_one_line_with_the_exit_code(
    line: str, place: Toy, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("empty").mkdir()
    launcher, words = re.fullmatch(r"((?:[A-Z_]+=\S+ )*)(.*)", line).groups()  # type: ignore[union-attr]  # of any line
    for assignment in launcher.split():
        monkeypatch.setenv(*assignment.split("="))
    code, named = REFUSED[line]
    ended, error = command.refused(*words.replace("DATASET", str(place.dataset)).split())
    assert ended == code and named in error
    assert "--set" not in words or "Fix: " in error
    assert [path.name for path in Path().iterdir()] == ["empty"]


def test_the_process_ends_with_the_exit_code_and_one_line() -> None:
    process = start("plan", "absent")
    out, error = process.communicate(timeout=60)
    assert (process.returncode, out, error.count("\n")) == (3, "", 1)


def test_a_flag_is_a_short_name_of_its_setting(place: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    train = "lora_trainer.api.train"
    monkeypatch.setattr(train, lambda _, *, settings, **__: asked.append(settings))
    flags = {"base": "base.model", "output": "output.folder", "name": "output.name"}
    words = [word for flag in flags for word in (f"--{flag}", f"my-{flag}")]
    assert run_cli([str(place.dataset), *words]) == 0
    assert asked == [{key: f"my-{flag}" for flag, key in flags.items()}]


def test_a_dry_run_makes_no_folder_and_a_setting_given_twice_alike_is_given_once(
    place: Toy, command: Command
) -> None:
    same = ["--steps", "5", "--set", "train.steps=5"]
    code, out, _ = command.run(place.dataset, "--dry-run", *same)
    assert code == 0
    assert "predicted peak" in out
    assert list(Path().iterdir()) == []


def test_doctor_empties_the_cache_that_is_named(tmp_path: Path, command: Command) -> None:
    root = tmp_path / "cache"
    CappedFolder(root=root, limit_bytes=1).create()
    entry = root / "latents" / "aa" / f"{'a' * 64}.safetensors"
    entry.parent.mkdir(parents=True)
    entry.write_bytes(b"12345")
    there = ["--clear-cache", "--set", f"data.cache_dir={root}"]
    found = command.json("doctor", *there, "--json")
    assert found == {"folder": str(root), "files": 1, "bytes": 5}
    assert "removed 0 entries" in command.run("doctor", *there)[1]
    assert command.refused("doctor", "--set", f"data.cache_dir={root}")[0] == 2
    assert command.refused("doctor", "--clear-cache", "--set", f"data.cache_dir={tmp_path}")[0] == 4
    report = command.json("doctor", "--json")
    assert report["accelerator"] and report["cpu_threads"]["reason"]
    assert "torch" in report["packages"]
