"""`lora-train plan`: what a training would take, before anything of it is loaded."""

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
    from lora_trainer.run.prepare import Request

Vram = Annotated[
    float | None, Parameter(name="--vram", help="answer for a card with this many GiB")
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
    processes: Annotated[int, Parameter(help="answer for that many, a card each")] = 1,
    all_: Annotated[bool, Parameter(name="--all", negative="", help="show every setting")] = False,
    json: Json = False,
) -> Reply:
    """Predict memory, time and disk of a training, and say who decided its settings. Needs no GPU."""
    if not 1 <= processes <= 4096:
        raise RequestError(f"--processes {processes}", fix="give a number from 1 to 4096")
    if vram is not None and not 0 < vram <= 1024:
        raise RequestError(
            f"--vram {vram:g} is no size of a card", fix="give its memory in GiB, such as --vram 12"
        )
    from lora_trainer.run.prepare import Request

    asked = Request(
        dataset=dataset,
        preset=preset,
        priority=priority,
        config_file=config,
        overrides=overrides(set_, base=base, kind=kind),
        assumed_vram_gib=vram,
        processes=processes,
        sharing=processes,
    )
    return planned(asked, as_json=json, everything=all_)


def planned(asked: Request, *, as_json: bool, everything: bool = False) -> Reply:
    """Return what a training would take."""
    from lora_trainer.run.plan_text import plan_json, plan_text
    from lora_trainer.run.prepare import longer, prepare

    prepared = prepare(asked)
    more = longer(asked, prepared)
    if as_json:
        return Reply(value=plan_json(prepared, more), as_json=True)
    return Reply(value=plan_text(prepared, more, everything=everything), as_json=False)
