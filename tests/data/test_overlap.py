"""Work ahead of and behind the caller: order, bounds, and errors where they belong."""

from __future__ import annotations

import threading
from functools import partial

import pytest

from lora_trainer.cache.background import MOST_AHEAD, MOST_BEHIND, prefetch_map, write_behind

WAIT_S = 20.0


def test_what_is_made_ahead_comes_in_order() -> None:
    gates = [threading.Event() for _ in range(MOST_AHEAD)]

    def make(index: int) -> int:
        if index == 0:  # the first is done last
            assert gates[1].wait(WAIT_S)
        gates[min(index, MOST_AHEAD - 1)].set()
        return index * index

    with prefetch_map(make, range(9), cost=lambda _: 1, most_cost=100) as made:
        assert list(made) == [index * index for index in range(9)]


def test_things_are_made_while_the_caller_is_busy_but_only_so_many() -> None:
    made: list[int] = []
    all_of_them = threading.Event()

    def make(index: int) -> int:
        made.append(index)
        if len(made) == MOST_AHEAD + 1:
            all_of_them.set()
        return index

    with prefetch_map(make, range(50), cost=lambda _: 1, most_cost=100) as found:
        assert next(found) == 0
        assert all_of_them.wait(WAIT_S), "four more are made before they are asked for"
    assert len(made) == MOST_AHEAD + 1


def test_costly_things_are_made_one_at_a_time() -> None:
    begun: list[int] = []

    def make(index: int) -> int:
        begun.append(index)
        return index

    with prefetch_map(make, range(20), cost=lambda _: 60, most_cost=100) as found:
        for index in range(20):
            assert next(found) == index
            assert set(begun) <= set(range(index + 2)), "the next one, and no other"


def test_what_fails_ahead_fails_when_its_turn_comes() -> None:
    def make(index: int) -> int:
        if index == 2:
            raise ValueError("the third")
        return index

    seen = []
    with (
        pytest.raises(ValueError, match="the third"),
        prefetch_map(make, range(9), cost=lambda _: 1, most_cost=100) as made,
    ):
        seen.extend(made)
    assert seen == [0, 1]
    with prefetch_map(make, range(2), cost=lambda _: 1, most_cost=100) as made:
        assert list(made) == [0, 1]


def test_nothing_is_made_of_nothing() -> None:
    with prefetch_map(str, [], cost=lambda _: 1, most_cost=1) as made:
        assert list(made) == []


def test_what_is_done_behind_is_done_in_order_and_waited_for() -> None:
    done: list[int] = []
    with write_behind() as later:
        for index in range(20):
            later(partial(done.append, index))
    assert done == list(range(20))


def test_the_caller_goes_on_but_not_for_ever() -> None:
    gate, given = threading.Event(), 0
    with write_behind() as later:
        for _ in range(MOST_BEHIND):
            later(lambda: None if gate.wait(WAIT_S) else pytest.fail("waited"))
            given += 1
        assert given == MOST_BEHIND, "the caller was not held up"
        release = threading.Timer(0.05, gate.set)
        release.start()
        later(lambda: None)  # waits for the first
        assert gate.is_set()
        release.join()


def test_what_fails_behind_is_raised_at_the_latest_on_leaving() -> None:
    def fail() -> None:
        raise OSError("full")

    with pytest.raises(OSError, match="full"), write_behind() as later:
        later(fail)


def test_what_was_given_is_done_also_where_the_caller_fails() -> None:
    done: list[int] = []
    with pytest.raises(ValueError, match="mine"), write_behind() as later:
        for index in range(3):
            later(partial(done.append, index))
        raise ValueError("mine")
    assert done == [0, 1, 2]
