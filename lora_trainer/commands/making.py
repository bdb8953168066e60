"""`lora-train sample` and `validate`: images from a finished LoRA, and what it is worth."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from lora_trainer.commands.options import Answer, Json, Sets, console, overrides
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


def validate(
    run: Annotated[Path, Parameter(help="a run folder or an adapter file")],
    dataset: Annotated[Path, Parameter(help="the images it was trained on")],
    /,
    *,
    base: Annotated[str | None, Parameter(help="another base than it was trained on")] = None,
    clip: Annotated[
        str | None,
        Parameter(
            help="CLIP image encoder on this machine to compare pictures with: a folder or a Hub id "
            "[default: openai/clip-vit-base-patch32 if it is there, else latents of a small VAE]"
        ),
    ] = None,
    set_: Sets = [],  # noqa: B006 - cyclopts reads the default, nobody mutates it
    json: Json = False,
) -> Answer:
    """Score a LoRA against the dataset it was trained on, part by part; into the run's report."""
    quiet_libraries()
    from lora_trainer.output.console import ConsoleListener
    from lora_trainer.show.validation import validation_text
    from lora_trainer.validation.validate import validate

    with ConsoleListener(console(stderr=True)) as listener:
        found = validate(
            run,
            dataset,
            base=base,
            clip=clip,
            overrides=overrides(set_),
            listeners=(listener,),
        )
    return Answer(value=found.to_json() if json else validation_text(found), as_json=json)
