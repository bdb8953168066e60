"""A capture without a GPU: it does the recorded work again on the recorded memory, as a CUDA graph does."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lora_trainer.training.cuda_graphs import Recording


class _Again:
    def __init__(self, work: Callable[[], Tensor], result: Tensor) -> None:
        self._work, self.result = work, result
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        self.result.copy_(self._work())


class Recorded:
    """Records without doing the work; `refuse` is raised instead, `released` counts releases."""

    def __init__(self, parameters: list[Tensor], refuse: Exception | None = None) -> None:
        self.parameters, self.refuse = parameters, refuse
        self.recordings: list[_Again] = []
        self.warm_ups = self.released = 0
        self.addresses: list[list[int]] = []

    def warm_up(self, run: Callable[[], Tensor]) -> Tensor:
        self.warm_ups += 1
        return run()

    def record(self, run: Callable[[], Tensor]) -> Recording:
        if self.refuse is not None:
            raise self.refuse

        def work() -> Tensor:
            self.addresses.append(
                [p.grad.data_ptr() for p in self.parameters if p.grad is not None]
            )
            return run()

        self.recordings.append(_Again(work, torch.zeros(())))
        return self.recordings[-1]

    def release(self) -> None:
        self.released += 1
        self.recordings.clear()
