"""A change of the library leaves no benchmark behind: their names exist, and the quick ones run a few steps."""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a program in the project's folder; it must succeed."""
    done = subprocess.run(
        [sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def measured(script: str, words: str, folder: Path) -> tuple[Any, str]:
    """Run a benchmark; return what it wrote as JSON, and what it printed. FOLDER in `words` is `folder`."""
    file = folder / "out.json"
    given = words.replace("FOLDER", str(folder)).split()
    printed = run(f"benchmarks/{script}.py", *given, "--json", str(file)).stdout
    return json.loads(file.read_bytes()), printed


@pytest.mark.parametrize("folder", ["benchmarks", "scripts"])
def test_names_of_the_library_are_there(folder: str) -> None:
    for file in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lora_trainer."):
                module = importlib.import_module(str(node.module))
                for each in node.names:
                    if not hasattr(module, each.name):
                        importlib.import_module(f"{node.module}.{each.name}")


def test_step_ladder(tmp_path: Path) -> None:
    words = "--case sd15:64:1:bf16 --steps 4 --block 2 --threads 1 --plot FOLDER/out.svg"
    (row,), _ = measured("step_ladder", words, tmp_path)
    assert set(row["rungs"]) == {"bare", "trainers' way", "ours"}
    for rung in row["rungs"].values():
        assert len(rung["turns_s"]) == 2
        assert rung["ratio_upper"] >= rung["ratio"] > 0
    assert row["rungs"]["bare"]["ratio"] == 1
    assert 0 <= row["wait_share"] < 1
    assert "way" in (tmp_path / "out.svg").read_text()


def test_scaling(tmp_path: Path) -> None:
    words = "--rounds 1 --block 1 --batch 1 --compute-s 0.5 --gradient-mb 80 --latency-us 1000"
    result, printed = measured("scaling", f"{words} --devices 4 --link wire=0.12", tmp_path)
    assert result["steps"] == 2
    for name, images in {"one": 1, "apart": 2, "together": 2}.items():
        side = result["sides"][name]
        assert side["images_per_s"] == pytest.approx(images / side["median_s"])
    assert result["collective_median_s"] > 0
    assert 0 < result["reduction_median_s"] < result["sides"]["together"]["median_s"]
    # Six messages of 20 MB at 120 MB/s, each a millisecond late: 1.006 s besides 0.5 s of work.
    (model,) = result["model"]
    assert model["all_reduce_s"] == pytest.approx(1.006)
    assert model["speedup"] == pytest.approx(4 * 0.5 / 1.506)
    assert "| wire | 4 | 0.500 | 1.0060 | 1.33 | 33.2% |" in printed


def test_gui(tmp_path: Path) -> None:
    result, _ = measured("gui", "--steps 60 --samples 6 --rounds 2", tmp_path)
    sizes = result["server"]["60"]
    assert 0 == sizes["idle, bytes"] < sizes["step, bytes"] < sizes["first, bytes"]


def test_calibrate_orders_the_prepared_datasets(tmp_path: Path) -> None:
    result, _ = measured("calibrate", "--folder FOLDER/d --seeds 1 --only datasets", tmp_path)
    assert result["missed"] == []
    scores = {name: reports[0]["score"] for name, reports in result["datasets"].items()}
    assert all(scores["good"] >= score + 0.1 for name, score in scores.items() if name != "good")


def test_true_size(tmp_path: Path) -> None:
    """With tiny networks: the released files, the command, the kill, the resume and the figures."""
    words = ("--results", str(tmp_path), "--only", "sd15-file", "--tiny")
    done = run("benchmarks/true_size.py", *words)
    (report,) = json.loads((tmp_path / "true_size.json").read_bytes())
    assert report["problems"] == []
    codes = {name: part["exit_code"] for name, part in report["parts"].items()}
    assert codes == {"whole": 0, "killed": -9, "resumed": 0}
    measured_bytes = {row["phase"]: row["measured_bytes"] for row in report["phases"]}
    for phase in ("caching images", "loading", "training", "sampling", "peak of all"):
        assert 2**28 < measured_bytes[phase] < 2**31, "Python with torch, and no more"
    assert "killed after step 2 and resumed: the same bits" in done.stdout
    assert not (tmp_path / "sd15-file" / "base").exists(), "bases are removed"
