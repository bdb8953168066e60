"""The run folder: its name, lock and run.json, which settings a resume may change, and the job that runs in it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.common.errors import MachineError, RequestError
from lora_trainer.common.event_kinds import Finished, Step, Stopped
from lora_trainer.common.events import read_events, read_jsonl
from lora_trainer.common.files import (
    TEMPORARY_PREFIX,
    WINDOWS_FORBIDDEN,
    disk_error,
    locked,
    read_json_object,
    windows_name_problem,
    write_atomic,
)
from lora_trainer.common.records import is_step, of_json, unreadable
from lora_trainer.common.wording import json_text
from lora_trainer.config.config import all_settings, flatten, retired_in, validation_users
from lora_trainer.config.declare import as_paths
from lora_trainer.config.running import Config
from lora_trainer.dataset.slider_file import is_slider_file
from lora_trainer.reporting.run_record import RUN_FILE, RunRecord

if TYPE_CHECKING:  # these import torch
    from lora_trainer.cache.cache_plan import Needs
    from lora_trainer.checkpoint.states import TrainingState
    from lora_trainer.common.events import EventStream
    from lora_trainer.run.prepare import Prepared
    from lora_trainer.training.actions import Action
    from lora_trainer.training.distributed.process_group import ProcessGroup


# What a resumed run has before it has ended again.
_ENDS = (Finished.kind, Stopped.kind)
EVENTS_FILE = "events.jsonl"
PROBLEMS_FILE = "problems.jsonl"
STATES = "states"
# Holds the step of NAME-best.safetensors.
BEST_RECORD = "best.json"
# A run's name is part of its files' names, and of temporary files' too; file systems allow 255 bytes.
MAX_NAME_BYTES = 180
# A setting of earlier versions that had no effect in a run without validations.
_BY_VALIDATIONS = "train.lower_on_plateau"


def checked_name(name: str, *, is_new: bool = True) -> str:
    """Return a run's name if it works as a folder's name; raises RequestError.

    A new one works on every system, as its files are copied to others, downloaded and synchronised; that of a run
    from before this rule has to work here alone.
    """
    if not name.isprintable():  # includes lone surrogates, which Python makes of undecodable bytes
        problem = "holds characters that cannot be shown"
    elif name != name.strip() or not name.strip(".") or set(name) & set("/\\"):
        problem = "is not a plain folder name"
    elif (is_new or sys.platform == "win32") and (fault := windows_name_problem(name)):
        problem = fault
    elif len(name.encode()) > MAX_NAME_BYTES:
        problem = f"is {len(name.encode())} bytes long, and {MAX_NAME_BYTES} are allowed"
    else:
        return name
    raise RequestError(
        f"{name!r} cannot be the name of a run: it {problem}", fix="give another one with --name"
    )


def name_of_dataset(dataset: Path) -> str:
    """Return the name that a run gets from its dataset: of a slider's file without the extension."""
    dataset = dataset.resolve()
    return name_of_folder(dataset.stem if is_slider_file(dataset) else dataset.name)


def name_of_folder(folder: str) -> str:
    """Return the name that a run gets from its dataset's folder, with `_` for what no name of a run may hold."""
    plain = "".join("_" if sign in WINDOWS_FORBIDDEN else sign for sign in folder).rstrip(". ")
    return f"_{plain}" if windows_name_problem(plain) else plain


def name_of_new_run(dataset: Path, asked: object) -> str:
    """Return `output.name`, or the name of the dataset where that is auto; raises RequestError."""
    auto = asked in (None, "auto")
    return checked_name(name_of_dataset(dataset) if auto else str(asked))


def create(parent: Path, name: str) -> AbstractContextManager[Path]:
    """Make and claim a new folder `name`, or `name-002`, `-003`, ... if that exists already.

    Raises RequestError for an unusable name and MachineError if the disk refuses.
    """
    checked_name(name)
    number = 1
    while True:
        path = parent / (name if number == 1 else f"{name}-{number:03d}")
        # mkdir decides: two trainings that start at once never get the same folder.
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            number += 1
            continue
        except OSError as error:
            raise disk_error(path, error) from error
        return claim(path)


def read_run(path: Path) -> RunRecord:
    """Return run.json of a run folder; raises RequestError if it is missing or lacks a key."""
    if not (path / RUN_FILE).is_file():
        others = sorted(entry.parent.name for entry in path.parent.glob(f"*/{RUN_FILE}"))
        raise RequestError(
            f"{path} holds no run to resume; runs beside it: {', '.join(others) or 'none'}",
            fix="name one with --name or --resume-from FOLDER, or start without --resume",
        )
    content = read_json_object(path / RUN_FILE)
    if key := unreadable(RunRecord, content):
        raise RequestError(
            f"{path / RUN_FILE} has no {key} that can be read, so the run cannot be resumed",
            fix="restore that file, or start a new run",
        )
    return of_json(RunRecord, content)


