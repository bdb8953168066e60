"""A stand-in for the `pynvml` module: GPUs described as plain data, and failures call by call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

GIB = 2**30


class FakeNvmlError(Exception):
    """What the fake raises where pynvml would raise NVMLError."""


@dataclass(frozen=True, kw_only=True)
class FakeCard:
    """A GPU or a MIG slice. `refuses` names the NVML calls that fail on it, with what they say."""

    name: str = "NVIDIA GeForce RTX 3060"
    total_bytes: int = 12 * GIB
    free_bytes: int = 11 * GIB
    capability: tuple[int, int] = (8, 6)
    uuid: str = "GPU-aaaa"
    display: bool = False
    mig_slices: tuple[FakeCard, ...] | None = None
    clock_mhz: int = 1800
    celsius: int = 60
    load_percent: int = 0
    milliwatts: int = 15_000
    held_back: int = 0
    pcie: tuple[int, int] | None = None
    power_limit_milliwatts: int | None = None
    compute_pids: tuple[int, ...] = ()
    graphics_pids: tuple[int, ...] = ()
    busy_percent: dict[int, int] = field(default_factory=dict)
    refuses: dict[str, str] = field(default_factory=dict)


def _answer(card: FakeCard, name: str, *rest: Any) -> Any:
    """Return what `nvmlDeviceGet...` answers of a GPU."""
    plain = {
        "Name": card.name,
        "UUID": card.uuid,
        "MemoryInfo": SimpleNamespace(total=card.total_bytes, free=card.free_bytes),
        "CudaComputeCapability": card.capability,
        "UtilizationRates": SimpleNamespace(gpu=card.load_percent, memory=0),
        "PowerUsage": card.milliwatts,
        "CurrentClocksThrottleReasons": card.held_back,
        "ComputeRunningProcesses": [SimpleNamespace(pid=pid) for pid in card.compute_pids],
        "GraphicsRunningProcesses": [SimpleNamespace(pid=pid) for pid in card.graphics_pids],
        "DisplayActive": int(card.display),
        "MaxMigDeviceCount": 7,
    }
    if card.pcie is not None:
        plain |= {"MaxPcieLinkGeneration": card.pcie[0], "CurrPcieLinkWidth": card.pcie[1]}
    if card.power_limit_milliwatts is not None:
        plain["EnforcedPowerLimit"] = card.power_limit_milliwatts
    slices = card.mig_slices
    match name, *rest:
        case "ClockInfo", 1:  # of the multiprocessors
            return card.clock_mhz
        case "Temperature", 0:
            return card.celsius
        case "ProcessUtilization", _ if card.busy_percent:  # else "Not Found", as the driver says
            busy = card.busy_percent.items()
            return [SimpleNamespace(pid=pid, smUtil=load) for pid, load in busy]
        case ("MigMode",) if slices is not None or "A100" in card.name:  # others do not support it
            return [int(slices is not None)] * 2
        case "MigDeviceHandleByIndex", index if slices and index < len(slices):
            return slices[index]
    if name not in plain:
        raise FakeNvmlError("Not Found")
    return plain[name]


@dataclass(kw_only=True)
class FakeNvml:
    """Answers like the driver for `cards`; `refuses` makes calls without a handle fail."""

    cards: tuple[FakeCard, ...] = ()
    driver: str = "580.95.05"
    refuses: dict[str, str] = field(default_factory=dict)
    NVMLError: type[Exception] = FakeNvmlError
    sessions: int = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return a call of NVML; it has the name by which failures are reported."""
        if not name.startswith("nvml"):
            raise AttributeError(name)

        def call(*arguments: Any) -> Any:
            card, *rest = arguments or (None,)
            if name == "nvmlDeviceGetHandleByIndex":
                card = self.cards[arguments[0]]
            refusals = {**self.refuses, **(card.refuses if isinstance(card, FakeCard) else {})}
            if name in refusals:
                raise FakeNvmlError(refusals[name])
            match name:
                case "nvmlInit" | "nvmlShutdown":
                    self.sessions += 1 if name == "nvmlInit" else -1
                case "nvmlSystemGetDriverVersion":
                    return self.driver
                case "nvmlDeviceGetCount":
                    return len(self.cards)
                case "nvmlDeviceGetHandleByIndex":
                    return card
                case "nvmlDeviceGetHandleByUUID":
                    same = [each for each in self.cards if each.uuid == arguments[0]]
                    if not same:
                        raise FakeNvmlError("Not Found")
                    return same[0]
                case _:
                    return _answer(card, name.removeprefix("nvmlDeviceGet"), *rest)
            return None

        call.__name__ = name
        return call
