"""The builds of PyTorch: which of them a machine needs, by its GPUs, its driver and its system.

The facts are in torch_builds.toml. Needs nothing but Python, and imports nothing of the package: install/install.py
loads this file before anything is installed, so that installer, `doctor`, `plan` and `train` judge alike.
"""

from __future__ import annotations

import platform
import re
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Capability = tuple[int, int]
INDEXES = "https://download.pytorch.org/whl"
_ARM = ("aarch64", "arm64")


@dataclass(frozen=True)
class CudaBuild:
    """One build of torch for NVIDIA's GPUs."""

    folder: str
    """The folder of PyTorch's indexes that holds it."""
    toolkit: str
    systems: tuple[str, ...]
    kernels: tuple[Capability, ...]

    @property
    def driver(self) -> int:
        """The oldest driver that it runs on."""
        return needed_driver(self.toolkit)

    def has_kernels(self, capability: Capability) -> bool:
        """Return whether it computes on a GPU: machine code runs on its major version, from its minor one on."""
        major, minor = capability
        return any(major == built[0] and minor >= built[1] for built in self.kernels)


_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
TORCH = f"torch=={_TABLE['torch']}"
FOLDERS: Mapping[str, tuple[str, ...]] = {
    kind: tuple(folders) for kind, folders in _TABLE["folders"].items()
}


def cuda_builds(*, system: str = sys.platform, machine: str = "") -> tuple[CudaBuild, ...]:
    """Return the builds for NVIDIA's GPUs that exist on a system, the best first."""
    kernels = "aarch64" if (machine or platform.machine()).lower() in _ARM else "x86_64"
    return tuple(
        CudaBuild(
            row["folder"],
            row["toolkit"],
            tuple(row["systems"]),
            tuple(divmod(number, 10) for number in row[kernels]),
        )
        for row in _TABLE["cuda"]
        if system in row["systems"]
    )


def needed_driver(toolkit: str) -> int:
    """Return the oldest driver for a build with this CUDA toolkit, 0 where that is not known."""
    return int(_TABLE["drivers"].get(toolkit.partition(".")[0], 0))


def driver_number(text: str) -> float:
    """Return the number that a driver's version begins with; 0 where it begins with none ("[N/A]")."""
    match = re.match(r"\d+(\.\d+)?", text)
    return float(match.group()) if match else 0.0


def is_too_old(driver: str, *, needed: int) -> bool:
    """Return whether a driver is known to be older than the one that is needed."""
    return 0 < driver_number(driver) < needed


def choose_cuda(
    capabilities: Sequence[Capability],
    driver: str,
    *,
    system: str = sys.platform,
    machine: str = "",
) -> tuple[CudaBuild | None, str]:
    """Return the build for GPUs of these capabilities and their driver, else None and why there is none.

    A capability or a driver that is not known excludes no build. Where no build has kernels for all GPUs, it is that
    for the newest.
    """
    builds = cuda_builds(system=system, machine=machine)
    fit = [build for build in builds if all(map(build.has_kernels, capabilities))]
    if not fit:
        newest = max(capabilities)
        fit = [build for build in builds if build.has_kernels(newest)]
    if not fit:
        least = min(min(build.kernels) for build in builds)
        oldest = "{}.{} is the oldest".format(*least)
        cure = oldest if newest < least else "update lora-train"
        number = "{}.{}".format(*newest)
        return None, f"no build of {TORCH} has kernels for compute capability {number}: {cure}"
    running = [build for build in fit if not is_too_old(driver, needed=build.driver)]
    if running:
        return running[0], ""
    needed = min(build.driver for build in fit)
    return None, f"driver {driver} is too old: {TORCH} for this GPU needs {needed} or newer"


def other_build(
    capabilities: Sequence[Capability], driver: str, *, system: str = sys.platform
) -> str:
    """Return the command that installs the build for NVIDIA's GPUs, else what keeps it from being one."""
    build, problem = choose_cuda(capabilities, driver, system=system)
    return problem if build is None else reinstall(build.folder)


def reinstall(folder: str) -> str:
    """Return the command that puts the build of a folder in place of the one that is installed."""
    return f"pip install {TORCH} --force-reinstall --index-url {INDEXES}/{folder}"
