"""How torch's allocator takes memory: segments that grow on a GPU, whole pages where it is pinned.

Turns on expandable segments of PyTorch's allocator, before torch is imported. No torch.

Without them a segment has the size of the tensor it was requested for; with images of several sizes a
tenth of the GPU's memory and more then lies unused between tensors. Input is the environment; the user's
own setting there wins.

The size of pinned host memory, shared by the plan and the code that pins. No torch.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, MutableMapping

from lora_trainer.hardware.devices import TorchBuild, torch_build

VARIABLE = "PYTORCH_ALLOC_CONF"
OLDER = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Older variables, which torch 2.10 to 2.13 read if the new one is not set."""
SETTING = "expandable_segments"


def ask_for(
    environment: MutableMapping[str, str],
    *,
    system: str = sys.platform,
    release: str = platform.release(),
    build: TorchBuild | None = None,
) -> None:
    """Turn expandable segments on where they work, unless the user configured the allocator.

    Must run before torch is imported, which reads the variable once.
    """
    if _works(system, release, build or torch_build()) and not said(environment):
        environment[VARIABLE] = f"{SETTING}:True"


def in_force(
    environment: Mapping[str, str],
    *,
    system: str = sys.platform,
    release: str = platform.release(),
    build: TorchBuild | None = None,
) -> bool:
    """Say whether a training in this environment uses expandable segments."""
    settings = dict(
        part.replace(" ", "").split(":", 1) for part in said(environment).split(",") if ":" in part
    )
    return _works(system, release, build or torch_build()) and settings.get(SETTING) == "True"


def said(environment: Mapping[str, str]) -> str:
    """Return the allocator's settings that torch reads: the first of its variables that is set."""
    return next((environment[name] for name in (VARIABLE, *OLDER) if environment.get(name)), "")


def _works(system: str, release: str, build: TorchBuild | None) -> bool:
    """Say whether expandable segments work on this platform.

    Windows builds lack them (PYTORCH_C10_DRIVER_API_SUPPORTED). Under WSL, drivers before 616 refuse the
    mapping (pytorch#192330). ROCm has them since torch 2.12, and leaks handles before ROCm 10
    (pytorch#192814). A build for the processor counts as working, as it plans for other machines' GPUs.
    """
    right = build is None or build.kind in ("cuda", "cpu")
    return system == "linux" and "microsoft" not in release.lower() and right


PAGE_BYTES = 4096
RESERVED_BYTES = 64 * 2**20
"""Pinnable memory kept free for batches and read-backs, which are small and copied in every step."""


def pinned_bytes(size: int) -> int:
    """Return the bytes torch allocates to pin `size` bytes: the next power of two, at least a page."""
    return max(PAGE_BYTES, 1 << (size - 1).bit_length())
