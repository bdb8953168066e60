"""The facts of a machine, and that detection never fails: no driver, broken driver, MIG, a container, a display."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.hardware import devices
from lora_trainer.hardware import machine as hardware_machine
from lora_trainer.hardware.devices import TorchBuild, use_expandable_segments
from lora_trainer.hardware.machine import Hardware, assume_card, detect, tier, tier_problem
from tests.fakes.nvml import GIB, FakeCard, FakeNvml

CARD = FakeCard()
A100 = FakeCard(name="NVIDIA A100-SXM4-40GB", capability=(8, 0), uuid="GPU-bbbb")
CALLS = (
    "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetName",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetCudaComputeCapability",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetDisplayActive",
)


def with_cards(*cards: FakeCard, **environment: str) -> Hardware:
    return detect(nvml=FakeNvml(cards=cards), environment=environment)


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_card_is_described_with_its_driver(tmp_path: Path) -> None:
    nvml = FakeNvml(cards=(CARD,))
    root = machine(tmp_path, {"proc/cpuinfo": "processor : 0\nmodel name\t: A Processor\n"})
    result = detect(nvml=nvml, environment={}, root=root)
    (gpu,) = result.gpus
    assert (gpu.index, gpu.name, gpu.driver) == (0, CARD.name, nvml.driver)
    assert (gpu.total_bytes, gpu.free_bytes) == (CARD.total_bytes, CARD.free_bytes)
    assert gpu.compute_capability == (8, 6)
    assert nvml.sessions == 0, "every nvmlInit needs its nvmlShutdown"
    assert result.cpu_name == "A Processor"
    assert "pinnable_bytes" in result.reasons and all(result.reasons.values())
    assert result.disk_free_bytes(tmp_path / "not" / "yet") > 0


def test_without_a_working_driver_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for refusal, reason in (
        ("NVML Shared Library Not Found", "no NVIDIA driver (libnvidia-ml.so.1 not found)"),
        ("RM has detected an NVML/RM version mismatch.", "restart the machine"),
        ("Unknown Error", "NVML failed to start: Unknown Error"),
    ):
        result = detect(nvml=FakeNvml(cards=(CARD,), refuses={"nvmlInit": refusal}), environment={})
        assert result.gpus == () and reason in result.gpu_reason
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "nvidia-ml-py is not installed" in detect(environment={}).gpu_reason


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_fails_on_one_card_leaves_the_other_alone(call: str) -> None:
    lost = replace(A100, display=True, refuses={call: "GPU is lost"})
    result = with_cards(lost, replace(CARD, display=True))
    assert (result.gpus[-1].name, result.gpus[-1].display) == (CARD.name, True)
    needed = call in ("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetMemoryInfo")
    assert len(result.gpus) == (1 if needed else 2)
    assert result.gpus[0].index == 0, "CUDA numbers what it can use"
    quiet = ("nvmlDeviceGetUUID", "nvmlDeviceGetMigMode", "nvmlDeviceGetDisplayActive")
    assert (f"GPU 0: {call} said GPU is lost" in result.gpu_reason) == (call not in quiet)
    assert ("GPU is lost" in result.gpu_reason) == (call not in quiet)
    if call == "nvmlDeviceGetCudaComputeCapability":
        assert result.gpus[0].compute_capability is None, "unknown is no guess"
    if call == "nvmlDeviceGetDisplayActive":
        assert not result.gpus[0].display


@given(st.sets(st.sampled_from([*CALLS, "nvmlShutdown", "nvmlDeviceGetCount"])))
def test_no_combination_of_refusals_raises(calls: set[str]) -> None:
    refuses = dict.fromkeys(calls, "Not Supported")
    nvml = FakeNvml(cards=(replace(CARD, refuses=refuses),), refuses=refuses)
    assert detect(nvml=nvml, environment={}).gpu_reason


def test_a_card_split_by_mig_is_its_slices() -> None:
    part = FakeCard(name="A100 MIG 1g.5gb", total_bytes=5 * GIB, uuid="MIG-1")
    result = with_cards(replace(A100, mig_slices=(part, part)), CARD)
    assert [gpu.name for gpu in result.gpus] == [part.name, part.name, CARD.name]
    assert [gpu.index for gpu in result.gpus] == [0, 1, 2]
    assert result.gpus[0].compute_capability == A100.capability
    empty = with_cards(replace(A100, mig_slices=()))
    assert empty.gpus == () and "GPU 0 is in MIG mode and has no slices" in empty.gpu_reason


@pytest.mark.parametrize(
    ("visible", "names"),
    [("1,0", [A100.name, CARD.name]), ("GPU-bb", [A100.name]), ("0,7,1", [CARD.name]), ("", [])],
)  # CUDA stops at the first that does not exist
def test_cuda_visible_devices_picks_and_orders(visible: str, names: list[str]) -> None:
    result = with_cards(CARD, A100, CUDA_VISIBLE_DEVICES=visible)
    assert [gpu.name for gpu in result.gpus] == names
    assert [gpu.index for gpu in result.gpus] == list(range(len(names)))
    assert (f"CUDA_VISIBLE_DEVICES='{visible}'" in result.gpu_reason) == (len(names) < 2)


def test_cuda_numbers_cards_as_they_are_listed_unless_somebody_chose_an_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By itself CUDA puts the A100 first, and a run planned for the other GPU would train there."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "FASTEST_FIRST")
    chosen = detect(nvml=FakeNvml(cards=(CARD, A100)))
    assert "set CUDA_DEVICE_ORDER=PCI_BUS_ID" in chosen.gpu_reason
    monkeypatch.delenv("CUDA_DEVICE_ORDER")
    result = detect(nvml=FakeNvml(cards=(CARD, A100)))
    assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert result.gpus[0].name == CARD.name and "CUDA_DEVICE_ORDER" not in result.gpu_reason


# ---- processor and memory


def topology(cores: list[int]) -> dict[str, str]:
    files: dict[str, str] = {}
    for processor, core in enumerate(cores):
        folder = f"sys/devices/system/cpu/cpu{processor}/topology"
        files |= {f"{folder}/physical_package_id": "0\n", f"{folder}/core_id": f"{core}\n"}
    return files


PAIRS = topology([0, 0, 1, 1, 2, 2, 3, 3])


@pytest.mark.parametrize(
    ("files", "allowed", "threads", "reason"),
    [
        (PAIRS, 8, 4, "4 physical cores among 8"),
        (topology([0, 1, 2]), 8, 6, "6 physical cores"),  # of some unknown: psutil's count
        (PAIRS | {"sys/fs/cgroup/cpu.max": "250000 100000"}, 8, 2, "2.5"),
        (PAIRS | {"sys/fs/cgroup/cpu.max": "50000 100000"}, 8, 1, "0.5"),
        ({}, None, 6, "6 physical cores"),  # no affinity, as on macOS
    ],
)
def test_threads_are_physical_cores_this_process_may_use(
    tmp_path: Path,
    files: dict[str, str],
    allowed: int | None,
    threads: int,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    process = SimpleNamespace(cpu_affinity=lambda: list(range(allowed or 0)))
    monkeypatch.setattr(psutil, "Process", lambda: process if allowed else SimpleNamespace())
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 8 if logical else 6)
    result = detect(nvml=FakeNvml(), environment={}, root=machine(tmp_path, files))
    assert result.cpu_threads == threads
    assert reason in result.reasons["cpu_threads"] and result.cpu_name


def test_memory_respects_the_container(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory.max": str(2 * GIB), "sys/fs/cgroup/memory.current": str(GIB)}
    result = detect(nvml=FakeNvml(), environment={}, root=machine(tmp_path, files))
    assert result.ram_total_bytes == 2 * GIB
    assert result.ram_free_bytes <= GIB
    assert "2.0 GiB" in result.reasons["ram_total_bytes"]
    free = detect(nvml=FakeNvml(), environment={}, root=tmp_path / "elsewhere")
    assert free.ram_total_bytes == psutil.virtual_memory().total


def test_packages_are_versions_or_none_and_torch_is_not_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = "import sys, lora_trainer.hardware.machine as h; h.detect(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    monkeypatch.setattr(hardware_machine, "PACKAGES", ("psutil", "no-such-package-at-all"))
    packages = with_cards().packages
    assert packages == {"psutil": psutil.__version__, "no-such-package-at-all": None}


@pytest.mark.parametrize(
    ("gib", "name"),
    [
        (None, "cpu"), (4.0, "6-8"), (9.49, "6-8"), (9.5, "10-12"), (15.49, "10-12"),
        (15.5, "16-24"), (80.0, "16-24"),
    ],
)  # fmt: skip
def test_tier_is_the_size_rounded_to_whole_gib(gib: float | None, name: str) -> None:
    total_bytes = None if gib is None else int(gib * GIB)
    assert tier(total_bytes) == name
    assert ("4.0 GiB" in tier_problem(total_bytes)) == (gib == 4.0)


# ---- platforms: drivers that spill, and an allocator whose segments grow

VARIABLE, OLDER = "PYTORCH_ALLOC_CONF", ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
ON = "expandable_segments:True"
LINUX = ("linux", "6.8.0-generic", TorchBuild(version="2.13", kind="cuda", toolkit="13.0"))
OTHERS = {
    "Windows": ("win32", "11", LINUX[2]),
    "WSL": ("linux", "6.6.87.2-microsoft-standard-WSL2", LINUX[2]),
    "ROCm": (*LINUX[:2], TorchBuild(version="2.13.0+rocm7.1", kind="rocm", toolkit="7.1")),
    "macOS": ("darwin", "25.0", TorchBuild(version="2.13.0", kind="mps")),
    "Intel": (*LINUX[:2], TorchBuild(version="2.13.0+xpu", kind="xpu")),
}


@pytest.fixture
def on_platform(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def play(name: str) -> None:
        system, release, build = OTHERS.get(name, LINUX)
        for module in (hardware_machine, devices):
            monkeypatch.setattr(module, "sys", SimpleNamespace(**{**vars(sys), "platform": system}))
            monkeypatch.setattr(module, "torch_build", lambda: build)
        monkeypatch.setattr("platform.release", lambda: release)
        monkeypatch.setattr(subprocess, "run", lambda *_, **__: SimpleNamespace(stdout=b"[]"))

    return play


@pytest.mark.parametrize("name", ["Linux", *OTHERS])
def test_a_platform_decides_on_spilling_pinning_and_segments_that_grow(
    name: str, on_platform: Callable[[str], None], tmp_path: Path
) -> None:
    on_platform(name)
    environment: dict[str, str] = {}
    use_expandable_segments(environment)
    assert environment == ({VARIABLE: ON} if name == "Linux" else {})
    result = detect(nvml=FakeNvml(cards=(CARD,)), environment={VARIABLE: ON}, root=tmp_path)
    assert result.expandable_segments == (name == "Linux"), "the plan counts with them"
    assert [gpu.spills for gpu in result.gpus] == [name in ("Windows", "WSL")]
    assert assume_card(result, vram_gib=8).gpus[0].spills == (name in ("Windows", "WSL"))
    half = {"Windows": result.ram_total_bytes // 2, "WSL": GIB // 2}.get(name)
    assert result.pinnable_bytes == half and result.reasons["pinnable_bytes"]
    wsl_with_a_kernel_of_ones_own = machine(tmp_path, {"dev/dxg": ""})
    result = detect(nvml=FakeNvml(), environment={}, root=wsl_with_a_kernel_of_ones_own)
    assert result.pinnable_bytes == (half or GIB // 2)


@pytest.mark.parametrize(
    ("environment", "grows"),
    [
        ({OLDER[1]: ON}, True),
        ({VARIABLE: "max_split_size_mb:128, expandable_segments: True"}, True),
        ({VARIABLE: "garbage_collection_threshold:0.8,roundup_power2_divisions:[256:1]"}, False),
        ({VARIABLE: "expandable_segments:False", OLDER[0]: ON}, False),  # the newer wins
        ({}, False),
    ],
)
def test_the_users_allocator_stands_and_is_planned_with(
    environment: dict[str, str], grows: bool, on_platform: Callable[[str], None]
) -> None:
    on_platform("Linux")
    assert with_cards(CARD, **environment).expandable_segments == grows
    before = dict(environment)
    use_expandable_segments(environment)
    assert environment == (before or {VARIABLE: ON})


@pytest.mark.skipif(sys.platform != "linux", reason="asked for on Linux only")
def test_the_command_line_asks_for_segments_that_grow_before_it_imports_torch() -> None:
    program = """
import os, sys
from lora_trainer.cli import main as cli
cli.run = lambda arguments: print(os.environ.get("PYTORCH_ALLOC_CONF"), "torch" in sys.modules) or 0
cli.main([])
"""
    environment = {name: text for name, text in os.environ.items() if "ALLOC_CONF" not in name}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    asked: dict[str, str] = {}
    use_expandable_segments(asked)
    assert done.stdout.split() == [asked.get(VARIABLE, "None"), "False"]
