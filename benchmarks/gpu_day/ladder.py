"""One case of the step ladder: see `benchmarks/step_ladder.py`."""

from __future__ import annotations

from typing import Any

import step_ladder
from trainee import Case, Size

from benchmarks.gpu_day.device import Here

STEPS, BLOCK = 20, 5
TINY_STEPS, TINY_BLOCK = 4, 2


def measure(values: dict[str, Any], here: Here) -> dict[str, Any]:
    """Let the rungs of a case take turns; raises SystemExit when they do not compute the same."""
    size: Size = "tiny" if here.tiny else "true size"
    case = Case.from_words(values["size"], device=here.device, size=size)
    steps, block = (TINY_STEPS, TINY_BLOCK) if here.tiny else (STEPS, BLOCK)
    return step_ladder.measure(case, steps=steps, block=block)
