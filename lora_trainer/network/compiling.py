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
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lora_trainer.common.errors import (
    BROKEN_PACKAGE,
    RESUME,
    MachineError,
    StoppedBySignal,
    first_line,
)
from lora_trainer.config.declare import KEEP_ATTENTION, Checkpointing, CompileMode
from lora_trainer.network.block_swap import repeated_blocks
from lora_trainer.network.kept_results import keeping

# Upper bound of the graphs of one kind of block at one latent shape: the input of the first block has no
# gradient, and blocks of one kind may be at several resolutions of a U-Net.
GRAPHS_PER_SHAPE = 4
# The same where one graph serves all sizes and lengths: besides, several images are another graph than one, and padded
# texts, which have a mask, another one than texts of one length.
GRAPHS_OF_ANY_SIZE = 8
# Sizes by which kernels are chosen where one graph serves all: images at once, a side of a latent image, tokens.
USUAL_SIZES: Mapping[str, int] = {"images": 2, "side": 64, "tokens": 1024}
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

    Which sizes have code is fixed before the first step, because compiled code rounds differently: if it depended
    on the order in which sizes come up, an interrupted run would end with other weights. Without `any_size` each of
    the latent `shapes` (height, width, images) has code of its own, and other passes run uncompiled. With it one code
    serves all sizes and lengths of texts.

    `layouts`: how many kinds of passes there may be that need code of their own at equal sizes.

    `kept`: blocks that the checkpointing level `light` or `selective` recomputes keep their results where the
    compiler makes them: the compiled code saves what `kernel_is_kept` names and recomputes the rest.
    Passes without gradients, such as the base's own prediction, run uncompiled, so that they need no code.
    """

    def __init__(
        self,
        network: nn.Module,
        *,
        shapes: Collection[tuple[int, int, int]],
        any_size: bool = False,
        layouts: int = 1,
        kept: Checkpointing = "full",
        mode: CompileMode = "default",
        backend: str | Callable[[Any, Any], Any] = "inductor",
    ) -> None:
        # Two warnings that torch's tracer causes itself, by reading every attribute of an object.
        for message in (r"The \.grad attribute", r".*torch\.autograd\.function\.Function"):
            warnings.filterwarnings("ignore", message=message)
        self.shapes, self.any_size, self.is_off = shapes, any_size, False
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

        self.most_graphs = len(kinds) * (
            GRAPHS_OF_ANY_SIZE * layouts if any_size else GRAPHS_PER_SHAPE * max(1, len(shapes))
        )
        """At most so many graphs are compiled in a run."""
        dynamo.recompile_limit = max(dynamo.recompile_limit, self.most_graphs)
        dynamo.accumulated_recompile_limit = max(
            dynamo.accumulated_recompile_limit, self.most_graphs
        )
        if any_size:
            _allow_open_sizes()
        # In deterministic runs inductor must not choose kernels by timing them: another may give other bits.
        if torch.are_deterministic_algorithms_enabled():
            import torch._inductor.config as inductor

            inductor.deterministic = True
        if backend == "inductor":
            start_workers()
        options: dict[str, Any] = {"backend": backend}
        if backend == "inductor":
            options["mode"] = INDUCTOR_MODES[mode]
            if any_size:
                from torch._inductor import list_mode_options
                from torch._inductor.compile_fx import compile_fx

                of_mode = list_mode_options(INDUCTOR_MODES[mode])
                options = {"backend": _by_usual_sizes(partial(compile_fx, config_patches=of_mode))}
        # `fullgraph` makes torch raise where it would otherwise split a block into several graphs, which
        # take longer to compile and gain little.
        compiled = (
            torch.compile(
                keeping(block, kept) if kept in KEEP_ATTENTION else block.forward,
                dynamic=False,
                fullgraph=True,
                **options,
            )
            for block in self._blocks
        )
        self._compiled: list[Callable[..., Any]] = [
            _with_open_sizes(each) if any_size else each for each in compiled
        ]
        self._kept = kept

    def takes(self, height: int, width: int, count: int, *, has_references: bool) -> bool:
        """Say whether a pass of so many latents of this size runs compiled; references add tokens to it."""
        return self.any_size or ((height, width, count) in self.shapes and not has_references)

    @contextmanager
    def used(self, stop: Callable[[], int | None] = lambda: None) -> Iterator[None]:
        """Run the blocks compiled inside the context, backward pass included; compilers raise anything.

        Before each graph is compiled `stop` is asked for the signal of a stop: raises StoppedBySignal, as compiling
        the rest may take minutes.
        """
        if (
            self._has_graphs
        ):  # what the pass before has left in the graphs' memory may be written over
            torch.compiler.cudagraph_mark_step_begin()

        from torch._dynamo.callback import callback_handler  # takes a second to import

        asked: list[int] = []

        def may_go_on(_: Any) -> None:
            if (number := stop()) is not None:
                asked.append(number)
                raise InterruptedError

        callback_handler.register_start_callback(may_go_on)
        # An attribute of the instance hides the class's method until it is deleted below.
        for block, compiled in zip(self._blocks, self._compiled, strict=True):
            block.forward = _TrainingForward(block.forward, compiled, kept=self._kept)
        try:
            yield
        except Exception:
            if asked:  # torch makes an error of its own of what ends its work
                found = "stopped while blocks were compiled; the steps before are saved"
                raise StoppedBySignal(asked[0], found=found, fix=RESUME) from None
            raise
        finally:
            callback_handler.remove_start_callback(may_go_on)
            for block in self._blocks:
                del block.forward


class _TrainingForward:
    """The forward function of a block in training: compiled where gradients are computed."""

    def __init__(
        self, plain: Callable[..., Any], compiled: Callable[..., Any], *, kept: Checkpointing
    ) -> None:
        self._plain, self._compiled, self.kept = plain, compiled, kept

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = self._compiled if torch.is_grad_enabled() else self._plain
        return forward(*args, **kwargs)


def _allow_open_sizes() -> None:
    """Let torch find by itself which of the sizes that are marked have to be fixed, and keep equal ones apart."""
    import torch._dynamo.config as dynamo
    import torch.fx.experimental._config as symbolic

    dynamo.allow_ignore_mark_dynamic = True
    # Else code that was made when a text was as long as the image would serve only such texts.
    symbolic.use_duck_shape = False


def _with_open_sizes(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Mark all sizes of a block's inputs but those of channels as open, so that one code serves all.

    Latents as an image are [B, C, H, W], tokens [B, L, C], rotations [L, C] or [B, L, C]; masks [B, ..., L] have no
    channels. torch makes code of its own where a size is 1.
    """

    def forward(*args: Any, **kwargs: Any) -> Any:
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                is_mask = not (tensor.is_floating_point() or tensor.is_complex())
                channels = None if is_mask else 1 if tensor.dim() == 4 else tensor.dim() - 1
                for dim, size in enumerate(tensor.shape):
                    if dim != channels and size > 1:
                        torch._dynamo.mark_dynamic(tensor, dim)
        return compiled(*args, **kwargs)

    return forward


def _by_usual_sizes(compile_graph: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Have a compiler choose its kernels by usual sizes, where it would take those it meets first.

    A resumed run meets other sizes first than its start did, and other kernels round differently.
    """

    def backend(graph: Any, inputs: Any) -> Any:
        for node in graph.graph.find_nodes(op="placeholder"):
            tensor = node.meta["example_value"]  # without values, its sizes may be symbols
            for dim, size in enumerate(tensor.shape if isinstance(tensor, Tensor) else ()):
                if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                    kind = "images" if dim == 0 < tensor.dim() - 2 else "side"
                    usual = USUAL_SIZES["tokens" if kind == "side" and tensor.dim() < 4 else kind]
                    size.node.shape_env.var_to_hint_override.setdefault(size.node.expr, usual)
        return compile_graph(graph, inputs)

    return backend


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
