"""What a run does, how far it is and what can be asked of it, in words.

Inputs: its status, its RunHistory, the requests that wait, the time. Outputs: sentences, figures, and
which buttons are of use. Everything is a function of the run's files and of whether its process
lives, so that every tab, and a run that was started in a terminal, shows the same.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lora_trainer.common.errors import MachineError, TrainingStopped
from lora_trainer.common.event_kinds import Change
from lora_trainer.common.wording import bytes_text, duration_text
from lora_trainer.queue import commands
from lora_trainer.queue.commands import Download, Item
from lora_trainer.reporting.control import Control
from lora_trainer.reporting.history import RunHistory, is_recovery
from lora_trainer.reporting.status import FIRST_STEPS, STOPPING, RunStatus

# How long a trainer may take to obey `stop_now` before its process may be ended.
END_AFTER_S = 15.0
SILENT_AFTER_S = 120.0
RESUMABLE = frozenset({"interrupted", "stopped", "failed"})
FINISHING = "finishing"
_FINISHING_S = 1.0
_BY_SECONDS_S, _BY_TENS_S, _BY_MINUTES_S, _MINUTE_S = 60.0, 10.0, 300.0, 60.0
PACE_STEPS = 50
_DOING = {
    "": "Starting.",
    "scan": "Reading the images.",
    "plan": "Planning.",
    "load": "Loading the base model.",
    "images": "Preparing the images.",
    "captions": "Preparing the captions.",
    "base": "Looking at what the base model does before the training.",
    "train": "Training.",
    "sample": "Making sample images.",
    "export": "Writing the LoRA file.",
    "report": "Writing the report.",
}
_DOING_SOME = {
    "scan": "Reading the images {done} of {total}.",
    "images": "Preparing the images: {done} of {total}.",
    "captions": "Preparing the captions: {done} of {total}.",
    "sample": "Making sample images {done} of {total}.",
}
_STARTING = (
    (frozenset({"", "scan", "plan"}), "Check your images"),
    (frozenset({"cache"}), "Prepare the images and captions"),
    (frozenset({"load"}), "Load the base model"),
    (frozenset({"base", "sample"}), "See what the base model does before the training"),
    (frozenset({"train"}), "Train the first step"),
)
_OF_A_SLIDER = {
    "Check your images": "Read the words of the slider",
    "Prepare the images and captions": "Prepare the words",
}
_PHASES_OF_STAGES = {"caching": "cache", "training": "train"}
_COUNTED = frozenset({"cache", "sample", "scan"})


@dataclass(frozen=True, kw_only=True)
class Look:
    """A run at one moment: its files, its process, the requests it has not obeyed yet.

    `queued` is the item of the queue that goes on with it, or tried to last.
    """

    folder: Path
    status: RunStatus
    waiting: Set[str]
    asked_to_quit_s: float | None
    queued: Item | None
    now_s: float

    @property
    def stopping(self) -> bool:
        """Whether the run was asked to end and has not ended."""
        asked = self.status.phase in STOPPING or bool(self.waiting & {"stop", "stop_now"})
        return self.status.state == "running" and asked

    @property
    def quitting(self) -> bool:
        """Whether it was asked to end at once, without saving."""
        return self.stopping and (self.status.phase == "quit" or "stop_now" in self.waiting)

    @property
    def may_be_ended(self) -> bool:
        """Whether it has not obeyed that for long enough to end its process."""
        if not self.quitting:
            return False
        since_s = self.asked_to_quit_s or self.status.heartbeat_s
        return self.now_s - since_s >= END_AFTER_S

    @property
    def goes_on_soon(self) -> bool:
        """Whether the queue is about to go on with a run that does not train."""
        item = self.queued
        return self.status.state != "running" and item is not None and not item.has_ended

    @property
    def refused(self) -> str:
        """Why going on with it failed before it could say so itself; an empty string otherwise."""
        item = self.queued
        if (
            item is None
            or item.state != "failed"
            or (item.ended_s or 0.0) < self.status.heartbeat_s
        ):
            return ""
        return item.error

    @property
    def silent_s(self) -> float:
        """How long a running trainer has not said anything."""
        running = self.status.state == "running"
        return max(0.0, self.now_s - self.status.heartbeat_s) if running else 0.0


def look(folder: Path, status: RunStatus, *, now_s: float) -> Look:
    """Return the run as it is now; `now_s` is a Unix time."""
    control = Control(folder)
    return Look(
        folder=folder,
        status=status,
        waiting=frozenset(control.pending()),
        asked_to_quit_s=control.asked_at_s("stop_now"),
        queued=_queued(folder) if status.state in RESUMABLE else None,
        now_s=now_s,
    )


def _queued(folder: Path) -> Item | None:
    """Return the newest item of the queue that goes on with a run."""
    target = str(folder.resolve())
    words = {target, f"--resume-from={target}"}
    try:
        found = [item for item in commands.items(folder.parent) if words & set(item.argv)]
    except MachineError:  # the queue's own page says so
        return None
    return max(found, key=lambda item: item.added_s, default=None)


@dataclass(frozen=True, kw_only=True)
class Possible:
    """What can be asked of a run now: the buttons that its page shows."""

    save: bool = False
    sample: bool = False
    stop: bool = False
    force: bool = False
    end: bool = False
    resume: bool = False


def possible(seen: Look) -> Possible:
    """Return which buttons are of use."""
    if seen.status.state != "running":
        # A run that learns nothing would learn nothing again: its page offers to train with a change.
        hopeless = seen.status.exit_code == TrainingStopped.exit_code
        resumable = seen.status.state in RESUMABLE and not seen.goes_on_soon and not hopeless
        return Possible(resume=resumable)
    if seen.may_be_ended:
        return Possible(end=True)
    if seen.stopping:
        return Possible(force=not seen.quitting)
    return Possible(save=True, sample=True, stop=True)


def sentence(seen: Look, history: RunHistory) -> str:
    """Say in one sentence what the run does or how it ended."""
    status = seen.status
    where = f"step {status.step:,} of {status.steps:,}" if status.steps else "the start"
    if status.state == "running":
        return _running(seen)
    if seen.goes_on_soon and seen.queued is not None:
        if seen.queued.state == "waiting":
            return f"Waits in the queue to be resumed from {where}."
        return f"Resuming from {where}."
    if status.state == "finished":
        return f"Finished after {status.step:,} steps."
    if status.state == "stopped":
        return f"Stopped at {where}, its state saved; Resume goes on from there."
    if status.state == "failed":
        return f"Failed at {where}."
    return f"Interrupted at {where}."


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage on the way to the first step; `done` of `total` parts of the one that goes on, else 0 of 0.

    `number` writes them: counts, or bytes.
    """

    name: str
    state: Literal["done", "now", "later"]
    done: int = 0
    total: int = 0
    number: Callable[[int], str] = "{:,}".format


