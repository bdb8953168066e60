"""The commands that try a LoRA or a training: sample, validate, profile and bench, with their tables for people."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter
from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from lora_trainer.cli.main import PLANNED, Json, PlanOptions, Reply, Sets, console, overrides
from lora_trainer.common.errors import InputError, RequestError, StoppedBySignal
from lora_trainer.common.files import write_atomic
from lora_trainer.common.processes import quiet_network_libraries, read_dist_env
from lora_trainer.common.wording import gib
from lora_trainer.reporting.run_record import RUN_FILE
from lora_trainer.reporting.score import WEIGHTS

Run = Annotated[Path, Parameter(help="a run folder or an adapter file")]
TrainedOn = Annotated[
    str | None, Parameter(help="base model to use [default: the one it was trained on]")
]


def sample(
    run: Run,
    /,
    *,
    prompt: list[str],
    base: TrainedOn = None,
    output: Path = Path("samples"),
    seed: int = 1234,
    strength: list[float] = [],  # noqa: B006 - cyclopts reads the default, nobody mutates it
    reference: list[Path] = [],  # noqa: B006 - as above
) -> None:
    """Make images with the LoRA of a run folder or file, through a plain diffusers pipeline.

    :param prompt: prompt of an image, repeatable; options behind it as in `sampling.prompts`: "a cat --w 512 --s 20"
    :param output: folder for the images
    :param seed: seed of the first image
    :param strength: strength of the LoRA, repeatable [default: 1]
    :param reference: image to edit, of a base that edits; repeatable, the first reference first
    """
    quiet_network_libraries()
    out = console()
    from lora_trainer.run.samples import make_images

    for file in make_images(
        run,
        prompts=prompt,
        base=base,
        output=output,
        seed=seed,
        strengths=strength or [1.0],
        references=reference,
    ):
        out.print(str(file), highlight=False)


def comfyui(
    file: Path,
    /,
    *,
    server: str = "http://127.0.0.1:8188",
    strength: list[float] = [],  # noqa: B006 - as above
    prompt: str | None = None,
    workflow: Path | None = None,
    loader: str | None = None,
    output: Path = Path("samples"),
) -> None:
    """Make images with a LoRA file by a running ComfyUI, with the workflow that was drawn there last.

    :param server: address of ComfyUI
    :param strength: strength of the LoRA, repeatable [default: 0 and 1, so without it and with it]
    :param prompt: prompt to draw [default: that of the workflow, with the trigger in front]
    :param workflow: another workflow: "Export (API)" of ComfyUI, or a picture that it saved
    :param loader: number of the node that loads the model, where the workflow loads several
    :param output: folder for the images
    """
    out = console()
    from lora_trainer.tools.comfyui.draw import NO_EFFECT, Wish, all_the_same, draw
    from lora_trainer.tools.comfyui.server import ComfyUI

    wish = Wish(strengths=strength, workflow=workflow, prompt=prompt, loader=loader)
    files = []
    for drawn in draw(file, server=ComfyUI(server), wish=wish, output=output):
        files.append(drawn)
        out.print(str(drawn), highlight=False)
    if all_the_same(files):
        out.print(NO_EFFECT, highlight=False)


def film(run: Path, /, *, output: Path | None = None, force: bool = False) -> str:
    """Write a film of a run's previews, the base beside one step after another, as GIF or MP4.

    :param run: a run folder
    :param output: file to write, .gif or .mp4 [default: RUN.gif]
    :param force: replace an existing output
    """
    from lora_trainer.reporting.film import KINDS
    from lora_trainer.reporting.film import film as film_of
    from lora_trainer.reporting.history import read_history

    if not (run / RUN_FILE).is_file():
        raise InputError(f"{run} is not a run folder", fix="give runs/NAME")
    file = output or Path(f"{run.resolve().name}.gif")
    kinds = {f".{kind}": kind for kind in KINDS}
    kind = kinds.get(file.suffix.lower())
    if kind is None:
        raise RequestError(f"{file} is neither a GIF nor an MP4", fix="name it .gif or .mp4")
    if file.exists() and not force:
        raise RequestError(f"{file} exists", fix="give another --output, or --force")
    write_atomic(file, film_of(run, read_history(run), kind), durable=False)
    return str(file)


def validate(
    run: Run,
    dataset: Path,
    /,
    *,
    base: TrainedOn = None,
    clip: str | None = None,
    set_: Sets = [],  # noqa: B006 - cyclopts reads the default, nobody mutates it
    json: Json = False,
) -> Reply:
    """Score a LoRA against the dataset it was trained on, part by part; adds it to the run's report.

    :param dataset: the images it was trained on
    :param clip: CLIP image encoder on this machine that compares images: a folder or a Hub id
        [default: openai/clip-vit-base-patch32 if it is there, else latents of a small VAE]
    """
    from lora_trainer import api
    from lora_trainer.reporting.console import ConsoleListener

    settings = overrides(set_)
    with ConsoleListener(console(stderr=True)) as listener:
        validation = api.validate(
            run, dataset, base=base, clip=clip, settings=settings, listeners=(listener,)
        )
    if json:
        return validation.to_json()
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


def profile(
    dataset: Path,
    /,
    *,
    options: PlanOptions = PLANNED,
    steps: int = 10,
    output: Path = Path("runs"),
    json: Json = False,
) -> Reply:
    """Profile a few training steps: where their time goes, and which setting would change that.

    :param steps: optimizer steps to profile
    :param output: folder for the run folder with the trace
    """
    if (processes := read_dist_env().count) > 1:
        raise RequestError(
            f"profile measures one process, and the launcher started {processes}",
            fix="start it without the launcher",
        )
    quiet_network_libraries()
    from lora_trainer.measuring.profile import profile_run
    from lora_trainer.reporting.console import ConsoleListener
    from lora_trainer.run.prepare import Request

    request = Request.of(dataset, **options.keywords())
    with ConsoleListener(console(stderr=True)) as listener:
        try:
            profiled = profile_run(request, steps=steps, output=output, listeners=(listener,))
        except StoppedBySignal as error:  # a training's, which could go on
            number, again = error.exit_code - 128, "run the command again"
            raise StoppedBySignal(number, found="profile was stopped", fix=again) from None
    if json:
        return profiled
    shares = Table("where a step's time goes", "share", box=None, pad_edge=False)
    for cause, share in profiled["shares"].items():
        shares.add_row(cause, Text(f"{100 * share:.1f} %", justify="right"))
    operations = Table("operation", "ms a step", box=None, pad_edge=False)
    for name, seconds in profiled["operations"].items():
        operations.add_row(Text(name[:80]), Text(f"{1000 * seconds:.2f}", justify="right"))
    return Group(
        shares,
        "",
        operations,
        "",
        Text(f"{profiled['seconds_per_step']:.3f} s a step over {profiled['steps']} steps"),
        Text(f"trace: {profiled['trace']} (tensorboard --logdir, or open it in Perfetto)"),
        Text(profiled["sentence"], style="bold"),
    )


def bench(
    dataset: Path,
    /,
    *,
    options: PlanOptions = PLANNED,
    steps: int = 8,
    only: list[str] = [],  # noqa: B006 - cyclopts reads the default, nobody mutates it
    json: Json = False,
) -> Reply:
    """Measure short trainings that differ in one setting each: batch sizes, kernels, resolutions.

    :param steps: optimizer steps of each training, after a warm-up
    :param only: setting to vary, repeatable [default: all]
    """
    from lora_trainer.measuring.bench import bench
    from lora_trainer.run.prepare import Request

    rows = bench(
        Request.of(dataset, **options.keywords()),
        steps=steps,
        only=only,
        on_start=lambda name, count: console(stderr=True).print(
            f"measuring {name} (of {count})", style="dim", highlight=False
        ),
    )
    if json:
        return [row.to_json() for row in rows]
    titles = ("s a step", "images/s", "against planned", "peak", "predicted", "cached images/s")
    columns = [Column(title, justify="right") for title in titles]
    table = Table(Column("setting", no_wrap=True), *columns, box=None, pad_edge=False)
    planned = rows[0].images_per_s if rows else None
    for row in rows:
        if row.failure is None:
            speed = row.images_per_s
            figures = (
                "" if row.seconds_per_step is None else f"{row.seconds_per_step:.3f}",
                "" if speed is None else f"{speed:.2f}",
                f"{speed / planned:.2f}x" if speed and planned else "",
                "" if row.peak_bytes is None else gib(row.peak_bytes),
                "" if row.predicted_bytes is None else gib(row.predicted_bytes),
                "warm" if row.cached_images_per_s is None else f"{row.cached_images_per_s:.2f}",
            )
            table.add_row(*map(Text, (row.name, *figures)))
    failures = [Text(f"{row.name}: {row.failure}", style="yellow") for row in rows if row.failure]
    return Group(table, *failures)
