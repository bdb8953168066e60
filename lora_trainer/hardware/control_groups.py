"""The limits that containers, Slurm and systemd set: memory and processors by Linux' control groups, versions 1 and 2.

A process is in one group of each hierarchy, and obeys the limits of that group and of all above it. Inside a container
the groups above are usually hidden, and its own is the root. Detection never raises: what cannot be read sets no limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

MIB = 2**20


@dataclass(frozen=True)
class MemoryLimit:
    """The memory limit of a group of processes."""

    limit_bytes: int
    """Bytes that the group may use."""
    free_bytes: int
    """Bytes that the group can still get."""
    by: str = "the container"
    """Who set the limit."""


def memory_limits(root: Path, environment: Mapping[str, str]) -> Iterator[MemoryLimit]:
    """Yield every limit on this process' memory."""
    for folder in _folders(root, ""):
        # Above memory.high the kernel slows the group down until it gives memory back.
        for name in ("memory.max", "memory.high"):
            used, reclaimable = _number(folder / "memory.current"), _stat(folder, "inactive_file")
            yield from _limit(_number(folder / name), used, reclaimable)
    for folder in _folders(root, "memory"):
        limit, used = (_number(folder / f"memory.{name}_in_bytes") for name in ("limit", "usage"))
        yield from _limit(limit, used, _stat(folder, "total_inactive_file"))
    if limit_bytes := _slurm_bytes(environment):
        yield MemoryLimit(limit_bytes, limit_bytes, "the Slurm job")


def processors(root: Path) -> float | None:
    """Return the processors that this process may use at once, fractions possible; None without a limit."""
    quotas = []
    for folder in _folders(root, ""):
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        quotas.append((quota, period.strip()))
    for folder in _folders(root, "cpu"):
        quotas.append((_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")))
    # Without a limit the quota is "max" or -1.
    shares = [
        int(quota) / int(period) for quota, period in quotas if quota.isdigit() and period.isdigit()
    ]
    return min((share for share in shares if share > 0), default=None)


def _limit(limit: int | None, used: int | None, reclaimable: int) -> Iterator[MemoryLimit]:
    if limit is not None:
        # The kernel takes file pages that were not used lately back before it refuses memory.
        occupied = max(0, (used or 0) - reclaimable)
        yield MemoryLimit(limit, max(0, limit - occupied))


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process' group and of those above it; `controller` is "" for version 2."""
    mounted = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines() or ["0::/"]:
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        names = controllers.split(",")
        if controller not in names:
            continue
        # Version 2 beside version 1 ("hybrid") has a folder of its own.
        places = (
            (mounted, mounted / "unified")
            if not controller
            else (mounted / controllers, mounted / controller)
        )
        for place in places:
            group = PurePosixPath(path.lstrip("/"))
            for level in (group, *group.parents):
                if ".." not in level.parts and (place / level).is_dir():
                    yield place / level


def _slurm_bytes(environment: Mapping[str, str]) -> int:
    """Return the memory that a Slurm job asked for on this machine, 0 where it has all of it or there is no job."""

    def value(name: str) -> int:
        text = environment.get(name, "")
        return int(text) if text.isdigit() else 0

    per_node = value("SLURM_MEM_PER_NODE")
    return MIB * (per_node or value("SLURM_MEM_PER_CPU") * value("SLURM_CPUS_ON_NODE"))


def _stat(folder: Path, name: str) -> int:
    for line in _read(folder / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key == name and value.strip().isdigit():
            return int(value)
    return 0


def _number(file: Path) -> int | None:
    text = _read(file)
    return int(text) if text.isdigit() else None


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
