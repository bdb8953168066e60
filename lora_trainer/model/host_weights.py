"""Frozen weights of blocks packed into host memory, so that one copy brings a block to a device.

Input are modules of a network; their tensors become views of one piece of memory per block, on the
host or wherever that memory was copied to. Adapters inside the blocks are left alone. Each block is
pinned in place, or not: torch's own pinned allocations are rounded up to a power of two, and no copy may
reach over the end of what is pinned.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lora_trainer.errors import RequestError
from lora_trainer.model.pinned_memory import pinned, whole_pages

ALIGNMENT_BYTES = 256
"""Where tensors begin: matrix kernels are chosen by alignment, and look no further than this."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Place:
    """Where a module holds a frozen tensor, and where that lies in the memory of its block."""

    owner: dict[str, Any]
    name: str
    offset: int
    dtype: torch.dtype
    shape: torch.Size
    is_parameter: bool

    def view(self, memory: Tensor) -> Tensor:
        end = self.offset + self.shape.numel() * self.dtype.itemsize
        values = memory[self.offset : end].view(self.dtype).view(self.shape)
        return nn.Parameter(values, requires_grad=False) if self.is_parameter else values


class PackedBlock:
    """The frozen tensors of one block: parameters and buffers, `bytes` with their alignment."""

    def __init__(self, block: nn.Module, *, setting: str = "memory.streamed_blocks") -> None:
        """Raise RequestError, which names the `setting`, for weights that are not plain tensors."""
        self.bytes = 0
        self._places: list[_Place] = []
        for owner, name in base_tensors(block):
            tensor = owner[name]
            assert not tensor.requires_grad, "only a frozen base can be streamed"
            if type(tensor) not in (Tensor, nn.Parameter):
                raise RequestError(
                    f"{setting} cannot stream weights of type {type(tensor).__name__}",
                    fix=f"use --set {setting}=0, or another memory.base_precision",
                )
            place = _Place(
                owner=owner,
                name=name,
                offset=self.bytes,
                dtype=tensor.dtype,
                shape=tensor.shape,
                is_parameter=isinstance(tensor, nn.Parameter),
            )
            self._places.append(place)
            self.bytes += -(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def take_in(self, memory: Tensor) -> None:
        """Move the tensors into `memory` (uint8 [bytes]) one by one."""
        for place in self._places:
            packed = place.view(memory)
            packed.detach().copy_(place.owner[place.name].detach())
            place.owner[place.name] = packed

    def views(self, memory: Tensor) -> list[Tensor]:
        """Return the tensors as they lie in `memory`, uint8 of `bytes` or more."""
        return [place.view(memory) for place in self._places]

    def hold(self, views: Sequence[Tensor] | None) -> None:
        """Let the block use these; None: nothing, until the next call."""
        for number, place in enumerate(self._places):
            place.owner[place.name] = None if views is None else views[number]


def base_tensors(block: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield where the base's own tensors are held: (a module's parameters or buffers, name)."""
    # An adapter wraps the layer it changes; all else inside it is its own, also what it keeps frozen.
    inner = block._modules.get("base_layer")
    if inner is not None:
        yield from base_tensors(inner)
        return
    for owner in (block._parameters, block._buffers):
        yield from ((owner, name) for name, tensor in owner.items() if tensor is not None)
    for child in block.children():
        yield from base_tensors(child)


def pack(blocks: Sequence[PackedBlock]) -> list[Tensor]:
    """Move the tensors of each block into memory of its own on the host, uint8; return that."""
    found = []
    for block in blocks:
        memory = whole_pages(block.bytes)
        block.take_in(memory)
        found.append(memory)
    return found


def pin(
    memories: Sequence[Tensor], *, device: torch.device, owner: object
) -> weakref.finalize[..., Any]:
    """Lock host memory in place for copies to a device, one after the other, as far as the system lets us.

    It stays pinned as long as `owner` lives, or until what is returned is called; no copy may be under
    way then.
    """
    undone = [undo for memory in memories if (undo := pinned().in_place(memory, device=device))]

    def unpin() -> None:
        while undone:
            undone.pop()()

    undo = weakref.finalize(owner, unpin)
    undo.atexit = False  # CUDA may be gone by then
    return undo
