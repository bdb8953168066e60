"""Frozen weights that wait in host memory and are copied to the device when they are due.

Block swap: `stream_blocks` takes a network with adapters and checkpointing in place, on the CPU or on the
device, and makes it ready to train and sample on the device. The frozen tensors of a block become views of one
piece of host memory, so that one copy brings the block. Copies run one block ahead into one of two buffers, in
the forward and in the backward pass, and never back, as the base is frozen. Every swapped block must be
recomputed: autograd would otherwise save weights whose buffer is overwritten. torch's version counters would
then refuse the backward pass, so no gradient is ever silently wrong.

Adapters inside the blocks are not packed. The memory of each block is pinned in place, as a whole or not at
all: torch's own pinned allocations are rounded up to a power of two, and a copy must not run past the end of a
pinned range.

Networks that only run forward, such as text encoders during caching: offload.py.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lora_trainer.common.errors import RequestError
from lora_trainer.config.declare import BUFFERS, streamed_indices
from lora_trainer.network.pinned_memory import CopyStream, Done, pinned, whole_pages

# Alignment of tensors in packed memory: matrix kernels are chosen by alignment up to this value, so a packed
# weight runs the same kernels, with the same bits, as one that is not.
ALIGNMENT_BYTES = 256


@dataclass(frozen=True, kw_only=True, eq=False)
class _Slot:
    """The attribute in which a module holds a frozen tensor."""

    owner: dict[str, Any]
    name: str
    offset: int
    """Offset of the tensor in its block's memory."""
    like: Tensor
    """The tensor's detached twin on `meta`."""
    is_parameter: bool

    def view(self, memory: Tensor) -> Tensor:
        data = memory[self.offset : self.offset + self.like.nbytes]
        values = data.view(self.like.dtype).view(self.like.shape)
        return nn.Parameter(values, requires_grad=False) if self.is_parameter else values


class PackedBlock:
    """The frozen tensors of one block, parameters and buffers; `bytes` is their size with alignment."""

    host: Tensor
    """The host memory that holds all tensors."""
    host_views: list[Tensor]
    """The tensors, as views of `host`."""

    def __init__(self, block: nn.Module) -> None:
        """Raise RequestError for weights that are not plain tensors."""
        self.bytes = 0
        self._slots: list[_Slot] = []
        for owner, name in base_tensors(block):
            tensor = owner[name]
            assert not tensor.requires_grad, "only a frozen base can be streamed"
            # A subclass (torchao, GGUF) may keep its values outside its storage, which packing would lose.
            if type(tensor) not in (Tensor, nn.Parameter):
                raise RequestError(
                    f"memory.streamed_blocks cannot stream weights of type {type(tensor).__name__}",
                    fix="use --set memory.streamed_blocks=0, or another memory.base_precision",
                )
            slot = _Slot(
                owner=owner,
                name=name,
                offset=self.bytes,
                like=tensor.detach().to("meta"),
                is_parameter=isinstance(tensor, nn.Parameter),
            )
            self._slots.append(slot)
            # Rounded up, so that the next tensor begins aligned.
            self.bytes += -(-tensor.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES

    def move_to_host(self) -> None:
        """Move the tensors one by one into host memory of whole pages, uint8 [bytes]."""
        self.host = whole_pages(self.bytes)
        self.host_views = self.views(self.host)
        for slot, packed in zip(self._slots, self.host_views, strict=True):
            packed.detach().copy_(slot.owner[slot.name].detach())
            slot.owner[slot.name] = packed

    def views(self, memory: Tensor) -> list[Tensor]:
        """Return views of `memory`, uint8 of `bytes` or more, as the block's tensors in their order."""
        return [slot.view(memory) for slot in self._slots]

    def hold(self, views: Sequence[Tensor] | None) -> None:
        """Let the block use these tensors; with None it has none until the next call."""
        for number, slot in enumerate(self._slots):
            slot.owner[slot.name] = None if views is None else views[number]


def base_tensors(block: nn.Module) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the holders of the base's own tensors: (a module's dict of parameters or buffers, name)."""
    # An adapter wraps the layer it changes; its other tensors are the adapter's, even frozen ones.
    inner = block._modules.get("base_layer")
    if inner is not None:
        yield from base_tensors(inner)
        return
    for owner in (block._parameters, block._buffers):
        yield from ((owner, name) for name, tensor in owner.items() if tensor is not None)
    for child in block.children():
        yield from base_tensors(child)


def repeated_blocks(network: nn.Module) -> dict[str, nn.Module]:
    """Return the network's repeated blocks by name, in module order, as diffusers declares them."""
    kinds: Any = network._repeated_blocks or network._no_split_modules
    return {
        name: module
        for name, module in network.named_modules()
        # AuraFlow's patch embedding, the only one of its kind, must not be split either.
        if type(module).__name__ in kinds and name.rpartition(".")[2].isdigit()
    }


def _recomputing(network: nn.Module, block: str) -> nn.Module:
    """Return the module that recomputes a block: the nearest that holds it and that diffusers switches."""
    parts = block.split(".")[:-1]
    holders = (
        network.get_submodule(".".join(parts[:depth])) for depth in range(len(parts), -1, -1)
    )
    return next((each for each in holders if hasattr(each, "gradient_checkpointing")), network)


