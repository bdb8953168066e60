"""What the buttons of a run do: put a request into its control folder, end it, go on with it.

Inputs: the workplace and a name that a browser sent. Nothing is asked of the process itself but, as
the last resort, that it ends: that one number with that time of start, no other.
"""

from __future__ import annotations

import time

from lora_trainer.common.errors import RequestError
from lora_trainer.common.files import disk_error
from lora_trainer.queue import commands
from lora_trainer.reporting.history import read_history
from lora_trainer.reporting.status import Control, Request, end_process, read_status

from . import launch, state
from .run_best import Best, mark_best
from .run_state import END_AFTER_S, look
from .workplace import Workplace


def ask(work: Workplace, run: str, request: Request) -> None:
    """Ask a run for something; raises RequestError for one that does not train, MachineError."""
    folder = state.run_folder(work.runs, run)
    if read_status(folder).state != "running":
        raise RequestError(f"{run} is not being trained", fix="press Resume first")
    try:
        Control(folder).request(request)
    except OSError as error:
        raise disk_error(folder, error) from error


def end(work: Workplace, run: str) -> None:
    """Kill the process of a run that does not obey `stop_now`; raises RequestError, MachineError."""
    folder = state.run_folder(work.runs, run)
    seen = look(folder, read_status(folder), now_s=time.time())
    if seen.status.state == "running" and not seen.may_be_ended:
        raise RequestError(
            f"{run} may still end by itself",
            fix=f"press Force stop and wait {END_AFTER_S:.0f} seconds",
        )
    end_process(seen.status)


def resume(work: Workplace, run: str, *, dataset: str = "") -> None:
    """Put going on with a run into the queue; `dataset` is where its images are if it cannot say.

    Raises RequestError, InputError, MachineError.
    """
    folder = state.run_folder(work.runs, run)
    if read_status(folder).state == "running":
        raise RequestError(f"{run} is being trained already", fix="wait for it, or stop it first")
    words = launch.resume_words(folder, dataset=dataset, work=work)
    commands.add(work.runs, words, label=folder.name)
    commands.ensure_worker(work.runs)


def use_as_best(work: Workplace, run: str, step: object) -> Best:
    """Keep the LoRA of a step as the best one; raises RequestError, MachineError."""
    folder = state.run_folder(work.runs, run)
    if not isinstance(step, int) or isinstance(step, bool):
        raise RequestError(f"{step!r} is no step", fix="choose one of the page")
    return mark_best(folder, read_history(folder), step)
