"""The command lines that the interface runs, as lists of arguments; never a shell, never a string.

Inputs: the fields of the form, checked here as far as it takes no torch. Outputs: the JSON of a
short command, or a trainer in a session of its own, which outlives the interface. What a trainer
says before it has a run folder goes to a log in `.launch/` under the runs folder.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_trainer.config import build_config, parse_assignment
from lora_trainer.errors import InputError, RequestError
from lora_trainer.files import disk_error, read_json_object
from lora_trainer.output.history import mapping, sequence
from lora_trainer.output.wording import INTERRUPTED_EXIT_CODES, one_line

Argv = tuple[str, ...]

TRAINER: Argv = (sys.executable, "-m", "lora_trainer")
LOGS = ".launch"
_ANSWER_WITHIN_S = 900
_NAME_MAX_LENGTH = 100
_LOG_END_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class Form:
    """What the form asks for, as typed; an empty field leaves the choice to lora-train."""

    dataset: str
    base: str = ""
    priority: str = "balanced"
    name: str = ""
    more_settings: str = ""


def check_argv(form: Form) -> Argv:
    """Return the command that reports on the dataset; raises RequestError or InputError."""
    return (*TRAINER, "check", _folder(form.dataset), *_base(form), *_sets(form), "--json")


def plan_argv(form: Form) -> Argv:
    """Return the command that predicts memory and time; raises RequestError or InputError."""
    return (*TRAINER, "plan", _folder(form.dataset), *_choices(form), "--json")


def train_argv(form: Form, *, root: Path) -> Argv:
    """Return the command that trains into a new folder under `root`.

    Raises RequestError or InputError.
    """
    name = _run_name(form.name)
    named = (f"--name={name}",) if name else ()
    return (*TRAINER, _folder(form.dataset), *_choices(form), *named, f"--output={root.resolve()}")


def resume_argv(run: Path, *, dataset: str) -> Argv:
    """Return the command that goes on with a run; `dataset` counts where the run does not say.

    Raises RequestError or InputError.
    """
    recorded = recorded_dataset(run)
    if recorded is None and not dataset.strip():
        raise InputError(
            f"the run {run.name} does not say where its images are",
            fix="type their folder under Images and press Resume again",
        )
    folder = str(recorded) if recorded is not None else _folder(dataset)
    return (*TRAINER, folder, f"--resume-from={run.resolve()}")


def recorded_dataset(run: Path) -> Path | None:
    """Return the dataset folder of a run: the word of its command that is a folder of that name.

    A run.json records names, not paths; a command typed in another folder may lead nowhere.
    """
    try:
        record = read_json_object(run / "run.json")
    except RequestError:
        return None
    name = mapping(record, "dataset").get("name")
    for word in sequence(record, "command"):
        folder = Path(str(word)).expanduser()
        if folder.is_dir() and folder.resolve().name == name:
            return folder.resolve()
    return None


def more_settings(text: str) -> tuple[str, ...]:
    """Return the assignments in `text`, one a line; raises RequestError naming all that is wrong.

    Empty lines and lines that begin with # are left out.
    """
    stripped = (line.strip() for line in text.splitlines())
    lines = [line for line in stripped if line and not line.startswith("#")]
    values: dict[str, Any] = {}
    for line in lines:
        key, value = parse_assignment(line)
        if key in values:
            raise RequestError(f"{key} is given twice", fix="give it once")
        values[key] = value
    build_config(values)
    return tuple(lines)


def _choices(form: Form) -> Argv:
    return (f"--priority={form.priority}", *_base(form), *_sets(form))


def _base(form: Form) -> Argv:
    base = form.base.strip()
    return () if base in ("", "auto") else (f"--base={base}",)


def _sets(form: Form) -> Argv:
    return tuple(f"--set={line}" for line in more_settings(form.more_settings))


def _folder(text: str) -> str:
    """Return an absolute path, which no option begins like; raises InputError."""
    stripped = text.strip()
    if not stripped:
        raise InputError("no image folder is given", fix="type the path of a folder with images")
    try:
        folder = Path(stripped).expanduser().resolve()
        found = folder.is_dir()
    except (OSError, RuntimeError, ValueError) as error:  # no such user, a NUL in the name
        raise InputError(f"{stripped!r} is no path: {error}", fix="type another one") from None
    if not found:
        raise InputError(
            f"there is no folder {folder}", fix="type the path of a folder with images"
        )
    return str(folder)


def _run_name(text: str) -> str:
    """Return a name that is one visible folder of the runs folder; raises RequestError."""
    name = text.strip()
    hidden_or_elsewhere = name.startswith((".", "-")) or any(sign in name for sign in '/\\:*?"<>|')
    if hidden_or_elsewhere or not name.isprintable() or len(name) > _NAME_MAX_LENGTH:
        raise RequestError(
            f"{name[:_NAME_MAX_LENGTH]!r} cannot be the name of a run",
            fix=f"use at most {_NAME_MAX_LENGTH} letters, digits, spaces, ._-, no . or - in front",
        )
    return name


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a short command said: its JSON, or the line in which it refused."""

    values: Mapping[str, Any] | None
    error: str = ""