def _stages(*, is_slider: bool) -> Sequence[tuple[Set[str], str]]:
    """Return the stages up to the first step with their phases; a slider learns from words, and has no images."""
    if not is_slider:
        return _STARTING
    return [(phases, _OF_A_SLIDER.get(name, name)) for phases, name in _STARTING]


def downloading(download: Download, *, is_slider: bool) -> tuple[Stage, ...]:
    """Return the stages of a run whose base is being downloaded, before it has a folder."""
    come = Stage(
        name=f"Download the base model {download.source}",
        state="now",
        done=download.here_bytes,
        total=download.all_bytes,
        number=bytes_text,
    )
    return (come, *(Stage(name=name, state="later") for _, name in _stages(is_slider=is_slider)))


def setting_out(*, is_slider: bool) -> tuple[Stage, ...]:
    """Return the stages of a run that has no folder yet: the program starts, then reads the images."""
    start = Stage(name="Start the program", state="now")
    return (start, *(Stage(name=name, state="later") for _, name in _stages(is_slider=is_slider)))


def starting(seen: Look, *, is_slider: bool) -> tuple[Stage, ...]:
    """Return the stages up to the first step of a run that has not done it since it started or resumed."""
    status = seen.status
    phase = status.phase or _PHASES_OF_STAGES.get(status.stage, "")
    if status.state != "running" or seen.stopping or status.steps_here:
        return ()
    stages = _stages(is_slider=is_slider)
    now = next((at for at, (phases, _) in enumerate(stages) if phase in phases), None)
    if now is None:
        return ()
    parts = (status.done, status.total) if phase in _COUNTED else (0, 0)
    return (
        *(Stage(name=name, state="done") for _, name in stages[:now]),
        Stage(name=stages[now][1], state="now", done=parts[0], total=parts[1]),
        *(Stage(name=name, state="later") for _, name in stages[now + 1 :]),
    )


