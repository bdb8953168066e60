"""The composition root of a training: prepare -> run folder -> train -> report, with signals and records.

It imports torch, so the command line imports it only to train.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from lora_trainer import __version__
from lora_trainer.cache.store import in_use
from lora_trainer.checkpoint.states import TrainingState, load_newest
from lora_trainer.common.errors import (
    InputError,
    LoraTrainError,
    MachineError,
    TrainingStopped,
    first_line,
)
from lora_trainer.common.event_kinds import Phase, Problem, Resumed, RunStarted, Stopped
from lora_trainer.common.events import EventStream, JsonlWriter, Listener
from lora_trainer.common.files import system_refused
from lora_trainer.common.processes import no_thread, read_dist_env
from lora_trainer.common.wording import gib, without_secrets
from lora_trainer.config.config import build_config, flatten
from lora_trainer.config.running import Config
from lora_trainer.dataset.records import bucket_counts
from lora_trainer.families.files.hub_files import OnBytes
from lora_trainer.hardware.devices import allocator_settings
from lora_trainer.hardware.kept_memory import take_back_gpu
from lora_trainer.planning.run_time import middle
from lora_trainer.reporting.control import Control, StopFlag, taking_signals
from lora_trainer.reporting.report import write_report
from lora_trainer.reporting.run_record import (
    BaseRecord,
    DatasetRecord,
    EnvironmentRecord,
    FindingRecord,
    RunRecord,
    write,
)
from lora_trainer.reporting.status import StatusWriter
from lora_trainer.reporting.trackers import ended, start_trackers
from lora_trainer.run.build import plan_cache, refuse_small_cache, sample_texts
from lora_trainer.run.device import (
    check_allocator,
    oom_history_memo,
    pinning,
    planned_device,
    setup_torch,
    training_gpu,
)
from lora_trainer.run.follow import follow, send_orders
from lora_trainer.run.hub_upload import check_upload
from lora_trainer.run.machine_report import doctor_json
from lora_trainer.run.plan_text import plan_record, run_warnings
from lora_trainer.run.prepare import Prepared, Request, prepare_with_base
from lora_trainer.run.run_folder import (
    EVENTS_FILE,
    PROBLEMS_FILE,
    STATES,
    TrainingJob,
    checked_name,
    claim,
    compare,
    create,
    cut_events,
    has_no_record,
    last_step,
    name_of_dataset,
    name_of_new_run,
    read_run,
)
from lora_trainer.run.run_job import run_job
from lora_trainer.run.time_taken import pace_memo
from lora_trainer.training.cores import shared_cores
from lora_trainer.training.distributed.process_group import ProcessGroup, isolate_accelerate, joined
from lora_trainer.training.pace import Notices

DOWNLOAD_TOLD_EVERY_S = 1.0


def lead(request: Request, *, listeners: Sequence[Listener] = ()) -> Path:
    """Train and return the exported file (in a process that follows, the path it will have).

    Raises LoraTrainError; once there is a run folder, its events, status and report record the error too.
    """
    isolate_accelerate()
    take_back_gpu()  # before the free memory is measured
    here = read_dist_env()
    request = replace(request, processes=here.count, sharing=here.local_count)
    # Processes need the setting to connect before one of them plans.
    before, previous = request, _previous(request)
    if previous is not None:
        # The leader reports an unreadable run; on another machine than the leader's there is none to read.
        with suppress(LoraTrainError):
            before = replace(request, run_settings=read_run(previous).settings)
    key = "hardware.process_timeout_s"
    value = before.asked.value(key)
    hardware = build_config({} if value is None else {key: value}).hardware
    with joined(here, timeout_s=hardware.process_timeout_s) as ranks:
        if here.is_main:
            return _plan_and_run(request, ranks, listeners)
        return follow(request, ranks)


def _plan_and_run(request: Request, ranks: ProcessGroup, listeners: Sequence[Listener]) -> Path:
    """Plan, write files and report for all processes, and do a share of the training."""
    previous = _previous(request)
    if previous is None:
        # Before anything is planned or downloaded; a preset may still give another.
        name_of_new_run(request.dataset, request.asked.value("output.name"))
    before = read_run(previous) if previous is not None and not has_no_record(previous) else None
    on_bytes = _download_phase(EventStream(listeners=list(listeners)))
    request = replace(request, on_bytes=on_bytes)
    if before is not None:
        request = replace(request, run_settings=before.settings)
        if before.environment.exactness.get("processes") == ranks.dist_env.count:
            request = replace(request, run_at_once=before.plan.memory.images_at_once)
    prepared = prepare_with_base(request)
    # Everything that can refuse the run comes before its folder is claimed, so that a refused request
    # leaves no folder and does not touch the run it would resume.
    output = prepared.config.output
    name = name_of_new_run(request.dataset, output.name) if previous is None else ""
    _refuse(request, prepared)
    cache_needs = plan_cache(prepared, prepared.sample_texts, seeing=sample_texts(prepared))
    refuse_small_cache(prepared, cache_needs)
    if output.hub_repo is not None:
        check_upload(output.hub_repo)
    environment = setup_torch(prepared)
    resumption = _resumption(before, prepared, environment) if before else None
    with (
        claim(previous) if previous is not None else create(Path(output.folder), name) as folder,
        _recorded(folder, prepared, listeners, ranks, request) as (events, stop),
        pinning(prepared, events),
    ):
        events.subscribe(oom_history_memo(prepared, events))
        events.subscribe(pace_memo(prepared, events))
        with _end_recorded(folder, events):
            check_allocator(planned_device(prepared), events)
            send_orders(ranks, prepared, folder, events)
        job = TrainingJob(
            prepared=prepared,
            folder=folder,
            cache_needs=cache_needs,
            state=_newest_state(folder, events) if previous is not None else None,
            events=events,
            stop=stop,
            started_at_s=before.started_at_s if before else time.time(),
            ranks=ranks,
            watchers=request.watchers,
        )
        _announce(job, resumption)
        record = _run_record(job, request, environment)
        write(folder, record)
        with (
            _end_recorded(folder, events),
            in_use(prepared.cache_root),
            shared_cores(events),
            Notices(config=prepared.config, gpu=training_gpu(prepared), events=events),
        ):
            file = run_job(job)
        events.emit(Phase(phase="report", message="report.html", done=0, total=0))
        _report(folder, events)
        return file


def _download_phase(events: EventStream) -> OnBytes:
    """Tell of the download of a base as a phase of the run, which has no folder yet: in bytes, once a second."""
    told_s = -math.inf

    def tell(source: str, here_bytes: int, all_bytes: int) -> None:
        nonlocal told_s
        if here_bytes < all_bytes and time.monotonic() < told_s + DOWNLOAD_TOLD_EVERY_S:
            return
        told_s = time.monotonic()
        events.emit(Phase(phase="download", message=source, done=here_bytes, total=all_bytes))

    return tell


@contextmanager
def _end_recorded(folder: Path, events: EventStream) -> Iterator[None]:
    """Record an error that ends the run in its events, status and report.

    Errors of the system and of memory become a LoraTrainError; a mistake of ours is recorded and raised as it is.
    """
    try:
        yield
    except Exception as error:
        known = _as_known(error)
        reason = str(known) if known is not None else f"{type(error).__name__}: {first_line(error)}"
        _record_end(folder, events, reason, code=known.exit_code if known is not None else 1)
        _report(folder, events)
        if known is None or known is error:
            raise
        raise known from error


def _as_known(error: Exception) -> LoraTrainError | None:
    if isinstance(error, LoraTrainError):
        return error
    if isinstance(error, MemoryError):
        return TrainingStopped(
            "the memory of the machine, or its limit for this program, is used up",
            fix="raise the limit (`ulimit -v`) or free memory, and run again with --resume",
        )
    return system_refused(error) if isinstance(error, OSError) else no_thread(error)


def _report(folder: Path, events: EventStream) -> None:
    """Write report.html; whatever refuses it is a problem, as how the run ended counts more."""
    try:
        write_report(folder)
    except LoraTrainError as error:
        events.problem(error.found, fix=error.fix, code="TRN-05")
    except Exception as error:  # noqa: BLE001 - as said above
        events.problem(
            f"report.html was not written: {type(error).__name__}: {first_line(error)}",
            fix="nothing: the LoRA is complete; please report it",
            code="TRN-05",
        )


def _record_end(folder: Path, events: EventStream, reason: str, *, code: int) -> None:
    step = 0
    with suppress(LoraTrainError):  # events.jsonl may be what failed
        step = last_step(folder)
    events.emit(Stopped(reason=reason, exit_code=code, step=step))


def _previous(request: Request) -> Path | None:
    """Return the folder of the run to resume, from --resume-from, or from --resume and the run's name."""
    if request.resume_from is not None or not request.resume:
        return request.resume_from
    asked = replace(request, preset="auto").asked  # presets do not apply to a resume
    name, folder = (asked.value(f"output.{key}") for key in ("name", "folder"))
    parent = Path(folder or Config().output.folder)
    if name not in (None, "auto"):
        return parent / checked_name(str(name), is_new=False)
    # Runs of earlier versions have the name of the folder or file as it is.
    earlier = parent / request.dataset.resolve().name
    return earlier if earlier.is_dir() else parent / name_of_dataset(request.dataset)


