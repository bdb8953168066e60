"""The command line: `lora-train DATASET` trains; subcommands plan, check, inspect, sample, and look around.

A dozen flags; everything else is `--set section.key=value` or a config file. Nothing here computes,
and torch is imported only by the commands that need it, so that help, plan and check answer at once.
"""

from __future__ import annotations

import importlib
import io
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Parameter
from rich.console import Console

from lora_trainer import __version__, queue_commands, tool_commands
from lora_trainer.caption_command import caption
from lora_trainer.config import build_config, check_keys, parse_assignment, refuse_secrets
from lora_trainer.errors import LoraTrainError, RequestError, exit_code
from lora_trainer.launch import place
from lora_trainer.library_noise import quiet_libraries
from lora_trainer.redaction import without_secrets
from lora_trainer.resolve import Priority

HELP = """Train a diffusion LoRA: `lora-train DATASET` detects the card, picks a preset, caches, trains and exports.

Without a GPU it trains the embedded miniature base model, in a few minutes. Everything that has no
flag is a setting: `--set section.key=value`; `lora-train plan DATASET` lists them all with origins."""

app = App(
    name="lora-train",
    help=HELP,
    version=__version__,
    help_format="markdown",
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)
# No markup: names and captions are shown as they are, brackets included.
out = Console(soft_wrap=True, markup=False, emoji=False)
err = Console(stderr=True, soft_wrap=True, markup=False, emoji=False)

Sets = Annotated[
    list[str], Parameter(name="--set", negative="", help="section.key=value, repeatable")
]
Base = Annotated[
    str | None,
    Parameter(
        help="`embedded`, a diffusers folder, a .safetensors checkpoint or a Hub id "
        "[default: by hardware]"
    ),
]
Preset = Annotated[
    str, Parameter(help="auto, a tier such as 10-12, or a settings file (JSON, TOML)")
]
Priorities = Annotated[Priority, Parameter(help="what to prefer where something must give")]
ConfigFile = Annotated[
    Path | None, Parameter(name="--config", help="settings file (JSON, TOML) over the preset")
]
Json = Annotated[bool, Parameter(name="--json", negative="", help="machine-readable output")]
Vram = Annotated[
    float | None, Parameter(name="--vram", help="answer for a card with this many GiB")
]


@app.default
def train(
    dataset: Path,
    /,
    *,
    preset: Preset = "auto",
    priority: Priorities = "balanced",
    base: Base = None,
    output: Annotated[Path | None, Parameter(help="folder for run folders [default: runs]")] = None,
    name: Annotated[
        str | None, Parameter(help="name of the run and its files [default: the dataset folder's]")
    ] = None,
    steps: Annotated[
        int | None, Parameter(help="optimizer steps [default: by number of images]")
    ] = None,
    seed: Annotated[
        int | None, Parameter(help="every random draw follows from it [default: 42]")
    ] = None,
    config: ConfigFile = None,
    set_: Sets = [],  # noqa: B006 - cyclopts reads the default, nobody mutates it
    resume: Annotated[
        bool, Parameter(negative="", help="go on with the run of this name, to the same bits")
    ] = False,
    resume_from: Annotated[Path | None, Parameter(help="go on with the run in this folder")] = None,
    dry_run: Annotated[
        bool, Parameter(negative="", help="print the resolved run and stop")
    ] = False,
    strict: Annotated[bool, Parameter(negative="", help="refuse a dataset with warnings")] = False,
) -> None:
    """Train a LoRA on the images in DATASET; the result is runs/NAME/NAME.safetensors and report.html."""
    overrides = _overrides(set_, base=base, output=output, name=name, steps=steps, seed=seed)
    if dry_run:
        here = place().count
        _show_plan(
            dataset, preset, priority, config, overrides, vram=None, processes=here, as_json=False
        )
        return
    quiet_libraries()
    from lora_trainer.output.console import ConsoleListener
    from lora_trainer.prepare import Request
    from lora_trainer.run import TrainRequest, train

    request = Request(
        dataset=dataset, preset=preset, priority=priority, config_file=config, overrides=overrides
    )
    asked = TrainRequest(
        request=request,
        resume=resume,
        resume_from=resume_from,
        strict=strict,
        command=tuple(sys.argv[1:]),
    )
    with ConsoleListener(out) as listener:
        train(asked, listeners=(listener,))


