"""The step of a run that somebody found best: its exported file under a name that stays.

Inputs: a run folder, its RunHistory, a step that was exported. Outputs: `NAME-best.safetensors`, a copy
that no pruning of rolling exports removes, and best.json, which says of which step it is.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lora_trainer.common.errors import RequestError
from lora_trainer.common.files import (
    TEMPORARY_PREFIX,
    disk_error,
    json_bytes,
    read_json_object,
    retry_while_open,
    write_atomic,
)
from lora_trainer.lora_file.embedding import embedding_path
from lora_trainer.reporting import best_step
from lora_trainer.reporting.best_step import Standing
from lora_trainer.reporting.history import RunHistory
from lora_trainer.run.run_folder import BEST_RECORD

from .lora_names import name_now, read_names


@dataclass(frozen=True, kw_only=True)
class Best:
    """The step of a run to take, and the file that holds it.

    `is_found`: by somebody or by its loss on the held-out images; else it is only the last one.
    """

    step: int
    file: str
    is_found: bool = True


def best_name(folder: Path) -> str:
    """Return the name of the file that holds the best step of a run."""
    return f"{folder.name}-best.safetensors"


def exports(folder: Path, history: RunHistory) -> Mapping[int, str]:
    """Return the exported files that are still there, by step."""
    names = read_names(folder)
    now = {
        step: name_now(folder, names, name)
        for step, name in best_step.exported(history).items()
        if name != best_name(folder) and "\0" not in name
    }
    return {step: name for step, name in now.items() if _is_export(folder, name)}


def _is_export(folder: Path, name: str) -> bool:
    """Whether a name that the records have is an adapter of this folder; it may be anything."""
    plain = Path(name).name == name and name.endswith(".safetensors") and name.isprintable()
    return plain and (folder / name).is_file() and not (folder / name).is_symlink()


def recommended(
    files: Mapping[int, str], losses: Mapping[int, float], marked: Best | None
) -> Best | None:
    """Return the LoRA to take of a run, None without any file.

    It is the one that somebody found best, else the one of the lowest loss on the held-out images of those whose
    file is still there, else the last. `files` are the LoRAs and `losses` those of the validations, by step.
    """
    if marked is not None or not files:
        return marked
    lowest = best_step.lowest_of(files, losses)
    step = max(files) if lowest is None else lowest
    return Best(step=step, file=files[step], is_found=lowest is not None and len(files) > 1)


def standing(
    take: Best | None, losses: Mapping[int, float], *, base_loss: float
) -> Standing | None:
    """Return how good the LoRA to take of a run is, None where that was not measured.

    Of a run that has no file yet it is the lowest loss so far. `take` is what `recommended` returns.
    """
    step = best_step.lowest_of(losses, losses) if take is None else take.step
    if step is None or step not in losses or not math.isfinite(base_loss):
        return None
    return Standing(step=step, loss=losses[step], base_loss=base_loss)


def losses(history: RunHistory) -> Mapping[int, float]:
    """Return the losses on the held-out images by step, without the base's."""
    return best_step.held_out_losses(history)


def standing_of(folder: Path, history: RunHistory) -> Standing | None:
    """Return how good the LoRA to take of a run is, from its records."""
    measured, base = losses(history), history.base_validation
    take = recommended(exports(folder, history), measured, read_best(folder))
    return standing(take, measured, base_loss=math.nan if base is None else base.loss)


def read_best(folder: Path) -> Best | None:
    """Return which step was found best; None if none was, or its file is gone."""
    file = name_now(folder, read_names(folder), best_name(folder))
    if not (folder / BEST_RECORD).is_file() or not _is_export(folder, file):
        return None
    try:
        step = read_json_object(folder / BEST_RECORD).get("step")
    except RequestError:
        return None
    return Best(step=step, file=file) if isinstance(step, int) else None


def mark_best(folder: Path, history: RunHistory, step: int) -> Best:
    """Copy the export of `step` to the name that stays; raises RequestError, MachineError.

    The file is whole or as it was before; a trainer that works in the folder is not disturbed.
    """
    found = exports(folder, history)
    if step not in found:
        steps = ", ".join(f"{known:,}" for known in sorted(found)) or "none yet"
        raise RequestError(
            f"no LoRA file of step {step:,} is there, only of: {steps}",
            fix="choose one of these, or press Save a LoRA file now at the step that is to be kept",
        )
    target = folder / best_name(folder)
    temporary = folder / f"{TEMPORARY_PREFIX}{os.getpid()}-{time.monotonic_ns()}-best"
    try:
        shutil.copyfile(folder / found[step], temporary)
        words = embedding_path(folder / found[step])  # which belong to it, where there are any
        if words.is_file():
            write_atomic(embedding_path(target), words.read_bytes())
        retry_while_open(lambda: temporary.replace(target))
    except OSError as error:
        raise disk_error(target, error) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    record = {"step": step, "from": found[step], "file": target.name, "marked_at_s": time.time()}
    write_atomic(folder / BEST_RECORD, json_bytes(record))
    return Best(step=step, file=target.name)
