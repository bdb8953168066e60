"""Segments that grow are asked for where they work, before torch is imported, and never against the user."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from lora_trainer.hardware import torch_allocator
from lora_trainer.hardware.devices import TorchBuild
from lora_trainer.hardware.machine import detect
from lora_trainer.hardware.torch_allocator import OLDER, VARIABLE
from tests.fakes.nvml import FakeCard, FakeNvml

LINUX: dict[str, Any] = {
    "system": "linux",
    "release": "6.8.0-generic",
    "build": TorchBuild(version="2.13.0+cu130", kind="cuda", toolkit="13.0"),
}
OTHERS = {
    "Windows": {**LINUX, "system": "win32", "release": "11"},
    "WSL": {**LINUX, "release": "6.6.87.2-microsoft-standard-WSL2"},
    "ROCm": {**LINUX, "build": TorchBuild(version="2.13.0+rocm7.1", kind="rocm", toolkit="7.1")},
    "macOS": {
        "system": "darwin",
        "release": "25.0.0",
        "build": TorchBuild(version="2.13.0", kind="mps"),
    },
    "Intel": {**LINUX, "build": TorchBuild(version="2.13.0+xpu", kind="xpu")},
}


def test_they_are_asked_for_on_linux() -> None:
    environment: dict[str, str] = {}
    torch_allocator.ask_for(environment, **LINUX)
    assert environment == {VARIABLE: "expandable_segments:True"}
    assert torch_allocator.in_force(environment, **LINUX)


@pytest.mark.parametrize("platform", OTHERS.values(), ids=OTHERS)
def test_they_are_not_where_drivers_or_builds_lack_them(platform: dict[str, Any]) -> None:
    environment: dict[str, str] = {}
    torch_allocator.ask_for(environment, **platform)
    assert environment == {}
    asked = {VARIABLE: "expandable_segments:True"}
    assert not torch_allocator.in_force(asked, **platform), "the plan counts without"


@pytest.mark.parametrize("name", [VARIABLE, *OLDER])
@pytest.mark.parametrize(
    ("value", "in_force"),
    [
        ("expandable_segments:True", True),
        ("max_split_size_mb:128, expandable_segments: True", True),
        ("expandable_segments:False", False),
        ("garbage_collection_threshold:0.8,roundup_power2_divisions:[256:1,>:2]", False),
    ],
)
def test_what_the_user_set_stands_and_is_planned_with(
    name: str, value: str, in_force: bool
) -> None:
    environment = {name: value}
    torch_allocator.ask_for(environment, **LINUX)
    assert environment == {name: value}
    assert torch_allocator.in_force(environment, **LINUX) == in_force


def test_the_newer_variable_wins_as_in_torch() -> None:
    environment = {VARIABLE: "expandable_segments:False", OLDER[0]: "expandable_segments:True"}
    assert not torch_allocator.in_force(environment, **LINUX)


@pytest.mark.skipif(sys.platform != "linux", reason="asked for on Linux only")
def test_a_plan_of_the_command_line_counts_with_them() -> None:
    """In a fresh process: the variable is there before torch is, and the hardware says so."""
    program = """
import os, sys
from lora_trainer.cli.main import run, main
from lora_trainer.cli import main as cli
def show(arguments):
    print(os.environ.get("PYTORCH_ALLOC_CONF"), "torch" in sys.modules)
    return 0
cli.run = show
main([])
"""
    environment = {name: text for name, text in os.environ.items() if "ALLOC_CONF" not in name}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    asked: dict[str, str] = {}
    torch_allocator.ask_for(asked)
    expected = asked.get(VARIABLE, "None")
    assert done.stdout.split() == [expected, "False"]


def test_the_hardware_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_allocator, "_works", lambda *_: True)
    nvml = FakeNvml(cards=(FakeCard(),))
    assert detect(nvml=nvml, environment={VARIABLE: "expandable_segments:True"}).expandable_segments
    assert not detect(nvml=nvml, environment={}).expandable_segments
