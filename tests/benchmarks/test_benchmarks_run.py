"""The benchmarks run: a few steps of each, so that a change of the library does not leave them behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_step_overhead(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    done = run(
        "benchmarks/step_overhead.py",
        *("--steps", "4", "--block", "2", "--threads", "1", "--json", str(file)),
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(file.read_bytes())
    assert found["steps"] == 4
    assert found["ratio"] > 0
