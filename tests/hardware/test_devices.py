"""Machines that are not here: which GPU is taken, what a kind of GPU cannot have, and that one file knows it."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from lora_trainer.common.errors import MachineError
from lora_trainer.config.learning import OptimizerSettings
from lora_trainer.hardware import devices
from lora_trainer.hardware import machine as hardware_machine
from lora_trainer.hardware.device_calls import found_by_torch, require_kernels
from lora_trainer.hardware.devices import KINDS, TorchBuild, torch_build
from lora_trainer.hardware.machine import Hardware, detect
from lora_trainer.hardware.nvml import Gpu
from lora_trainer.run import device, prepare
from lora_trainer.training import optimizers
from lora_trainer.training.optimizers import build_optimizer
from tests.fakes.nvml import GIB, FakeCard, FakeNvml
from tests.fakes.plans import SDXL, machine, planned
from tests.fakes.runs import ROOT

ROCM_BUILD = TorchBuild(version="2.13.0+rocm6.4", kind="rocm", toolkit="6.4")
CU130 = TorchBuild(version="2.13.0+cu130", kind="cuda", toolkit="13.0")
OLD = FakeCard(
    name="NVIDIA GeForce GTX 1080 Ti", total_bytes=11 * GIB, free_bytes=11 * GIB, capability=(6, 1)
)
SMALL = FakeCard(uuid="GPU-b")
LARGE = FakeCard(
    name="NVIDIA GeForce RTX 3090", total_bytes=24 * GIB, free_bytes=20 * GIB, uuid="GPU-c"
)
BUSY = replace(LARGE, free_bytes=2 * GIB, uuid="GPU-d")


def with_cards(*cards: FakeCard, build: TorchBuild = CU130) -> Hardware:
    found = detect(nvml=FakeNvml(cards=cards), environment={})
    return replace(found, torch=build, packages={**found.packages, "torch": build.version})


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
    mps = api(mps_bytes)
    mps.is_available = lambda: mps_bytes > 0
    about = {"__version__": "2.13.0", "version": SimpleNamespace(hip=hip), "mps": mps}
    return SimpleNamespace(**kinds, **about, backends=SimpleNamespace(mps=mps))


def a_gpu(name: str, **facts: Any) -> Any:
    return SimpleNamespace(**{"name": name, "total_bytes": 16 * GIB, **facts})


def of_kind(fake: Any, build: TorchBuild) -> Hardware:
    """A machine of another maker, as `detect` finds it with that torch."""
    found = tuple(
        Gpu(**fields, compute_capability=None, driver=build.toolkit)
        for fields in json.loads(json.dumps(found_by_torch(torch=fake)))
    )
    plain = machine(12)
    return replace(
        plain, gpus=found, packages={**plain.packages, "torch": build.version}, torch=build
    )


ROCM = of_kind(
    fake_torch(
        "cuda",
        a_gpu("AMD Radeon RX 6800", gcnArchName="gfx1030:sramecc-"),
        a_gpu("AMD Radeon RX 7900 XTX", gcnArchName="gfx1100", total_bytes=24 * GIB),
        hip="6.4",
    ),
    ROCM_BUILD,
)
MPS = of_kind(fake_torch("mps", mps_bytes=48 * GIB), TorchBuild(version="2.13.0", kind="mps"))
XPU = of_kind(
    fake_torch("xpu", a_gpu("Intel(R) Arc(TM) A770 Graphics")),
    TorchBuild(version="2.13.0+xpu", kind="xpu", toolkit="20250302"),
)
OTHERS = pytest.mark.parametrize(
    ("here", "kind"), [(ROCM, "rocm"), (MPS, "mps"), (XPU, "xpu")], ids=["rocm", "mps", "xpu"]
)


# ---- the best of several


def test_the_best_card_is_taken_and_not_the_first() -> None:
    found = with_cards(SMALL, BUSY, LARGE).accelerator()
    assert found.value is not None and (found.value.index, found.value.name) == (2, LARGE.name)
    assert "GPU 2 is the best of them" in found.reason
    built_for = with_cards(OLD, SMALL).accelerator().value
    assert built_for is not None and built_for.index == 1, "torch has no kernels for the first"
    own = replace(CU130, toolkit="13.x-git")
    assert with_cards(OLD, build=own).accelerator().value is not None, "it is not judged"


@pytest.mark.parametrize(
    ("card", "build", "index"),
    [
        (OLD, CU130, "cu126"),
        (replace(LARGE, name="RTX 5090", capability=(12, 0)), replace(CU130, toolkit="12.6"), "cu128"),
        (SMALL, ROCM_BUILD, "cu128"),
    ],
    ids=["pascal on cu130", "blackwell on cu126", "rocm"],
)  # fmt: skip
def test_a_card_without_kernels_is_refused_in_a_line_with_the_command(
    card: FakeCard, build: TorchBuild, index: str
) -> None:
    here = with_cards(card, build=build)
    found = here.accelerator()
    assert found.value is None and card.name in found.reason
    assert found.reason.endswith(f"https://download.pytorch.org/whl/{index}")
    with pytest.raises(MachineError, match=re.escape(found.reason)):
        planned(SDXL, here, overrides={"hardware.device": "cuda"})


@pytest.mark.parametrize(
    ("capability", "archs", "runs"),
    [
        ((8, 9), ("sm_75", "sm_80", "sm_86", "sm_90"), True),
        ((12, 1), ("sm_90", "sm_100", "sm_120"), True),
        ((12, 0), ("sm_80", "compute_90"), True),
        ((7, 0), ("sm_75", "sm_80"), False),
        ((10, 3), ("sm_100a",), False),
        ((8, 6), (), True),
    ],
)
def test_kernels_are_matched_as_cuda_does(
    capability: tuple[int, int], archs: tuple[str, ...], runs: bool
) -> None:
    fake = fake_torch("cuda", a_gpu("card", capability=capability), archs=archs)
    problem = require_kernels(torch.device("cuda", 0), torch=fake)
    assert (problem == "") is runs
    assert runs or "download.pytorch.org/whl/cu" in problem


def test_several_processes_are_planned_for_the_smallest_card_that_takes_part() -> None:
    here = with_cards(SMALL, BUSY, LARGE)
    two = here.accelerator(sharing=2).value
    assert two is not None and (two.name, two.free_bytes) == (LARGE.name, BUSY.free_bytes)
    three = here.accelerator(sharing=3)
    assert three.value is not None and three.value.free_bytes == BUSY.free_bytes
    assert "the smallest of the 3 GPUs in this run" in three.reason
    # The order follows from what does not change when the first of them has loaded its base.
    orders = [
        [
            gpu.index
            for gpu in with_cards(SMALL, card, replace(LARGE, uuid="GPU-e")).usable(sharing=3)
        ]
        for card in (LARGE, BUSY)
    ]
    assert orders[0] == orders[1] == [1, 2, 0]
    alone = with_cards(SMALL).accelerator(sharing=2)
    assert alone.value is not None and alone.value.free_bytes == SMALL.free_bytes // 2
    assert "2 processes on each" in alone.reason


def prepared(here: Hardware, *, sharing: int = 1) -> prepare.Prepared:
    made = SimpleNamespace(
        config=SimpleNamespace(hardware=SimpleNamespace(device="cuda")),
        hardware=here,
        sharing=sharing,
        processes=sharing,
    )
    return cast(prepare.Prepared, made)


@pytest.fixture
def seen_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch sees the GPUs; whoever asks one for its memory would open a context on it."""

    def refuse(*_: Any) -> None:
        raise AssertionError("a context was opened")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", refuse)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_86"])


