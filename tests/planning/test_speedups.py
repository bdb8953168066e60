"""When steps are compiled or recorded: where that is possible, pays within the run and fits, and why not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lora_trainer.config.layers import resolve
from lora_trainer.hardware.machine import GIB, Gpu
from lora_trainer.planning.plan import Plan, plan
from lora_trainer.planning.speedups import MOST_SHAPES, PAYS_FROM, pass_shapes
from tests.planning.test_plan import MACHINE, WITHOUT_CARD, request

COMPILE, GRAPHS = "hardware.compile", "hardware.cuda_graphs"
FAST = Gpu(
    index=0,
    name="NVIDIA H100",
    total_bytes=80 * GIB,
    free_bytes=79 * GIB,
    compute_capability=(9, 0),
    driver="570",
)
WITH_TRITON = replace(MACHINE, gpus=(FAST,), packages={**MACHINE.packages, "triton": "3.5"})


def planned(priority: Any = "speed", hardware: Any = WITH_TRITON, **overrides: Any) -> Plan:
    settings = {"train.batch_size": 1, "train.steps": 2000, **overrides}
    buckets = settings.pop("buckets", ((512, 512),))
    given = request(hardware=hardware, free_gib=79, buckets=buckets)
    resolved = resolve(
        family="sd15",
        tier="16-24",
        priority=priority,
        preset="auto",
        config_file=None,
        overrides=settings,
    )
    return plan(replace(given, resolved=resolved, hardware=hardware))


def settled(made: Plan, key: str) -> tuple[Any, str]:
    value = getattr(made.config.hardware, key.partition(".")[2])
    return value, made.origins[key].reason


def test_a_launch_bound_base_on_a_fast_card_is_recorded() -> None:
    made = planned()
    use, reason = settled(made, GRAPHS)
    assert use is True and "1 shapes" in reason and "2000 steps save" in reason
    names = {item.name for items in made.memory.by_phase.values() for item in items}
    assert "recorded steps" in names
    assert "recorded steps" not in str(planned(priority="balanced").memory)


def test_a_long_run_pays_for_a_compiler_and_a_short_one_does_not() -> None:
    long, short = planned(**{"train.steps": 200_000}), planned(**{"train.steps": 100})
    assert settled(long, COMPILE)[0] == "blocks"
    value, reason = settled(short, COMPILE)
    assert value == "none" and "100 steps save" in reason
    assert PAYS_FROM > 1, "estimates are no promises"


@pytest.mark.parametrize(
    ("priority", "hardware", "reason"),
    [
        ("balanced", WITH_TRITON, "priority speed"),
        ("quality", WITH_TRITON, "priority speed"),
        ("speed", WITHOUT_CARD, "chosen on a GPU only"),
    ],
)
def test_nothing_is_tried_unasked_elsewhere(priority: Any, hardware: Any, reason: str) -> None:
    made = planned(priority, hardware, **{"train.steps": 200_000})
    for key, none in ((COMPILE, "none"), (GRAPHS, False)):
        value, why = settled(made, key)
        assert value == none and reason in why


OBSTACLES: list[tuple[str, dict[str, Any], str]] = [
    (COMPILE, {"adapter.dora": True}, "DoRA"),
    (COMPILE, {"adapter.kind": "lokr"}, "lokr"),
    (COMPILE, {"adapter.init": "pissa"}, "pissa"),
    (COMPILE, {"adapter.rank_dropout": 0.1}, "dropout"),
    (GRAPHS, {"train.deterministic": True}, "deterministic"),
    (GRAPHS, {"memory.streamed_blocks": 3, "memory.gradient_checkpointing": "full"}, "streamed"),
    (GRAPHS, {"memory.gradient_checkpointing": "offloaded"}, "host memory"),
    (GRAPHS, {"memory.base_precision": "nf4"}, "nf4"),
    (GRAPHS, {"adapter.text_encoder": True}, "text encoders"),
]


@pytest.mark.parametrize(("key", "settings", "reason"), OBSTACLES)
@pytest.mark.parametrize("asked", ["auto", "asked"])
def test_what_cannot_be_is_left_out_with_its_reason(
    key: str, settings: dict[str, Any], reason: str, asked: str
) -> None:
    wanted: Any = "auto" if asked == "auto" else {COMPILE: "blocks", GRAPHS: True}[key]
    made = planned(**{"train.steps": 200_000, **settings, key: wanted})
    value, why = settled(made, key)
    assert value in ("none", False) and reason in why
    assert ("instead of" in why) is (asked == "asked")


def test_what_is_asked_for_is_done_where_it_can_be() -> None:
    made = planned("quality", **{COMPILE: "blocks", GRAPHS: True, "train.steps": 1})
    assert settled(made, COMPILE)[0] == "blocks" and settled(made, GRAPHS)[0] is True
    on_cpu = planned("quality", WITHOUT_CARD, **{COMPILE: "blocks", GRAPHS: True})
    assert settled(on_cpu, COMPILE)[0] == "blocks"
    assert settled(on_cpu, GRAPHS) == (False, "instead of true: there is no GPU")
    refused = planned(**{COMPILE: "none", GRAPHS: False, "train.steps": 200_000})
    assert settled(refused, COMPILE)[0] == "none" and settled(refused, GRAPHS)[0] is False


def test_a_recording_that_does_not_fit_is_left_out() -> None:
    free = int(planned(**{GRAPHS: False}).memory.peak_bytes * 1.02)
    small = replace(WITH_TRITON, gpus=(replace(FAST, free_bytes=free),))
    value, reason = settled(planned(hardware=small, **{GRAPHS: True}), GRAPHS)
    assert value is False and "GiB predicted" in reason


def test_too_many_shapes_are_not_tried_unasked() -> None:
    buckets = tuple((64 * (4 + k), 512) for k in range(MOST_SHAPES + 1))
    for key in (COMPILE, GRAPHS):
        value, reason = settled(planned(buckets=buckets, **{"train.steps": 200_000}), key)
        assert value in ("none", False) and f"more than {MOST_SHAPES}" in reason


def test_shapes_of_passes() -> None:
    """Steps take what comes: in several buckets groups of any size, in one only what is left over."""
    assert pass_shapes({(8, 8): 4}, batch_size=4) == [(8, 8, 4)]
    assert pass_shapes({(8, 8): 4}, batch_size=6) == [(8, 8, 4), (8, 8, 2)]
    assert pass_shapes({(8, 8): 2}, batch_size=6, processes=2) == [(8, 8, 2), (8, 8, 1)]
    found = pass_shapes({(8, 8): 2, (6, 10): 1}, batch_size=4)
    assert found == [(8, 8, 2), (6, 10, 1), (8, 8, 1)], "full groups of large buckets first"
