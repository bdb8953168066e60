"""A run as it is seen from outside: its smoothed loss, the time that is left, status.json.

Inputs: the run's events; the process that writes. Outputs: numbers for console, trackers and report, and
status.json, replaced atomically but not fsynced (it describes a live process, which a power cut ends anyway). A run
that claims to live is believed only if its process does. Requests to a run are in control.py.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

import psutil
from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from lora_trainer.common.errors import MachineError
from lora_trainer.common.event_kinds import (
    BaseLosses,
    Event,
    Finished,
    Learned,
    Phase,
    RunStarted,
    Samples,
    Step,
    Stopped,
    Validation,
)
from lora_trainer.common.events import EventStream
from lora_trainer.common.files import read_regular, retry_while_open, write_atomic
from lora_trainer.common.processes import is_alive, living, same_start
from lora_trainer.common.records import MOST_STEPS
from lora_trainer.common.wording import INTERRUPTED_EXIT_CODES, loss_text, one_line


@dataclass(kw_only=True)
class Smoothed:
    """Exponential moving average without start-up bias; passes over values that are not finite."""

    span_steps: float = 20.0
    _sum: float = 0.0
    _weight: float = 0.0

    def add(self, value: float) -> float:
        """Take one value and return the average so far; NaN before the first finite value."""
        if math.isfinite(value):
            keep = 1 - 2 / (self.span_steps + 1)
            self._sum = keep * self._sum + (1 - keep) * value
            self._weight = keep * self._weight + (1 - keep)
        return self.value

    @property
    def value(self) -> float:
        return self._sum / self._weight if self._weight else math.nan


# Steps of a run from which its time left is told, and the most of them that count: the first ones compile and allocate.
FIRST_STEPS, RECENT_STEPS = 3, 50
# The parts of a planned time that a run has before its steps, whether it is resumed or not.
BEFORE_STEPS = ("start", "caching")


@dataclass(kw_only=True)
class TimeLeft:
    """Time left, from a run's events: the median of recent steps, and the rounds between steps that are due.

    A round of sample images or of validation is expected to take as long as the last one did, which may
    have been before the first step. Saves and all else between steps are spread over the steps. Until there are
    `FIRST_STEPS`, the time left is what the plan predicted, less the time that has passed, and not known once a first
    step has not been done in all the time of the plan.
    """

    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    steps: int = 0
    _planned_s: float = math.nan
    _planned_steps_s: float = math.nan
    _planned_from: str = ""
    _began_s: float = math.nan
    _now_s: float = math.nan
    _every: Mapping[str, int] = field(default_factory=dict)
    _round_s: dict[str, float] = field(default_factory=dict)
    _round_step: dict[str, int] = field(default_factory=dict)
    _step: int = 0
    _last_s: float = 0.0
    _between_s: float = 0.0
    _steps_after_first: int = 0

    def take(self, event: Event) -> None:
        """Take an event of the run; those that tell nothing of time are passed over."""
        self._now_s = event.time_s
        match event:
            case RunStarted():
                self.steps, self._every = int(event.steps), event.every_steps
                self._step = event.resumed_from or 0
                self._began_s, self._planned_from = event.time_s, event.planned_from
                self._planned_s = _planned_s(event) if event.planned_s else math.nan
                self._planned_steps_s = self._planned_s - _planned_start_s(event)
                self._round_step = dict.fromkeys(self._every, self._step)
            case Samples(asked=True):  # they say nothing about the next round
                self._last_s += event.seconds
            case Samples() | Validation():
                self._round_s[event.kind] = event.seconds
                self._round_step[event.kind] = event.step
                self._last_s += event.seconds
            case BaseLosses() | Learned():  # once in a run
                self._last_s += event.seconds
            case Step():
                # Losses reach the host late and in bunches, so only the sum says what lies between steps.
                if self.recent:
                    self._between_s += event.time_s - self._last_s - event.seconds
                    self._steps_after_first += 1
                self._last_s = event.time_s
                self.recent.append(event.seconds)
                self._step = event.step

    @property
    def step_s(self) -> float:
        """Median of the recent steps; NaN before the first."""
        return statistics.median(self.recent) if self.recent else math.nan

    @property
    def is_measured(self) -> bool:
        """Whether enough steps of the run itself are done to tell from them."""
        return len(self.recent) >= FIRST_STEPS or math.isnan(self._planned_s)

    @property
    def _is_refuted(self) -> bool:
        """Whether the time of the whole plan has passed before the first step."""
        return not self.recent and self._now_s - self._began_s >= self._planned_s

    @property
    def based_on(self) -> str:
        """Where `remaining_s` comes from, in a few words; empty where it is not known."""
        count = len(self.recent)
        if not self.is_measured:
            return "" if self._is_refuted else self._planned_from
        if not count:
            return ""
        if self._steps_after_first < RECENT_STEPS:
            return "from the first step" if count == 1 else f"from the first {count} steps"
        return f"from the last {count} steps"

    @property
    def remaining_s(self) -> float:
        """Seconds until the last step and the rounds after it are done; NaN where nothing is known."""
        if not self.is_measured:
            if self._is_refuted:
                return math.nan
            # A start that takes longer than planned takes nothing from the steps.
            ahead = max(0, self.steps - self._step)
            steps_s = ahead * self.step_s if self.recent else self._planned_steps_s
            return max(self._planned_s - (self._now_s - self._began_s), steps_s)
        rounds_s = 0.0
        for kind, every in self._every.items():
            last = self._round_step[kind]
            if every and last < self.steps:  # there is a round after the last step
                rounds = math.ceil(self.steps / every) - last // every
                rounds_s += rounds * self._round_s.get(kind, 0.0)
        side_s = max(0.0, self._between_s / max(1, self._steps_after_first))
        return max(0, self.steps - self._step) * (self.step_s + side_s) + rounds_s


def _planned_start_s(started: RunStarted) -> float:
    """Return the predicted seconds up to the first step."""
    return sum(started.planned_s.get(part, 0.0) for part in BEFORE_STEPS)


def _planned_s(started: RunStarted) -> float:
    """Return the predicted seconds from here to the end; of a run that is resumed, its start and the steps left."""
    share = 1 - (started.resumed_from or 0) / max(1.0, started.steps)
    start_s = _planned_start_s(started)
    return start_s + max(0.0, share) * (sum(started.planned_s.values()) - start_s)


State = Literal[
    "starting", "caching", "training", "running", "interrupted", "finished", "stopped", "failed"
]

STATUS_FILE = "status.json"
INTERVAL_S = 0.5
# Phases of a run that was asked to end: nothing but its end comes after them.
STOPPING = frozenset({"stop", "quit"})
_PHASE_STATES: dict[str, State] = {
    "scan": "starting",
    "plan": "starting",
    "load": "starting",
    "cache": "caching",
    "base": "training",
    "train": "training",
}


Count = Annotated[int, Field(ge=0, le=MOST_STEPS)]
# Upper bound of times (the year 2096), so that every system's calendar functions accept them.
Time = Annotated[float, Field(ge=0, le=4e9, allow_inf_nan=False)]


def _left_s(value: object) -> object:
    """Read null as NaN: that no step was done yet."""
    return math.nan if value is None else value


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """The content of status.json, and a run as others see it. Times are Unix times."""

    state: State = "starting"
    """In the file: the state the run wrote. For a reader: the true state now, `running` or `interrupted` if the run
    did not say how it ended."""
    pid: Annotated[int, Field(gt=0, lt=2**31)] | None = None
    """The process that trains; for a reader None if there is no such process."""
    pid_started_s: Time | None = None
    """Start of the process `pid`; for a reader None if there is no such process."""
    name: str = ""
    step: Count = 0
    steps: Count = 0
    phase: str = ""
    done: Count = 0
    """Finished parts of `phase`."""
    total: Count = 0
    """All parts of `phase`; 0 of 0 if they cannot be counted."""
    message: str = ""
    heartbeat_s: Time = 0.0
    left_s: Annotated[float, BeforeValidator(_left_s)] = math.nan
    """Seconds until the last step is done; NaN (null in the file) where that is not known."""
    left_from: str = ""
    """What `left_s` is told from, in a few words: finished runs, arithmetic, or the steps of the run itself."""
    steps_here: Count = 0
    """Steps since the run started or was resumed."""
    exit_code: Annotated[int, Field(ge=-(2**31), lt=2**32)] | None = None
    """None while the run goes on."""
    stage: State = "starting"
    """For a reader: the state that the run wrote."""


_STATUS = TypeAdapter(RunStatus)


@dataclass
class StatusWriter:
    """Listener that keeps status.json: at once when state or phase change, else every half second."""

    run_folder: Path
    events: EventStream
    clock: Callable[[], float] = time.time
    started_s: float = field(init=False)
    status: RunStatus = field(init=False)
    _written: RunStatus | None = field(default=None, init=False)
    _refused: bool = field(default=False, init=False)
    _time_left: TimeLeft = field(default_factory=TimeLeft, init=False)

    def __post_init__(self) -> None:
        process = psutil.Process()
        self.started_s = process.create_time()
        self.status = RunStatus(
            pid=process.pid,
            pid_started_s=self.started_s,
            name=self.run_folder.name,
            heartbeat_s=self.clock(),
        )

    def __call__(self, event: Event) -> None:
        """Take an event; a disk that refuses the file is reported once and training goes on."""
        before, self.status = self.status, after(self.status, event)
        self._time_left.take(event)
        self.status = replace(
            self.status,
            left_s=self._time_left.remaining_s,
            left_from=self._time_left.based_on,
        )
        # What begins, another phase or a part of one that nothing was done of since the last, may take minutes
        # without an event: the file must not name what was before it.
        part = isinstance(event, Phase) and event.done in (0, before.done)
        self.beat(at_once=part or self.status.phase != before.phase)

    def beat(self, *, at_once: bool = False) -> None:
        """Show that the process lives; cheap enough for every micro-batch."""
        now_s = self.clock()
        last = self._written
        now = self.status
        if (
            last is None
            or at_once
            or (last.state, last.exit_code) != (now.state, now.exit_code)
            or abs(now_s - last.heartbeat_s) >= INTERVAL_S
        ):
            self.status = self._written = replace(now, heartbeat_s=now_s)
            content = _STATUS.dump_json(self.status, indent=2, exclude={"stage"})  # a reader's
            try:
                write_atomic(self.run_folder / STATUS_FILE, content + b"\n", durable=False)
            except MachineError as error:
                if not self._refused:
                    self._refused = True
                    what = f"the status file is out of date: {error.found}"
                    self.events.problem(what, fix=error.fix, file=STATUS_FILE)


def after(status: RunStatus, event: Event) -> RunStatus:
    """Return the status once `event` has happened; the end of a run is final."""
    if isinstance(event, RunStarted):
        # A run may have had other processes before.
        return replace(
            status,
            state="starting",
            phase="",
            done=0,
            total=0,
            exit_code=None,
            name=event.name,
            step=event.resumed_from or 0,
            steps_here=0,
            steps=int(event.steps),
        )
    if status.exit_code is not None:
        return status
    match event:
        case Phase() if status.phase not in STOPPING or event.phase in STOPPING:
            return replace(
                status,
                state=_PHASE_STATES.get(event.phase, status.state),
                phase=event.phase,
                done=event.done,
                total=event.total,
                message=one_line(event.message or event.phase),
            )
        case Step() if status.phase in STOPPING:  # steps on their way are still told of
            return replace(status, step=event.step)
        case Step():
            status = replace(
                status,
                state="training",
                step=event.step,
                steps_here=min(status.steps_here + 1, MOST_STEPS),
            )
            loss = loss_text(event.loss)
            return _training(status, f"step {status.step} of {status.steps}, loss {loss}")
        case Samples() if status.phase == "sample":  # made between steps: the next one begins
            return _training(status, "training")
        case Finished():
            early = f" early: {event.early}" if event.early else ""
            doubt = f", but {event.doubt}" if event.doubt else ""
            message = one_line(f"finished{early}{doubt}")
            return replace(status, state="finished", step=event.step, message=message, exit_code=0)
        case Stopped():
            code = event.exit_code
            return replace(
                status,
                state="stopped" if code in INTERRUPTED_EXIT_CODES else "failed",
                step=event.step,
                message=one_line(event.reason),
                exit_code=code,
            )
    return status


def _training(status: RunStatus, message: str) -> RunStatus:
    return replace(status, phase="train", done=status.step, total=status.steps, message=message)


def read_status(run_folder: Path) -> RunStatus:
    """Return whether the run lives, has ended, or was interrupted; never raises.

    A missing or unreadable status.json is an interrupted run: it ended before it could say how.
    """
    try:
        status = _read(run_folder)
    except (OSError, ValueError) as error:
        reason = str(error)
        if isinstance(error, ValidationError):
            problem = error.errors()[0]
            reason = ": ".join((*map(str, problem["loc"]), problem["msg"]))
        message = f"{STATUS_FILE} cannot be read: {one_line(reason)}"
        return RunStatus(state="interrupted", name=run_folder.name, message=message)
    alive = is_alive(pid=status.pid, started_s=status.pid_started_s)
    status = replace(status, stage=status.state)
    if status.state not in ("finished", "stopped", "failed"):
        status = replace(status, state="running" if alive else "interrupted")
    return status if alive else replace(status, pid=None, pid_started_s=None)


def wrote_status(run_folder: Path, *, pid: int | None, started_s: float | None) -> bool:
    """Return whether status.json is the work of that process, dead or alive; never raises."""
    try:
        status = _read(run_folder)
    except (OSError, ValueError):
        return False
    return status.pid == pid and same_start(status.pid_started_s, started_s)


def _read(run_folder: Path) -> RunStatus:
    """Return the status as it was written; raises OSError, and ValueError for damage."""
    status = _STATUS.validate_json(
        retry_while_open(lambda: read_regular(run_folder / STATUS_FILE)), strict=True
    )
    # Strings of a file may hold what no terminal, page or process can be given.
    return replace(
        status,
        name=one_line(status.name),
        message=one_line(status.message),
        left_from=one_line(status.left_from),
    )


def end_process(status: RunStatus) -> bool:
    """Kill the process that trains, and no other that has its number by now; False if it is gone.

    The last saved state stays valid. Raises MachineError when the system refuses.
    """
    process = living(status.pid, status.pid_started_s)
    try:
        if process is not None:
            process.kill()
    except psutil.NoSuchProcess:
        return False
    except psutil.Error as error:
        raise MachineError(
            f"process {status.pid} cannot be ended: {one_line(str(error))}",
            fix="end it as the user who started it",
        ) from error
    return process is not None
