"""The command line: `lora-train DATASET` trains, `plan` says what that will need, other commands stand beside.

A dozen flags; everything else is `--set section.key=value` or a config file. Nothing here computes, and torch is
imported only by the commands that need it, so that help, plan and check answer at once: `--help` imports this module
and no slow one, the module of another command is imported only when the command runs, and its line in `--help` is
read from the source of that module.
"""

from __future__ import annotations

import ast
import errno
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from signal import SIGINT
from typing import Annotated, Any

from cyclopts import App, CycloptsError, Parameter
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from lora_trainer import __version__
from lora_trainer.common.errors import (
    LoraTrainError,
    MachineError,
    RequestError,
    StoppedBySignal,
)
from lora_trainer.common.events import shown
from lora_trainer.common.files import system_refused, user_path
from lora_trainer.common.output import lost_output, outlast, output_aside
from lora_trainer.common.processes import made_to_stay, no_thread
from lora_trainer.common.wording import escaped, json_text, without_secrets
from lora_trainer.config import Concept, Priority
from lora_trainer.hardware.devices import use_expandable_segments
from lora_trainer.reporting.control import Quit, Quitting

HELP = """Train a diffusion LoRA: `lora-train DATASET` detects the GPU, picks a preset, caches, trains and exports.

Without a GPU it trains the embedded miniature base model, in a few minutes. Everything that has no
flag is a setting: `--set section.key=value`; `lora-train plan --all DATASET` lists them all with origins."""

# The answer of a command: text or a rich renderable, or a dict or list that is printed as JSON.
Reply = RenderableType | dict[str, Any] | list[dict[str, Any]] | None
Sets = Annotated[list[str], Parameter(name="--set", help="section.key=value, repeatable")]
Base = Annotated[
    str | None,
    Parameter(
        help="`embedded`, a diffusers folder, a .safetensors checkpoint or a Hub id "
        "[default: by hardware]"
    ),
]
Kind = Annotated[
    Concept | None,
    Parameter(help="kind of concept the images show; decides some presets [default: any]"),
]
Json = Annotated[bool, Parameter(name="--json", help="machine-readable output")]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The options by which a training is planned; `settings` are those typed, by key.

    :param preset: auto, a tier such as 10-12, or a settings file (JSON, TOML)
    :param priority: what to prefer if not everything fits: quality, speed or a balance
    :param config: settings file (JSON, TOML) that overrides the preset
    """

    preset: str = "auto"
    priority: Priority = "balanced"
    base: Base = None
    config: Path | None = None
    set_: Sets = field(default_factory=list)

    def keywords(self, **flags: Any) -> dict[str, Any]:
        """Return the arguments of `api.plan` and `api.train`; `flags` are short names of settings."""
        return {
            "preset": self.preset,
            "priority": self.priority,
            "config_file": self.config,
            "settings": overrides(self.set_, base=self.base, **flags),
        }


PLANNED = PlanOptions()


def console(*, stderr: bool = False) -> Console:
    """Return a console without markup and emoji codes: names and captions are printed unchanged."""
    return EscapingConsole(stderr=stderr, soft_wrap=True, markup=False, emoji=False)


class EscapingConsole(Console):
    """A console that escapes what controls a terminal in all it is given: its own colours come later."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            if segment.control:  # of rich itself, which moves the live line
                yield segment
            else:
                yield Segment(escaped(segment.text, keep="\n\t"), segment.style)


