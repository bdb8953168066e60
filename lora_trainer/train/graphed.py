"""Passes of a step recorded once for each shape and replayed: a forward and a backward as one launch.

Input is a stacked group of samples and the function that adds its gradients; output its loss. The first
passes of a shape run as they would without graphs (they warm up what the recording needs, and count),
the next is recorded and from then on replayed: inputs are copied into memory that stays where it is, and
gradients add up in memory that stays where it is. Clipping, the reduction over processes and the optimizer
stay outside: they are the same for all shapes, a few launches of many tensors each, which the host has
queued long before a replay is over. So every optimizer works, and nothing in a recording changes from
step to step but its inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lora_trainer.data.batches import Signature, Stacked
from lora_trainer.device_calls import may_copy_ahead
from lora_trainer.errors import first_line
from lora_trainer.model.compiling import CompilationFailed
from lora_trainer.model.graph import Capture, Recording

WARM_UPS = 2
"""Passes of a shape before its recording: the first allocates, autotunes and compiles."""

Pass = Callable[[Stacked], Tensor]
"""Adds the gradients of samples on the device; returns their share of the step's loss, detached."""


class NotRecorded(Exception):
    """A pass could not be recorded; nothing was computed, and no gradient has changed."""


@dataclass(frozen=True, kw_only=True)
class _Graph:
    inputs: Stacked
    recording: Recording

    def run(self, given: Stacked) -> Tensor:
        for name, tensor in given.tensors.items():
            self.inputs.tensors[name].copy_(tensor, non_blocking=may_copy_ahead(tensor.device))
        self.recording.replay()
        return self.recording.result


@dataclass(kw_only=True)
class StepGraphs:
    """The recordings of a training by shape, at most `most` of them; other shapes run as without.

    `parameters` are those with gradients. While there is a recording their gradients must be zeroed
    in place, not dropped (`holding`).
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
        """Whether gradients belong to recordings."""
        return bool(self._graphs)

    def is_left_out(self, given: Stacked) -> bool:
        """Say whether samples of this shape run without a recording: there are as many as there may be."""
        return len(self._graphs) >= self.most and given.signature not in self._graphs

    def run(self, given: Stacked, run: Pass) -> Tensor:
        """Add the gradients of samples on the host; raises NotRecorded."""
        shape = given.signature
        graph = self._graphs.get(shape)
        if graph is not None:
            return graph.run(given)
        if self.is_left_out(given):
            return run(given.on(self.device))
        warm = self._warm.get(shape, 0)
        if warm < WARM_UPS:
            self._warm[shape] = warm + 1
            loss = self.capture.warm_up(lambda: run(given.on(self.device)))
            self._trained = [p for p in self.parameters if p.grad is not None]
            return loss
        self._graphs[shape] = graph = self._recorded(given, run)
        return graph.run(given)

    def release(self) -> None:
        """Forget all recordings and give their memory back; shapes are recorded again when they come."""
        self._graphs.clear()
        self._warm.clear()
        self.capture.release()

    def _recorded(self, given: Stacked, run: Pass) -> _Graph:
        if not self._graphs:
            self._own_gradients()
        on_device = given.on(self.device)
        # A copy even where that is the same device: what a recording reads is its own.
        inputs = Stacked(tensors={name: t.clone() for name, t in on_device.tensors.items()})
        try:
            recording = self.capture.record(lambda: run(inputs))
        except (RuntimeError, CompilationFailed) as error:  # the warm-ups ran the same code
            raise NotRecorded(first_line(error)) from error
        return _Graph(inputs=inputs, recording=recording)

    def _own_gradients(self) -> None:
        """Give gradients memory of their own, which autograd would else make anew in every step.

        What had none in the warm-up is not trained by this network, and stays without.
        """
        for parameter in self._trained:
            before = parameter.grad
            parameter.grad = torch.zeros_like(parameter)
            if before is not None:
                parameter.grad.copy_(before)
