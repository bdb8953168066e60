"""What values of settings need of the machine: packages, a kind of GPU, a GPU with memory of its own.

Each setting says it where it is declared (`Handling` in config/declare.py). Input: a config and what the machine
has; output: the values to use instead of those that do not work here. The user's values are refused, those of a
preset are replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lora_trainer.common.errors import MachineError, RequestError
from lora_trainer.config.config import SettingInfo, all_settings
from lora_trainer.config.constraints import by_key, typed
from lora_trainer.config.running import Config
from lora_trainer.hardware.nvml import Gpu


def unmet_needs(
    config: Config,
    *,
    gpu: Gpu | None,
    packages: Mapping[str, str | None],
    is_preset: Callable[[str], bool],
    unfit: Mapping[str, str],
) -> Iterator[tuple[str, Any, str]]:
    """Yield (setting, value to use instead, reason) for each preset that this machine cannot follow.

    Raises MachineError for a value of the user, RequestError for one that needs a GPU with memory of its own. `gpu`
    None is the processor; `packages` maps the installed packages to their versions, `unfit` some of them to why they
    do not work with this torch.
    """
    values = by_key(config)
    for info in all_settings():
        key, instead = info.key, info.handling.works_anywhere
        if instead is None:
            continue
        value = values[key]
        # The kind of GPU comes first: a package would not help where the GPU cannot run it.
        refused = "" if gpu is None else gpu.can.against(key, value)
        lacking = _lacking_memory(info, value, gpu)
        package, fix = info.handling.packages.get(value), ""
        absent = _without_package(info, value, packages)
        if refused and gpu is not None:
            problem = f"does not work on {gpu.can.says}: {refused}"
        elif lacking:
            problem = f"needs {lacking}"
        elif (key, value) == ("memory.attention", "xformers") and gpu is None:
            problem = "needs a GPU"
        elif absent:
            needed = [info.handling.packages[one] for one in absent]
            verb = "is" if len(needed) == 1 else "are"
            problem = f"needs {' and '.join(needed)}, which {verb} not installed"
            fix = f"pip install {' '.join(needed)}"
        elif package and package in unfit:
            problem = f"does not work with the installed {package}: {unfit[package]}"
        else:
            continue
        if isinstance(value, tuple):
            instead = tuple(one for one in value if one not in absent)
        if is_preset(key) or (info.handling.is_wish and not refused):
            hint = f" ({fix})" if fix else ""
            value = ", ".join(absent) if isinstance(value, tuple) else value
            yield key, instead, f"instead of {value}, which {problem}{hint}"
            continue
        otherwise = f"use --set {key}={typed(instead)}"
        error = RequestError if lacking else MachineError
        raise error(
            f"{key}={typed(value)} {problem}", fix=f"{fix}, or {otherwise}" if fix else otherwise
        )


def _without_package(
    info: SettingInfo, value: Any, packages: Mapping[str, str | None]
) -> Sequence[Any]:
    """Return the value, or those of a list of values, whose package is not installed."""
    wanted = value if isinstance(value, tuple) else (value,)
    needed = {one: info.handling.packages[one] for one in wanted if one in info.handling.packages}
    return [one for one, package in needed.items() if packages.get(package) is None]


def _lacking_memory(info: SettingInfo, value: Any, gpu: Gpu | None) -> str:
    """Return what a value that needs a GPU with memory of its own lacks here, "" where it lacks nothing."""
    if not info.handling.own_memory or value in ("auto", 0):
        return ""
    if gpu is None:
        return "a GPU with memory of its own, but this run is on the processor"
    if not gpu.can.own_memory:
        return "a GPU with memory of its own, but this GPU shares the machine's memory"
    return ""
