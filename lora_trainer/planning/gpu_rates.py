"""What a GPU computes and copies a second, by its name, its power limit and its slot; from gpus.toml.

A laptop's GPU has the number of a desktop's, and half of its units and power.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

from lora_trainer.common.wording import GIB
from lora_trainer.hardware.nvml import Gpu

Range = tuple[float, float]
_GPUS = tomllib.loads(Path(__file__).with_name("gpus.toml").read_text(encoding="utf-8"))
# From pinned host memory, one way: PCIe 3 with 8 lanes to PCIe 4 with 16, as measured in practice.
LINK_BYTES_PER_S = (6e9, 22e9)
# From ordinary memory the driver copies twice, by way of a small pinned buffer: 2.2 of 5.7 GB/s on one
# GPU (NVIDIA, "How to Optimize Data Transfers in CUDA C/C++"), 0.3 to 0.6 on others.
UNPINNED_BYTES_PER_S = (2.4e9, 8.8e9)
UNPINNED_SHARE = UNPINNED_BYTES_PER_S[1] / LINK_BYTES_PER_S[1]
# Of one lane by PCI Express' generation, as specified, and the share of it that copies reach.
LANE_BYTES_PER_S = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
LINK_SHARE = (0.7, 0.85)
# Clocks fall slower than power: a laptop's GPU at half of its watts keeps three quarters of its speed.
POWER_EXPONENT = 0.4
LAPTOP_MARKS = ("Laptop", "Mobile", "Max-Q")
# Of a laptop's GPU without a row of its own, over the desktop's of its number.
LAPTOP_SHARE = 0.6


@dataclass(frozen=True, kw_only=True)
class GpuRates:
    """Ceilings of a GPU: operations a second in 16 bits, bytes a second of its memory, and whose they are."""

    flops: float
    bytes_per_s: float
    says: str


def rates_of(gpu: Gpu) -> GpuRates:
    """Return the rates of a GPU by its name, else those of a usual GPU of its size."""
    rates, size_gib = _GPUS["rates"], gpu.total_bytes / GIB
    # The longest name, because "A10" is also a part of "A100", and "Apple M1" of "Apple M1 Max".
    row = max((row for row in rates if row in gpu.name), key=len, default="")
    name = row
    if not row:
        row = next(row for most, row in _GPUS["of_size"].items() if size_gib <= float(most))
        name = f"{gpu.name} (rates of an {row})"
    tflops, gigabytes = rates[row]
    is_mobile = any(mark in gpu.name for mark in LAPTOP_MARKS)
    if is_mobile and not any(mark in row for mark in LAPTOP_MARKS):
        tflops, gigabytes = LAPTOP_SHARE * tflops, LAPTOP_SHARE * gigabytes
        name = f"{name} in a laptop"
    full_watts = _GPUS["watts"].get(row)
    if full_watts and gpu.watts and gpu.watts < full_watts:
        tflops *= (gpu.watts / full_watts) ** POWER_EXPONENT
        name = f"{name} at {gpu.watts:.0f} W"
    return GpuRates(flops=tflops * 1e12, bytes_per_s=gigabytes * 1e9, says=name)


def link_of(gpu: Gpu | None) -> tuple[Range, Range]:
    """Return the bytes a second (slow, fast) of copies from pinned and from ordinary host memory to a GPU."""
    generation, lanes = (0, 0) if gpu is None else gpu.pcie
    lane = LANE_BYTES_PER_S.get(generation, 0.0)
    if not (lane and lanes):
        return LINK_BYTES_PER_S, UNPINNED_BYTES_PER_S
    slow, fast = (share * lane * lanes for share in LINK_SHARE)
    # The processor copies the first time, however fast the link is.
    unpinned = (UNPINNED_SHARE * slow, min(UNPINNED_SHARE * fast, UNPINNED_BYTES_PER_S[1]))
    return (slow, fast), (min(unpinned), unpinned[1])
