"""What is computed of samples ahead of their pass: the outputs of modulation layers kept in host memory.

`Foresight` is told of the passes to come and is asked for each when it is due. What it does not hold yet
it makes, together with as many of the next as it has room for: a weight comes to the device once for
all of them. A pass is known by what its rows depend on, so another split of a step, a step done again
or a resume can at worst have the weights come once more, and never meet rows of other samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

import torch
from torch import Tensor

from lora_trainer.data.batches import Glimpse, Sized, StepBatch, conditioning_of, moved
from lora_trainer.families.base import Conditioning
from lora_trainer.model.modulation import ModulatedNetwork

Key = tuple[tuple[float | bytes, ...], ...]
"""For each sample of a pass its noise level and the bytes of what it is told."""


class Seen(Sized, Protocol):
    """A sample of which the noise level is known: prepared, or glimpsed."""

    @property
    def timestep(self) -> float: ...

    @property
    def as_base(self) -> bool: ...


@dataclass(kw_only=True, eq=False)
class Foresight:
    """The modulation of passes to come, at most `most_samples` at a time (one pass in any case).

    `inputs` makes the layers' input [B, width] of timesteps [B] and of the tensors `names` of the
    conditioning, on `device`, as the denoiser itself does.
    """

    network: ModulatedNetwork
    names: Sequence[str]
    inputs: Callable[[Tensor, Conditioning], Tensor]
    dtype: torch.dtype
    device: torch.device
    most_samples: int
    _coming: dict[Key, Sequence[Seen]] = field(default_factory=dict)
    _rows: dict[Key, Tensor] = field(default_factory=dict)
    _window: tuple[tuple[Glimpse, ...], ...] = ()
    _first_step: int = 0
    _cap: int = 0
    _ended: bool = False

    def end(self) -> None:
        """Make nothing ahead any more: the layers are where they were, and give it themselves."""
        self._ended = True
        self._coming.clear()
        self._rows.clear()

    def expect(
        self,
        batch: StepBatch,
        *,
        cap: int,
        split: Callable[[Sequence[Glimpse]], Sequence[Sequence[Glimpse]]],
    ) -> None:
        """Note the passes from this step to the end of its window, which `split` makes with this cap."""
        if self._ended:
            return
        if batch.window:
            self._window, self._first_step = batch.window, batch.step
        elif cap == self._cap:
            return
        left = self._window[batch.step - self._first_step :]
        self.expect_passes([samples for step in left for samples in split(step)])
        self._cap = cap

    def expect_passes(self, passes: Sequence[Sequence[Seen]]) -> None:
        """Note what comes next, in this order, instead of what was noted before."""
        if self._ended:
            return
        self._coming = {self._key(samples): samples for samples in passes}
        self._cap = 0  # those of training are noted again by its next step

    def of(self, samples: Sequence[Seen]) -> AbstractContextManager[None]:
        """Let the modulation layers give the rows of these samples, forwards and backwards."""
        if self._ended:
            return nullcontext()
        key = self._key(samples)
        if key not in self._rows:
            self._make(key, samples)
        return self.network.giving(self._rows[key])

    def _make(self, key: Key, samples: Sequence[Seen]) -> None:
        """Make the rows of a pass and of those that are noted after it, as far as there is room."""
        chosen, count = dict[Key, Sequence[Seen]](), 0
        for coming in (samples, *self._after(key)):
            # Of some samples the base's own prediction is made first, in a pass of their own.
            of_base = [sample for sample in coming if sample.as_base]
            count += len(coming) + len(of_base)
            if chosen and count > self.most_samples:
                break
            chosen |= {self._key(part): part for part in (coming, of_base) if part}
        self._rows.clear()  # before the new ones, not beside them
        rows = self.network.outputs([self._input(part) for part in chosen.values()])
        self._rows = dict(zip(chosen, rows, strict=True))

    def _after(self, key: Key) -> Iterator[Sequence[Seen]]:
        if key in self._coming:
            place = list(self._coming).index(key) + 1
            yield from islice(self._coming.values(), place, None)

    @torch.no_grad()
    def _input(self, samples: Sequence[Seen]) -> Tensor:
        told = conditioning_of(samples, self.names, device=self.device, dtype=self.dtype)
        levels = [sample.timestep for sample in samples]
        return self.inputs(moved(torch.tensor(levels), self.device), told)

    def _key(self, samples: Sequence[Seen]) -> Key:
        return tuple(
            (
                sample.timestep,
                *(sample.conditioning[name].numpy().tobytes() for name in self.names),
            )
            for sample in samples
        )
