"""CUDA graphs: the kernels of one forward and backward pass, recorded once per shape, replayed in one launch.

A graph changes no result beyond rounding. The first passes of a shape run without a graph and count as
training (they also warm up libraries that must not initialise inside a recording). The next pass is
recorded, and replayed from then on. A graph reads and writes fixed addresses, so inputs are copied into the
recorded input tensors, and gradients add up in tensors that are never reallocated.

Clipping, the reduction over processes and the optimizer are not recorded: they are the same for all
shapes and take few launches of many tensors each, which the host has queued long before a replay ends.
So every optimizer works, and nothing in a recording changes between steps except its inputs.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from lora_trainer.common.errors import first_line
from lora_trainer.hardware.device_calls import may_copy_ahead
from lora_trainer.network.compiling import CompilationFailed
from lora_trainer.network.out_of_memory import free_memory
from lora_trainer.training.batch import Batch, Signature

WARM_UPS = 2
"""Passes of a shape before its recording: the first one allocates, autotunes and compiles."""

Pass = Callable[[Batch], Tensor]
"""Copies a batch to the device and adds its gradients; returns its share of the step's loss, detached."""


class NotRecorded(Exception):
    """A pass could not be recorded; nothing was computed, and no gradient has changed."""


class Recording:
    """Recorded work; every `replay` overwrites the memory of `result`, the recorded function's tensor."""

    def __init__(self, graph: torch.cuda.CUDAGraph, result: Tensor) -> None:
        self._graph, self.result = graph, result

    def replay(self) -> None:
        """Repeat the work after everything queued so far; the host does not wait."""
        self._graph.replay()

    def release(self) -> None:
        """Reset the graph, which owns part of its capture's memory pool."""
        self._graph.reset()
        del self.result


class CudaCapture:
    """Records on one device, on a side stream; recordings share a memory pool, as they run one after another.

    Autograd runs a backward pass on the streams of its forward pass, and a parameter's gradient accumulator
    belongs to the stream it was first used on. Warm-ups and captures therefore share a stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._recordings: list[Recording] = []

    def warm_up(self, run: Callable[[], Tensor]) -> Tensor:
        """Call `run` on the side stream; work queued later on the current stream waits for it."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)  # work queued before may still write what `run` reads
        with torch.cuda.stream(self._stream):
            result = run()
        current.wait_stream(self._stream)
        # The result was allocated on the side stream but is used on the current one: without this the
        # allocator could reuse its memory while the current stream still reads it.
        result.record_stream(current)
        return result

    def record(self, run: Callable[[], Tensor]) -> Recording:
        """Record a function without doing its work; raises RuntimeError if it cannot be recorded.

        Waits for the device, and empties the allocator's cache before (torch.cuda.graph).
        """
        # An autograd graph in a reference cycle would keep gradient accumulators of another stream alive.
        gc.collect()
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        try:
            # Other threads copy tensors for saving and watch NCCL. In the default error mode their calls
            # would invalidate this capture.
            with torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ):
                result = run()
        finally:
            # torch.cuda.graph does not set it back where ending the capture fails.
            torch.cuda.set_stream(current)
        self._recordings.append(Recording(graph, result))
        return self._recordings[-1]

    def release(self) -> None:
        """Reset all graphs, which own the pool; the next capture begins a new pool."""
        torch.cuda.synchronize(self._device)
        for recording in self._recordings:
            recording.release()
        self._recordings.clear()
        self._pool = torch.cuda.graph_pool_handle()
        free_memory()


@dataclass(frozen=True, kw_only=True)
class _Graph:
    inputs: Batch
    recording: Recording

    def run(self, batch: Batch) -> Tensor:
        for name, tensor in batch.tensors.items():
            self.inputs.tensors[name].copy_(tensor, non_blocking=may_copy_ahead(tensor.device))
        self.recording.replay()
        return self.recording.result


@dataclass(kw_only=True)
class StepGraphs:
    """The recordings of a training by shape, at most `most` of them; other shapes run without one.

    `parameters` are the trained parameters. While there is a recording (`holding`), their gradients must
    be zeroed in place: set to None they would be allocated anew, at addresses the graph does not write.
    """

    capture: CudaCapture
    parameters: Sequence[nn.Parameter]
    device: torch.device
    most: int
    _graphs: dict[Signature, _Graph] = field(default_factory=dict)
    _warm: dict[Signature, int] = field(default_factory=dict)
    _trained: list[nn.Parameter] = field(default_factory=list)

    @property
    def holding(self) -> bool:
        """Whether there are recordings, which write to the present gradient tensors."""
        return bool(self._graphs)

    def is_left_out(self, batch: Batch) -> bool:
        """Say whether samples of this shape run without a recording because `most` others exist."""
        return len(self._graphs) >= self.most and batch.signature not in self._graphs

    def run(self, batch: Batch, run: Pass) -> Tensor:
        """Add the gradients of samples on the host; raises NotRecorded."""
        shape = batch.signature
        if self.is_left_out(batch):
            return run(batch)
        if shape not in self._graphs:
            warm = self._warm.get(shape, 0)
            # Libraries choose kernels and allocate workspaces in their first calls, which a recording must
            # not hold.
            if warm < WARM_UPS:
                self._warm[shape] = warm + 1
                loss = self.capture.warm_up(lambda: run(batch))
                self._trained = [p for p in self.parameters if p.grad is not None]
                return loss
            self._graphs[shape] = self._recorded(batch, run)
        return self._graphs[shape].run(batch)

    def release(self) -> None:
        """Drop all recordings and free their memory; shapes are recorded again when they come next."""
        self._graphs.clear()
        self._warm.clear()
        # After the graphs: their memory belongs to the pool that is given back here.
        self.capture.release()

    def _recorded(self, batch: Batch, run: Pass) -> _Graph:
        if not self._graphs:
            self._own_gradients()
        on_device = batch.on(self.device)
        # `on` does not copy if the samples are on the device already, but a recording's inputs are
        # overwritten by every replay and must not be shared.
        inputs = replace(
            on_device, tensors={name: t.clone() for name, t in on_device.tensors.items()}
        )
        try:
            recording = self.capture.record(lambda: run(inputs))
        except (RuntimeError, CompilationFailed) as error:  # the warm-ups ran the same code
            raise NotRecorded(first_line(error)) from error
        return _Graph(inputs=inputs, recording=recording)

    def _own_gradients(self) -> None:
        """Allocate gradient tensors outside the recording, where autograd would otherwise allocate them.

        Parameters that had no gradient in the warm-up are not used by this network and stay without one.
        """
        for parameter in self._trained:
            # Earlier passes of this step may have added gradients already; they must not be lost.
            before = parameter.grad
            parameter.grad = torch.zeros_like(parameter)
            if before is not None:
                parameter.grad.copy_(before)
