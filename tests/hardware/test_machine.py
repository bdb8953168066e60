"""Machines that are not here: what is found, which GPU is taken, what it cannot have; and detection never fails."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.common.errors import MachineError, RequestError
from lora_trainer.config.optimizers import OptimizerSettings
from lora_trainer.hardware import device_calls, devices, machine
from lora_trainer.hardware.dashboards import PACKAGE_OF
from lora_trainer.hardware.devices import TorchBuild
from lora_trainer.hardware.machine import Hardware, detect
from lora_trainer.hardware.nvml import Gpu
from lora_trainer.run import device
from lora_trainer.training import optimizers
from tests.fakes.nvml import GIB, FakeCard, FakeNvml
from tests.fakes.plans import MACHINE, SDXL, planned
from tests.fakes.runs import ROOT

ROCM_BUILD = TorchBuild(version="2.13.0+rocm6.4", kind="rocm", toolkit="6.4")
CU130 = TorchBuild(version="2.13.0+cu130", kind="cuda", toolkit="13.0")
CARD = FakeCard()
A100 = FakeCard(name="NVIDIA A100-SXM4-40GB", capability=(8, 0), uuid="GPU-bbbb")
OLD = FakeCard(name="NVIDIA GeForce GTX 1080 Ti", free_bytes=12 * GIB, capability=(6, 1))
LARGE = FakeCard(
    name="NVIDIA GeForce RTX 3090", total_bytes=24 * GIB, free_bytes=20 * GIB, uuid="GPU-c"
)
BUSY = replace(LARGE, free_bytes=2 * GIB, uuid="GPU-d")


def with_cards(*cards: FakeCard, build: TorchBuild = CU130, **environment: str) -> Hardware:
    found = detect(nvml=FakeNvml(cards=cards), environment=environment)
    return replace(found, torch=build, packages={**found.packages, "torch": build.version})


def written(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


# ---- NVIDIA's GPUs

CALLS = tuple(
    f"nvmlDeviceGet{name}"
    for name in (
        *("HandleByIndex", "Name", "UUID", "MemoryInfo", "CudaComputeCapability"),
        *("MigMode", "DisplayActive"),
    )
)


def test_a_card_is_described_with_its_driver(tmp_path: Path) -> None:
    nvml = FakeNvml(cards=(CARD,))
    root = written(tmp_path, {"proc/cpuinfo": "processor : 0\nmodel name\t: A Processor\n"})
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
    older = FakeNvml(cards=(CARD,))
    monkeypatch.setattr(older, "nvmlDeviceGetCount", None)
    assert "pynvml lacks nvmlDeviceGetCount" in detect(nvml=older, environment={}).gpu_reason
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "nvidia-ml-py is not installed" in detect(environment={}).gpu_reason


@pytest.mark.parametrize("call", CALLS)
def test_a_call_that_fails_on_one_card_leaves_the_other_alone(call: str) -> None:
    lost = replace(A100, display=True, refuses={call: "GPU is lost"})
    result = with_cards(lost, replace(CARD, display=True))
    assert (result.gpus[-1].name, result.gpus[-1].display) == (CARD.name, True)
    assert len(result.gpus) == (1 if call.endswith(("HandleByIndex", "MemoryInfo")) else 2)
    assert result.gpus[0].index == 0, "CUDA numbers what it can use"
    is_quiet = call.endswith(("UUID", "MigMode", "DisplayActive"))
    assert (f"GPU 0: {call} said GPU is lost" in result.gpu_reason) == (not is_quiet)
    assert ("GPU is lost" in result.gpu_reason) == (not is_quiet)
    if call.endswith("Capability"):
        assert result.gpus[0].compute_capability is None, "unknown is not a guess"
    assert result.gpus[0].display == (not call.endswith("DisplayActive"))


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


# ---- the best of several


def test_the_best_card_is_taken_and_not_the_first() -> None:
    gpu, reason = with_cards(CARD, BUSY, LARGE).accelerator()
    assert gpu is not None and (gpu.index, gpu.name) == (2, LARGE.name)
    assert "GPU 2 is the best of them" in reason
    built_for, _ = with_cards(OLD, CARD).accelerator()
    assert built_for is not None and built_for.index == 1, "torch has no kernels for the first"
    own = replace(CU130, toolkit="13.x-git")
    assert with_cards(OLD, build=own).accelerator()[0] is not None, "it is not judged"


@pytest.mark.parametrize(
    ("card", "build", "index"),
    [
        (OLD, CU130, "cu126"),
        (replace(LARGE, name="RTX 5090", capability=(12, 0)), replace(CU130, toolkit="12.6"), "cu130"),
        (CARD, ROCM_BUILD, "cu130"),
    ],
    ids=["pascal on cu130", "blackwell on cu126", "rocm"],
)  # fmt: skip
def test_a_card_without_kernels_is_refused_in_a_line_with_the_command(
    card: FakeCard, build: TorchBuild, index: str
) -> None:
    here = with_cards(card, build=build)
    gpu, reason = here.accelerator()
    assert gpu is None and card.name in reason
    assert reason.endswith(f"https://download.pytorch.org/whl/{index}")
    with pytest.raises(MachineError, match=re.escape(reason)):
        planned(SDXL, here, overrides={"hardware.device": "cuda"})


def test_several_processes_are_planned_for_the_smallest_card_that_takes_part() -> None:
    here = with_cards(CARD, BUSY, LARGE)
    two, _ = here.accelerator(sharing=2)
    assert two is not None and (two.name, two.free_bytes) == (LARGE.name, BUSY.free_bytes)
    three, reason = here.accelerator(sharing=3)
    assert three is not None and three.free_bytes == BUSY.free_bytes
    assert "the smallest of the 3 GPUs in this run" in reason
    # The order follows from what does not change when the first of them has loaded its base.
    for first in (LARGE, BUSY):
        usable = with_cards(CARD, first, replace(LARGE, uuid="GPU-e")).usable(sharing=3)
        assert [gpu.index for gpu in usable] == [1, 2, 0]
    alone, reason = with_cards(CARD).accelerator(sharing=2)
    assert alone is not None and alone.free_bytes == CARD.free_bytes // 2
    assert "2 processes on each" in reason


def test_a_process_trains_on_the_card_it_was_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process asks another's GPU for its memory: that would open a context on it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: pytest.fail("a context was opened"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_86"])

    def taken(here: Hardware, rank: int, sharing: int) -> int | None:
        monkeypatch.setattr(device, "read_dist_env", lambda: SimpleNamespace(local_rank=rank))
        config = SimpleNamespace(hardware=SimpleNamespace(device="cuda"))
        shares = {"sharing": sharing, "processes": sharing}
        prepared: Any = SimpleNamespace(
            config=config, hardware=here, inputs=SimpleNamespace(**shares)
        )
        return device.planned_device(prepared).index

    here = with_cards(CARD, BUSY, LARGE)
    assert taken(here, 0, 1) == 2
    assert sorted(str(taken(here, rank, 3)) for rank in range(3)) == ["0", "1", "2"]
    # A scheduler may show each process its own GPU. It is number 0, and all of its memory is this process's.
    here = with_cards(CARD, LARGE, CUDA_VISIBLE_DEVICES="1")
    assert taken(here, 1, 2) == 0
    card, _ = here.accelerator(sharing=2)
    assert card is not None and card.free_bytes == LARGE.free_bytes


# ---- other makers


def fake_torch(
    kind: str, *gpus: Any, mps_bytes: int = 0, hip: str | None = None, archs: tuple[str, ...] = ()
) -> Any:
    """Return a torch module as it is on another machine: what its devices answer, and no more."""

    def api(gpus: Any) -> SimpleNamespace:
        return SimpleNamespace(
            is_available=lambda: bool(gpus),
            device_count=lambda: len(gpus),
            mem_get_info=lambda index: (15 * GIB, gpus[index].total_bytes),
            get_device_properties=lambda index: gpus[index],
            get_device_name=lambda device: gpus[device.index].name,
            get_device_capability=lambda device: gpus[device.index].capability,
            get_arch_list=lambda: list(archs),
            is_bf16_supported=lambda: True,
            recommended_max_memory=lambda: mps_bytes,
            driver_allocated_memory=lambda: GIB,
            get_name=lambda: "Apple M3 Max",
            is_macos_or_newer=lambda *asked: asked <= (15, 1),
        )

    kinds = {name: api(gpus if name == kind else ()) for name in ("cuda", "xpu")}
    mps = api(range(mps_bytes))
    about = {"__version__": "2.13.0", "version": SimpleNamespace(hip=hip), "mps": mps}
    return SimpleNamespace(**kinds, **about, backends=SimpleNamespace(mps=mps))


def a_gpu(name: str, **facts: Any) -> Any:
    return SimpleNamespace(**{"name": name, "total_bytes": 16 * GIB, **facts})


def of_kind(fake: Any, build: TorchBuild) -> Hardware:
    """A machine of another maker, as `detect` finds it with that torch."""
    found = tuple(
        Gpu(**fields, compute_capability=None, driver=build.toolkit)
        for fields in json.loads(json.dumps(device_calls.found_by_torch(torch=fake)))
    )
    packages = dict.fromkeys((*MACHINE.packages, "xformers", "triton"), "1")
    return replace(MACHINE, gpus=found, packages=packages, torch=build)


RADEONS = (
    a_gpu("AMD Radeon RX 6800", gcnArchName="gfx1030:sramecc-"),
    a_gpu("AMD Radeon RX 7900 XTX", gcnArchName="gfx1100", total_bytes=24 * GIB),
)
APPLE, XPU_BUILD = (TorchBuild(version="2.13.0", kind=kind) for kind in ("mps", "xpu"))  # type: ignore[arg-type]  # kinds
MPS = of_kind(fake_torch("mps", mps_bytes=48 * GIB), APPLE)


@pytest.mark.parametrize(
    ("here", "kind"),
    [
        (of_kind(fake_torch("cuda", *RADEONS, hip="6.4"), ROCM_BUILD), "rocm"),
        (MPS, "mps"),
        (of_kind(fake_torch("xpu", a_gpu("Intel(R) Arc(TM) A770 Graphics")), XPU_BUILD), "xpu"),
    ],
    ids=["rocm", "mps", "xpu"],
)
def test_a_gpu_of_another_maker_is_planned_for_and_what_it_lacks_is_refused(
    here: Hardware, kind: Any
) -> None:
    if kind == "rocm":  # the one that computes bf16 is taken
        found, _ = here.accelerator()
        assert found is not None and (found.index, found.kind) == (1, "rocm")
        assert [gpu.has_bf16 for gpu in here.gpus] == [False, True]
    made = planned(SDXL, here)
    assert made.config.hardware.device == devices.KINDS[kind].torch_type
    assert made.config.train.precision == "bf16"
    assert made.memory.fits
    assert made.config.hardware.compile == "none"
    for wish, why in devices.KINDS[kind].lacks.items():
        key, _, value = wish.partition("=")
        with pytest.raises(MachineError, match=re.escape(why)):
            planned(SDXL, here, overrides={key: value})
    if not devices.KINDS[kind].own_memory:
        with pytest.raises(RequestError, match="shares the machine's memory"):
            planned(SDXL, here, overrides={"memory.streamed_blocks": 4})


@pytest.mark.parametrize("kind", sorted(devices.KINDS))
def test_adamw_is_fused_only_where_that_heeds_a_bad_step(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On MPS fused optimizers took a step of NaN all the same (pytorch#186360)."""
    monkeypatch.setattr(optimizers, "kind_of", lambda _: devices.KINDS[kind])
    group = {"params": [torch.nn.Parameter(torch.zeros(2))], "lr_scale": 1.0}
    made = optimizers.build_optimizer([group], OptimizerSettings(name="adamw"))
    heeds = bool(getattr(made, "_step_supports_amp_scaling", False))
    assert heeds is (kind in ("cuda", "rocm", "cpu"))


