"""What a run does with its device: a cap, few bits, planned passes; a full one is a line and a smaller next plan."""

from __future__ import annotations

import shutil
import time
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
from lora_trainer.planning.known_pace import known_runs
from lora_trainer.planning.plan import Plan
from lora_trainer.planning.run_time import middle
from lora_trainer.reporting.run_record import read as read_record
from lora_trainer.run import device as run_device
from lora_trainer.run import prepare
from lora_trainer.run.time_taken import pace_memo
from lora_trainer.training.actions import Progress
from lora_trainer.training.cores import CpuTimes
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


def test_how_long_the_parts_of_a_finished_run_took_correct_the_next_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lora_trainer.run.time_taken.usable_processors", lambda: [0, 1, 2, 3])
    place = toy(tmp_path)
    overrides = {
        "data.cache_dir": str(place.cache),
        "base.model": "embedded",
        "train.steps": 40,
        "hardware.threads": 2,
    }
    request = prepare.Request(dataset=place.dataset, overrides=overrides)
    planned = prepare.prepare(request)
    hardware = replace(planned.hardware, busy_processors=0.0)
    planned = replace(planned, inputs=replace(planned.inputs, hardware=hardware))
    idle_s, step_s = planned.plan.idle_parts_s, planned.plan.idle_step_s

    def trained(
        steps: int,
        end: str,
        *,
        own: float = 1.0,
        taken: float = 0.0,
        waited: float | None = None,
        **started: Any,
    ) -> Plan:
        """Let a run on `own` processors take 7 times as long as planned, its start 3 times, beside `taken` others."""
        clock = iter([0.0, 1000.0])

        def used(processors: Any) -> CpuTimes:
            now_s = next(clock)
            return CpuTimes(
                at_s=now_s,
                all_s=now_s * (own + taken),
                own_s=now_s * own,
                waited_s=None if waited is None else now_s * waited,
            )

        monkeypatch.setattr("lora_trainer.run.time_taken.cpu_times", used)
        began_s = time.time()
        seconds = {"validation": 7 * idle_s["validation"], "sample": 7 * idle_s["sample images"]}
        total_s = 3 * idle_s["start"] + 7 * steps * step_s + sum(seconds.values())
        events = EventStream(clock=lambda: began_s + total_s)
        monkeypatch.setattr("lora_trainer.run.time_taken.time.time", lambda: began_s)
        events.subscribe(pace_memo(planned, events))
        events.emit(made("run_started", steps=40, resumed_from=None, **started))
        for step in range(steps):
            events.emit(made("step", step=step, seconds=7 * step_s))
        for kind, taken_s in seconds.items():
            events.emit(made(kind, step=steps, seconds=taken_s))
        events.emit(made(end, step=steps, exit_code=0))
        return prepare.prepare(request, hardware=hardware).plan

    assert "estimate" in trained(19, "finished").time_source
    assert "estimate" in trained(40, "stopped").time_source
    after = trained(40, "finished")
    assert after.time_source == "from 1 finished run on this machine"
    for part, factor in {"steps": 7, "validation": 7, "sample images": 7, "start": 3}.items():
        assert middle(after.run_time.parts[part]) == pytest.approx(factor * idle_s[part], rel=0.01)
    # Beside programs that left it one of the two processors that it wanted, the second run was as fast as the first.
    twice = trained(40, "finished", taken=3.0)
    assert twice.run_time.parts["steps"][0] < 3.6 * 40 * step_s
    assert twice.time_source == "from 2 finished runs on this machine"
    # It used one of two processors that were left to it, and was as slow as the others all the same.
    trained(40, "finished", taken=2.0)
    runs = known_runs(place.cache, hardware, gpu=None, family=planned.family.name)
    assert [(run.load, run.cores) for run in runs] == [(1.0, 1.0), (2.0, 2.0), (1.0, 1.0)]
    # No processor was idle, but its one thread seldom had to wait for one.
    trained(40, "finished", taken=3.0, waited=0.1)
    runs = known_runs(place.cache, hardware, gpu=None, family=planned.family.name)
    assert (runs[-1].load, runs[-1].cores) == (1.1, 1.1)
    # Three programs on four processors take nothing from a training that keeps one of them busy, five do.
    for busy, says in ((3.0, False), (5.0, True)):
        beside = replace(hardware, processors=4, busy_processors=busy)
        corrections = prepare.prepare(request, hardware=beside).plan.time_corrections
        assert any("beside them it takes about 1.5 times" in said for said in corrections) == says


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


def test_a_run_on_the_processor_asks_for_the_room_of_its_plan_and_one_on_a_card_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(run_device, "make_room", lambda **room: asked.append(room))
    monkeypatch.setattr(run_device, "take_back", lambda: asked.append("all"))
    monkeypatch.setattr(run_device, "name_of", str)
    settings = {"train.precision": "fp32", "hardware.threads": torch.get_num_threads()}
    prepared = SimpleNamespace(
        config=build_config(settings),
        hardware=SimpleNamespace(gpus=(), usable_ram_bytes=9, cpu_name="cpu"),
        inputs=SimpleNamespace(processes=2, sharing=2),
        plan=SimpleNamespace(memory=SimpleNamespace(peak_bytes=3)),
    )
    for device in (torch.device("cpu"), torch.device("meta")):
        monkeypatch.setattr(run_device, "planned_device", lambda _, device=device: device)
        monkeypatch.setattr(run_device, "training_gpu", lambda _: None)
        run_device.setup_torch(cast(prepare.Prepared, prepared))
    assert asked == [{"needed_bytes": 6, "free_bytes": 9}, "all"]


@pytest.mark.parametrize(("needed", "asked_for"), [(3, 3), (None, 9)])
def test_drawing_on_the_processor_ends_another_drawing_only_where_it_needs_its_memory(
    monkeypatch: pytest.MonkeyPatch, needed: int | None, asked_for: int
) -> None:
    asked: list[object] = []
    machine = SimpleNamespace(accelerator=lambda: (None, ""), usable_ram_bytes=9)
    monkeypatch.setattr(run_device, "detect", lambda: machine)
    monkeypatch.setattr(run_device, "make_room", lambda **room: asked.append(room))
    monkeypatch.setattr(run_device, "take_back", lambda: asked.append("all"))
    assert run_device.best_device(needed_ram_bytes=needed) == (torch.device("cpu"), False)
    assert asked == [{"needed_bytes": asked_for, "free_bytes": 9}]


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
