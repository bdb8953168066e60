"""Which images are held out, by content and never on both sides; what an epoch holds, none twice too soon."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.common.randomness import Stream, shuffled
from lora_trainer.dataset.records import (
    ImageRecord,
    epoch_order,
    hold_out,
    regularisation_count,
    sample_id,
)

NOT_READ: Any = None


def record(content: int, *, copy: int = 0, name: str | None = None) -> ImageRecord:
    return ImageRecord(
        file="x.png",
        name=name or f"{content}-{copy}.png",
        content_hash=f"{content:064x}",
        width_px=1,
        height_px=1,
        measures=NOT_READ,
        written=("",),
        caption="",
        caption_source=None,
        repeats=1,
        copy_index=copy,
    )


def held(records: list[ImageRecord], *, fraction: float = 0.25, seed: int = 1) -> set[str]:
    return {r.content_hash for r in hold_out(records, fraction=fraction, seed=seed)[1]}


@given(count=st.integers(0, 40), fraction=st.floats(0.0, 0.5), seed=st.integers(0, 9))
def test_the_share_is_rounded_down_and_nothing_is_lost(
    count: int, fraction: float, seed: int
) -> None:
    records = [record(index) for index in range(count)]
    trained, held_out = hold_out(records, fraction=fraction, seed=seed)
    assert len(held_out) == int(fraction * count)
    assert sorted([*trained, *held_out], key=lambda r: records.index(r)) == records
    assert list(trained) == [r for r in records if r in trained], "order is kept"
    copies = [record(one, copy=copy) for one in range(count) for copy in range(3)]
    assert len(hold_out(copies, fraction=fraction, seed=seed)[1]) == 3 * len(held_out)
    assert {r.content_hash for r in held_out} == held(copies, fraction=fraction, seed=seed)


@given(order=st.randoms(use_true_random=False))
def test_neither_order_nor_names_matter(order: random.Random) -> None:
    records = [record(index, name=f"{order.random()}.png") for index in range(20)]
    order.shuffle(records)
    assert held(records) == held([record(index) for index in range(20)])
    assert len({frozenset(held(records, seed=seed)) for seed in range(10)}) > 5, "the seed matters"


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


def test_an_epoch_depends_on_seed_and_number_alone() -> None:
    assert orders(7, 3) != orders(7, 3, seed=4)
    names = [f"r{index}" for index in range(7)]
    backwards = epoch_order(OWN[::-1], names[::-1], count=3, seed=3, epoch=2)
    assert backwards == orders(7, 3)[2]
    alone = [epoch_order(OWN, [], count=0, seed=3, epoch=epoch) for epoch in range(6)]
    assert alone == [shuffled(OWN, 3, Stream.ORDER, epoch) for epoch in range(6)]
    with_some = orders(4, 2)
    assert [[name for name in order if name in OWN] for order in with_some] == alone, (
        "a regularisation image more moves none of the others past another"
    )
    assert any(order[0] not in OWN for order in with_some), "they are mixed with the others"
    halves = {frozenset(map(sample_id, order)) - set(OWN) for order in orders(8, 4, epochs=8)}
    assert len(halves) > 2, "not the same four always together"
    counts = [
        regularisation_count(n, pool=3, ratio=ratio)
        for n, ratio in ((10, 1.0), (10, 0.25), (1, 0.1))
    ]
    assert counts == [10, 2, 1], "at least one"
    assert regularisation_count(10, pool=0, ratio=1.0) == 0
