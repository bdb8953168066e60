"""The command line as scripts rely on it: names, exit codes, JSON keys, one line per error, no torch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.common.files import CappedFolder
from tests.fakes.lora_library import lora
from tests.fakes.runs import ROOT, Toy, python, run_cli, start, toy

PLANNED = "--base --config --preset --priority --set"
WRITTEN = "--force --json --output"
ADAPTER = f"--base --format --precision {WRITTEN}"
FLAGS = {
    "": f"{PLANNED} --dry-run --kind --name --output --resume --resume-from --seed --steps --strict",
    "plan": f"{PLANNED} --all --json --kind --processes --vram",
    "caption": "--character-threshold --device --dry-run --images --json --max-tokens --model --only-missing --output"
    " --overwrite --prefix --prompt --suffix --threshold --trigger --undo",
    "check": "--base --json --set",
    "inspect": "--json",
    "convert": ADAPTER,
    "merge": f"{ADAPTER} --into --rank",
    "resize": f"{ADAPTER} --energy --rank --ratio",
    "extract": f"{WRITTEN} --energy --format --precision --rank --targets",
    "publish": "--repository --public --json",
    "describe": f"{WRITTEN} --author --description --license --tags --title --trigger",
    "import": WRITTEN,
    "validate": "--base --clip --json --set",
    "sample": "--base --output --prompt --seed --strength",
    "profile": f"{PLANNED} --json --output --steps",
    "bench": f"{PLANNED} --json --only --steps",
    "presets": "",
    "queue": "",
    "doctor": "--clear-cache --fix --json --set",
    "gui": "",
}
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


REFUSED: dict[str, tuple[int, str]] = {
    "DATASET --dry-run --set adapter.rnk=5": (2, "'adapter.rank'"),
    "DATASET --dry-run --set train.steps": (2, "'='"),
    "DATASET --dry-run --stepz 5": (2, "--stepz"),
    "DATASET --dry-run --priority fast": (2, "fast"),
    "DATASET --dry-run --config missing.toml": (2, "missing.toml"),
    "DATASET --dry-run --set train.steps=5 --set train.steps=6": (2, "given twice: 5 and 6"),
    "DATASET --dry-run --steps 5 --set train.steps=6": (2, "train.steps is given twice: 5 and 6"),
    "plan DATASET --vram 0": (2, "--vram 0"),
    "plan DATASET --vram nan": (2, "--vram nan"),
    "plan DATASET --vram 0.01": (4, "0.01 GiB free"),
    "plan DATASET --set data.resolution=1001": (2, "data.resolution=1001"),
    "plan DATASET --processes 0": (2, "--processes 0"),
    "profile DATASET --steps 0": (2, "--steps 0 is not allowed"),
    "bench DATASET --steps 0": (2, "--steps 0 is not allowed"),
    "bench DATASET --only adapter.rank": (2, "does not vary adapter.rank"),
    "plan absent": (3, "absent"),
    "check empty": (3, "empty"),
}
LAUNCHERS: dict[str, tuple[str, int, str]] = {
    "WORLD_SIZE=2": ("", 4, "accelerate launch"),
    "WORLD_SIZE=2 RANK=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2": ("", 4, "accelerate launch"),
    "WORLD_SIZE=two": ("", 4, "accelerate launch"),
    "WORLD_SIZE=2 RANK=0 LOCAL_RANK=0 LOCAL_WORLD_SIZE=2 MASTER_ADDR=here MASTER_PORT=1": (
        "profile", 2, "the launcher started 2",
    ),
}  # fmt: skip
"""What a launcher sets that contradicts itself, and of profile, which is of one process."""


@pytest.mark.parametrize("line", REFUSED)
def test_what_cannot_be_is_one_line_with_the_exit_code(
    line: str, place: Toy, command: Command
) -> None:
    Path("empty").mkdir()
    words = [str(place.dataset) if word == "DATASET" else word for word in line.split()]
    code, error = command.refused(*words)
    assert (code, REFUSED[line][1] in error) == (REFUSED[line][0], True), error
    assert "--set" not in words or "Fix: " in error


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_launcher_that_contradicts_itself_is_refused_and_one_process_profiled(
    launcher: str, place: Toy, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    for word in launcher.split():
        monkeypatch.setenv(*word.split("="))
    words, code, named = LAUNCHERS[launcher]
    ended, error = command.refused(*words.split(), place.dataset, "--output", "runs")
    assert ended == code and named in error
    assert not Path("runs").exists()


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
