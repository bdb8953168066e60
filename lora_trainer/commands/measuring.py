"""`lora-train profile` and `bench`: short trainings, watched and measured."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from lora_trainer.commands.options import (
    Answer,
    Base,
    ConfigFile,
    Json,
    Preset,
    Priorities,
    Sets,
    console,
    overrides,
)
from lora_trainer.errors import RequestError
from lora_trainer.launch import place
from lora_trainer.library_noise import quiet_libraries


def profile(
    dataset: Path,
    /,
    *,
    preset: Preset = "auto",
    priority: Priorities = "balanced",
    base: Base = None,
    config: ConfigFile = None,
    set_: Sets = [],  # noqa: B006 - cyclopts reads the default, nobody mutates it
    steps: Annotated[int, Parameter(help="optimizer steps to watch")] = 10,
    output: Annotated[Path, Parameter(help="folder for the run folder with the trace")] = Path(
        "runs"
    ),
    json: Json = False,
) -> Answer:
    """Train a few steps under torch's profiler and say what sets the pace, and which setting changes it."""
    if (processes := place().count) > 1:
        raise RequestError(
            f"profile looks at one process, and the launcher started {processes}",
            fix="start it without the launcher",
        )
    quiet_libraries()
    from lora_trainer.output.console import ConsoleListener
    from lora_trainer.prepare import Request
    from lora_trainer.profiling import profile_run
    from lora_trainer.show.measures import profile_text

    request = Request(
        dataset=dataset,
        preset=preset,
        priority=priority,
        config_file=config,
        overrides=overrides(set_, base=base),
    )
    with ConsoleListener(console(stderr=True)) as listener:
        found = profile_run(request, steps=steps, output=output, listeners=(listener,))
    return Answer(value=found.to_json() if json else profile_text(found), as_json=json)


def bench(
    dataset: Path,
    /,
    *,
    preset: Preset = "auto",
    priority: Priorities = "balanced",
    base: Base = None,
    config: ConfigFile = None,
    set_: Sets = [],  # noqa: B006 - cyclopts reads the default, nobody mutates it
    steps: Annotated[int, Parameter(help="optimizer steps of each training, after a warm-up")] = 8,
    only: Annotated[
        list[str], Parameter(negative="", help="setting to vary, repeatable [default: all]")
    ] = [],  # noqa: B006 - cyclopts reads the default, nobody mutates it
    json: Json = False,
) -> Answer:
    """Measure short trainings that differ in one setting each: batch sizes, kernels, resolutions."""
    from lora_trainer.bench import bench
    from lora_trainer.prepare import Request
    from lora_trainer.show.measures import bench_table

    request = Request(
        dataset=dataset,
        preset=preset,
        priority=priority,
        config_file=config,
        overrides=overrides(set_, base=base),
    )
    rows = bench(
        request,
        steps=steps,
        only=only,
        on_start=lambda variant, count: console(stderr=True).print(
            f"measuring {variant.name} (of {count})", style="dim", highlight=False
        ),
    )
    return Answer(
        value=[row.to_json() for row in rows] if json else bench_table(rows), as_json=json
    )
