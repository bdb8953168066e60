"""Which load is chosen: it fits, the batch stays, nothing asked for is raised, and the reason is said."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lora_trainer.common.errors import MachineError
from lora_trainer.config.config import build_config, flatten, parse_assignment
from lora_trainer.config.declare import CHECKPOINTING
from lora_trainer.planning.plan import Plan
from tests.fakes.nvml import GIB
from tests.fakes.plans import CARD, FLUX, MACHINE, QWEN, SDXL, machine, planned

RANKS = {"bf16": 0, "int8": 1, "fp8": 2, "nf4": 3}
BATCH, MICRO, LEVEL = "train.batch_size", "memory.micro_batch", "memory.gradient_checkpointing"
BASE, STREAMED = "memory.base_precision", "memory.streamed_blocks"
SAMPLES = "sampling.every_steps"
SIZES = ((512, 512), (448, 576))


def free(gib: float, **how: Any) -> Plan:
    """Plan Stable Diffusion 1.5 for a GPU of 12 GiB with so much of it free."""
    hardware = replace(MACHINE, gpus=(replace(CARD, free_bytes=int(gib * GIB)),))
    return planned(None, hardware, **{"buckets": SIZES, **how})


def step_s(made: Plan) -> float:
    return math.prod(made.seconds_per_step) ** 0.5


@given(
    gib=st.floats(2.9, 14),
    batch_size=st.integers(1, 6),
    micro_batch=st.sampled_from(["auto", 1, 2, 6]),
    checkpointing=st.sampled_from(["auto", *CHECKPOINTING, True, False]),
    streamed=st.sampled_from(["auto", 0, 4]),
    precision=st.sampled_from(["auto", "bf16", "int8", "nf4"]),
)
def test_it_fits_the_batch_stays_and_nothing_asked_for_is_raised(
    gib: float,
    batch_size: int,
    micro_batch: int | str,
    checkpointing: str | bool,
    streamed: int | str,
    precision: str,
) -> None:
    assume(streamed != 4 or checkpointing not in ("none", False))
    micro = min(micro_batch, batch_size) if isinstance(micro_batch, int) else micro_batch
    asked = {BATCH: batch_size, MICRO: micro, LEVEL: checkpointing, STREAMED: streamed}
    asked[BASE] = precision
    before = flatten(build_config(asked))
    made = free(gib, overrides=asked)
    after = flatten(made.config)
    assert made.memory.fits
    assert made.memory.limit_bytes == int(gib * GIB)
    assert after[BATCH] == batch_size
    assert 1 <= after[MICRO] <= (batch_size if micro == "auto" else int(micro))
    assert max(made.images_at_once.values()) == after[MICRO]
    levels = [CHECKPOINTING.index(each[LEVEL]) for each in (before, after) if each[LEVEL] != "auto"]
    assert levels == sorted(levels)
    assert after[STREAMED] >= (4 if streamed == 4 else 0)
    assert precision in ("auto", after[BASE]), "a value that changes the result stays"
    for key in asked:
        assert (made.origins[key].layer == "planner") == (after[key] != before[key])


def test_when_nothing_fits_the_setting_it_names_does_or_it_says_how_much_would() -> None:
    for gib, overrides in (
        (2.2, {"data.resolution": 1024}),
        (2.9, {"adapter.rank": 512}),
        (2.5, {"train.precision": "fp32"}),
        (2.4, {"adapter.rank": 64, BATCH: 8}),
        (2.2, {BASE: "bf16", LEVEL: "offloaded"}),
    ):
        # no buckets: the square of the resolution is planned for
        with pytest.raises(MachineError, match="needs at least") as caught:
            free(gib, overrides=overrides, buckets=())
        assert caught.value.exit_code == 4
        key, value = parse_assignment(caught.value.fix.split()[2].rstrip(","))
        assert free(gib, overrides={**overrides, key: value}, buckets=()).memory.fits
    with pytest.raises(MachineError, match=r"a GPU with 2\.\d\d GiB free") as caught:
        free(1.5)
    assert "1.50 GiB free on NVIDIA GeForce RTX 3060" in str(caught.value)


@pytest.mark.parametrize(
    ("source", "gib", "ram_gib"), [(FLUX, 8, 17), (FLUX, 24, 28), (QWEN, 24, 17), (SDXL, 8, 28)]
)
def test_speed_is_never_slower_and_quality_never_less_precise(
    source: str, gib: float, ram_gib: float
) -> None:
    same = {"data.resolution": 1024, "adapter.rank": 16, SAMPLES: 0}
    hardware = machine(gib, ram_gib=ram_gib)
    made = [
        planned(source, hardware, priority=priority, preset_tier="10-12", overrides=same)
        for priority in ("speed", "balanced", "quality")
    ]
    times = [step_s(each) for each in made]
    assert times == sorted(times)
    ranks = [RANKS[each.config.memory.base_precision] for each in made]
    assert ranks == sorted(ranks, reverse=True)


def test_more_memory_is_never_slower() -> None:
    times = [
        step_s(planned(FLUX, machine(gib, ram_gib=60), overrides={SAMPLES: 0}, preset_tier="10-12"))
        for gib in (5.5, 8, 12, 24, 60)
    ]
    assert times == sorted(times, reverse=True)
    assert times[-1] < times[0]
