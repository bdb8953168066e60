"""CUDA graphs: records the kernels that a function launches, to launch them again all at once.

Input is a function that reads and writes the same memory whenever it is called; output is a `Recording`
that does the same work with a single launch. All recordings of one `CudaCapture` share a memory pool, which
is safe because they are replayed one after the other. This module knows nothing of training steps.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from lora_trainer.network.out_of_memory import free_memory


class Recording(Protocol):
    """Recorded work that can be repeated."""

    result: Tensor
    """The tensor that the recorded function returned; every `replay` overwrites its memory."""

    def replay(self) -> None:
        """Repeat the work after everything queued so far; the host does not wait."""


class Capture(Protocol):
    """Records functions."""

    def warm_up(self, run: Callable[[], Tensor]) -> Tensor:
        """Call a function as it will be recorded, so that libraries initialise before a recording."""

    def record(self, run: Callable[[], Tensor]) -> Recording:
        """Record a function without doing its work; raises RuntimeError if it cannot be recorded."""

    def release(self) -> None:
        """Free the memory of all recordings; none may be replayed any more."""


class CudaCapture:
    """CUDA graphs (torch.cuda.graph) of one device, on a side stream, in one pool.

    Autograd runs a backward pass on the streams of its forward pass, and a parameter's gradient accumulator
    belongs to the stream it was first used on. Warm-ups and captures therefore share a stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._recordings: list[_CudaRecording] = []

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
        """Capture; waits for the device, and empties the allocator's cache before (torch.cuda.graph)."""
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
            torch.cuda.set_stream(
                current
            )  # torch.cuda.graph does not where ending the capture fails
        recording = _CudaRecording(graph, result)
        self._recordings.append(recording)
        return recording

    def release(self) -> None:
        """Reset all graphs, which own the pool; the next capture begins a new pool."""
        torch.cuda.synchronize(self._device)
        for recording in self._recordings:
            recording.graph.reset()
            del recording.result
        self._recordings.clear()
        self._pool = torch.cuda.graph_pool_handle()
        free_memory()


class _CudaRecording:
    def __init__(self, graph: torch.cuda.CUDAGraph, result: Tensor) -> None:
        self.graph, self.result = graph, result

    def replay(self) -> None:
        self.graph.replay()
