"""What this machine has, each fact with the reason for it; found without importing torch.

GPUs come from `nvml.py`; processor, memory and package versions from here. Nothing in here raises
because of what it finds: what cannot be known has a reason instead. Containers are respected: CPU
affinity, and the limits of control groups on processors and memory.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from lora_trainer.nvml import Gpu as Gpu
from lora_trainer.nvml import Nvml, find_gpus, number_by_bus

Tier = Literal["cpu", "6-8", "10-12", "16-24"]
GIB = 2**30
DISTRIBUTION = "lora-train"
PACKAGES = (
    "torch",
    "diffusers",
    "transformers",
    "accelerate",
    "peft",
    "safetensors",
    "bitsandbytes",
    "prodigyopt",
    "pytorch-optimizer",
    "schedulefree",
    "xformers",
    "triton",
    "tensorboard",
    "gradio",
)
# An assumed card is an ordinary one of the last years: it has bf16.
ASSUMED_CAPABILITY = (8, 6)
SPILL_MARGIN_BYTES = 256 * 2**20
"""Left for other programs where the driver spills: what they take later moves ours to the host."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Fact(Generic[T]):
    """A value and where it comes from."""

    value: T
    reason: str


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What was found; `reasons` says for each field how, `gpu_reason` also why there is no GPU."""

    gpus: tuple[Gpu, ...]
    gpu_reason: str
    cpu_name: str
    cpu_threads: int
    ram_total_bytes: int
    ram_free_bytes: int
    packages: Mapping[str, str | None]
    reasons: Mapping[str, str]

    def facts(self) -> dict[str, Fact[Any]]:
        """Return every field but the packages as a fact, for `doctor`."""
        found: dict[str, Fact[Any]] = {
            "gpus": Fact(value=tuple(gpu.name for gpu in self.gpus), reason=self.gpu_reason)
        }
        for name, reason in self.reasons.items():
            found[name] = Fact(value=getattr(self, name), reason=reason)
        return found

    def accelerator(self) -> Fact[Gpu | None]:
        """Return the GPU to train on, or None with the reason why it will be the processor."""
        if not self.gpus:
            return Fact(value=None, reason=self.gpu_reason)
        gpu, torch = self.gpus[0], self.packages.get("torch")
        if torch is not None and torch.endswith("+cpu") and not gpu.assumed:
            reason = f"torch {torch} is built without CUDA, so {gpu.name} cannot be used"
            return Fact(value=None, reason=f"{reason}; pip install torch from pytorch.org")
        return Fact(value=gpu, reason=f"{gpu.name}, {self.gpu_reason}")

    def disk_free_bytes(self, path: Path) -> int:
        """Return what is free where `path` is or will be made; raises OSError."""
        existing = next(
            folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists()
        )
        return shutil.disk_usage(existing).free


def hardware_from(values: Mapping[str, Any]) -> Hardware:
    """Return the hardware whose `asdict` was sent as JSON by another process."""
    gpus = []
    for gpu in values["gpus"]:
        capability = gpu["compute_capability"]
        gpus.append(Gpu(**{**gpu, "compute_capability": tuple(capability) if capability else None}))
    return Hardware(**{**values, "gpus": tuple(gpus)})


def detect(
    *,
    nvml: Nvml | None = None,
    environment: Mapping[str, str] | None = None,
    root: Path = Path("/"),
) -> Hardware:
    """Look at this machine; the arguments (`root` is that of /proc and /sys) are for tests.

    CUDA is told to number cards as they are found here, and has not started yet: torch is imported later.
    """
    if environment is None:
        number_by_bus(os.environ)
        environment = os.environ
    gpus, gpu_reason = find_gpus(nvml, environment)
    if driver_spills():
        gpus = tuple(replace(gpu, spills=True) for gpu in gpus)
    total, free = _memory(root)
    facts: dict[str, Fact[Any]] = {
        "cpu_name": _cpu_name(root),
        "cpu_threads": _cpu_threads(root),
        "ram_total_bytes": total,
        "ram_free_bytes": free,
    }
    return Hardware(
        gpus=gpus,
        gpu_reason=gpu_reason,
        packages={name: _version(name) for name in PACKAGES},
        reasons={name: fact.reason for name, fact in facts.items()},
        **{name: fact.value for name, fact in facts.items()},
    )


def driver_spills(*, system: str = sys.platform, release: str = platform.release()) -> bool:
    """Say whether this driver moves device memory to the host when a card is full, instead of refusing."""
    return system == "win32" or "microsoft" in release.lower()


def free_ram_bytes(root: Path = Path("/")) -> int:
    """Return the memory of the machine that is free now, or of the container."""
    _, free = _memory(root)
    return free.value


def assume_card(hardware: Hardware, *, vram_gib: float) -> Hardware:
    """Return this machine with one empty card of that size in place of its own (`plan --vram`)."""
    size = int(vram_gib * GIB)
    card = Gpu(
        index=0,
        name=f"an assumed {vram_gib:g} GiB card",
        total_bytes=size,
        free_bytes=size,
        compute_capability=ASSUMED_CAPABILITY,
        driver="",
        spills=any(gpu.spills for gpu in hardware.gpus),
        assumed=True,
    )
    return replace(hardware, gpus=(card,), gpu_reason="asked for with --vram, nothing else on it")


def package_notes(
    packages: Mapping[str, str | None], *, requirements: Iterable[str] | None = None
) -> dict[str, str]:
    """Return, by package, what is wrong with it: missing, or of a version that was not tried.

    `requirements` are those of this package unless given; a checkout that is not installed has none.
    """
    if requirements is None:
        requirements = _requirements()
    wanted = {(found := Requirement(text)).name: found.specifier for text in requirements}
    notes = {}
    for name, version in packages.items():
        allowed = wanted.get(name, SpecifierSet())
        if version is None:
            notes[name] = f"not installed: pip install {name}"
        elif not allowed.contains(version, prereleases=True):
            notes[name] = f'{allowed} is needed: pip install "{name}{allowed}"'
    return notes


def _requirements() -> Iterable[str]:
    try:
        return importlib.metadata.requires(DISTRIBUTION) or ()
    except importlib.metadata.PackageNotFoundError:
        return ()


def tier(total_bytes: int | None) -> Tier:
    """Return the preset tier of a card: its size in whole GiB up to 9, 10 to 15, 16 and more."""
    if total_bytes is None:
        return "cpu"
    rounded = int(total_bytes / GIB + 0.5)
    if rounded <= 9:
        return "6-8"
    return "10-12" if rounded <= 15 else "16-24"


def tier_problem(total_bytes: int | None) -> str:
    """Return what is wrong with the tier of a card below the smallest one, or the empty string."""
    if total_bytes is None or total_bytes >= 5.5 * GIB:
        return ""
    return (
        f"the card has {total_bytes / GIB:.1f} GiB, less than the smallest preset (6-8) is made for"
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name(root: Path) -> Fact[str]:
    for line in _read(root / "proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return Fact(value=line.partition(":")[2].strip(), reason="model name in /proc/cpuinfo")
    name = platform.processor() or platform.machine()
    return Fact(value=name, reason="named by the operating system")


def _cpu_threads(root: Path) -> Fact[int]:
    """Count usable physical cores: two threads on one core only get in each other's way."""
    allowed = _affinity()
    cores = _physical_cores(root, allowed)
    found = Fact(value=len(allowed), reason=f"{len(allowed)} processors may be used, cores unknown")
    if cores:
        found = Fact(
            value=cores, reason=f"{cores} physical cores among {len(allowed)} usable processors"
        )
    quota = _cpu_quota(root)
    if quota and quota < found.value:
        return Fact(value=max(1, int(quota)), reason=f"the container may use {quota:g} processors")
    return found


