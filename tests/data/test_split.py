"""Which images are held out: by content, in the share asked for, never on both sides."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.dataset.records import ImageRecord, hold_out


def record(content: int, *, copy: int = 0, name: str | None = None) -> ImageRecord:
    return ImageRecord(
        file="x.png",
        name=name or f"{content}-{copy}.png",
        content_hash=f"{content:064x}",
        width_px=1,
        height_px=1,
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


@given(order=st.randoms(use_true_random=False))
def test_neither_order_nor_names_matter(order: random.Random) -> None:
    records = [record(index, name=f"{order.random()}.png") for index in range(20)]
    order.shuffle(records)
    assert held(records) == held([record(index) for index in range(20)])


def test_the_seed_matters() -> None:
    records = [record(index) for index in range(20)]
    assert len({frozenset(held(records, seed=seed)) for seed in range(10)}) > 5


def test_identical_files_stay_on_one_side() -> None:
    records = [record(index, copy=copy) for index in range(12) for copy in range(3)]
    trained, held_out = hold_out(records, fraction=0.5, seed=4)
    assert len(held_out) == 18
    assert not {r.content_hash for r in trained} & {r.content_hash for r in held_out}


def test_one_more_picture_moves_at_most_one_other() -> None:
    records = [record(index) for index in range(20)]
    for extra in range(100, 120):
        before, after = held(records), held([*records, record(extra)])
        assert len(before - after) <= 1
