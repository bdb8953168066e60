"""The command line: `lora-train DATASET` trains; subcommands plan, check, inspect, sample, and look around.

A dozen flags; everything else is `--set section.key=value` or a config file. Nothing here computes,
and torch is imported only by the commands that need it, so that help, plan and check answer at once.
"""

from __future__ import annotations

import io
import json
import os
import sys

from cyclopts import App, CycloptsError, Parameter

from lora_trainer import __version__
from lora_trainer.cli.options import COMMANDS, Reply, console, help_line
from lora_trainer.cli.train_dataset import train
from lora_trainer.common.errors import LoraTrainError, RequestError
from lora_trainer.common.wording import without_secrets
from lora_trainer.hardware.devices import use_expandable_segments

HELP = """Train a diffusion LoRA: `lora-train DATASET` detects the GPU, picks a preset, caches, trains and exports.

Without a GPU it trains the embedded miniature base model, in a few minutes. Everything that has no
flag is a setting: `--set section.key=value`; `lora-train plan --all DATASET` lists them all with origins."""

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

app.default(train)
for name, function in COMMANDS.items():
    app.command(f"lora_trainer.cli.{function}", name=name, help=help_line(name))


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit with the code DESIGN gives the outcome."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            if sys.platform == "win32" and not stream.isatty():
                # Logs are read as UTF-8; a pipe or file has the code page of the system, as cp1252.
                stream.reconfigure(encoding="utf-8", newline="\n")
            # What a terminal or a pipe cannot show, such as a file's name, is escaped and ends no run.
            stream.reconfigure(errors="backslashreplace")
    use_expandable_segments(os.environ)
    sys.exit(run(arguments))


def run(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit code. One line for every error a user can meet."""
    try:
        _refuse_undecodable(sys.argv[1:] if arguments is None else arguments)
        answer = app(
            arguments, exit_on_error=False, print_error=False, console=out, error_console=err
        )
        _print(answer)
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
    """Print an error as one line, any token in it hidden; return its exit code."""
    line = f"error: {without_secrets(str(error))}"
    err.print(line, style="bold red", markup=False, highlight=False)
    return error.exit_code if isinstance(error, LoraTrainError) else RequestError.exit_code


def _print(answer: Reply) -> None:
    if isinstance(answer, dict | list):
        sys.stdout.write(json.dumps(answer, indent=2, ensure_ascii=False) + "\n")
    elif answer is not None:
        out.print(answer, highlight=False)


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
