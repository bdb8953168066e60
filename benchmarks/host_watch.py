"""How much of the machine's memory a training takes, phase by phase, seen from outside. Linux only.

Input is a process and its run folder, whose status.json names the phase; output is for each phase what the
kernel's own high-water mark says (VmHWM, of the process and its children), which no interval misses, and
how much of it no file stands behind (asked every few milliseconds): pages of a mapped file can be dropped.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

INTERVAL_S = 0.02
CHILDREN_INTERVAL_S = 1.0
START = "start"


@dataclass(kw_only=True)
class Peak:
    """Bytes at the highest moment of a phase, and how long all its stretches took."""

    resident_bytes: int = 0
    own_bytes: int = 0
    seconds: float = 0.0


@dataclass(kw_only=True)
class HostWatch:
    """While the block runs, a thread follows a process; `peaks` are by the name that `phase_of` gives.

    `phase_of` turns what status.json holds into a name.
    """

    process: psutil.Process
    run_folder: Path
    phase_of: Callable[[dict[str, Any]], str]
    peaks: dict[str, Peak] = field(default_factory=dict)
    _done: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None
    _listed: list[psutil.Process] = field(default_factory=list)
    _listed_s: float = -math.inf

    def __enter__(self) -> HostWatch:
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._done.set()
        assert self._thread is not None
        self._thread.join()

    def as_json(self) -> dict[str, dict[str, float]]:
        return {name: asdict(peak) for name, peak in self.peaks.items()}

    def _follow(self) -> None:
        phase, since_s = START, time.monotonic()
        while not self._done.wait(INTERVAL_S):
            now = self._phase() or phase
            with suppress(psutil.Error, OSError):  # it has ended: what was seen stands
                self._look(self.peaks.setdefault(phase, Peak()))
                if now != phase:
                    for process in self._family():
                        with suppress(OSError):  # a child that has ended
                            Path(f"/proc/{process.pid}/clear_refs").write_text("5")  # resets VmHWM
            self.peaks.setdefault(phase, Peak()).seconds += time.monotonic() - since_s
            phase, since_s = now, time.monotonic()

    def _look(self, peak: Peak) -> None:
        each = [_memory(process.pid) for process in self._family()]
        peak.resident_bytes = max(peak.resident_bytes, sum(one["VmHWM"] for one in each))
        own = sum(one["RssAnon"] + one["RssShmem"] for one in each)
        peak.own_bytes = max(peak.own_bytes, own)

    def _family(self) -> list[psutil.Process]:
        """Return the process and its children, looked up once a second: that reads all of /proc."""
        now_s = time.monotonic()
        if now_s - self._listed_s > CHILDREN_INTERVAL_S:
            self._listed = [self.process, *self.process.children(recursive=True)]
            self._listed_s = now_s
        return self._listed

    def _phase(self) -> str | None:
        try:
            return self.phase_of(json.loads((self.run_folder / "status.json").read_bytes()))
        except (OSError, ValueError):  # not there yet, or being replaced
            return None


def _memory(pid: int) -> dict[str, int]:
    """Return the fields of /proc/PID/status that are sizes, in bytes; none of a process that has ended."""
    sizes = {"VmHWM": 0, "RssAnon": 0, "RssShmem": 0}
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in sizes:
                sizes[name] = int(value.split()[0]) * 1024
    return sizes
