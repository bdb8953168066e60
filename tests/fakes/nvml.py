"""A stand-in for the `pynvml` module: GPUs described as plain data, and failures call by call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    compute_pids: tuple[int, ...] = ()
    graphics_pids: tuple[int, ...] = ()
    busy_percent: dict[int, int] = field(default_factory=dict)
    refuses: dict[str, str] = field(default_factory=dict)


def _processes(pids: tuple[int, ...]) -> list[Any]:
    return [SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in pids]


def _utilization(card: FakeCard, since: int) -> list[Any]:
    if not card.busy_percent:
        raise FakeNvmlError("Not Found")  # as the driver does where nobody computes
    return [SimpleNamespace(pid=pid, smUtil=load) for pid, load in card.busy_percent.items()]


def _mig_mode(card: FakeCard) -> list[int]:
    if card.mig_slices is None:
        raise FakeNvmlError("Not Supported")
    return [1, 1]


def _mig_slice(card: FakeCard, index: int) -> FakeCard:
    slices = card.mig_slices or ()
    if index >= len(slices):
        raise FakeNvmlError("Not Found")
    return slices[index]


_OF_CARD: Mapping[str, Callable[..., Any]] = {
    "Name": lambda card: card.name,
    "UUID": lambda card: card.uuid,
    "MemoryInfo": lambda card: SimpleNamespace(total=card.total_bytes, free=card.free_bytes),
    "CudaComputeCapability": lambda card: card.capability,
    "ClockInfo": lambda card, kind: {1: card.clock_mhz}[kind],  # of the multiprocessors
    "Temperature": lambda card, sensor: {0: card.celsius}[sensor],
    "UtilizationRates": lambda card: SimpleNamespace(gpu=card.load_percent, memory=0),
    "PowerUsage": lambda card: card.milliwatts,
    "CurrentClocksThrottleReasons": lambda card: card.held_back,
    "ComputeRunningProcesses": lambda card: _processes(card.compute_pids),
    "GraphicsRunningProcesses": lambda card: _processes(card.graphics_pids),
    "ProcessUtilization": _utilization,
    "DisplayActive": lambda card: int(card.display),
    "MigMode": _mig_mode,
    "MaxMigDeviceCount": lambda card: 7,
    "MigDeviceHandleByIndex": _mig_slice,
}
"""What `nvmlDeviceGet...` answers of a GPU."""


@dataclass(kw_only=True)
class FakeNvml:
    """Answers like the driver for `cards`; `refuses` makes calls without a handle fail."""

    cards: tuple[FakeCard, ...] = ()
    driver: str = "570.86.15"
    refuses: dict[str, str] = field(default_factory=dict)
    NVMLError: type[Exception] = FakeNvmlError
    sessions: int = 0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return the call of a GPU; it has the name by which failures are reported."""
        answer = _OF_CARD.get(name.removeprefix("nvmlDeviceGet"))
        if answer is None:
            raise AttributeError(name)

        def call(card: FakeCard, *rest: Any) -> Any:
            self._check(name, card)
            return answer(card, *rest)

        call.__name__ = name
        return call

    def nvmlInit(self) -> None:
        self._check("nvmlInit")
        self.sessions += 1

    def nvmlShutdown(self) -> None:
        self._check("nvmlShutdown")
        self.sessions -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        self._check("nvmlSystemGetDriverVersion")
        return self.driver

    def nvmlDeviceGetCount(self) -> int:
        self._check("nvmlDeviceGetCount")
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int, /) -> FakeCard:
        self._check("nvmlDeviceGetHandleByIndex", self.cards[index])
        return self.cards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str, /) -> FakeCard:
        self._check("nvmlDeviceGetHandleByUUID")
        for card in self.cards:
            if card.uuid == uuid:
                return card
        raise FakeNvmlError("Not Found")

    def _check(self, call: str, card: FakeCard | None = None) -> None:
        refusals = {**self.refuses, **(card.refuses if card else {})}
        if call in refusals:
            raise FakeNvmlError(refusals[call])
