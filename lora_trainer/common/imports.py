"""What a setting names by its path, `package.module:Name`, imported."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

from lora_trainer.common.errors import BROKEN_PACKAGE, MachineError, RequestError, first_line


def imported(path: str, *, key: str) -> Any:
    """Return what `module:Name` names; `key` is the setting that names it.

    Raises MachineError if the module cannot be imported, RequestError if it has no such name.
    """
    module, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except AttributeError:
        raise RequestError(
            f"{key}={path}: {module} has no {name}", fix="correct the name after the colon"
        ) from None
    except BROKEN_PACKAGE as error:
        raise MachineError(
            f"{key}={path}: {module} cannot be imported: {first_line(error)}",
            fix=f"install the package that has {module}, or correct the path",
        ) from None


def arguments_of(function: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function or class by name; none where Python cannot tell them."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C, or not a function at all
        return {}