def remarks(seen: Look, history: RunHistory) -> list[str]:
    """Return what else is to be known of a run that trains: requests, recoveries, silence."""
    status = seen.status
    said = []
    if seen.may_be_ended:
        said.append(
            f"It does not obey. End the process ends it, number {status.pid}, and nothing else; "
            f"{_goes_on_from(history)}."
        )
    elif seen.stopping and not seen.quitting:
        said.append(
            "Force stop does not wait for that: what was trained since the last save is lost; "
            f"{_goes_on_from(history)}."
        )
    for request, words in (("save", "to save"), ("sample", "to make sample images")):
        if request in seen.waiting and status.state == "running":
            said.append(f"Asked {words}: done as soon as the step that runs is.")
    if status.state == "running" and (recovered := recovery_text(history)):
        said.append(recovered)
    if seen.silent_s >= SILENT_AFTER_S:
        minutes = int(seen.silent_s // 60)
        said.append(f"Its process lives and has said nothing for {minutes} min.")
    return said


def explained(seen: Look, history: RunHistory) -> tuple[str, str] | None:
    """Return why a run ended before its end and what to do about it; None for every other run."""
    status = seen.status
    if seen.goes_on_soon:
        return None
    if seen.refused or status.state == "failed":
        found, _, fix = (seen.refused or status.message).partition(" Fix: ")
        return found.removeprefix("error: "), fix or "see the log below, then press Resume"
    if status.state != "interrupted":
        return None
    if "cannot be read" in status.message:
        return status.message, "nothing, if it is training elsewhere; else press Resume"
    return (
        "The training ended without a word: it was killed, the machine went off, or its memory "
        "or the disk was full",
        f"press Resume; {_goes_on_from(history)}",
    )


def saved_step(history: RunHistory) -> int | None:
    """Return the last step of which a state was saved."""
    steps = [saved.step for saved in history.saves if saved.state]
    return steps[-1] if steps else None


def step_s(history: RunHistory) -> float:
    """Return the median seconds of the last steps; NaN before the first."""
    recent = [row.seconds for row in history.steps[-PACE_STEPS:] if math.isfinite(row.seconds)]
    return statistics.median(recent) if recent else math.nan


def recovery_text(history: RunHistory) -> str:
    """Return the last change after running out of memory, if it still holds; else an empty string.

    Such as `Recovered from out of memory at step 150: batch 8 -> 4`.
    """
    for mark in reversed(history.marks):
        change = mark.event
        if isinstance(change, Change) and change.key.startswith("memory."):
            if not is_recovery(mark):
                return ""
            name = "images at a time" if change.key == "memory.micro_batch" else change.key
            return (
                f"Recovered from out of memory at step {mark.step:,}: {name} {change.old} -> "
                f"{change.new}. The result is the same, a step takes longer."
            )
    return ""


def _running(seen: Look) -> str:
    status = seen.status
    if seen.quitting:
        return "Stopping at once, without saving."
    if status.phase == "stop":
        return f"Saving the state, step {status.step:,}."
    if seen.stopping:
        return "Asked to stop: the step that runs is finished, then the state is saved."
    return doing(status)


def doing(status: RunStatus) -> str:
    """Say in one sentence what a run does that nobody asked to end: what it works at, and how much of it is done."""
    phase = status.phase or _PHASES_OF_STAGES.get(status.stage, "")
    if phase == "cache":
        phase = "captions" if status.message == "captions" else "images"
    if phase in _DOING_SOME and status.total:
        return _DOING_SOME[phase].format(done=f"{status.done:,}", total=f"{status.total:,}")
    return _DOING.get(phase, f"{status.message}.")


def _goes_on_from(history: RunHistory) -> str:
    step = saved_step(history)
    if step is None:
        return "nothing was saved yet, so a resume begins at the start"
    return f"a resume goes on from step {step:,}, the last saved state"


def left_text(status: RunStatus) -> str:
    """Return a time left that nobody takes for exact: `about 38 min`; FINISHING for none, empty if unknown.

    Before the first steps only the plan says how long it takes, as a range: a time that is left would be its middle.
    """
    seconds = status.left_s
    if status.steps_here < FIRST_STEPS or not math.isfinite(seconds) or seconds < 0:
        return ""
    if status.step and seconds < _FINISHING_S:
        return FINISHING
    return f"about {rough_text(seconds)}"


def rough_text(seconds: float) -> str:
    """Return a time that is only estimated, in steps that it is good for: `38 s`, `2 min 20 s`, `12 min`."""
    if seconds < _BY_SECONDS_S:
        return f"{math.ceil(seconds)} s"
    step_s = _BY_TENS_S if seconds < _BY_MINUTES_S else _MINUTE_S
    return duration_text(step_s * round(seconds / step_s)).removesuffix(" 00 s")
