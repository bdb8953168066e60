"""NVIDIA GPUs as NVML describes them: which there are, and what each does at this moment; no torch, no exceptions.

Each call of NVML may fail by itself (no driver, broken driver, GPU lost, not supported); the failure becomes
part of the reason. The list matches CUDA's: CUDA_VISIBLE_DEVICES picks and orders the GPUs, and a GPU split
by MIG appears as its slices, because programs can use only slices. GPUs are numbered by PCI bus,
and `CUDA_ORDER` makes CUDA use the same order.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

from lora_trainer.hardware.devices import KINDS, DeviceKind, KindName

CUDA_ORDER, BY_BUS = "CUDA_DEVICE_ORDER", "PCI_BUS_ID"
_INIT_FAILURES = {
    "Shared Library Not Found": "no NVIDIA driver (libnvidia-ml.so.1 not found)",
    "Driver Not Loaded": "the NVIDIA driver is installed but not loaded",
    "mismatch": "the NVIDIA driver was updated but the old one still runs: restart the machine",
}


# The module `pynvml`, or an object with its functions; its handles are opaque.
Nvml = Any


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU, or one MIG slice."""

    index: int
    """The number that CUDA gives it."""
    name: str
    total_bytes: int
    free_bytes: int
    compute_capability: tuple[int, int] | None
    """None if unknown."""
    driver: str
    uuid: str = ""
    spills: bool = False
    """Whether its driver moves memory to the host when it is full."""
    display: bool = False
    """Whether a screen or an X server uses it."""
    assumed: bool = False
    kind: KindName = "cuda"
    bf16: bool | None = None
    """Whether it computes bfloat16 in hardware; None: derived from the capability."""
    pcie: tuple[int, int] = (0, 0)
    """Generation and lanes of its slot; 0 if unknown."""
    watts: float | None = None
    """Its power limit."""
    busy_fraction: float = 0.0
    """Share of the last moment in which programs computed on it; 0 if unknown."""

    @property
    def can(self) -> DeviceKind:
        """The capabilities of this kind of GPU."""
        return KINDS[self.kind]

    @property
    def has_bf16(self) -> bool:
        """Whether it computes bfloat16 in hardware, as NVIDIA's GPUs do from Ampere (8.0) on."""
        if self.bf16 is not None:
            return self.bf16
        return self.compute_capability is not None and self.compute_capability >= (8, 0)

    def computes(self, precision: str) -> bool:
        """Return whether it computes a precision itself, or emulates it through fp32: correct, but slow."""
        return precision != "bf16" or self.has_bf16

    @property
    def capability(self) -> str:
        """The CUDA compute capability in words."""
        if self.compute_capability is None:
            return "an unknown compute capability"
        return "compute capability {}.{}".format(*self.compute_capability)


class _NoAnswer(Exception):
    """NVML cannot be asked; the message says why."""


@contextmanager
def _asking(nvml: Nvml | None, failures: list[str] | None = None) -> Iterator[Callable[..., Any]]:
    """Start NVML for a block, which calls its functions by their names; no driver is held after it.

    Yields a function that returns an answer of NVML, None where the call fails. With `about` the failure is added
    to `failures`, once: many GPUs do not support the other calls. Raises _NoAnswer.
    """
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            raise _NoAnswer(
                "the package nvidia-ml-py is not installed, so NVIDIA GPUs cannot be seen"
            ) from None
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError, OSError) as error:
        reasons = (reason for part, reason in _INIT_FAILURES.items() if part in str(error))
        raise _NoAnswer(next(reasons, f"NVML failed to start: {error}")) from None

    def ask(name: str, *arguments: Any, about: str = "") -> Any:
        call = getattr(nvml, name, None)
        try:
            if call is not None:
                return call(*arguments)
            failure = f"{about}: this release of pynvml lacks {name}"
        except (nvml.NVMLError, OSError) as error:
            failure = f"{about}: {name} said {str(error) or type(error).__name__}"
        if about and failures is not None and failure not in failures:
            failures.append(failure)
        return None

    try:
        yield ask
    finally:
        ask("nvmlShutdown")


def find_gpus(nvml: Nvml | None, environment: Mapping[str, str]) -> tuple[tuple[Gpu, ...], str]:
    """Return the GPUs that CUDA would list, and a sentence on their source or on why there is none."""
    failures = list[str]()
    try:
        with _asking(nvml, failures) as ask:
            count = ask("nvmlDeviceGetCount", about="NVML") or 0
            driver = str(ask("nvmlSystemGetDriverVersion", about="NVML") or "")
            cards = [gpu for index in range(count) for gpu in _cards(ask, index, driver, failures)]
    except _NoAnswer as error:
        return (), str(error)
    chosen, visible = cards, environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        chosen = []
        # CUDA's rule: numbers or starts of UUIDs, ending at the first token without a GPU.
        for token in map(str.strip, visible.split(",")):
            is_uuid = token.startswith(("GPU-", "MIG-"))
            matches = [
                gpu
                for gpu in cards
                if (is_uuid and gpu.uuid.startswith(token))
                or (token.isdigit() and gpu.index == int(token))
            ]
            if not matches:
                break
            chosen.append(matches[0])
    gpus = tuple(replace(gpu, index=index) for index, gpu in enumerate(chosen))
    sentences = [
        f"{len(gpus)} of {len(cards)} NVIDIA GPUs usable" if cards else "no NVIDIA GPU found"
    ]
    if driver:
        sentences.append(f"driver {driver}")
    if visible is not None and len(chosen) < len(cards):
        sentences.append(f"CUDA_VISIBLE_DEVICES={visible!r} hides the others")
    if len({gpu.name for gpu in gpus}) > 1 and environment.get(CUDA_ORDER) != BY_BUS:
        sentences.append(
            f"GPUs differ and CUDA may order them otherwise: set {CUDA_ORDER}={BY_BUS}"
        )
    return gpus, "; ".join([*sentences, *failures])


