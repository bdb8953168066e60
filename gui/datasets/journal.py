"""Undo and redo over all edits of a dataset, in a file that survives reloads, kills and power cuts.

Inputs: steps, each a list of changes that are made together. Output: a log of JSON lines in
`<runs>/.gui/undo/`. A step is on the disk, with both states of every file, before the first file is
touched: killed in between, it is finished when the dataset is looked at next. Nothing is written
over what somebody else has changed meanwhile; such changes are left out of the step and named.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from lora_trainer.common.errors import InputError, LoraTrainError, MachineError
from lora_trainer.common.files import disk_error, locked, write_atomic

from .changes import Change, Side, from_json, to_json

Operation = Literal["do", "undo", "redo"]
MAX_LOG_BYTES = 8 << 20
KEPT_BYTES = MAX_LOG_BYTES // 2
_LOCK_WITHIN_S = 60.0
# A flush takes 3 ms and more: 3,000 captions one by one took 13 s. The log was flushed before, and
# says that they are done only after all of them were.
_SYNCED_EACH = 16
_SYNCS_AT_ONCE = hasattr(os, "sync")


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one press of a button, or one stay in a field, changed.

    Steps of the same `group` (not empty) that follow each other are undone together.
    """

    id: str
    title: str
    changes: tuple[Change, ...]
    group: str = ""


