"""Compiled blocks: the same gradients but for rounding, off when they are off, and found again."""

from __future__ import annotations

import json
import signal
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd

from lora_trainer.common.errors import StoppedBySignal
from lora_trainer.config.declare import CompileMode
from lora_trainer.families.base.facts import IMAGE_PLACES, Conditioning
from lora_trainer.families.base.references import with_references
from lora_trainer.network.block_swap import stream_blocks
from lora_trainer.network.compiling import USUAL_SIZES, CompiledBlocks, _by_usual_sizes
from lora_trainer.network.gradient_checkpointing import apply_checkpointing
from lora_trainer.network.quantize import quantize
from tests.fakes.family_bases import CPU, conditioning_of
from tests.fakes.runs import code_of_fork
from tests.fakes.trainee import compiled_calls, trainee


def test_gradients_of_traced_blocks_are_the_same() -> None:
    """Traced and differentiated as for the compiler, whose code is not made here: that takes minutes.

    With an int8 base and streamed blocks; OFT: test_plain_way.py. The inputs of the first block have gradients, else
    it would have a graph more, which the test of references has.
    """
    at = trainee("flux", prepare=partial(quantize, kind="int8", device=CPU))
    told = {name: tensor.clone() for name, tensor in at.conditioning.items()}
    at = replace(at, conditioning=told)
    for tensor in (at.noisy, *told.values()):
        tensor.requires_grad_(tensor.is_floating_point())
    apply_checkpointing(at.denoiser, "offloaded")
    stream_blocks(at.denoiser, count=2, device=CPU)
    plain = at.gradients()
    compiled = CompiledBlocks(at.denoiser, shapes=(), backend="aot_eager")
    calls = compiled_calls(compiled)
    with compiled.used():
        traced = at.gradients()
    before = len(calls)
    assert before, "nothing ran compiled"
    for one, other, again in zip(plain, traced, at.gradients(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)
        assert torch.equal(again, one), "off is off"
    assert len(calls) == before


def counting(graphs: list[tuple[int, int]]) -> Callable[[Any, Any], Any]:
    """Return a compiler that makes no code: `graphs` gets the products and attentions of each graph, in turn.

    The graph of a forward pass, and when gradients are first computed that of its backward pass.
    """

    def compiler(graph: Any, _: Any) -> Any:
        called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        graphs.append(
            (sum("mm" in one for one in called), sum("attention" in one for one in called))
        )
        return make_boxed_func(graph.forward)

    backend: Callable[[Any, Any], Any] = aot_autograd(
        fw_compiler=compiler,
        bw_compiler=compiler,
        partition_fn=min_cut_rematerialization_partition,
    )
    return backend


LATENTS = ((16, 16), (24, 12), (12, 24), (20, 12), (12, 20), (8, 32))
CAPTIONS = ("x", "one toy", "two words more", "a red toy on a table by the window of the house")


def test_one_code_serves_all_sizes_and_texts_and_keeps_what_the_level_keeps() -> None:
    """Six sizes of images, captions of several lengths: a graph of each of two kinds of blocks.

    The level `selective` and masks of the adapter are in the code. The base's own prediction has none of its own.
    A first block whose input has no gradient, which makes a graph more: the test below.
    """
    torch.compiler.reset()
    at = trainee("chroma", dropout=0.2, rank_dropout=0.2)
    apply_checkpointing(at.denoiser, "selective")
    graphs: list[tuple[int, int]] = []
    blocks = CompiledBlocks(
        at.denoiser, shapes=(), any_size=True, kept="selective", backend=counting(graphs)
    )
    masks, generator = at.adapter.masks, torch.Generator().manual_seed(3)
    assert masks is not None

    def gradients(noisy: Tensor, told: Conditioning) -> list[Tensor]:
        seeds = torch.arange(2 * len(noisy)).view(-1, 2)
        timesteps = torch.full((len(noisy),), 400.0)
        with torch.no_grad():
            at.family.predict(at.denoiser, noisy, timesteps, told)
        with masks.of(seeds, timesteps):
            at.family.predict(at.denoiser, noisy, timesteps, told).square().mean().backward()
        found = [weight.grad for weight in at.parameters if weight.grad is not None]
        for weight in at.parameters:
            weight.grad = None
        return found

    for number, (height, width) in enumerate(LATENTS):
        noisy = torch.randn(1, at.noisy.shape[1], height, width, generator=generator)
        told = conditioning_of(at.family, at.facts, (CAPTIONS[number % len(CAPTIONS)],))
        for tensor in (noisy, *told.values()):
            tensor.requires_grad_(tensor.is_floating_point())
        plain = gradients(noisy, told)
        assert blocks.takes(height, width, 1, has_references=True)
        with blocks.used():
            compiled = gradients(noisy, told)
        for one, other in zip(plain, compiled, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)
    assert len(graphs) / 2 == 2 <= blocks.most_graphs
    forward, backward = graphs[0], graphs[1]
    assert forward[1] == 1 and backward[1] == 1, "attention runs once and is differentiated once"
    assert backward[0] < 3 * forward[0], "its kept products are not done again"


def test_one_code_serves_all_texts_with_as_many_references_within_them() -> None:
    """Of two kinds of blocks, the first of which has an input without a gradient."""
    torch.compiler.reset()
    at, graphs = trainee("qwen21"), list[Any]()

    def compiler(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    blocks = CompiledBlocks(
        at.denoiser, shapes=(), any_size=True, layouts=at.facts.layouts, backend=compiler
    )
    generator = torch.Generator().manual_seed(3)

    def latents(height: int, width: int) -> Tensor:
        return torch.randn(at.facts.latent_channels, height, width, generator=generator)

    for count in (0, 2):
        for (height, width), caption in zip(LATENTS, CAPTIONS, strict=False):
            references = [latents(width, height + 2 * place) for place in range(count)]
            told = {
                **conditioning_of(at.family, at.facts, (caption,)),
                **({IMAGE_PLACES: torch.tensor([[5, 9][:count]])} if count else {}),
                **with_references(references),
            }
            noisy, found = latents(height, width)[None], []
            for context in (nullcontext(), blocks.used()):
                with context:
                    predicted = at.family.predict(at.denoiser, noisy, torch.full((1,), 400.0), told)
                    predicted.square().mean().backward()
                found.append([weight.grad for weight in at.parameters])
                for weight in at.parameters:
                    weight.grad = None
            for one, other in zip(*found, strict=True):
                torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-6)
        assert len(graphs) == 2 + count
    assert len(graphs) <= blocks.most_graphs


def test_a_stop_at_any_moment_ends_compiling_before_the_next_graph() -> None:
    """Ten blocks, a forward and a backward graph each: every try makes one graph more and is stopped before the next.

    What the tries before it made stays in use, so it is asked about no graph but these two.
    """

    class Blocks(nn.Module):
        _repeated_blocks = ("Block",)

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(size) for size in range(2, 12))

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([block(x[:, : len(block.weight)]).sum() for block in self.blocks])

    torch.compiler.reset()
    network, graphs = Blocks(), list[tuple[int, int]]()
    blocks = CompiledBlocks(network, shapes=(), backend=counting(graphs))

    def computed(before_a_stop: int) -> tuple[int, int | None]:
        """Compute gradients, with a stop once so many graphs are made; return how often it was asked, and the code."""
        asked, code = [], None

        def stop() -> int | None:
            asked.append(1)
            return int(signal.SIGTERM) if len(asked) > before_a_stop else None

        try:
            with blocks.used(stop):
                network(torch.ones(2, 16, requires_grad=True)).sum().backward()
        except StoppedBySignal as stopped:
            code = stopped.exit_code
        assert all("forward" not in vars(block) for block in network.blocks), "off again"
        return len(asked), code

    terminated = 128 + signal.SIGTERM
    assert computed(before_a_stop=0) == (1, terminated) and not graphs
    for _ in range(19):
        made = len(graphs)
        assert computed(before_a_stop=1) == (2, terminated), "what has been made stays in use"
        assert len(graphs) <= made + 1, "nothing is compiled after it"
    assert computed(before_a_stop=1) == (1, None) and len(graphs) == 20


