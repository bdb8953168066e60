"""What a run does with its device: a cap, few bits, planned passes; a full one is a line and a smaller next plan."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from lora_trainer import families
from lora_trainer.common.event_kinds import Event
from lora_trainer.common.events import EventStream
from lora_trainer.config.config import build_config
from lora_trainer.network.quantize import QuantizedLinear
from lora_trainer.reporting.run_record import read as read_record
from lora_trainer.run import device as run_device
from lora_trainer.run import prepare
from lora_trainer.training.actions import Progress
from lora_trainer.training.loop import train_steps
from lora_trainer.training.step import Training
from tests.fakes.family_bases import base_of, denoiser_of, facts_at, side_of
from tests.fakes.made_events import made
from tests.fakes.plans import machine
from tests.fakes.runs import SIZES_PX, toy
from tests.fakes.trainee import block_sizes

MACHINE = machine(ram_gib=44)


def fallbacks(
    network: nn.Module, device: str, *, checkpointing: str = "none", streamed: int = 0
) -> list[tuple[str, object, object]]:
    planned = {"gradient_checkpointing": checkpointing, "streamed_blocks": streamed}
    config: Any = build_config({f"memory.{name}": value for name, value in planned.items()})
    found = run_device.oom_fallbacks(network, config.memory, device=torch.device(device))
    return [(each.key, each.old, each.new) for each in found]


def test_weights_are_streamed_as_far_as_the_machine_has_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`room` is free memory over what the blocks take; the tiny FLUX has three, four bytes a number.

    A processor is not offered inputs and weights in host memory, where they are already.
    """
    network = denoiser_of("flux")
    levels = ("none", "light", "selective", "full", "offloaded")
    recomputed = [
        ("memory.gradient_checkpointing", old, new)
        for old, new in zip(levels, levels[1:], strict=False)
    ]
    for room, streamed in ((10.0, 3), (1.0, 3), (0.6, 1), (0.0, 0)):
        free_bytes = int(room * 4 * sum(block_sizes(network)))
        monkeypatch.setattr("lora_trainer.run.device.spare_ram_bytes", partial(int, free_bytes))
        last = [("memory.streamed_blocks", 0, streamed)] if streamed else []
        assert fallbacks(network, "cuda") == [*recomputed, *last]
    assert fallbacks(network, "cpu") == recomputed[:3]
    assert fallbacks(network, "cuda", checkpointing="offloaded", streamed=2) == []


def problems_of_a_full_device(prepared: prepare.Prepared) -> list[Any]:
    """Return the problems that a run reports when its device is full, three times."""
    events, seen = EventStream(), list[Event]()
    events.subscribe(seen.append)
    events.subscribe(run_device.oom_history_memo(prepared, events))
    for _ in range(3):
        events.emit(made("out_of_memory", images_at_once=4, reason="CUDA out of memory"))
    return [event.fields for event in seen if event.kind == "problem"]


