"""Recording what a device is told to do, to tell it again at once: CUDA graphs.

Input is a function that reads and writes the same memory whenever it is called; output a `Recording`
that does the same work as it, started as a whole instead of kernel by kernel. All recordings of one
`CudaCapture` share a pool of memory: they are replayed one after the other. Nothing here knows of steps.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from lora_trainer.network.out_of_memory import free_memory


class Recording(Protocol):
    """Work that can be done again."""

    result: Tensor
    """What the recorded function returned: the same memory, written anew by every `replay`."""

    def replay(self) -> None:
        """Do the work again, after everything queued so far; the host does not wait."""


class Capture(Protocol):
    """How functions are recorded."""

    def warm_up(self, run: Callable[[], Tensor]) -> Tensor:
        """Call a function as it will be recorded, so that libraries set up what they set up once."""

    def record(self, run: Callable[[], Tensor]) -> Recording:
        """Record a function without doing its work; raises RuntimeError for what cannot be recorded."""

    def release(self) -> None:
        """Give the memory of all recordings back; none may be replayed any more."""


class CudaCapture:
    """CUDA graphs (torch.cuda.graph) of one device, on a side stream, in one pool.

    Autograd runs a backward pass on the streams of its forward pass, and parameters' accumulators belong
    to the stream they were first used on: warm-ups and captures therefore share a stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        self._recordings: list[_CudaRecording] = []

    def warm_up(self, run: Callable[[], Tensor]) -> Tensor:
        """Call it on the side stream; what is queued later waits for it."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = run()
        current.wait_stream(self._stream)
        result.record_stream(current)
        return result

    def record(self, run: Callable[[], Tensor]) -> Recording:
        """Capture; waits for the device, and empties the allocator's cache before (torch.cuda.graph)."""
        gc.collect()  # a graph of autograd in a cycle would keep accumulators of another stream alive
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        try:
            # Other threads copy what is saved and watch NCCL: their calls are none of this capture's.
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
        """Reset all graphs, which are the owners of the pool; the next capture begins a new one."""
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
