"""Lifetimes of the storages of a recorded network: the peak of a forward pass and of a step.

Input is a `Tape`, output the `SampleCost` of one sample. Each storage is an interval on the line of
operations, so a peak is the highest sum of overlapping intervals. A checkpointed segment keeps its
outside inputs, on the device or in host memory, and the results of some operations; all other saved
tensors of the segment exist again only while backward runs through it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate, chain

from lora_trainer.config.config import Checkpointing
from lora_trainer.costs.sample_cost import Array, Op, SampleCost, Tape

SEGMENTS_ON_DEVICE = 2
"""Segments whose offloaded inputs are on the device at a time: one running, one being copied."""
Interval = tuple[int, int, int]
"""Bytes alive from the first to the last operation, both included."""


def cost_of(tape: Tape, *, checkpointing: Checkpointing, conditioning_bytes: int) -> SampleCost:
    """Return the cost of training on one sample; without adapters nothing is kept for backward."""
    timeline = _Timeline(tape.ops, checkpointing=checkpointing)
    saved = sum(array.bytes for array in timeline.needed_from)
    forward = sum(op.flops for op in tape.ops)
    recomputed = [op for segment in timeline.segments for op in timeline.recomputed(segment)]
    spared = [op for op in recomputed if checkpointing in op.kept_by]
    return SampleCost(
        saved_bytes=saved,
        adapter_saved_bytes=sum(array.bytes for array in timeline.needed_from if array.of_adapter),
        temporary_bytes=max(0, max(timeline.peaks()) - saved),
        forward_bytes=timeline.inference_peak(),
        conditioning_bytes=conditioning_bytes,
        forward_flops=forward,
        step_flops=forward
        + sum(op.flops for op in recomputed)
        - sum(op.spared_flops for op in spared)
        + sum(op.backward_flops for op in tape.ops),
        kernels=sum(op.kernels for op in (*tape.ops, *recomputed))
        + sum(op.backward_kernels for op in tape.ops)
        - len(spared),
        host_bytes=timeline.host_bytes,
    )


@dataclass(frozen=True, kw_only=True)
class _Segment:
    first: int
    last: int
    stop: int
    """The last operation that saves a tensor: torch recomputes no further. -1: nothing is recomputed."""
    inside: frozenset[Array]
    """Storages made inside: freed after forward and made again for backward."""

    @property
    def size(self) -> int:
        return self.last - self.first + 1


class _Timeline:
    def __init__(self, ops: list[Op], *, checkpointing: Checkpointing) -> None:
        self.ops, self.checkpointing = ops, checkpointing
        self.end = len(ops) - 1
        self.made_at: dict[Array, int] = {}
        self.read_last_at: dict[Array, int] = {}
        self.alive_until: dict[Array, int] = {}
        for index, op in enumerate(ops):
            self.made_at.setdefault(op.output, index)
            for array in (*op.inputs, *op.keeps):
                self.made_at.setdefault(array, 0 if array in op.inputs else index)
            self.read_last_at.update(dict.fromkeys(op.inputs, index))
            self.alive_until.update(dict.fromkeys((*op.reads, *op.holds), index))
        self.segments = list(_segments(ops, checkpointing))
        self.host_bytes = 0
        self.offloaded: dict[Array, int] = {}  # input -> number of the segment that reads it
        self.handed_out: set[Array] = (
            set()
        )  # kept results that recomputing reads and autograd does not save
        self.needed_from = self._needed_from(offload=checkpointing == "offloaded")

    def _needed_from(self, *, offload: bool) -> dict[Array, int]:
        """Return the storages that forward leaves on the device -> the operation whose backward frees them."""
        covered = {
            index for segment in self.segments for index in range(segment.first, segment.last + 1)
        }
        freed_at: dict[Array, int] = {}
        for index, op in enumerate(self.ops):
            if index not in covered:
                for array in op.keeps:
                    freed_at.setdefault(array, index)
        for number, segment in enumerate(self.segments):
            leaves = offload and number < len(self.segments) - SEGMENTS_ON_DEVICE
            for array in self._inputs(segment):
                self.host_bytes += array.bytes if offload and array.requires_grad else 0
                if leaves and array.requires_grad:
                    self.offloaded[array] = number
                else:
                    freed_at[array] = min(freed_at.get(array, segment.first), segment.first)
            freed_at.update(self._results(segment))
        return freed_at

    def _results(self, segment: _Segment) -> dict[Array, int]:
        """Return the kept results of a segment -> the operation whose backward frees them.

        Results that no operation saves are freed earlier, once the segment is recomputed.
        """
        inside = range(segment.first, segment.last + 1)
        results = {
            array: segment.last + 1
            for index in inside
            if segment.stop >= 0 and self.checkpointing in self.ops[index].kept_by
            for array in self.ops[index].results
        }
        self.handed_out.update(results)
        for index in reversed(inside):
            kept_results = [array for array in self.ops[index].keeps if array in results]
            results.update(dict.fromkeys(kept_results, index))
            self.handed_out.difference_update(kept_results)
        return results

    def _inputs(self, segment: _Segment) -> set[Array]:
        """Return the outside inputs of a segment; empty for a segment that saves nothing."""
        inside = self.ops[segment.first : segment.last + 1]
        if not any(op.keeps for op in inside):
            return set()
        return {array for op in inside for array in op.reads} - segment.inside

    def recomputed(self, segment: _Segment) -> list[Op]:
        """Return the operations of a segment that run again before its backward.

        Autograd saves inputs before a kernel runs and outputs after it. torch stops recomputing at the
        last saved tensor, so a last kernel that saves only its inputs does not run again; our own
        autograd functions save late (`keeps_late`) and do run.
        """
        if segment.stop < 0:
            return []
        last = self.ops[segment.stop]
        runs = last.keeps_late or not set(last.keeps) <= set(last.reads)
        return self.ops[segment.first : segment.stop + runs]

    def peaks(self) -> tuple[int, ...]:
        """Return a step's peaks in bytes: while forward runs, while backward runs, while recomputing."""
        return self.forward_peak(), self.backward_peak(), self.recompute_peak()

    def forward_peak(self) -> int:
        """Return the peak of a forward pass that leaves the saved storages behind."""
        until = {**self.alive_until, **dict.fromkeys(self.needed_from, self.end)}
        for array, number in self.offloaded.items():
            gone = self.segments[number + SEGMENTS_ON_DEVICE].first - 1
            until[array] = max(until[array], gone)
        return _peak(
            (
                (array.bytes, made_at, until[array])
                for array, made_at in self.made_at.items()
                if array in until
            ),
            len(self.ops),
        )

    def inference_peak(self) -> int:
        """Return the peak of a pass without gradients: storages live until their last reader."""
        return _peak(
            (
                (array.bytes, made_at, self.alive_until[array])
                for array, made_at in self.made_at.items()
                if array in self.alive_until
            ),
            len(self.ops),
        )

    def backward_peak(self) -> int:
        """Return the peak of backward: saved storages are freed one by one, gradients come and go."""
        return _peak(self._backward_intervals(), len(self.ops))

    def _saved_intervals(self) -> Iterator[Interval]:
        """Yield the saved storages' lifetimes on the device; offloaded inputs return a segment early."""
        for array, freed_at in self.needed_from.items():
            yield array.bytes, freed_at, self.end
        for array, number in self.offloaded.items():
            if array not in self.needed_from:
                back = self.segments[number + SEGMENTS_ON_DEVICE - 1].last
                yield array.bytes, self.segments[number].first, back

    def _backward_intervals(self) -> Iterator[Interval]:
        yield from self._saved_intervals()
        for array, made_at in self.made_at.items():
            if array.requires_grad:
                yield array.gradient_bytes, made_at, self.read_last_at.get(array, self.end)
        for segment in self.segments:
            recomputed: dict[Array, int] = {}
            for index in range(segment.first, segment.last + 1):
                for array in self.ops[index].keeps:
                    recomputed.setdefault(array, index)
            for array, freed_at in recomputed.items():
                if array not in self.needed_from and array not in self.offloaded:
                    yield array.bytes, freed_at, segment.last

    def recompute_peak(self) -> int:
        """Return the peak while a segment runs forward again, which happens before its backward.

        Then all saved storages before the segment and the gradients of its outputs are alive too.
        """
        gradients = (
            (array.gradient_bytes, made_at, self.read_last_at.get(array, self.end) - 1)
            for array, made_at in self.made_at.items()
            if array.requires_grad
        )
        waiting = _sums(chain(self._saved_intervals(), gradients), len(self.ops))
        return max(
            (
                waiting[segment.stop] + _peak(self._recompute_intervals(segment), segment.size)
                for segment in self.segments
                if segment.stop >= 0
            ),
            default=0,
        )

    def _recompute_intervals(self, segment: _Segment) -> Iterator[Interval]:
        """Yield lifetimes while a segment is recomputed, counted from the segment's first operation."""
        until: dict[Array, int] = {}
        for index, op in enumerate(self.recomputed(segment), start=segment.first):
            until.setdefault(op.output, index)
            for array in (*op.reads, *op.holds):
                until[array] = max(until.get(array, index), index)
        for op in self.recomputed(segment):
            until.update(dict.fromkeys(op.keeps, segment.stop))
        for array, last in until.items():
            if array in self.handed_out:
                yield array.bytes, 0, last - segment.first
            elif array not in self.needed_from and self.made_at[array] >= segment.first:
                yield array.bytes, self.made_at[array] - segment.first, last - segment.first
        for index, op in enumerate(self.recomputed(segment)):
            if self.checkpointing in op.kept_by and op.spared_flops < op.flops:
                # A fused layer's adapter is recomputed although its sum with the kept output is not.
                yield op.output.bytes, index, index


def _peak(intervals: Iterable[Interval], operations: int) -> int:
    return max(_sums(intervals, operations))


def _sums(intervals: Iterable[Interval], operations: int) -> list[int]:
    """Return the bytes alive during each operation."""
    # Difference array: one addition per end of an interval, then a running sum over the operations.
    change = [0] * (operations + 1)
    for size, first, last in intervals:
        change[first] += size
        change[last + 1] -= size
    return list(accumulate(change))


def _segments(ops: list[Op], checkpointing: Checkpointing) -> Iterator[_Segment]:
    members: dict[str, list[int]] = {}
    for index, op in enumerate(ops):
        if op.segment is not None and checkpointing != "none":
            members.setdefault(op.segment, []).append(index)
    for indices in members.values():
        yield _Segment(
            first=indices[0],
            last=indices[-1],
            stop=max((index for index in indices if ops[index].keeps), default=-1),
            inside=frozenset(ops[index].output for index in indices),
        )