def stream_blocks(network: nn.Module, *, count: int, device: torch.device) -> Streamed:
    """Keep the frozen weights of `count` repeated blocks in host memory; move the rest to `device`.

    Raises RequestError if the network has fewer blocks, a block is not recomputed, or its weights are of a
    type that cannot be packed.
    """
    names = list(repeated_blocks(network))
    if not 1 <= count <= len(names):
        raise RequestError(
            f"memory.streamed_blocks={count} is impossible: the base has {len(names)} blocks",
            fix=f"use at most {len(names)}",
        )
    return Streamed(
        network, [names[index] for index in streamed_indices(len(names), count)], device=device
    )


@dataclass(kw_only=True, eq=False)
class _Buffer:
    """Device memory for the weights of one block."""

    memory: Tensor
    views: list[list[Tensor]]
    """For every block, its tensors as views of `memory`."""
    block: int | None = None
    """The block in it."""
    arrived: Done = None
    """The block is complete after this."""


class Streamed:
    """The swapped blocks of a network."""

    def __init__(self, network: nn.Module, names: list[str], *, device: torch.device) -> None:
        self.names, self.device = tuple(names), device
        blocks = [network.get_submodule(name) for name in names]
        # Weak references: a block's hook holds this object, and a cycle would be freed late.
        self._parents = [weakref.ref(_recomputing(network, name)) for name in names]
        for index in range(len(blocks)):
            self._require_recomputation(index)
        self._blocks = [PackedBlock(block) for block in blocks]
        for packed in self._blocks:
            # One block at a time: the base and its packed copy never exist together as a whole.
            packed.move_to_host()
        # One piece after the other, until the system refuses; pinned as long as this object lives.
        for packed in self._blocks:
            if unpin := pinned().in_place(packed.host, device=device):
                # Not at exit: CUDA may be shut down by then, and the process's memory is freed anyway.
                weakref.finalize(self, unpin).atexit = False
        # The blocks let go of their weights meanwhile, so that `to` does not move them.
        for packed in self._blocks:
            packed.hold(None)
        try:
            network.to(device)
        finally:
            for packed in self._blocks:
                packed.hold(packed.host_views)
        self._copies = CopyStream(device)
        largest = max(block.bytes for block in self._blocks)
        self._buffers = []
        for _ in range(min(BUFFERS, len(names))):
            memory = torch.empty(largest, dtype=torch.uint8, device=device)
            views = [block.views(memory) for block in self._blocks]
            self._buffers.append(_Buffer(memory=memory, views=views))
        self._order, self._last = list(range(len(names))), 0
        for index, block in enumerate(blocks):
            block.register_forward_pre_hook(partial(self._before, index))

    def copy_when_due(self) -> None:
        """Copy on the computing stream from now on, so that no copy runs beside a computation."""
        for buffer in self._buffers:
            self._copies.wait(buffer.arrived)
            self._empty(buffer)
            buffer.arrived = None
        self._copies = CopyStream(self.device, beside=False)

    # ---- before a block runs: in the forward pass, and again when the backward pass recomputes it

    def _before(self, index: int, _: nn.Module, _inputs: tuple[Any, ...]) -> None:
        # The id of the running backward pass, -1 outside one: under checkpointing this hook also runs
        # during recomputation, where the next block needed is the previous one.
        backward = torch._C._current_graph_task_id() != -1
        if torch.is_grad_enabled() and not backward:
            self._require_recomputation(index)
        buffer = self._buffer_of(index)
        if buffer is None:  # the order was predicted wrongly: this block waits for its whole copy
            buffer = self._load(index)
        self._copies.wait(buffer.arrived)
        self._blocks[index].hold(buffer.views[index])
        # The last buffer in the list is in use, the first is free: work on the block before it is queued
        # already (in the backward pass its gradients too, as autograd runs the later of two blocks first),
        # and the copy stream waits for all work queued so far.
        self._buffers.remove(buffer)
        self._buffers.append(buffer)
        order = self._order
        if backward:
            following = order[order.index(index) - 1] if index != order[0] else None
        else:
            # Learn the order in which blocks run; it may differ from the module order: U-Nets declare the up blocks
            # before the middle block.
            if order.index(index) > order.index(self._last) + 1:
                order.remove(index)
                order.insert(order.index(self._last) + 1, index)
            self._last = index
            # After the last block: with gradients the backward pass starts with this block, which is on the device;
            # without them the next forward pass starts with the first block.
            at_the_end = None if torch.is_grad_enabled() else order[0]
            following = order[order.index(index) + 1] if index != order[-1] else at_the_end
        if following is not None and self._buffer_of(following) is None:
            self._load(following)

    def _buffer_of(self, index: int) -> _Buffer | None:
        return next((buffer for buffer in self._buffers if buffer.block == index), None)

    def _load(self, index: int) -> _Buffer:
        """Start to copy a block into the free buffer; the block that was there uses host memory again."""
        buffer, source = self._buffers[0], self._blocks[index].host
        # Until the copy is queued: where that fails, no block must seem loaded.
        self._empty(buffer)
        buffer.arrived = self._copies.copy(buffer.memory[: source.nbytes], source)
        buffer.block = index
        return buffer

    def _empty(self, buffer: _Buffer) -> None:
        if buffer.block is not None:
            packed = self._blocks[buffer.block]
            packed.hold(packed.host_views)
            buffer.block = None

    # ---- setting up

    def _require_recomputation(self, index: int) -> None:
        parent = self._parents[index]()
        if not getattr(parent, "gradient_checkpointing", False):
            raise RequestError(
                f"memory.streamed_blocks needs every block recomputed, and {self.names[index]} is not",
                fix="use --set memory.gradient_checkpointing=full",
            )