def test_a_torch_of_another_maker_is_asked_in_a_process_and_its_lack_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    nvml = FakeNvml(refuses={"nvmlInit": "Driver Not Loaded"})
    vendor = written(tmp_path, {"sys/class/drm/card0/device/vendor": "0x1002\n"})
    found = detect(nvml=nvml, environment={}, root=vendor)
    assert found.gpus == ()
    assert "a GPU of AMD" in found.gpu_reason and "whl/rocm" in found.gpu_reason
    card = {
        "index": 1,
        "name": "X",
        "total_bytes": 4,
        "free_bytes": 3,
        "kind": "rocm",
        "bf16": True,
    }
    done = SimpleNamespace(stdout=f"noise\n{json.dumps([card])}\n".encode())
    monkeypatch.setattr(machine, "torch_build", lambda: ROCM_BUILD)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    found = detect(nvml=nvml, environment={})
    assert [(gpu.index, gpu.kind, gpu.bf16) for gpu in found.gpus] == [(1, "rocm", True)]
    assert "1 GPU found by torch 2.13.0+rocm6.4, built for ROCM 6.4" in found.gpu_reason


def test_kernels_are_matched_as_cuda_does() -> None:
    for capability, archs, runs in (
        ((8, 9), ("sm_75", "sm_80", "sm_86", "sm_90"), True),
        ((12, 1), ("sm_90", "sm_100", "sm_120"), True),
        ((12, 0), ("sm_80", "compute_90"), True),
        ((7, 0), ("sm_75", "sm_80"), False),
        ((10, 3), ("sm_100a",), False),
        ((8, 6), (), True),
    ):
        fake = fake_torch("cuda", a_gpu("card", capability=capability), archs=archs)
        problem = device_calls.require_kernels(torch.device("cuda", 0), torch=fake)
        assert (problem == "") is runs, archs
        assert runs or "download.pytorch.org/whl/cu" in problem


