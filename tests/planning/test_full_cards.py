"""A GPU on which a plan did not fit is planned smaller next time, by as much as was seen and no more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.hardware.machine import GIB
from lora_trainer.planning.plan_input import known_oom, remember_oom
from tests.fakes.plans import CARD, MACHINE


def test_the_next_plan_stays_below_those_that_did_not_fit_on_this_card_with_this_torch(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "not made yet"

    def remember(planned_gib: float) -> Any:
        size = int(planned_gib * GIB)
        return remember_oom(folder, MACHINE, "sdxl", planned_bytes=size, limit_bytes=11 * GIB)

    assert remember(4.0) is None, "far below its limit: something else filled the GPU"
    assert known_oom(folder, MACHINE, "sdxl") is None
    shares = [remember(planned_gib).share for planned_gib in (10.0, 9.0, 10.9)]
    assert shares[0] == pytest.approx(0.95 * 10 / 11, abs=1e-4)
    assert shares[1] == shares[2] < shares[0], "it only ever gets smaller"
    found = known_oom(folder, MACHINE, "sdxl")
    assert found is not None and found.share == shares[1]
    for other in (
        replace(MACHINE, gpus=(replace(CARD, name="NVIDIA GeForce RTX 4070"),)),
        replace(MACHINE, gpus=(replace(CARD, total_bytes=8 * GIB),)),
        replace(MACHINE, packages={"torch": "2.14"}),
        replace(MACHINE, gpus=()),
    ):
        assert known_oom(folder, other, "sdxl") is None
    assert known_oom(folder, MACHINE, "sd15") is None
