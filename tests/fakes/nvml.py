"""A stand-in for the `pynvml` module: GPUs described as plain data, and failures call by call."""

from __future__ import annotations

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


@dataclass(kw_only=True)
class FakeNvml:
    """Answers like the driver for `cards`; `refuses` makes calls without a handle fail."""

    cards: tuple[FakeCard, ...] = ()
    driver: str = "570.86.15"
    refuses: dict[str, str] = field(default_factory=dict)
    NVMLError: type[Exception] = FakeNvmlError
    sessions: int = 0

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

    def nvmlDeviceGetName(self, handle: FakeCard, /) -> str:
        self._check("nvmlDeviceGetName", handle)
        return handle.name

    def nvmlDeviceGetUUID(self, handle: FakeCard, /) -> str:
        self._check("nvmlDeviceGetUUID", handle)
        return handle.uuid

    def nvmlDeviceGetMemoryInfo(self, handle: FakeCard, /) -> Any:
        self._check("nvmlDeviceGetMemoryInfo", handle)
        return SimpleNamespace(total=handle.total_bytes, free=handle.free_bytes)

    def nvmlDeviceGetCudaComputeCapability(self, handle: FakeCard, /) -> tuple[int, int]:
        self._check("nvmlDeviceGetCudaComputeCapability", handle)
        return handle.capability

    def nvmlDeviceGetHandleByUUID(self, uuid: str, /) -> FakeCard:
        self._check("nvmlDeviceGetHandleByUUID")
        for card in self.cards:
            if card.uuid == uuid:
                return card
        raise FakeNvmlError("Not Found")

    def nvmlDeviceGetClockInfo(self, handle: FakeCard, kind: int, /) -> int:
        self._check("nvmlDeviceGetClockInfo", handle)
        assert kind == 1, "of the multiprocessors"
        return handle.clock_mhz

    def nvmlDeviceGetTemperature(self, handle: FakeCard, sensor: int, /) -> int:
        self._check("nvmlDeviceGetTemperature", handle)
        assert sensor == 0, "there is one only"
        return handle.celsius

    def nvmlDeviceGetUtilizationRates(self, handle: FakeCard, /) -> Any:
        self._check("nvmlDeviceGetUtilizationRates", handle)
        return SimpleNamespace(gpu=handle.load_percent, memory=0)

    def nvmlDeviceGetPowerUsage(self, handle: FakeCard, /) -> int:
        self._check("nvmlDeviceGetPowerUsage", handle)
        return handle.milliwatts

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: FakeCard, /) -> int:
        self._check("nvmlDeviceGetCurrentClocksThrottleReasons", handle)
        return handle.held_back

    def nvmlDeviceGetComputeRunningProcesses(self, handle: FakeCard, /) -> list[Any]:
        self._check("nvmlDeviceGetComputeRunningProcesses", handle)
        return [SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in handle.compute_pids]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: FakeCard, /) -> list[Any]:
        self._check("nvmlDeviceGetGraphicsRunningProcesses", handle)
        return [SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in handle.graphics_pids]

    def nvmlDeviceGetProcessUtilization(self, handle: FakeCard, since: int, /) -> list[Any]:
        self._check("nvmlDeviceGetProcessUtilization", handle)
        if not handle.busy_percent:
            raise FakeNvmlError("Not Found")  # as the driver does where nobody computes
        return [
            SimpleNamespace(pid=pid, smUtil=percent) for pid, percent in handle.busy_percent.items()
        ]

    def nvmlDeviceGetDisplayActive(self, handle: FakeCard, /) -> int:
        self._check("nvmlDeviceGetDisplayActive", handle)
        return int(handle.display)

    def nvmlDeviceGetMigMode(self, handle: FakeCard, /) -> list[int]:
        self._check("nvmlDeviceGetMigMode", handle)
        if handle.mig_slices is None:
            raise FakeNvmlError("Not Supported")
        return [1, 1]

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: FakeCard, /) -> int:
        self._check("nvmlDeviceGetMaxMigDeviceCount", handle)
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: FakeCard, index: int, /) -> FakeCard:
        slices = handle.mig_slices or ()
        if index >= len(slices):
            raise FakeNvmlError("Not Found")
        return slices[index]

    def _check(self, call: str, card: FakeCard | None = None) -> None:
        refusals = {**self.refuses, **(card.refuses if card else {})}
        if call in refusals:
            raise FakeNvmlError(refusals[call])
