"""The hardware and packages of this machine, each fact with its source; detected without importing torch.

NVIDIA's GPUs come from `nvml.py`; GPUs of other makers from a torch built for them, which runs in a
separate process; processor, memory and package versions from here. Detection never raises: an unknown fact
has a reason instead of a value. Containers are respected: CPU affinity, and the limits of control groups on
processors and memory.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from lora_trainer.common.wording import GIB as GIB
from lora_trainer.hardware.control_groups import memory_limits, processors
from lora_trainer.hardware.dashboards import PACKAGE_OF
from lora_trainer.hardware.devices import (
    SEGMENTS,
    TorchBuild,
    allocator_settings,
    grows_segments,
    is_under_windows,
    torch_build,
)
from lora_trainer.hardware.kept_memory import keeper
from lora_trainer.hardware.nvml import BY_BUS, CUDA_ORDER, Gpu, Nvml, find_gpus
from lora_trainer.hardware.torch_builds import (
    FOLDERS,
    TORCH,
    is_too_old,
    needed_driver,
    other_build,
    reinstall,
)

Tier = Literal["cpu", "6-8", "10-12", "16-24"]
# Package -> its purpose, for `doctor`.
PURPOSES: Mapping[str, str] = tomllib.loads(
    Path(__file__).with_name("packages.toml").read_text(encoding="utf-8")
)
PACKAGES = tuple(PURPOSES)
# The torch that the newest xformers (0.0.35, cpp_lib.json) was built for: for another it is not advised.
XFORMERS_TORCH = (2, 10)
# An assumed GPU (`plan --vram`) is Ampere, which has bf16.
ASSUMED_CAPABILITY = (8, 6)
MAXWELL, VOLTA, TURING, BLACKWELL = (5, 0), (7, 0), (7, 5), (10, 0)
# CUDA builds since 12.8 support Turing (Volta until torch 2.10) to Blackwell; builds of 12.6 support Maxwell to Hopper
# (pytorch's RELEASE.md, "CUDA Support Matrix"; pytorch#157517, #172352).
BLACKWELL_TOOLKIT = (12, 8)
# Memory a process may pin under WSL2: refusals were seen above 0.5 (microsoft/WSL#14078), 0.75 and 1 GiB.
WSL_PINNABLE_BYTES = GIB // 2
# Memory left to other programs where the driver spills: memory they take later moves ours to the host, and Windows'
# budget for a process is below the free memory. ComfyUI leaves as much (`EXTRA_RESERVED_VRAM`).
SPILL_MARGIN_BYTES = 600 * 2**20
# Above 15 GiB, where 600 MiB proved too little (ComfyUI#9093).
LARGE_SPILL_MARGIN_BYTES = 700 * 2**20
# Memory left on a GPU with a display where the driver does not spill: a desktop and a browser grow.
DISPLAY_MARGIN_BYTES = 400 * 2**20
_ASK_TORCH = (
    "import json; from lora_trainer.hardware.device_calls import found_by_torch; "
    "print(json.dumps(found_by_torch()))"
)
# PCI vendor of GPUs that need another build of torch. A discrete Intel GPU and one inside a processor look the same
# without torch, so no other build is suggested for Intel.
_AMD = "0x1002"
# Below this load of the last minute nobody looks for so long how busy the processors are now.
_LEAST_LOAD, _LOOK_S = 0.3, 0.1
# Linux gives a program about ten times as much as one under `nice` (nice 10), where both want a processor.
NICE_WEIGHT = 10.0


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """The detected hardware."""

    gpus: tuple[Gpu, ...]
    gpu_reason: str
    """Source of `gpus`, or why there is no GPU."""
    cpu_name: str
    cpu_threads: int
    ram_total_bytes: int
    ram_free_bytes: int
    packages: Mapping[str, str | None]
    reasons: Mapping[str, str]
    """Each field's source."""
    torch: TorchBuild | None = None
    """The installed torch's build."""
    cards_chosen: bool = False
    """Whether CUDA_VISIBLE_DEVICES is set, so that this process may see only some of the GPUs."""
    expandable_segments: bool = False
    """Whether PyTorch's allocator grows its segments in this environment."""
    # Package -> why the installed one does not work with this torch.
    unfit: Mapping[str, str] = field(default_factory=dict)
    # Memory a process may pin; None: the system sets no limit.
    pinnable_bytes: int | None = None
    # The logical processors that may be used, and how many of them other programs keep busy.
    processors: int = 0
    busy_processors: float = 0.0

    @property
    def usable_ram_bytes(self) -> int:
        """The free memory that a plan may use: less a margin, which plan, doctor and pages name alike."""
        return usable_ram_bytes(total_bytes=self.ram_total_bytes, free_bytes=self.ram_free_bytes)

    def accelerator(self, *, sharing: int = 1) -> tuple[Gpu | None, str]:
        """Return the GPU to plan for, None for the processor, and the reason.

        For `sharing` processes on this machine it is the smallest participating GPU, because all processes
        do equal work.
        """
        if not self.gpus:
            return None, self.gpu_reason
        usable = self.usable(sharing=sharing)
        if not usable:
            return None, ": ".join(self.against(self.gpus[0]))
        taking_part = usable[:sharing]
        gpu = min(taking_part, key=lambda gpu: gpu.free_bytes)
        reason = f"{gpu.name}, {self.gpu_reason}"
        if len(taking_part) > 1:
            reason += f"; the smallest of the {len(taking_part)} GPUs in this run"
        elif len(self.gpus) > 1 and sharing == 1:
            reason += f"; GPU {gpu.index} is the best of them"
        on_one = -(-sharing // len(taking_part))
        # With CUDA_VISIBLE_DEVICES a scheduler may show each process a GPU of its own.
        if on_one > 1 and not self.cards_chosen:
            reason += f"; {on_one} processes on each"
            gpu = replace(gpu, free_bytes=gpu.free_bytes // on_one)
        return gpu, reason

    def usable(self, *, sharing: int = 1) -> tuple[Gpu, ...]:
        """Return the GPUs that the installed torch can use, the best first.

        A single process prefers bf16, then free memory. Several processes must agree on one order while
        they allocate, so they sort by total memory, which does not change.
        """

        def rank(gpu: Gpu) -> tuple[bool, int, int]:
            size = gpu.free_bytes if sharing == 1 else gpu.total_bytes
            # Whole GiB: a few MiB in use must not put the second of two equal GPUs first.
            return gpu.has_bf16, size // GIB, -gpu.index

        gpus = [gpu for gpu in self.gpus if not any(self.against(gpu))]
        return tuple(sorted(gpus, key=rank, reverse=True))

    def against(self, gpu: Gpu) -> tuple[str, str]:
        """Return why the installed torch cannot use a GPU, and what helps; two empty texts if it can."""
        build = self.torch
        if build is None or gpu.assumed:
            return "", ""
        if build.kind != gpu.kind:
            missing = {"cuda": "CUDA", "rocm": "ROCm"}.get(gpu.kind, gpu.kind.upper())
            found = (
                f"torch {build.version} is built without {missing}, so {gpu.name} cannot be used"
            )
            return found, torch_for(gpu)
        if build.kind != "cuda" or not build.toolkit:
            return "", ""
        if gpu.compute_capability and _lacks_kernels(gpu.compute_capability, build.toolkit):
            found = f"{gpu.name} has {gpu.capability}, for which {build}, has no kernels"
            return found, torch_for(gpu)
        needed = needed_driver(build.toolkit)
        if is_too_old(gpu.driver, needed=needed):
            found = f"{gpu.name} has driver {gpu.driver}, and {build}, needs {needed} or newer"
            other = torch_for(gpu)
            cure = "update NVIDIA's driver"
            return found, f"{cure}, or {other}" if other.startswith("pip ") else cure
        return "", ""

    def disk_free_bytes(self, path: Path) -> int:
        """Return the free bytes of the disk on which `path` is or will be created; raises OSError."""
        existing = next(
            folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists()
        )
        return shutil.disk_usage(existing).free


def torch_for(gpu: Gpu) -> str:
    """Return the command that installs a torch for a GPU, else a sentence on why there is none."""
    if gpu.kind == "cuda":
        known = [] if gpu.compute_capability is None else [gpu.compute_capability]
        return other_build(known, gpu.driver)
    folder = next(iter(FOLDERS[gpu.kind]), "")
    return reinstall(folder) if folder else f"pip install {TORCH}"


def _lacks_kernels(capability: tuple[int, int], toolkit: str) -> bool:
    """Return whether a build for this CUDA, of any torch that is accepted, lacks a GPU's kernels."""
    try:
        release = Version(toolkit).release
    except InvalidVersion:  # of a build of one's own
        return False
    if release < BLACKWELL_TOOLKIT:
        return capability < MAXWELL or capability >= BLACKWELL
    # Some CUDA 12.8 and 12.9 builds still have kernels for Volta: `require_kernels` asks torch itself.
    return capability < (TURING if release >= (13, 0) else VOLTA)


def detect(
    *,
    nvml: Nvml | None = None,
    environment: Mapping[str, str] | None = None,
    root: Path = Path("/"),
) -> Hardware:
    """Detect this machine's hardware; the arguments (`root` is that of /proc and /sys) are for tests.

    Sets CUDA's device order to NVML's. This works because CUDA starts later, when torch is imported.
    """
    if environment is None:
        # By default CUDA numbers the fastest GPU 0, so a run would be planned for one GPU and train on another.
        os.environ.setdefault(CUDA_ORDER, BY_BUS)
        environment = os.environ
    build = torch_build()
    gpus, gpu_reason = find_gpus(nvml, environment)
    if not gpus:
        gpus, gpu_reason = _of_other_makers(build, gpu_reason, root)
    if driver_spills():
        gpus = tuple(replace(gpu, spills=True) for gpu in gpus)
    total, free = _memory(root, environment)
    if (kept := keeper()) is not None:
        # A training gets it back before it measures anything.
        ram_bytes = kept.ram_bytes
        free = free[0] + ram_bytes, f"{free[1]}, with {ram_bytes / GIB:.1f} GiB that pictures keep"
        gpus = tuple(
            replace(gpu, free_bytes=min(gpu.total_bytes, gpu.free_bytes + kept.gpu_bytes))
            if gpu.uuid and gpu.uuid == kept.gpu_uuid
            else gpu
            for gpu in gpus
        )
    # On Linux the driver ignores RLIMIT_MEMLOCK and pins any free memory, so only plans limit it.
    pinnable: tuple[int | None, str] = None, "no limit but the free memory"
    if sys.platform == "win32":
        pinnable = total[0] // 2, "Windows lets GPUs use half of the memory"
    elif is_under_windows(root):
        pinnable = WSL_PINNABLE_BYTES, "WSL2 refuses to pin more than about this much"
    settings = dict(
        part.replace(" ", "").split(":", 1)
        for part in allocator_settings(environment).split(",")
        if ":" in part
    )
    facts: dict[str, tuple[Any, str]] = {
        "cpu_name": _cpu_name(root),
        "cpu_threads": _cpu_threads(root),
        "ram_total_bytes": total,
        "ram_free_bytes": free,
        "pinnable_bytes": pinnable,
    }
    return Hardware(
        gpus=gpus,
        gpu_reason=gpu_reason,
        packages=_versions(),
        reasons={name: reason for name, (_, reason) in facts.items()},
        torch=build,
        unfit={"xformers": problem} if (problem := xformers_problem(build)) else {},
        cards_chosen="CUDA_VISIBLE_DEVICES" in environment,
        expandable_segments=grows_segments(build) and settings.get(SEGMENTS) == "True",
        processors=len(usable_processors()),
        busy_processors=busy_processors(),
        **{name: value for name, (value, _) in facts.items()},
    )


def busy_processors() -> float:
    """Return how many processors other programs keep busy, 0 if unknown: what they did in the last minute and still do.

    A training that has just ended is in the average of the minute for long. Programs that give way (`nice`) count as
    much as the system gives them beside a program that does not.
    """
    try:
        lately = float(psutil.getloadavg()[0])
        if lately < _LEAST_LOAD:
            return 0.0
        busy, nice = _shares_now()
    except OSError:
        return 0.0
    processors = float(psutil.cpu_count() or 1)
    if busy == 0:
        return 0.0
    # Programs that wait for a processor are in the average, but cannot be seen in what the processors do.
    goes_on = min(1.0, busy * processors / min(lately, processors))
    # Of n programs that give way and m others that always want a processor, the first get n / NICE_WEIGHT of what the
    # others get for m: the shares tell n and m, and with them what all of them take from one more.
    nice_share = min(1.0, nice / busy)
    return lately * goes_on / (1 - nice_share + NICE_WEIGHT * nice_share)


def _shares_now() -> tuple[float, float]:
    """Return the shares of the processors' time that programs take now, and those of them that give way.

    psutil's own percentages are of a second at least, so they are too small for a shorter look.
    """
    before = psutil.cpu_times()
    time.sleep(_LOOK_S)
    after = psutil.cpu_times()
    # Times of guests are also in those of users.
    passed_s = {
        name: max(0.0, getattr(after, name) - getattr(before, name))
        for name in after._fields
        if not name.startswith("guest")
    }
    all_s = sum(passed_s.values())
    if all_s == 0:
        return 0.0, 0.0
    idle_s = passed_s["idle"] + passed_s.get("iowait", 0.0)
    return 1 - idle_s / all_s, passed_s.get("nice", 0.0) / all_s


def _of_other_makers(
    build: TorchBuild | None, reason: str, root: Path
) -> tuple[tuple[Gpu, ...], str]:
    """Return the GPUs seen by a torch built for other makers' GPUs, else suggest the build for an AMD GPU."""
    if build is not None and build.kind in ("rocm", "mps", "xpu"):
        try:
            # In a process of its own, because commands that only plan must not import torch.
            answer = subprocess.run(
                [sys.executable, "-c", _ASK_TORCH], capture_output=True, timeout=120, check=True
            ).stdout
            gpus = tuple(
                Gpu(**fields, compute_capability=None, driver=build.toolkit)
                for fields in json.loads(answer.splitlines()[-1])
            )
        except (OSError, subprocess.SubprocessError, ValueError, IndexError, TypeError) as error:
            return (), f"{build} cannot be asked for its GPUs: {type(error).__name__}"
        many = f"{len(gpus)} GPU{'s' if len(gpus) > 1 else ''}" if gpus else "no GPU"
        return gpus, f"{many} found by {build}"
    vendors = map(_read, (root / "sys/class/drm").glob("card[0-9]*/device/vendor"))
    if _AMD in vendors:
        needs = f"which needs another build of torch: {reinstall(FOLDERS['rocm'][0])}"
        return (), f"there is a GPU of AMD, {needs}"
    return (), reason


def driver_spills() -> bool:
    """Return whether the driver moves GPU memory to the host when the GPU is full, instead of refusing."""
    return sys.platform == "win32" or is_under_windows()


def usable_ram_bytes(*, total_bytes: int, free_bytes: int) -> int:
    """Return the free memory that a plan may use: all but a tenth of the total, spared up to 4 GiB.

    With less than a tenth available, systems begin to swap and watchdogs to kill programs (earlyoom's
    default limit). On large machines a tenth would be more than other programs need, hence the 4 GiB.
    """
    return max(0, free_bytes - min(total_bytes // 10, 4 * GIB))


def spare_ram_bytes() -> int:
    """Return the memory of the machine or container that a plan may use now."""
    total, free = _memory(Path("/"))
    return usable_ram_bytes(total_bytes=total[0], free_bytes=free[0])


def spill_margin_bytes(total_bytes: int) -> int:
    """Return the memory to leave to other programs on a GPU of this size where the driver spills."""
    return LARGE_SPILL_MARGIN_BYTES if total_bytes > 15 * GIB else SPILL_MARGIN_BYTES


def free_ram_bytes() -> int:
    """Return the memory of the machine or container that can be used now without swapping."""
    return _memory(Path("/"))[1][0]


def assume_card(hardware: Hardware, *, vram_gib: float) -> Hardware:
    """Return this machine with one empty GPU of `vram_gib` in place of its own (`plan --vram`)."""
    size = int(vram_gib * GIB)
    card = Gpu(
        index=0,
        name=f"an assumed {vram_gib:g} GiB GPU",
        total_bytes=size,
        free_bytes=size,
        compute_capability=ASSUMED_CAPABILITY,
        driver="",
        spills=any(gpu.spills for gpu in hardware.gpus),
        assumed=True,
    )
    return replace(hardware, gpus=(card,), gpu_reason="given by --vram, with nothing else on it")


def package_notes(packages: Mapping[str, str | None]) -> dict[str, str]:
    """Return package -> problem: not installed, or a version outside the tested range.

    A checkout that is not installed states no requirements.
    """
    try:
        requirements = importlib.metadata.requires("lora-train") or ()
    except importlib.metadata.PackageNotFoundError:
        requirements = ()
    specifiers = {
        (requirement := Requirement(text)).name: requirement.specifier for text in requirements
    }
    notes = {}
    for name, version in packages.items():
        allowed = specifiers.get(name, SpecifierSet())
        if version is None:
            notes[name] = f"not installed: pip install {name}"
        elif not allowed.contains(version, prereleases=True):
            notes[name] = f'{allowed} is needed: pip install "{name}{allowed}"'
    return notes


def xformers_problem(build: TorchBuild | None, folder: Path | None = None) -> str:
    """Return why the installed xformers, or that in `folder`, cannot load its kernels with this torch; else "".

    Its file says what it was built for. Importing it would print a warning of several lines and then go on.
    """
    if folder is None:
        spec = importlib.util.find_spec("xformers")
        if spec is None or spec.origin is None:
            return ""
        folder = Path(spec.origin).parent
    try:
        made_for = json.loads((folder / "cpp_lib.json").read_text(encoding="utf-8"))["version"]
        release, cuda = Version(made_for["torch"]).release[:2], int(made_for["cuda"] or 0)
        if build is None or build.kind != "cuda":
            return ""
        same_cuda = Version(build.toolkit).major == cuda // 100
        if Version(build.version).release[:2] == release and same_cuda:
            return ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""  # nothing is known: where it fails, `apply_attention` says so
    wanted = "{}.{} and CUDA {}.{}".format(*release, *divmod(cuda, 100))
    return f"it was built for torch {wanted}, and this is {build}"


def fits_xformers(build: TorchBuild | None) -> bool:
    """Return whether the newest xformers is made for this torch."""
    try:
        return build is not None and Version(build.version).release[:2] == XFORMERS_TORCH
    except InvalidVersion:
        return False


def is_optional(package: str) -> bool:
    """Return whether training works without a package."""
    return PURPOSES.get(package, "").startswith("optional")


def tier(total_bytes: int | None) -> Tier:
    """Return the preset tier of a GPU by its size rounded to GiB: up to 9, 10 to 15, 16 and more."""
    if total_bytes is None:
        return "cpu"
    rounded = int(total_bytes / GIB + 0.5)
    if rounded <= 9:
        return "6-8"
    return "10-12" if rounded <= 15 else "16-24"


def tier_problem(total_bytes: int | None) -> str:
    """Return a warning for a GPU too small for the smallest tier, else ""."""
    if total_bytes is None or total_bytes >= 5.5 * GIB:
        return ""
    return (
        f"the GPU has {total_bytes / GIB:.1f} GiB, less than the smallest preset (6-8) is made for"
    )


def _versions() -> dict[str, str | None]:
    """Return package -> version: of all in packages.toml, and of the dashboards that are installed."""
    found = {name: _version(name) for name in PACKAGES}
    dashboards = {name: _version(name) for name in PACKAGE_OF.values()}
    return {**{name: version for name, version in dashboards.items() if version}, **found}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name(root: Path) -> tuple[str, str]:
    for line in _read(root / "proc/cpuinfo").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip(), "model name in /proc/cpuinfo"
    return platform.processor() or platform.machine(), "named by the operating system"


def _cpu_threads(root: Path) -> tuple[int, str]:
    """Count usable physical cores: two threads on one core share its arithmetic units and gain nothing."""
    allowed, pairs = usable_processors(), set()
    for processor in allowed:
        topology = root / f"sys/devices/system/cpu/cpu{processor}/topology"
        pair = (_read(topology / "physical_package_id"), _read(topology / "core_id"))
        if not all(pair):  # no topology files: psutil's count of cores, 0 if unknown
            cores = min(psutil.cpu_count(logical=False) or 0, len(allowed))
            break
        pairs.add(pair)
    else:
        cores = len(pairs)
    quota = processors(root)
    if quota is not None and quota < (cores or len(allowed)):
        return max(1, int(quota)), f"the container may use {quota:g} processors"
    if cores:
        return cores, f"{cores} physical cores among {len(allowed)} usable processors"
    return len(allowed), f"{len(allowed)} processors may be used, cores unknown"


def usable_processors() -> list[int]:
    """Return the numbers of the logical processors this process may use."""
    process = psutil.Process()
    if hasattr(process, "cpu_affinity"):  # macOS has none
        return list(process.cpu_affinity())
    return list(range(psutil.cpu_count() or 1))


def _memory(
    root: Path, environment: Mapping[str, str] = os.environ
) -> tuple[tuple[int, str], tuple[int, str]]:
    """Return total and free bytes with their sources, the smallest of the machine's and of all limits."""
    machine = psutil.virtual_memory()
    total, free = int(machine.total), int(machine.available)
    why_total, why_free = "memory of the machine", "available without swapping"
    for limit in memory_limits(root, environment):
        reason = f"{limit.by} may use {limit.limit_bytes / GIB:.1f} GiB"
        if limit.limit_bytes < total:
            total, why_total = limit.limit_bytes, reason
        if limit.limit_bytes < machine.total and limit.free_bytes < free:
            free, why_free = limit.free_bytes, reason
    return (total, why_total), (free, why_free)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
