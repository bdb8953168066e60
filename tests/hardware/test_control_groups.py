"""Limits of containers, Slurm and systemd, made from files: every level of both versions of control groups."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from lora_trainer.hardware import machine
from lora_trainer.hardware.machine import detect
from tests.fakes.nvml import GIB, FakeNvml

V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"
STEP = "system.slice/slurmstepd.scope/job_1/step_0/user/task_0"
CASES: Mapping[str, tuple[dict[str, str | int], dict[str, str], float, float]] = {
    "a container that has read files": (
        {
            f"{V2}/memory.max": 16 * GIB,
            f"{V2}/memory.current": 16 * GIB,
            f"{V2}/memory.stat": f"anon 5\nfile {15 * GIB}\ninactive_file {15 * GIB}",
        }, {}, 16, 15),
    "a Slurm job without a namespace": (
        {
            "proc/self/cgroup": f"0::/{STEP}",
            f"{V2}/{STEP}/memory.max": "max",
            f"{V2}/system.slice/slurmstepd.scope/job_1/memory.max": 8 * GIB,
            f"{V2}/system.slice/slurmstepd.scope/job_1/memory.current": GIB,
        }, {}, 8, 7),
    "levels with limits of their own": (
        {
            "proc/self/cgroup": "0::/a/b",
            f"{V2}/a/memory.max": 8 * GIB,
            f"{V2}/a/memory.current": 6 * GIB,
            f"{V2}/a/b/memory.max": 4 * GIB,
            f"{V2}/a/b/memory.current": GIB,
        }, {}, 4, 2),
    "systemd's MemoryHigh": ({"proc/self/cgroup": "0::/a", f"{V2}/a/memory.high": 3 * GIB}, {}, 3, 3),
    "version 1": (
        {
            "proc/self/cgroup": "4:memory:/",
            f"{V1}/memory.limit_in_bytes": 8 * GIB,
            f"{V1}/memory.usage_in_bytes": 3 * GIB,
            f"{V1}/memory.stat": f"inactive_file 5\ntotal_inactive_file {2 * GIB}",
        }, {}, 8, 7),
    "version 1 in Docker, which hides the path": (
        {
            "proc/self/cgroup": "4:memory:/docker/ab12\n0::/",
            f"{V1}/memory.limit_in_bytes": 2 * GIB,
            f"{V1}/memory.usage_in_bytes": GIB,
        }, {}, 2, 1),
    "version 1 without a limit": (
        {"proc/self/cgroup": "4:memory:/", f"{V1}/memory.limit_in_bytes": 2**63 - 4096}, {}, 64, 50),
    "a machine without limits": (
        {"proc/self/cgroup": "0::/user.slice", f"{V2}/user.slice/memory.max": "max"}, {}, 64, 50),
    "Slurm without control groups": ({}, {"SLURM_MEM_PER_NODE": str(20 * 1024)}, 20, 20),
    "Slurm by processor": ({}, {"SLURM_MEM_PER_CPU": "2048", "SLURM_CPUS_ON_NODE": "4"}, 8, 8),
    "a whole machine of Slurm": ({}, {"SLURM_MEM_PER_NODE": "0"}, 64, 50),
}  # fmt: skip
"""Files below /, variables, total and free GiB of a machine with 64 GiB, of which 50 are available."""


def written(root: Path, files: Mapping[str, str | int]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


@pytest.mark.parametrize(("files", "environment", "total", "free"), CASES.values(), ids=CASES)
def test_memory_is_that_of_the_tightest_limit(
    files: dict[str, str | int],
    environment: dict[str, str],
    total: float,
    free: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    memory = SimpleNamespace(total=64 * GIB, available=50 * GIB)
    monkeypatch.setattr(machine.psutil, "virtual_memory", lambda: memory)
    found = detect(nvml=FakeNvml(), environment=environment, root=written(tmp_path, files))
    assert (found.ram_total_bytes / GIB, found.ram_free_bytes / GIB) == (total, free)
    why = found.reasons["ram_total_bytes"]
    assert (f"may use {total:.1f} GiB" in why) == (total < 64)
    assert ("Slurm" in why) == (bool(environment) and total < 64)


@pytest.mark.parametrize(
    ("files", "threads"),
    [
        ({"proc/self/cgroup": "0::/a/b", f"{V2}/a/cpu.max": "300000 100000"}, 3),
        ({"proc/self/cgroup": "0::/a", f"{V2}/a/cpu.max": "max 100000"}, 6),
        (
            {
                "proc/self/cgroup": "3:cpu,cpuacct:/job",
                f"{V2}/cpu,cpuacct/job/cpu.cfs_quota_us": 200000,
                f"{V2}/cpu,cpuacct/job/cpu.cfs_period_us": 100000,
            },
            2,
        ),
        (
            {
                "proc/self/cgroup": "3:cpu:/",
                f"{V2}/cpu/cpu.cfs_quota_us": -1,
                f"{V2}/cpu/cpu.cfs_period_us": 100000,
            },
            6,
        ),
    ],
    ids=["a level above", "no limit", "version 1", "version 1, no limit"],
)
def test_processors_are_those_of_the_tightest_quota(
    files: dict[str, str | int], threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = SimpleNamespace(cpu_affinity=lambda: list(range(8)))
    monkeypatch.setattr(machine.psutil, "Process", lambda: process)
    monkeypatch.setattr(machine.psutil, "cpu_count", lambda **_: 6)
    found = detect(nvml=FakeNvml(), environment={}, root=written(tmp_path, files))
    assert found.cpu_threads == threads
