"""Computes the outputs of modulation layers for many passes ahead, while their weights are in host memory.

Modulation layers depend only on the timestep and the conditioning, not on the latents, so their outputs
can be computed before a sample's pass. `ModulationPrefetch` is given the coming passes, and returns the outputs of
each pass when it is due. If it lacks them, it computes them together with those of as many following
passes as fit: each weight is then copied to the device once for all of them. Outputs are keyed by the
inputs they depend on. Another split of a step, a repeated step or a resume therefore costs at worst one
more copy of the weights, and never uses the outputs of other samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from lora_trainer.families.base import Conditioning
from lora_trainer.network.modulation import ModulatedNetwork
from lora_trainer.training.batch import Sized, StepBatch, UpcomingSample, conditioning_of, moved

Key = tuple[tuple[float | bytes, ...], ...]
"""For each sample of a pass its timestep and the bytes of its conditioning."""


class SampleWithTimestep(Sized, Protocol):
    """A sample whose timestep is known: a `Prepared` or a `UpcomingSample`."""

    @property
    def timestep(self) -> float: ...

    @property
    def as_base(self) -> bool: ...


@dataclass(kw_only=True, eq=False)
class ModulationPrefetch:
    """The modulation outputs of coming passes, for at most `most_samples` at a time (at least one pass).

    `inputs` computes the layers' input [B, width] from timesteps [B] and the tensors `names` of the
    conditioning, on `device`, as the denoiser does.
    """

    network: ModulatedNetwork
    names: Sequence[str]
    inputs: Callable[[Tensor, Conditioning], Tensor]
    dtype: torch.dtype
    device: torch.device
    most_samples: int
    _coming: dict[Key, Sequence[SampleWithTimestep]] = field(default_factory=dict)
    _rows: dict[Key, Tensor] = field(default_factory=dict)
    _window: tuple[tuple[UpcomingSample, ...], ...] = ()
    _first_step: int = 0
    _cap: int = 0
    _ended: bool = False

    def end(self) -> None:
        """Compute nothing ahead any more: the layers are back on the device and run as usual."""
        self._ended = True
        self._coming.clear()
        self._rows.clear()

    def expect(
        self,
        batch: StepBatch,
        *,
        cap: int,
        split: Callable[[Sequence[UpcomingSample]], Sequence[Sequence[UpcomingSample]]],
    ) -> None:
        """Note the passes from this step to the end of its window, as `split` makes them with `cap`."""
        if self._ended:
            return
        if batch.window:
            self._window, self._first_step = batch.window, batch.step
        elif cap == self._cap:
            return
        remaining_steps = self._window[batch.step - self._first_step :]
        self.expect_passes([samples for step in remaining_steps for samples in split(step)])
        self._cap = cap

    def expect_passes(self, passes: Sequence[Sequence[SampleWithTimestep]]) -> None:
        """Replace the noted passes by these, in this order."""
        if self._ended:
            return
        self._coming = {self._key(samples): samples for samples in passes}
        self._cap = (
            0  # no real cap: the next training step notes its passes anew, after a validation
        )

    def of(self, samples: Sequence[SampleWithTimestep]) -> AbstractContextManager[None]:
        """Let the modulation layers return the rows of these samples, in forward and backward passes."""
        if self._ended:
            return nullcontext()
        key = self._key(samples)
        if key not in self._rows:
            self._make(key, samples)
        return self.network.giving(self._rows[key])

    def _make(self, key: Key, samples: Sequence[SampleWithTimestep]) -> None:
        """Compute the rows of a pass and of as many noted passes after it as there is room for."""
        chosen, count = dict[Key, Sequence[SampleWithTimestep]](), 0
        for coming in (samples, *self._after(key)):
            # With class preservation the base model predicts some samples first, in a pass of their own.
            of_base = [sample for sample in coming if sample.as_base]
            count += len(coming) + len(of_base)
            if chosen and count > self.most_samples:
                break
            chosen |= {self._key(part): part for part in (coming, of_base) if part}
        self._rows.clear()  # free the old rows first: there is room for one set only
        rows = self.network.outputs([self._input(part) for part in chosen.values()])
        self._rows = dict(zip(chosen, rows, strict=True))

    def _after(self, key: Key) -> Iterator[Sequence[SampleWithTimestep]]:
        if key in self._coming:
            first_index = list(self._coming).index(key) + 1
            yield from islice(self._coming.values(), first_index, None)

    @torch.no_grad()
    def _input(self, samples: Sequence[SampleWithTimestep]) -> Tensor:
        conditioning = conditioning_of(samples, self.names, device=self.device, dtype=self.dtype)
        levels = [sample.timestep for sample in samples]
        return self.inputs(moved(torch.tensor(levels), self.device), conditioning)

    def _key(self, samples: Sequence[SampleWithTimestep]) -> Key:
        return tuple(
            (
                sample.timestep,
                *(sample.conditioning[name].numpy().tobytes() for name in self.names),
            )
            for sample in samples
        )
