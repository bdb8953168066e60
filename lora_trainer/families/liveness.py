"""When each storage of a recorded network is alive: the peak of a forward pass and of a step.

Input is a `Tape`, output the `SampleCost` of one sample. Every storage is an interval on the line
of operations, so a peak is the highest sum of overlapping intervals. Checkpointed segments keep
what they read from outside, and what they keep inside comes back while backward is in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

from lora_trainer.families.costs import Array, Op, SampleCost, Tape

Interval = tuple[int, int, int]
"""Bytes alive from the first to the last operation, both included."""


def cost_of(tape: Tape, *, checkpointing: bool, conditioning_bytes: int) -> SampleCost:
    """Return the cost of training on one sample; without adapters nothing is kept for backward."""
    timeline = _Timeline(tape.ops, checkpointing=checkpointing)
    saved = sum(array.bytes for array in timeline.needed_from)
    forward = sum(op.flops for op in tape.ops)
    recomputed = [op for segment in timeline.segments for op in timeline.recomputed(segment)]
    return SampleCost(
        saved_bytes=saved,
        adapter_saved_bytes=sum(array.bytes for array in timeline.needed_from if array.of_adapter),
        temporary_bytes=max(0, max(timeline.peaks()) - saved),
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
    stop: int
    """The last operation that keeps something: torch recomputes no further. -1: it recomputes nothing."""
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

    def recomputed(self, segment: _Segment) -> list[Op]:
        """Return the operations of a segment that run again before its backward."""
        return self.ops[segment.first : segment.stop + 1]

    def peaks(self) -> tuple[int, ...]:
        """Return the highest sum of a step while forward runs, while backward runs, while recomputing."""
        return self.forward_peak(), self.backward_peak(), self.recompute_peak()

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

    def recompute_peak(self) -> int:
        """A segment runs forward again while everything before it is saved and gradients wait after it."""
        waiting = self._sums(
            [
                *(
                    (array.bytes, freed_at, self.end)
                    for array, freed_at in self.needed_from.items()
                ),
                *(
                    (array.bytes, made, self.read_last_at.get(array, self.end) - 1)
                    for array, made in self.made_at.items()
                    if array.requires_grad
                ),
            ]
        )
        return max(
            (
                waiting[segment.last] + self._peak(self._recompute_intervals(segment))
                for segment in self.segments
            ),
            default=0,
        )

    def _recompute_intervals(self, segment: _Segment) -> Iterator[Interval]:
        until: dict[Array, int] = {}
        for index, op in enumerate(self.recomputed(segment), start=segment.first):
            until.setdefault(op.output, index)
            for array in (*op.inputs, *op.holds):
                until[array] = max(until.get(array, index), index)
        for op in self.recomputed(segment):
            until.update(dict.fromkeys(op.keeps, segment.stop))
        for array, last in until.items():
            if array not in self.needed_from and self.made_at[array] >= segment.first:
                yield array.bytes, self.made_at[array], last

    def _peak(self, intervals: Iterable[Interval]) -> int:
        return max(self._sums(intervals))

    def _sums(self, intervals: Iterable[Interval]) -> list[int]:
        """Return the bytes alive during each operation."""
        change = [0] * (len(self.ops) + 1)
        for size, first, last in intervals:
            change[first] += size
            change[last + 1] -= size
        return list(accumulate(change))


def _segments(ops: list[Op]) -> Iterator[_Segment]:
    members: dict[int, list[int]] = {}
    for index, op in enumerate(ops):
        if op.segment is not None:
            members.setdefault(op.segment, []).append(index)
    for indices in members.values():
        yield _Segment(
            first=indices[0],
            last=indices[-1],
            stop=max((index for index in indices if ops[index].keeps), default=-1),
            inside=frozenset(ops[index].output for index in indices),
        )
