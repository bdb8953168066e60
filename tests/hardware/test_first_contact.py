"""What only a real GPU's start shows, played: an allocator that the driver refuses, workers that signals reach."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor
from torch._inductor import async_compile

from lora_trainer.common.event_kinds import Event
from lora_trainer.common.events import EventStream
from lora_trainer.common.processes import quiet_libraries
from lora_trainer.hardware import device_calls, machine
from lora_trainer.hardware.devices import KINDS, TorchBuild
from lora_trainer.network import compiling
from lora_trainer.run.device import check_allocator
from lora_trainer.training.distributed import process_group
from lora_trainer.training.distributed.process_group import ProcessGroup
from tests.fakes.plans import MACHINE, SDXL, planned

GPU = torch.device("cuda", 0)
# torch 2.13 on a driver that does not know of links between GPUs.
REFUSED = "Expected NVML_SUCCESS == DriverAPI::get()->nvmlDeviceGetGpuFabricInfoV_(...) to be true"


@pytest.mark.parametrize("refuses", [True, False])
def test_segments_that_the_driver_refuses_have_fixed_sizes_and_the_run_says_so(
    refuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ["expandable_segments:True"]

    def empty(*_: Any, **__: Any) -> None:
        if refuses and settings[-1].endswith("True"):
            raise RuntimeError(REFUSED)

    fake = SimpleNamespace(
        empty=empty,
        OutOfMemoryError=torch.OutOfMemoryError,
        cuda=SimpleNamespace(memory=SimpleNamespace(_set_allocator_settings=settings.append)),
    )
    monkeypatch.setattr(device_calls, "torch", fake)
    monkeypatch.setattr(device_calls, "kind_of", lambda _: KINDS["cuda"])
    told: list[Event] = []
    check_allocator(GPU, EventStream(listeners=[told.append]))
    assert settings[1:] == (["expandable_segments:False"] if refuses else [])
    assert [event.fields["severity"] for event in told] == (["note"] if refuses else [])
    assert all(
        "segments grow, so they do not: Expected NVML" in str(event.fields) for event in told
    )


@pytest.mark.skipif(sys.platform == "win32", reason="Windows compiles in the process itself")
def test_processes_that_compile_do_not_hear_the_signals_that_stop_a_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stops = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    program = "import signal; print(*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, [])))"
    heard: list[set[int]] = []

    def pool() -> None:
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        heard.append(set(map(int, done.stdout.split())))

    monkeypatch.setattr(async_compile.AsyncCompile, "process_pool", pool)
    monkeypatch.setattr(async_compile, "get_compile_threads", lambda: 2)
    monkeypatch.setattr(inductor, "compile_worker_wait_timeout", 0)
    compiling.start_workers()
    assert heard == [stops], "blocked in the new process"
    assert not stops & signal.pthread_sigmask(signal.SIG_BLOCK, []), "and not in this one"
    assert inductor.compile_worker_wait_timeout == compiling.WORKER_PATIENCE_S
    inductor.compile_worker_wait_timeout = 7  # the user's own
    compiling.start_workers()
    assert inductor.compile_worker_wait_timeout == 7


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_nccl_is_told_its_gpu(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(process_group, "_store", lambda *_, **__: None)
    monkeypatch.setattr(process_group, "PATIENCE", timedelta(seconds=1))
    monkeypatch.setattr(
        process_group.dist, "init_process_group", lambda *_, **options: asked.update(options)
    )
    monkeypatch.setattr(ProcessGroup, "_backend", lambda *_: backend)
    monkeypatch.setattr(ProcessGroup, "sum", lambda *_: [1.0])
    monitor: Any = SimpleNamespace(wait_for_all=lambda _: None, reason=lambda: "")
    ProcessGroup(monitor=monitor).connect(GPU, lag=0)
    assert asked["device_id"] == (GPU if backend == "nccl" else None)


@pytest.mark.parametrize(
    ("made_for", "version", "toolkit", "fits"),
    [
        ('{"version": {"torch": "2.10.0+cu128", "cuda": 1208}}', "2.13.0", "13.0", False),
        ('{"version": {"torch": "2.10.0+cu128", "cuda": 1208}}', "2.10.0+cu130", "13.0", False),
        ('{"version": {"torch": "2.10.0+cu128", "cuda": 1208}}', "2.10.1+cu126", "12.6", True),
        ("{}", "2.13.0", "13.0", True),  # nothing is known: it is tried
    ],
)
def test_an_xformers_that_was_built_for_another_torch_is_replaced_in_the_plan(
    made_for: str, version: str, toolkit: str, fits: bool, tmp_path: Path
) -> None:
    (tmp_path / "cpp_lib.json").write_text(made_for)
    build = TorchBuild(version=version, kind="cuda", toolkit=toolkit)
    problem = machine.xformers_problem(build, tmp_path)
    assert (problem == "") is fits
    here = replace(
        MACHINE,
        packages={**MACHINE.packages, "xformers": "0.0.35"},
        unfit={} if fits else {"xformers": problem},
    )
    made = planned(SDXL, here, overrides={"memory.attention": "xformers"})
    assert made.config.memory.attention == ("xformers" if fits else "sdpa")
    reason = made.origins["memory.attention"].reason
    assert fits or ("built for torch 2.10 and CUDA 12.8, and this is torch 2." in reason)


def test_importing_an_unfit_xformers_prints_nothing(caplog: pytest.LogCaptureFixture) -> None:
    quiet_libraries()
    logging.getLogger("xformers").warning("WARNING[XFORMERS]: xFormers can't load C++ extensions")
    assert caplog.records == []
