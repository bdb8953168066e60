"""Length and disk: formulas against the runs they were chosen for."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.planning.estimates import LENGTH_RULES, DiskUse, disk_bytes, run_length

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


def test_repeats_shift_weight_and_lengthen_a_run_only_where_pictures_would_be_missed() -> None:
    def steps(samples: int, repeats: int) -> int:
        length = run_length(
            images=20, batch_size=1, priority="balanced", samples=samples, repeats=repeats
        )
        return length.steps

    assert steps(20, 1) == steps(20 * 10, 10) == steps(20 * 1000, 1000) == 2400
    assert steps(10 * 1 + 10 * 20, 1) == 2400
    assert steps(10 * 1 + 10 * 500, 1) == 5010, "or the ten would hardly be met"


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


def test_disk_counts_cache_states_and_exports() -> None:
    use = DiskUse(
        latents=10,
        texts=11,
        latent_elements=1000,
        conditioning_bytes=500,
        adapter_parameters=100,
        state_bytes=800,
        export_precision="fp16",
        keep_states=2,
        keep_exports=3,
    )
    # mean and deviation in fp32; one state and two exports more than kept
    assert disk_bytes(use) == {
        "cache": 10 * 2 * 4 * 1000 + 11 * 500,
        "states": 3 * 100 * 12,
        "exports": 5 * 100 * 2,
    }
    flipped = disk_bytes(replace(use, latents=20, texts=41))
    assert flipped["cache"] == 20 * 2 * 4 * 1000 + 41 * 500


def test_rules_grow_with_priority() -> None:
    for lower, higher in itertools.pairwise(LENGTH_RULES[priority] for priority in PRIORITIES):
        assert lower.views < higher.views
        assert lower.floor_images < higher.floor_images
        assert lower.ceiling_images < higher.ceiling_images


def test_regularisation_images_come_on_top_of_those_that_are_learned() -> None:
    plain = run_length(images=14, batch_size=8, priority="balanced")
    more = run_length(images=14, batch_size=8, priority="balanced", regularisation=0.5)
    assert more.steps == 1.5 * plain.steps
    assert more.reason.endswith("0.5 for regularisation beside each")
