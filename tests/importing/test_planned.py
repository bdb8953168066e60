"""What is written for each trainer plans by the real command, on a small base of the right kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.importing.reading import TRAINERS
from tests.fakes.family_bases import base_of
from tests.fakes.runs import run_cli, write_dataset
from tests.importing import cases_others as others
from tests.importing import cases_sd_scripts as sd_scripts
from tests.importing.corpus import Case


def one(cases: list[Case], name: str) -> Case:
    (case,) = (case for case in cases if case.name == name)
    return case


CASES = [
    (one(sd_scripts.SD_SCRIPTS, "usual"), "sdxl"),
    (one(sd_scripts.SD_SCRIPTS, "its defaults"), "sdxl"),
    (one(sd_scripts.SD_SCRIPTS, "optimizer DAdaptAdam"), "sdxl"),
    (one(sd_scripts.SD_SCRIPTS, "lokr of whole matrices"), "sdxl"),
    (one(sd_scripts.SD_SCRIPTS, "flux by its defaults"), "flux"),
    (one(sd_scripts.SD_SCRIPTS, "subsets"), "sdxl"),
    (one(sd_scripts.KOHYA_SS, "usual"), "sdxl"),
    (one(sd_scripts.KOHYA_SS, "flux with the stock preset's gamma"), "flux"),
    (one(sd_scripts.KOHYA_SS, "flux that trains clip"), "flux"),
    (one(sd_scripts.LORA_EASY, "usual"), "sdxl"),
    (one(others.ONETRAINER, "usual"), "sdxl"),
    (one(others.ONETRAINER, "flux with clip trained"), "flux"),
    (one(others.AI_TOOLKIT, "usual"), "flux"),
    (one(others.AI_TOOLKIT, "sdxl"), "sdxl"),
    (one(others.MUSUBI_TUNER, "usual"), "flux"),
    (one(others.DIFFUSION_PIPE, "usual"), "flux"),
    (one(others.DIFFUSION_PIPE, "sdxl"), "sdxl"),
    (one(others.SIMPLETUNER, "usual"), "flux"),
    (one(others.SIMPLETUNER, "sdxl with soft weights"), "sdxl"),
]  # fmt: skip


def test_every_trainer_is_planned() -> None:
    names = {trainer.name.partition(" (")[0] for trainer in TRAINERS}
    assert {case.trainer for case, _ in CASES} == names


@pytest.mark.parametrize(("case", "base"), CASES, ids=lambda part: getattr(part, "id", part))
def test_the_written_file_plans(
    case: Case, base: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, dataset = tmp_path / "ours.toml", tmp_path / "set"
    assert run_cli(["import", str(case.write(tmp_path)), "--output", str(ours)]) == 0
    folders: Any = case.settings.get("data.folders", ("images",))
    for number, name in enumerate(folders):
        write_dataset(dataset / name, images=4, first=4 * number)
    capsys.readouterr()
    line = ["plan", str(dataset), "--config", str(ours), "--base", str(base_of(base)), "--json"]
    line += [
        "--set",
        f"data.cache_dir={tmp_path / 'cache'}",
        "--set",
        f"output.folder={tmp_path / 'runs'}",
    ]
    assert run_cli([*line, "--set", "base.companion=auto", "--set", "base.assistant=null"]) == 0
    plan = json.loads(capsys.readouterr().out)["settings"]
    mine = ("optimizer.", "adapter.", "objective.", "train.", "data.resolution")
    for key, value in case.settings.items():
        if key.startswith(mine):
            assert plan[key]["value"] == pytest.approx(value), key
