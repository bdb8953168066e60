"""Pauses a training at one moment: Python imports this file at its start where its folder is on PYTHONPATH.

`MOMENT` names the moment, `MOMENT_FILE` a file that is made when it is reached; the run goes on once a second file, of
that name and `.go`, is there. Written by terminal.py beside this folder, which explains the moments.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

LONGEST_S, POLL_S = 30.0, 0.01
_reached = set[str]()


def reached(moment: str) -> None:
    """Pause, once, if this is the moment asked for."""
    if os.environ.get("MOMENT") != moment or moment in _reached:
        return
    _reached.add(moment)
    mark = Path(os.environ["MOMENT_FILE"])
    mark.touch()
    go_on, end_s = Path(f"{mark}.go"), time.monotonic() + LONGEST_S
    while not go_on.exists() and time.monotonic() < end_s:
        time.sleep(POLL_S)


def before(owner: Any, name: str, moment: str) -> None:
    """Let a function or method pause before it does its work."""
    work = getattr(owner, name)

    def paused(*arguments: Any, **options: Any) -> Any:
        reached(moment)
        return work(*arguments, **options)

    setattr(owner, name, paused)


def watch_events(module: ModuleType) -> None:
    """Pause at events of the run, before anybody hears of them."""
    emit, steps = module.EventStream.emit, list[int]()

    def watched(self: Any, event: Any) -> Any:
        phase = event.phase if event.kind == "phase" else None
        if event.kind == "step":
            steps.append(event.step)
            reached({1: "first step", 6: "mid-run"}.get(event.step, ""))
        if phase == "cache" and event.done == 2:
            reached("caching")
        if phase == "sample" and steps:
            reached("samples")
        if phase in ("export", "report"):
            reached(phase)
        return emit(self, event)

    module.EventStream.emit = watched


WATCHED: dict[str, Callable[[ModuleType], None]] = {
    "torch": lambda _: reached("import"),
    "lora_trainer.run.prepare": lambda it: before(it, "prepare_with_base", "planning"),
    "lora_trainer.common.events": watch_events,
    "lora_trainer.checkpoint.writer": lambda it: before(it, "write_state", "inside a save"),
    "lora_trainer.reporting.console": lambda it: before(it.ConsoleListener, "show_file", "end"),
}


class Finder(importlib.abc.MetaPathFinder):
    """Finds the watched modules as Python does, and changes each after it was loaded."""

    def __init__(self) -> None:
        self.asked = set[str]()

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a watched module, with a loader that changes it; None for others."""
        change = WATCHED.get(name)
        if change is None or name in self.asked:
            return None
        self.asked.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self.asked.remove(name)  # asked again: a look whether a package is there loads nothing
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder())
