"""Capabilities of each kind of device, the build of the installed torch and the settings of its allocator.

Facts are by kind, torch-free, in devices.toml, with a source where they are not obvious. `device_calls.py` has the
calls of torch that differ by device. No other module tests a device's type (`tests/hardware/test_machine.py` checks
that).
docs/machines.md states what has run on real GPUs.
"""

from __future__ import annotations

import platform
import re
import sys
import tomllib
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, get_args

from lora_trainer.common.wording import GIB

KindName = Literal["cuda", "rocm", "mps", "xpu", "cpu"]
# `torch.device(...).type` and the values of `hardware.device`; AMD's GPUs have torch's type "cuda".
TorchType = Literal["cuda", "mps", "xpu", "cpu"]


@dataclass(frozen=True, kw_only=True)
class DeviceKind:
    """One kind of device; the defaults are the capabilities of NVIDIA's GPUs.

    says: the device in words, for messages.
    own_memory: the device has separate memory, so offloading to host memory saves some.
    pins: copies from pinned host memory run in parallel to computation.
    pins_in_place: existing memory can be pinned (cudaHostRegister).
    streams: copies and kernels can be queued on several streams; else the host waits for each copy.
    compiles: the report of a machine names triton, with which torch.compile makes kernels.
    fused_skips: torch's fused AdamW skips the update when `found_inf` is set.
    convolution_ways: convolutions have other layouts and algorithms to choose from.
    blocks_convolutions: a convolution copies its input and its output into another layout.
    runtime_gib: memory of a process before its first tensor.
    collectives: the backend of torch.distributed.
    lacks: unsupported settings, "key=value" -> reason.
    """

    name: KindName
    says: str
    torch_type: TorchType
    runtime_gib: float
    collectives: str
    own_memory: bool = True
    pins: bool = True
    pins_in_place: bool = True
    streams: bool = True
    compiles: bool = True
    fused_skips: bool = True
    convolution_ways: bool = True
    blocks_convolutions: bool = False
    lacks: Mapping[str, str] = field(default_factory=dict)

    @property
    def runtime_bytes(self) -> int:
        return int(self.runtime_gib * GIB)

    def against(self, key: str, value: object) -> str:
        """Return why this device does not support a setting, "" if it does."""
        return self.lacks.get(f"{key}={value}", "")


_TABLE = tomllib.loads(Path(__file__).with_name("devices.toml").read_text(encoding="utf-8"))
KINDS: Mapping[KindName, DeviceKind] = {
    kind: DeviceKind(name=kind, **_TABLE[kind]) for kind in get_args(KindName)
}


# ---- which torch this is, without importing it


@dataclass(frozen=True, kw_only=True)
class TorchBuild:
    """The build of the installed torch."""

    version: str
    kind: KindName
    """The kind of device it is built for."""
    toolkit: str = ""
    """Version of its toolkit, such as "12.8" or "6.4"."""

    def __str__(self) -> str:
        of = f"{self.kind.upper()} {self.toolkit}".strip()
        return f"torch {self.version}, built for {of}"


_NAMED_TEXT = re.compile(r"""^(\w+)\b[^=\n]*=\s*['"](.*?)['"]""", re.MULTILINE)


def torch_build(folder: Path | None = None) -> TorchBuild | None:
    """Read `torch/version.py` of the installed torch, or of `folder`; None without a torch."""
    if folder is None:
        spec = find_spec("torch")
        if spec is None or spec.origin is None:
            return None
        folder = Path(spec.origin).parent
    # Read, not imported: `import torch` takes seconds and starts libraries.
    try:
        text = (folder / "version.py").read_text(encoding="utf-8")
    except (OSError, ValueError):
        return None
    values = dict(_NAMED_TEXT.findall(text))
    version = values.get("__version__", "")
    for key, kind in (("hip", "rocm"), ("cuda", "cuda"), ("xpu", "xpu")):
        if values.get(key):
            return TorchBuild(version=version, kind=kind, toolkit=values[key])  # type: ignore[arg-type]
    if sys.platform == "darwin" and platform.machine() == "arm64":
        return TorchBuild(version=version, kind="mps")
    return TorchBuild(version=version, kind="cpu")


def is_under_windows(root: Path = Path("/")) -> bool:
    """Return whether this Linux runs under Windows (WSL), by its kernel's name or Windows' GPU device."""
    return "microsoft" in platform.release().lower() or (root / "dev/dxg").exists()


# ---- torch's allocator: segments that grow on a GPU, whole pages of pinned host memory

# Variables that torch 2.10 to 2.15 read: the first that is set.
_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
SEGMENTS = "expandable_segments"


def use_expandable_segments(environment: MutableMapping[str, str]) -> None:
    """Turn expandable segments on where they work, unless the user configured the allocator.

    Without them a segment has the size of the tensor it was requested for; with images of several sizes a
    tenth of the GPU's memory and more then lies unused between tensors. Must run before torch is imported,
    which reads the variable once.
    """
    if grows_segments(torch_build()) and not allocator_settings(environment):
        environment[_ALLOCATOR_VARIABLES[0]] = f"{SEGMENTS}:True"


def allocator_settings(environment: Mapping[str, str]) -> str:
    """Return the allocator's settings that torch reads: the first of its variables that is set."""
    values = (environment.get(name, "") for name in _ALLOCATOR_VARIABLES)
    return next(filter(None, values), "")


def grows_segments(build: TorchBuild | None) -> bool:
    """Say whether expandable segments work on this platform.

    Windows builds lack them (PYTORCH_C10_DRIVER_API_SUPPORTED). Under WSL, drivers before 616 refuse the
    mapping (pytorch#192330). ROCm has them since torch 2.12, and leaks handles before ROCm 10
    (pytorch#192814). A build for the processor counts as working, as it plans for other machines' GPUs.
    """
    is_usable = build is None or build.kind in ("cuda", "cpu")
    return is_usable and sys.platform == "linux" and not is_under_windows()


PAGE_BYTES = 4096
# Pinnable memory kept free for batches and read-backs, which are small and copied in every step.
RESERVED_BYTES = 64 * 2**20


def pinned_bytes(size: int) -> int:
    """Return the bytes torch allocates to pin `size` bytes: the next power of two, at least a page."""
    return max(PAGE_BYTES, 1 << (size - 1).bit_length())
