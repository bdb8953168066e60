"""The benchmarks run: a few steps of each, so that a change of the library does not leave them behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_step_ladder(tmp_path: Path) -> None:
    file, plot = tmp_path / "out.json", tmp_path / "out.svg"
    done = run(
        "benchmarks/step_ladder.py",
        *("--case", "sd15:64:1:bf16", "--steps", "4", "--block", "2", "--threads", "1"),
        *("--json", str(file), "--plot", str(plot)),
    )
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(file.read_bytes())
    assert set(row["rungs"]) == {"bare", "trainers' way", "ours"}
    for found in row["rungs"].values():
        assert len(found["turns_s"]) == 2
        assert found["ratio_upper"] >= found["ratio"] > 0
    assert row["rungs"]["bare"]["ratio"] == 1
    assert 0 <= row["wait_share"] < 1
    assert "trainers&apos; way" in plot.read_text() or "trainers' way" in plot.read_text()


def test_wheels_are_of_all_that_is_needed_but_torch() -> None:
    """Its own packages come with torch, which the other machine has for its GPU."""
    asking = "from wheels import closure; import json; own = closure(['torch'], without={}); "
    asking += "print(json.dumps([list(own), list(closure(['diffusers', 'peft'], without=own))]))"
    done = run("-c", f"import sys; sys.path.insert(0, 'benchmarks'); {asking}")
    assert done.returncode == 0, done.stderr
    own, needed = json.loads(done.stdout)
    assert {"torch", "sympy"} <= set(own)
    assert {"diffusers", "peft", "safetensors", "numpy"} <= set(needed)
    assert not set(own) & set(needed)


def test_startup(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    done = run("benchmarks/startup.py", *("--rounds", "1", "--model", "sd15", "--json", str(file)))
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(file.read_bytes())
    assert row["ratio_wall_s"] == pytest.approx(row["ours_wall_s"][0] / row["bare_wall_s"][0])
    assert row["cold_s"] > 0


def test_scaling(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    done = run(
        "benchmarks/scaling.py",
        *("--rounds", "1", "--block", "1", "--batch", "1", "--json", str(file)),
        *("--compute-s", "0.5", "--gradient-mb", "80", "--latency-us", "1000"),
        *("--devices", "4", "--link", "a wire=0.12"),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_bytes())
    assert found["steps"] == 2
    assert set(found["sides"]) == {"one", "apart", "together"}
    for name, images in {"one": 1, "apart": 2, "together": 2}.items():
        side = found["sides"][name]
        assert side["images_per_s"] == pytest.approx(images / side["median_s"])
    assert found["collective_median_s"] > 0
    assert 0 < found["reduction_median_s"] < found["sides"]["together"]["median_s"]
    # Six messages of 20 MB at 120 MB/s, each a millisecond late: 1.006 s besides 0.5 s of work.
    (model,) = found["model"]
    assert model["all_reduce_s"] == pytest.approx(1.006)
    assert model["speedup"] == pytest.approx(4 * 0.5 / 1.506)
    assert "| a wire | 4 | 0.500 | 1.0060 | 1.33 | 33.2% |" in done.stdout


def test_beside(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    done = run(
        "benchmarks/beside.py",
        *("--rounds", "1", "--steps", "1", "--no-bounds", "--json", str(file)),
        *("--set", "sampling.every_steps=0", "--set", "train.validate_every_steps=0"),
        *("--set", "train.batch_size=1"),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_bytes())
    assert 0 < found["beside, s"] / found["alone, s"] <= found["beside"]
    assert "| alone, spinning |" in done.stdout


def test_gui(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    done = run(
        "benchmarks/gui.py",
        *("--steps", "60", "--samples", "6", "--rounds", "2", "--json", str(file)),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_bytes())["server"]["60"]
    assert 0 == found["idle, bytes"] < found["step, bytes"] < found["first, bytes"]


def test_calibrate_orders_the_prepared_datasets(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    done = run(
        "benchmarks/calibrate.py",
        *("--folder", str(tmp_path / "made"), "--json", str(file)),
        *("--seeds", "1", "--only", "datasets"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(file.read_bytes())
    assert found["missed"] == []
    scores = {name: reports[0]["score"] for name, reports in found["datasets"].items()}
    assert all(scores["good"] >= score + 0.1 for name, score in scores.items() if name != "good")


def test_caching(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    done = run(
        "benchmarks/caching.py", *("--images", "2", "--resolution", "64", "--json", str(file))
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_bytes())
    assert found["pictures"]["calls"] == 2
    assert found["captions"]["calls"] == 2 + 2 * 2 + 1, "captions, prompts and the empty text"
    assert all(0 < found[kind]["share"] <= 1 for kind in ("pictures", "captions"))


def test_large_dataset(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    done = run(
        "benchmarks/large_dataset.py",
        *("--folder", str(tmp_path / "made"), "--images", "40", "--rounds", "1"),
        *("--json", str(file)),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_bytes())
    assert found["cold"]["encoded"] == found["cold"]["entries"] == 40 + 40 + 1
    assert found["warm"][0]["encoded"] == found["read_again"]["encoded"] == 0


def test_true_size(tmp_path: Path) -> None:
    """With tiny networks: the released files, the command, the kill, the resume and the figures."""
    done = run(
        "benchmarks/true_size.py",
        *("--results", str(tmp_path), "--only", "sd15-file", "--tiny"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (report,) = json.loads((tmp_path / "true_size.json").read_bytes())
    assert report["problems"] == []
    assert {name: part["exit_code"] for name, part in report["parts"].items()} == {
        "whole": 0,
        "killed": -9,
        "resumed": 0,
    }
    measured = {row["phase"]: row["measured_bytes"] for row in report["phases"]}
    phases = {"caching images", "loading", "training", "sampling", "peak of all"}
    assert phases <= measured.keys()
    assert all(2**28 < measured[phase] < 2**31 for phase in phases), (
        "Python with torch, and no more"
    )
    assert "killed after step 2 and resumed: the same bits" in done.stdout
    assert not (tmp_path / "sd15-file" / "base").exists(), "bases are removed"
