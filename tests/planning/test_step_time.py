"""Predicted seconds of a step: published and measured steps lie in the range, and each cost is counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lora_trainer.costs.base_costs import BaseCosts
from lora_trainer.families import family
from lora_trainer.hardware.machine import GIB
from lora_trainer.planning.step_time import step_time, step_work
from tests.fakes.plans import CARD, FLUX, costs_of, load_of
from tests.fakes.stable_diffusion import WideCosts, mini_facts, sd15_facts

SD15 = family("sd15")


def work_of(costs: BaseCosts, *, batch_size: int = 1, **changes: Any) -> Any:
    return step_work(load_of(**changes), costs, batch_size=batch_size, pinnable_bytes=None)


def flux_work(**changes: Any) -> Any:
    same = {"bucket_px": (1024, 1024), "checkpointing": "full", "batch_size": 2}
    return work_of(costs_of(FLUX), **{**same, **changes})


def seconds(work: Any, name: str, *, precision: Any = "bf16", gib: int = 8) -> Any:
    gpu = replace(CARD, name=name, total_bytes=gib * GIB)
    return step_time(work, gpu=gpu, threads=1, precision=precision)


def test_published_steps_lie_in_the_range() -> None:
    """Stable Diffusion 1.5 on an H100, of a trainer that runs adapters as peft does; FLUX.1 in nf4 on a 4090."""
    costs = WideCosts(family=SD15, facts=sd15_facts())
    for level, published_s in (("none", 0.181), ("full", 0.305)):
        time = seconds(work_of(costs, checkpointing=level), "NVIDIA H100 80GB HBM3")
        assert time.low_s < published_s < time.high_s
        assert "estimate" in time.note and "starting kernels" in time.note
    for side_px, published_s in ((512, 1.4), (1024, 3.5)):
        size = (side_px, side_px)
        work = flux_work(base_precision="nf4", bucket_px=size, batch_size=1)
        time = seconds(work, "RTX 4090", gib=24)
        assert time.low_s < published_s < time.high_s


def test_a_measured_step_on_two_cores_lies_in_the_range() -> None:
    """300 steps of 8 images of 64 px on a U-Net of this size took 55 s on two cores."""
    small = {"precision": "fp32", "base_precision": "fp32", "bucket_px": (64, 64)}
    costs = BaseCosts(family=SD15, facts=mini_facts())
    work = work_of(costs, batch_size=8, targets="all", **small)
    two, one = (step_time(work, gpu=None, threads=count, precision="fp32") for count in (2, 1))
    assert two.low_s < 55 / 300 < two.high_s
    assert two.low_s < two.seconds < two.high_s
    assert "rough" in two.note
    assert one.low_s == 2 * two.low_s


def test_copies_between_host_and_gpu_are_counted_both_ways() -> None:
    blocks = load_of().frozen_base(costs_of(FLUX)).streamed_bytes(57)
    assert blocks == pytest.approx(23.66e9, rel=1e-3)
    assert flux_work(streamed_blocks=57, micro_batch=2).bus_bytes == 2 * blocks
    assert flux_work(streamed_blocks=57, micro_batch=1).bus_bytes == 4 * blocks
    assert flux_work(micro_batch=2).bus_bytes == 0
    offloading = load_of(bucket_px=(1024, 1024), checkpointing="offloaded")
    host_bytes = costs_of(FLUX).sample_cost(offloading.workload()).host_bytes
    assert host_bytes > 0
    for micro_batch in (1, 2):
        work = flux_work(checkpointing="offloaded", micro_batch=micro_batch)
        assert work.ordered_bytes == pytest.approx(4 * host_bytes, rel=0.01)
        between = replace(work, ordered_bytes=0)
        waited_s = seconds(work, "RTX 4090").low_s - seconds(between, "RTX 4090").low_s
        assert waited_s == pytest.approx(work.ordered_bytes / 22e9), "it hides behind nothing"
