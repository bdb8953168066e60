"""Gradient checkpointing of a diffusers network: the results blocks keep, and where their inputs wait.

`apply_checkpointing` takes a network and a checkpointing level, and gives diffusers the function through
which its networks call their blocks. A step has the same bits at every level, because blocks draw no
random numbers. Works on `meta` too, where a step's memory is traced.

The levels `light` and `selective` keep chosen results of a block (`kept_results`) and recompute all others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from lora_trainer.config.declare import KEEP_ATTENTION, Checkpointing
from lora_trainer.hardware.device_calls import may_copy_ahead
from lora_trainer.network.adapter_copies import BlockCopies
from lora_trainer.network.kept_results import KeepingBlock, largest_rank
from lora_trainer.network.pinned_memory import pinned

# Blocks that ran last, whose inputs stay on the device: the backward pass needs them first.
BLOCKS_ON_DEVICE = 2


def apply_checkpointing(network: nn.Module, kind: Checkpointing) -> None:
    """Let a diffusers network recompute its blocks in the backward pass; may be called again.

    Call it after adapters are in place. The level `offloaded` keeps the inputs of blocks in host memory,
    pinned if the network is on a CUDA device.
    """
    if kind == "none":
        network.disable_gradient_checkpointing()  # type: ignore[operator]
    else:
        network.enable_gradient_checkpointing(BlockRunner(network, kind))  # type: ignore[operator]


class BlockRunner:
    """The function through which a diffusers network calls its blocks while gradients are computed."""

    def __init__(self, network: nn.Module, kind: Checkpointing) -> None:
        self._kind = kind
        self._rank = largest_rank(network)
        self._copies: dict[nn.Module, BlockCopies] = {}
        self._keeping: dict[nn.Module, KeepingBlock] = {}
        self.host = HostInputs()
        # Saving and restoring the random generators costs every block a wait, so it is left out unless a
        # module draws from them. Dropout of adapters does not: its masks are a function of the sample.
        self._draws = any(
            isinstance(module, nn.Dropout) and module.p > 0 for module in network.modules()
        )

    def __call__(self, block: nn.Module, *args: Any) -> Any:
        modes: dict[str, Any] = {}
        # Compiled code that keeps these results recomputes the others by itself; other code, all.
        kept_by_code = getattr(block.forward, "kept", None)
        if kept_by_code == self._kind and self._kind in KEEP_ATTENTION:
            return block(*args)
        if kept_by_code is None:
            modes["context_fn"] = partial(self._contexts, block, _dtype(args))
        with self.host.holding(args) if self._kind == "offloaded" else nullcontext():
            return checkpoint(
                block, *args, use_reentrant=False, preserve_rng_state=self._draws, **modes
            )

    def _contexts(
        self, block: nn.Module, dtype: torch.dtype
    ) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Return the contexts of the forward pass and of the recomputation of one call of the block."""
        if block not in self._copies:
            self._copies[block] = BlockCopies(block)
            if self._kind in KEEP_ATTENTION:
                self._keeping[block] = KeepingBlock(block, self._kind, self._rank)
        copies = self._copies[block]
        if block not in self._keeping:
            return copies.made(dtype), copies.made(dtype)
        forward, recomputed = self._keeping[block].contexts()
        return _both(copies.made(dtype), forward), _both(copies.made(dtype), recomputed)


@contextmanager
def _both(
    first: AbstractContextManager[None], second: AbstractContextManager[None]
) -> Iterator[None]:
    with first, second:
        yield


def _dtype(inputs: tuple[Any, ...]) -> torch.dtype:
    """Return the dtype of a block's first input, its stream of latents or tokens."""
    dtype: torch.dtype = inputs[0].dtype
    return dtype


class HostInputs:
    """Copies the inputs of blocks to host memory; the device keeps those of the last two blocks only.

    The copies are queued in order with the computation: the host waits for none of them, and no tensor
    has to be held until a copy on another stream is over.
    """

    def __init__(self) -> None:
        self.moved_bytes = 0
        self._on_device: deque[dict[int, Tensor]] = deque()

    @contextmanager
    def holding(self, inputs: tuple[Any, ...]) -> Iterator[None]:
        """Move the inputs that autograd saves for a block to host memory, while the block runs.

        Only inputs with a gradient are moved: the others, such as text embeddings and positions, are
        shared by all blocks and would be copied by each.
        """
        input_keys = {storage_key(x) for x in inputs if isinstance(x, Tensor) and x.requires_grad}
        if len(self._on_device) == BLOCKS_ON_DEVICE:
            self._on_device.popleft().clear()
        block: dict[int, Tensor] = {}
        self._on_device.append(block)

        def pack(tensor: Tensor) -> Tensor | Callable[[], Tensor]:
            if storage_key(tensor) not in input_keys:
                return tensor
            self.moved_bytes += tensor.nbytes
            return _moved(tensor, block)

        # Autograd asks for them in the backward pass.
        with saved_tensors_hooks(
            pack, lambda saved: saved if isinstance(saved, Tensor) else saved()
        ):
            yield


def _moved(tensor: Tensor, on_device: dict[int, Tensor]) -> Callable[[], Tensor]:
    """Copy a block's input to host memory; return the function that restores it, from `on_device` if it is there."""
    number = len(on_device)
    on_device[number] = tensor
    # A view of part of a larger storage is copied without the rest, so its strides change.
    whole = tensor.nbytes == tensor.untyped_storage().nbytes()
    layout = tensor if whole else torch.empty(tensor.shape, device="meta")
    shape, strides, dtype, device = tensor.shape, layout.stride(), tensor.dtype, tensor.device
    host: Tensor | None = None
    if not tensor.is_meta:  # a traced network has no host memory to copy to
        host = pinned().empty(shape, strides=strides, dtype=dtype, device=device)
        # The allocator of pinned memory does not reuse it while a copy is queued.
        host.copy_(tensor, non_blocking=may_copy_ahead(device))

    def restored() -> Tensor:
        if number in on_device:
            return on_device.pop(number)
        copy = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        return copy if host is None else copy.copy_(host, non_blocking=may_copy_ahead(device))

    return restored


def storage_key(tensor: Tensor) -> int:
    """Return a number that identifies a tensor's storage while it is alive."""
    return int(tensor.untyped_storage()._cdata)