def test_the_build_of_torch_is_read_and_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices.platform, "machine", lambda: "arm64")
    of = "Optional[str]"
    for kind, toolkit, text in (
        ("mps", "", "cuda = None\n"),
        ("cuda", "13.0", f"cuda: {of} = '13.0'\nhip: {of} = None\n"),
        ("rocm", "6.4.4", f"cuda: {of} = None\nhip: {of} = '6.4.4'\n"),
        ("xpu", "20250302", "cuda = None\nhip = None\nxpu = '20250302'\n"),
        ("cpu", "", "cuda = None\nhip = None\nxpu = None\n"),
    ):
        monkeypatch.setattr(devices.sys, "platform", "darwin" if kind == "mps" else "linux")
        root = written(tmp_path, {"version.py": f"__version__ = '2.13.0'\n{text}"})
        found = devices.torch_build(root)
        assert found is not None and (found.kind, found.toolkit) == (kind, toolkit)
        assert found.version == "2.13.0"


ASKS = re.compile(
    r"torch\.(cuda|mps|xpu)\.|\.is_(cuda|mps|xpu)\b|non_blocking=True"
    r"|(device(\.type)?|torch_type)\s*[!=]=\s*\"(cuda|mps|xpu)\""
)
MAY_ASK = {
    "lora_trainer/hardware/devices.py": "the description itself",
    "lora_trainer/hardware/device_calls.py": "the calls of torch that differ by device",
    "lora_trainer/training/guards.py": "names a kind as the likely cause of learning nothing",
    "lora_trainer/network/pinned_memory.py": "copies on a stream or behind an event, where there are streams",
    "lora_trainer/captioning/captioners.py": "onnxruntime's providers, not torch's devices",
}