class Network(nn.Module):
    """Two blocks of the smallest kind that a compiler has something to do with."""

    _repeated_blocks = ("Block",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Block(nn.Module):
    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1.0, 1.0, size**2).reshape(size, size))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sin(x @ self.weight) * torch.tanh(x)


def test_kernels_are_chosen_by_usual_sizes_whichever_come_first() -> None:
    def chosen_by(rows: int) -> list[int]:
        """Return the sizes that the compiler is told where images of so many rows come first."""
        torch.compiler.reset()
        found: list[int] = []

        def compiler(graph: Any, inputs: Any) -> Any:
            for size in (each.node for each in inputs if isinstance(each, torch.SymInt)):
                found.append(size.shape_env.var_to_hint_override[size.expr])
            return graph

        network, backend = Network(), _by_usual_sizes(compiler)
        with CompiledBlocks(network, shapes=(), any_size=True, backend=backend).used():
            network(torch.ones(3, rows, 4, requires_grad=True)).sum().backward()
        return found

    few, many = chosen_by(5), chosen_by(700)
    assert few == many and {*few} == {USUAL_SIZES["images"], USUAL_SIZES["tokens"]}


def gradients(mode: CompileMode | None) -> Tensor:
    """Return the gradients of the network above, compiled in a mode, or plain."""
    network = Network()
    x = torch.linspace(-2.0, 2.0, 12).reshape(3, 4).requires_grad_()
    blocks = CompiledBlocks(network, shapes=(), mode=mode) if mode else None
    with blocks.used() if blocks else nullcontext():
        network(x).square().sum().backward()
    return torch.stack([each.grad for each in network.parameters() if each.grad is not None])