def _refuse(request: Request, prepared: Prepared) -> None:
    """Raise InputError for a dataset with problems where the user is strict, MachineError for a small disk.

    States and exports are predicted (CKP-06 in docs/reliability.md).
    """
    problems = [finding for finding in prepared.report.findings if finding.severity != "note"]
    if request.strict and problems:
        first = problems[0]
        raise InputError(
            f"--strict: the dataset has {len(problems)} problems, the first: {first.file or 'dataset'}: {first.what}",
            fix=f"{first.advice}, see `lora-train check`, or leave --strict out",
        )
    folder, disk = Path(prepared.config.output.folder), prepared.plan.disk_bytes
    needed_bytes = disk["states"] + disk["exports"]
    free_bytes = prepared.hardware.disk_free_bytes(folder)
    if needed_bytes > free_bytes:
        raise MachineError(
            f"{folder} has {gib(free_bytes)} free, but the run needs {gib(needed_bytes)} for states and exports",
            fix="free some space, or choose another folder with --output",
        )


def _newest_state(folder: Path, events: EventStream) -> TrainingState | None:
    """Return the newest valid state and drop events logged after it; None: nothing was saved yet.

    Raises MachineError if states exist and none is valid, as only the user may decide to start over.
    """
    state = load_newest(folder / STATES, events=events)
    damaged = sorted(path.name for path in (folder / STATES).glob("bad-*"))
    if state is None and damaged:
        raise MachineError(
            f"no state of {folder} is valid; damaged: {', '.join(damaged)}",
            fix="check the disk, then start a new run without --resume",
        )
    cut_events(folder, step=state.step if state else -1)
    return state


