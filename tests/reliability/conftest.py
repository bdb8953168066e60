"""Figures: what a reliability test counted, kept for docs/reliability.md when somebody asks.

RELIABILITY_CASES is how many cases each kind of fuzzing tries: a few hundred unless it says more.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

Figure = Callable[..., None]
CASES = int(os.environ.get("RELIABILITY_CASES", "200"))


@pytest.fixture
def figure(request: pytest.FixtureRequest) -> Figure:
    """Return a function that records counts under a name; those of a name are added up.

    They go to `figures.jsonl` in the folder that RELIABILITY_FIGURES names, nowhere without it.
    """

    def record(name: str, **counts: int) -> None:
        folder = os.environ.get("RELIABILITY_FIGURES")
        if folder:
            row = {"figure": name, "test": request.node.nodeid, **counts}
            with (Path(folder) / "figures.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    return record


@pytest.fixture(scope="session")
def cases() -> int:
    """How many cases of one kind to try."""
    return CASES
