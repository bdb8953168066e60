"""When blocks are compiled: where that is possible and pays within the run, and why not."""

from __future__ import annotations

from typing import Any

import pytest

from lora_trainer.planning.plan import Plan
from lora_trainer.planning.speedups import pass_shapes
from tests.fakes.plans import WITHOUT_CARD, machine, planned, reason

COMPILE, STEPS = "hardware.compile", "train.steps"
LONG = {STEPS: 200_000}
H100 = machine(80, name="NVIDIA H100", compute_capability=(9, 0), packages={"triton": "3.5"})


def quick(hardware: Any = H100, *, priority: str = "speed", **settings: Any) -> Plan:
    """Plan Stable Diffusion 1.5 with small steps."""
    buckets = settings.pop("buckets", ((512, 512),))
    overrides = {"train.batch_size": 1, STEPS: 2000, **settings}
    return planned(None, hardware, priority=priority, overrides=overrides, buckets=buckets)


def test_a_long_run_pays_for_a_compiler_and_nothing_is_compiled_unasked_elsewhere() -> None:
    long, short = quick(**LONG), quick(**{STEPS: 100})
    assert (long.config.hardware.compile, short.config.hardware.compile) == ("blocks", "none")
    assert "for 1 shapes takes" in reason(short, COMPILE)
    assert "100 steps save" in reason(short, COMPILE)
    many = quick(buckets=tuple((64 * (4 + k), 512) for k in range(17)), **LONG)
    assert many.config.hardware.compile == "none" and "more than 16" in reason(many, COMPILE)
    without = machine(80, name="NVIDIA H100", compute_capability=(9, 0))
    for priority, hardware, why in (
        ("balanced", H100, "priority speed"),
        ("speed", WITHOUT_CARD, "chosen on a GPU only"),
        ("speed", without, "pip install triton"),
    ):
        made = quick(hardware, priority=priority, **LONG)
        assert made.config.hardware.compile == "none" and why in reason(made, COMPILE)
        asked = quick(hardware, priority=priority, **{COMPILE: "blocks", STEPS: 1})
        assert asked.config.hardware.compile == "blocks", "a wish is followed"


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"adapter.dora": True}, "DoRA"),
        ({"adapter.rank_dropout": 0.1}, "dropout"),
    ],
)
def test_compiling_that_cannot_be_is_left_out_with_its_reason(
    settings: dict[str, Any], why: str
) -> None:
    for wish in ("auto", "blocks"):
        made = quick(**LONG, **settings, **{COMPILE: wish})
        assert made.config.hardware.compile == "none" and why in reason(made, COMPILE)
        assert ("instead of" in reason(made, COMPILE)) is (wish != "auto")


def test_shapes_of_passes() -> None:
    """Steps take what comes: in several buckets groups of any size, in one only what is left over."""
    assert pass_shapes({(8, 8): 4}, batch_size=4) == [(8, 8, 4)]
    assert pass_shapes({(8, 8): 4}, batch_size=6) == [(8, 8, 4), (8, 8, 2)]
    assert pass_shapes({(8, 8): 2}, batch_size=6, processes=2) == [(8, 8, 2), (8, 8, 1)]
    shapes = pass_shapes({(8, 8): 2, (6, 10): 1}, batch_size=4)
    assert shapes == [(8, 8, 2), (6, 10, 1), (8, 8, 1)], "full groups of large buckets first"
