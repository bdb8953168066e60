"""Helper threads: prepare items before the calling thread needs them, and write entries after it made them.

All keep the order of the items and bound the memory in use. An item's error is raised in the calling thread,
when the turn of this item comes.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

MOST_AHEAD = 4
MOST_BEHIND = 4
# A read that hangs in the kernel cannot be stopped; its thread dies with the process.
LEAVING_S = 10.0
Item = TypeVar("Item")
Made = TypeVar("Made")


@contextmanager
def prefetch_map(
    make: Callable[[Item], Made],
    items: Sequence[Item],
    *,
    threads: int,
    most_ahead: int = MOST_AHEAD,
    cost: Callable[[Item], int] = lambda _: 0,
    most_cost: int = 0,
) -> Iterator[Iterator[Made]]:
    """Yield an iterator over make(item) in order; threads compute at most `most_ahead` of them early.

    Those in the works cost at most `most_cost` together, unless it is one that costs more. Leaving waits for
    the threads, but not for a disk that does not answer them.
    """
    tasks: queue.SimpleQueue[tuple[Future[Made], Item] | None] = queue.SimpleQueue()
    waiting: deque[tuple[Future[Made], int]] = deque()
    begun = spent = 0

    def begin() -> None:
        nonlocal begun, spent
        while begun < len(items) and len(waiting) < most_ahead:
            costs = cost(items[begun])
            if waiting and spent + costs > most_cost:
                return
            waiting.append((Future(), costs))
            tasks.put((waiting[-1][0], items[begun]))
            begun, spent = begun + 1, spent + costs

    def in_order() -> Iterator[Made]:
        nonlocal spent
        while waiting:
            future, costs = waiting.popleft()
            item = future.result()
            spent -= costs
            begin()  # before the item is handed over: the caller may be busy with it for long
            yield item

    workers = [
        threading.Thread(target=_work, args=(make, tasks), name="lora-train-ahead", daemon=True)
        for _ in range(threads)
    ]
    for worker in workers:
        worker.start()
    try:
        begin()
        yield in_order()
    finally:
        for future, _ in waiting:
            future.cancel()
        for _ in workers:
            tasks.put(None)
        for worker in workers:
            worker.join(timeout=LEAVING_S)


def _work(
    make: Callable[[Item], Made], tasks: queue.SimpleQueue[tuple[Future[Made], Item] | None]
) -> None:
    while (task := tasks.get()) is not None:
        future, item = task
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(make(item))
            except BaseException as error:  # noqa: BLE001 - raised in the calling thread
                future.set_exception(error)
        del task, future, item  # an idle thread would keep its last result alive


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
