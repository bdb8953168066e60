"""Queue trainings, which then run one after another on each GPU.

The commands of the training queue: `lora-train queue add|list|move|remove|pause|go-on|when|run`.
Inputs: the words of a training's command. Outputs: an item in the queue of a runs folder, and its state as
text or JSON. Nothing here trains or imports torch.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter
from rich.console import Group
from rich.table import Column, Table

from lora_trainer.cli.main import Json, Reply, parse_training
from lora_trainer.common.errors import RequestError, StoppedBySignal
from lora_trainer.common.wording import escaped, without_secrets
from lora_trainer.config.running import Config
from lora_trainer.queue import commands, rules, worker
from lora_trainer.reporting.control import StopFlag, taking_signals
from lora_trainer.run.plan_text import add_row
from lora_trainer.run.run_folder import name_of_dataset

Runs = Annotated[
    Path | None, Parameter(help="folder of the run folders and their queue [default: runs]")
]


app = App(name="queue", help=__doc__.partition("\n")[0])


@app.command
def add(
    *words: Annotated[str, Parameter(allow_leading_hyphen=True)],
    runs: Runs = None,
    label: str | None = None,
) -> Reply:
    """Add a training at the end of the queue: `lora-train queue add -- DATASET ...`.

    :param label: name in the list [default: the name of the run]
    """
    folder = _runs(runs)
    training = parse_training(words)
    # The queue reads the state of its trainings from the run folders beside it.
    output, resumed = training.get("output"), training.get("resume_from")
    parents = [Path(output)] if output is not None else []
    parents += [resumed.parent] if resumed is not None else []
    for parent in parents:
        if parent.resolve() != folder.resolve():
            raise RequestError(
                f"the run would be in {parent}, but this is the queue of {folder}",
                fix=f"use the queue of that folder: --runs {parent}",
            )
    argv = [*(() if parents else ("--output", str(folder))), *words]
    name = label or training.get("name") or name_of_dataset(training["dataset"])
    item = commands.add(folder, argv, label=str(name))
    # The worker is a process of its own: the queue goes on after this terminal is closed.
    worker.ensure_worker(folder)
    return item.id


@app.command(name="list")
def list_items(*, runs: Runs = None, json: Json = False) -> Reply:
    """List the trainings that run, wait or have ended."""
    folder = _runs(runs)
    worker.settle(folder)
    items = commands.items(folder)
    if json:
        return [asdict(item) for item in items]
    if not items:
        return "the queue is empty"
    columns = [Column(title, overflow="fold") for title in ("id", "state", "name", "run")]
    table = Table(*columns, box=None, pad_edge=False)
    for item in items:
        error = f": {without_secrets(item.error)}" if item.error else ""
        add_row(table, item.id, f"{item.state}{error}", item.label, item.run or "")
    if (pid := worker.worker_pid(folder)) is not None:
        return Group(table, f"run by process {pid}")
    is_unfinished = any(not item.has_ended for item in items)
    return Group(table, "not running; start it: lora-train queue run") if is_unfinished else table


@app.command
def move(id: str, where: Literal["up", "down"], /, *, runs: Runs = None) -> None:
    """Swap a waiting training with the one before (up) or after (down) it."""
    commands.move(_runs(runs), id, by=-1 if where == "up" else 1)


@app.command
def remove(id: str, /, *, runs: Runs = None) -> None:
    """Remove a training that waits or has ended from the list; its run folder stays."""
    worker.settle(folder := _runs(runs))
    commands.remove(folder, id)


@app.command
def pause(*, stop: bool = False, runs: Runs = None) -> None:
    """Start no training until `queue go-on`; what runs goes on.

    :param stop: ask what runs to save and end too; it is the first to go on
    """
    rules.pause(_runs(runs), stop=stop)


@app.command
def go_on(*, runs: Runs = None) -> None:
    """Start trainings again after `queue pause`."""
    folder = _runs(runs)
    rules.go_on(folder)
    worker.ensure_worker(folder)


@app.command
def when(times: rules.When, /, *, night: tuple[int, int] | None = None, runs: Runs = None) -> str:
    """Let trainings start always, only while nothing else uses the machine (idle), or only at night.

    :param night: hours of the day in which the night begins and ends [default: as before, at first 22 7]
    """
    now = rules.change_when(_runs(runs), when=times, night=night)
    hours = f", from {now.night_from}:00 to {now.night_to}:00" if now.when == "night" else ""
    return f"trainings start: {now.when}{hours}"


@app.command
def run(*, runs: Runs = None) -> None:
    """Run the waiting trainings until none is left; `add` starts this by itself, in the background."""
    stop = StopFlag()

    def say(line: str) -> None:
        sys.stdout.write(f"{escaped(without_secrets(line))}\n")
        sys.stdout.flush()

    with taking_signals(stop):
        worker.work(_runs(runs), stop=stop, say=say)
    if stop.number is not None:
        raise StoppedBySignal(
            stop.number,
            found="stopped starting trainings from the queue; running trainings continue",
            fix="run `lora-train queue run` to continue with the queue",
        )


def _runs(folder: Path | None) -> Path:
    return folder or Path(Config().output.folder)
