"""Two ways to make the passes of a step faster: compiled blocks, and CUDA graphs that replay a recording.

Neither changes a result beyond rounding. Each can be switched off at any time, for good, and the run continues
with the same random draws; the guard state records it, so a resumed run does not try it again.

A CUDA graph holds the kernels of one forward and backward pass, recorded once per shape and replayed in one
launch. The first passes of a shape run without a graph and count as training (they also warm up libraries
that must not initialise inside a recording). The next pass is recorded, and replayed from then on. A graph
reads and writes fixed addresses, so inputs are copied into the recorded input tensors, and gradients add
up in tensors that are never reallocated.

Clipping, the reduction over processes and the optimizer are not recorded: they are the same for all
shapes and take few launches of many tensors each, which the host has queued long before a replay ends.
So every optimizer works, and nothing in a recording changes between steps except its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from lora_trainer.common.errors import first_line
from lora_trainer.hardware.device_calls import may_copy_ahead
from lora_trainer.network.compiling import CompilationFailed, CompiledBlocks
from lora_trainer.network.cuda_graph import Capture, Recording
from lora_trainer.training.batch import Batch, Signature

WARM_UPS = 2
"""Passes of a shape before its recording: the first one allocates, autotunes and compiles."""

Pass = Callable[[Batch], Tensor]
"""Copies a batch to the device and adds its gradients; returns its share of the step's loss, detached."""


class NotRecorded(Exception):
    """A pass could not be recorded; nothing was computed, and no gradient has changed."""


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

    capture: Capture
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
        graph = self._graphs.get(shape)
        if graph is not None:
            return graph.run(batch)
        if self.is_left_out(batch):
            return run(batch)
        warm = self._warm.get(shape, 0)
        # Libraries choose kernels and allocate workspaces in their first calls, which a recording must not hold.
        if warm < WARM_UPS:
            self._warm[shape] = warm + 1
            loss = self.capture.warm_up(lambda: run(batch))
            self._trained = [p for p in self.parameters if p.grad is not None]
            return loss
        self._graphs[shape] = graph = self._recorded(batch, run)
        return graph.run(batch)

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


COMPILE, GRAPHS = "hardware.compile", "hardware.cuda_graphs"
"""The settings that switch them on."""
LatentShape = tuple[int, int, int]
"""(height, width, images) of the latents of a pass."""


@dataclass(kw_only=True)
class Speedups:
    """Compiled blocks and CUDA graphs in use; None if not set, or after a failure.

    Only passes of `compiled_shapes` run compiled (None: all). The shapes are fixed before the first step,
    because compiled code rounds differently: if they depended on the order in which shapes come up, an
    interrupted run would end with other weights.
    """

    compiled: CompiledBlocks | None = None
    compiled_shapes: Collection[LatentShape] | None = None
    graphs: StepGraphs | None = None
    uncompiled: bool = False
    ungraphed: bool = False
    """True after compiled blocks, or graphs, have failed and were switched off."""
    _told: set[str] = field(default_factory=set)

    @property
    def keeps_gradients(self) -> bool:
        """Whether gradient tensors stay allocated from step to step and are zeroed in place."""
        return self.graphs is not None and self.graphs.holding

    def recorded(self, run: Pass) -> Pass:
        """Return `run`, or the function that replays its recordings; both take batches on the host."""
        return run if self.graphs is None else partial(self.graphs.run, run=run)

    def is_compiled(self, batch: Batch) -> bool:
        """Say whether a pass over these samples runs compiled."""
        planned = self.compiled_shapes
        return self.compiled is not None and (planned is None or batch.latents_shape in planned)

    def compilation(self, batch: Batch) -> AbstractContextManager[None]:
        """Run the blocks compiled inside the context if the shape is planned; raises CompilationFailed."""
        if self.compiled is None or not self.is_compiled(batch):
            return nullcontext()
        return self.compiled.used()

    def newly_unplanned(self, batch: Batch) -> list[str]:
        """Return the settings in force that are not used for these samples, each setting only once."""
        without = {
            COMPILE: self.compiled is not None and not self.is_compiled(batch),
            GRAPHS: self.graphs is not None and self.graphs.is_left_out(batch),
        }
        # Told once a setting: shapes change with every step, the reason does not.
        new_keys = [key for key, out in without.items() if out and key not in self._told]
        self._told.update(new_keys)
        return new_keys

    def make_room(self) -> None:
        """Free the memory of recordings between steps; the next steps record again."""
        if self.keeps_gradients and self.graphs is not None:
            self.graphs.release()

    def give_up_compiling(self) -> None:
        """Run the blocks uncompiled from now on."""
        self.compiled, self.uncompiled = None, True

    def give_up_graphs(self) -> None:
        """Launch kernels one by one from now on, and free the memory of the recordings."""
        if self.graphs is not None:
            self.graphs.release()
        self.graphs, self.ungraphed = None, True
