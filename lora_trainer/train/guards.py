"""What to do when a step goes wrong, as a pure state machine: out of memory, not-a-number.

No torch, no clock, no files: the loop reports what happened, gets the next state back, and the state
travels in the resume state, so a resumed run decides as the uninterrupted one would have.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lora_trainer.errors import TrainingStopped

MAX_SKIPPED_IN_ROW = 5


@dataclass(frozen=True, kw_only=True)
class GuardState:
    """`micro_batch` is the present cap in images; the counters are of non-finite steps."""

    micro_batch: int
    skipped_in_row: int = 0
    skipped: int = 0


def after_step(state: GuardState, *, finite: bool, step: int) -> GuardState:
    """Count a step whose gradients were not finite; raises TrainingStopped after too many in a row."""
    if finite:
        return replace(state, skipped_in_row=0) if state.skipped_in_row else state
    state = replace(state, skipped_in_row=state.skipped_in_row + 1, skipped=state.skipped + 1)
    if state.skipped_in_row >= MAX_SKIPPED_IN_ROW:
        raise TrainingStopped(
            f"the gradients were not finite numbers {state.skipped_in_row} steps in a row, up to step {step}; "
            "the adapter still holds its last good values",
            fix="lower optimizer.learning_rate, or use --set train.precision=fp32, and resume",
        )
    return state


def after_out_of_memory(state: GuardState, *, images: int) -> GuardState:
    """Halve the micro-batch after `images` at once did not fit; raises TrainingStopped at one image."""
    largest = min(state.micro_batch, images)
    if largest <= 1:
        raise TrainingStopped(
            "the device ran out of memory with one image at a time",
            fix="use --set memory.gradient_checkpointing=true, a lower data.resolution or a smaller adapter.rank",
        )
    return replace(state, micro_batch=(largest + 1) // 2)
