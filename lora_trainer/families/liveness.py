"""When each storage of a recorded network is alive: the peak of a forward pass and of a step.

Input is a `Tape`, output the `SampleCost` of one sample. Every storage is an interval on the line
of operations, so a peak is the highest sum of overlapping intervals. Checkpointed segments keep
what they read from outside, and what they keep inside comes back while backward is in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lora_trainer.families.costs import Array, Op, SampleCost, Tape

Interval = tuple[int, int, int]
"""Bytes alive from the first to the last operation, both included."""


def cost_of(tape: Tape, *, checkpointing: bool, conditioning_bytes: int) -> SampleCost:
    """Return the cost of training on one sample; without adapters nothing is kept for backward."""
    timeline = _Timeline(tape.ops, checkpointing=checkpointing)
    saved = sum(array.bytes for array in timeline.needed_from)
    forward = sum(op.flops for op in tape.ops)
    recomputed = [op for op in tape.ops if checkpointing and op.segment is not None]
    return SampleCost(
        saved_bytes=saved,
        adapter_saved_bytes=sum(array.bytes for array in timeline.needed_from if array.of_adapter),
        temporary_bytes=max(0, max(timeline.forward_peak(), timeline.backward_peak()) - saved),
        forward_bytes=timeline.inference_peak(),
        conditioning_bytes=conditioning_bytes,
        forward_flops=forward,
        step_flops=forward
        + sum(op.flops for op in recomputed)
        + sum(op.backward_flops for op in tape.ops),
        kernels=len(tape.ops) + len(recomputed) + sum(map(_backward_kernels, tape.ops)),
    )


def _backward_kernels(op: Op) -> int:
    return max(1, sum(array.requires_grad for array in op.inputs)) if op.output.requires_grad else 0


@dataclass(frozen=True, kw_only=True)
class _Segment:
    first: int
    last: int
    inside: frozenset[Array]
    """Storages made inside: they vanish after forward and are made again for backward."""


class _Timeline:
    def __init__(self, ops: list[Op], *, checkpointing: bool) -> None:
        self.ops = ops
        self.end = len(ops) - 1
        self.made_at: dict[Array, int] = {}
        self.read_last_at: dict[Array, int] = {}
        self.alive_until: dict[Array, int] = {}
        for index, op in enumerate(ops):
            self.made_at.setdefault(op.output, index)
            for array in (*op.inputs, *op.keeps):
                self.made_at.setdefault(array, 0 if array in op.inputs else index)
            self.read_last_at.update(dict.fromkeys(op.inputs, index))
            self.alive_until.update(dict.fromkeys((*op.inputs, *op.holds), index))
        self.segments = list(_segments(ops)) if checkpointing else []
        self.needed_from = self._needed_from()

    def _needed_from(self) -> dict[Array, int]:
        """Return what forward leaves behind, each with the operation whose backward frees it."""
        covered = {
            index for segment in self.segments for index in range(segment.first, segment.last + 1)
        }
        needed: dict[Array, int] = {}
        for index, op in enumerate(self.ops):
            if index not in covered:
                for array in op.keeps:
                    needed.setdefault(array, index)
        for segment in self.segments:
            inside = self.ops[segment.first : segment.last + 1]
            if any(op.keeps for op in inside):
                for array in {array for op in inside for array in op.inputs} - segment.inside:
                    needed[array] = min(needed.get(array, segment.first), segment.first)
        return needed

    def forward_peak(self) -> int:
        """A pass that leaves the needed storages behind."""
        until = {**self.alive_until, **dict.fromkeys(self.needed_from, self.end)}
        return self._peak(
            (array.bytes, made, until[array])
            for array, made in self.made_at.items()
            if array in until
        )

    def inference_peak(self) -> int:
        """A pass without gradients: storages live from their making to their last reader."""
        return self._peak(
            (array.bytes, made, self.alive_until[array])
            for array, made in self.made_at.items()
            if array in self.alive_until
        )

    def backward_peak(self) -> int:
        """Saved storages fall away as backward comes down; gradients come and go on the way."""
        return self._peak(self._backward_intervals())

    def _backward_intervals(self) -> Iterator[Interval]:
        for array, freed_at in self.needed_from.items():
            yield array.bytes, freed_at, self.end
        for array, made in self.made_at.items():
            if array.requires_grad:
                yield array.bytes, made, self.read_last_at.get(array, self.end)
        for segment in self.segments:
            recomputed: dict[Array, int] = {}
            for index in range(segment.first, segment.last + 1):
                for array in self.ops[index].keeps:
                    recomputed.setdefault(array, index)
            for array, freed_at in recomputed.items():
                if array not in self.needed_from:
                    yield array.bytes, freed_at, segment.last

    def _peak(self, intervals: Iterable[Interval]) -> int:
        change = [0] * (len(self.ops) + 1)
        for size, first, last in intervals:
            change[first] += size
            change[last + 1] -= size
        highest = now = 0
        for step in change:
            now += step
            highest = max(highest, now)
        return highest


def _segments(ops: list[Op]) -> Iterator[_Segment]:
    members: dict[int, list[int]] = {}
    for index, op in enumerate(ops):
        if op.segment is not None:
            members.setdefault(op.segment, []).append(index)
    for indices in members.values():
        inside = {ops[index].output for index in indices}
        yield _Segment(first=indices[0], last=indices[-1], inside=frozenset(inside))