@pytest.mark.usefixtures("seen_cards")
def test_a_process_trains_on_the_card_it_was_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    here = with_cards(SMALL, BUSY, LARGE)
    assert device.planned_device(prepared(here)) == torch.device("cuda", 2)
    taken = []
    for rank in range(3):
        monkeypatch.setattr(
            device, "read_dist_env", lambda rank=rank: SimpleNamespace(local_rank=rank)
        )
        taken.append(device.planned_device(prepared(here, sharing=3)).index)
    assert sorted(taken) == [0, 1, 2]


@pytest.mark.usefixtures("seen_cards")
def test_a_scheduler_may_show_each_process_its_own_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then that one is number 0, and all of its memory is this process's."""
    nvml = FakeNvml(cards=(SMALL, LARGE))
    found = detect(nvml=nvml, environment={"CUDA_VISIBLE_DEVICES": "1"})
    here = replace(found, torch=CU130, packages={**found.packages, "torch": CU130.version})
    monkeypatch.setattr(device, "read_dist_env", lambda: SimpleNamespace(local_rank=1))
    assert device.planned_device(prepared(here, sharing=2)) == torch.device("cuda", 0)
    card = here.accelerator(sharing=2).value
    assert card is not None and card.free_bytes == LARGE.free_bytes


# ---- other makers


