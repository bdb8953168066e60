"""Steps that became slow, and memory that grows: found when they are, never for what comes and goes."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from lora_trainer.training.pace import BASELINE_STEPS, Creep, Growth, Slow, StepPace, Timed

MIB = 2**20


def timed(seconds: float, *, wait_s: float = 0.0, latents: int = 4096) -> Timed:
    return Timed(seconds=seconds, wait_s=wait_s, latents=latents)


def said(pace: StepPace, steps: Iterable[Timed]) -> list[Slow]:
    return [slow for step in steps if (slow := pace.take(step)) is not None]


def settled(seconds: float = 2.0, wait_s: float = 0.0) -> StepPace:
    pace = StepPace()
    assert not said(pace, [timed(seconds, wait_s=wait_s)] * (BASELINE_STEPS + 5))
    assert pace.known
    return pace


def test_steps_that_stay_slow_are_said_once_until_they_were_as_before() -> None:
    pace = settled(wait_s=0.5)
    (slow,) = said(pace, [timed(3.2, wait_s=1.5)] * 40)
    assert slow.factor == pytest.approx(1.6)
    assert (slow.now, slow.usual) == (timed(3.2, wait_s=1.5), timed(2.0, wait_s=0.5))
    assert not said(pace, [timed(2.0)] * 20)
    assert len(said(pace, [timed(4.0)] * 20)) == 1
    pace.forget()
    assert not pace.known
    assert not said(pace, [timed(5.0)] * 60), "a changed training is measured anew"


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([timed(2.8)] * 100, id="less than half as long again"),
        pytest.param([timed(9.0), *[timed(2.0)] * 4] * 20, id="single ones"),
        pytest.param([timed(9.0)] * 3 + [timed(2.0)] * 50, id="not for long"),
        pytest.param([timed(8.0, latents=16384)] * 100, id="larger images take longer"),
    ],
)
def test_what_comes_and_goes_is_no_finding(steps: list[Timed]) -> None:
    assert not said(settled(), steps)
    assert not said(settled(0.05), [timed(0.2)] * 40), "milliseconds"


def test_the_first_steps_of_a_size_and_those_after_pauses_do_not_count() -> None:
    pace = StepPace()
    compiling = [timed(60.0)] * 3
    assert not said(pace, compiling + [timed(2.0)] * 40)
    for _ in range(30):  # sampling every second step
        pace.skip()
        assert not said(pace, [timed(30.0), timed(2.0)])


def test_noise_is_no_finding() -> None:
    """Ten thousand steps whose times vary by a fifth, half of them in two sizes."""
    draw = random.Random(0)
    steps = [
        timed(2.0 * size * draw.lognormvariate(0, 0.2), latents=4096 * size)
        for size in draw.choices((1, 2), k=10_000)
    ]
    assert not said(StepPace(), steps)


def grown(used: Iterable[float]) -> list[Growth]:
    creep = Creep()
    return [growth for each in used if (growth := creep.take(int(each))) is not None]


def test_memory_that_grows_all_the_time_is_said_once() -> None:
    draw = random.Random(0)
    used = [5000 * MIB + step * 0.5 * MIB + draw.random() * 300 * MIB for step in range(2000)]
    (growth,) = grown(used)
    assert growth.bytes_per_step == pytest.approx(0.5 * MIB, rel=0.1)
    assert growth.so_far_bytes > 64 * MIB


def test_memory_that_comes_and_goes_fills_a_cache_or_grows_little_is_no_finding() -> None:
    draw = random.Random(1)
    assert not grown(5000 * MIB + draw.random() * 900 * MIB for _ in range(10_000))
    assert not grown(min(step, 300) * 10.0 * MIB for step in range(6000))
    assert not grown(4000 * MIB * (1 - 2 ** (-step / 100)) for step in range(6000))
    assert not grown(5000 * MIB + step * 1000.0 for step in range(10_000))
