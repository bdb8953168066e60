"""Warns once when a training's measurements show steps that became slow, with the cause, or growing memory.

A listener of the run's events. Looking at the GPU and the processors takes a second, so a thread beside
the training does it; warnings are `problem` events.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

from lora_trainer.common.events import Event, EventStream
from lora_trainer.hardware.machine import GIB, free_ram_bytes
from lora_trainer.hardware.nvml import Gpu
from lora_trainer.run.device import CPU, card_of, planned_device
from lora_trainer.run.prepare import Prepared
from lora_trainer.training.pace import (
    Creep,
    Growth,
    MachineState,
    Slow,
    StepPace,
    Timed,
    causes,
    look,
)

_PAUSES = frozenset({"sample", "validation", "learned"})
_CHANGES = frozenset({"change", "out_of_memory"})
_FILLED_STEPS = 5000
"""Host memory grows while the first epoch reads cache entries; growth counts after it, or after this step."""


@dataclass(kw_only=True)
class Notices:
    """Event listener, active while the block runs."""

    prepared: Prepared
    events: EventStream
    _pace: StepPace = field(default_factory=StepPace)
    _vram: Creep = field(default_factory=Creep)
    _host: Creep = field(default_factory=Creep)
    _gpu: Gpu | None = None
    _usual: MachineState | None = None
    _gives_way: bool = False
    _asked: bool = False
    _told: set[str] = field(default_factory=set)
    _beside: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="lora-train-notices")
    )

    def __enter__(self) -> Notices:
        device = planned_device(self.prepared)
        self._gpu = None if device == CPU else card_of(self.prepared, device)
        self.events.subscribe(self)
        return self

    def __exit__(self, *_: object) -> None:
        self.events.listeners.remove(self)
        self._beside.shutdown()

    def __call__(self, event: Event) -> None:
        if event.kind in _PAUSES:
            self._pace.skip()
        elif event.kind in _CHANGES:
            self._pace.forget()
        elif event.kind == "cores":
            self._gives_way = event.fields["waiting"] == "asleep"
        elif event.kind == "step":
            self._after_step(event.fields)

    def _after_step(self, fields: Mapping[str, Any]) -> None:
        step = int(fields["step"])
        timed = Timed(
            seconds=fields["seconds"], wait_s=fields["data_wait_s"], latents=fields["latents"]
        )
        slow = self._pace.take(timed)
        if self._pace.known and not self._asked:
            self._asked = True
            self._beside.submit(self._remember)
        if slow is not None:
            self._beside.submit(self._explain, slow, step)
        filled = fields["epoch"] >= 1 or step > _FILLED_STEPS
        if filled and (growth := self._host.take(fields["host_own_bytes"])):
            self._tell_growth("host memory", growth, step, free_bytes=free_ram_bytes())
        gpu = self._gpu
        if gpu is not None and (growth := self._vram.take(fields["vram_now_bytes"])):
            free_bytes = gpu.total_bytes - fields["vram_used_bytes"]
            self._tell_growth("the GPU's memory", growth, step, free_bytes=free_bytes)

    def _remember(self) -> None:
        self._usual = self._look()

    def _look(self) -> MachineState:
        return replace(look(self._gpu), gives_way=self._gives_way)

    def _explain(self, slow: Slow, step: int) -> None:
        spills = self._gpu is not None and self._gpu.spills
        before, config = self._usual or MachineState(), self.prepared.config
        cause = next(causes(slow, before, self._look(), spills=spills, config=config))
        if cause.name in self._told:
            return
        self._told.add(cause.name)
        self.events.problem(
            f"steps take {slow.factor:.1f} times as long as before, {slow.now.seconds:.2g} s instead of "
            f"{slow.usual.seconds:.2g}, up to step {step}: {cause.observation}",
            fix=cause.fix,
        )

    def _tell_growth(self, memory: str, growth: Growth, step: int, *, free_bytes: int) -> None:
        per_step, remaining_steps = (
            growth.bytes_per_step,
            self.prepared.config.train.steps - step,
        )
        full_in = max(0, int(free_bytes / per_step))
        too_soon = full_in < remaining_steps
        self.events.problem(
            f"{memory} grows by {100 * per_step / 2**20:.0f} MiB every 100 steps, "
            f"{growth.so_far_bytes / 2**20:.0f} MiB by step {step}: the {free_bytes / GIB:.1f} GiB that are "
            f"free are used up in {full_in} steps, {'before' if too_soon else 'after'} the end of the run",
            fix="stop and continue with --resume, which starts with fresh memory, and please report it"
            if too_soon
            else "no action needed for this run; please report it",
            severity="warning" if too_soon else "note",
        )
