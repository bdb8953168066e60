"""A disk that dies or fails at the k-th file operation, for writers that go through `os`.

`operations_of` counts what a writer does; then the writer is run once for each of them with a fault
there. Nothing really fails: fsync is left out, everything else happens in a temporary folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest


class Killed(BaseException):
    """Stands for kill -9: no handler of Exception sees it, and nothing works afterwards."""


class Disk:
    """Counts the file operations of `os`; at operation `at` it dies or fails, before or after it.

    A failing write has written half of its bytes. A dead disk stays dead, so that cleaning up in
    `finally` and `except` has no effect, as after a real kill.
    """

    OPERATIONS = (
        "mkdir",
        "open",
        "write",
        "fsync",
        "close",
        "rename",
        "replace",
        "unlink",
        "rmdir",
    )

    def __init__(
        self, *, at: int | None = None, error: BaseException | None = None, after: bool = False
    ) -> None:
        self.at, self.error, self.after = at, error, after
        self.count = 0
        self.dead = False
        self.open_files: set[int] = set()
        self.real = {name: getattr(os, name) for name in self.OPERATIONS}
        self._fdopen = os.fdopen

    def operation(self, name: str) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            if self.dead:
                raise Killed
            self.count += 1
            if self.count - 1 != self.at:
                return self._really(name, *args, **options)
            assert self.error is not None
            self.dead = isinstance(self.error, Killed)
            if self.after:
                self._really(name, *args, **options)
            elif name == "write":
                self._really(name, args[0], args[1][: len(args[1]) // 2])
            raise self.error

        return run

    def _really(self, name: str, *args: Any, **options: Any) -> Any:
        if name == "fsync":
            return None
        result = self.real[name](*args, **options)
        if name == "open":
            self.open_files.add(result)
        if name == "close":
            self.open_files.discard(args[0])
        return result

    def _hand_over(self, descriptor: int, *args: Any, **options: Any) -> Any:
        """Make a file object, which closes its descriptor itself, and not through `os.close`."""
        opened = self._fdopen(descriptor, *args, **options)
        self.open_files.discard(descriptor)
        return opened

    @contextmanager
    def in_use(self) -> Iterator[Disk]:
        with pytest.MonkeyPatch.context() as patch:
            for name in self.OPERATIONS:
                patch.setattr(os, name, self.operation(name))
            patch.setattr(os, "fdopen", self._hand_over)
            try:
                yield self
            finally:
                for descriptor in self.open_files:
                    self.real["close"](descriptor)


def operations_of(action: Callable[[], object]) -> int:
    with Disk().in_use() as disk:
        action()
    return disk.count
