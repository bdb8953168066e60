"""Out-of-memory fallbacks: the same result in less device memory, and a smaller plan for the next run.

A run falls back when even a micro-batch of one image does not fit, the cheapest fallback first: recompute
more blocks, move their inputs to host memory, then stream blocks as far as host memory has room. On the
processor host memory is the device's, so it gets only the first. GPUs that ran out of memory are recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import torch
from torch import nn

from lora_trainer.common.errors import MachineError, first_line
from lora_trainer.common.events import Event, EventStream, Listener
from lora_trainer.common.memo import FILE_NAME
from lora_trainer.config.choices import moved_bytes
from lora_trainer.config.declare import CHECKPOINTING, Checkpointing, Decided
from lora_trainer.config.running import MemorySettings
from lora_trainer.hardware.machine import spare_ram_bytes
from lora_trainer.network.block_swap import base_tensors, repeated_blocks, stream_blocks
from lora_trainer.network.gradient_checkpointing import apply_checkpointing
from lora_trainer.network.out_of_memory import is_out_of_memory
from lora_trainer.planning.plan_input import OomHistory
from lora_trainer.run.prepare import Prepared
from lora_trainer.training.training import OomFallback


def oom_fallbacks(
    denoiser: nn.Module,
    settings: MemorySettings[Decided],
    *,
    device: torch.device,
    sharing: int = 1,
) -> tuple[OomFallback, ...]:
    """Return the fallbacks beyond the planned settings; each is applied on top of the earlier ones.

    `sharing` processes of this training share the machine's memory.
    """
    planned: Checkpointing = settings.gradient_checkpointing
    on_host = device.type == "cpu"
    stronger = CHECKPOINTING[CHECKPOINTING.index(planned) :]
    if on_host:
        stronger = tuple(kind for kind in stronger if kind != "offloaded")
    fallbacks = [
        OomFallback(
            key="memory.gradient_checkpointing",
            old=old,
            new=new,
            apply=partial(apply_checkpointing, denoiser, new),
        )
        for old, new in pairwise(stronger)
    ]
    if not (on_host or settings.streamed_blocks):
        blocks = _room_for(denoiser, free_bytes=spare_ram_bytes() // sharing)
        if blocks:
            stream = partial(stream_blocks, denoiser, count=blocks, device=device)
            fallbacks.append(
                OomFallback(key="memory.streamed_blocks", old=0, new=blocks, apply=stream)
            )
    return tuple(fallbacks)


def _room_for(denoiser: nn.Module, *, free_bytes: int) -> int:
    """Return the largest number of streamed blocks that fits in the machine's free memory."""
    sizes = [
        sum(owner[name].nbytes for owner, name in base_tensors(block))
        for block in repeated_blocks(denoiser).values()
    ]
    fitting = (
        count for count in range(len(sizes), 0, -1) if moved_bytes(sizes, count) <= free_bytes
    )
    return next(fitting, 0)


@contextmanager
def oom_as_error(doing: str, *, events: EventStream) -> Iterator[None]:
    """Turn an out-of-memory error of the device into an event and a MachineError; `doing` follows "while"."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        reason = first_line(error)
        events.emit("out_of_memory", images_at_once=0, reason=reason)
        raise MachineError(
            f"the device ran out of memory while {doing}: {reason}",
            fix="close other programs that use it and run the same command again, or set hardware.vram_limit_gib",
        ) from error


def oom_history_memo(prepared: Prepared, events: EventStream) -> Listener:
    """Return a listener that records a GPU on which the plan did not fit, at most once a run."""
    memory, earlier_record = prepared.plan.memory, prepared.full_card
    limit_bytes = memory.limit_bytes or 0
    is_reported = False

    def listener(event: Event) -> None:
        nonlocal is_reported
        if is_reported or event.kind != "out_of_memory" or prepared.config.hardware.device == "cpu":
            return
        is_reported = True
        memo = OomHistory.of(prepared.cache_root)
        try:
            record = memo.remember(
                prepared.hardware,
                prepared.family.name,
                planned_bytes=memory.peak_bytes,
                limit_bytes=int(limit_bytes / earlier_record.share)
                if earlier_record
                else limit_bytes,
            )
        except MachineError as error:  # a full disk must not hide the out-of-memory error
            events.problem(
                f"the out-of-memory record of this GPU could not be written: {error.found}",
                fix=error.fix,
                severity="note",
                code="TRN-02",
            )
            return
        if record is not None:
            card = (prepared.hardware.usable() or prepared.hardware.gpus)[0]
            events.problem(
                f"{card.name} was planned to {memory.peak_bytes / limit_bytes:.0%}"
                f" of its limit and ran out of memory: later plans use {record.share:.0%} of that limit",
                fix=f"no action needed; delete {FILE_NAME} in the cache folder to forget it",
                severity="note",
                code="TRN-02",
            )

    return listener
