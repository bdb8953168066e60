"""What this machine has, each fact with the reason for it; found without importing torch.

NVIDIA's GPUs come from `nvml.py`, those of other makers from the torch that was built for them, asked in
a process of its own; processor, memory and package versions from here. Nothing in here raises because of
what it finds: what cannot be known has a reason instead. Containers are respected: CPU affinity, and the
limits of control groups on processors and memory.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from lora_trainer import expandable_segments
from lora_trainer.devices import KINDS, TorchBuild, against_card, torch_build
from lora_trainer.nvml import Gpu as Gpu
from lora_trainer.nvml import Nvml, find_gpus, number_by_bus

Tier = Literal["cpu", "6-8", "10-12", "16-24"]
GIB = 2**30
DISTRIBUTION = "lora-train"
PURPOSES: Mapping[str, str] = {
    "torch": "computes everything",
    "diffusers": "the image models",
    "transformers": "the text encoders",
    "accelerate": "starts trainings on several GPUs",
    "peft": "reads LoRAs when images are drawn",
    "safetensors": "reads and writes model files",
    "bitsandbytes": "optional: less memory, by 8-bit optimizers and 4-bit base models",
    "prodigyopt": "optional: the optimizer Prodigy",
    "pytorch-optimizer": "optional: the optimizers Adafactor, CAME and Muon",
    "schedulefree": "optional: the optimizer Schedule-Free AdamW",
    "xformers": "optional: faster attention on some cards",
    "triton": "optional: compiled blocks on a card",
    "tensorboard": "optional: curves in TensorBoard",
    "gradio": "optional: the graphical interface",
}
"""Packages that are looked for, and what for."""
PACKAGES = tuple(PURPOSES)
# An assumed card is an ordinary one of the last years: it has bf16.
ASSUMED_CAPABILITY = (8, 6)
WSL_PINNABLE_BYTES = GIB // 2
"""What WSL2 lets a process pin: it was seen to refuse above 0.5 (microsoft/WSL#14078), 0.75 and 1 GiB."""
MOST_SPARED_BYTES = 4 * GIB
SPILL_MARGIN_BYTES = 600 * 2**20
"""Left for other programs where the driver spills: what they take later moves ours to the host, and the
budget that Windows gives a process is below what is free. ComfyUI keeps as much (`EXTRA_RESERVED_VRAM`)."""
LARGE_SPILL_MARGIN_BYTES = 700 * 2**20
"""From 15 GiB on, where others found 600 MiB too little (ComfyUI#9093)."""
DISPLAY_MARGIN_BYTES = 400 * 2**20
"""Left on a card with a screen elsewhere: a desktop and a browser grow."""
_ASK_TORCH = "import json; from lora_trainer.device_calls import found_by_torch; print(json.dumps(found_by_torch()))"
_ASKED_WITHIN_S = 120.0
_VENDORS = {"0x1002": ("AMD", "rocm"), "0x8086": ("Intel", "xpu")}
"""PCI vendors of GPUs that torch has other builds for. Intel's are told from those in processors by their
driver: `xe` and discrete memory are not known without torch, so only the build for them is asked."""
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Fact(Generic[T]):
    """A value and where it comes from."""

    value: T
    reason: str


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What was found; `reasons` says for each field how, `gpu_reason` also why there is no GPU.

    `torch` is what the installed torch is built for. `cards_chosen`: somebody, or a scheduler, shows this
    process only some cards (CUDA_VISIBLE_DEVICES).
    `expandable_segments`: PyTorch's allocator grows its segments in this environment.
    """

    gpus: tuple[Gpu, ...]
    gpu_reason: str
    cpu_name: str
    cpu_threads: int
    ram_total_bytes: int
    ram_free_bytes: int
    packages: Mapping[str, str | None]
    reasons: Mapping[str, str]
    torch: TorchBuild | None = None
    cards_chosen: bool = False
    expandable_segments: bool = False
    pinnable_bytes: int | None = None
    """What a process may pin of the machine's memory; None: the system sets no bound of its own."""

    @property
    def ram_usable_bytes(self) -> int:
        """Memory of the machine that a plan may use."""
        return usable_ram_bytes(total_bytes=self.ram_total_bytes, free_bytes=self.ram_free_bytes)

    def pinnable_by_each(self, *, sharing: int) -> int | None:
        """Return what each of `sharing` processes may pin."""
        return None if self.pinnable_bytes is None else self.pinnable_bytes // sharing

    def facts(self) -> dict[str, Fact[Any]]:
        """Return every field but the packages as a fact, for `doctor`."""
        found: dict[str, Fact[Any]] = {
            "gpus": Fact(value=tuple(gpu.name for gpu in self.gpus), reason=self.gpu_reason)
        }
        for name, reason in self.reasons.items():
            found[name] = Fact(value=getattr(self, name), reason=reason)
        return found

    def accelerator(self, *, sharing: int = 1) -> Fact[Gpu | None]:
        """Return the GPU to plan for, or None with the reason why it will be the processor.

        Of `sharing` processes on this machine it is the smallest card that takes part: all do equal work.
        """
        if not self.gpus:
            return Fact(value=None, reason=self.gpu_reason)
        usable = self.usable(sharing=sharing)
        if not usable:
            return Fact(value=None, reason=self.against(self.gpus[0]))
        taking_part = usable[:sharing]
        gpu = min(taking_part, key=lambda gpu: gpu.free_bytes)
        reason = f"{gpu.name}, {self.gpu_reason}"
        if len(taking_part) > 1:
            reason += f"; the smallest of the {len(taking_part)} that take part"
        elif len(self.gpus) > 1 and sharing == 1:
            reason += f"; GPU {gpu.index} is the best of them"
        on_one = -(-sharing // len(taking_part))
        if on_one > 1 and not self.cards_chosen:  # else each process may be shown one of its own
            reason += f"; {on_one} processes on each"
            gpu = replace(gpu, free_bytes=gpu.free_bytes // on_one)
        return Fact(value=gpu, reason=reason)

    def usable(self, *, sharing: int = 1) -> tuple[Gpu, ...]:
        """Return the GPUs that the installed torch can use, the best first.

        One process takes what has bf16 and most memory free. Several must agree on an order while they
        fill the cards, so that theirs follows from what does not change.
        """

        def rank(gpu: Gpu) -> tuple[bool, int, int]:
            size = gpu.free_bytes if sharing == 1 else gpu.total_bytes
            return gpu.has_bf16, size // GIB, -gpu.index

        found = [gpu for gpu in self.gpus if not self.against(gpu)]
        return tuple(sorted(found, key=rank, reverse=True))

    def against(self, gpu: Gpu) -> str:
        """Return why the installed torch cannot use a GPU, with the command to mend it; empty: it can."""
        build = self.build
        if build is None or gpu.assumed:
            return ""
        if build.kind != gpu.kind:
            missing = {"cuda": "CUDA", "rocm": "ROCm"}.get(gpu.kind, gpu.kind.upper())
            return (
                f"torch {build.version} is built without {missing}, so {gpu.name} cannot be used; "
                f"{gpu.can.install}"
            )
        return against_card(build, gpu.name, gpu.compute_capability)

    @property
    def build(self) -> TorchBuild | None:
        """What the installed torch is built for; None: not installed, or it does not say."""
        version = self.packages.get("torch")
        if version is None or self.torch is not None and version in self.torch.version:
            return self.torch
        local = version.partition("+")[2]
        for prefix, kind in (("cpu", "cpu"), ("rocm", "rocm"), ("xpu", "xpu"), ("cu", "cuda")):
            if local.startswith(prefix):
                toolkit = local.removeprefix(prefix)
                if kind == "cuda" and toolkit.isdigit():
                    toolkit = f"{toolkit[:-1]}.{toolkit[-1]}"
                return TorchBuild(version=version, kind=kind, toolkit=toolkit)  # type: ignore[arg-type]
        return None

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
    build = values["torch"] and TorchBuild(**values["torch"])
    return Hardware(**{**values, "gpus": tuple(gpus), "torch": build})


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
    build = torch_build()
    gpus, gpu_reason = find_gpus(nvml, environment)
    if not gpus:
        gpus, gpu_reason = _of_other_makers(build, gpu_reason, root)
    if driver_spills():
        gpus = tuple(replace(gpu, spills=True) for gpu in gpus)
    total, free = _memory(root)
    facts: dict[str, Fact[Any]] = {
        "cpu_name": _cpu_name(root),
        "cpu_threads": _cpu_threads(root),
        "ram_total_bytes": total,
        "ram_free_bytes": free,
        "pinnable_bytes": pinnable(total_bytes=total.value, root=root),
    }
    return Hardware(
        gpus=gpus,
        gpu_reason=gpu_reason,
        packages={name: _version(name) for name in PACKAGES},
        reasons={name: fact.reason for name, fact in facts.items()},
        torch=build,
        cards_chosen="CUDA_VISIBLE_DEVICES" in environment,
        expandable_segments=expandable_segments.in_force(environment, build=build),
        **{name: fact.value for name, fact in facts.items()},
    )


def _of_other_makers(
    build: TorchBuild | None, reason: str, root: Path
) -> tuple[tuple[Gpu, ...], str]:
    """Ask a torch that is built for other GPUs than NVIDIA's; else name a card that waits for such a build."""
    if build is not None and build.kind in ("rocm", "mps", "xpu"):
        try:
            answer = subprocess.run(
                [sys.executable, "-c", _ASK_TORCH],
                capture_output=True,
                timeout=_ASKED_WITHIN_S,
                check=True,
            ).stdout
            found = tuple(
                Gpu(**fields, compute_capability=None, driver=build.toolkit)
                for fields in json.loads(answer.splitlines()[-1])
            )
        except (OSError, subprocess.SubprocessError, ValueError, IndexError, TypeError) as error:
            return (), f"{build} cannot be asked for its GPUs: {type(error).__name__}"
        many = f"{len(found)} GPU{'s' if len(found) > 1 else ''}" if found else "no GPU"
        return found, f"{many} found by {build}"
    for maker, kind in sorted(_other_cards(root)):
        if kind == "rocm":
            return (), (
                f"there is a GPU of {maker}, for which torch has another build: "
                f"{KINDS['rocm'].install}"
            )
    return (), reason


def _other_cards(root: Path) -> set[tuple[str, str]]:
    """Return makers and kinds of the GPUs that Linux sees (/sys/class/drm) and NVML does not."""
    try:
        cards = list((root / "sys/class/drm").glob("card[0-9]*/device/vendor"))
    except OSError:
        return set()
    return {found for card in cards if (found := _VENDORS.get(_read(card)))}


def driver_spills(*, system: str = sys.platform, release: str = platform.release()) -> bool:
    """Say whether this driver moves device memory to the host when a card is full, instead of refusing."""
    return system == "win32" or "microsoft" in release.lower()


def is_wsl(root: Path = Path("/")) -> bool:
    """Say whether this Linux runs under Windows: its kernel says so, or the card is Windows' own."""
    kernel = _read(root / "proc/sys/kernel/osrelease") + _read(root / "proc/version")
    return "microsoft" in kernel.lower() or (root / "dev/dxg").exists()


def pinnable(
    *, total_bytes: int, system: str = sys.platform, root: Path = Path("/")
) -> Fact[int | None]:
    """Return how much of the machine's memory a process may pin for a card's copies, as far as is known.

    On Linux the driver pins what there is, whatever RLIMIT_MEMLOCK says: only plans bound it.
    """
    if system == "win32":
        return Fact(value=total_bytes // 2, reason="Windows lets cards use half of the memory")
    if is_wsl(root):
        return Fact(
            value=WSL_PINNABLE_BYTES, reason="WSL2 refuses to pin more than that or little more"
        )
    return Fact(value=None, reason="no bound but what is free")


def usable_ram_bytes(*, total_bytes: int, free_bytes: int) -> int:
    """Return what a plan may use of the free memory: all but a tenth of the machine's, 4 GiB at most.

    With less available, systems write pages out and watchdogs begin to end programs (earlyoom's default is
    a tenth); above 4 GiB a tenth is room that nobody needs.
    """
    return max(0, free_bytes - min(total_bytes // 10, MOST_SPARED_BYTES))


def spare_ram_bytes(root: Path = Path("/")) -> int:
    """Return the memory of the machine, or of the container, that can be used now."""
    total, free = _memory(root)
    return usable_ram_bytes(total_bytes=total.value, free_bytes=free.value)


def desktop_bytes(gpu: Gpu) -> int:
    """Return what is left on a card to other programs, which grow while the run goes on."""
    if gpu.spills:
        return spill_margin_bytes(gpu.total_bytes)
    return DISPLAY_MARGIN_BYTES if gpu.display else 0


def spill_margin_bytes(total_bytes: int) -> int:
    """Return what is left on a card of this size where the driver spills."""
    return LARGE_SPILL_MARGIN_BYTES if total_bytes > 15 * GIB else SPILL_MARGIN_BYTES


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


def is_optional(package: str) -> bool:
    """Whether trainings do without a package."""
    return PURPOSES.get(package, "").startswith("optional")


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
    allowed = usable_processors()
    cores = _physical_cores(root, allowed)
    found = Fact(value=len(allowed), reason=f"{len(allowed)} processors may be used, cores unknown")
    if cores:
        found = Fact(
            value=cores, reason=f"{cores} physical cores among {len(allowed)} usable processors"
        )
    quota = cpu_quota(root)
    if quota and quota < found.value:
        return Fact(value=max(1, int(quota)), reason=f"the container may use {quota:g} processors")
    return found


def usable_processors() -> list[int]:
    """Return the numbers of the logical processors this process may use."""
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


def cpu_quota(root: Path) -> float | None:
    """Return how many processors' time the container may use, None without such a limit."""
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
