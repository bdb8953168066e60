"""What a run does beyond its loop when a GPU is full: one line, and a memo by which the next is planned."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from lora_trainer.common.errors import MachineError
from lora_trainer.common.events import Event, EventStream
from lora_trainer.config.running import MemorySettings
from lora_trainer.hardware.machine import GIB, Hardware, assume_card
from lora_trainer.planning.plan_input import BELOW, OomHistory
from lora_trainer.run import oom_fallbacks
from lora_trainer.run.oom_fallbacks import oom_as_error, oom_history_memo
from lora_trainer.run.prepare import Prepared, Request, prepare
from lora_trainer.training.training import OomFallback
from tests.fakes.family_bases import CPU, denoiser_of
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


def stream() -> tuple[EventStream, list[Event]]:
    events, seen = EventStream(), list[Event]()
    events.subscribe(seen.append)
    return events, seen


def kinds(found: tuple[OomFallback, ...]) -> list[tuple[str, object, object]]:
    return [(remedy.key, remedy.old, remedy.new) for remedy in found]


def denoiser() -> nn.Module:
    return denoiser_of("flux")


PLANNED = MemorySettings.model_validate({"gradient_checkpointing": "none", "streamed_blocks": 0})
RECOMPUTED = [
    ("memory.gradient_checkpointing", "none", "light"),
    ("memory.gradient_checkpointing", "light", "selective"),
    ("memory.gradient_checkpointing", "selective", "full"),
]
OFFLOADED = ("memory.gradient_checkpointing", "full", "offloaded")


def test_a_processor_is_not_offered_what_frees_nothing_there() -> None:
    """Inputs and weights that wait in host memory are where they were."""
    assert kinds(oom_fallbacks.oom_fallbacks(denoiser(), PLANNED, device=CPU)) == RECOMPUTED


@pytest.mark.parametrize(("room", "streamed"), [(10.0, 3), (1.0, 3), (0.6, 1), (0.0, 0)])
def test_weights_are_streamed_as_far_as_the_machine_has_room(
    room: float, streamed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`room` is free memory over what the blocks take; the tiny FLUX has three, four bytes a number."""
    network = denoiser()
    taken = 4 * sum(block_sizes(network))
    monkeypatch.setattr(oom_fallbacks, "spare_ram_bytes", lambda: int(room * taken))
    found = kinds(oom_fallbacks.oom_fallbacks(network, PLANNED, device=torch.device("cuda")))
    last = [("memory.streamed_blocks", 0, streamed)] if streamed else []
    assert found == [*RECOMPUTED, OFFLOADED, *last]
    fewer = MemorySettings.model_validate(
        {"gradient_checkpointing": "offloaded", "streamed_blocks": 2}
    )
    assert oom_fallbacks.oom_fallbacks(network, fewer, device=torch.device("cuda")) == ()


def test_a_run_that_did_not_fit_makes_the_next_plan_smaller_and_a_resume_keeps_its_own(
    tmp_path: Path,
) -> None:
    place = toy(tmp_path)
    request = Request(
        dataset=place.dataset,
        overrides={
            "data.cache_dir": str(place.cache),
            "base.model": "stabilityai/stable-diffusion-xl-base-1.0",
            "train.batch_size": 16,
            "sampling.every_steps": 0,
        },
    )
    first = prepare(request, hardware=MACHINE)
    assert first.full_card is None
    events, seen = stream()
    events.subscribe(oom_history_memo(first, events))
    for _ in range(3):
        events.emit("out_of_memory", images_at_once=4, reason="CUDA out of memory")
    (note,) = [event.fields for event in seen if event.kind == "problem"]
    assert "an assumed 12 GiB GPU was planned to" in note["what"]

    second = prepare(request, hardware=MACHINE)
    assert second.full_card is not None
    assert second.plan.memory.peak_bytes < BELOW * first.plan.memory.peak_bytes
    assert second.config.train.batch_size == first.config.train.batch_size
    resumed = prepare(
        Request(
            dataset=place.dataset,
            overrides=request.overrides,
            run_settings={"train.steps": 7},
        ),
        hardware=MACHINE,
    )
    assert resumed.full_card is None
    assert resumed.plan.memory.peak_bytes == first.plan.memory.peak_bytes

    # The smaller plan fails too: the limit it is measured by is that of the GPU, not its own.
    events, _ = stream()
    events.subscribe(oom_history_memo(second, events))
    events.emit("out_of_memory", images_at_once=4, reason="CUDA out of memory")
    third = OomHistory.of(second.cache_root).known(MACHINE, "sdxl")
    assert third is not None
    planned = second.plan.memory.peak_bytes / MACHINE.gpus[0].free_bytes
    assert third.share == pytest.approx(BELOW * planned, abs=2e-4)


def test_a_memo_that_cannot_be_written_is_a_note_and_hides_nothing(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.write_text("a file where the folder should be")
    made: Any = SimpleNamespace(
        plan=SimpleNamespace(memory=SimpleNamespace(limit_bytes=10, peak_bytes=10)),
        full_card=None,
        config=SimpleNamespace(hardware=SimpleNamespace(device="cuda")),
        cache_root=cache,
        hardware=MACHINE,
        family=SimpleNamespace(name="sdxl"),
    )
    events, seen = stream()
    events.subscribe(oom_history_memo(cast(Prepared, made), events))
    with (
        pytest.raises(MachineError, match="memory while loading a base: CUDA out of") as caught,
        oom_as_error("loading a base", events=events),
    ):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore")
    assert "\n" not in str(caught.value)
    assert [event.kind for event in seen] == ["out_of_memory", "problem"]
    note = seen[1].fields
    assert note["severity"] == "note"
    assert "could not be written" in note["what"]
    # A processor that is full says nothing of the GPU, and is not remembered.
    on_processor = {**vars(made), "config": SimpleNamespace(hardware=SimpleNamespace(device="cpu"))}
    events, seen = stream()
    events.subscribe(oom_history_memo(cast(Prepared, SimpleNamespace(**on_processor)), events))
    events.emit("out_of_memory", images_at_once=1, reason="no memory")
    assert len(seen) == 1


def test_other_errors_stay_what_they_are() -> None:
    events, seen = stream()
    with pytest.raises(RuntimeError, match="shapes"), oom_as_error("loading", events=events):
        raise RuntimeError("shapes do not match")
    assert seen == []
