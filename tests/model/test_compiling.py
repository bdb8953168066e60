"""Compiled blocks: the same gradients but for rounding, off when they are off, and found again."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from lora_trainer.network.block_swap import stream_blocks
from lora_trainer.network.compiling import CompiledBlocks
from lora_trainer.network.gradient_checkpointing import apply_checkpointing
from lora_trainer.network.quantize import quantize
from tests.fakes.family_bases import CPU
from tests.fakes.runs import python
from tests.fakes.trainee import compiled_calls, trainee


def test_gradients_of_traced_blocks_are_the_same() -> None:
    """Traced and differentiated as for the compiler, whose code is not made here: that takes minutes.

    With an int8 base and streamed blocks; OFT: test_plain_way.py.
    """
    at = trainee("flux", prepare=partial(quantize, kind="int8", device=CPU))
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
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1.0, 1.0, 16).reshape(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.sin(x @ self.weight) * torch.tanh(x)


SCRIPT = """
import torch
from torch._dynamo.utils import counters
from lora_trainer.network.compiling import CompiledBlocks
from tests.model.test_compiling import Network

def gradients(compiled, mode="default"):
    network = Network()
    x = torch.linspace(-2.0, 2.0, 12).reshape(3, 4).requires_grad_()
    if compiled:
        with CompiledBlocks(network, shapes=(), mode=mode).used():
            network(x).square().sum().backward()
    else:
        network(x).square().sum().backward()
    return torch.stack([p.grad for p in network.parameters()])

torch.set_num_threads(1)
plain, found = gradients(False), gradients(True)
compiled = counters["inductor"]["fxgraph_cache_miss"]
torch.compiler.reset()  # as a second run begins
counters.clear()
same = torch.equal(gradients(True), found)
traced, again = counters["stats"]["unique_graphs"], counters["inductor"]["fxgraph_cache_miss"]
modes = [gradients(True, mode) for mode in ("reduce-overhead", "max-autotune")]
close = all(torch.allclose(each, plain, rtol=1e-4, atol=1e-5) for each in (found, *modes))
print(close, same, compiled, traced, again)
"""


@pytest.mark.timeout(300)  # a C++ compiler on a loaded machine
def test_the_compiler_s_own_code_computes_the_same_and_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")
    close, same, *counts = python(SCRIPT, timeout_s=250).stdout.split()[-5:]
    compiled, traced, again = map(int, counts)
    assert close == same == "True" and compiled > 0
    assert traced > 0 and again == 0, "a second run traces its blocks and compiles nothing"
    assert any(tmp_path.iterdir())
