"""All errors shown to users, one exit code per branch.

    LoraTrainError
    ├── RequestError          2   the command, config or preset asks for something impossible
    ├── InputError            3   images, captions or a base model file are unusable
    ├── MachineError          4   disk, GPU, permission, missing package, predicted not to fit
    ├── TrainingStopped       5   not-a-number or out of memory after all fallbacks, or nothing learned
    └── StoppedBySignal  130/143  Ctrl-C or SIGTERM, after the state was saved

A message states the value or file found and the allowed ones; `fix` is one thing to do about it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

# The fix of errors after which a resume state is on disk.
RESUME = "run the same command with --resume to go on"


class LoraTrainError(Exception):
    """Base of all errors shown as one line: `found` is the problem, `fix` the remedy, `str()` the whole line."""

    exit_code = 1

    def __init__(self, found: str, *, fix: str) -> None:
        super().__init__(found)
        self.found = found
        self.fix = fix

    def __str__(self) -> str:
        end = "" if self.found.endswith("?") else "."
        return f"{self.found.rstrip('.')}{end} Fix: {self.fix.rstrip('.')}."


class RequestError(LoraTrainError):
    """The request is impossible: unknown key, bad value, contradiction."""

    exit_code = 2


class InputError(LoraTrainError):
    """A file of the user cannot be used: image, caption, base model, adapter."""

    exit_code = 3


class MachineError(LoraTrainError):
    """This machine cannot do it: disk, memory, permission, missing package."""

    exit_code = 4


class TrainingStopped(LoraTrainError):
    """Training ended early because going on would have spoiled the result."""

    exit_code = 5


class StoppedBySignal(LoraTrainError):
    """The run was asked to stop; its state is on disk. `exit_code` is 128 + the signal number."""

    def __init__(self, signal_number: int, *, found: str, fix: str) -> None:
        super().__init__(found, fix=fix)
        self.exit_code = 128 + signal_number


def first_line(error: BaseException) -> str:
    """Return the first line of a library's message, or the error's class name without a message."""
    return (str(error).splitlines() or [type(error).__name__])[0]


# Errors on importing a package that is missing or whose native part does not fit this machine.
BROKEN_PACKAGE = (ImportError, OSError, RuntimeError)


def package_problem(error: BaseException) -> str:
    """Return a relative clause on a package whose import raised one of `BROKEN_PACKAGE`."""
    if isinstance(error, ModuleNotFoundError):
        return "which is not installed"
    return f"which does not work here: {first_line(error)}"


def did_you_mean(name: str, allowed: Iterable[str]) -> str:
    """Return " Did you mean 'x'?" for the nearest allowed name, or the empty string."""
    nearest = difflib.get_close_matches(name, list(allowed), n=1, cutoff=0.6)
    return f" Did you mean {nearest[0]!r}?" if nearest else ""
