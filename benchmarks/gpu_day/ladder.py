"""One case of the step ladder: see `benchmarks/step_ladder.py`."""

from __future__ import annotations

from typing import Any

from benchmarks import step_ladder
from benchmarks.gpu_day.device import Here
from benchmarks.trainee import Case, Size

STEPS, BLOCK = 20, 5
TINY_STEPS, TINY_BLOCK = 4, 2


def measure(values: dict[str, Any], here: Here) -> dict[str, Any]:
    """Let the rungs of a case take turns; raises SystemExit when they do not compute the same."""
    size: Size = "tiny" if here.tiny else "true size"
    case = Case.from_words(values["size"], device=here.device, size=size)
    steps, block = (TINY_STEPS, TINY_BLOCK) if here.tiny else (STEPS, BLOCK)
    found: dict[str, Any] = step_ladder.measure(case, steps=steps, block=block)
    return found