@app.command
def plan(
    dataset: Path,
    /,
    *,
    preset: Preset = "auto",
    priority: Priorities = "balanced",
    base: Base = None,
    config: ConfigFile = None,
    set_: Sets = [],  # noqa: B006 - cyclopts reads the default, nobody mutates it
    vram: Vram = None,
    processes: Annotated[int, Parameter(help="answer for that many, a card each")] = 1,
    json: Json = False,
) -> None:
    """Predict memory, time and disk of a training, with every setting and its origin. Needs no GPU."""
    if not 1 <= processes <= 4096:
        raise RequestError(f"--processes {processes}", fix="give a number from 1 to 4096")
    _show_plan(
        dataset,
        preset,
        priority,
        config,
        _overrides(set_, base=base),
        vram=vram,
        processes=processes,
        as_json=json,
    )


@app.command
def check(dataset: Path, /, *, base: Base = None, set_: Sets = [], json: Json = False) -> None:  # noqa: B006 - as above
    """Report on a dataset: score, buckets, unusable files, captions, duplicates; each with advice."""
    from lora_trainer.prepare import Request, examine
    from lora_trainer.show.answers import check_text

    found = examine(Request(dataset=dataset, overrides=_overrides(set_, base=base)))
    _print(found.to_json() if json else check_text(found.report), as_json=json)


@app.command
def inspect(file: Path, /, *, json: Json = False) -> None:
    """Say what a LoRA file is: family, key format, rank, alpha, metadata, problems."""
    from lora_trainer.output.inspect import inspect_file
    from lora_trainer.show.answers import inspect_text

    inspection = inspect_file(file)
    _print(inspection.to_json() if json else inspect_text(inspection), as_json=json)


for command in (*tool_commands.COMMANDS, caption):
    app.command(command)


@app.command
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
    ] = [],  # noqa: B006 - as above
) -> None:
    """Make images with the LoRA of a run folder or file, through a plain diffusers pipeline."""
    quiet_libraries()
    from lora_trainer.try_out import make_images

    for file in make_images(
        run, prompts=prompt, base=base, output=output, seed=seed, strengths=strength or [1.0]
    ):
        out.print(str(file), highlight=False)


@app.command
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
) -> None:
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
        overrides=_overrides(set_, base=base),
    )
    with ConsoleListener(err) as listener:
        found = profile_run(request, steps=steps, output=output, listeners=(listener,))
    _print(found.to_json() if json else profile_text(found), as_json=json)


@app.command
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
    ] = [],  # noqa: B006 - as above
    json: Json = False,
) -> None:
    """Measure short trainings that differ in one setting each: batch sizes, kernels, resolutions."""
    from lora_trainer.bench import bench
    from lora_trainer.prepare import Request
    from lora_trainer.show.measures import bench_table

    request = Request(
        dataset=dataset,
        preset=preset,
        priority=priority,
        config_file=config,
        overrides=_overrides(set_, base=base),
    )
    rows = bench(
        request,
        steps=steps,
        only=only,
        on_start=lambda variant, count: err.print(
            f"measuring {variant.name} (of {count})", style="dim", highlight=False
        ),
    )
    _print([row.to_json() for row in rows] if json else bench_table(rows), as_json=json)


@app.command
def presets() -> None:
    """List every preset cell: what each hardware tier and priority sets."""
    from lora_trainer.show.answers import presets_text

    out.print(presets_text())


@app.command
def doctor(
    *,
    clear_cache: Annotated[
        bool, Parameter(negative="", help="empty the cache that all trainings share")
    ] = False,
    set_: Sets = [],  # noqa: B006 - as above
    json: Json = False,
) -> None:
    """Say what this machine has, each fact with its reason, and what is missing."""
    from lora_trainer.show.answers import cleared_text, doctor_json, doctor_text

    if clear_cache:
        from lora_trainer.data.cache_use import clear
        from lora_trainer.prepare import cache_in

        done = clear(cache_in(build_config(_overrides(set_))))
        cleared = {"folder": str(done.folder), "files": done.files, "bytes": done.bytes}
        _print(cleared if json else cleared_text(done), as_json=json)
        return
    if set_:
        raise RequestError("--set does nothing here", fix="leave it out, or add --clear-cache")
    from lora_trainer.hardware import detect

    hardware = detect()
    _print(doctor_json(hardware) if json else doctor_text(hardware), as_json=json)


