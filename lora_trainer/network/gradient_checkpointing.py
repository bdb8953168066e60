"""Gradient checkpointing of a diffusers network: the results blocks keep, and where their inputs wait.

`apply_checkpointing` takes a network and a checkpointing level, and gives diffusers the function through
which its networks call their blocks. A step has the same bits at every level, because blocks draw no
random numbers. Works on `meta` too, where a step's memory is traced.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lora_trainer.config.declare import KEEP_ATTENTION, Checkpointing
from lora_trainer.network.async_copies import CopyStream, Done
from lora_trainer.network.live_storages import storage_key
from lora_trainer.network.pinned_memory import pinned
from lora_trainer.network.selective_checkpoint import SelectivePolicy, selective_contexts

BLOCKS_ON_DEVICE = 2
"""Blocks whose inputs are on the device at a time: the block at work, and one whose copy is under way."""


def apply_checkpointing(network: nn.Module, kind: Checkpointing) -> None:
    """Let a diffusers network recompute its blocks in the backward pass; may be called again.

    Call it after adapters are in place. The level `offloaded` keeps the inputs of blocks in host memory,
    pinned if the network is on a CUDA device.
    """
    if kind == "none":
        network.disable_gradient_checkpointing()  # type: ignore[operator]
    else:
        network.enable_gradient_checkpointing(BlockRunner(network, kind))  # type: ignore[operator]


def is_checkpointed(parent: nn.Module, block: nn.Module) -> bool:
    """Say whether `parent`, the module that calls `block`, lets it be recomputed."""
    return bool(getattr(parent, "gradient_checkpointing", False))


class BlockRunner:
    """The function through which a diffusers network calls its blocks while gradients are computed."""

    def __init__(self, network: nn.Module, kind: Checkpointing) -> None:
        self._kind = kind
        ranks = (
            rank
            for module in network.modules()
            if isinstance(module, LoraLayer)
            for rank in module.r.values()
        )
        self._rank = max(ranks, default=0)
        self._host = HostInputs() if kind == "offloaded" else None
        # Saving and restoring the random generators costs every block a wait, so it is left out unless a
        # module draws from them. Dropout of adapters does not: its masks are a function of the sample.
        self._draws = any(
            isinstance(module, nn.Dropout) and module.p > 0 for module in network.modules()
        )

    @property
    def host_bytes(self) -> int:
        """Bytes of block inputs that have been moved to host memory so far."""
        return self._host.moved_bytes if self._host is not None else 0

    def __call__(self, block: nn.Module, *args: Any) -> Any:
        modes: dict[str, Any] = {}
        if self._kind in KEEP_ATTENTION:
            policy = SelectivePolicy(checkpointing=self._kind, rank=self._rank)
            modes["context_fn"] = partial(selective_contexts, policy)
        with self._host.holding(args) if self._host is not None else nullcontext():
            return checkpoint(
                block, *args, use_reentrant=False, preserve_rng_state=self._draws, **modes
            )


class HostInputs:
    """Moves the inputs of blocks to host memory in the order of the forward pass, and back in reverse.

    The device keeps the inputs of two blocks, so a copy runs beside the computation of one block.
    """

    def __init__(self) -> None:
        self.moved_bytes = 0
        self._stream: CopyStream | None = None
        self._leaving: deque[_BlockInputs] = deque()
        self._arriving: _BlockInputs | None = None
        self._latest: weakref.ref[_BlockInputs] | None = None

    @contextmanager
    def holding(self, inputs: tuple[Any, ...]) -> Iterator[None]:
        """Move the inputs that autograd saves for a block to host memory, while the block runs.

        Only inputs with a gradient are moved: the others, such as text embeddings and positions, are
        shared by all blocks and would be copied by each.
        """
        input_keys = {storage_key(x) for x in inputs if isinstance(x, Tensor) and x.requires_grad}
        self._expect(None)
        if len(self._leaving) == BLOCKS_ON_DEVICE:
            self._leaving.popleft().leave()
        block = _BlockInputs(before=self._latest)
        self._leaving.append(block)
        self._latest = weakref.ref(block)

        def pack(tensor: Tensor) -> Tensor | tuple[_BlockInputs, int]:
            if storage_key(tensor) not in input_keys:
                return tensor
            self.moved_bytes += tensor.nbytes
            block.saved_inputs.append(_Kept(tensor, self._stream_of(tensor.device)))
            return block, len(block.saved_inputs) - 1

        with saved_tensors_hooks(pack, self._unpack):
            yield

    def _unpack(self, packed: Tensor | tuple[_BlockInputs, int]) -> Tensor:
        """Return an input, and start to copy back the inputs of the block before."""
        if isinstance(packed, Tensor):
            return packed
        block, index = packed
        tensor = block.take(index)
        self._expect(block.before, instead_of=block)
        return tensor

    def _expect(
        self,
        before: weakref.ref[_BlockInputs] | None,
        *,
        instead_of: _BlockInputs | None = None,
    ) -> None:
        """Start to copy back the inputs of one more block, and drop those that were requested before it.

        After an error in a backward pass nothing asks for the latter: their graph is gone, and this object
        holds them only until their copies are over.
        """
        block = before() if before is not None else None
        if block is self._arriving:
            return
        if self._arriving not in (None, instead_of):
            self._arriving.leave()
        self._arriving = block
        if block is not None:
            block.bring()

    def _stream_of(self, device: torch.device) -> CopyStream:
        if self._stream is None or self._stream.device != device:
            self._stream = CopyStream(device)
        return self._stream


class _BlockInputs:
    """The inputs of one call of a block, and those of the call before it."""

    def __init__(self, *, before: weakref.ref[_BlockInputs] | None) -> None:
        self.before = before
        self.saved_inputs: list[_Kept] = []

    def leave(self) -> None:
        for saved in self.saved_inputs:
            saved.leave()

    def bring(self) -> None:
        for saved in self.saved_inputs:
            saved.bring()

    def take(self, index: int) -> Tensor:
        """Return one input; work queued from now on begins after the copies of all inputs."""
        for saved in self.saved_inputs:  # a recomputed block reads all its inputs at once
            saved.settle()
        return self.saved_inputs[index].take()


class _Kept:
    """One input of a block: its host copy, and the tensor itself while it is on the device."""

    def __init__(self, tensor: Tensor, stream: CopyStream) -> None:
        self._on_device: Tensor | None = tensor
        self._stream = stream
        self._done: Done = None
        # A view of part of a larger storage is copied without the rest, so its strides change.
        whole = tensor.nbytes == tensor.untyped_storage().nbytes()
        layout = tensor if whole else torch.empty(tensor.shape, device="meta")
        self._strides = layout.stride()
        self._shape, self._dtype = tensor.shape, tensor.dtype
        self._host: Tensor | None = None
        if not tensor.is_meta:  # a traced network has no host memory to copy to
            self._host = pinned().empty(
                self._shape, strides=self._strides, dtype=self._dtype, device=tensor.device
            )
            self._done = stream.copy(self._host, tensor)

    def settle(self) -> None:
        """Make work queued from now on wait for the last copy."""
        self._stream.wait(self._done)
        self._done = None

    def leave(self) -> None:
        """Free the device memory once the copy to the host is done."""
        self.settle()
        self._on_device = None

    def bring(self) -> None:
        """Start the copy to the device, unless the input is there."""
        if self._on_device is not None:
            return
        self._on_device = torch.empty_strided(
            self._shape, self._strides, dtype=self._dtype, device=self._stream.device
        )
        if self._host is not None:
            self._done = self._stream.copy(self._on_device, self._host)

    def take(self) -> Tensor:
        """Return the input on the device and drop this object's reference to it."""
        self.bring()
        tensor = self._on_device
        assert tensor is not None
        self.leave()
        return tensor
