"""`lora-train sample`: images from a finished LoRA."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from lora_trainer.commands.options import console
from lora_trainer.library_noise import quiet_libraries


def sample(
    run: Annotated[Path, Parameter(help="a run folder or an adapter file")],
    /,
    *,
    prompt: Annotated[list[str], Parameter(negative="", help="what to draw, repeatable")],
    base: Annotated[str | None, Parameter(help="another base than it was trained on")] = None,
    output: Annotated[Path, Parameter(help="folder for the images")] = Path("samples"),
    seed: Annotated[int, Parameter(help="seed of the first image")] = 1234,
    strength: Annotated[
        list[float],
        Parameter(negative="", help="how strongly the LoRA is applied, repeatable [default: 1]"),
    ] = [],  # noqa: B006 - cyclopts reads the default, nobody mutates it
) -> None:
    """Make images with the LoRA of a run folder or file, through a plain diffusers pipeline."""
    quiet_libraries()
    out = console()
    from lora_trainer.try_out import make_images

    for file in make_images(
        run, prompts=prompt, base=base, output=output, seed=seed, strengths=strength or [1.0]
    ):
        out.print(str(file), highlight=False)
