"""Regional compilation: the repeated blocks of a network as fused kernels (torch.compile, inductor).

Blocks of one class and shape share a graph, so a network costs as much as a few blocks
(`compile_repeated_blocks` of diffusers does the same). Only the forward function of a block is compiled:
hooks that bring its weights, checkpointing around it and adapters inside it stay what they are. Inputs: a
frozen network with its adapter in place; output: a switch. Off, the network is what it was.
"""

from __future__ import annotations

import os
import subprocess
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from lora_trainer.common.errors import first_line
from lora_trainer.network.block_swap import repeated_blocks
from lora_trainer.network.out_of_memory import is_out_of_memory

Backend = Callable[[Any, Any], Any]
"""What torch.compile takes beside the name of a backend."""
GRAPHS_PER_SHAPE = 4
"""Graphs of one kind of block at one shape: in the first block nothing before has a gradient, and the same
kind may be at several resolutions of a U-Net."""


class CompilationFailed(Exception):
    """Something went wrong in a pass with compiled blocks, other than running out of memory."""


class CompiledBlocks:
    """The compiled blocks of a network, in force inside `used`. `shapes` are how many are expected."""

    def __init__(
        self, network: nn.Module, *, shapes: int, backend: str | Backend = "inductor"
    ) -> None:
        _quiet_tracing()
        self.calls = 0
        """How often a block ran compiled."""
        self._blocks = list(repeated_blocks(network).values())
        kinds = {_kind(block) for block in self._blocks}
        _expect_graphs(max(1, shapes) * len(kinds) * GRAPHS_PER_SHAPE)
        # One graph or none: blocks in pieces would be slower to compile and gain little.
        self._compiled = [
            self._counted(
                torch.compile(block.forward, backend=backend, dynamic=False, fullgraph=True)
            )
            for block in self._blocks
        ]

    def __len__(self) -> int:
        return len(self._blocks)

    @contextmanager
    def used(self) -> Iterator[None]:
        """Let the blocks run compiled while the block runs, its backward pass included.

        Raises CompilationFailed for whatever goes wrong there, but for running out of memory: compilers
        fail in many ways. The pass can be done again without; an error of another cause comes again.
        """
        for block, compiled in zip(self._blocks, self._compiled, strict=True):
            block.forward = compiled
        try:
            yield
        except Exception as error:
            if isinstance(error, RuntimeError) and is_out_of_memory(error):
                raise
            cause = getattr(error, "inner_exception", error)  # of what a backend raised
            raise CompilationFailed(f"{type(cause).__name__}: {first_line(cause)}") from error
        finally:
            for block in self._blocks:
                del block.forward

    def _counted(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return forward(*args, **kwargs)

        return run


def compiler_version(device: torch.device) -> str:
    """Return what compiled code depends on besides torch and the device."""
    if device.type != "cpu":
        return f"triton {version('triton')}" if find_spec("triton") else "none"
    try:
        asked = [os.environ.get("CXX", "g++"), "--version"]
        told = subprocess.run(asked, capture_output=True, text=True, check=False)  # noqa: S603 - the compiler that torch will call
    except OSError:
        return "none"
    return told.stdout.partition("\n")[0]


def _kind(block: nn.Module) -> tuple[Any, ...]:
    """Return what blocks share that are compiled to the same code."""
    shapes = tuple((name, value.shape) for name, value in block.named_parameters())
    return type(block), shapes


def _quiet_tracing() -> None:
    """Keep what torch's tracer does itself from being warned of: it looks at all of a tensor and a function."""
    for message in (r"The \.grad attribute", r".*torch\.autograd\.function\.Function"):
        warnings.filterwarnings("ignore", message=message)


def _expect_graphs(count: int) -> None:
    """Let torch compile one function so often; beyond its limit it refuses, which ends in `CompilationFailed`.

    Where bits count, kernels are not chosen by what was faster just now.
    """
    import torch._dynamo.config as config

    if torch.are_deterministic_algorithms_enabled():
        import torch._inductor.config as inductor

        inductor.deterministic = True
    config.recompile_limit = max(config.recompile_limit, count)
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, count)
