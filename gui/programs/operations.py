"""The operations for programs: plan, check, caption, train, watch, stop, sample, validate, the queue.

Inputs: paths of this machine and names of runs, as somebody would type them into the pages; the same folders may be
named. Outputs: plain JSON values. What is started here is shown by the pages, and the other way round. Each docstring
is what a program is told about its operation.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.config import PRIORITIES
from lora_trainer.config.config import build_config
from lora_trainer.queue import commands, worker
from lora_trainer.reporting.status import RunStatus, read_status

from .. import command_lines, drafts, jobs, run_actions, runs
from ..datasets import caption_job
from ..workplace import Workplace

LOOK_AGAIN_S = 0.5
_VALIDATION = "validate"


@dataclass(frozen=True, kw_only=True)
class Operations:
    """The operations on one runs folder; each may raise a LoraTrainError."""

    work: Workplace
    again_s: float = LOOK_AGAIN_S
    """Seconds between two looks at a run that is watched."""

    # ---- what changes nothing

    def plan(
        self,
        dataset: str,
        base: str = "",
        priority: str = "balanced",
        settings: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Predict the memory and the time of a training, without starting it.

        Args:
            dataset: Path of the folder with the images, or of a slider's file.
            base: Hub id or path of the base model; empty: chosen for this machine.
            priority: speed, balanced or quality.
            settings: Settings by their dotted keys, such as {"train.steps": 1000}.
        """
        draft = _draft(dataset=dataset, base=base, priority=priority, settings=settings)
        return _answered(command_lines.ask(command_lines.plan_words(draft, self.work)))

    def check(self, dataset: str, base: str = "") -> dict[str, Any]:
        """Report on the images and captions of a dataset: what is wrong, and what to do.

        Args:
            dataset: Path of the folder with the images, or of a slider's file.
            base: Hub id or path of the base model that the images are judged for.
        """
        return _answered(
            command_lines.ask(
                command_lines.check_words(_draft(dataset=dataset, base=base), self.work)
            )
        )

    def runs(self) -> list[dict[str, Any]]:
        """List the runs, those that train first: name, state, step and message of each."""
        return [_status(entry.name, entry.status) for entry in runs.find_runs(self.work.runs)]

    def status(self, run: str) -> dict[str, Any]:
        """Tell how a run is now: state, step, phase, seconds left, message, exit code.

        Args:
            run: Name of the run.
        """
        folder = runs.run_folder(self.work.runs, run)
        return _status(run, read_status(folder))

    def watch(self, run: str) -> Iterator[dict[str, Any]]:
        """Follow a run until it has ended: one status each time that it changes.

        Args:
            run: Name of the run.
        """
        last: dict[str, Any] = {}
        while True:
            now = self.status(run)
            if now != last:
                yield now
                last = now
            if now["state"] != "running":
                return
            time.sleep(self.again_s)

    def queue(self) -> list[dict[str, Any]]:
        """List the trainings of the queue: those that run, those that wait in their order, those that have ended."""
        return [_item(item) for item in commands.items(self.work.runs)]

    def job(self, job: str) -> dict[str, Any]:
        """Tell how a job is that `caption` or `validate` has started.

        Args:
            job: Id of the job.
        """
        found = jobs.read(self.work, job)
        told: dict[str, Any] = {
            "job": found.id,
            "kind": found.kind,
            "state": found.state,
            "error": found.error(),
        }
        if found.kind == caption_job.KIND:
            return {**caption_job.state(found), **told}
        return {**told, "result": _printed(found) if found.state == "finished" else None}

    # ---- what changes something

    def train(
        self,
        dataset: str,
        base: str = "",
        priority: str = "balanced",
        name: str = "",
        settings: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Put a training into the queue, which starts it when the machine is free; returns its item.

        Args:
            dataset: Path of the folder with the images, or of a slider's file.
            base: Hub id or path of the base model; empty: chosen for this machine.
            priority: speed, balanced or quality.
            name: Name of the run and of the LoRA file; empty: made from the dataset.
            settings: Settings by their dotted keys, such as {"train.steps": 1000}.
        """
        draft = _draft(dataset=dataset, base=base, priority=priority, name=name, settings=settings)
        words = command_lines.train_words(draft, self.work)
        label = command_lines.label_of(draft, self.work)
        item = commands.add(self.work.runs, words, label=label)
        worker.ensure_worker(self.work.runs)
        return _item(item)

    def stop(self, run: str) -> dict[str, Any]:
        """Ask a training to save its state and stop; it can be resumed.

        Args:
            run: Name of the run.
        """
        run_actions.ask(self.work, run, "stop")
        return self.status(run)

    def resume(self, run: str, dataset: str = "") -> dict[str, Any]:
        """Put going on with a run into the queue, exactly from where it stopped.

        Args:
            run: Name of the run.
            dataset: Where its images are, if its record cannot say.
        """
        run_actions.resume(self.work, run, dataset=dataset)
        return self.status(run)

    def sample(self, run: str, prompt: str = "") -> dict[str, Any]:
        """Ask a training to draw images with the LoRA as it is now; `status` and the page of the run show them.

        Args:
            run: Name of the run.
            prompt: What to draw; empty: the prompts of the run.
        """
        run_actions.ask_for_samples(self.work, run, prompt)
        return self.status(run)

    def validate(self, run: str, dataset: str = "") -> dict[str, Any]:
        """Start measuring how well a finished run has learned its images; returns a job.

        Args:
            run: Name of the run.
            dataset: Path of the folder with the images; empty: those it was trained on.
        """
        folder = runs.run_folder(self.work.runs, run)
        images = self.work.folder(dataset) if dataset else command_lines.recorded_dataset(folder)
        if images is None:
            raise InputError(
                f"the run {run} does not say where its images are", fix="name their folder"
            )
        argv = [*command_lines.TRAINER, "validate", str(folder), str(images), "--json"]
        return self.job(jobs.start(self.work, kind=_VALIDATION, argv=argv).id)

    def caption(
        self, dataset: str, model: str, trigger: str = "", replace: bool = False
    ) -> dict[str, Any]:
        """Start writing captions with a model for the images of a dataset; returns a job.

        Args:
            dataset: Path of the folder with the images.
            model: Name of the captioning model, as `lora-train caption --help` lists them.
            trigger: Word that each caption begins with.
            replace: Whether captions that are there are written anew.
        """
        if model not in caption_job.MODELS:
            raise RequestError(
                f"no model is named {model!r}", fix=f"use one of {', '.join(caption_job.MODELS)}"
            )
        root = self.work.folder(dataset)
        started = caption_job.start(
            self.work, root, model=model, files=(), trigger=trigger, replace=replace
        )
        return self.job(started.id)

    def queue_move(self, item: str, places: int) -> list[dict[str, Any]]:
        """Move a waiting training of the queue; returns the queue.

        Args:
            item: Id of the item.
            places: How many places later, or earlier where it is below 0.
        """
        commands.move(self.work.runs, item, by=places)
        return self.queue()

    def queue_remove(self, item: str) -> list[dict[str, Any]]:
        """Take a training that does not run off the queue; returns the queue.

        Args:
            item: Id of the item.
        """
        commands.remove(self.work.runs, item)
        return self.queue()

    # ---- which there are

    def reading(self) -> tuple[Callable[..., Any], ...]:
        """Return the operations that change nothing."""
        return self.plan, self.check, self.runs, self.status, self.watch, self.queue, self.job

    def writing(self) -> tuple[Callable[..., Any], ...]:
        """Return the operations that start, stop or change something."""
        return (
            self.train,
            self.stop,
            self.resume,
            self.sample,
            self.validate,
            self.caption,
            self.queue_move,
            self.queue_remove,
        )


def _draft(
    *,
    dataset: str,
    base: str = "",
    priority: str = "balanced",
    name: str = "",
    settings: Mapping[str, Any] | None = None,
) -> drafts.Draft:
    if priority not in PRIORITIES:
        raise RequestError(
            f"priority={priority!r} is not known", fix=f"use one of {', '.join(PRIORITIES)}"
        )
    build_config(settings or {})
    return drafts.Draft(
        id="", dataset=dataset, base=base, priority=priority, name=name, settings=settings or {}
    )


def _answered(answer: command_lines.Answer) -> dict[str, Any]:
    if answer.values is None:
        raise InputError(answer.error, fix="")
    return dict(answer.values)


def _status(name: str, status: RunStatus) -> dict[str, Any]:
    """Return a status as JSON: what is not known yet is None."""
    values = {**asdict(status), "name": name}
    del values["pid"], values["pid_started_s"], values["heartbeat_s"]
    return {key: None if value != value else value for key, value in values.items()}


def _item(item: commands.Item) -> dict[str, Any]:
    return {
        "item": item.id,
        "label": item.label,
        "state": item.state,
        "run": item.run,
        "error": item.error,
        "command": command_lines.command_line(item.argv),
    }


def _printed(job: jobs.Job) -> Any:
    """Return the JSON object that a command has printed after its messages, None where there is none."""
    try:
        lines = (job.folder / jobs.LOG_FILE).read_text(encoding="utf-8").splitlines()
        begins = max(number for number, line in enumerate(lines) if line.startswith("{"))
        return json.loads("\n".join(lines[begins:]))
    except (OSError, ValueError):
        return None
