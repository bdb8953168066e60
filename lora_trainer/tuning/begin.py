"""How a study begins: what every trial has in common, what is varied, and the words of their commands.

Inputs: a request as for training. Outputs: the study's folder in the runs folder, with study.json.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.common.wording import duration_text
from lora_trainer.config.config import flatten
from lora_trainer.run.plan_text import plan_record
from lora_trainer.run.prepare import Prepared, Request, prepare
from lora_trainer.run.run_folder import claim, create, name_of_new_run
from lora_trainer.tuning.space import Dimension, around, keys_of, read_vary
from lora_trainer.tuning.study import Sampler, StudyRecord, read_record, write_record

# Fewer held-out images say too little of one setting against another.
LEAST_HELD_OUT = 3
LEAST_IMAGES = 2 * LEAST_HELD_OUT
VALIDATIONS = 12
# What every trial goes without. It keeps its states, so that it can be resumed.
QUIET: Mapping[str, Any] = {
    "sampling.every_steps": 0,
    "output.hub_repo": None,
    "logging.trackers": [],
    "train.stop_after_validations": None,
}


@contextmanager
def begun(
    request: Request, *, vary: Sequence[str], sampler: Sampler, hours: float
) -> Iterator[tuple[Path, StudyRecord]]:
    """Make the folder of a new study, hold it while the block runs, and yield it with what was written there.

    Raises as planning does, RequestError for hours in which nothing can be trained, and InputError for a dataset
    that is too small to hold images out.
    """
    fixed = _in_common(prepare(request))
    prepared = prepare(replace(request, overrides={**request.overrides, **fixed}))
    config = prepared.config
    space = read_vary(vary, config) if vary else around(config, prepared.plan.origins)
    shortest_s, longest_s = plan_record(prepared).time.range_s or (0.0, 0.0)
    if shortest_s > hours * 3600:
        raise RequestError(
            f"one training takes {duration_text(shortest_s)} or more, and the budget is {hours:g} h",
            fix="give more --hours, or fewer --steps",
        )
    name = f"{name_of_new_run(request.dataset, config.output.name)}-tune"
    with create(Path(config.output.folder), name) as folder:
        record = StudyRecord(
            words=_words(request),
            settings=_typed(request),
            folder=str(Path.cwd()),
            name=folder.name,
            seed=config.train.seed,
            sampler=sampler,
            space=space,
            planned=_planned(space, flatten(config)),
            fixed={
                **fixed,
                "train.validate_every_steps": max(1, config.train.steps // VALIDATIONS),
                "output.folder": config.output.folder,
            },
            steps=config.train.steps,
            run_s=math.sqrt(shortest_s * longest_s),
        )
        write_record(folder, record)
        yield folder, record


@contextmanager
def continued(request: Request) -> Iterator[tuple[Path, StudyRecord]]:
    """Hold the folder of the study that was begun with this request, and yield it with what it was begun with.

    Raises RequestError where there is none, or one that was begun with other settings.
    """
    prepared = prepare(request)
    output = prepared.config.output
    folder = Path(output.folder) / f"{name_of_new_run(request.dataset, output.name)}-tune"
    record = read_record(folder)
    if (list(record.words), record.settings) != (_words(request), _typed(request)):
        settings = (f"--set {key}={json.dumps(value)}" for key, value in record.settings.items())
        raise RequestError(
            f"the study in {folder} was begun with {' '.join((*record.words, *settings))}",
            fix="give those, or start another study without --resume",
        )
    with claim(folder):
        yield folder, record


def _in_common(prepared: Prepared) -> dict[str, Any]:
    """Return the settings of every trial: enough images held out, and nothing drawn or uploaded."""
    images = len(prepared.trained) + len(prepared.held_out)
    if images < LEAST_IMAGES:
        raise InputError(
            f"the dataset has {images} images, and tune holds {LEAST_HELD_OUT} or more of them out",
            fix=f"add images: {LEAST_IMAGES} or more",
        )
    fraction = prepared.config.data.validation_fraction
    if len(prepared.held_out) < LEAST_HELD_OUT:
        # A count that is rounded down must not fall below.
        fraction = min(0.5, math.ceil(1000 * LEAST_HELD_OUT / images) / 1000)
    return {**QUIET, "data.validation_fraction": fraction}


def _words(request: Request) -> list[str]:
    """Return the words of a training's command, without its settings."""
    words = [str(request.dataset), "--preset", request.preset, "--priority", request.priority]
    if request.settings_file is not None:
        words += ["--config", request.settings_file.name]
    return words


def _typed(request: Request) -> dict[str, Any]:
    """Return the settings that were typed, as JSON has them; each trial has a name of its own."""
    typed = {key: value for key, value in request.overrides.items() if key != "output.name"}
    plain: dict[str, Any] = json.loads(json.dumps(typed))
    return plain


def _planned(space: Sequence[Dimension], values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: values[key] for dimension in space for key in keys_of(dimension)}
