"""Steps that became slow, and memory that grows: found when they are, never for what comes and goes."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest

from lora_trainer.training import pace

MIB = 2**20


def timed(seconds: float, *, wait_s: float = 0.0, latents: int = 4096) -> tuple[pace.Timed, int]:
    return pace.Timed(seconds, wait_s), latents


def said(judge: pace.StepPace, steps: Iterable[tuple[pace.Timed, int]]) -> list[pace.Slow]:
    return [slow for step in steps if (slow := judge.take(*step)) is not None]


def settled(seconds: float = 2.0, wait_s: float = 0.0) -> pace.StepPace:
    judge = pace.StepPace()
    assert not said(judge, [timed(seconds, wait_s=wait_s)] * (pace.BASELINE_STEPS + 5))
    assert judge.known
    return judge


def test_steps_that_stay_slow_are_said_once_until_they_were_as_before() -> None:
    judge = settled(wait_s=0.5)
    (slow,) = said(judge, [timed(3.2, wait_s=1.5)] * 40)
    assert slow.factor == pytest.approx(1.6)
    assert (slow.now, slow.usual) == ((3.2, 1.5), (2.0, 0.5))
    assert not said(judge, [timed(2.0)] * 20)
    assert len(said(judge, [timed(4.0)] * 20)) == 1


@pytest.mark.parametrize(
    "steps",
    [
        pytest.param([timed(2.8)] * 100, id="less than half as long again"),
        pytest.param([timed(9.0), *[timed(2.0)] * 4] * 20, id="single ones"),
        pytest.param([timed(9.0)] * 3 + [timed(2.0)] * 50, id="not for long"),
        pytest.param([timed(8.0, latents=16384)] * 100, id="larger images take longer"),
    ],
)
def test_what_comes_and_goes_is_no_finding(steps: list[Any]) -> None:
    assert not said(settled(), steps)
    assert not said(settled(0.05), [timed(0.2)] * 40), "milliseconds"


def test_the_first_steps_of_a_size_and_those_after_pauses_do_not_count() -> None:
    judge = pace.StepPace()
    compiling = [timed(60.0)] * 3
    assert not said(judge, compiling + [timed(2.0)] * 40)
    for _ in range(30):  # sampling every second step
        judge.skip = True
        assert not said(judge, [timed(30.0), timed(2.0)])


def test_noise_is_no_finding() -> None:
    """Ten thousand steps whose times vary by a fifth, half of them in two sizes."""
    draw = random.Random(0)
    steps = [
        timed(2.0 * size * draw.lognormvariate(0, 0.2), latents=4096 * size)
        for size in draw.choices((1, 2), k=10_000)
    ]
    assert not said(pace.StepPace(), steps)


def grown(used: Iterable[float]) -> list[pace.Growth]:
    creep = pace.Creep()
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
