"""A LoRA of the library drawn by a ComfyUI that is not one: copied to its folder, then without and with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lora_trainer.gui import jobs, lora_files, sharing
from lora_trainer.gui.server.translation import words
from lora_trainer.gui.share import comfyui
from lora_trainer.gui.workplace import Workplace

from lora_trainer.common.errors import InputError, LoraTrainError, RequestError
from tests.fakes.comfyui import FakeComfyUI, serving
from tests.fakes.lora_library import finished_run
from tests.fakes.queues import until
from tests.tools.test_comfyui import plain

ENGLISH, GERMAN = words("en"), words("de")


@pytest.fixture
def work(tmp_path: Path) -> Workplace:
    finished_run(tmp_path / "runs" / "a", saves=(), modelspec__trigger_phrase="zorble")
    (tmp_path / "ComfyUI" / "models" / "loras").mkdir(parents=True)
    return Workplace(runs=tmp_path / "runs")


@pytest.fixture
def file(work: Workplace) -> lora_files.LoraFile:
    return lora_files.find(work, "a/zorble.safetensors")


@pytest.fixture
def running() -> Iterator[FakeComfyUI]:
    with serving(FakeComfyUI(loras=["zorble.safetensors"])) as fake:
        fake.has_drawn(plain())
        yield fake


def drawn(work: Workplace, file: lora_files.LoraFile, running: FakeComfyUI) -> dict[str, Any]:
    folder = str(work.runs.parent / "ComfyUI")
    job = comfyui.start(work, file, folder=folder, address=running.address, prompt=" sits ")
    until(lambda: jobs.read(work, job.id).state != "running")
    return dict(comfyui.shown(work, file, ENGLISH))


def test_it_is_copied_drawn_twice_and_remembered(
    work: Workplace, file: lora_files.LoraFile, running: FakeComfyUI
) -> None:
    assert comfyui.shown(work, file, ENGLISH) == {"state": "none"}
    seen = drawn(work, file, running)
    assert (seen["state"], seen["said"]) == ("finished", "")
    assert [each["label"] for each in seen["pictures"]] == ["without the LoRA", "with the LoRA"]
    assert all(
        each["url"].endswith(f"zorble-x{at}.png") for at, each in enumerate(seen["pictures"])
    )
    assert [graph["6"]["inputs"]["text"] for graph in running.queued] == ["sits", "sits"]
    assert (work.runs.parent / "ComfyUI/models/loras/zorble.safetensors").is_file()
    program = sharing.remembered(work)
    assert program.folder.endswith("loras") and program.address == running.address
    # Copied again without a word on the address, it stays remembered.
    sharing.copy_to_program(work, file, program.folder)
    assert sharing.remembered(work) == program


def test_a_lora_of_another_base_is_said(
    work: Workplace, file: lora_files.LoraFile, running: FakeComfyUI
) -> None:
    running.ignores = True
    assert "all strengths give the same picture" in drawn(work, file, running)["said"]
    assert "auf jeder Stärke dasselbe Bild" in comfyui.shown(work, file, GERMAN)["said"]


def test_what_comfyui_refuses_is_shown(
    work: Workplace, file: lora_files.LoraFile, running: FakeComfyUI
) -> None:
    running.loras.clear()
    seen = drawn(work, file, running)
    assert seen["state"] == "failed" and seen["pictures"] == []
    assert "does not find zorble.safetensors" in seen["said"]


def test_nobody_reaches_other_machines_through_a_server(
    work: Workplace, file: lora_files.LoraFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(jobs, "start", lambda *_, **more: started.append(more))
    folder = str(work.runs.parent / "ComfyUI")
    far = replace(work, roots=(work.runs.parent,))
    for address in (
        "http://192.168.1.9:8188",
        "http://169.254.169.254",
        "http://comfy.example:8188",
    ):
        with pytest.raises(InputError, match="is on another machine than this server"):
            comfyui.start(far, file, folder=folder, address=address, prompt="")
    for address in ("127.0.0.1:8188", "localhost:8188", "http://[::1]:8188"):
        comfyui.start(far, file, folder=folder, address=address, prompt="")
    assert len(started) == 3
    comfyui.start(work, file, folder=folder, address="http://192.168.1.9:8188", prompt="")
    with pytest.raises(RequestError, match="not the address of a ComfyUI"):
        comfyui.start(work, file, folder=folder, address="file:///etc", prompt="")
    with pytest.raises(LoraTrainError, match="does not exist"):
        comfyui.start(work, file, folder=f"{folder}/none", address="127.0.0.1:8188", prompt="")
