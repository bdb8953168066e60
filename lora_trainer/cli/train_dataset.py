"""The commands `lora-train DATASET` and `plan`: a training, or what it will need; and its parsing for the queue.

Inputs: the words of the command. Outputs: a run folder, or the parsed arguments. torch is imported only
when a training begins.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from lora_trainer.cli.options import COMMANDS, PLANNED, Json, Kind, PlanOptions, Reply, console
from lora_trainer.common.errors import RequestError
from lora_trainer.common.processes import made_to_stay


def train(
    dataset: Path,
    /,
    *,
    options: PlanOptions = PLANNED,
    kind: Kind = None,
    output: Path | None = None,
    name: str | None = None,
    steps: int | None = None,
    seed: int | None = None,
    resume: bool = False,
    resume_from: Path | None = None,
    dry_run: bool = False,
    strict: bool = False,
) -> Reply:
    """Train a LoRA on the images in DATASET; the result is runs/NAME/NAME.safetensors and report.html.

    :param output: folder for run folders [default: runs]
    :param name: name of the run and its files [default: the dataset folder's]
    :param steps: optimizer steps [default: by the number of images]
    :param seed: seed of all random numbers [default: 42]
    :param resume: continue the run of this name, as if it had not been interrupted
    :param resume_from: continue the run in this folder
    :param dry_run: print the plan of the training and stop
    :param strict: refuse a dataset with warnings
    """
    keywords = options.keywords(output=output, name=name, steps=steps, seed=seed, kind=kind)
    from lora_trainer import api

    if dry_run:
        from lora_trainer.run.plan_text import plan_text

        plan = api.plan(dataset, **keywords)
        return plan_text(plan.prepared, plan.longer)
    with made_to_stay():
        from lora_trainer.queue.commands import download_listeners
        from lora_trainer.reporting.console import ConsoleListener

    with ConsoleListener(console()) as listener:
        file = api.train(
            dataset,
            **keywords,
            resume=resume,
            resume_from=resume_from,
            strict=strict,
            command=sys.argv[1:],
            listeners=(listener, *download_listeners(os.environ)),
        )
        listener.show_file(file)
    return None


def read(words: Sequence[str]) -> Mapping[str, Any]:
    """Return the parsed arguments of a training's command, by their names in `train`.

    Raises RequestError for bad settings, for another command and for a plan, and CycloptsError.
    """
    from lora_trainer.config.config import check_keys, refuse_secrets

    no_training = RequestError(
        "only trainings can be added to the queue",
        fix="after -- give the words that follow `lora-train` in the command of a training",
    )
    if words and words[0] in COMMANDS:
        raise no_training
    app = App(default_command=train, default_parameter=Parameter(negative=""))
    command, bound, _ = app.parse_args(list(words), exit_on_error=False, print_error=False)
    arguments = bound.arguments
    if command is not train or arguments.get("dry_run"):
        raise no_training
    flags = {name: arguments.get(name) for name in ("output", "name", "steps", "seed", "kind")}
    assigned = arguments.get("options", PLANNED).keywords(**flags)["settings"]
    check_keys(assigned)
    refuse_secrets(assigned)  # the words are stored in the queue's file in plain text
    return {**arguments, "output": assigned.get("output.folder")}


def plan(
    dataset: Path,
    /,
    *,
    options: PlanOptions = PLANNED,
    kind: Kind = None,
    vram: float | None = None,
    processes: int = 1,
    all_: Annotated[bool, Parameter(name="--all")] = False,
    json: Json = False,
) -> Reply:
    """Predict memory, time and disk of a training, and show why each setting has its value. Needs no GPU.

    :param vram: plan for a GPU with this many GiB of memory
    :param processes: plan for so many processes, one GPU each
    :param all_: show every setting
    """
    if not 1 <= processes <= 4096:
        raise RequestError(
            f"--processes {processes} is out of range", fix="give a number from 1 to 4096"
        )
    if vram is not None and not 0 < vram <= 1024:
        raise RequestError(
            f"--vram {vram:g} is out of range",
            fix="give a GPU's memory in GiB, up to 1024, such as --vram 12",
        )
    from lora_trainer import api
    from lora_trainer.run.plan_text import plan_text

    keywords = options.keywords(kind=kind)
    result = api.plan(dataset, **keywords, vram_gib=vram, processes=processes)
    return result.to_json() if json else plan_text(result.prepared, result.longer, everything=all_)
