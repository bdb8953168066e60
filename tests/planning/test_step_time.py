"""Estimated seconds of a step: published and measured ones lie in the range, and what costs time does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lora_trainer.config.base_precision import BasePrecision
from lora_trainer.config.config import AdapterSettings, Checkpointing
from lora_trainer.families import family, known_base
from lora_trainer.families.base import BaseFacts
from lora_trainer.planning.loads import Load, RememberedCosts
from lora_trainer.planning.memory import GIB
from lora_trainer.planning.step_time import (
    Card,
    StepTime,
    StepWork,
    card,
    gpu_step_time,
    step_time,
    step_work,
)
from tests.fakes.stable_diffusion import SD15, WideCosts, mini_facts, sd15_facts

LOAD = Load(
    device="cuda",
    precision="bf16",
    base_precision="bf16",
    adapter=AdapterSettings(rank=16, targets="attention"),
    text_precision="fp32",
    text_offload=False,
    optimizer="adamw",
    micro_batch=1,
    checkpointing="none",
    streamed_blocks=0,
    bucket_px=(512, 512),
    samples=False,
    sample_side_px=512,
    prepared_samples=4,
)
COSTS = RememberedCosts(family=SD15, facts=sd15_facts())


def flux_facts() -> BaseFacts:
    facts = known_base("black-forest-labs/FLUX.1-dev")
    assert facts is not None
    return facts


FLUX_COSTS = RememberedCosts(family=family("flux"), facts=flux_facts())


def gpu_time(name: str, *, batch_size: int = 1, **changes: Any) -> StepTime:
    load = replace(LOAD, **changes)
    work = step_work(load, COSTS, batch_size=batch_size, pinnable_bytes=None)
    return gpu_step_time(work, card(name, total_bytes=8 * GIB), precision=load.precision)


def flux_work(**changes: Any) -> StepWork:
    load = replace(LOAD, bucket_px=(1024, 1024), checkpointing="full")
    return step_work(
        replace(load, **changes),
        FLUX_COSTS,
        batch_size=2,
        pinnable_bytes=None,
    )


@pytest.mark.parametrize(("checkpointing", "published_s"), [("none", 0.181), ("full", 0.305)])
def test_a_published_step_on_an_h100_lies_in_the_range(
    checkpointing: Checkpointing, published_s: float
) -> None:
    """Of a trainer that runs adapters as peft does."""
    costs = WideCosts(family=SD15, facts=sd15_facts())
    load = replace(LOAD, checkpointing=checkpointing)
    work = step_work(load, costs, batch_size=1, pinnable_bytes=None)
    time = gpu_step_time(work, card("NVIDIA H100 80GB HBM3", total_bytes=8 * GIB), precision="bf16")
    assert time.low_s < published_s < time.high_s
    assert "estimate" in time.note
    assert "starting kernels" in time.note


def test_published_steps_of_flux_on_a_4090_lie_in_the_range() -> None:
    """nf4, 512 px: 1.4 s; 1024 px: 3.5 s (another trainer's quick start)."""
    for side_px, published_s in ((512, 1.4), (1024, 3.5)):
        load = replace(
            LOAD, base_precision="nf4", checkpointing="full", bucket_px=(side_px, side_px)
        )
        work = step_work(load, FLUX_COSTS, batch_size=1, pinnable_bytes=None)
        time = gpu_step_time(work, card("RTX 4090", total_bytes=24 * GIB), precision="bf16")
        assert time.low_s < published_s < time.high_s


def test_slow_cards_are_bound_by_arithmetic() -> None:
    slow = gpu_time("NVIDIA GeForce RTX 3060", batch_size=4, micro_batch=4)
    fast = gpu_time("NVIDIA GeForce RTX 4090", batch_size=4, micro_batch=4)
    assert slow.high_s > 2 * fast.high_s
    assert "arithmetic" in slow.note


def test_splitting_and_fp32_make_a_step_longer() -> None:
    name = "NVIDIA GeForce RTX 4090"
    whole = gpu_time(name, batch_size=4, micro_batch=4)
    assert gpu_time(name, batch_size=4, micro_batch=1).high_s > whole.high_s
    assert gpu_time(name, batch_size=4, micro_batch=4, precision="fp32").high_s > whole.high_s


@pytest.mark.parametrize("kind", ["int8", "fp8", "nf4"])
def test_dequantising_is_paid_once_for_each_pass_over_the_weights(kind: BasePrecision) -> None:
    once = flux_work(base_precision=kind, micro_batch=2)
    assert flux_work(base_precision=kind).dequantised_bytes == 2 * once.dequantised_bytes
    kept = flux_work(base_precision=kind, micro_batch=2, checkpointing="none")
    assert once.dequantised_bytes == 1.5 * kept.dequantised_bytes
    assert flux_work(micro_batch=2).dequantised_bytes == 0
    assert once.kernels > flux_work(micro_batch=2).kernels


def test_a_streamed_block_comes_twice_in_every_pass() -> None:
    blocks = FLUX_COSTS.frozen_base(LOAD).streamed_bytes(57)
    assert blocks == pytest.approx(23.66e9, rel=1e-3)
    assert flux_work(streamed_blocks=57, micro_batch=2).bus_bytes == 2 * blocks
    assert flux_work(streamed_blocks=57, micro_batch=1).bus_bytes == 4 * blocks
    assert flux_work(micro_batch=2).bus_bytes == 0


def test_offloaded_inputs_go_and_come_back_for_every_image() -> None:
    cost = FLUX_COSTS.sample_cost(
        replace(LOAD, bucket_px=(1024, 1024), checkpointing="offloaded").workload()
    )
    assert cost.host_bytes > 0
    for micro_batch in (1, 2):
        work = flux_work(checkpointing="offloaded", micro_batch=micro_batch)
        assert work.bus_bytes == pytest.approx(4 * cost.host_bytes, rel=0.01)


def test_copies_cost_what_they_take_longer_than_the_arithmetic_and_memory_traffic() -> None:
    machine = Card(name="toy", flops_per_s=1e12, bytes_per_s=1e12)
    busy = StepWork(flops=1e12, other_flops=0, kernels=0, dequantised_bytes=0, bus_bytes=0)
    hidden = gpu_step_time(replace(busy, bus_bytes=1e9), machine, precision="bf16")
    shown = gpu_step_time(replace(busy, bus_bytes=1e12), machine, precision="bf16")
    alone = gpu_step_time(busy, machine, precision="bf16")
    assert alone.low_s < hidden.low_s <= alone.low_s + 2 * 1e9 / machine.bytes_per_s
    assert shown.low_s > 10 * hidden.low_s
    assert "host memory" in shown.note


def test_a_measured_step_on_two_cores_lies_in_the_range() -> None:
    """300 steps of 8 images of 64 px on a U-Net of this size took 55 s on two cores."""
    load = replace(
        LOAD,
        precision="fp32",
        base_precision="fp32",
        bucket_px=(64, 64),
        adapter=AdapterSettings(rank=16, targets="all"),
    )
    costs = RememberedCosts(family=SD15, facts=mini_facts())
    work = step_work(load, costs, batch_size=8, pinnable_bytes=None)
    time = step_time(work, gpu=None, threads=2, precision="fp32")
    assert time.low_s < 55 / 300 < time.high_s
    assert time.low_s < time.seconds < time.high_s
    assert "rough" in time.note
    assert step_time(work, gpu=None, threads=1, precision="fp32").low_s == 2 * time.low_s


def test_samples_that_come_twice_and_the_bases_own_predictions_cost_passes() -> None:
    cost = COSTS.sample_cost(LOAD.workload())

    def work(**changes: Any) -> StepWork:
        load = replace(LOAD, **changes)
        return step_work(load, COSTS, batch_size=4, pinnable_bytes=None)

    plain = work()
    assert work(twice=1.0).flops == 2 * plain.flops
    assert work(as_base=0.5).flops == plain.flops + 2 * cost.forward_flops
    assert plain.kernels < work(as_base=0.5).kernels < work(twice=0.5).kernels
    streamed = flux_work(streamed_blocks=20)
    again = flux_work(streamed_blocks=20, as_base=1.0)
    assert again.bus_bytes == 1.5 * streamed.bus_bytes, "forward alone is one way of two"