def compile_as_two_runs(told: Path) -> int:
    """Compile twice, as a second run finds what the first one kept, then in the other modes; write what came of it."""
    import torch._inductor.config as inductor
    from torch._dynamo.utils import counters

    torch.set_num_threads(1)
    warnings.simplefilter(
        "ignore", DeprecationWarning
    )  # as outside pytest; torch causes them itself
    inductor.compile_threads = 1
    inductor.cpp_cache_precompile_headers = (
        False  # pays for hundreds of kernels; here there are a few
    )
    torch.compiler.reset()
    counters.clear()
    plain, found = gradients(None), gradients("default")
    compiled = counters["inductor"]["fxgraph_cache_miss"]
    torch.compiler.reset()
    counters.clear()
    same = torch.equal(gradients("default"), found)
    traced, again = counters["stats"]["unique_graphs"], counters["inductor"]["fxgraph_cache_miss"]
    modes = [gradients("reduce-overhead"), gradients("max-autotune")]
    close = all(torch.allclose(each, plain, rtol=1e-4, atol=1e-5) for each in (found, *modes))
    told.write_text(json.dumps([close, same, compiled, traced, again]))
    return 0


@pytest.mark.timeout(300)  # a C++ compiler on a loaded machine
def test_the_compiler_s_own_code_computes_the_same_and_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, told = tmp_path / "kept", tmp_path / "told.json"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(kept))
    # Its own process, as the compiler keeps much; a fork, as a new one would import for six seconds.
    assert code_of_fork(partial(compile_as_two_runs, told)) == 0
    close, same, compiled, traced, again = json.loads(told.read_bytes())
    assert close and same and compiled > 0
    assert traced > 0 and again == 0, "a second run traces its blocks and compiles nothing"
    assert any(kept.iterdir())
