"""Gradient checkpointing of a diffusers network: the results blocks keep, and where their inputs wait.

`apply_checkpointing` takes a network and a checkpointing level, and gives diffusers the function through
which its networks call their blocks. A step has the same bits at every level, because blocks draw no
random numbers. Works on `meta` too, where a step's memory is traced.

The levels `light` and `selective` save chosen results of kernels inside a block and recompute all others.
`selective_contexts` gives `torch.utils.checkpoint` two dispatch modes for one call of a block. In the forward
pass the first saves results that took much arithmetic for their bytes; in the recomputation the second returns
them in the same order instead of running their kernels. torch's own modes for this record every kernel, and
cannot return results that a kernel wrote in place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from lora_trainer.config.declare import KEEP_ATTENTION, Checkpointing
from lora_trainer.hardware.device_calls import may_copy_ahead
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
        ranks = (
            rank
            for module in network.modules()
            if isinstance(module, LoraLayer)
            for rank in module.r.values()
        )
        self._rank = max(ranks, default=0)
        self.host = HostInputs()
        # Saving and restoring the random generators costs every block a wait, so it is left out unless a
        # module draws from them. Dropout of adapters does not: its masks are a function of the sample.
        self._draws = any(
            isinstance(module, nn.Dropout) and module.p > 0 for module in network.modules()
        )

    def __call__(self, block: nn.Module, *args: Any) -> Any:
        modes: dict[str, Any] = {}
        # Compiled code that keeps these results recomputes the others by itself.
        if self._kind in KEEP_ATTENTION and self._kind == getattr(block.forward, "kept", None):
            return block(*args)
        if self._kind in KEEP_ATTENTION:
            modes["context_fn"] = partial(selective_contexts, self._kind, self._rank)
        with self.host.holding(args) if self._kind == "offloaded" else nullcontext():
            return checkpoint(
                block, *args, use_reentrant=False, preserve_rng_state=self._draws, **modes
            )


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


_ATEN = torch.ops.aten
# Kernels of matrix products, with the position of the second factor among their arguments.
_FACTORS = {_ATEN.mm.default: 1, _ATEN.addmm.default: 2, _ATEN.addmm_.default: 2}
# Smallest fan_in / out of a matrix product that `light` keeps. A smaller ratio means an adapter's up projection
# (fan_in is the rank): recomputing it costs next to nothing.
LEAST_SHAPE = 1 / 16


def is_worth_saving(
    kind: Checkpointing, rank: int, kernel: Any, arguments: tuple[Any, ...]
) -> bool:
    """Say whether a kernel's result is saved: that of attention, or of a frozen product that takes much to recompute.

    The FLOPs to recompute one byte of a product grow with its `fan_in` (a convolution's kernel counts): `light`
    keeps all such outputs, `selective` only those of layers with more inputs than outputs. Products of adapters
    are never saved. `rank` is the largest rank of the network's adapters: a factor with a side no longer than
    that is taken for an adapter's.
    """
    if kernel in _FACTORS:
        weight = arguments[_FACTORS[kernel]]
        fan_in, out = weight.shape
    elif kernel is _ATEN.convolution.default:
        weight = arguments[1]
        fan_in, out = weight[0].numel(), weight.shape[0]
    else:
        return _is_attention(kernel)
    # A weight with a gradient belongs to an adapter.
    if weight.requires_grad or min(fan_in, out) <= rank:
        return False
    return bool(fan_in > out or (kind == "light" and fan_in >= LEAST_SHAPE * out))


@cache
def _is_attention(kernel: Any) -> bool:
    """Say by its name whether a kernel is a fused attention of torch or xformers ("flash_fwd" is the latter's)."""
    name = kernel.__name__
    return "attention" in name or "flash_fwd" in name


def selective_contexts(
    kind: Checkpointing, rank: int
) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Return the modes of the forward pass and of the recomputation of one call of a block."""
    results, worth = deque[tuple[Any, Any]](), partial(is_worth_saving, kind, rank)
    return _KernelMode(worth, results, saves=True), _KernelMode(worth, results, saves=False)


def keeping(block: nn.Module, kind: Checkpointing) -> Callable[..., Any]:
    """Return a block's forward function for the compiler, which keeps the results of this level and no others.

    torch's own modes only mark each kernel's result while the block is traced: the code that is made of it saves the
    marked ones, and no kernel is inspected in a step.
    """
    ranks = (
        rank
        for module in block.modules()
        if isinstance(module, LoraLayer)
        for rank in module.r.values()
    )
    rank, forward = max(ranks, default=0), block.forward

    def policy(_: Any, kernel: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if is_worth_saving(kind, rank, kernel, args):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)

    def kept_forward(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(
            forward,
            *args,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=contexts,
            **kwargs,
        )

    return kept_forward


class _KernelMode(TorchDispatchMode):
    """Saves results of the kernels of one call of a block in the forward pass, or returns them in the recomputation.

    Both ask `worth` the same question of the same kernels in the same order, so the (kernel, detached result)
    pairs are a queue: no result needs a key. A network must not write in place to a result after the call.
    """

    def __init__(
        self, worth: Callable[..., bool], results: deque[tuple[Any, Any]], *, saves: bool
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotation
        self._worth, self._results, self._saves = worth, results, saves

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True: compiled code inside a block is not watched and is recomputed as a whole."""
        return True

    def __exit__(self, *error: Any) -> None:
        # Results that were not used are dropped, so that a second backward pass recomputes everything.
        if not self._saves:
            self._results.clear()
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # torch has no annotation

    def __torch_dispatch__(
        self, kernel: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if not (self._saves or self._results) or not self._worth(kernel, args):
            return kernel(*args, **(kwargs or {}))
        if self._saves:
            result = kernel(*args, **(kwargs or {}))
            # As new tensors on the same storages: the old ones would keep their autograd graph.
            self._results.append((kernel, tree_map_only(Tensor, Tensor.detach, result)))
            return result
        saved_kernel, value = self._results.popleft()
        if saved_kernel is not kernel:
            raise RuntimeError(
                f"a recomputed block calls {kernel} where the forward pass called {saved_kernel}"
            )
        # torch returns the tensor that a kernel has written to, whatever is returned here.
        return args[0].set_(value) if kernel._schema.is_mutable else value


def storage_key(tensor: Tensor) -> int:
    """Return a number that identifies a tensor's storage while it is alive."""
    return int(tensor.untyped_storage()._cdata)
