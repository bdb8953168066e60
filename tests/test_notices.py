"""What a run says of itself, through the command line: slow steps with their cause, memory that grows, once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.common.event_kinds import Event
from lora_trainer.common.events import EventStream
from lora_trainer.config.config import build_config
from lora_trainer.hardware import nvml
from lora_trainer.training import cores, loop, pace
from tests.fakes.made_events import made
from tests.fakes.nvml import GIB, FakeCard, FakeNvml
from tests.fakes.runs import Toy, problems, toy

STEPS = 40


@pytest.fixture
def place(tmp_path: Path) -> Toy:
    return toy(tmp_path).with_base()


def made_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let steps take 2 s each, 5 s from step 20 on; five stand for the fifteen that are usual.

    Other programs use nothing at the first look at the machine, and 1000 processors at others.
    """
    monkeypatch.setattr("lora_trainer.training.pace.BASELINE_STEPS", 5)
    seconds = iter([2.0] * 20 + [5.0] * STEPS)
    monkeypatch.setattr(loop._Reports, "lap_s", lambda self: next(seconds))

    def times() -> Iterator[cores.CpuTimes]:
        yield cores.CpuTimes(at_s=0.0, all_s=0.0, own_s=0.0)
        yield cores.CpuTimes(at_s=1.0, all_s=1.0, own_s=1.0)
        while True:
            yield cores.CpuTimes(at_s=2.0, all_s=2.0, own_s=2.0)
            yield cores.CpuTimes(at_s=3.0, all_s=1003.0, own_s=3.0)

    measured = times()
    monkeypatch.setattr("lora_trainer.training.pace._WATCHED_S", 0.0)
    monkeypatch.setattr("lora_trainer.training.pace.cpu_times", lambda numbers: next(measured))


