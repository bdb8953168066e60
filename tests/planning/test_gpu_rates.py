"""Rates of a laptop's GPU, and copies over the slot that NVML tells of."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lora_trainer.hardware.machine import detect
from lora_trainer.hardware.nvml import Gpu
from lora_trainer.planning import gpu_rates
from lora_trainer.planning.gpu_rates import link_of, rates_of
from lora_trainer.planning.run_time import StepWork, step_time
from tests.fakes.nvml import GIB, FakeCard, FakeNvml


def gpu(name: str = "NVIDIA GeForce RTX 4070", **facts: object) -> Gpu:
    sizes = {"total_bytes": 8 * GIB, "free_bytes": 8 * GIB, "compute_capability": (8, 9)}
    return Gpu(index=0, name=name, driver="580", **{**sizes, **facts})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "watts", "tflops", "says"),
    [
        ("NVIDIA GeForce RTX 4070", None, 58, "RTX 4070"),
        ("NVIDIA GeForce RTX 4070 Laptop GPU", None, 40, "RTX 4070 Laptop"),
        ("NVIDIA GeForce RTX 4070 Laptop GPU", 115, 40, "RTX 4070 Laptop"),
        ("NVIDIA GeForce RTX 4070 Laptop GPU", 60, 30.8, "RTX 4070 Laptop at 60 W"),
        ("NVIDIA GeForce RTX 2070 with Max-Q Design", 80, 18, "RTX 2070 in a laptop"),
        ("NVIDIA GeForce RTX 4090", 300, 165, "RTX 4090"),  # the owner's choice is not guessed at
    ],
)
def test_a_laptop_has_its_own_rates_by_its_power_limit(
    name: str, watts: float | None, tflops: float, says: str
) -> None:
    found = rates_of(gpu(name, watts=watts))
    assert found.flops / 1e12 == pytest.approx(tflops, rel=0.01) and found.says == says


def test_a_slot_of_few_lanes_makes_a_streamed_plan_slower() -> None:
    work = StepWork(flops=1e12, bus_bytes=50e9)
    unknown, wide, narrow = (
        step_time(work, gpu=gpu(pcie=slot), threads=1, precision="bf16")
        for slot in ((0, 0), (4, 16), (3, 4))
    )
    assert wide.range_s[0] < unknown.range_s[0] * 1.05 and wide.range_s[1] < unknown.range_s[1]
    assert narrow.range_s[0] == pytest.approx(50 / (0.85 * 3.94), rel=0.01)
    assert narrow.note.endswith("limited by copies from host memory")


def test_the_spread_that_is_assumed_is_that_of_usual_slots() -> None:
    slow, fast = gpu_rates.LINK_BYTES_PER_S
    assert link_of(gpu(pcie=(3, 8)))[0][0] < slow < link_of(gpu(pcie=(3, 8)))[0][1]
    assert link_of(gpu(pcie=(4, 16)))[0][0] <= 1.01 * fast
    for slot in ((1, 1), (3, 4), (4, 16), (5, 16)):
        pinned, unpinned = link_of(gpu(pcie=slot))
        assert unpinned[0] < pinned[0] and unpinned[0] <= unpinned[1] < pinned[1]


def test_nvml_is_asked_for_the_slot_and_the_power_limit() -> None:
    card = FakeCard(pcie=(4, 8), power_limit_milliwatts=80_000)
    (found,) = detect(nvml=FakeNvml(cards=(card,)), environment={}).gpus
    assert (found.pcie, found.watts) == ((4, 8), 80.0)
    silent = replace(card, pcie=None, power_limit_milliwatts=None)
    (found,) = detect(nvml=FakeNvml(cards=(silent,)), environment={}).gpus
    assert (found.pcie, found.watts) == ((0, 0), None)
