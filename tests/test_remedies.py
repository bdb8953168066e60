"""What a run does beyond its loop when a GPU is full: one line, and a memo by which the next is planned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lora_trainer.common.events import Event, EventStream
from lora_trainer.config.config import build_config
from lora_trainer.hardware.machine import Hardware, assume_card
from lora_trainer.run import device as run_device
from lora_trainer.run import prepare
from tests.fakes.family_bases import denoiser_of
from tests.fakes.nvml import GIB
from tests.fakes.runs import toy
from tests.fakes.trainee import block_sizes

MACHINE = assume_card(
    Hardware(
        gpus=(),
        gpu_reason="none in this test",
        cpu_name="a processor",
        cpu_threads=3,
        ram_total_bytes=64 * GIB,
        ram_free_bytes=48 * GIB,
        packages={"torch": "2.13", "bitsandbytes": "0.50"},
        reasons={"cpu_threads": "given"},
    ),
    vram_gib=12,
)


def fallbacks(
    network: nn.Module, device: str, *, checkpointing: str = "none", streamed: int = 0
) -> list[tuple[str, object, object]]:
    planned = {"gradient_checkpointing": checkpointing, "streamed_blocks": streamed}
    config: Any = build_config({f"memory.{name}": value for name, value in planned.items()})
    found = run_device.oom_fallbacks(network, config.memory, device=torch.device(device))
    return [(each.key, each.old, each.new) for each in found]


@pytest.mark.parametrize(("room", "streamed"), [(10.0, 3), (1.0, 3), (0.6, 1), (0.0, 0)])
def test_weights_are_streamed_as_far_as_the_machine_has_room(
    room: float, streamed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`room` is free memory over what the blocks take; the tiny FLUX has three, four bytes a number.

    A processor is not offered inputs and weights in host memory, where they are already.
    """
    network = denoiser_of("flux")
    free_bytes = int(room * 4 * sum(block_sizes(network)))
    monkeypatch.setattr("lora_trainer.run.device.spare_ram_bytes", lambda: free_bytes)
    levels = ("none", "light", "selective", "full", "offloaded")
    recomputed = [
        ("memory.gradient_checkpointing", old, new)
        for old, new in zip(levels, levels[1:], strict=False)
    ]
    last = [("memory.streamed_blocks", 0, streamed)] if streamed else []
    assert fallbacks(network, "cuda") == [*recomputed, *last]
    assert fallbacks(network, "cpu") == recomputed[:3]
    assert fallbacks(network, "cuda", checkpointing="offloaded", streamed=2) == []


def problems_of_a_full_device(prepared: prepare.Prepared, *, times: int = 1) -> list[Any]:
    """Return the problems that a run reports when its device is full so many times."""
    events, seen = EventStream(), list[Event]()
    events.subscribe(seen.append)
    events.subscribe(run_device.oom_history_memo(prepared, events))
    for _ in range(times):
        events.emit("out_of_memory", images_at_once=4, reason="CUDA out of memory")
    return [event.fields for event in seen if event.kind == "problem"]


def test_a_run_that_did_not_fit_makes_the_next_plan_smaller_and_a_resume_keeps_its_own(
    tmp_path: Path,
) -> None:
    place = toy(tmp_path)
    overrides = {
        "data.cache_dir": str(place.cache),
        "base.model": "stabilityai/stable-diffusion-xl-base-1.0",
        "train.batch_size": 16,
        "sampling.every_steps": 0,
    }
    request = prepare.Request(dataset=place.dataset, overrides=overrides)
    first = prepare.prepare(request, hardware=MACHINE)
    assert first.full_card is None
    # A processor that is full says nothing of the GPU; a disk that refuses the memo hides nothing.
    hardware = first.config.hardware.model_copy(update={"device": "cpu"})
    on_processor = first.config.model_copy(update={"hardware": hardware})
    processor = replace(first, plan=replace(first.plan, config=on_processor))
    assert problems_of_a_full_device(processor) == []
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    (note,) = problems_of_a_full_device(replace(first, cache_root=in_the_way))
    assert note["severity"] == "note" and "could not be written" in note["what"]
    assert prepare.prepare(request, hardware=MACHINE).full_card is None

    (note,) = problems_of_a_full_device(first, times=3)
    assert "an assumed 12 GiB GPU was planned to" in note["what"]
    second = prepare.prepare(request, hardware=MACHINE)
    assert second.full_card is not None
    assert second.plan.memory.peak_bytes < 0.95 * first.plan.memory.peak_bytes
    assert second.config.train.batch_size == first.config.train.batch_size
    resumed = prepare.prepare(replace(request, run_settings={"train.steps": 7}), hardware=MACHINE)
    assert resumed.full_card is None
    assert resumed.plan.memory.peak_bytes == first.plan.memory.peak_bytes

    # The smaller plan fails too: the limit it is measured by is that of the GPU, not its own.
    problems_of_a_full_device(second)
    third = prepare.prepare(request, hardware=MACHINE).full_card
    assert third is not None
    planned = second.plan.memory.peak_bytes / MACHINE.gpus[0].free_bytes
    assert third.share == pytest.approx(0.95 * planned, abs=2e-4)