def test_slow_steps_are_explained_once(
    place: Toy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made_slow(monkeypatch)
    pauses = {"train__validate_every_steps": 20, "output__save_every_steps": 15}
    assert place.train(steps=STEPS, **pauses) == 0
    (slow,) = (row for row in problems(place.run) if row["what"].startswith("steps take"))
    assert slow["what"].startswith("steps take 2.5 times as long as before, 5 s instead of 2")
    assert "other programs use" in slow["what"]
    assert slow["severity"] == "warning"
    assert "steps take 2.5 times" in capsys.readouterr().out
    assert "steps take 2.5 times" in (place.run / "report.html").read_text(encoding="utf-8")


# ---- the cause, from two looks at a faked GPU and machine; nothing that fails raises

LASTING = pace.Slow(2.0, now=pace.Timed(4.0, 0.1), usual=pace.Timed(2.0, 0.1))
GPU = nvml.Gpu(
    index=1,
    name="a GPU",
    total_bytes=12 * GIB,
    free_bytes=11 * GIB,
    compute_capability=(8, 6),
    driver="",
    uuid="GPU-b",
)
SPILLING = replace(GPU, spills=True)
US, OTHER = 4711, 4712
CARD = nvml.CardState(
    total_bytes=12 * GIB,
    used_bytes=9 * GIB,
    clock_mhz=1900,
    celsius=70,
    users=frozenset({US}),
    busy_percent={US: 95},
)
UNCHANGED = pace.MachineState(card=CARD, processors=8)


def found(
    now: pace.MachineState,
    *,
    before: pace.MachineState = UNCHANGED,
    slow: pace.Slow = LASTING,
    gpu: nvml.Gpu | None,
    streamed_blocks: int = 0,
) -> list[Any]:
    plain = {"hardware.threads": 8, "memory.streamed_blocks": streamed_blocks}
    config: Any = build_config(plain)
    *likely, unknown = pace.causes(slow, before, now, gpu=gpu, config=config)
    assert unknown.name == "unknown"
    # Without a GPU nobody is sent to its tools.
    assert ("nvidia-smi" in unknown.fix) == (gpu is not None)
    return likely


def with_card(**changes: Any) -> pace.MachineState:
    return replace(UNCHANGED, card=replace(CARD, **changes))


def test_nothing_that_changed_is_no_cause() -> None:
    assert not found(UNCHANGED, gpu=SPILLING)
    assert not found(with_card(celsius=83, held_back=0x4), gpu=GPU)
    assert not found(pace.MachineState(processors=8), gpu=None)


CAUSES = [
    (with_card(used_bytes=int(11.9 * GIB)), "spill", "11.9 of 12.0 GiB", "vram_limit_gib=8.6"),
    (
        with_card(clock_mhz=1200, celsius=88, held_back=0x40),
        "heat",
        "from 1900 to 1200 MHz at 88 degrees Celsius, because of heat",
        "more air",
    ),
    (with_card(clock_mhz=600, held_back=0x80), "the power supply", "1900 to 600", "power cables"),
    (
        with_card(clock_mhz=600, held_back=0x4),
        "its power limit or settings",
        "1900 to 600",
        "laptop",
    ),
    (with_card(users=frozenset({US, OTHER})), "others", f"process {OTHER}", "close them"),
    (with_card(busy_percent={US: 50, OTHER: 45}), "others", f"process {OTHER}", "close them"),
    (
        replace(UNCHANGED, swapped_bytes_per_s=3e7),
        "swap",
        "swaps 29 MiB/s",
        "memory.base_precision=int8",
    ),
    (replace(UNCHANGED, cores_taken=7.6), "processor", "7.6 of 8 processors", "close them"),
]


@pytest.mark.parametrize(("now", "name", "said", "setting"), CAUSES)
def test_each_cause_is_named_with_what_to_do(
    now: pace.MachineState, name: str, said: str, setting: str
) -> None:
    (cause,) = found(now, gpu=SPILLING)
    assert cause.name == name
    assert said in cause.observation
    assert setting in cause.fix


def test_waiting_for_data_comes_first() -> None:
    waits = LASTING._replace(now=pace.Timed(4.0, 1.9))
    first, second = found(with_card(users=frozenset({US, OTHER})), slow=waits, gpu=GPU)
    assert (first.name, second.name) == ("data", "others")
    assert "48 %" in first.observation
    assert "data.prefetch_steps" in first.fix


def test_a_cause_depends_on_driver_device_and_settings() -> None:
    assert not found(with_card(used_bytes=12 * GIB), gpu=GPU), "this driver does not spill"
    busy = replace(UNCHANGED, cores_taken=3.0)
    assert not found(busy, gpu=GPU), "the GPU needs few processors"
    (cause,) = found(busy, gpu=None)
    assert cause.name == "processor"
    (cause,) = found(busy, before=replace(busy, cores_taken=2.6), gpu=None)
    assert cause.observation == "other programs use 3.0 of 8 processors, 2.6 before"
    assert not found(busy, before=replace(busy, cores_taken=3.4), gpu=None), "they use less now"
    giving_way = replace(UNCHANGED, cores_taken=0.4, gives_way=True)
    (cause,) = found(giving_way, gpu=None)
    assert cause[:2] == ("processor", "the training's threads gave way to other programs")
    assert not found(giving_way, before=giving_way, gpu=None), "they gave way before, too"
    config: Any = build_config({"hardware.threads": 8})
    *_, unknown = pace.causes(LASTING, giving_way, giving_way, gpu=None, config=config)
    assert "but the other programs" in unknown.observation, "the log has named them"
    (cause,) = found(replace(UNCHANGED, swapped_bytes_per_s=3e7), streamed_blocks=20, gpu=GPU)
    assert "memory.streamed_blocks (now 20)" in cause.fix


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


# ---- memory that grows


def test_memory_that_lasts_to_the_end_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "BLOCK_STEPS", 1)
    monkeypatch.setattr(pace, "free_ram_bytes", lambda: 1000 * GIB)
    monkeypatch.setattr(pace.Notices, "_look", lambda self: UNCHANGED)
    stream, seen = EventStream(), list[Event]()
    stream.subscribe(seen.append)
    config: Any = build_config({"train.steps": 1000})

    def refused(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with pace.Notices(config=config, gpu=GPU, events=stream) as notices:
        # Where memory is used up, a thread that starts in a step may hang it.
        monkeypatch.setattr(threading.Thread, "start", refused)
        for step in range(100):
            grown = {"host_own_bytes": step * GIB, "vram_now_bytes": step * GIB // 10}
            fields = {"seconds": 1.0, "data_wait_s": 0.0, "latents": 64, "epoch": 1.0, **grown}
            stream.emit(made("step", step=step, vram_used_bytes=0, **fields))
        assert notices._pace.known
        stream.emit(made("out_of_memory", images_at_once=1))
        assert not notices._pace.known, "a changed training is measured anew"
    host, card = (event.fields for event in seen if event.kind == "problem")
    assert host["what"].startswith("host memory grows by 102400 MiB every 100 steps")
    assert "1000.0 GiB that are free are used up in 1000 steps, after" in host["what"]
    assert card["what"].startswith("the GPU's memory") and "120 steps, before" in card["what"]
    assert [host["severity"], card["severity"]] == ["note", "warning"]