def test_nobody_but_the_description_asks_what_a_device_is() -> None:
    found = [
        f"{name}:{number}: {line.strip()}"
        for file in [*(ROOT / "lora_trainer").rglob("*.py"), *(ROOT / "gui").rglob("*.py")]
        if (name := file.relative_to(ROOT).as_posix()) not in MAY_ASK
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
        if ASKS.search(line.partition("  #")[0])
    ]
    assert found == []


# ---- processor, memory and packages


def topology(cores: list[int]) -> dict[str, str]:
    files: dict[str, str] = {}
    for processor, core in enumerate(cores):
        folder = f"sys/devices/system/cpu/cpu{processor}/topology"
        files |= {f"{folder}/physical_package_id": "0\n", f"{folder}/core_id": f"{core}\n"}
    return files


PAIRS = topology([0, 0, 1, 1, 2, 2, 3, 3])


def test_threads_are_physical_cores_this_process_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda logical=True: 8 if logical else 6)
    for number, (files, has_affinity, threads, reason) in enumerate((
        (PAIRS, True, 4, "4 physical cores among 8"),
        (topology([0, 1, 2]), True, 6, "6 physical cores"),  # of some unknown: psutil's count
        (PAIRS | {"sys/fs/cgroup/cpu.max": "250000 100000"}, True, 2, "2.5"),
        (PAIRS | {"sys/fs/cgroup/cpu.max": "50000 100000"}, True, 1, "0.5"),
        ({}, False, 6, "6 physical cores"),  # as on macOS
    )):  # fmt: skip
        process = SimpleNamespace(cpu_affinity=lambda: list(range(8)))
        chosen = process if has_affinity else SimpleNamespace()
        monkeypatch.setattr(psutil, "Process", lambda chosen=chosen: chosen)
        root = written(tmp_path / str(number), files)
        result = detect(nvml=FakeNvml(), environment={}, root=root)
        assert result.cpu_threads == threads
        assert reason in result.reasons["cpu_threads"] and result.cpu_name