@contextmanager
def _recorded(
    folder: Path,
    prepared: Prepared,
    listeners: Sequence[Listener],
    ranks: ProcessGroup,
    request: Request,
) -> Iterator[tuple[EventStream, StopFlag]]:
    """Open the run's records and handle Ctrl-C and SIGTERM while the block runs."""
    events = EventStream(listeners=list(listeners))
    for name, takes in (
        (EVENTS_FILE, lambda event: not isinstance(event, Phase | Problem)),
        (PROBLEMS_FILE, lambda event: isinstance(event, Problem)),
    ):
        events.subscribe(JsonlWriter(folder / name, takes, events), is_record=True)
    status = StatusWriter(folder, events)
    events.subscribe(status, is_record=True)
    if ranks.monitor is not None:
        ranks.monitor.on_end = partial(_record_end, folder, events, code=MachineError.exit_code)
    control = Control(folder)
    control.forget_before(status.started_s)
    stop = StopFlag(control=control, is_asked=request.is_asked_to_stop)
    with taking_signals(stop):
        trackers = start_trackers(
            prepared.config.logging.trackers,
            packages=prepared.hardware.packages,
            run_folder=folder,
            settings=flatten(prepared.config),
            events=events,
        )
        with stop.announced(events), ended(trackers):
            yield events, stop


@dataclass(frozen=True, kw_only=True)
class Resumption:
    """How a resumed run repeats the original."""

    exactness: str
    """EXACT, SAME-STREAM or CHANGED."""
    differences: list[str]
    same_data: bool
    """Whether its images and captions are those of the original, whose findings were reported then."""


