"""The formulas of a LoRA's score: limits, order, and that one broken part sinks the whole."""

from __future__ import annotations

import itertools
import math
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.reporting import score as s

SHARES = st.floats(0, 1)


@given(st.dictionaries(st.sampled_from(sorted(s.WEIGHTS)), SHARES, min_size=1))
def test_a_score_lies_between_its_parts(found: dict[str, float]) -> None:
    if found.get("weights") == 0:
        assert s.score(found) == 0
        return
    held = [max(part, s.FLOOR) for part in found.values()]
    assert min(held) - 1e-9 <= s.score(found) <= max(held) + 1e-9


def test_one_broken_part_sinks_the_score() -> None:
    good = dict.fromkeys(s.WEIGHTS, 0.9)
    assert s.score(good) == pytest.approx(0.9)
    assert s.score(good | {"gain": 0.0}) == pytest.approx(0.9**0.75 * 0.05**0.25)
    assert s.score(good | {"weights": 0.0}) == 0
    assert s.score({"gain": 0.25, "weights": 1.0}) == pytest.approx(0.25 ** (0.25 / 0.4))
    with pytest.raises(ValueError, match="no part"):
        s.score({})


def test_weights_count_dead_sane_and_exploded_modules() -> None:
    assert s.weights_part([0.1, 0.5]) == 1
    assert s.weights_part([0.1, 0.0]) == 0.5
    assert s.weights_part([5.0]) == pytest.approx(0.1)
    assert s.weights_part([0.1, math.inf]) == s.weights_part([math.nan]) == 0
    assert s.weights_part([]) == 0


def test_effective_rank_counts_equal_values_and_ignores_zeros() -> None:
    assert s.effective_rank([2.0, 2.0, 2.0, 0.0]) == pytest.approx(3)
    assert s.effective_rank([5.0, 0.0]) == pytest.approx(1)
    assert 1 < s.effective_rank([3.0, 1.0]) < 2
    assert s.effective_rank([0.0, 0.0]) == 0
    assert s.rank_part([0.125, 1.0]) == 0.75


def test_gain_is_relative_to_each_timestep_and_what_explodes_counts_once() -> None:
    assert s.mean_gain([1.0, 0.01], [0.5, 0.005]) == pytest.approx(0.5)
    assert s.mean_gain([1.0, 1.0], [1e9, math.nan]) == -1
    assert s.gain_part(0.05) == 0.5
    assert s.gain_part(0.0) == s.gain_part(-1.0) == 0


def test_strength_is_the_share_of_the_best_gain_that_full_strength_has() -> None:
    assert s.strength_part({0.0: 1.0, 0.5: 0.8, 1.0: 0.6, 1.5: 0.7}) == 1
    assert s.strength_part({0.0: 1.0, 0.5: 0.6, 1.0: 0.8, 1.5: 1.2}) == pytest.approx(0.5)
    assert s.strength_part({0.0: 1.0, 0.5: 1.1, 1.0: 1.2}) == 0
    assert s.strength_part({0.0: 1.0, 0.5: 0.9, 1.0: math.nan}) == 0


def test_generalisation_is_what_is_left_of_the_gain_on_other_pictures() -> None:
    assert s.generalisation_part(trained_gain=0.4, held_out_gain=0.3) == pytest.approx(0.75)
    assert s.generalisation_part(trained_gain=0.4, held_out_gain=-0.1) == 0
    assert s.generalisation_part(trained_gain=0.1, held_out_gain=0.2) == 1
    assert s.generalisation_part(trained_gain=-0.1, held_out_gain=0.2) == 0


def test_similarity_memorisation_and_drift() -> None:
    assert s.similarity_part(base_distance=2.0, adapted_distance=0.5) == 0.75
    assert s.similarity_part(base_distance=2.0, adapted_distance=-0.1) == 1
    assert s.similarity_part(base_distance=2.0, adapted_distance=3.0) == 0
    assert s.memorisation_part(base_ratio=1.0, adapted_ratio=0.95) == 1
    assert s.memorisation_part(base_ratio=1.0, adapted_ratio=0.7) == pytest.approx(0.5)
    assert s.memorisation_part(base_ratio=1.0, adapted_ratio=0.1) == 0
    assert s.drift_part(change=0.0, base_loss=0.1) == 1
    assert s.drift_part(change=0.1, base_loss=0.1) == 0.5
    assert s.drift_part(change=math.inf, base_loss=0.1) == 0


@given(st.lists(st.floats(0, 10), min_size=1, max_size=6), st.integers(1, 6))
def test_the_nearest_of_a_few_is_the_mean_over_all_choices(found: list[float], count: int) -> None:
    count = min(count, len(found))
    expected = fmean(min(chosen) for chosen in itertools.combinations(found, count))
    assert s.expected_nearest(found, count=count) == pytest.approx(expected)


def test_energy_distance_of_two_points_and_two_others() -> None:
    # 0, 2 against 10, 14 on a line: 2 x mean(10, 14, 8, 12) - 2 - 4.
    assert s.energy_distance([10, 14, 8, 12], [2], [4]) == 16
