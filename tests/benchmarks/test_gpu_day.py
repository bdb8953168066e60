"""The day with a GPU, tried on a processor with tiny bases: slices have results, and what breaks off is noted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_day.cases import SLICES, Case, Slice
from benchmarks.gpu_day.results import Origin, Results
from benchmarks.gpu_day.runner import Runner
from benchmarks.gpu_day.verdicts import OPTIONS, verdicts

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
HERE = Origin(
    commit="abc", code="1", torch="2.11.0", device="a GPU", device_type="cuda", tiny=False
)

pytestmark = pytest.mark.timeout(1200)


def command(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the command as it is typed, on a machine that shows no GPU."""
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_day", *map(str, words)],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with `results` and `work` of a slice."""
    folder = tmp_path_factory.mktemp("gpu-day")
    words = ("--tiny", "--results", folder / "results", "--work", folder / "work")
    done = command(*words, "--slice", "pair", "--limit-s", "1500")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_each_case_of_a_slice_has_a_result(work: Path) -> None:
    (piece,) = (piece for piece in SLICES if piece.name == "pair")
    found: Any = json.loads((work / "results" / "tiny-pair.json").read_bytes())["rows"]
    assert set(found) == {case.name for case in piece.tiny}
    for case in piece.tiny:
        row = found[case.name]
        assert row["status"] == ("needs a GPU" if case.needs_gpu else "done"), row
        assert row["commit"] and row["code"] and row["at"]
    assert "joined by gloo" in found["nccl"]["reason"]
    assert found["gloo"]["result"]["same_bits"]
    listed = command("--tiny", "--results", work / "results", "--list")
    assert "gloo: done" in listed.stdout


def test_the_docs_are_filled_from_a_days_results(work: Path, tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    shutil.copytree(ROOT / "docs", docs)
    words = ("--write-docs", "--tiny", "--results", work / "results")
    refused = command(*words)
    assert refused.returncode == 1 and "--docs FOLDER" in refused.stderr
    done = command(*words, "--docs", docs)
    assert done.returncode == 0, done.stderr
    assert "* nccl: needs a GPU" in (docs / "performance.md").read_text()


# ---- what a processor does not show


def test_an_option_that_wins_little_everywhere_is_taken_out(tmp_path: Path) -> None:
    results = Results(folder=tmp_path, origin=HERE)
    (piece,) = (one for one in SLICES if one.name == "bits")
    cases = {case.values.get("way"): case.name for case in piece.cases}
    against = {"against": "as it is", "against_step_s": 1.0, "against_peak_bytes": 20 * GIB}
    for way, step_s, gib in (
        ("full", 1.4, 8.0),
        ("selective", 1.34, 9.0),
        ("light", 1.2, 15.0),
        ("offloaded", 1.41, 7.3),
        ("compiled", 0.96, 18.5),
    ):
        row = {"way": way, "case": "case", "holds": way != "offloaded", **against}
        row |= {"step_s": step_s, "peak_bytes": int(gib * GIB)}
        results.write("bits", cases[way], "done", seconds=1.0, result=row)
    words = {verdict.option: verdict.word for verdict in verdicts(results)}
    assert words == {
        **dict.fromkeys(OPTIONS, "not measured"),
        "memory.gradient_checkpointing=full": "keep",  # 60 % of the memory
        "memory.gradient_checkpointing=selective": "take out",  # 4.3 % of the time
        "memory.gradient_checkpointing=light": "keep",  # 10.4 % of the time
        "memory.gradient_checkpointing=offloaded": "wrong",
        "hardware.compile=blocks": "take out",  # 4 % of the time, 7.5 % of the memory
    }


def test_other_code_and_another_gpu_are_measured_anew(tmp_path: Path) -> None:
    results = Results(folder=tmp_path, origin=HERE)
    (piece,) = (piece for piece in SLICES if piece.name == "pair")
    case = piece.cases[0]
    results.write("pair", case.name, "done", seconds=1.0, result={})
    changed = replace(results, origin=replace(HERE, code="2"))
    assert case not in results.missing(piece)
    assert case in changed.missing(piece)
    assert case not in replace(changed, other_code=True).missing(piece)
    other = replace(results, origin=replace(HERE, device="another GPU"))
    assert case in other.missing(piece) and not list(other.rows(piece))
    assert len(list((tmp_path / "older").iterdir())) == 1, "the old results are kept"


CHILD = """
import json, os, sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
from benchmarks.gpu_day.child import Order
from benchmarks.gpu_day.results import Origin, Results
order = Order(**json.loads(sys.argv[1]))
results = Results(folder=Path(order.results), origin=Origin(**order.origin))
for case in order.cases:
    order.running.write_text(json.dumps(dict(case=case, began_s=time.time())))
    if case == "crashes":
        print("a fault of the driver", file=sys.stderr)
        sys.stderr.flush()
        os._exit(9)
    results.write(order.slice, case, "done", seconds=0.1, result=dict())
    order.running.unlink()
"""


def test_a_case_that_ends_its_process_is_written_down_and_the_next_are_done(tmp_path: Path) -> None:
    child = tmp_path / "child.py"
    child.write_text(CHILD.format(root=str(ROOT)))
    cases = [Case(name=name, values={}, seconds=0) for name in ("first", "crashes", "last")]
    results = Results(folder=tmp_path / "results", origin=HERE)
    runner = Runner(
        results=results,
        folder=tmp_path / "work",
        until_s=time.time() + 120,
        limit_s=120,
        child=(str(child),),
    )
    runner.measure(Slice(name="slice", module="", title="", cases=cases, tiny=[]), cases)
    rows: dict[str, Any] = results.read("slice")["rows"]
    assert [rows[case.name]["status"] for case in cases] == ["done", "failed", "done"]
    assert "a fault of the driver" in rows["crashes"]["error"]
