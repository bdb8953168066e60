"""How long each part of a run took, written down for the predictions of the next ones (planning/known_pace.py).

Input: the plan and the events of a run that finishes. What no event tells, such as the start, the saves and the end, is
what is left of the time between the beginning and the end.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil

from lora_trainer.common.errors import MachineError
from lora_trainer.common.event_kinds import (
    Cached,
    Event,
    Finished,
    ImageLosses,
    Preview,
    RunStarted,
    Samples,
    Step,
    Validation,
)
from lora_trainer.common.events import EventStream, Listener
from lora_trainer.hardware.machine import usable_processors
from lora_trainer.planning.known_pace import (
    LEAST_STEPS,
    STEPS,
    PastRun,
    load_beside,
    load_factor,
    remember_run,
)
from lora_trainer.planning.plan import Plan, device_of, run_kind
from lora_trainer.run.prepare import Prepared
from lora_trainer.training.cores import (
    CpuTimes,
    cores_taken,
    cores_used,
    cores_waited_for,
    cpu_times,
)


@dataclass(kw_only=True)
class _PartsTaken:
    """Seconds of each part of a run so far, by the names of planning/run_time.py, from the events that tell them."""

    began_s: float
    steps: int = 0
    is_whole: bool = True
    """Whether these events are of a run from its first step on."""
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def take(self, event: Event) -> None:
        match event:
            case RunStarted():
                self.is_whole = event.resumed_from is None
            case Step():
                self.steps += 1
                self.seconds[STEPS] += event.seconds
            case Cached():
                # A plan does not know what is in the cache already: only a run that found nothing there compares.
                self.seconds["found" if event.found else "caching"] += event.seconds
            case Validation() | ImageLosses():
                self.seconds["validation"] += event.seconds
            case Samples(asked=False):
                self.seconds["sample images"] += event.seconds
            case Samples():
                self.seconds["asked for"] += event.seconds
            case Preview():
                self.seconds["previews"] += event.seconds

    def slower(self, plan: Plan, *, ended_s: float) -> dict[str, float]:
        """Return how many times as long as planned each part took; a part that is not of the whole run is left out."""
        factors = {STEPS: self.seconds[STEPS] / (self.steps * plan.idle_step_s)}
        if self.is_whole and self.steps == plan.steps:
            # What no event tells is the start, the saves and the end.
            rest = max(0.0, ended_s - self.began_s - sum(self.seconds.values()))
            taken = {**self.seconds, "start": rest}
            factors |= {
                part: taken[part] / planned_s
                for part, planned_s in plan.idle_parts_s.items()
                if part != STEPS and planned_s and taken.get(part)
            }
        return factors


def pace_memo(prepared: Prepared, events: EventStream) -> Listener:
    """Return a listener that records how long the parts of a run took that finishes, see known_pace.py."""
    hardware, config = prepared.hardware, prepared.config
    gpu = device_of(config, hardware, sharing=prepared.inputs.sharing)
    kind = run_kind(prepared.inputs, config)
    processors = usable_processors()
    before = _cpu_times(processors) if gpu is None else None
    taken = _PartsTaken(began_s=time.time())

    def beside_others() -> tuple[float, float | None]:
        """Return how much longer other programs made the run, and the processors it would have used without them."""
        after = None if before is None else _cpu_times(processors)
        if before is None or after is None:
            return load_factor(hardware, gpu), None
        own = cores_used(before, after)
        load = load_beside(
            own=own,
            waited=cores_waited_for(before, after),
            taken=cores_taken(before, after, processors=len(processors)),
            processors=len(processors),
            threads=config.hardware.threads,
        )
        return load, min(own * load, len(processors)) or None

    def listener(event: Event) -> None:
        taken.take(event)
        if not isinstance(event, Finished) or taken.steps < LEAST_STEPS:
            return
        slower = taken.slower(prepared.plan, ended_s=event.time_s)
        load, cores = beside_others()
        run = PastRun(kind=kind, slower=slower, load=load, cores=cores)
        try:
            remember_run(prepared.cache_root, hardware, run, gpu=gpu, family=prepared.family.name)
        except MachineError as error:  # a full disk must not spoil a finished run
            what = f"how long this run took could not be written down: {error.found}"
            events.problem(what, fix=error.fix, severity="note", code="TRN-02")

    return listener


def _cpu_times(processors: Sequence[int]) -> CpuTimes | None:
    """Return the processor times so far, None where the system does not tell."""
    try:
        return cpu_times(processors)
    except (OSError, psutil.Error):
        return None
