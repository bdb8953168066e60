"""The runs that pages look at: each read on from where the last look ended.

Input: run folders. Output: their History and newest records. What is kept is only what was read, so
that a new process shows the same; two tabs of one run share a reader.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lora_trainer.reporting.history import HistoryReader, Row, RunHistory

_KEPT_READERS = 8
"""A run of 20,000 steps takes about 15 MB."""


@dataclass(frozen=True, kw_only=True)
class Records:
    """What a run has written so far; `recent` are its newest rows that are no steps."""

    history: RunHistory
    recent: Sequence[Row]


@dataclass
class _Follower:
    reader: HistoryReader
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass
class Followed:
    """The readers of the runs that were looked at last."""

    _followers: OrderedDict[Path, _Follower] = field(default_factory=OrderedDict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self, folder: Path) -> Records:
        """Return the records of a run; raises RequestError for a damaged run.json, OSError."""
        follower = self._follower(folder)
        with follower.lock:
            history = follower.reader.read()
            return Records(history=history, recent=follower.reader.recent())

    def _follower(self, folder: Path) -> _Follower:
        with self._lock:
            found = self._followers.setdefault(folder, _Follower(HistoryReader(folder)))
            self._followers.move_to_end(folder)
            while len(self._followers) > _KEPT_READERS:
                self._followers.popitem(last=False)
            return found
