"""Which build of PyTorch each GPU and driver get: one table, for the installers, `doctor` and torch itself."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch.cuda

from lora_trainer.hardware import machine, torch_builds
from lora_trainer.hardware.devices import TorchBuild
from tests.fakes.nvml import FakeCard, FakeNvml

ROOT = Path(__file__).resolve().parents[2]
GPUS = {"Kepler": (3, 7), "Pascal": (6, 1), "Turing": (7, 5), "Ada": (8, 9), "Blackwell": (12, 0)}
DRIVERS = ("470.82", "525.60", "550.54", "572.16", "580.65", "590.44")
TOO_OLD_525, TOO_OLD_580 = "needs 525 or newer", "needs 580 or newer"
# Rows are GPUs, columns the drivers above.
LINUX = {
    "Pascal": (TOO_OLD_525, "cu126", "cu126", "cu126", "cu126", "cu126"),
    "Turing": (TOO_OLD_525, "cu129", "cu129", "cu129", "cu130", "cu130"),
    "Ada": (TOO_OLD_525, "cu129", "cu129", "cu129", "cu130", "cu130"),
    "Blackwell": (TOO_OLD_525, "cu129", "cu129", "cu129", "cu130", "cu130"),
    "Kepler": ("5.0 is the oldest",) * 6,
}
WINDOWS = {  # no build for CUDA 12.9
    "Pascal": LINUX["Pascal"],
    "Turing": (TOO_OLD_525, "cu126", "cu126", "cu126", "cu130", "cu130"),
    "Ada": (TOO_OLD_525, "cu126", "cu126", "cu126", "cu130", "cu130"),
    "Blackwell": (*(TOO_OLD_580,) * 4, "cu130", "cu130"),
    "Kepler": LINUX["Kepler"],
}
TABLE = [
    pytest.param(system, gpu, driver, answer, id=f"{system} {gpu} {driver}")
    for system, rows in (("linux", LINUX), ("win32", WINDOWS))
    for gpu, answers in rows.items()
    for driver, answer in zip(DRIVERS, answers, strict=True)
]
"""System, GPU, driver, and the folder of PyTorch's indexes or the reason for none."""


@pytest.mark.parametrize(("system", "gpu", "driver", "answer"), TABLE)
def test_each_gpu_and_driver_get_the_build_that_runs(
    system: str, gpu: str, driver: str, answer: str
) -> None:
    build, problem = torch_builds.choose_cuda(
        [GPUS[gpu]], driver, system=system, machine="AMD64" if system == "win32" else "x86_64"
    )
    if build is None:
        assert problem.endswith(answer)
    else:
        assert (build.folder, problem) == (answer, "")


def test_the_table_is_that_of_the_installed_torch() -> None:
    """torch names the builds of its release and their kernels."""
    if torch.__version__.partition("+")[0] != torch_builds.TORCH.partition("==")[2]:
        pytest.skip(f"the table is that of {torch_builds.TORCH}, which CI installs")
    of_torch = torch.cuda.PYTORCH_RELEASES_CODE_CC
    for arch in ("x86_64", "aarch64"):
        for build in torch_builds.cuda_builds(system="linux", machine=arch):
            numbers = {10 * major + minor for major, minor in build.kernels}
            assert numbers == of_torch[build.toolkit][arch]
            assert build.folder == "cu" + build.toolkit.replace(".", "")


def test_several_gpus_get_a_build_for_all_of_them_else_for_the_newest() -> None:
    def choose(*gpus: str) -> str:
        chosen = [GPUS[gpu] for gpu in gpus]
        build, problem = torch_builds.choose_cuda(
            chosen, "580.65", system="linux", machine="x86_64"
        )
        return problem if build is None else build.folder

    assert choose("Ada", "Pascal") == "cu126"
    assert choose("Blackwell", "Pascal") == "cu130"
    assert choose("Kepler", "Turing") == "cu130"
    future, problem = torch_builds.choose_cuda([(15, 0)], "700", system="linux", machine="x86_64")
    assert future is None and problem.endswith("update lora-train")


def test_no_index_that_the_table_lacks_is_named_anywhere() -> None:
    """The index cu128, which ended with torch 2.11, stood in hints for months."""
    folders = {build.folder for system in ("linux", "win32") for build in
               torch_builds.cuda_builds(system=system)}  # fmt: skip
    folders |= {folder for row in torch_builds.FOLDERS.values() for folder in row}
    named = {}
    for pattern in ("README.md", "docs/*.md", "install/*", "launch/**/*", "lora_trainer/**/*.t*"):
        for path in (ROOT).glob(pattern):
            if path.is_file():
                text = path.read_text(encoding="utf-8", errors="replace")
                found = re.findall(r"\b(?:whl/)?((?:cu1\d\d|rocm\d\.\d+))\b(?!\.py)", text)
                named[path.relative_to(ROOT).as_posix()] = set(found) - folders
    del named["lora_trainer/hardware/torch_builds.toml"]  # it says since when cu128 is gone
    assert {name: found for name, found in named.items() if found} == {}


@pytest.mark.parametrize(
    ("driver", "toolkit", "capability", "cure"),
    [
        ("572.16", "13.0", (8, 9), "update NVIDIA's driver, or pip install torch==2.13.0 --force"),
        (
            "535.1",
            "13.0",
            (6, 1),
            "pip install torch==2.13.0 --force-reinstall",
        ),  # no kernels either
        ("470.82", "12.6", (6, 1), "update NVIDIA's driver"),
        ("470.82", "11.8", (6, 1), ""),  # R470 runs CUDA 11
        ("525.60", "12.9", (8, 9), ""),
        ("580.65", "13.2", (8, 9), ""),
        ("", "13.0", (8, 9), ""),  # it is not judged
    ],
)
def test_a_driver_too_old_for_the_installed_build_is_named_with_both_numbers(
    driver: str, toolkit: str, capability: tuple[int, int], cure: str
) -> None:
    installed = TorchBuild(version="2.13.0", kind="cuda", toolkit=toolkit)
    found = machine.detect(
        nvml=FakeNvml(cards=(FakeCard(capability=capability),), driver=driver), environment={}
    )
    here = machine.replace(found, torch=installed)
    problem, said = here.against(here.gpus[0])
    assert said.startswith(cure) and bool(said) == bool(problem) == bool(cure)
    if "driver" in problem:
        assert driver in problem and f"needs {torch_builds.needed_driver(toolkit)} or" in problem
    gpu, reason = here.accelerator()
    assert (gpu is None) == bool(cure) and (problem in reason)
