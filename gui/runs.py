"""The runs of a folder: which there are, what state each is in, when it changed, what it has written.

Inputs: the runs folder, the name of a run. Outputs: frozen values. A name leads to a folder only if
it is that of a run in the runs folder itself, so that no name can leave it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from lora_trainer.common.errors import RequestError
from lora_trainer.common.event_kinds import Event
from lora_trainer.reporting.control import Control
from lora_trainer.reporting.history import HistoryReader, RunHistory
from lora_trainer.reporting.sample_files import BASE_SAMPLES, PREVIEWS, newest_preview
from lora_trainer.reporting.status import RunStatus, read_status

RECORDS = ("events.jsonl", "status.json", "run.json")

Stamp = tuple[object, ...]
# A run of 20,000 steps takes about 15 MB.
_KEPT_READERS = 8


@dataclass(frozen=True, kw_only=True)
class RunEntry:
    """One line of the list of runs."""

    name: str
    status: RunStatus


def page_url(name: str) -> str:
    """Return the address of the page of a run."""
    return f"/run?run={quote(name, safe='')}"


def find_runs(root: Path) -> tuple[RunEntry, ...]:
    """Return the runs of a folder, those that train first, then by their last change."""
    found = sorted(_run_folders(root), key=_changed_ns, reverse=True)
    entries = [RunEntry(name=path.name, status=read_status(path)) for path in found]
    return tuple(sorted(entries, key=lambda entry: entry.status.state != "running"))


def trains(root: Path) -> bool:
    """Say whether a run of a folder is being trained now."""
    return any(entry.status.state == "running" for entry in find_runs(root))


def run_folder(root: Path, name: str | None) -> Path:
    """Return the folder of a run; raises RequestError for any other name."""
    # One part of a path, as the system sees it: it cannot lead to another folder.
    if name and Path(name).name == name and not _is_hidden(name):
        path = root / name
        try:
            if _is_run(path):
                return path
        except (OSError, ValueError):  # too long for the file system, a NUL in it
            pass
    raise RequestError(f"no run is named {name!r}", fix="choose one from the list of runs")


@dataclass(frozen=True, kw_only=True)
class Pictures:
    """The newest pictures of a run; `of_base` says that the base drew them, before the first step."""

    files: Sequence[Path] = ()
    of_base: bool = False


def newest_pictures(folder: Path) -> Pictures:
    """Return the newest sample images that a run has drawn itself, else its newest preview, else those of its base."""
    samples = newest_samples(folder)
    if samples and samples[0].parent.name != BASE_SAMPLES:
        return Pictures(files=samples)
    preview = newest_preview(folder / PREVIEWS)
    return (
        Pictures(files=samples, of_base=bool(samples))
        if preview is None
        else Pictures(files=[preview])
    )


def newest_samples(folder: Path) -> Sequence[Path]:
    """Return the sample images of the last step of a run that has any."""
    try:
        steps = sorted(path for path in (folder / "samples").iterdir() if path.is_dir())
    except OSError:
        return ()
    for step in reversed(steps):
        if images := sorted(step.glob("*.png")):
            return images
    return ()


def _run_folders(root: Path) -> Iterator[Path]:
    """Yield the folders that hold a run's records."""
    try:
        children = sorted(root.iterdir())
    except OSError:  # no folder yet, no runs
        return
    for path in children:
        if not _is_hidden(path.name) and _is_run(path):
            yield path


def _is_hidden(name: str) -> bool:
    return name.startswith(".")


def _is_run(path: Path) -> bool:
    """Whether a folder holds a run's records; a link may lead anywhere and is none."""
    if path.is_symlink() or not path.is_dir():
        return False
    return any((path / record).is_file() for record in RECORDS)


def _changed_ns(path: Path) -> int:
    """A heartbeat changes status.json too; the events tell when something happened."""
    return max((file_stamp(path / name)[0] for name in ("events.jsonl", "run.json")), default=0)


def file_stamp(path: Path) -> tuple[int, int]:
    """Return time of change and size of a file, zeros for none."""
    try:
        stat = path.stat()
    except OSError:
        return 0, 0
    return stat.st_mtime_ns, stat.st_size


def stamp(folder: Path, status: RunStatus) -> Stamp:
    """Return a value that changes when the view of this run does."""
    files = [file_stamp(folder / name) for name in ("events.jsonl", "problems.jsonl", "run.json")]
    waiting = sorted(Control(folder).pending())
    seen = (status.state, status.stage, status.step, status.steps, status.message)
    phase = (status.phase, status.done, status.total)
    return (folder.name, *seen, *phase, *files, *waiting)


@dataclass(frozen=True, kw_only=True)
class Records:
    """What a run has written so far; `recent` are its newest rows that are not steps."""

    history: RunHistory
    recent: Sequence[Event]


@dataclass
class _Follower:
    reader: HistoryReader
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass
class Followed:
    """The readers of the runs that were looked at last, each read on from where the last look ended.

    What is kept is only what was read, so that a new process shows the same; two tabs of one run share a reader.
    """

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
