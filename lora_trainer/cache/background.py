"""Helper threads: prepare items before the calling thread needs them, and write entries after it made them.

All keep the order of the items and bound the memory in use. An item's error is raised in the calling thread,
when the turn of this item comes.
"""

from __future__ import annotations

import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

MOST_AHEAD = 4
MOST_BEHIND = 4
Item = TypeVar("Item")
Made = TypeVar("Made")


@contextmanager
def prefetch_map(
    make: Callable[[Item], Made],
    items: Sequence[Item],
    *,
    cost: Callable[[Item], int],
    most_cost: int,
) -> Iterator[Iterator[Made]]:
    """Yield an iterator over make(item) in order, made by up to four threads before it is asked for.

    Those in the works cost at most `most_cost` together, unless it is one that costs more.
    """
    workers = min(MOST_AHEAD, os.cpu_count() or 1)
    pool = ThreadPoolExecutor(workers, thread_name_prefix="lora-train-ahead")
    waiting: deque[tuple[Future[Made], int]] = deque()
    begun = spent = 0

    def begin() -> None:
        nonlocal begun, spent
        while begun < len(items) and len(waiting) < MOST_AHEAD:
            costs = cost(items[begun])
            if waiting and spent + costs > most_cost:
                return
            waiting.append((pool.submit(make, items[begun]), costs))
            begun, spent = begun + 1, spent + costs

    def in_order() -> Iterator[Made]:
        nonlocal spent
        begin()
        while waiting:
            future, costs = waiting.popleft()
            item = future.result()
            spent -= costs
            begin()  # before the item is handed over: the caller may be busy with it for long
            yield item

    try:
        yield in_order()
    finally:
        pool.shutdown(cancel_futures=True)


Later = Callable[[Callable[[], None]], None]


@contextmanager
def write_behind() -> Iterator[Later]:
    """Yield a function that hands a task to one thread, which runs the tasks in order while the caller goes on.

    At most four tasks wait. A task's error is raised by a later call or on leaving; leaving waits for all
    tasks, also after an error in the block.
    """
    waiting: deque[Future[None]] = deque()
    with ThreadPoolExecutor(1, thread_name_prefix="lora-train-behind") as thread:

        def later(work: Callable[[], None]) -> None:
            while waiting and (waiting[0].done() or len(waiting) >= MOST_BEHIND):
                waiting.popleft().result()
            waiting.append(thread.submit(work))

        yield later
        for future in waiting:
            future.result()


LEAVING_S = (
    10.0  # a read that hangs in the kernel cannot be stopped; its thread dies with the process
)


@contextmanager
def prefetched(
    make: Callable[[int], Made], first: int, last: int, *, ahead: int
) -> Iterator[Iterator[Made]]:
    """Yield an iterator over make(first)..make(last - 1); a thread computes at most `ahead` of them early.

    The iterator raises the thread's errors. Leaving waits for the thread, but not for a disk that
    does not answer it.
    """
    ready: queue.Queue[Made | BaseException] = queue.Queue(maxsize=ahead)
    stopping = threading.Event()

    def put(item: Made | BaseException) -> bool:
        while not stopping.is_set():
            try:
                ready.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def work() -> None:
        try:
            for number in range(first, last):
                if not put(make(number)):
                    return
        except BaseException as error:  # noqa: BLE001 - handed to the consumer, which raises it
            put(error)

    thread = threading.Thread(target=work, name="lora-train-feeder", daemon=True)
    thread.start()
    try:
        yield _prefetched_items(ready, last - first)
    finally:
        stopping.set()
        thread.join(timeout=LEAVING_S)


def _prefetched_items(ready: queue.Queue[Made | BaseException], count: int) -> Iterator[Made]:
    for _ in range(count):
        item = ready.get()
        if isinstance(item, BaseException):
            raise item
        yield item
