"""The command `plan`: predicts a training before anything is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from lora_trainer.cli.options import PLANNED, Json, Kind, PlanOptions, Reply
from lora_trainer.common.errors import RequestError


def plan(
    dataset: Path,
    /,
    *,
    options: PlanOptions = PLANNED,
    kind: Kind = None,
    vram: Annotated[
        float | None, Parameter(help="plan for a GPU with this many GiB of memory")
    ] = None,
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
    from lora_trainer.run.plan_text import plan_text

    keywords = options.keywords(kind=kind)
    result = api.plan(dataset, **keywords, vram_gib=vram, processes=processes)
    return result.to_json() if json else plan_text(result.prepared, result.longer, everything=all_)
