"""What the watch over two commits calls slower, and in which order it measures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import watch
from benchmarks.watch import Took


def seconds(values: Sequence[float]) -> list[Took]:
    return [Took(wall_s=value, cpu_s=value) for value in values]


NOISY = [1.0, 1.4, 0.8, 1.2, 0.9, 1.1]


@pytest.mark.parametrize(
    ("after", "slower"),
    [
        ([2.2, 1.0, 2.0, 0.7, 1.8, 1.1], False),  # the middle is slower, the rounds do not agree
        (
            [1.1 * value for value in NOISY],
            True,
        ),  # by a tenth in every round, whatever else there was
        ([1.04 * value for value in NOISY], False),  # within the margin
        ([0.5 * value for value in NOISY], False),
    ],
)
def test_a_loss_counts_past_the_noise_of_the_rounds_and_the_margin(
    after: Sequence[float], slower: bool
) -> None:
    row = watch.compared("step", seconds(NOISY), seconds(after), margin=0.05)
    assert row["slower"] is slower
    assert row["cpu_s"]["ratio_least"] <= row["cpu_s"]["ratio"]


def test_a_loss_by_the_clock_alone_counts_too() -> None:
    waits = [Took(wall_s=2 * value, cpu_s=value) for value in NOISY]
    assert watch.compared("plan", seconds(NOISY), waits, margin=0.05)["slower"]


def test_both_sides_take_turns_and_a_part_is_what_one_command_takes_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, str]] = []

    class Faked(watch.Side):
        def python(self, *words: str) -> Took:
            asked.append((self.place.name, words[1]))
            return Took(1.0, 1.0)

        def train(self, name: str, *, steps: int, folder: Path) -> Took:
            caching = 30.0 if name == "empty" else 0.0
            return Took(10.0 + caching + 2 * steps, 5.0 + caching + steps)

    sides = {name: Faked(tmp_path / name) for name in ("before", "after")}
    for side in sides.values():
        side.place.mkdir()
    found = watch.measured(sides, ["import", "training"], rounds=2)
    imports = [side for side, word in asked if "import" in word]
    assert imports[2:] == ["before", "after", "after", "before"]
    before, after = found["step"]
    assert before == after == [Took(2.0, 1.0)] * 2
    assert found["caching"][0] == [Took(30.0, 30.0)] * 2
    assert found["start and end"][1] == [Took(10.0, 5.0)] * 2
    watch.show(
        [watch.compared(part, *pair, margin=0.05) for part, pair in found.items()],
        before="a",
        after="b",
    )
    assert "| step | 1.00 | 1.00 | 1.000 |" in capsys.readouterr().out
