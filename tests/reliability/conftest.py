"""Figures: what a reliability test counted, kept for docs/reliability.md when somebody asks.

RELIABILITY_CASES is how many cases each kind of fuzzing tries, 60 unless it says more; above 60, faults
also hit every operation.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.fakes.studio import Studio


Figure = Callable[..., None]
CASES = int(os.environ.get("RELIABILITY_CASES", "60"))


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


# For the tests of caches. It imports torch: not before the environment is set.
@pytest.fixture
def studio(tmp_path: Path) -> Studio:
    from tests.fakes.studio import studio_in

    return studio_in(tmp_path)
