"""Frozen weights of blocks packed into host memory, so that one copy brings a block to a device.

Input are modules of a network; their tensors become views of one piece of memory per block, on the
host or wherever that memory was copied to. Adapters inside the blocks are left alone. The memory of
all blocks is pinned in place: torch's own pinned allocations are rounded up to a power of two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lora_trainer.errors import MachineError, RequestError
from lora_trainer.hardware import GIB

ALIGNMENT_BYTES = 256
"""Where tensors begin: matrix kernels are chosen by alignment, and look no further than this."""
_PORTABLE = 1
"""Pinned for every device of the process."""


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


def pack(blocks: Sequence[PackedBlock]) -> Tensor:
    """Move the tensors of blocks into one piece of host memory, uint8, block after block; return it."""
    memory = torch.empty(sum(block.bytes for block in blocks), dtype=torch.uint8)
    for block, part in zip(blocks, parts(memory, blocks), strict=True):
        block.take_in(part)
    return memory


def parts(memory: Tensor, blocks: Sequence[PackedBlock]) -> tuple[Tensor, ...]:
    """Return each block's part of what `pack` returned."""
    found: tuple[Tensor, ...] = memory.split([block.bytes for block in blocks])
    return found


def pin(
    memory: Tensor, *, fix: str = "free host memory, or use a smaller memory.streamed_blocks"
) -> None:
    """Lock host memory in place for asynchronous copies; raises MachineError when the system refuses."""
    code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE)
    if int(code) != 0:
        raise MachineError(
            f"the system refused to pin {memory.nbytes / GIB:.1f} GiB of host memory (CUDA error "
            f"{int(code)})",
            fix=fix,
        )


def unpin(address: int) -> None:
    """Undo `pin`; the memory must not be in use by a copy."""
    torch.cuda.cudart().cudaHostUnregister(address)