@dataclass(frozen=True, kw_only=True)
class History:
    """Steps that can be undone and redone, the next one last in each."""

    done: tuple[Step, ...] = ()
    undone: tuple[Step, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A step as it was carried out, and what of it was left alone, each with the reason."""

    step: Step
    left: tuple[str, ...] = ()


@dataclass(kw_only=True)
class _Fold:
    """The history that a log tells, line by line; `pending` was begun and is not ended."""

    done: list[Step] = field(default_factory=list)
    undone: list[Step] = field(default_factory=list)
    pending: tuple[Operation, Step] | None = None

    def read(self, record: Mapping[str, Any]) -> None:
        match record:
            case {"op": "do", "id": str(name), "title": str(title), "changes": [*rows]}:
                changes = tuple(from_json(row) for row in rows)
                group = str(record.get("group", ""))
                self.pending = "do", Step(id=name, title=title, changes=changes, group=group)
            case {"op": "undo"} if self.done:
                self.pending = "undo", self.done[-1]
            case {"op": "redo"} if self.undone:
                self.pending = "redo", self.undone[-1]
            case {"op": "end", "without": [*left]}:
                self._end({int(index) for index in left})
            case {"op": "cancel"}:
                self.pending = None

    def _end(self, left: set[int]) -> None:
        if self.pending is None:
            return
        operation, step = self.pending
        self.pending = None
        kept = tuple(change for index, change in enumerate(step.changes) if index not in left)
        if operation != "do":
            (self.done if operation == "undo" else self.undone).pop()
        if kept:
            self._push(replace(step, changes=kept), operation)

    def _push(self, step: Step, operation: Operation) -> None:
        if operation == "undo":
            self.undone.append(step)
        elif operation == "redo":
            self.done.append(step)
        else:
            joined = _joined(self.done[-1], step) if self.done and not self.undone else None
            self.undone.clear()
            self.done[-1:] = [joined] if joined else [*self.done[-1:], step]


@dataclass(frozen=True, kw_only=True)
class Journal:
    """The edits of one dataset folder; `folder` holds the logs of all."""

    root: Path
    folder: Path

    @property
    def log(self) -> Path:
        """The file with the steps."""
        return self.folder / f"{dataset_key(self.root)}.jsonl"

    def history(self) -> History:
        """Return what can be undone and redone, after finishing what was cut short."""
        with self.locked():
            fold = self._recovered()
        return History(done=tuple(fold.done), undone=tuple(fold.undone))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other tabs and processes from editing this dataset; raises MachineError."""
        busy = MachineError(
            f"something else has been editing {self.root} for {_LOCK_WITHIN_S:.0f} s",
            fix="wait until it has ended and try again",
        )
        with locked(self.log.with_suffix(".lock"), within_s=_LOCK_WITHIN_S, busy=busy):
            yield

    def perform(self, title: str, changes: Sequence[Change], *, group: str = "") -> Outcome:
        """Make changes as one step, those excepted whose files are not at `before`.

        To be called within `locked`, where the changes are made up. Raises InputError or
        MachineError when none of them could be made.
        """
        self._recovered()
        self._trim()
        step = Step(id=f"{time.time_ns():x}", title=title, changes=tuple(changes), group=group)
        rows = [to_json(change) for change in changes]
        self._append({"op": "do", "id": step.id, "title": title, "group": group, "changes": rows})
        return self._carry_out("do", step)

    def undo(self) -> Outcome | None:
        """Take the last step back, None when there is none; raises InputError or MachineError."""
        return self._turn("undo")

    def redo(self) -> Outcome | None:
        """Make the last step that was taken back again, None when there is none."""
        return self._turn("redo")

    def _turn(self, operation: Operation) -> Outcome | None:
        with self.locked():
            fold = self._recovered()
            steps = fold.done if operation == "undo" else fold.undone
            if not steps:
                return None
            self._append({"op": operation})
            return self._carry_out(operation, steps[-1])

    def _carry_out(self, operation: Operation, step: Step) -> Outcome:
        here, there = _sides(operation)
        left: dict[int, str] = {}
        refusal: LoraTrainError | None = None
        order = range(len(step.changes))
        each = not _SYNCS_AT_ONCE or len(order) <= _SYNCED_EACH
        for index in reversed(order) if operation == "undo" else order:
            change = step.changes[index]
            try:
                if change.is_at(self.root, here):
                    change.bring(self.root, there, durable=each)
                else:
                    left[index] = (
                        f"{change.file} was changed by something else and is left as it is"
                    )
            except (InputError, MachineError) as error:
                left[index], refusal = str(error), error
        if refusal is not None and len(left) == len(step.changes):
            self._append({"op": "cancel"})
            raise refusal
        if not each:
            os.sync()
        self._append({"op": "end", "without": sorted(left)})
        return Outcome(step=step, left=tuple(left[index] for index in sorted(left)))

    def _recovered(self) -> _Fold:
        """Return what the log says; a step that a kill cut short is carried out to its end."""
        fold = self._read()
        if fold.pending is None:
            return fold
        operation, step = fold.pending
        here, there = _sides(operation)
        left = []
        order = list(enumerate(step.changes))
        for index, change in reversed(order) if operation == "undo" else order:
            try:
                if change.is_at(self.root, here):
                    change.bring(self.root, there)
                elif not change.is_at(self.root, there):
                    left.append(index)
            except InputError:
                left.append(index)
        self._append({"op": "end", "without": sorted(left)})
        return self._read()

    def _read(self) -> _Fold:
        fold = _Fold()
        try:
            lines = self.log.read_bytes().split(b"\n")
        except FileNotFoundError:
            return fold
        except OSError as error:
            raise disk_error(self.log, error) from error
        for line in lines[:-1]:  # the last one is empty, or torn by a kill before it took effect
            try:
                fold.read(json.loads(line))
            except (ValueError, RecursionError):
                continue  # bytes of a bad disk: what else is known stays of use
        return fold

    def _append(self, record: Mapping[str, Any]) -> None:
        # Escaped to ASCII: lone surrogates stand for bytes that are not UTF-8.
        line = json.dumps(record).encode() + b"\n"
        try:
            with self.log.open("ab+") as file:
                if size := file.tell():
                    file.seek(size - 1)
                    line = line if file.read(1) == b"\n" else b"\n" + line
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise disk_error(self.log, error) from error

    def _trim(self) -> None:
        """Forget the oldest steps of a log that has become large."""
        try:
            size = self.log.stat().st_size
        except OSError:
            return
        if size <= MAX_LOG_BYTES:
            return
        lines: list[bytes] = []
        for step in reversed(self._read().done):
            pair = _lines_of(step)
            if lines and sum(map(len, lines)) + len(pair) > KEPT_BYTES:
                break
            lines.insert(0, pair)
        write_atomic(self.log, b"".join(lines))


def dataset_key(root: Path) -> str:
    """Return the name that files about a dataset folder have."""
    return hashlib.sha256(os.fsencode(root)).hexdigest()[:24]


def _sides(operation: Operation) -> tuple[Side, Side]:
    return ("after", "before") if operation == "undo" else ("before", "after")


def _joined(earlier: Step, later: Step) -> Step | None:
    """Return two steps of one stay in a field as one, None where they are something else."""
    if not later.group or later.group != earlier.group:
        return None
    if len(earlier.changes) != 1 or len(later.changes) != 1:
        return None
    change = earlier.changes[0].then(later.changes[0])
    return None if change is None else replace(later, changes=(change,))


def _lines_of(step: Step) -> bytes:
    rows = [to_json(change) for change in step.changes]
    begin = {"op": "do", "id": step.id, "title": step.title, "group": step.group, "changes": rows}
    records = (begin, {"op": "end", "without": []})
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)
