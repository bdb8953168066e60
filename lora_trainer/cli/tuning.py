"""The command `tune`: settings found by trying, within a budget of hours."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter
from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from lora_trainer.cli.main import PLANNED, Json, PlanOptions, Reply, console
from lora_trainer.common.errors import RequestError, StoppedBySignal

if TYPE_CHECKING:
    from lora_trainer.tuning.result import Result


def tune(
    dataset: Path,
    /,
    *,
    hours: float,
    options: PlanOptions = PLANNED,
    vary: list[str] = [],  # noqa: B006 - cyclopts reads the default, nobody mutates it
    trials: int | None = None,
    sampler: Annotated[
        Literal["tpe", "random"], Parameter(help="tpe learns from the trials, random does not")
    ] = "tpe",
    storage: str | None = None,
    output: Path | None = None,
    name: str | None = None,
    steps: int | None = None,
    seed: int | None = None,
    resume: bool = False,
    json: Json = False,
) -> Reply:
    """Find rate, rank, steps, schedule and timesteps by trying them, on held-out images; needs the extra `tune`.

    :param hours: time for the trials on this machine
    :param vary: setting to vary instead, KEY=LOW..HIGH or KEY=A,B,C, repeatable
    :param trials: at most so many trials [default: as many as the hours allow]
    :param storage: URL of an Optuna storage that several machines share [default: a file in the study's folder]
    :param output: folder for the run folders and the study [default: runs]
    :param name: name of the runs [default: the dataset folder's]
    :param steps: optimizer steps, which are not varied then
    :param seed: seed of all random numbers, the proposals too [default: 42]
    :param resume: continue the study of this name; its finished trials stay
    """
    if not 0 < hours <= 10_000:
        raise RequestError(f"--hours {hours:g} is out of range", fix="give a number above 0")
    if trials is not None and trials < 1:
        raise RequestError(f"--trials {trials} is out of range", fix="give 1 or more")
    import os

    from lora_trainer.hardware.machine import detect
    from lora_trainer.queue.worker import ensure_worker, slots
    from lora_trainer.reporting.control import StopFlag, taking_signals
    from lora_trainer.run.prepare import Request
    from lora_trainer.tuning.begin import begun, continued
    from lora_trainer.tuning.result import write_result
    from lora_trainer.tuning.study import Study
    from lora_trainer.tuning.tune import Tuner, tune

    keywords = options.keywords(output=output, name=name, steps=steps, seed=seed)
    request = Request.of(dataset, **keywords)
    out, stop = console(stderr=True), StopFlag()
    opened = (
        continued(request) if resume else begun(request, vary=vary, sampler=sampler, hours=hours)
    )
    with opened as (folder, record):
        study = Study(record, folder, storage=storage)

        def say(line: str) -> None:
            out.print(line, highlight=False)
            write_result(study, folder)

        tuner = Tuner(
            study=study,
            runs=folder.parent,
            hours=hours,
            most_trials=trials,
            at_once=len(slots(detect(), os.environ)),
            say=say,
        )
        with taking_signals(stop):
            came_to_its_end = tune(tuner, ensure_worker=ensure_worker, stop=stop)
        result = write_result(study, folder)
    if not came_to_its_end:
        raise StoppedBySignal(
            stop.number or 0,
            found=f"tune was stopped after {len(result.rows)} trials; those that train save and end",
            fix="the same command with --resume goes on",
        )
    return result.to_json() if json else _table(result)


def _table(result: Result) -> Group:
    from lora_trainer.tuning.result import BEST_FILE, PAGE_FILE

    columns = [Column(title, justify="right") for title in ("gain", "at step", "minutes")]
    table = Table(
        Column("trial", justify="right"), "settings", *columns, "", box=None, pad_edge=False
    )
    for row in result.rows:
        settings = ", ".join(f"{name} {choice}" for name, choice in row.choices.items())
        gain = "" if row.gain is None else f"{row.gain:.2%}"
        step = "" if row.best_step is None else f"{row.best_step}"
        end = "" if row.end == "complete" else row.reason or "is being trained"
        cells = (f"{row.number}", settings, gain, step, f"{row.seconds / 60:.1f}", end)
        table.add_row(*map(Text, cells))
    lines = [Text(result.sentence, style="bold")]
    if result.best is not None:
        lines.append(Text(f"settings: {result.folder / BEST_FILE}"))
    return Group(table, "", *lines, Text(f"curves: {result.folder / PAGE_FILE}"))
