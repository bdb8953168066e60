"""Work ahead of and behind the caller: order, bounds, and errors where they belong."""

from __future__ import annotations

import threading
import weakref
from functools import partial

import pytest

from lora_trainer.cache.background import prefetch_map, write_behind

WAIT_S = 20.0
MOST = 4
"""Items that are made ahead, and tasks that wait behind."""


def test_items_are_made_ahead_in_order_but_only_so_many() -> None:
    begun: list[int] = []
    all_of_them = threading.Event()

    def make(index: int) -> int:
        begun.append(index)
        if len(begun) == MOST + 1:
            all_of_them.set()
        if index == 1:  # the second is done last
            assert all_of_them.wait(WAIT_S)
        return index * index

    with prefetch_map(make, range(9), threads=4, cost=lambda _: 1, most_cost=100) as made:
        assert next(made) == 0
        assert all_of_them.wait(WAIT_S), "four more are made before they are asked for"
        assert len(begun) == MOST + 1
        assert list(made) == [index * index for index in range(1, 9)]


def test_costly_things_are_made_one_at_a_time() -> None:
    begun: list[int] = []

    def make(index: int) -> int:
        begun.append(index)
        if index == 19:
            raise SystemExit(index)  # whatever ends the thread reaches the caller
        return index

    with prefetch_map(make, range(20), threads=4, cost=lambda _: 60, most_cost=100) as found:
        for index in range(19):
            assert next(found) == index
            assert set(begun) <= set(range(index + 2)), "the next one, and no other"
        with pytest.raises(SystemExit):
            next(found)


def test_a_thread_without_work_keeps_nothing_alive() -> None:
    gone = threading.Event()

    def make(index: int) -> set[int]:
        result = {index}
        weakref.finalize(result, gone.set)
        return result

    with prefetch_map(make, range(1), threads=1) as results:
        list(results)
        assert gone.wait(WAIT_S)


def test_tasks_are_done_behind_in_order_a_few_waiting_and_all_before_leaving() -> None:
    gate = threading.Event()
    done: list[int] = []

    def work(index: int) -> None:
        assert gate.wait(WAIT_S)
        done.append(index)
        if index == MOST:
            raise OSError("full")

    with pytest.raises(OSError, match="full"), write_behind() as later:
        for index in range(MOST):
            later(partial(work, index))  # the caller is not held up
        gate.set()
        later(partial(work, MOST))  # waits for the first
        assert done[0] == 0
    assert done == list(range(MOST + 1)), "what was handed over is done, errors or not"
