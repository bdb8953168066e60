"""A GPU on which a plan did not fit is planned smaller next time, by as much as was seen and no more."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lora_trainer.hardware.machine import GIB, Hardware
from lora_trainer.hardware.nvml import Gpu
from lora_trainer.planning.plan_input import BELOW, OomHistory, OomRecord

CARD = Gpu(
    index=0,
    name="NVIDIA GeForce RTX 3060",
    total_bytes=12 * GIB,
    free_bytes=11 * GIB,
    compute_capability=(8, 6),
    driver="570",
)
MACHINE = Hardware(
    gpus=(CARD,),
    gpu_reason="one",
    cpu_name="",
    cpu_threads=8,
    ram_total_bytes=64 * GIB,
    ram_free_bytes=32 * GIB,
    packages={"torch": "2.13"},
    reasons={},
)


@pytest.fixture
def memo(tmp_path: Path) -> OomHistory:
    return OomHistory.of(tmp_path / "not made yet")


def test_the_next_plan_stays_below_the_one_that_did_not_fit(memo: OomHistory) -> None:
    assert memo.known(MACHINE, "sdxl") is None
    memo.remember(MACHINE, "sdxl", planned_bytes=10 * GIB, limit_bytes=11 * GIB)
    found = memo.known(MACHINE, "sdxl")
    assert found is not None
    assert found.share == pytest.approx(BELOW * 10 / 11, abs=1e-4)
    assert found.share * 11 * GIB < 10 * GIB


def test_it_only_ever_gets_smaller(memo: OomHistory) -> None:
    shares = []
    for planned in (10.0, 9.0, 10.9):
        found = memo.remember(
            MACHINE, "sdxl", planned_bytes=int(planned * GIB), limit_bytes=11 * GIB
        )
        assert found is not None
        shares.append(found.share)
    assert shares[1] < shares[0]
    assert shares[2] == shares[1]
    assert memo.known(MACHINE, "sdxl") == OomRecord(share=shares[1], on=found.on)


def test_a_plan_far_below_its_limit_was_not_at_fault(memo: OomHistory) -> None:
    """Something else filled the GPU; to plan by that would make every later run small."""
    assert memo.remember(MACHINE, "sdxl", planned_bytes=4 * GIB, limit_bytes=11 * GIB) is None
    assert memo.known(MACHINE, "sdxl") is None


@pytest.mark.parametrize(
    "other",
    [
        replace(MACHINE, gpus=(replace(CARD, name="NVIDIA GeForce RTX 4070"),)),
        replace(MACHINE, gpus=(replace(CARD, total_bytes=8 * GIB),)),
        replace(MACHINE, packages={"torch": "2.14"}),
        replace(MACHINE, gpus=()),
    ],
    ids=["card", "size", "torch", "none"],
)
def test_it_is_of_one_card_and_one_torch(memo: OomHistory, other: Hardware) -> None:
    memo.remember(MACHINE, "sdxl", planned_bytes=10 * GIB, limit_bytes=11 * GIB)
    assert memo.known(other, "sdxl") is None
    assert memo.known(MACHINE, "sd15") is None
    assert memo.known(MACHINE, "sdxl") is not None