def _affinity() -> list[int]:
    process = psutil.Process()
    if hasattr(process, "cpu_affinity"):  # macOS has none
        return list(process.cpu_affinity())
    return list(range(psutil.cpu_count() or 1))


def _physical_cores(root: Path, processors: Iterable[int]) -> int:
    """Count distinct (package, core) pairs, else cap psutil's count of the machine; 0: unknown."""
    seen = set()
    for processor in processors:
        topology = root / f"sys/devices/system/cpu/cpu{processor}/topology"
        place = (_read(topology / "physical_package_id"), _read(topology / "core_id"))
        if not all(place):
            return min(psutil.cpu_count(logical=False) or 0, len(list(processors)))
        seen.add(place)
    return len(seen)


def _cpu_quota(root: Path) -> float | None:
    quota, _, period = _read(root / "sys/fs/cgroup/cpu.max").partition(" ")
    return int(quota) / int(period) if quota.isdigit() and period.strip().isdigit() else None


def _memory(root: Path) -> tuple[Fact[int], Fact[int]]:
    """Return total and free bytes, the smaller of the machine's and the container's."""
    machine = psutil.virtual_memory()
    total = Fact(value=int(machine.total), reason="memory of the machine")
    free = Fact(value=int(machine.available), reason="available without swapping")
    limit, used = (
        _read(root / "sys/fs/cgroup" / name) for name in ("memory.max", "memory.current")
    )
    if not (limit.isdigit() and int(limit) < total.value):
        return total, free
    left = max(0, int(limit) - int(used if used.isdigit() else 0))
    reason = f"the container may use {int(limit) / GIB:.1f} GiB"
    return Fact(value=int(limit), reason=reason), Fact(value=min(free.value, left), reason=reason)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
