"""The command `plan`: predicts a training before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from lora_trainer.cli.options import (
    Base,
    ConfigFile,
    Json,
    Kind,
    Preset,
    Priorities,
    Reply,
    Sets,
    overrides,
)
from lora_trainer.common.errors import RequestError

if TYPE_CHECKING:
    from lora_trainer.api import TrainingPlan

Vram = Annotated[
    float | None, Parameter(name="--vram", help="plan for a GPU with this many GiB of memory")
]


def plan(
    dataset: Path,
    /,
    *,
    preset: Preset = "auto",
    priority: Priorities = "balanced",
    base: Base = None,
    kind: Kind = None,
    config: ConfigFile = None,
    set_: Sets = [],  # noqa: B006 - cyclopts reads the default, nobody mutates it
    vram: Vram = None,
    processes: Annotated[int, Parameter(help="plan for so many processes, one GPU each")] = 1,
    all_: Annotated[bool, Parameter(name="--all", negative="", help="show every setting")] = False,
    json: Json = False,
) -> Reply:
    """Predict memory, time and disk of a training, and show why each setting has its value. Needs no GPU."""
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

    result = api.plan(
        dataset,
        preset=preset,
        priority=priority,
        config_file=config,
        settings=overrides(set_, base=base, kind=kind),
        vram_gib=vram,
        processes=processes,
    )
    return Reply(value=result.to_json(), as_json=True) if json else planned(result, everything=all_)


def planned(result: TrainingPlan, *, everything: bool = False) -> Reply:
    """Return the plan of a training for people."""
    from lora_trainer.run.plan_text import plan_text

    text = plan_text(result.prepared, result.longer, everything=everything)
    return Reply(value=text, as_json=False)
