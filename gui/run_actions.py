"""What the buttons of a run do: put a request into its control folder, end it, go on with it, train again.

Inputs: the workplace and a name that a browser sent. Nothing is asked of the process itself but, as
the last resort, that it ends: that one number with that time of start, no other.
"""

from __future__ import annotations

import time
from pathlib import Path

from lora_trainer.common.errors import LoraTrainError, RequestError
from lora_trainer.config import PRIORITIES
from lora_trainer.config.config import all_settings
from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset.listing import list_dataset
from lora_trainer.queue import commands, worker
from lora_trainer.reporting.coach import coach
from lora_trainer.reporting.control import Control, Request
from lora_trainer.reporting.history import read_history
from lora_trainer.reporting.run_record import read
from lora_trainer.reporting.status import end_process, read_status

from . import command_lines, drafts, runs, setting_edit, slider_words
from .run_best import Best, mark_best
from .run_mend import mend_of
from .run_settings import chosen_settings
from .run_state import END_AFTER_S, look
from .setting_text import text_of
from .workplace import Workplace


def ask(work: Workplace, run: str, request: Request) -> None:
    """Ask a run for something; raises RequestError for one that does not train, MachineError."""
    Control(_training_folder(work, run)).request(request)


def ask_for_samples(work: Workplace, run: str, prompt: str) -> None:
    """Ask a run for sample images of a prompt, of its own prompts where it is empty; raises as `ask`."""
    Control(_training_folder(work, run)).request("sample", prompt=prompt)


def _training_folder(work: Workplace, run: str) -> Path:
    folder = runs.run_folder(work.runs, run)
    if read_status(folder).state != "running":
        raise RequestError(f"{run} is not being trained", fix="press Resume first")
    return folder


def withdraw(work: Workplace, item_id: str) -> None:
    """Stop an item of the queue: its run saves first, a program without one ends, what waits is taken off.

    One that has ended, or is gone, stays as it is. Raises RequestError, MachineError.
    """
    item = next((item for item in commands.items(work.runs) if item.id == item_id), None)
    if item is None or item.has_ended:
        return
    if item.run:
        Control(work.runs / item.run).request("stop")
    elif item.state == "running":
        commands.end_without_run(item)
    else:
        commands.remove(work.runs, item.id)


def end(work: Workplace, run: str) -> None:
    """Kill the process of a run that does not obey `stop_now`; raises RequestError, MachineError."""
    folder = runs.run_folder(work.runs, run)
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
    folder = runs.run_folder(work.runs, run)
    if read_status(folder).state == "running":
        raise RequestError(f"{run} is being trained already", fix="wait for it, or stop it first")
    words = command_lines.resume_words(folder, dataset=dataset, work=work)
    commands.add(work.runs, words, label=folder.name)
    worker.ensure_worker(work.runs)


def clone(work: Workplace, run: str, *, mended: bool = False, advice: str = "") -> drafts.Draft:
    """Return a new draft with the dataset, base and settings of a run, saved.

    The settings are those that somebody chose; what the planner decided it decides anew. `mended`: with the
    change that the end of the run advises; `advice`: with those of the coach's advice of that kind. Raises
    RequestError for no run or one without records, MachineError.
    """
    folder = runs.run_folder(work.runs, run)
    record = read(folder)
    dataset = command_lines.recorded_dataset(folder)
    words = slider_words.words_of(dataset) if dataset is not None and dataset.is_file() else None
    priority = record.plan.priority
    draft = drafts.Draft(
        id=drafts.new_id(),
        kind=drafts.SLIDER if words else kind_of(dataset),
        dataset=str(dataset) if dataset is not None and not words else "",
        slider=words or {},
        base=record.base.source,
        priority=priority if priority in PRIORITIES else "balanced",
        settings=chosen_settings(record),
        step=2 if dataset is not None else 1,
    )
    mend = mend_of(look(folder, read_status(folder), now_s=time.time()), record)
    if mended and mend is not None:
        key = mend.setting.key
        draft = (
            setting_edit.changed(draft, key=key, text=mend.text)
            if not mend.is_usual
            else draft.without_setting(key)
        )
    known = {info.key: info for info in all_settings()}
    for each in coach(read_history(folder)) if advice else ():
        if each.kind == advice:
            for key, value in each.changes.items():
                draft = setting_edit.changed(draft, key=key, text=text_of(known[key], value))
    drafts.save(work, draft)
    return draft


def kind_of(dataset: Path | None) -> str:
    """Return whether the images of a folder come with what each was before."""
    if dataset is None or not dataset.is_dir():
        return drafts.IMAGES
    try:
        pictures = list_dataset(dataset, settings=DataSettings()).pictures
    except (LoraTrainError, OSError):  # which the page Train says
        return drafts.IMAGES
    return drafts.PAIRS if any(each.references for each in pictures) else drafts.IMAGES


def use_as_best(work: Workplace, run: str, step: object) -> Best:
    """Keep the LoRA of a step as the best one; raises RequestError, MachineError."""
    folder = runs.run_folder(work.runs, run)
    if not isinstance(step, int) or isinstance(step, bool):
        raise RequestError(f"{step!r} is not a step", fix="choose one of the page")
    return mark_best(folder, read_history(folder), step)
