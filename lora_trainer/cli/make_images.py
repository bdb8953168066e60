"""The commands `sample` and `validate`: images from a finished LoRA, and its score."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lora_trainer.cli.options import Json, Reply, Sets, console, overrides
from lora_trainer.common.processes import quiet_libraries
from lora_trainer.reporting.score import WEIGHTS, Validation

Run = Annotated[Path, Parameter(help="a run folder or an adapter file")]
TrainedOn = Annotated[
    str | None, Parameter(help="base model to use [default: the one it was trained on]")
]


def validation_text(validation: Validation) -> RenderableType:
    """Return the score and a table of its parts; a part that was left out has its reason."""
    score = validation.score
    head = "no score: nothing could be measured" if score is None else f"score {score:.2f} of 1"
    if not validation.complete:
        head += f", without {validation.weight_left_out:.0%} of the parts' weight"
    table = Table("part", "weight", "value", "", box=None, pad_edge=False)
    for name, weight in WEIGHTS.items():
        part = validation.parts.get(name)
        value = "" if part is None else f"{part:.2f}"
        why = f"left out: {validation.left_out.get(name, '')}" if part is None else ""
        table.add_row(name, f"{weight:.2f}", value, Text(why, style="dim"))
    notes = [Text(note, style="dim") for note in validation.notes]
    return Group(Text(f"{validation.file}: {head}", style="bold"), table, *notes)


def sample(
    run: Run,
    /,
    *,
    prompt: Annotated[list[str], Parameter(negative="", help="prompt of an image, repeatable")],
    base: TrainedOn = None,
    output: Annotated[Path, Parameter(help="folder for the images")] = Path("samples"),
    seed: Annotated[int, Parameter(help="seed of the first image")] = 1234,
    strength: Annotated[
        list[float],
        Parameter(negative="", help="strength of the LoRA, repeatable [default: 1]"),
    ] = [],  # noqa: B006 - cyclopts reads the default, nobody mutates it
) -> None:
    """Make images with the LoRA of a run folder or file, through a plain diffusers pipeline."""
    quiet_libraries()
    out = console()
    from lora_trainer.run.sample_lora import make_images

    for file in make_images(
        run, prompts=prompt, base=base, output=output, seed=seed, strengths=strength or [1.0]
    ):
        out.print(str(file), highlight=False)


def validate(
    run: Run,
    dataset: Annotated[Path, Parameter(help="the images it was trained on")],
    /,
    *,
    base: TrainedOn = None,
    clip: Annotated[
        str | None,
        Parameter(
            help="CLIP image encoder on this machine that compares images: a folder or a Hub id "
            "[default: openai/clip-vit-base-patch32 if it is there, else latents of a small VAE]"
        ),
    ] = None,
    set_: Sets = [],  # noqa: B006 - cyclopts reads the default, nobody mutates it
    json: Json = False,
) -> Reply:
    """Score a LoRA against the dataset it was trained on, part by part; adds it to the run's report."""
    from lora_trainer import api
    from lora_trainer.reporting.console import ConsoleListener

    settings = overrides(set_)
    with ConsoleListener(console(stderr=True)) as listener:
        validation = api.validate(
            run, dataset, base=base, clip=clip, settings=settings, listeners=(listener,)
        )
    return validation.to_json() if json else validation_text(validation)
