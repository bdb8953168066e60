"""The command line as scripts rely on it: names, exit codes, JSON keys, one line per error, no torch."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cyclopts import App
from safetensors.numpy import save_file

from lora_trainer import api
from lora_trainer.cli import main, planning
from lora_trainer.cli.table import COMMANDS as TABLE
from lora_trainer.common.files import CappedFolder
from lora_trainer.config.config import setting_keys
from tests.fakes.runs import ROOT, Toy, python, start, toy

TOOLS = {"convert", "describe", "extract", "merge", "resize"}
COMMANDS = {
    "bench",
    "caption",
    "check",
    "doctor",
    "gui",
    "import",
    "inspect",
    "plan",
    "presets",
    "profile",
    "publish",
    "queue",
    "sample",
    "validate",
} | TOOLS
TRAIN_FLAGS = {
    "--base", "--config", "--dry-run", "--help", "--kind", "--name", "--output", "--preset", "--priority",
    "--resume", "--resume-from", "--seed", "--set", "--steps", "--strict", "--version",
}  # fmt: skip
FLAGS = {
    "plan": {
        "--base",
        "--config",
        "--json",
        "--kind",
        "--preset",
        "--priority",
        "--all",
        "--processes",
        "--set",
        "--vram",
    },
    "caption": {
        *("--character-threshold", "--device", "--dry-run", "--images", "--json", "--max-tokens"),
        *("--model", "--only-missing", "--output", "--overwrite", "--prefix", "--prompt"),
        *("--suffix", "--threshold", "--trigger", "--undo"),
    },
    "check": {"--base", "--json", "--set"},
    "inspect": {"--json"},
    "convert": {"--base", "--force", "--format", "--json", "--output", "--precision"},
    "merge": {
        *("--base", "--force", "--format", "--into", "--json", "--output", "--precision", "--rank"),
    },
    "resize": {
        *("--base", "--energy", "--force", "--format", "--json", "--output", "--precision"),
        *("--rank", "--ratio"),
    },
    "extract": {
        *("--energy", "--force", "--format", "--json", "--output", "--precision", "--rank"),
        "--targets",
    },
    "publish": {"--repository", "--public", "--json"},
    "describe": {
        *("--author", "--description", "--force", "--json", "--license", "--output", "--tags"),
        *("--title", "--trigger"),
    },
    "import": {"--force", "--json", "--output"},
    "validate": {"--base", "--clip", "--json", "--set"},
    "sample": {"--base", "--output", "--prompt", "--seed", "--strength"},
    "profile": {
        *("--base", "--config", "--json", "--output", "--preset", "--priority", "--set", "--steps"),
    },
    "bench": {
        *("--base", "--config", "--json", "--only", "--preset", "--priority", "--set", "--steps"),
    },
    "presets": set[str](),
    "queue": set[str](),
    "doctor": {"--clear-cache", "--fix", "--json", "--set"},
    "gui": set[str](),
}
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


def lora_file(path: Path) -> Path:
    name = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"
    tensors = {
        f"{name}.alpha": np.array(4, dtype=np.float32),
        f"{name}.lora_down.weight": np.ones((8, 320), dtype=np.float32),
        f"{name}.lora_up.weight": np.ones((320, 8), dtype=np.float32),
    }
    save_file(tensors, path)
    return path


def said(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of a command."""
    code = main.run([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str]:
    """Return exit code and the error, having checked that it is one line and nothing else."""
    code, out, error = said(capsys, *arguments)
    assert out == ""
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert "Traceback" not in error
    return code, error


def flags(text: str) -> set[str]:
    rows = re.findall(r"^│ (?:\* )?\s*((?:-\S+ ?)+)", text, flags=re.MULTILINE)
    return {flag.strip("()") for row in rows for flag in row.split() if flag.startswith("--")}


def answer(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    code, out, error = said(capsys, *arguments)
    assert (code, error) == (0, "")
    value = json.loads(out)
    assert isinstance(value, dict)
    return value


# ---- names


def test_the_commands_and_the_flags_of_a_training_are_these(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = said(capsys, "--help")
    commands = out[out.index("Commands") : out.index("Arguments")]
    assert code == 0
    assert set(re.findall(r"^│ ([a-z]\S*)", commands, flags=re.MULTILINE)) == COMMANDS
    assert flags(out) == TRAIN_FLAGS


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_the_flags_of_a_command_are_these(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, command, "--help")
    assert code == 0
    assert flags(out) - {"--help", "--version"} == FLAGS[command]


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_the_line_of_a_command_in_the_help_is_the_first_of_its_own(command: str) -> None:
    module, _, name = TABLE[command].where.partition(":")
    found = getattr(importlib.import_module(module), name)
    own = found.help if isinstance(found, App) else inspect.cleandoc(found.__doc__).split("\n")[0]
    assert TABLE[command].does == own


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
        ["--help"],
        ["--version"],
        ["presets"],
        ["doctor"],
        ["doctor", "--json"],
        ["queue", "list"],
        ["plan", dataset, *cache],
        ["plan", dataset, "--json", "--vram", "12", *cache],
        ["check", dataset, *cache],
        ["inspect", str(lora_file(tmp_path / "lora.safetensors"))],
        *([tool, "--help"] for tool in sorted(TOOLS)),
        [dataset, "--dry-run", *cache],
    ]
    done = python(WITHOUT_TORCH, json.dumps(commands))
    assert (done.returncode, done.stderr) == (0, "")


# ---- JSON


def test_plan_json_has_the_keys_scripts_rely_on(
    place: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = answer(capsys, "plan", place.dataset, "--json", "--set", "adapter.rank=4")
    designed = {"family", "tier", "priority", "settings", "memory", "time", "disk", "sampling"}
    assert plan.keys() == designed | {"base", "preset", "processes", "remarks"}
    memory = {"items", "peak_bytes", "limit_bytes", "fits"}
    beside = {"phase", "phases", "by_phase", "images_at_once", "host"}
    assert plan["memory"].keys() == memory | beside
    assert all(item.keys() == {"name", "bytes", "note"} for item in plan["memory"]["items"])
    assert plan["settings"].keys() == set(setting_keys())
    assert plan["settings"]["adapter.rank"]["value"] == 4
    assert plan["settings"]["adapter.rank"]["origin"] == "command line"
    for setting in plan["settings"].values():
        assert setting.keys() == {"value", "origin", "reason"}


def test_check_json_has_the_keys_scripts_rely_on(
    place: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = answer(
        capsys, "check", place.dataset, "--json", "--set", "data.resolution=512"
    )  # so that there is something to remark
    rest = {"parts", "pictures", "caption_limit"}
    assert report.keys() == {"images", "score", "findings", "buckets"} | rest
    assert report["images"] == len(report["pictures"]) == 6
    sizes = {"width_px", "height_px", "bucket", "kept", "cropped_fraction", "upscaled"}
    assert all(picture.keys() == {"file", "score"} | sizes for picture in report["pictures"])
    assert report["caption_limit"].keys() == {"tokenizer", "tokens"}
    assert 0 <= report["score"] <= 1
    assert sum(report["buckets"].values()) == 6
    assert report["findings"]
    for finding in report["findings"]:
        assert finding.keys() == {"kind", "severity", "file", "advice"} | {"what", "code"}


def test_inspect_json_has_the_keys_scripts_rely_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(capsys, "inspect", lora_file(tmp_path / "lora.safetensors"), "--json")
    assert found.keys() == {
        "family", "format", "kinds", "rank", "alpha", "modules", "norms", "metadata", "problems",
    }  # fmt: skip
    assert found["kinds"] == ["lora"]
    assert all(norm >= 0 for norm in found["norms"].values())
    assert found["norms"], "one block at least"
    assert (found["format"], found["rank"], found["alpha"], found["modules"]) == ("kohya", 8, 4, 1)


def test_plan_answers_for_a_card_that_is_not_there(
    place: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = answer(capsys, "plan", place.dataset, "--vram", "12", "--json")
    assert plan["tier"] == "10-12"
    assert plan["base"] == plan["settings"]["base.model"]["value"]
    assert plan["base"].count("/") == 1, "the family's default base, by its name on the Hub"
    assert plan["settings"]["hardware.device"]["value"] == "cuda"
    assert 0 < plan["memory"]["limit_bytes"] <= 12 * 2**30
    assert plan["memory"]["fits"]


def test_plan_without_a_card_is_for_the_embedded_base(
    place: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = answer(capsys, "plan", place.dataset, "--json", "--set", "hardware.device=cpu")
    assert (plan["base"], plan["tier"]) == ("embedded", "cpu")
    assert plan["settings"]["base.model"]["origin"] == "planner"


# ---- refusals


@pytest.mark.parametrize(
    ("assignment", "named"),
    [
        ("train.stepz=5", "'train.steps'"),
        ("adapter.rnk=5", "'adapter.rank'"),
        ("train.steps=0", "train.steps"),
        ("train.steps=1.5", "train.steps"),
        ("adapter.rank=many", "adapter.rank"),
        ("optimizer.learning_rate=NaN", "optimizer.learning_rate"),
        ("optimizer.learning_rate=-1", "optimizer.learning_rate"),
        ("output.format=pickle", "output.format"),
        ("train.steps", "'='"),
        ("data.alpha_background=no-colour", "no-colour"),
    ],
)
def test_a_setting_that_cannot_be_is_exit_code_2(
    assignment: str, named: str, place: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    code, error = refused(capsys, "plan", place.dataset, "--set", assignment)
    assert code == 2
    assert named in error
    assert "Fix: " in error


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--stepz", "5"], "--stepz"),
        (["--steps", "many"], "many"),
        (["--priority", "fast"], "fast"),
        (["--preset", "nonsense"], "nonsense"),
        (["--config", "missing.toml"], "missing.toml"),
    ],
)
def test_an_argument_that_cannot_be_is_exit_code_2(
    arguments: list[str], named: str, place: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    code, error = refused(capsys, place.dataset, "--dry-run", *arguments)
    assert code == 2
    assert named in error


@pytest.mark.parametrize("size", ["0", "-3", "nan"])
def test_a_card_of_no_size_is_exit_code_2(
    size: str, place: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refused(capsys, "plan", place.dataset, "--vram", size)[0] == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["--set", "train.steps=5", "--set", "train.steps=6"],
        ["--steps", "5", "--set", "train.steps=6"],
    ],
)
def test_a_setting_given_twice_must_agree(
    arguments: list[str], place: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    code, error = refused(capsys, place.dataset, "--dry-run", *arguments)
    assert code == 2
    assert all(word in error for word in ("train.steps", "5", "6"))


def test_a_setting_given_twice_alike_is_given_once(
    place: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    same = ["--steps", "5", "--set", "train.steps=5"]
    assert said(capsys, place.dataset, "--dry-run", *same)[0] == 0


@pytest.mark.parametrize("command", ["plan", "check"])
def test_a_dataset_that_is_not_there_or_empty_is_exit_code_3(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "absent", tmp_path / "empty"):
        code, error = refused(capsys, command, folder)
        assert code == 3
        assert folder.name in error


def test_too_many_unusable_pictures_are_exit_code_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = toy(tmp_path, images=8).dataset
    (dataset / "torn.png").write_bytes((dataset / "p0.png").read_bytes()[:100])
    code, error = refused(capsys, "plan", dataset)
    assert code == 3
    assert "torn.png" in error

    one_in_nine = ["--set", "data.max_bad_fraction=0.12"]
    assert said(capsys, "plan", dataset, *one_in_nine)[0] == 0
    code, report, _ = said(capsys, "check", dataset)
    assert code == 0, "what only looks lists them instead"
    assert "torn.png" in report


@pytest.mark.parametrize("command", ["plan", "check"])
def test_a_cache_folder_that_cannot_be_is_exit_code_4(
    command: str, place: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()  # a file stops root too
    code, error = refused(capsys, command, place.dataset, "--set", f"data.cache_dir={in_the_way}")
    assert code == 4
    assert str(in_the_way) in error


def test_profiling_is_of_one_process(
    place: Toy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "0"), ("LOCAL_RANK", "0")):
        monkeypatch.setenv(name, value)
    for name, value in (("LOCAL_WORLD_SIZE", "2"), ("MASTER_ADDR", "here"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    code, error = refused(capsys, "profile", place.dataset)
    assert code == 2
    assert "the launcher started 2" in error


@pytest.mark.parametrize(
    "told",
    [
        {"WORLD_SIZE": "2"},
        {"WORLD_SIZE": "2", "RANK": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
        {"WORLD_SIZE": "two"},
    ],
)
def test_a_launcher_that_contradicts_itself_is_refused(
    told: dict[str, str],
    place: Toy,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    code, error = refused(capsys, place.dataset, "--output", "runs")
    assert code == 4
    assert "accelerate launch" in error
    assert not Path("runs").exists()


def test_a_file_that_is_no_adapter_is_exit_code_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "not.safetensors").write_bytes(b"no adapter")
    assert refused(capsys, "inspect", tmp_path / "not.safetensors")[0] == 3
    assert refused(capsys, "inspect", tmp_path / "absent.safetensors")[0] == 3


def test_the_process_ends_with_the_exit_code_and_one_line() -> None:
    process = start("plan", "absent")
    out, error = process.communicate(timeout=60)
    assert (process.returncode, out, error.count("\n")) == (3, "", 1)


# ---- layers


def test_the_command_line_outranks_the_config_file(
    place: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "mine.toml"
    config.write_text("[train]\nsteps = 7\nseed = 8\n")
    plan = answer(
        capsys, "plan", place.dataset, "--json", "--config", config, "--set", "train.steps=9"
    )
    assert plan["settings"]["train.steps"]["value"] == 9
    assert plan["settings"]["train.seed"]["value"] == 8


@pytest.mark.parametrize("flag", ["base", "output", "name"])
def test_a_flag_is_a_short_name_of_its_setting(
    flag: str, place: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {"base": "base.model", "output": "output.folder", "name": "output.name"}
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(api, "plan", lambda _, *, settings, **__: asked.append(settings))
    monkeypatch.setattr(planning, "planned", lambda _: None)
    assert main.run([str(place.dataset), "--dry-run", f"--{flag}", "embedded"]) == 0
    assert asked == [{keys[flag]: "embedded"}]


def test_a_dry_run_makes_no_folder(place: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, place.dataset, "--dry-run")
    assert code == 0
    assert "predicted peak" in out
    assert list(Path().iterdir()) == []


def test_doctor_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "doctor", "--json")
    assert found["accelerator"]
    assert found["cpu_threads"]["reason"]
    assert "torch" in found["packages"]


def test_doctor_empties_the_cache_that_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "cache"
    CappedFolder(root=root, limit_bytes=1).create()
    entry = root / "latents" / "aa" / f"{'a' * 64}.safetensors"
    entry.parent.mkdir(parents=True)
    entry.write_bytes(b"12345")
    there = ["--clear-cache", "--set", f"data.cache_dir={root}"]
    found = answer(capsys, "doctor", *there, "--json")
    assert found == {"folder": str(root), "files": 1, "bytes": 5}
    assert "removed 0 entries" in said(capsys, "doctor", *there)[1]
    assert refused(capsys, "doctor", "--set", f"data.cache_dir={root}")[0] == 2
    assert refused(capsys, "doctor", "--clear-cache", "--set", f"data.cache_dir={tmp_path}")[0] == 4


def test_the_module_is_the_command() -> None:
    assert "lora_trainer.cli.main:main" in (ROOT / "pyproject.toml").read_text()
