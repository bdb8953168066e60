"""A change of the library leaves no benchmark behind: their names exist, and the quick ones run a few steps."""

from __future__ import annotations

import ast
import importlib
import json
import os
import runpy
import sys
import warnings
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

from lora_trainer import families
from lora_trainer.families.files.weight_files import read_header
from tests.fakes.runs import code_of_fork

ROOT = Path(__file__).resolve().parents[2]


def run(*words: str) -> int:
    """Run a program in the project's folder, in this process; return its exit code."""
    warnings.resetwarnings()  # pytest makes errors of them
    warnings.simplefilter("ignore")
    for name in [each for each in sys.modules if each.partition(".")[0] == "benchmarks"]:
        del sys.modules[name]
    # A new process looks in the folder of the program, which adds that of the project by itself.
    sys.path[:] = [str(ROOT / "benchmarks"), *(each for each in sys.path if Path(each) != ROOT)]
    sys.argv = list(words)
    os.chdir(ROOT)
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


def measured(script: str, words: str, folder: Path) -> Any:
    """Run a benchmark; return what it wrote as JSON. FOLDER in `words` is `folder`.

    In a fork of this process: a new one would import for six seconds what this one has imported.
    """
    file = folder / "out.json"
    line = [*words.replace("FOLDER", str(folder)).split(), "--json", str(file)]
    assert code_of_fork(partial(run, f"benchmarks/{script}.py", *line)) == 0
    return json.loads(file.read_bytes())


@pytest.mark.parametrize("folder", ["benchmarks", "scripts"])
def test_names_and_keywords_of_the_library_are_there(folder: str) -> None:
    """Also in benchmarks that run for too long to be tried."""
    for file in (ROOT / folder).rglob("*.py"):
        nodes, imported = list(ast.walk(ast.parse(file.read_text(encoding="utf-8")))), {}
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lora_trainer."):
                module = importlib.import_module(str(node.module))
                for each in node.names:
                    if not hasattr(module, each.name):
                        importlib.import_module(f"{node.module}.{each.name}")
                    if callable(found := getattr(module, each.name)):
                        imported[each.asname or each.name] = found
        for node in nodes:
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                known = signature(imported.get(node.func.id, lambda **_: None)).parameters
                if not any(each.kind is each.VAR_KEYWORD for each in known.values()):
                    said = {each.arg for each in node.keywords if each.arg}
                    assert said <= known.keys(), f"{file}:{node.lineno}"


def test_step_ladder(tmp_path: Path) -> None:
    words = "--case sd15:64:1:bf16 --steps 4 --block 2 --threads 1 --plot FOLDER/out.svg"
    (row,) = measured("step_ladder", words, tmp_path)
    assert set(row["rungs"]) == {"bare", "trainers' way", "ours"}
    for rung in row["rungs"].values():
        assert len(rung["turns_s"]) == 2
        assert rung["ratio_upper"] >= rung["ratio"] > 0
    assert row["rungs"]["bare"]["ratio"] == 1
    assert 0 <= row["wait_share"] < 1
    assert "way" in (tmp_path / "out.svg").read_text()


def test_compiled_blocks_get_the_shape_that_a_case_trains(tmp_path: Path) -> None:
    trainee = importlib.import_module("benchmarks.trainee")
    device = trainee.torch.device("cpu")
    case = trainee.Case.from_words("sd15:64:2:bf16", device=device, size="tiny")
    (batch,) = trainee.batches(case, tmp_path, steps=1)
    count, _, height, width = batch.latents.shape
    assert case.latent_shapes == {(height, width, count)}


def test_gui(tmp_path: Path) -> None:
    result = measured("gui", "--steps 60 --samples 6 --rounds 2", tmp_path)
    sizes = result["server"]["60"]
    assert 0 == sizes["idle, bytes"] < sizes["step, bytes"] < sizes["first, bytes"]


def test_calibrate_orders_the_prepared_datasets(tmp_path: Path) -> None:
    result = measured("calibrate", "--folder FOLDER/d --seeds 1 --only datasets", tmp_path)
    assert result["missed"] == []
    scores = {name: reports[0]["score"] for name, reports in result["datasets"].items()}
    assert all(scores["good"] >= score + 0.1 for name, score in scores.items() if name != "good")


def test_released_bases_are_of_their_families_as_folder_and_as_single_file(tmp_path: Path) -> None:
    """With tiny networks; what true_size.py measures needs the true ones."""
    bases = importlib.import_module("benchmarks.released_bases")
    for name, base in bases.BASES.items():
        tiny = bases.tiny(base)
        assert families.detect(bases.write_folder(tiny, tmp_path / name)).name == name
        file = bases.write_file(tiny, tmp_path / f"{name}-lacks", tmp_path / f"{name}.safetensors")
        family, parts = families.detect_file(read_header(file))
        assert family.name == name and {"denoiser", "vae", "text_encoder"} <= parts


def test_other_trainers_measures_ours_and_writes_the_settings_of_others(tmp_path: Path) -> None:
    """Ours for real, with a tiny base; theirs are not here."""
    words = "--folder FOLDER/work --tiny --rounds 1 --steps 2 --side-px 64"
    result = measured("other_trainers", words, tmp_path)
    (row,) = result["rows"]
    assert row["trainer"] == "ours" and row["ratios"] == [1.0]
    assert len(row["steps_cpu_s"][0]) == 2 and min(row["steps_cpu_s"][0]) > 0
    assert row["trained_values"] > 0
    benchmark = importlib.import_module("benchmarks.other_trainers")
    asked = {"side_px": 64, "batch": 2, "precision": "fp32", "targets": "transformer"}
    work = benchmark.Work(folder=tmp_path / "work", steps=2, **asked)
    for name, command in benchmark.COMMANDS.items():
        place = tmp_path / name
        place.mkdir()
        line = command(work, place)
        settings = place / "settings.json"
        said = " ".join(line) + (settings.read_text() if settings.is_file() else "")
        assert str(work.base) in said and str(benchmark.LEARNING_RATE) in said, name
        assert name in benchmark.CACHES
