"""Why steps became slow, from two looks at a faked GPU and machine; nothing that fails raises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from lora_trainer.config.config import build_config
from lora_trainer.config.running import Config
from lora_trainer.hardware import nvml
from lora_trainer.training import pace
from tests.fakes.nvml import GIB, FakeCard, FakeNvml

SLOW = pace.Slow(
    factor=2.0,
    now=pace.Timed(seconds=4.0, wait_s=0.1, latents=64),
    usual=pace.Timed(seconds=2.0, wait_s=0.1, latents=64),
)
US, OTHER = 4711, 4712
CARD = nvml.CardState(
    total_bytes=12 * GIB,
    used_bytes=9 * GIB,
    clock_mhz=1900,
    celsius=70,
    users=frozenset({US}),
    busy_percent={US: 95},
)
QUIET = pace.MachineState(card=CARD, beside_card=True, processors=8)


def settings(values: Mapping[str, Any]) -> Config:
    plain = {"hardware.threads": 8, "memory.streamed_blocks": 0}
    return build_config({**plain, **values})


def found(
    now: pace.MachineState, *, slow: pace.Slow = SLOW, spills: bool = False, **values: Any
) -> list[Any]:
    config = settings({key.replace("__", "."): value for key, value in values.items()})
    *likely, unknown = pace.causes(slow, QUIET, now, spills=spills, config=config)
    assert unknown.name == "unknown"
    return likely


def with_card(**changes: Any) -> pace.MachineState:
    return replace(QUIET, card=replace(CARD, **changes))


def test_nothing_that_changed_is_no_cause() -> None:
    assert not found(QUIET, spills=True)
    assert not found(with_card(celsius=83, held_back=0x4))
    assert not found(pace.MachineState(processors=8))


@pytest.mark.parametrize(
    ("now", "name", "said", "setting"),
    [
        (with_card(used_bytes=int(11.9 * GIB)), "spill", "11.9 of 12.0 GiB", "vram_limit_gib=8.6"),
        (
            with_card(clock_mhz=1200, celsius=88, held_back=0x40),
            "heat",
            "88 degrees Celsius and has lowered its clock from 1900 to 1200 MHz",
            "fans",
        ),
        (with_card(clock_mhz=600, held_back=0x80), "power supply", "1900 to 600", "power cables"),
        (with_card(clock_mhz=600, held_back=0x4), "clock", "1900 to 600", "laptop"),
        (with_card(users=frozenset({US, OTHER})), "others", f"process {OTHER}", "close them"),
        (with_card(busy_percent={US: 50, OTHER: 45}), "others", f"process {OTHER}", "close them"),
        (
            replace(QUIET, swapped_bytes_per_s=3e7),
            "swap",
            "swaps 29 MiB/s",
            "memory.base_precision=int8",
        ),
        (replace(QUIET, cores_taken=7.6), "processor", "7.6 of 8 processors", "close them"),
    ],
)
def test_each_cause_is_named_with_what_to_do(
    now: pace.MachineState, name: str, said: str, setting: str
) -> None:
    (cause,) = found(now, spills=True)
    assert cause.name == name
    assert said in cause.observation
    assert setting in cause.fix


def test_waiting_for_data_comes_first() -> None:
    waits = replace(SLOW, now=replace(SLOW.now, wait_s=1.9))
    first, second = found(with_card(users=frozenset({US, OTHER})), slow=waits)
    assert (first.name, second.name) == ("data", "others")
    assert "48 %" in first.observation
    assert "data.prefetch_steps" in first.fix


def test_a_cause_depends_on_driver_device_and_settings() -> None:
    assert not found(with_card(used_bytes=12 * GIB)), "this driver does not spill"
    busy = replace(QUIET, cores_taken=3.0)
    assert not found(busy), "the GPU needs few processors"
    (cause,) = found(replace(busy, beside_card=False))
    assert cause.name == "processor"
    giving_way = replace(QUIET, beside_card=False, cores_taken=0.4, gives_way=True)
    (cause,) = found(giving_way)
    assert (cause.name, cause.observation) == (
        "processor",
        "the training's threads gave way to other programs",
    )
    (again,) = pace.causes(SLOW, giving_way, giving_way, spills=False, config=settings({}))
    assert again.name == "unknown", "they gave way when steps were fast, too"
    (cause,) = found(replace(QUIET, swapped_bytes_per_s=3e7), memory__streamed_blocks=20)
    assert "memory.streamed_blocks (now 20)" in cause.fix


def test_without_a_gpu_nobody_is_sent_to_its_tools() -> None:
    for beside_card in (True, False):
        now = replace(QUIET, beside_card=beside_card)
        (cause,) = pace.causes(SLOW, QUIET, now, spills=False, config=settings({}))
        assert ("nvidia-smi" in cause.fix) == beside_card


# ---- asking the driver


BUSY = FakeCard(
    uuid="GPU-b",
    clock_mhz=1500,
    celsius=66,
    held_back=0x4,
    compute_pids=(US,),
    graphics_pids=(OTHER,),
    busy_percent={US: 90},
)
GPU = nvml.Gpu(
    index=1,
    name="a GPU",
    total_bytes=12 * GIB,
    free_bytes=11 * GIB,
    compute_capability=(8, 6),
    driver="",
    uuid="GPU-b",
)


def test_the_driver_is_asked_about_this_card() -> None:
    driver = FakeNvml(cards=(FakeCard(), BUSY))
    assert nvml.card_state(GPU, driver) == nvml.CardState(
        total_bytes=12 * GIB,
        used_bytes=GIB,
        clock_mhz=1500,
        load_percent=0,
        celsius=66,
        watts=15.0,
        held_back=0x4,
        users=frozenset({US, OTHER}),
        busy_percent={US: 90},
    )
    assert driver.sessions == 0


def test_what_a_driver_does_not_tell_is_left_out() -> None:
    calls = ("ClockInfo", "Temperature", "UtilizationRates", "PowerUsage", "ProcessUtilization")
    calls += ("CurrentClocksThrottleReasons", "ComputeRunningProcesses", "GraphicsRunningProcesses")
    for call in calls:
        card = replace(BUSY, refuses={f"nvmlDeviceGet{call}": "Not Supported"})
        state = nvml.card_state(GPU, FakeNvml(cards=(card,)))
        assert state is not None and state.total_bytes == 12 * GIB, call


def test_a_driver_that_says_nothing_is_no_error() -> None:
    lost = replace(BUSY, refuses={"nvmlDeviceGetMemoryInfo": "GPU is lost"})
    no_driver = FakeNvml(refuses={"nvmlInit": "Driver Not Loaded"})
    for driver in (no_driver, FakeNvml(cards=()), FakeNvml(cards=(lost,))):
        assert nvml.card_state(GPU, driver) is None and nvml.card_states(driver) == ()