@app.command
def gui(
    *words: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
) -> None:
    """Open the graphical interface; its options are those of `lora-train-gui --help`."""
    importlib.import_module("lora_trainer.gui.app").main(words)


def _training(words: Sequence[str]) -> Mapping[str, Any]:
    """Read the words of a training without training; raises RequestError or CycloptsError."""
    command, bound, _ = app.parse_args(list(words), exit_on_error=False, print_error=False)
    given = bound.arguments
    if command is not train or given.get("dry_run"):
        raise RequestError(
            "only trainings wait in the queue",
            fix="give after -- what follows `lora-train` in the command of a training",
        )
    flags = {name: given.get(name) for name in ("base", "output", "name", "steps", "seed")}
    assigned = _overrides(given.get("set_", []), **flags)
    check_keys(assigned)
    refuse_secrets(assigned)  # the words are written into a file, to be used later
    return {**given, "output": assigned.get("output.folder")}


app.command(queue_commands.queue_app(_training))


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with the code DESIGN gives the outcome."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # What a terminal or a pipe cannot show, such as a file's name, is escaped and ends no run.
            stream.reconfigure(errors="backslashreplace")
    sys.exit(run(arguments))


def run(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code. One line for every error a user can meet."""
    try:
        _refuse_undecodable(sys.argv[1:] if arguments is None else arguments)
        answer = app(
            arguments, exit_on_error=False, print_error=False, console=out, error_console=err
        )
        if isinstance(answer, tool_commands.Answer):
            _print(answer.value, as_json=answer.as_json)
    except (CycloptsError, LoraTrainError) as error:
        return _told(error)
    except UnicodeEncodeError as error:  # a name written in a settings file
        return _told(_not_text(error.object, error.encoding))
    except KeyboardInterrupt:
        err.print(
            "stopped at once; the last saved state is valid: run again with --resume",
            style="bold red",
        )
        return 130
    return 0


def _told(error: CycloptsError | LoraTrainError) -> int:
    """Print an error as one line, without what it may quote of a token; return its exit code."""
    line = f"error: {without_secrets(str(error))}"
    err.print(line, style="bold red", markup=False, highlight=False)
    return exit_code(error) if isinstance(error, LoraTrainError) else RequestError.exit_code


def _overrides(assignments: list[str], **flags: Any) -> dict[str, Any]:
    """Return the settings typed on this command line; a flag is a short name of its setting."""
    keys = {
        "base": "base.model", "output": "output.folder", "name": "output.name", "steps": "train.steps",
        "seed": "train.seed",
    }  # fmt: skip
    typed = {
        keys[flag]: str(value) if isinstance(value, Path) else value
        for flag, value in flags.items()
        if value is not None
    }
    for text in assignments:
        key, value = parse_assignment(text)
        if key in typed and typed[key] != value:
            raise RequestError(
                f"{key} is given twice: {typed[key]} and {value}", fix="give it once"
            )
        typed[key] = value
    return typed


def _show_plan(
    dataset: Path,
    preset: str,
    priority: Priority,
    config: Path | None,
    overrides: dict[str, Any],
    *,
    vram: float | None,
    processes: int,
    as_json: bool,
) -> None:
    from lora_trainer.prepare import Request, prepare
    from lora_trainer.show.plan import plan_json, plan_text

    if vram is not None and not 0 < vram <= 1024:
        raise RequestError(
            f"--vram {vram:g} is no size of a card", fix="give its memory in GiB, such as --vram 12"
        )

    prepared = prepare(
        Request(
            dataset=dataset,
            preset=preset,
            priority=priority,
            config_file=config,
            overrides=overrides,
            assumed_vram_gib=vram,
            processes=processes,
            sharing=processes,
        )
    )
    _print(plan_json(prepared) if as_json else plan_text(prepared), as_json=as_json)


def _print(value: Any, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
    else:
        out.print(value, highlight=False)


def _refuse_undecodable(arguments: list[str]) -> None:
    for word in arguments:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise _not_text(word, sys.getfilesystemencoding()) from None


def _not_text(name: str, encoding: str) -> RequestError:
    return RequestError(
        f"{ascii(name)} is no name in this system's encoding, {encoding}",
        fix="set PYTHONUTF8=1, or use another name",
    )