def test_memory_respects_the_container(tmp_path: Path) -> None:
    files = {"sys/fs/cgroup/memory.max": str(2 * GIB), "sys/fs/cgroup/memory.current": str(GIB)}
    result = detect(nvml=FakeNvml(), environment={}, root=written(tmp_path, files))
    assert result.ram_total_bytes == 2 * GIB
    assert result.ram_free_bytes <= GIB
    assert "2.0 GiB" in result.reasons["ram_total_bytes"]
    free = detect(nvml=FakeNvml(), environment={}, root=tmp_path / "elsewhere")
    assert free.ram_total_bytes == psutil.virtual_memory().total


def test_packages_are_versions_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "PACKAGES", ("psutil", "no-such-package-at-all"))
    packages = detect(nvml=FakeNvml(), environment={}).packages
    assert packages.pop("tensorboard")  # a dashboard is there if it is installed
    assert packages == {"psutil": psutil.__version__, "no-such-package-at-all": None}


def test_every_dashboard_of_accelerate_has_its_package() -> None:
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    assert set(PACKAGE_OF) == set(LOGGER_TYPE_TO_CLASS)


def test_a_dashboard_that_is_installed_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "comet_ml-3.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: comet-ml\nVersion: 3.1\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert detect(nvml=FakeNvml(), environment={}).packages["comet-ml"] == "3.1"


def test_tier_is_the_size_rounded_to_whole_gib() -> None:
    for gib, name in (
        (4.0, "6-8"), (9.49, "6-8"), (9.5, "10-12"), (15.49, "10-12"), (15.5, "16-24"), (80, "16-24")
    ):  # fmt: skip
        assert machine.tier(int(gib * GIB)) == name
        assert ("4.0 GiB" in machine.tier_problem(int(gib * GIB))) == (gib == 4.0)
    assert (machine.tier(None), machine.tier_problem(None)) == ("cpu", "")


# ---- platforms: drivers that spill, and an allocator whose segments grow