def _cards(ask: Callable[..., Any], index: int, driver: str, failures: list[str]) -> Iterator[Gpu]:
    """Yield GPU `index`, or its MIG slices; nothing if its memory is unknown."""
    about = f"GPU {index}"
    handle = ask("nvmlDeviceGetHandleByIndex", index, about=about)
    if handle is None:
        return
    capability = ask("nvmlDeviceGetCudaComputeCapability", handle, about=about)
    devices, mode = [handle], ask("nvmlDeviceGetMigMode", handle)
    if mode and mode[0]:  # programs can use only slices; without an answer MIG counts as off
        most = ask("nvmlDeviceGetMaxMigDeviceCount", handle, about=about) or 0
        slices = (
            ask("nvmlDeviceGetMigDeviceHandleByIndex", handle, number) for number in range(most)
        )
        devices = [device for device in slices if device is not None]
        if not devices:
            failures.append(f"{about} is in MIG mode and has no slices to compute on")
    for device in devices:
        memory = ask("nvmlDeviceGetMemoryInfo", device, about=about)
        if memory is None:
            continue
        yield Gpu(
            index=index,
            name=ask("nvmlDeviceGetName", device, about=about) or "NVIDIA GPU",
            total_bytes=int(memory.total),
            free_bytes=int(memory.free),
            compute_capability=(int(capability[0]), int(capability[1])) if capability else None,
            driver=driver,
            display=bool(ask("nvmlDeviceGetDisplayActive", device)),
            uuid=ask("nvmlDeviceGetUUID", device) or "",
            pcie=_slot(ask, handle),
            watts=None
            if (limit := ask("nvmlDeviceGetEnforcedPowerLimit", handle)) is None
            else limit / 1000,
            busy_fraction=0.0
            if (load := ask("nvmlDeviceGetUtilizationRates", device)) is None
            else load.gpu / 100,
        )


def _slot(ask: Callable[..., Any], handle: Any) -> tuple[int, int]:
    """Return generation and lanes of a GPU's slot, 0 where they are not told.

    An idle GPU lowers the generation, so the most that GPU and machine can is asked for; a riser or an external case
    lowers the lanes for good.
    """
    generation = ask("nvmlDeviceGetMaxPcieLinkGeneration", handle) or 0
    lanes = ask("nvmlDeviceGetCurrPcieLinkWidth", handle)
    return int(generation), int(lanes or ask("nvmlDeviceGetMaxPcieLinkWidth", handle) or 0)


# ---- what GPUs do at this moment


# Bits of `held_back`: the software's and the hardware's limit of heat.
TOO_HOT = 0x20 | 0x40


@dataclass(frozen=True, kw_only=True)
class CardState:
    """State of a GPU at one moment; None or empty if the driver does not tell."""

    total_bytes: int
    used_bytes: int
    load_percent: int | None = None
    """Share of the last moment in which it computed."""
    clock_mhz: int | None = None
    celsius: int | None = None
    watts: float | None = None
    """Its power."""
    held_back: int = 0
    """The driver's reasons for lower clocks, as bits."""
    slows_at_celsius: int | None = None
    """The heat at which it lowers its clock."""
    users: frozenset[int] = frozenset()
    """Numbers of the processes on it."""
    busy_percent: Mapping[int, int] = field(default_factory=dict)
    """Load by process."""


def card_state(gpu: Gpu, nvml: Nvml | None = None) -> CardState | None:
    """Return the driver's state of a GPU, None where the driver cannot be asked."""
    with suppress(_NoAnswer), _asking(nvml) as ask:
        return _state(ask, ask("nvmlDeviceGetHandleByUUID", gpu.uuid))
    return None


def card_states(nvml: Nvml | None = None) -> tuple[CardState, ...]:
    """Return the driver's state of each GPU by PCI bus; empty where the driver cannot be asked."""
    with suppress(_NoAnswer), _asking(nvml) as ask:
        indices = range(ask("nvmlDeviceGetCount") or 0)
        handles = [ask("nvmlDeviceGetHandleByIndex", index) for index in indices]
        states = [_state(ask, handle) for handle in handles]
        return tuple(state for state in states if state is not None)
    return ()


def _state(ask: Callable[..., Any], handle: Any) -> CardState | None:
    memory = None if handle is None else ask("nvmlDeviceGetMemoryInfo", handle)
    if memory is None:
        return None
    processes = [
        *(ask("nvmlDeviceGetComputeRunningProcesses", handle) or ()),
        *(ask("nvmlDeviceGetGraphicsRunningProcesses", handle) or ()),
    ]
    load = ask("nvmlDeviceGetUtilizationRates", handle)
    milliwatts = ask("nvmlDeviceGetPowerUsage", handle)
    return CardState(
        total_bytes=int(memory.total),
        used_bytes=int(memory.total) - int(memory.free),
        load_percent=None if load is None else int(load.gpu),
        clock_mhz=ask("nvmlDeviceGetClockInfo", handle, 1),  # of the multiprocessors
        celsius=ask("nvmlDeviceGetTemperature", handle, 0),
        watts=None if milliwatts is None else milliwatts / 1000,
        held_back=ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle) or 0,
        slows_at_celsius=ask("nvmlDeviceGetTemperatureThreshold", handle, 1),
        users=frozenset(int(process.pid) for process in processes),
        busy_percent={
            int(sample.pid): int(sample.smUtil)
            for sample in ask("nvmlDeviceGetProcessUtilization", handle, 0) or ()
        },
    )
