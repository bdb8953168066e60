"""Figures: what a reliability test counted, kept for docs/reliability.md when somebody asks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

Figure = Callable[..., None]


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