@OTHERS
def test_a_gpu_of_another_maker_is_found_and_planned_for(here: Hardware, kind: str) -> None:
    if kind == "rocm":  # the one that computes bf16 is taken
        found = here.accelerator().value
        assert found is not None and (found.index, found.kind) == (1, "rocm")
        assert [gpu.has_bf16 for gpu in here.gpus] == [False, True]
    made = planned(SDXL, here)
    assert made.config.hardware.device == KINDS[kind].torch_type  # type: ignore[index]
    assert made.config.train.precision == "bf16"
    assert made.memory.fits
    assert made.config.hardware.compile == "none"


@OTHERS
def test_what_a_kind_lacks_is_refused_where_it_was_typed(here: Hardware, kind: str) -> None:
    libraries = dict.fromkeys(("bitsandbytes", "xformers", "triton"), "1")
    here = replace(here, packages={**here.packages, **libraries})
    for wish, why in KINDS[kind].lacks.items():  # type: ignore[index]
        key, _, value = wish.partition("=")
        typed: Any = True if value == "True" else value
        with pytest.raises(MachineError, match=re.escape(why)):
            planned(SDXL, here, overrides={key: typed})


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_adamw_is_fused_only_where_that_heeds_a_bad_step(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On MPS fused optimizers took a step of NaN all the same (pytorch#186360)."""
    monkeypatch.setattr(optimizers, "kind_of", lambda _: KINDS[kind])  # type: ignore[index]
    group = {"params": [torch.nn.Parameter(torch.zeros(2))], "lr_scale": 1.0}
    made = build_optimizer([group], OptimizerSettings(name="adamw"))
    heeds = bool(getattr(made, "_step_supports_amp_scaling", False))
    assert heeds is (kind in ("cuda", "rocm", "cpu"))


def test_detect_asks_a_torch_of_another_maker_in_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = {
        "index": 1,
        "name": "X",
        "total_bytes": 4,
        "free_bytes": 3,
        "kind": "rocm",
        "bf16": True,
    }
    done = SimpleNamespace(stdout=f"noise\n{json.dumps([card])}\n".encode())
    monkeypatch.setattr(hardware_machine, "torch_build", lambda: ROCM_BUILD)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: done)
    found = detect(nvml=FakeNvml(refuses={"nvmlInit": "Driver Not Loaded"}), environment={})
    assert [(gpu.index, gpu.kind, gpu.bf16) for gpu in found.gpus] == [(1, "rocm", True)]
    assert "1 GPU found by torch 2.13.0+rocm6.4, built for ROCM 6.4" in found.gpu_reason


def test_a_card_that_waits_for_another_torch_is_named(tmp_path: Path) -> None:
    vendor = tmp_path / "sys/class/drm/card0/device/vendor"
    vendor.parent.mkdir(parents=True)
    vendor.write_text("0x1002\n", encoding="utf-8")
    nvml = FakeNvml(refuses={"nvmlInit": "Shared Library Not Found"})
    found = detect(nvml=nvml, environment={}, root=tmp_path)
    assert found.gpus == ()
    assert "a GPU of AMD" in found.gpu_reason and "whl/rocm" in found.gpu_reason


@pytest.mark.parametrize(
    ("text", "kind", "toolkit"),
    [
        ("__version__ = '2.13.0'\ncuda = None\n", "mps", ""),
        ("__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n", "cuda", "13.0"),
        ("__version__ = '2.13.0+rocm6.4'\ncuda: Optional[str] = None\nhip: Optional[str] = '6.4.4'\n", "rocm", "6.4.4"),
        ("__version__ = '2.13.0+xpu'\ncuda = None\nhip = None\nxpu = '20250302'\n", "xpu", "20250302"),
        ("__version__ = '2.13.0+cpu'\ncuda = None\nhip = None\nxpu = None\n", "cpu", ""),
    ],
)  # fmt: skip
def test_the_build_of_torch_is_read_and_not_imported(
    tmp_path: Path, text: str, kind: str, toolkit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices.sys, "platform", "darwin" if kind == "mps" else "linux")
    monkeypatch.setattr(devices.platform, "machine", lambda: "arm64")
    (tmp_path / "version.py").write_text(text, encoding="utf-8")
    found = torch_build(tmp_path)
    assert found is not None and (found.kind, found.toolkit) == (kind, toolkit)


# ---- one description


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
    found: dict[str, list[str]] = {}
    for file in sorted([*(ROOT / "lora_trainer").rglob("*.py"), *(ROOT / "gui").rglob("*.py")]):
        name = file.relative_to(ROOT).as_posix()
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
            if ASKS.search(line.partition("  #")[0]) and name not in MAY_ASK:
                found.setdefault(name, []).append(f"{number}: {line.strip()}")
    assert found == {}
