"""When steps are compiled or recorded: where that is possible, pays within the run and fits, and why not."""

from __future__ import annotations

from typing import Any

import pytest

from lora_trainer.planning.plan import Plan
from lora_trainer.planning.speedups import pass_shapes
from tests.fakes.plans import WITHOUT_CARD, machine, planned, reason

COMPILE, GRAPHS, STEPS = "hardware.compile", "hardware.cuda_graphs", "train.steps"
LEVEL = "memory.gradient_checkpointing"
OFF = {COMPILE: "none", GRAPHS: False}
FAST: dict[str, Any] = {
    "name": "NVIDIA H100",
    "compute_capability": (9, 0),
    "packages": {"triton": "3.5"},
}
H100 = machine(80, **FAST)


def quick(hardware: Any = H100, *, priority: str = "speed", **settings: Any) -> Plan:
    """Plan Stable Diffusion 1.5 in steps that wait for kernels to start."""
    buckets = settings.pop("buckets", ((512, 512),))
    overrides = {"train.batch_size": 1, STEPS: 2000, **settings}
    return planned(None, hardware, priority=priority, overrides=overrides, buckets=buckets)


def settled(made: Plan, key: str) -> Any:
    return getattr(made.config.hardware, key.partition(".")[2])


def test_a_launch_bound_base_on_a_fast_gpu_is_recorded() -> None:
    made = quick()
    assert settled(made, GRAPHS) is True
    assert "1 shapes" in reason(made, GRAPHS) and "2000 steps save" in reason(made, GRAPHS)
    for phase in ("training", "sampling"):
        assert "recorded steps" in {item.name for item in made.memory.by_phase[phase]}  # type: ignore[index]
    assert "recorded steps" not in str(quick(priority="balanced").memory)


def test_a_long_run_pays_for_a_compiler_and_a_short_one_does_not() -> None:
    long, short = quick(**{STEPS: 200_000}), quick(**{STEPS: 100})
    assert (settled(long, COMPILE), settled(short, COMPILE)) == ("blocks", "none")
    assert "100 steps save" in reason(short, COMPILE)


@pytest.mark.parametrize(
    ("priority", "hardware", "why"),
    [
        ("balanced", H100, "priority speed"),
        ("quality", H100, "priority speed"),
        ("speed", WITHOUT_CARD, "chosen on a GPU only"),
    ],
)
def test_nothing_is_tried_unasked_elsewhere(priority: str, hardware: Any, why: str) -> None:
    made = quick(hardware, priority=priority, **{STEPS: 200_000})
    for key, off in OFF.items():
        assert settled(made, key) == off and why in reason(made, key)


@pytest.mark.parametrize(
    ("key", "settings", "why"),
    [
        (COMPILE, {"adapter.dora": True}, "DoRA"),
        (COMPILE, {"adapter.kind": "lokr"}, "lokr"),
        (COMPILE, {"adapter.init": "pissa"}, "pissa"),
        (COMPILE, {"adapter.rank_dropout": 0.1}, "dropout"),
        (GRAPHS, {"train.deterministic": True}, "deterministic"),
        (GRAPHS, {"memory.streamed_blocks": 3, LEVEL: "full"}, "streamed"),
        (GRAPHS, {LEVEL: "offloaded"}, "host memory"),
        (GRAPHS, {"memory.base_precision": "nf4"}, "nf4"),
        (GRAPHS, {"adapter.text_encoder": True}, "text encoders"),
    ],
)
def test_a_speedup_that_cannot_be_is_left_out_with_its_reason(
    key: str, settings: dict[str, Any], why: str
) -> None:
    for wish in ("auto", {COMPILE: "blocks", GRAPHS: True}[key]):
        made = quick(**{STEPS: 200_000, **settings, key: wish})
        assert settled(made, key) == OFF[key] and why in reason(made, key)
        assert ("instead of" in reason(made, key)) is (wish != "auto")


def test_a_wish_is_followed_where_it_can_be() -> None:
    asked = {COMPILE: "blocks", GRAPHS: True, STEPS: 1}
    made, on_cpu = (quick(each, priority="quality", **asked) for each in (H100, WITHOUT_CARD))
    assert (settled(made, COMPILE), settled(made, GRAPHS)) == ("blocks", True)
    assert (settled(on_cpu, COMPILE), settled(on_cpu, GRAPHS)) == ("blocks", False)
    assert reason(on_cpu, GRAPHS) == "instead of true: there is no GPU"
    refused = quick(**OFF, **{STEPS: 200_000})
    assert {key: settled(refused, key) for key in OFF} == OFF


def test_a_recording_that_does_not_fit_is_left_out() -> None:
    size = quick(**{GRAPHS: False}).memory.peak_bytes * 1.02
    made = quick(machine(80, **FAST, free_bytes=int(size)), **{GRAPHS: True})
    assert settled(made, GRAPHS) is False and "GiB predicted" in reason(made, GRAPHS)


def test_too_many_shapes_are_not_tried_unasked() -> None:
    buckets = tuple((64 * (4 + k), 512) for k in range(17))
    made = quick(buckets=buckets, **{STEPS: 200_000})
    for key, off in OFF.items():
        assert settled(made, key) == off and "more than 16" in reason(made, key)


def test_shapes_of_passes() -> None:
    """Steps take what comes: in several buckets groups of any size, in one only what is left over."""
    assert pass_shapes({(8, 8): 4}, batch_size=4) == [(8, 8, 4)]
    assert pass_shapes({(8, 8): 4}, batch_size=6) == [(8, 8, 4), (8, 8, 2)]
    assert pass_shapes({(8, 8): 2}, batch_size=6, processes=2) == [(8, 8, 2), (8, 8, 1)]
    shapes = pass_shapes({(8, 8): 2, (6, 10): 1}, batch_size=4)
    assert shapes == [(8, 8, 2), (6, 10, 1), (8, 8, 1)], "full groups of large buckets first"