VARIABLE, OLDER = "PYTORCH_ALLOC_CONF", ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
ON = "expandable_segments:True"
LINUX = ("linux", "6.8.0-generic", CU130)
OTHERS = {
    "Windows": ("win32", "11", CU130),
    "WSL": ("linux", "6.6.87.2-microsoft-standard-WSL2", CU130),
    "ROCm": (*LINUX[:2], ROCM_BUILD),
    "macOS": ("darwin", "25.0", APPLE),
    "Intel": (*LINUX[:2], XPU_BUILD),
}


@pytest.fixture
def on_platform(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def play(name: str) -> None:
        system, release, build = OTHERS.get(name, LINUX)
        for module in (machine, devices):
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
    devices.use_expandable_segments(environment)
    assert environment == ({VARIABLE: ON} if name == "Linux" else {})
    result = detect(nvml=FakeNvml(cards=(CARD,)), environment={VARIABLE: ON}, root=tmp_path)
    assert result.expandable_segments == (name == "Linux"), "the plan counts with them"
    assert [gpu.spills for gpu in result.gpus] == [name in ("Windows", "WSL")]
    assert machine.assume_card(result, vram_gib=8).gpus[0].spills == (name in ("Windows", "WSL"))
    half = {"Windows": result.ram_total_bytes // 2, "WSL": GIB // 2}.get(name)
    assert result.pinnable_bytes == half and result.reasons["pinnable_bytes"]
    wsl_with_a_kernel_of_ones_own = written(tmp_path, {"dev/dxg": ""})
    result = detect(nvml=FakeNvml(), environment={}, root=wsl_with_a_kernel_of_ones_own)
    assert result.pinnable_bytes == (half or GIB // 2)


def test_the_users_allocator_stands_and_is_planned_with(on_platform: Callable[[str], None]) -> None:
    on_platform("Linux")
    environment: dict[str, str]
    for environment, grows in (
        ({OLDER[1]: ON}, True),
        ({VARIABLE: "max_split_size_mb:128, expandable_segments: True"}, True),
        ({VARIABLE: "garbage_collection_threshold:0.8,roundup_power2_divisions:[256:1]"}, False),
        ({VARIABLE: "expandable_segments:False", OLDER[0]: ON}, False),  # the newer wins
        ({}, False),
    ):
        assert detect(nvml=FakeNvml(), environment=environment).expandable_segments == grows
        before = dict(environment)
        devices.use_expandable_segments(environment)
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
    devices.use_expandable_segments(asked)
    assert done.stdout.split() == [asked.get(VARIABLE, "None"), "False"]


@pytest.mark.parametrize(
    ("lately", "idle", "nice", "busy"),
    [
        (0.2, 0.0, 0.0, 0.0),  # too little to look
        (2.0, 100.0, 0.0, 0.0),  # a training that has just ended
        (2.0, 0.0, 0.0, 2.0),
        (12.0, 0.0, 0.0, 12.0),  # most of them wait
        (4.0, 50.0, 0.0, 2.0),  # half of them have ended
        (12.0, 0.0, 100.0, 1.2),  # all of them give way
        (11.0, 0.0, 50.0, 2.0),  # ten that give way and one that does not
    ],
)
def test_other_programs_count_as_far_as_they_go_on_and_do_not_give_way(
    monkeypatch: pytest.MonkeyPatch, lately: float, idle: float, nice: float, busy: float
) -> None:
    looked_s = 0.4 / 100  # a tenth of a second of four processors, by percent
    times = namedtuple("times", "user nice idle iowait guest_nice")
    looks = iter(
        (
            times(100.0, 50.0, 900.0, 5.0, 50.0),
            times(
                100.0 + (100 - idle - nice) * looked_s,
                50.0 + nice * looked_s,
                900.0 + idle * looked_s / 2,
                5.0 + idle * looked_s / 2,
                50.0 + nice * looked_s,
            ),
        )
    )
    monkeypatch.setattr(machine.psutil, "getloadavg", lambda: (lately, 0.0, 0.0))
    monkeypatch.setattr(machine.psutil, "cpu_times", lambda: next(looks))
    monkeypatch.setattr(machine.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(machine.psutil, "cpu_count", lambda: 4)
    assert machine.busy_processors() == pytest.approx(busy)
