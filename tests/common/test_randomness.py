"""Counter-based draws: pure, separate and the same for ever."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.common import randomness
from lora_trainer.common.randomness import Stream, draw_seed, shuffled

COUNTERS = st.lists(
    st.one_of(st.integers(-5, 5), st.sampled_from(["", "1", "a", "ab"])), max_size=4
)


def test_draws_never_change() -> None:
    """Pinned: another value would change every resumed run and every published recipe."""
    assert draw_seed(42, Stream.NOISE, 0, "a") == 3242176907106882134
    assert shuffled("abcdef", 7, Stream.ORDER, 3) == list("dfebca")
    assert shuffled("abcdef", 7, Stream.ORDER, 4) == list("bdfcae")
    drawn = [randomness.draw_uniform(3, Stream.FLIP, step) for step in range(3)]
    assert drawn == [0.8374790718676328, 0.8447182574372323, 0.25478192593110005]
    chosen = [randomness.draw_choice(4, 1, Stream.TIMESTEP, step) for step in range(12)]
    assert chosen == [3, 0, 2, 0, 3, 1, 3, 0, 3, 1, 1, 0]


@given(one=COUNTERS, other=COUNTERS)
def test_different_counters_are_different_draws(
    one: list[int | str], other: list[int | str]
) -> None:
    equal = draw_seed(1, Stream.NOISE, *one) == draw_seed(1, Stream.NOISE, *other)
    assert equal == ([(type(c), c) for c in one] == [(type(c), c) for c in other])


@given(names=st.sets(st.text(max_size=4), max_size=12), extra=st.text(min_size=5, max_size=6))
def test_a_shuffle_is_of_the_set_and_one_more_moves_no_other(names: set[str], extra: str) -> None:
    order = shuffled(names, 9, Stream.ORDER, 0)
    assert Counter(order) == Counter(names)
    assert shuffled(sorted(names, reverse=True), 9, Stream.ORDER, 0) == order
    wider = shuffled([*names, extra], 9, Stream.ORDER, 0)
    assert [name for name in wider if name != extra] == order