def ask(argv: Argv) -> Answer:
    """Run a command that ends by itself and prints JSON."""
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            stdin=subprocess.DEVNULL,
            timeout=_ANSWER_WITHIN_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Answer(values=None, error=one_line(str(error)))
    if done.returncode:
        return Answer(values=None, error=_last_line(done.stderr or done.stdout))
    try:
        values = json.loads(done.stdout)
    except ValueError:
        return Answer(values=None, error=f"no JSON: {_last_line(done.stdout)}")
    return Answer(values=values)


@dataclass(frozen=True, kw_only=True)
class Child:
    """A trainer that this interface started."""

    argv: Argv
    process: subprocess.Popen[bytes]
    log: Path


@dataclass(frozen=True, kw_only=True)
class News:
    """How the last start went: `error` is its last line when it failed."""

    starting: bool = False
    error: str = ""


@dataclass
class Launcher:
    """Starts trainers for the runs folder `root`, and knows how those starts went."""

    root: Path
    children: list[Child] = field(default_factory=list)

    def start(self, argv: Argv) -> int:
        """Start a trainer and return its process number.

        Raises RequestError when the same command still runs, MachineError when it cannot start.
        """
        if any(child.argv == argv and child.process.poll() is None for child in self.children):
            raise RequestError(
                "this training runs already", fix="wait for it, or give another name"
            )
        log = self.root / LOGS / f"{time.time_ns()}.log"
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            with log.open("wb") as output:
                process = _detached(argv, output.fileno())
        except OSError as error:
            raise disk_error(log, error) from error
        self.children.append(Child(argv=argv, process=process, log=log))
        return process.pid

    def news(self, running: Sequence[int | None]) -> News:
        """Tell of the last start; `running` are the process numbers of the runs that are seen."""
        codes = [child.process.poll() for child in self.children]  # also buries those that ended
        if not codes:
            return News()
        child, code = self.children[-1], codes[-1]
        if code is None:
            return News(starting=child.process.pid not in running)
        if code in INTERRUPTED_EXIT_CODES:
            return News()
        return News(error=_log_end(child.log) or f"the trainer ended with exit code {code}")


def _detached(argv: Argv, output: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        argv,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,  # a Ctrl-C meant for the interface does not reach it
    )


def _log_end(log: Path) -> str:
    try:
        return _last_line(log.read_bytes()[-_LOG_END_BYTES:])
    except OSError:
        return ""


def _last_line(output: bytes) -> str:
    lines = output.decode("utf-8", errors="replace").strip().splitlines()
    return one_line(lines[-1]) if lines else ""
