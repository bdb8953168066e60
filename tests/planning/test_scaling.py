"""What more GPUs are predicted to train."""

from __future__ import annotations

import pytest

from lora_trainer.planning.plan import plan
from lora_trainer.planning.scaling import (
    ring_all_reduce_s,
    scaled,
    scaling_of,
    scaling_text,
)
from tests.fakes.plans import machine, request

SDXL = "stabilityai/stable-diffusion-xl-base-1.0"


def test_a_ring_of_eight_takes_what_the_page_says() -> None:
    """docs/performance.md, "Eight GPUs": 170.2 MB, PCIe 4 x8 and 25 Gbit Ethernet."""
    for speed, seconds in ((13e9, 0.0232), (2.8e9, 0.1067)):
        found = ring_all_reduce_s(170.2e6, devices=8, bytes_per_s=speed)
        assert found == pytest.approx(seconds, abs=5e-5)


def test_more_machines_wait_longer_and_half_the_bytes_half_as_long() -> None:
    def of(size_bytes: float) -> dict[int, float]:
        rows = scaled(0.5, images=2, gradient_bytes=size_bytes, machine_bytes_per_s=13e9)
        return {row.processes: row.images_per_s for row in rows}

    whole, half = of(170.2e6), of(85.1e6)
    assert [*whole] == [2, 4, 8, 16, 32, 64]
    assert whole[2] == pytest.approx(4 / (0.5 + 170.2e6 / 13e9 + 4e-5))
    assert whole[8] / 8 > 1.1 * whole[16] / 16, "the network is slower than the bus"
    assert whole[16] < whole[32] < whole[64]
    for count in whole:
        waiting, less = (2 * count / rate - 0.5 for rate in (whole[count], half[count]))
        latency_s = 2 * (count - 1) * 20e-6
        assert less - latency_s == pytest.approx((waiting - latency_s) / 2)


def test_a_plan_says_it_for_its_own_adapter_gpu_and_way_of_reducing() -> None:
    def of(**overrides: object) -> list[float]:
        inputs = request(SDXL, machine(24), overrides=dict(overrides))
        return [row.images_per_s for row in scaling_of(plan(inputs), inputs)]

    plain = of()
    assert len(plain) == 6
    assert all(
        more > less for more, less in zip(of(**{"hardware.reduced_as": "bf16"}), plain, strict=True)
    )
    assert of(**{"adapter.rank": 128})[-1] < plain[-1]
    assert of(**{"hardware.device": "cpu"}) == [] and scaling_text([]) == ""