def _resumption(before: RunRecord, prepared: Prepared, environment: dict[str, Any]) -> Resumption:
    """Compare a run with the new request; raises RequestError before any file changes."""
    exactness, differences = compare(
        before.settings,
        flatten(prepared.config),
        environment=before.environment.exactness,
        environment_now=environment,
    )
    same_data = before.dataset.fingerprint == prepared.dataset.fingerprint
    changed = [] if same_data else ["dataset: images or captions changed"]
    changed += [
        f"base: the {name} has other weights"
        for name, identity in prepared.identities.items()
        if before.base.identities.get(name) != identity
    ]
    return Resumption(
        exactness="CHANGED" if changed else exactness,
        differences=[*differences, *changed],
        same_data=same_data,
    )


def _announce(job: TrainingJob, resumption: Resumption | None) -> None:
    """Emit the start of the run or its resume; at the start also warnings about base, GPU and data."""
    prepared, config = job.prepared, job.prepared.config
    steps = config.train.steps
    resumed = None
    if resumption is not None:
        resumed = job.state.step if job.state else 0
        job.events.emit(
            Resumed(
                step=resumed,
                exactness=resumption.exactness,
                differences=resumption.differences,
            )
        )
    job.events.emit(
        RunStarted(
            name=job.folder.name,
            family=prepared.family.name,
            base=prepared.facts.source,
            steps=steps,
            batch_size=config.train.batch_size,
            device=config.hardware.device,
            tier=prepared.resolved.tier,
            priority=prepared.resolved.priority,
            preset=prepared.resolved.preset,
            images=len(prepared.trained),
            validation_images=len(prepared.held_out),
            regularisation_images=len(prepared.dataset.regularisation),
            directions=len(prepared.dataset.directions),
            pairs=prepared.dataset.pairs,
            resumed_from=resumed,
            every_steps={
                "sample": config.sampling.every_steps,
                "validation": config.train.validate_every_steps,
            },
            planned_s={
                name: round(middle(seconds), 2)
                for name, seconds in prepared.plan.run_time.parts.items()
            },
            planned_from=prepared.plan.time_source,
        )
    )
    if resumed is not None and resumed > steps:
        job.events.problem(
            f"the run has trained {resumed} steps, more than train.steps={steps}: it is only exported again",
            fix=f"give --steps above {resumed} to train on, or start a new run",
        )
    if resumption is not None and resumption.same_data:
        return  # reported when the run began
    for finding in (*run_warnings(prepared), *prepared.report.findings):
        if finding.severity != "note":
            job.events.problem(
                finding.what,
                fix=finding.advice,
                severity=finding.severity,
                file=finding.file,
                code=finding.code,
            )


def _run_record(job: TrainingJob, request: Request, environment: dict[str, Any]) -> RunRecord:
    prepared, layout = job.prepared, job.prepared.facts.located
    report = prepared.report.rounded
    # Of the base only the name of its file or folder: its path may reveal private names.
    base = layout.files.get("denoiser", layout.folder)
    return RunRecord(
        name=job.folder.name,
        version=__version__,
        command=[without_secrets(word) for word in request.command],
        started_at_s=job.started_at_s,
        settings=flatten(prepared.config),
        origins=prepared.plan.origins,
        base=BaseRecord(
            family=prepared.family.name,
            source=prepared.facts.source,
            path=base.name,
            identities=prepared.identities,
        ),
        plan=replace(plan_record(prepared), settings={}),
        environment=EnvironmentRecord(
            exactness=environment,
            rest={
                "python": sys.version.split()[0],
                "allocator": allocator_settings(os.environ),
                **doctor_json(prepared.hardware),
            },
        ),
        dataset=DatasetRecord(
            images=len(prepared.dataset.records),
            score=report.score,
            parts=report.parts,
            findings=[
                FindingRecord(
                    kind=found.kind,
                    severity=found.severity,
                    file=found.file,
                    what=found.what,
                    advice=found.advice,
                    code=found.code,
                )
                for found in report.findings
            ],
            buckets=bucket_counts(prepared.trained),
            name=prepared.dataset.folder.resolve().name,
            fingerprint=prepared.dataset.fingerprint,
            held_out=[record.name for record in prepared.held_out],
        ),
    )
