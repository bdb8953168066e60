"""Things made ahead of their use by one thread, in order."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

LEAVING_S = (
    10.0  # a read that hangs in the kernel cannot be stopped; its thread dies with the process
)
Made = TypeVar("Made")


@contextmanager
def made_ahead(
    make: Callable[[int], Made], first: int, last: int, *, ahead: int
) -> Iterator[Iterator[Made]]:
    """Yield an iterator over make(first)..make(last - 1), made by a thread at most `ahead` early.

    The iterator raises what the thread raised. Leaving waits for the thread, but not for a disk that
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
        yield _taken(ready, last - first)
    finally:
        stopping.set()
        thread.join(timeout=LEAVING_S)


def _taken(ready: queue.Queue[Made | BaseException], count: int) -> Iterator[Made]:
    for _ in range(count):
        item = ready.get()
        if isinstance(item, BaseException):
            raise item
        yield item
