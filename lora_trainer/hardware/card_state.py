"""What GPUs do at this moment: load, clock, temperature, power, memory and who uses them.

Input is NVML, output plain numbers. Nothing raises: what the driver does not tell is None or empty. Only NVML
calls that all drivers of the last ten years have.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

from lora_trainer.hardware.nvml import Gpu, Nvml

_SM_CLOCK, _CORE_SENSOR = 1, 0
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class CardState:
    """State of a GPU at one moment; None or empty where the driver does not tell.

    `load_percent` is the share of the last moment in which it computed, `watts` its power. `users` are the
    numbers of processes on it, `busy_percent` the load by process; `held_back` are the driver's reasons for
    lower clocks, as bits.
    """

    total_bytes: int
    used_bytes: int
    load_percent: int | None = None
    clock_mhz: int | None = None
    celsius: int | None = None
    watts: float | None = None
    held_back: int = 0
    users: frozenset[int] = frozenset()
    busy_percent: Mapping[int, int] = field(default_factory=dict)


def card_state(gpu: Gpu, nvml: Nvml | None = None) -> CardState | None:
    """Return the driver's state of a GPU, None where the driver cannot be asked."""
    return _asked(lambda driver: _state(driver, driver.nvmlDeviceGetHandleByUUID(gpu.uuid)), nvml)


def card_states(nvml: Nvml | None = None) -> tuple[CardState, ...]:
    """Return the driver's state of each GPU by PCI bus; empty where the driver cannot be asked."""

    def states(driver: Any) -> tuple[CardState, ...]:
        numbers = range(driver.nvmlDeviceGetCount())
        return tuple(
            _state(driver, driver.nvmlDeviceGetHandleByIndex(number)) for number in numbers
        )

    return _asked(states, nvml) or ()


def _asked(question: Callable[[Any], T], nvml: Nvml | None) -> T | None:
    """Return the answer of NVML, started and ended for it: between looks nothing of the driver's is held."""
    try:
        driver: Any = nvml or importlib.import_module("pynvml")
        driver.nvmlInit()
    except Exception:  # noqa: BLE001 - no driver, no GPU, no package: nothing is known
        return None
    try:
        return question(driver)
    except (driver.NVMLError, OSError):
        return None
    finally:
        with suppress(driver.NVMLError, OSError):
            driver.nvmlShutdown()


def _state(nvml: Any, handle: Any) -> CardState:
    def ask(name: str, *arguments: Any) -> Any:
        try:
            return getattr(nvml, name)(handle, *arguments)
        except (nvml.NVMLError, OSError, AttributeError):  # not on this GPU, or in this release
            return None

    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    users = {
        int(process.pid)
        for name in (
            "nvmlDeviceGetComputeRunningProcesses",
            "nvmlDeviceGetGraphicsRunningProcesses",
        )
        for process in ask(name) or ()
    }
    busy = {
        int(sample.pid): int(sample.smUtil)
        for sample in ask("nvmlDeviceGetProcessUtilization", 0) or ()
    }
    load, milliwatts = ask("nvmlDeviceGetUtilizationRates"), ask("nvmlDeviceGetPowerUsage")
    return CardState(
        total_bytes=int(memory.total),
        used_bytes=int(memory.total) - int(memory.free),
        load_percent=None if load is None else int(load.gpu),
        clock_mhz=ask("nvmlDeviceGetClockInfo", _SM_CLOCK),
        celsius=ask("nvmlDeviceGetTemperature", _CORE_SENSOR),
        watts=None if milliwatts is None else milliwatts / 1000,
        held_back=ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0,
        users=frozenset(users),
        busy_percent=busy,
    )
