"""Length, time and disk: formulas against the runs and measurements they were chosen for."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.config import Precision
from lora_trainer.estimates import (
    LENGTH_RULES,
    DiskUse,
    StepTime,
    cpu_step_time,
    disk_bytes,
    gpu_step_time,
    run_length,
)
from lora_trainer.families.costs import Workload
from tests.fakes.stable_diffusion import UNetCosts, mini_facts, sd15_facts

SD15 = Workload(
    height_px=512, width_px=512, element_bytes=2, rank=16, targets="attention", checkpointing=False
)
PRIORITIES = ("speed", "balanced", "quality")


@pytest.mark.parametrize(
    ("priority", "images", "batch_size", "steps"),
    [
        ("speed", 14, 8, 150),
        ("balanced", 14, 8, 300),
        ("quality", 14, 8, 500),
        ("balanced", 20, 2, 1200),
        ("balanced", 100, 2, 6000),
        ("balanced", 500, 4, 5000),  # ceiling
        ("balanced", 30_000, 4, 7500),  # every picture at least once
        ("balanced", 1, 7, 343),  # floor, rounded up
    ],
)
def test_steps_by_the_documented_formula(
    priority: str, images: int, batch_size: int, steps: int
) -> None:
    assert run_length(images=images, batch_size=batch_size, priority=priority).steps == steps


@given(images=st.integers(1, 100_000), batch_size=st.integers(1, 64))
def test_priorities_are_ordered_and_more_pictures_are_never_fewer_steps(
    images: int, batch_size: int
) -> None:
    lengths = [
        run_length(images=images, batch_size=batch_size, priority=priority).steps
        for priority in PRIORITIES
    ]
    assert lengths == sorted(lengths)
    for priority, steps in zip(PRIORITIES, lengths, strict=True):
        assert steps * batch_size >= images
        more = run_length(images=images + 1, batch_size=batch_size, priority=priority).steps
        assert more >= steps


def test_the_reason_has_the_numbers_of_the_rule() -> None:
    reason = run_length(images=14, batch_size=8, priority="balanced").reason
    for number in ("balanced", "120", "14", "2,400", "20,000", "8"):
        assert number in reason


def gpu_time(
    *,
    card: str,
    checkpointing: bool = False,
    precision: Precision = "bf16",
    batch_size: int = 1,
    micro_batch: int = 1,
) -> StepTime:
    cost = UNetCosts().sample_cost(sd15_facts(), replace(SD15, checkpointing=checkpointing))
    return gpu_step_time(
        cost, card=card, precision=precision, batch_size=batch_size, micro_batch=micro_batch
    )


@pytest.mark.parametrize(("checkpointing", "published_s"), [(False, 0.181), (True, 0.305)])
def test_a_published_step_on_an_h100_lies_in_the_range(
    checkpointing: bool, published_s: float
) -> None:
    time = gpu_time(card="NVIDIA H100 80GB HBM3", checkpointing=checkpointing)
    assert time.seconds is not None
    assert time.seconds[0] < published_s < time.seconds[1]
    assert "estimate" in time.note
    assert "starting kernels" in time.note


def test_slow_cards_are_bound_by_arithmetic_and_unknown_ones_have_no_time() -> None:
    slow = gpu_time(card="NVIDIA GeForce RTX 3060", batch_size=4, micro_batch=4)
    fast = gpu_time(card="NVIDIA GeForce RTX 4090", batch_size=4, micro_batch=4)
    assert slow.seconds is not None
    assert fast.seconds is not None
    assert slow.seconds[1] > 2 * fast.seconds[1]
    assert "arithmetic" in slow.note
    unknown = gpu_time(card="Voodoo 2")
    assert unknown.seconds is None
    assert "Voodoo 2" in unknown.note


@pytest.mark.parametrize(
    ("card", "known"),
    [("NVIDIA L40S", "L40S"), ("NVIDIA L4", "L4"), ("NVIDIA A100-SXM4", "A100"), ("A10G", "A10")],
)
def test_the_longest_name_counts(card: str, known: str) -> None:
    assert f"estimate for {known}:" in gpu_time(card=card).note


def test_splitting_and_fp32_make_a_step_longer() -> None:
    card = "NVIDIA GeForce RTX 4090"
    whole = gpu_time(card=card, batch_size=4, micro_batch=4).seconds
    split = gpu_time(card=card, batch_size=4, micro_batch=1).seconds
    full = gpu_time(card=card, batch_size=4, micro_batch=4, precision="fp32").seconds
    assert whole is not None
    assert split is not None
    assert full is not None
    assert split[1] > whole[1]
    assert full[1] > whole[1]


def test_a_measured_step_on_two_cores_lies_in_the_range() -> None:
    """300 steps of 8 pictures of 64 px on a U-Net of this size took 55 s on two cores."""
    workload = replace(SD15, height_px=64, width_px=64, element_bytes=4, targets="all")
    cost = UNetCosts().sample_cost(mini_facts(), workload)
    time = cpu_step_time(cost, threads=2, batch_size=8)
    assert time.seconds is not None
    assert time.seconds[0] < 55 / 300 < time.seconds[1]
    assert "rough" in time.note
    alone = cpu_step_time(cost, threads=1, batch_size=8).seconds
    assert alone == (2 * time.seconds[0], 2 * time.seconds[1])


def test_disk_counts_cache_states_and_exports() -> None:
    use = DiskUse(
        images=10,
        flip=False,
        captions_per_image=1,
        latent_elements=1000,
        conditioning_bytes=500,
        adapter_parameters=100,
        optimizer="adamw",
        export_precision="fp16",
        keep_states=2,
        keep_exports=3,
    )
    # mean and deviation in fp32; one empty caption; one state and two exports more than kept
    assert disk_bytes(use) == {
        "cache": 10 * 2 * 4 * 1000 + 11 * 500,
        "states": 3 * 100 * 12,
        "exports": 5 * 100 * 2,
    }
    flipped = disk_bytes(replace(use, flip=True, captions_per_image=4))
    assert flipped["cache"] == 20 * 2 * 4 * 1000 + 41 * 500


def test_rules_grow_with_priority() -> None:
    for lower, higher in itertools.pairwise(LENGTH_RULES[priority] for priority in PRIORITIES):
        assert lower.views < higher.views
        assert lower.floor_images < higher.floor_images
        assert lower.ceiling_images < higher.ceiling_images
