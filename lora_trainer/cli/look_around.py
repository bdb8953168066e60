"""The commands that only report: check, inspect, presets, doctor; and gui. They write nothing but caches.

None imports torch.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from lora_trainer.cli.options import Base, Json, Reply, Sets, overrides
from lora_trainer.common.errors import RequestError


def check(dataset: Path, /, *, base: Base = None, set_: Sets = [], json: Json = False) -> Reply:  # noqa: B006 - cyclopts reads the default, nobody mutates it
    """Report on a dataset: score, buckets, unusable files, captions, duplicates; each with advice."""
    from lora_trainer.run.answers import check_text
    from lora_trainer.run.prepare import Request, examine

    examined = examine(Request(dataset=dataset, overrides=overrides(set_, base=base)))
    return examined.to_json() if json else check_text(examined.report)


def inspect(file: Path, /, *, json: Json = False) -> Reply:
    """Describe a LoRA file: family, key format, rank, alpha, metadata, problems."""
    from lora_trainer.lora_file.inspect import inspect_file
    from lora_trainer.run.answers import inspect_text

    inspection = inspect_file(file)
    return inspection.to_json() if json else inspect_text(inspection)


def presets() -> Reply:
    """List the presets: the settings of each hardware tier and priority."""
    from lora_trainer.run.answers import presets_text

    return presets_text()


def doctor(
    *,
    clear_cache: Annotated[
        bool, Parameter(negative="", help="delete the encoded images and captions of all trainings")
    ] = False,
    fix: Annotated[
        bool,
        Parameter(negative="", help="remove what killed trainings left, and damaged cache files"),
    ] = False,
    set_: Sets = [],  # noqa: B006 - cyclopts reads the default, nobody mutates it
    json: Json = False,
) -> Reply:
    """Check this machine: its hardware, the device trainings use and why, and how to fix problems."""
    from lora_trainer.config.config import build_config
    from lora_trainer.dataset.run_dataset import cache_in
    from lora_trainer.run.answers import cleared_text, doctor_json
    from lora_trainer.run.machine_report import checks, checks_json, doctor_text

    if clear_cache and fix:
        raise RequestError("--clear-cache and --fix contradict each other", fix="give one of them")
    if clear_cache:
        from lora_trainer.cache.lease import clear

        result = clear(cache_in(build_config(overrides(set_))))
        return {**asdict(result), "folder": str(result.folder)} if json else cleared_text(result)
    if set_ and not fix:
        raise RequestError(
            "--set has no effect without --clear-cache or --fix", fix="leave --set out, or add one"
        )
    from lora_trainer.hardware.machine import detect
    from lora_trainer.run.mend import mend

    config = build_config(overrides(set_))
    cache = cache_in(config)
    repairs = mend(cache, Path(config.output.folder)) if fix else []
    hardware = detect()
    machine_checks = checks(hardware, cache=cache.root, environment=os.environ)
    if json:
        report = {**doctor_json(hardware), "checks": checks_json(machine_checks)}
        return {**report, "repairs": checks_json(repairs)} if fix else report
    return doctor_text([*machine_checks, *repairs])


def gui(
    *words: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
) -> None:
    """Open the graphical interface; its options are those of `lora-train-gui --help`."""
    importlib.import_module("lora_trainer.gui.app").main(words)