def cut_events(folder: Path, *, step: int) -> None:
    """Drop events of steps after `step`, which a resumed run computes again with the same numbers."""
    for name in (EVENTS_FILE, PROBLEMS_FILE):
        file = folder / name
        if not file.exists():
            continue
        lines = []
        for row in read_jsonl(file):
            kind, at = row.get("event"), row.get("step", -1)
            is_event = isinstance(kind, str) and (at == -1 or is_step(at))
            if not is_event or kind in _ENDS or at > step:
                continue
            lines.append(json_text(row))
        text = "".join(f"{line}\n" for line in lines)
        write_atomic(file, text.encode())


def last_step(folder: Path) -> int:
    """Return the last optimizer step that was logged, 0 without any."""
    recorded = read_events(folder / EVENTS_FILE)
    return max((event.step for event in recorded if isinstance(event, Step)), default=0)


def compare(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    environment: Mapping[str, Any],
    environment_now: Mapping[str, Any],
) -> tuple[str, list[str]]:
    """Return ("EXACT" | "SAME-STREAM" | "CHANGED", differences) of a resume; raises RequestError.

    `Handling.resume` says which settings cannot change, and which changes make the resume CHANGED. Another
    environment (torch, threads, processor, device), or one that is not deterministic, makes it
    SAME-STREAM: all random draws are the same, but not all bits. A setting that an older version did not
    have counts as its default; one that is gone counts where its value had an effect.
    """
    before = flatten(Config()) | dict(before)
    # Older versions recorded `~` as it was typed.
    named = {info.key for info in all_settings() if info.path}
    before |= {key: as_paths(before[key]) for key in named}
    # Where validations influence the training, when and of what they are does too.
    validates = any(now[key] for key in validation_users())
    effects = {
        info.key: "changed"
        if validates and info.handling.follows_validation
        else info.handling.resume
        for info in all_settings()
    }
    changed = {
        key: effects[key] for key in now if before[key] != now[key] and effects[key] != "free"
    }
    refused = [
        f"{key} {before[key]} -> {now[key]}" for key in changed if changed[key] == "forbidden"
    ]
    if refused:
        raise RequestError(
            f"a resume cannot change {', '.join(refused)}",
            fix="leave these settings as they were, or start a new run",
        )
    altering = retired_in(before, "result")
    if not (before["data.validation_fraction"] and before["train.validate_every_steps"]):
        altering = [key for key in altering if key != _BY_VALIDATIONS]
    removed = [*altering, *retired_in(before, "rounding")]
    lines = [f"{key}: {before[key]} -> {now[key]}" for key in changed]
    lines += [f"{key}: {before[key]} -> removed in this version" for key in removed]
    moved = [
        f"{key}: {environment.get(key)} -> {value}"
        for key, value in environment_now.items()
        if environment.get(key) != value
    ]
    if altering or any(effect != "rounding" for effect in changed.values()):
        return "CHANGED", lines + moved
    exact = environment_now["deterministic"] and not (lines or moved)
    return ("EXACT" if exact else "SAME-STREAM"), lines + moved


def has_no_record(path: Path) -> bool:
    """Whether a run was killed here before it wrote run.json; it had computed nothing yet."""
    claimed = (path / ".lock").is_file() and not (path / RUN_FILE).exists()
    return claimed and not (path / STATES).exists()


@contextmanager
def claim(path: Path) -> Iterator[Path]:
    """Hold the lock of a run folder while the block runs; raises MachineError when another process trains in it.

    Temporary files of a killed process are removed, as no other process writes here now.
    """
    busy = MachineError(
        f"the run in {path} is being trained by another process",
        fix="wait for it, or stop it first",
    )
    with locked(path / ".lock", within_s=0, busy=busy):
        for unfinished in path.glob(f"{TEMPORARY_PREFIX}*"):
            with suppress(OSError):
                unfinished.unlink()
        yield path


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """The context of a training beside its plan: run folder, events, stop signal, processes.

    `state` is the resume state, None for a new run; `watchers` are actions that run between steps;
    `ranks` are the processes that share the work; `cache_needs` are the cache entries to read. `reach` is of a slider:
    which share of the way to their goals the strengths 1 and -1 go, once that is measured.
    """

    prepared: Prepared
    folder: Path
    cache_needs: Needs
    state: TrainingState | None
    events: EventStream
    stop: Callable[[], int | None]
    started_at_s: float
    ranks: ProcessGroup
    watchers: Sequence[Action] = ()
    reach: tuple[float, float] | None = None