def overrides(assignments: Sequence[str], **flags: Any) -> dict[str, Any]:
    """Return the settings typed on the command line; a flag is a short name of its setting.

    Raises RequestError for an unknown setting, and for one that is given twice with different values.
    """
    from lora_trainer.config.config import parse_assignment

    keys = {
        "base": "base.model", "output": "output.folder", "name": "output.name", "steps": "train.steps",
        "seed": "train.seed", "kind": "train.concept",
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


# The module of each command in this folder, and its function there or, of several commands, its `app`.
COMMANDS: Mapping[str, str] = {
    "plan": "main:plan",
    "check": "look_around:check",
    "inspect": "look_around:inspect",
    "models": "look_around:models",
    "convert": "tools:convert",
    "merge": "tools:merge",
    "resize": "tools:resize",
    "extract": "tools:extract",
    "describe": "tools:describe",
    "publish": "tools:publish",
    "caption": "caption:caption",
    "import": "look_around:import_settings",
    "sample": "measure:sample",
    "comfyui": "measure:comfyui",
    "film": "measure:film",
    "validate": "measure:validate",
    "profile": "measure:profile",
    "bench": "measure:bench",
    "tune": "tuning:tune",
    "presets": "look_around:presets",
    "doctor": "look_around:doctor",
    "gui": "look_around:gui",
    "queue": "queueing:app",
}
# Whose words, --help too, another program reads.
WITH_OWN_HELP = frozenset({"gui"})


# ---- to train, and to plan a training


def train(
    dataset: Path,
    /,
    *,
    options: PlanOptions = PLANNED,
    kind: Kind = None,
    output: Path | None = None,
    name: str | None = None,
    steps: int | None = None,
    seed: int | None = None,
    resume: bool = False,
    resume_from: Path | None = None,
    dry_run: bool = False,
    strict: bool = False,
) -> Reply:
    """Train a LoRA on the images in DATASET; the result is runs/NAME/NAME.safetensors and report.html.

    :param output: folder for run folders [default: runs]
    :param name: name of the run and its files [default: the dataset folder's]
    :param steps: optimizer steps [default: by the number of images]
    :param seed: seed of all random numbers [default: 42]
    :param resume: continue the run of this name, as if it had not been interrupted
    :param resume_from: continue the run in this folder
    :param dry_run: print the plan of the training and stop
    :param strict: refuse a dataset with warnings
    """
    keywords = options.keywords(output=output, name=name, steps=steps, seed=seed, kind=kind)
    from lora_trainer import api

    if dry_run:
        from lora_trainer.run.plan_text import plan_text

        return plan_text(api.plan(dataset, **keywords).prepared)
    with made_to_stay():
        from lora_trainer.queue.commands import download_listeners
        from lora_trainer.reporting.console import ConsoleListener

    with output_aside(), ConsoleListener(console(), lost=lost_output) as listener:
        file = api.train(
            dataset,
            **keywords,
            resume=resume,
            resume_from=resume_from,
            strict=strict,
            command=sys.argv[1:],
            listeners=(listener, quitting, *download_listeners(os.environ)),
        )
        listener.show_file(file)
    return None


def plan(
    dataset: Path,
    /,
    *,
    options: PlanOptions = PLANNED,
    kind: Kind = None,
    vram: float | None = None,
    processes: int = 1,
    all_: Annotated[bool, Parameter(name="--all")] = False,
    json: Json = False,
) -> Reply:
    """Predict memory, time and disk of a training, and show why each setting has its value. Needs no GPU.

    :param vram: plan for a GPU with this many GiB of memory
    :param processes: plan for so many processes, one GPU each
    :param all_: show every setting
    """
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
    return result.to_json() if json else plan_text(result.prepared, everything=all_)


# ---- the command line itself


def help_line(command: str) -> str:
    """Return the first line of the docstring of a command's function, or of the module of its app."""
    module, _, name = COMMANDS[command].partition(":")
    tree = ast.parse(Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8"))
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    docstring = ast.get_docstring(functions.get(name, tree)) or ""
    return docstring.partition("\n")[0]


app = App(
    name="lora-train",
    help=HELP,
    version=__version__,
    help_format="markdown",
    default_parameter=Parameter(negative=""),
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)
out, err = console(), console(stderr=True)
quitting = Quitting()

app.default(train)
for name, function in COMMANDS.items():
    own = {"help_flags": ()} if name in WITH_OWN_HELP else {}
    app.command(f"lora_trainer.cli.{function}", name=name, help=help_line(name), **own)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with the code of the outcome (docs/commands.md)."""
    quitting.begin()
    outlast("stdout")
    outlast("stderr")
    use_expandable_segments(os.environ)
    sys.exit(run(arguments))


def run(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code. One line for every error a user can meet."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        for word in words:
            word.encode(sys.getfilesystemencoding())
        command, bound, _ = app.parse_args(
            arguments, exit_on_error=False, print_error=False, console=out, error_console=err
        )
        _refuse_empty_paths(words, [*bound.args, *bound.kwargs.values()])
        answer = command(
            *map(_typed, bound.args), **{k: _typed(v) for k, v in bound.kwargs.items()}
        )
        if isinstance(answer, dict | list):
            sys.stdout.write(json_text(answer, indent=2) + "\n")
        elif answer is not None:
            out.print(answer, highlight=False)
        if answer is not None:
            _refuse_lost_answer()
    except (CycloptsError, LoraTrainError) as error:
        return _told(error)
    except UnicodeEncodeError as error:  # a word, or a name written in a settings file
        problem = f"{ascii(error.object)} is not a name in this system's encoding, {error.encoding}"
        return _told(RequestError(problem, fix="set PYTHONUTF8=1, or use another name"))
    except (
        OSError
    ) as error:  # a name that is too long, a working folder that was removed, a link to itself
        return _told(system_refused(error))
    except RuntimeError as error:
        if (refused := no_thread(error)) is None:
            raise
        return _told(refused)
    except KeyboardInterrupt as stopped:
        number = stopped.number if isinstance(stopped, Quit) else SIGINT
        if words and words[0] in COMMANDS:  # which have no --resume
            again = "run the command again"
            return _told(StoppedBySignal(number, found=f"{words[0]} was stopped", fix=again))
        err.print(
            "stopped at once; the last saved state is valid: run again with --resume",
            style="bold red",
        )
        return 128 + number
    return 0


def _refuse_empty_paths(words: Sequence[str], values: Sequence[Any]) -> None:
    """Raise RequestError where a word without a character was read as a path: it would be this folder."""
    said = [word.rpartition("=")[2].strip() for word in words]
    is_meant = any(text and Path(text) == Path() for text in said)
    if "" in said and not is_meant and Path() in map(_typed, values):
        raise RequestError(
            "a path on the command line is empty",
            fix="give the folder or file; a variable in quotation marks that is not set is empty too",
        )


def _typed(value: Any) -> Any:
    """Return an argument with each path in it as people type and paste them."""
    if isinstance(value, Path):
        return Path(user_path(str(value)))
    if isinstance(value, list | tuple):
        return type(value)(map(_typed, value))
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{each.name: _typed(getattr(value, each.name)) for each in fields(value)}
        )
    return value


def _refuse_lost_answer() -> None:
    """Raise MachineError where the answer, the result of the command, was written in part only.

    A reader that has ended, as `head` does, or a terminal that was closed has read what it wanted.
    """
    error = lost_output()
    if error is not None and error.errno not in (errno.EPIPE, errno.EIO):
        raise MachineError(
            f"the answer could not be written: {error.strerror or error}",
            fix="write it to a disk with room, and run the command again",
        )


def _told(error: CycloptsError | LoraTrainError) -> int:
    """Print an error as one line, any token in it hidden; return its exit code."""
    # A name may hold line breaks and control characters.
    line = f"error: {shown(without_secrets(str(error)))}"
    err.print(line, style="bold red", markup=False, highlight=False)
    return error.exit_code if isinstance(error, LoraTrainError) else RequestError.exit_code


def parse_training(words: Sequence[str]) -> Mapping[str, Any]:
    """Return the parsed arguments of a training's command, by their names in `train`.

    Raises RequestError for bad settings, for another command and for a plan, and CycloptsError.
    """
    from lora_trainer.config.config import check_keys, refuse_secrets

    no_training = RequestError(
        "only trainings can be added to the queue",
        fix="after -- give the words that follow `lora-train` in the command of a training",
    )
    if words and words[0] in COMMANDS:
        raise no_training
    command, bound, _ = app.parse_args(list(words), exit_on_error=False, print_error=False)
    arguments = bound.arguments
    if command is not train or arguments.get("dry_run"):
        raise no_training
    flags = {name: arguments.get(name) for name in ("output", "name", "steps", "seed", "kind")}
    assigned = arguments.get("options", PLANNED).keywords(**flags)["settings"]
    check_keys(assigned)
    refuse_secrets(assigned)  # the words are stored in the queue's file in plain text
    return {**arguments, "output": assigned.get("output.folder")}
