"""What is found on a machine, and that finding never fails: no driver, broken driver, MIG."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.hardware import machine as hardware_machine
from lora_trainer.hardware.machine import (
    GIB,
    Hardware,
    assume_card,
    detect,
    driver_spills,
    pinnable,
    tier,
    tier_problem,
)
from tests.fakes.nvml import FakeCard, FakeNvml

CARD = FakeCard()
A100 = FakeCard(name="NVIDIA A100-SXM4-40GB", capability=(8, 0), uuid="GPU-bbbb")
CALLS = (
    "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetName",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetCudaComputeCapability",
    "nvmlDeviceGetMigMode",
)


def found(nvml: FakeNvml, **environment: str) -> Hardware:
    return detect(nvml=nvml, environment=environment)


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_card_is_described_with_its_driver() -> None:
    nvml = FakeNvml(cards=(CARD,))
    (gpu,) = found(nvml).gpus
    assert (gpu.index, gpu.name, gpu.driver) == (0, CARD.name, nvml.driver)
    assert (gpu.total_bytes, gpu.free_bytes) == (CARD.total_bytes, CARD.free_bytes)
    assert gpu.compute_capability == (8, 6)
    assert nvml.sessions == 0, "every nvmlInit needs its nvmlShutdown"


@pytest.mark.parametrize(
    ("refusal", "said"),
    [
        ("NVML Shared Library Not Found", "no NVIDIA driver (libnvidia-ml.so.1 not found)"),
        ("Driver Not Loaded", "installed but not loaded"),
        ("RM has detected an NVML/RM version mismatch.", "restart the machine"),
        ("Unknown Error", "NVML failed to start: Unknown Error"),
    ],
)
def test_without_a_working_driver_there_is_a_reason(refusal: str, said: str) -> None:
    result = found(FakeNvml(cards=(CARD,), refuses={"nvmlInit": refusal}))
    assert result.gpus == ()
    assert said in result.gpu_reason


@pytest.mark.parametrize(
    ("files", "system", "pinnable_gib"),
    [
        ({"proc/sys/kernel/osrelease": "5.15.167.4-microsoft-standard-WSL2\n"}, "linux", 0.5),
        ({"proc/version": "Linux version 6.6 (root@Microsoft)"}, "linux", 0.5),
        ({"dev/dxg": ""}, "linux", 0.5),
        ({"proc/sys/kernel/osrelease": "6.8.0-60-generic\n"}, "linux", None),
        ({}, "win32", 16),
    ],
)
def test_what_a_platform_lets_a_process_pin_is_a_fact_with_its_reason(
    files: dict[str, str], system: str, pinnable_gib: float | None, tmp_path: Path
) -> None:
    fact = pinnable(total_bytes=32 * GIB, system=system, root=machine(tmp_path, files))
    assert fact.value == (None if pinnable_gib is None else pinnable_gib * GIB)
    assert fact.reason
    detected = detect(nvml=FakeNvml(cards=(CARD,)), environment={}, root=tmp_path)
    assert "pinnable_bytes" in detected.facts()


def test_a_library_that_cannot_be_loaded_is_a_reason_too() -> None:
    class Broken(FakeNvml):
        def nvmlInit(self) -> None:
            raise OSError("libnvidia-ml.so.1: invalid ELF header")

    assert "invalid ELF header" in found(Broken()).gpu_reason


def test_the_missing_python_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "nvidia-ml-py is not installed" in detect(environment={}).gpu_reason


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_fails_on_one_card_leaves_the_other_alone(call: str) -> None:
    lost = replace(A100, refuses={call: "GPU is lost"})
    result = found(FakeNvml(cards=(lost, CARD)))
    assert result.gpus[-1].name == CARD.name
    needed = call in ("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetMemoryInfo")
    assert len(result.gpus) == (1 if needed else 2)
    assert result.gpus[0].index == 0, "CUDA numbers what it can use"
    if call not in ("nvmlDeviceGetUUID", "nvmlDeviceGetMigMode"):
        assert f"GPU 0: {call} said GPU is lost" in result.gpu_reason


@given(st.sets(st.sampled_from([*CALLS, "nvmlShutdown", "nvmlDeviceGetCount"])))
def test_no_combination_of_refusals_raises(calls: set[str]) -> None:
    broken = replace(CARD, refuses=dict.fromkeys(calls, "Not Supported"))
    result = found(FakeNvml(cards=(broken,), refuses=dict.fromkeys(calls, "Not Supported")))
    assert result.gpu_reason


def test_an_unknown_capability_is_none_not_a_guess() -> None:
    card = replace(CARD, refuses={"nvmlDeviceGetCudaComputeCapability": "Not Supported"})
    assert found(FakeNvml(cards=(card,))).gpus[0].compute_capability is None


def test_a_card_with_a_screen_on_it_says_so_and_one_that_cannot_tell_has_none() -> None:
    silent = replace(CARD, display=True, refuses={"nvmlDeviceGetDisplayActive": "Not Supported"})
    cards = (replace(CARD, display=True), A100, silent)
    result = found(FakeNvml(cards=cards))
    assert [gpu.display for gpu in result.gpus] == [True, False, False]
    assert "Display" not in result.gpu_reason


def test_a_card_split_by_mig_is_its_slices() -> None:
    part = FakeCard(name="A100 MIG 1g.5gb", total_bytes=5 * GIB, uuid="MIG-1")
    result = found(FakeNvml(cards=(replace(A100, mig_slices=(part, part)), CARD)))
    assert [gpu.name for gpu in result.gpus] == [part.name, part.name, CARD.name]
    assert [gpu.index for gpu in result.gpus] == [0, 1, 2]
    assert result.gpus[0].compute_capability == A100.capability


def test_mig_without_slices_says_so() -> None:
    result = found(FakeNvml(cards=(replace(A100, mig_slices=()),)))
    assert result.gpus == ()
    assert "GPU 0 is in MIG mode and has no slices" in result.gpu_reason


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        ("1", [A100.name]),
        ("1,0", [A100.name, CARD.name]),
        ("GPU-bb", [A100.name]),
        ("0,7,1", [CARD.name]),  # CUDA stops at the first that does not exist
        ("", []),
        ("-1", []),
    ],
)
def test_cuda_visible_devices_picks_and_orders(visible: str, names: list[str]) -> None:
    result = found(FakeNvml(cards=(CARD, A100)), CUDA_VISIBLE_DEVICES=visible)
    assert [gpu.name for gpu in result.gpus] == names
    assert [gpu.index for gpu in result.gpus] == list(range(len(names)))
    assert (f"CUDA_VISIBLE_DEVICES='{visible}'" in result.gpu_reason) == (len(names) < 2)


def test_cards_that_differ_may_be_ordered_otherwise_by_cuda() -> None:
    differing = FakeNvml(cards=(CARD, A100))
    assert "CUDA_DEVICE_ORDER" in found(differing).gpu_reason
    assert "CUDA_DEVICE_ORDER" not in found(differing, CUDA_DEVICE_ORDER="PCI_BUS_ID").gpu_reason
    asked = found(differing, CUDA_DEVICE_ORDER="FASTEST_FIRST").gpu_reason
    assert "set CUDA_DEVICE_ORDER=PCI_BUS_ID" in asked
    assert "CUDA_DEVICE_ORDER" not in found(FakeNvml(cards=(CARD, CARD))).gpu_reason


@pytest.mark.parametrize(
    ("before", "after"), [(None, "PCI_BUS_ID"), ("FASTEST_FIRST", "FASTEST_FIRST")]
)
def test_cuda_numbers_cards_as_they_are_listed_unless_somebody_chose_an_order(
    before: str | None, after: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By itself CUDA puts the A100 first, and a run planned for the other GPU would train there."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", before or "")  # also noted for the end of the test
    if before is None:
        monkeypatch.delenv("CUDA_DEVICE_ORDER")
    result = detect(nvml=FakeNvml(cards=(CARD, A100)))
    assert os.environ["CUDA_DEVICE_ORDER"] == after
    assert result.gpus[0].name == CARD.name
    assert ("CUDA_DEVICE_ORDER" in result.gpu_reason) == (before is not None)


def test_torch_without_cuda_makes_the_card_useless_and_says_so() -> None:
    result = found(FakeNvml(cards=(CARD,)))
    built_without = replace(result, packages={"torch": "2.13.0+cpu"})
    assert built_without.accelerator().value is None
    assert "torch 2.13.0+cpu is built without CUDA" in built_without.accelerator().reason
    built_with = replace(result, packages={"torch": "2.13.0+cu130"})
    assert built_with.accelerator().value == result.gpus[0]


def test_an_assumed_card_counts_even_where_torch_has_no_cuda() -> None:
    result = assume_card(found(FakeNvml()), vram_gib=12)
    card = replace(result, packages={"torch": "2.13.0+cpu"}).accelerator().value
    assert card is not None
    assert card.total_bytes == card.free_bytes == 12 * GIB


def topology(cores: list[int]) -> dict[str, str]:
    files: dict[str, str] = {}
    for processor, core in enumerate(cores):
        folder = f"sys/devices/system/cpu/cpu{processor}/topology"
        files |= {f"{folder}/physical_package_id": "0\n", f"{folder}/core_id": f"{core}\n"}
    return files


@pytest.fixture
def eight_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    process = SimpleNamespace(cpu_affinity=lambda: list(range(8)))
    monkeypatch.setattr(psutil, "Process", lambda: process)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 8 if logical else 6)


@pytest.mark.usefixtures("eight_processors")
@pytest.mark.parametrize(
    ("files", "threads", "said"),
    [
        (topology([0, 0, 1, 1, 2, 2, 3, 3]), 4, "4 physical cores among 8"),
        (topology([0, 1, 2]), 6, "6 physical cores"),  # topology of some unknown: psutil's count
        (topology([0, 0, 1, 1, 2, 2, 3, 3]) | {"sys/fs/cgroup/cpu.max": "250000 100000"}, 2, "2.5"),
        (topology(list(range(8))) | {"sys/fs/cgroup/cpu.max": "max 100000"}, 8, "8 physical"),
        (topology(list(range(8))) | {"sys/fs/cgroup/cpu.max": "50000 100000"}, 1, "0.5"),
    ],
)
def test_threads_are_physical_cores_this_process_may_use(
    tmp_path: Path, files: dict[str, str], threads: int, said: str
) -> None:
    result = detect(nvml=FakeNvml(), environment={}, root=machine(tmp_path, files))
    assert result.cpu_threads == threads
    assert said in result.reasons["cpu_threads"]


@pytest.mark.usefixtures("eight_processors")
def test_affinity_counts_only_the_cores_in_the_mask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(cpu_affinity=lambda: [2, 3]))
    root = machine(tmp_path, topology([0, 0, 1, 1]))
    assert detect(nvml=FakeNvml(), environment={}, root=root).cpu_threads == 1


def test_a_system_without_affinity_or_topology_falls_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "Process", SimpleNamespace)
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 4 if logical else None)
    result = detect(nvml=FakeNvml(), environment={}, root=tmp_path)
    assert result.cpu_threads == 4
    assert result.cpu_name


def test_memory_respects_the_container(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory.max": str(2 * GIB), "sys/fs/cgroup/memory.current": str(GIB)}
    result = detect(nvml=FakeNvml(), environment={}, root=machine(tmp_path, files))
    assert result.ram_total_bytes == 2 * GIB
    assert result.ram_free_bytes <= GIB
    assert "2.0 GiB" in result.reasons["ram_total_bytes"]
    free = detect(nvml=FakeNvml(), environment={}, root=tmp_path / "elsewhere")
    assert free.ram_total_bytes == psutil.virtual_memory().total


def test_every_fact_has_a_reason(tmp_path: Path) -> None:
    root = machine(tmp_path, {"proc/cpuinfo": "processor : 0\nmodel name\t: A Processor\n"})
    facts = detect(nvml=FakeNvml(cards=(CARD,)), environment={}, root=root).facts()
    assert facts["cpu_name"].value == "A Processor"
    assert facts["gpus"].value == (CARD.name,)
    assert all(fact.reason for fact in facts.values())


def test_packages_are_versions_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware_machine, "PACKAGES", ("psutil", "no-such-package-at-all"))
    packages = detect(nvml=FakeNvml(), environment={}).packages
    assert packages == {"psutil": psutil.__version__, "no-such-package-at-all": None}


def test_free_disk_is_that_of_the_nearest_folder_that_exists(tmp_path: Path) -> None:
    result = detect(nvml=FakeNvml(), environment={})
    assert result.disk_free_bytes(tmp_path / "not" / "yet") > 0


@pytest.mark.parametrize(
    ("gib", "name"),
    [
        (None, "cpu"), (4.0, "6-8"), (6.0, "6-8"), (8.0, "6-8"), (9.49, "6-8"), (9.5, "10-12"),
        (12.0, "10-12"), (14.75, "10-12"), (15.49, "10-12"), (15.5, "16-24"), (24.0, "16-24"),
        (80.0, "16-24"),
    ],
)  # fmt: skip
def test_tier_is_the_size_rounded_to_whole_gib(gib: float | None, name: str) -> None:
    assert tier(None if gib is None else int(gib * GIB)) == name


def test_a_card_below_the_smallest_tier_is_a_problem() -> None:
    assert "4.0 GiB" in tier_problem(4 * GIB)
    assert tier_problem(None) == tier_problem(6 * GIB) == ""


def test_detection_imports_no_torch() -> None:
    code = "import sys, lora_trainer.hardware.machine as h; h.detect(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("system", "release", "spills"),
    [
        ("win32", "10", True),
        ("linux", "5.15.153.1-microsoft-standard-WSL2", True),
        ("linux", "6.8.0-generic", False),
    ],
)
def test_windows_and_linux_under_it_spill(system: str, release: str, spills: bool) -> None:
    assert driver_spills(system=system, release=release) is spills


@pytest.mark.parametrize("spills", [True, False])
def test_a_card_is_said_to_spill_where_its_driver_does(
    spills: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware_machine, "driver_spills", lambda: spills)
    result = found(FakeNvml(cards=(CARD,)))
    assert [gpu.spills for gpu in result.gpus] == [spills]
    assert assume_card(result, vram_gib=8).gpus[0].spills is spills
