"""Predicted seconds of a step: published and measured steps lie in the range, and each cost is counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lora_trainer.costs.base_costs import BaseCosts
from lora_trainer.families import family
from lora_trainer.planning.step_time import step_time, step_work
from tests.fakes.nvml import GIB
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