def test_how_long_a_finished_run_took_corrects_the_next_plan(tmp_path: Path) -> None:
    place = toy(tmp_path)
    overrides = {"data.cache_dir": str(place.cache), "base.model": "embedded"}
    request = prepare.Request(dataset=place.dataset, overrides=overrides)
    planned = prepare.prepare(request)
    step_s = planned.plan.idle_step_s

    def trained(steps: int, end: str) -> tuple[str, ...]:
        events = EventStream()
        events.subscribe(run_device.pace_memo(planned, events))
        for step in range(steps):
            events.emit(made("step", step=step, seconds=7 * step_s))
        events.emit(made(end, step=steps, exit_code=0))
        return prepare.prepare(request).plan.time_corrections

    hardware = replace(planned.hardware, busy_processors=0.0)
    planned = replace(planned, inputs=replace(planned.inputs, hardware=hardware))
    assert not [note for note in trained(19, "finished") if "finished runs" in note]
    assert not [note for note in trained(40, "stopped") if "finished runs" in note]
    assert "finished runs on this machine took 7 times the estimate" in trained(40, "finished")
    low_s, high_s = prepare.prepare(request).plan.seconds_per_step
    assert low_s < 7 * step_s < high_s


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
    assert first.inputs.full_card is None
    # A processor that is full says nothing of the GPU; a disk that refuses the memo hides nothing.
    hardware = first.config.hardware.model_copy(update={"device": "cpu"})
    on_processor = first.config.model_copy(update={"hardware": hardware})
    processor = replace(first, plan=replace(first.plan, config=on_processor))
    assert problems_of_a_full_device(processor) == []
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    (note,) = problems_of_a_full_device(replace(first, cache_root=in_the_way))
    assert note["severity"] == "note" and "could not be written" in note["what"]
    assert prepare.prepare(request, hardware=MACHINE).inputs.full_card is None

    (note,) = problems_of_a_full_device(first)
    assert "RTX 3060 was planned to" in note["what"]
    second = prepare.prepare(request, hardware=MACHINE)
    assert second.inputs.full_card is not None
    assert second.plan.memory.peak_bytes < 0.95 * first.plan.memory.peak_bytes
    assert second.config.train.batch_size == first.config.train.batch_size
    resumed = prepare.prepare(replace(request, run_settings={"train.steps": 7}), hardware=MACHINE)
    assert resumed.inputs.full_card is None
    assert resumed.plan.memory.peak_bytes == first.plan.memory.peak_bytes

    # The smaller plan fails too: the limit it is measured by is that of the GPU, not its own.
    problems_of_a_full_device(second)
    third = prepare.prepare(request, hardware=MACHINE).inputs.full_card
    assert third is not None
    planned = second.plan.memory.peak_bytes / MACHINE.gpus[0].free_bytes
    assert third.share == pytest.approx(0.95 * planned, abs=2e-4)


def test_a_training_gets_a_base_in_few_bits_and_the_planned_micro_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainings: list[Training] = []

    def running(training: Training, start: Progress) -> Progress:
        trainings.append(training)
        return train_steps(training, start)

    monkeypatch.setattr("lora_trainer.run.run_job.train_steps", running)
    place = toy(tmp_path, sizes=SIZES_PX[:2])  # none upright, so that sides are not alike
    shutil.copytree(base_of("chroma"), place.base)
    facts = facts_at(place.base)
    settings = {"memory__base_precision": "int8", "train__batch_size": 3}
    assert place.train(steps=2, data__resolution=2 * side_of(facts), **settings) == 0
    assert (place.run / "toy.safetensors").is_file()
    (training,) = trainings
    whole = set(families.family("chroma").traits.quantization_skip)
    layers = dict(training.model.denoiser.named_modules())
    quantised = [name for name, layer in layers.items() if isinstance(layer, QuantizedLinear)]
    assert quantised and whole
    assert not [name for name in quantised if set(name.split(".")) & whole]
    planned = read_record(place.run).plan.memory.images_at_once
    sides = [tuple(int(side) // facts.vae_factor for side in size.split("x")) for size in planned]
    assert any(width != height for width, height in sides)
    assert training.images_at_once == {
        (height, width): count
        for (width, height), count in zip(sides, planned.values(), strict=True)
    }


def test_a_cap_is_set_at_the_start_of_a_run_on_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Mapping[str, Any]] = []
    monkeypatch.setattr(run_device, "cap_allocator", lambda **limits: seen.append(limits))
    card = SimpleNamespace(index=0, free_bytes=7)
    settings = {"hardware.vram_limit_gib": 6, "hardware.threads": torch.get_num_threads()}
    prepared = SimpleNamespace(
        config=build_config({"train.precision": "fp32", **settings}),
        hardware=SimpleNamespace(gpus=(card,)),
        inputs=SimpleNamespace(processes=1),
    )
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(run_device, "planned_device", lambda _: cuda)
    monkeypatch.setattr(run_device, "name_of", str)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    run_device.setup_torch(cast(prepare.Prepared, prepared))
    assert seen == [{"limit_bytes": 6 * 2**30, "free_bytes": 7, "device": cuda}]
