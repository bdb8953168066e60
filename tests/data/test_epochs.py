"""What an epoch holds: every own sample once, regularisation samples in turn."""

from __future__ import annotations

from collections import Counter
from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.common.randomness import Stream, shuffled
from lora_trainer.dataset.epochs import epoch_order, regularisation_count, sample_id

OWN = [f"o{index}" for index in range(5)]


def orders(pool: int, count: int, *, epochs: int = 6, seed: int = 3) -> list[list[str]]:
    names = [f"r{index}" for index in range(pool)]
    return [epoch_order(OWN, names, count=count, seed=seed, epoch=epoch) for epoch in range(epochs)]


@given(pool=st.integers(1, 12), count=st.integers(1, 30))
def test_none_comes_twice_before_all_have_come(pool: int, count: int) -> None:
    found = orders(pool, count)
    for order in found:
        assert len(order) == len(set(order)) == len(OWN) + count, "names differ, also of one sample"
        assert {name for name in order if name.startswith("o")} == set(OWN)
    used: Counter[str] = Counter()
    for order in found:
        used.update(sample_id(name) for name in order if name.startswith("r"))
        counts = [used[f"r{index}"] for index in range(pool)]
        assert max(counts) - min(counts) <= 1


def test_the_rounds_are_shuffled_anew() -> None:
    rounds = [
        [sample_id(name) for name in sorted(order) if name.startswith("r")]
        for order in orders(8, 4, epochs=8)
    ]
    halves = {frozenset(part) for part in rounds}
    assert len(halves) > 2, "not the same four always together"


def test_they_are_mixed_with_the_others() -> None:
    kinds = ["".join(name[0] for name in order) for order in orders(5, 5)]
    assert all("or" in kind and "ro" in kind for kind in kinds)


def test_an_epoch_depends_on_seed_and_number_alone() -> None:
    assert orders(7, 3) == orders(7, 3)
    assert orders(7, 3) != orders(7, 3, seed=4)
    names = [f"r{index}" for index in range(7)]
    backwards = epoch_order(OWN[::-1], names[::-1], count=3, seed=3, epoch=2)
    assert backwards == orders(7, 3)[2]


def test_without_regularisation_the_order_is_as_it_was() -> None:
    assert epoch_order(OWN, [], count=0, seed=1, epoch=4) == shuffled(OWN, 1, Stream.ORDER, 4)
    assert all(sample_id(name) == name for name in OWN)


def test_own_samples_keep_their_relative_order() -> None:
    """A regularisation image more moves none of them past another."""
    with_some = [[n for n in order if n.startswith("o")] for order in orders(4, 2)]
    alone = [epoch_order(OWN, [], count=0, seed=3, epoch=epoch) for epoch in range(6)]
    assert with_some == alone
    assert set(chain(*alone)) == set(OWN)


def test_as_many_as_the_ratio_says() -> None:
    assert regularisation_count(10, pool=3, ratio=1.0) == 10
    assert regularisation_count(10, pool=3, ratio=0.25) == 2
    assert regularisation_count(1, pool=3, ratio=0.1) == 1, "at least one"
    assert regularisation_count(10, pool=0, ratio=1.0) == 0
