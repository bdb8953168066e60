"""How torch's allocator takes memory: segments that grow on a GPU, whole pages where it is pinned.

Whether PyTorch's allocator grows its segments page by page, settled before torch is imported. No torch.

Without it a segment is as large as the tensor it was made for: with pictures of several sizes a tenth of a
card and more lies between tensors, free and of no use. Input is the environment; what the user has set
there stands.

What pinned host memory takes, which planning counts and the one place that pins asks for. No torch.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, MutableMapping

from lora_trainer.hardware.devices import TorchBuild, torch_build

VARIABLE = "PYTORCH_ALLOC_CONF"
OLDER = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Read by torch 2.10 to 2.13 where the first is not set."""
SETTING = "expandable_segments"


def ask_for(
    environment: MutableMapping[str, str],
    *,
    system: str = sys.platform,
    release: str = platform.release(),
    build: TorchBuild | None = None,
) -> None:
    """Turn it on where it works, unless the allocator was set up by the user; call it before torch is imported."""
    if _works(system, release, build or torch_build()) and not said(environment):
        environment[VARIABLE] = f"{SETTING}:True"


def in_force(
    environment: Mapping[str, str],
    *,
    system: str = sys.platform,
    release: str = platform.release(),
    build: TorchBuild | None = None,
) -> bool:
    """Say whether a training in this environment gets it."""
    settings = dict(
        part.replace(" ", "").split(":", 1) for part in said(environment).split(",") if ":" in part
    )
    return _works(system, release, build or torch_build()) and settings.get(SETTING) == "True"


def said(environment: Mapping[str, str]) -> str:
    """Return the allocator's settings that torch reads: the first of its variables that is there."""
    return next((environment[name] for name in (VARIABLE, *OLDER) if environment.get(name)), "")


def _works(system: str, release: str, build: TorchBuild | None) -> bool:
    """Say whether this platform has it and has it right.

    Windows builds are without (PYTORCH_C10_DRIVER_API_SUPPORTED). Under WSL drivers before 616 refuse the
    mapping (pytorch#192330). ROCm has it since torch 2.12, and leaks handles before ROCm 10
    (pytorch#192814). A build for the processor plans for cards of others.
    """
    right = build is None or build.kind in ("cuda", "cpu")
    return system == "linux" and "microsoft" not in release.lower() and right


PAGE_BYTES = 4096
RESERVED_BYTES = 64 * 2**20
"""Of what may be pinned, left for batches and read-backs, which are copied in every step and are small."""


def pinned_bytes(size: int) -> int:
    """Return what torch takes for pinned memory of `size` bytes: the next power of two."""
    return max(PAGE_BYTES, 1 << (size - 1).bit_length())
