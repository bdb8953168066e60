"""Copies of adapter weights in the dtype that a block computes in, made by one kernel for a call of the block.

Adapters are float32, most bases compute in 16 bits. Layers that cast their weights wherever they need them start
five to seven kernels a layer and step, for which a fast GPU waits longer than for the copies themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class ComputesWithCopies:
    """A layer that takes copies of its weights where its block has made some."""

    copies: Sequence[Tensor] = ()
    """Of the weights that `copied_weights` names, while the block is called; else empty."""

    def copied_weights(self) -> Sequence[Tensor]:
        """Return the weights that a call needs copies of; none where it computes otherwise."""
        raise NotImplementedError


class BlockCopies:
    """Makes the copies for all layers of a block that is recomputed.

    Layers save them for their backward pass, which follows the recomputation, so those of one block are alive at a
    time. In blocks that are not recomputed those of all would be, a second adapter in 16 bits.
    """

    def __init__(self, block: nn.Module) -> None:
        self._layers = [each for each in block.modules() if isinstance(each, ComputesWithCopies)]

    @contextmanager
    def made(self, dtype: torch.dtype) -> Iterator[None]:
        """Give the layers copies in `dtype` inside the context; weights that have it already stand for their own."""
        weights = {layer: layer.copied_weights() for layer in self._layers}
        sources = [weight for each in weights.values() for weight in each if weight.dtype != dtype]
        with torch.no_grad():
            targets = [torch.empty_like(source, dtype=dtype) for source in sources]
            if sources:
                torch._foreach_copy_(targets, sources)
        copies = dict(zip(map(id, sources), targets, strict=True))
        for layer, each in weights.items():
            layer.copies = [copies.get(id(weight), weight) for weight in each]
        del targets, copies  # else this frame holds them until the context ends, after their layers
        try:
            yield
        finally:
            for layer in weights:
                # The class's own again: compiled code of the block was made for layers without copies of theirs.
                vars(layer).pop("copies", None)
