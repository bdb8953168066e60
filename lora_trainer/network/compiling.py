"""The kernels of a network: attention, and the repeated blocks fused by torch.compile (inductor).

Blocks of one class and shape share a graph, so compiling a network takes as long as compiling a few blocks
(`compile_repeated_blocks` of diffusers does the same). Only the forward function of a block is compiled:
hooks that copy its weights, checkpointing around it and the adapters inside it work as before. Input: a
frozen network with its adapter in place; output: a switch. Switched off, the network runs as before.
"""

from __future__ import annotations

import os
import signal
import subprocess
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import nn

from lora_trainer.common.errors import BROKEN_PACKAGE, MachineError, first_line
from lora_trainer.config.declare import CompileMode
from lora_trainer.network.block_swap import repeated_blocks

# Upper bound of the graphs of one kind of block at one latent shape: the input of the first block has no
# gradient, and blocks of one kind may be at several resolutions of a U-Net.
GRAPHS_PER_SHAPE = 4
# What torch calls the modes. Its max-autotune has CUDA graphs too, which the planner leaves out more often than that.
INDUCTOR_MODES: Mapping[CompileMode, str] = {
    "default": "default",
    "reduce-overhead": "reduce-overhead",
    "max-autotune": "max-autotune-no-cudagraphs",
}
# One kernel takes seconds; a run that waits longer than this goes on uncompiled.
WORKER_PATIENCE_S = 300


class CompiledBlocks:
    """The compiled blocks of a network, active inside `used` until `is_off`, after a failure and for good.

    The caller runs only passes of the latent `shapes` (height, width, images) compiled. They are fixed before the
    first step, because compiled code rounds differently: if they depended on the order in which shapes come up,
    an interrupted run would end with other weights.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        shapes: Collection[tuple[int, int, int]],
        mode: CompileMode = "default",
        backend: str | Callable[[Any, Any], Any] = "inductor",
    ) -> None:
        # Two warnings that torch's tracer causes itself, by reading every attribute of an object.
        for message in (r"The \.grad attribute", r".*torch\.autograd\.function\.Function"):
            warnings.filterwarnings("ignore", message=message)
        self.shapes, self.is_off = shapes, False
        self._has_graphs = mode == "reduce-overhead"
        self.is_told = False
        """Whether the user knows that passes of other shapes do not run compiled."""
        self._blocks = list(repeated_blocks(network).values())
        # Blocks of one class with parameters of the same shapes compile to the same code.
        kinds = {
            (type(block), *((name, value.shape) for name, value in block.named_parameters()))
            for block in self._blocks
        }
        # torch's limit of compilations of one function; beyond it torch raises.
        import torch._dynamo.config as dynamo

        count = max(1, len(shapes)) * len(kinds) * GRAPHS_PER_SHAPE
        dynamo.recompile_limit = max(dynamo.recompile_limit, count)
        dynamo.accumulated_recompile_limit = max(dynamo.accumulated_recompile_limit, count)
        # In deterministic runs inductor must not choose kernels by timing them: another may give other bits.
        if torch.are_deterministic_algorithms_enabled():
            import torch._inductor.config as inductor

            inductor.deterministic = True
        if backend == "inductor":
            start_workers()
        # `fullgraph` makes torch raise where it would otherwise split a block into several graphs, which
        # take longer to compile and gain little.
        self._compiled = [
            torch.compile(
                block.forward,
                backend=backend,
                mode=INDUCTOR_MODES[mode] if backend == "inductor" else None,
                dynamic=False,
                fullgraph=True,
            )
            for block in self._blocks
        ]

    @contextmanager
    def used(self) -> Iterator[None]:
        """Run the blocks compiled inside the context, backward pass included; compilers raise anything."""
        if (
            self._has_graphs
        ):  # what the pass before has left in the graphs' memory may be written over
            torch.compiler.cudagraph_mark_step_begin()
        # An attribute of the instance hides the class's method until it is deleted below.
        for block, compiled in zip(self._blocks, self._compiled, strict=True):
            block.forward = compiled
        try:
            yield
        finally:
            for block in self._blocks:
                del block.forward


def start_workers() -> None:
    """Start the processes that compile, out of reach of the signals that stop a run, and bound the wait for them.

    Ctrl-C, a closed terminal and schedulers signal the whole process group. A worker that dies of it leaves torch
    waiting for its answer for ever, while the run has to end its step and save. Signals that are blocked here stay so
    in new processes, and reach this one when the block ends. Workers end when their parent does.
    """
    import torch._inductor.config as inductor
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads

    if not getattr(inductor, "compile_worker_wait_timeout", WORKER_PATIENCE_S):
        inductor.compile_worker_wait_timeout = WORKER_PATIENCE_S
    set_mask = getattr(signal, "pthread_sigmask", None)  # Windows has none of it, nor SIGHUP
    if get_compile_threads() <= 1 or set_mask is None:
        return  # in this process
    before = set_mask(
        signal.SIG_BLOCK, {getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP")}
    )
    try:
        with suppress(RuntimeError, OSError):  # then torch compiles in this process
            AsyncCompile.process_pool()
    finally:
        set_mask(signal.SIG_SETMASK, before)


def compiler_version(device: torch.device) -> str:
    """Return the version of the compiler behind torch.compile: triton's, or the C++ compiler's on a CPU."""
    if device.type != "cpu":
        return f"triton {version('triton')}" if find_spec("triton") else "none"
    try:
        command = [os.environ.get("CXX", "g++"), "--version"]
        completed = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - the compiler that torch will call
    except OSError:
        return "none"
    return completed.stdout.partition("\n")[0]


def apply_attention(denoiser: nn.Module, kind: Literal["sdpa", "xformers"]) -> None:
    """Make `denoiser` use these kernels; raises MachineError when they cannot be used here."""
    if kind == "sdpa":  # the default of every diffusers network
        return
    # `set_attention_backend` silently does nothing on a U-Net: the networks' own method, checked afterwards.
    try:
        denoiser.enable_xformers_memory_efficient_attention()  # type: ignore[operator]
        processors = {type(each).__name__ for each in denoiser.attn_processors.values()}  # type: ignore[operator]
        if not all("XFormers" in name for name in processors):
            raise ValueError(f"it was accepted, but {sorted(processors)} are in use")
    except (*BROKEN_PACKAGE, ValueError) as error:
        raise MachineError(
            f"memory.attention=xformers cannot be used: {first_line(error)}",
            fix="use --set memory.attention=sdpa",
        ) from None
