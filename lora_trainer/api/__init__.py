"""lora-train from Python: plan, train, load and validate, as the command line does it (docs/api.md).

Each function takes the words of the command of its name: `settings` are dotted keys, as after `--set`.
Errors are classes of `lora_trainer.common.errors`. Importing this module, and planning, load no torch.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lora_trainer.common.errors import LoraTrainError
from lora_trainer.common.event_kinds import Event
from lora_trainer.common.events import Listener
from lora_trainer.common.processes import made_to_stay, quiet_network_libraries, read_dist_env
from lora_trainer.common.records import as_json
from lora_trainer.config import Priority
from lora_trainer.run.plan_text import plan_record
from lora_trainer.run.prepare import Prepared, Request, prepare
from lora_trainer.run.run_folder import name_of_new_run

if TYPE_CHECKING:  # these import torch
    from lora_trainer.reporting.score import Validation
    from lora_trainer.run.samples import LoadedAdapter

__all__ = [
    "Event",
    "LoraTrainError",
    "TrainingPlan",
    "load_adapter",
    "plan",
    "train",
    "train_events",
    "validate",
]
_NO_SETTINGS: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """A training that fits this machine."""

    prepared: Prepared

    def to_json(self) -> dict[str, Any]:
        """Return settings with origins, memory, time and disk, as `lora-train plan --json` prints them."""
        found: dict[str, Any] = as_json(plan_record(self.prepared))
        return found


def plan(
    dataset: Path | str,
    *,
    preset: str = "auto",
    priority: Priority = "balanced",
    config_file: Path | None = None,
    settings: Mapping[str, Any] = _NO_SETTINGS,
    vram_gib: float | None = None,
    processes: int | None = None,
) -> TrainingPlan:
    """Predict a training without loading or downloading a base; `processes` None: as many as a launcher started.

    Raises LoraTrainError; a MachineError names the nearest setting that fits.
    """
    count = read_dist_env().count if processes is None else processes
    request = Request.of(
        dataset,
        preset=preset,
        priority=priority,
        config_file=config_file,
        settings=settings,
        assumed_vram_gib=vram_gib,
        processes=count,
        sharing=count,
    )
    prepared = prepare(request)
    name_of_new_run(request.dataset, prepared.config.output.name)
    return TrainingPlan(prepared=prepared)


def train(
    dataset: Path | str,
    *,
    preset: str = "auto",
    priority: Priority = "balanced",
    config_file: Path | None = None,
    settings: Mapping[str, Any] = _NO_SETTINGS,
    resume: bool = False,
    resume_from: Path | None = None,
    strict: bool = False,
    command: Sequence[str] = (),
    listeners: Sequence[Listener] = (),
    is_asked_to_stop: Callable[[], bool] = lambda: False,
) -> Path:
    """Train and return the exported LoRA file; `listeners` are called with each event, in this thread or another.

    In the main thread Ctrl-C stops the run after saving; `is_asked_to_stop` does so from anywhere.
    `command` is noted in run.json. Raises LoraTrainError.
    """
    with made_to_stay():
        quiet_network_libraries()
        from lora_trainer.run.lead import lead

    request = Request.of(
        dataset,
        preset=preset,
        priority=priority,
        config_file=config_file,
        settings=settings,
        fetches=True,
        resume=resume,
        resume_from=resume_from,
        strict=strict,
        command=command,
        is_asked_to_stop=is_asked_to_stop,
    )
    return lead(request, listeners=listeners)


def train_events(dataset: Path | str, **options: Any) -> Iterator[Event]:
    """Train in a thread and yield its events as they happen; `options` are those of `train`.

    Closing the iterator stops the run, which saves its state first. Raises LoraTrainError, after the events
    before it.
    """
    events: queue.SimpleQueue[Event | BaseException | None] = queue.SimpleQueue()
    closed = threading.Event()

    listeners = (*options.pop("listeners", ()), events.put)

    def work() -> None:
        try:
            train(dataset, listeners=listeners, is_asked_to_stop=closed.is_set, **options)
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            events.put(error)
        events.put(None)

    thread = threading.Thread(target=work, name="lora-train", daemon=True)
    thread.start()
    try:
        while (event := events.get()) is not None:
            if isinstance(event, BaseException):
                raise event
            yield event
    finally:
        closed.set()
        thread.join()


def load_adapter(run: Path | str, *, base: str | None = None) -> LoadedAdapter:
    """Load a LoRA onto its base in a diffusers pipeline; `run` is a run folder or a LoRA file.

    `base` replaces the base that the file names. Raises InputError and RequestError.
    """
    quiet_network_libraries()
    from lora_trainer.run.samples import load_adapter as load

    return load(Path(run), base=base)


def validate(
    run: Path | str,
    dataset: Path | str,
    *,
    base: str | None = None,
    clip: str | None = None,
    settings: Mapping[str, Any] = _NO_SETTINGS,
    listeners: Sequence[Listener] = (),
) -> Validation:
    """Score a LoRA against the images it was trained on (docs/scores.md); adds the score to a run's report.

    `clip` names a CLIP image encoder on this machine. Raises LoraTrainError.
    """
    quiet_network_libraries()
    from lora_trainer.evaluate.validate import validate as measure

    return measure(
        Path(run), Path(dataset), base=base, clip=clip, overrides=settings, listeners=listeners
    )
