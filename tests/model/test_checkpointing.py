"""Gradient checkpointing of every family: the same bits, less memory, and right after errors."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import Any
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lora_trainer import families
from lora_trainer.config.declare import CHECKPOINTING, KEEP_ATTENTION
from lora_trainer.costs.trace import LiveStorages
from lora_trainer.network import gradient_checkpointing, kept_results
from lora_trainer.network.block_swap import repeated_blocks
from lora_trainer.network.gradient_checkpointing import apply_checkpointing
from lora_trainer.network.kept_results import KeepingBlock
from tests.fakes.trainee import PROMPTS, in_16_bits, same, trainee

FAMILIES = pytest.mark.parametrize("name", families.NAMES)


@FAMILIES
def test_loss_and_gradients_are_the_same_bits_whatever_is_recomputed(name: str) -> None:
    at = trainee(name)
    whole, split = at.gradients(), at.gradients(micro_batch=1)
    assert all(gradient.any() for gradient in whole)
    for kind in CHECKPOINTING[1:]:
        apply_checkpointing(at.denoiser, kind)
        assert same(at.gradients(), whole), kind
    assert same(at.gradients(micro_batch=1), split)


@pytest.mark.parametrize("name", ["sd15", "chroma", "qwen21"])  # an image, two streams, one
def test_in_16_bits_a_recomputed_block_casts_its_adapter_in_one_kernel_to_the_same_bits(
    name: str,
) -> None:
    at = in_16_bits(trainee(name))
    whole = at.gradients()
    weights = {parameter.data_ptr() for parameter in at.parameters}
    for kind in ("light", "full"):
        apply_checkpointing(at.denoiser, kind)
        with _Casts(weights) as casts:
            found = at.gradients()
        assert same(found, whole), kind
        assert all(gradient.dtype is torch.float32 for gradient in found[1:])
        in_blocks = {
            parameter.data_ptr()
            for block in repeated_blocks(at.denoiser).values()
            for parameter in block.parameters()
        }
        assert in_blocks & weights and not casts.single & in_blocks, kind
        assert casts.are_of_whole_blocks(at.denoiser), kind
        # Nothing of a call is left behind: samples between two steps have their own casts, compiled code its layers.
        assert not any("copies" in vars(module) for module in at.denoiser.modules())


class _Casts(TorchDispatchMode):
    """Notes which weights are cast alone, and how often all of a block are."""

    def __init__(self, weights: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no annotation
        self._weights = weights
        self.single: set[int] = set()
        self._together: list[set[int]] = []

    def __torch_dispatch__(
        self, kernel: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if kernel is ATEN._to_copy.default:
            self.single |= {args[0].data_ptr()} & self._weights
        if kernel is ATEN._foreach_copy_.default:
            self._together.append({source.data_ptr() for source in args[1]})
        return kernel(*args, **(kwargs or {}))

    def are_of_whole_blocks(self, denoiser: nn.Module) -> bool:
        """Say whether the weights of each block were cast in its forward passes and as often in recomputations.

        Some families call their blocks once for each sample.
        """
        counts = [
            self._together.count(
                {parameter.data_ptr() for parameter in block.parameters()} & self._weights
            )
            for block in repeated_blocks(denoiser).values()
        ]
        return set(counts) <= {2, 2 * len(PROMPTS)}


def test_random_draws_inside_a_network_are_repeated() -> None:
    def with_dropout(denoiser: nn.Module) -> None:
        for module in denoiser.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.3

    at = trainee("sd15", prepare=with_dropout)
    at.denoiser.train()
    found = []
    for kind in CHECKPOINTING:
        apply_checkpointing(at.denoiser, kind)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            found.append(at.gradients())
    assert all(same(other, found[0]) for other in found)


def test_the_device_keeps_the_inputs_of_two_blocks_and_the_host_all() -> None:
    host, sums = gradient_checkpointing.HostInputs(), []
    leaf = torch.randn(64, requires_grad=True)
    with LiveStorages() as live:
        for _ in range(4):
            x = leaf * 2
            with host.holding((x,)):
                sums.append(x.square().sum())
            del x
        assert live.now_bytes == (4 + 2) * leaf.nbytes + sum(each.nbytes for each in sums)


@pytest.mark.parametrize(
    ("x", "strides"),
    [
        (torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), (60, 1, 15, 3)),
        (torch.randn(4, 8)[:, :2], (2, 1)),
    ],
    ids=["whole", "a part of a larger storage"],
)
def test_an_input_comes_back_in_its_layout_without_the_rest_of_its_storage(
    x: Tensor, strides: tuple[int, ...]
) -> None:
    host, x = gradient_checkpointing.HostInputs(), x.requires_grad_()
    with host.holding((x,)):
        y = x.square()
    for _ in range(2):  # later blocks take its place on the device
        with host.holding(()):
            pass
    saved = y.grad_fn._saved_self  # type: ignore[union-attr]  # of a product
    assert torch.equal(saved, x) and saved.stride() == strides
    assert saved.untyped_storage().nbytes() == x.nbytes


# ---- what recomputed blocks keep: results that took much arithmetic, handed out once and in their order


ATEN = torch.ops.aten


@pytest.mark.parametrize(
    ("kind", "kept"),
    [("light", {"narrow", "wide", "square", "attention"}), ("selective", {"wide", "attention"})],
)
def test_what_each_kind_keeps(kind: Any, kept: set[str]) -> None:
    worth = partial(kept_results.kernel_is_kept, kind, 4)
    x = torch.zeros(2, 64)
    weights = {"narrow": (64, 256), "square": (64, 64), "wide": (64, 16), "low rank": (64, 4)}
    found = {
        name for name, shape in weights.items() if worth(ATEN.mm.default, (x, torch.zeros(shape)))
    }
    attention = ATEN._scaled_dot_product_flash_attention_for_cpu.default
    found |= {"attention"} if worth(attention, (x, x, x)) else set()
    assert found == kept
    assert not worth(ATEN.mm.default, (x, torch.zeros(64, 16, requires_grad=True)))
    assert not worth(ATEN.mul.Tensor, (x, x))
    convolution = (x, torch.zeros(8, 64, 3, 3))
    assert worth(ATEN.convolution.default, convolution)


class Block(nn.Module):
    """Two products, the second of more inputs than outputs, and an attention."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 32).requires_grad_(False)
        self.down = nn.Linear(32, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.down(self.up(x).sin()).view(1, 1, 3, 8)
        attended: Tensor = F.scaled_dot_product_attention(h, h, h)
        return attended.cos()


def test_what_is_kept_does_not_run_again() -> None:
    torch.manual_seed(0)
    block = Block()
    work: dict[str, tuple[int, int]] = {}
    for kind in ("light", "selective", "full"):
        x = torch.randn(3, 8, requires_grad=True)
        keeping: Any = {}
        if kind != "full":
            keeping["context_fn"] = KeepingBlock(block, kind, 2).contexts
        y = checkpoint(block, x, use_reentrant=False, **keeping)
        with LiveStorages() as live:
            y.sum().backward()
        work[kind] = (live.kernels - work.get("light", (0, 0))[0], live.flops)
    product, attention = 2 * 3 * 8 * 32, 2 * (2 * 3 * 3 * 8)
    assert work["selective"] == (1, work["light"][1] + product), "a product of `light` runs again"
    again = work["light"][1] + 2 * product + attention
    assert work["full"] == (3, again), "two products, and the attention"


@pytest.mark.parametrize("kind", KEEP_ATTENTION)
@FAMILIES
def test_layers_keep_every_result_that_is_worth_it(
    name: str, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, kept, worth, kernels = trainee(name), [0], [0], [0]
    rank = kept_results.largest_rank(at.denoiser)

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(
            self, kernel: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kernels[0] += 1
            worth[0] += kept_results.kernel_is_kept(kind, rank, kernel, args)
            return kernel(*args, **(kwargs or {}))

    contexts, result = KeepingBlock.contexts, kept_results._Call.result

    def watched(block: KeepingBlock) -> Any:
        first, again = contexts(block)
        both = ExitStack()
        both.enter_context(Watch())  # type: ignore[no-untyped-call]  # torch has no annotation
        both.enter_context(first)
        return both, again

    def counted(call: Any, of: Any, compute: Any) -> Any:
        kept[0] += call._saves
        return result(call, of, compute)

    monkeypatch.setattr(KeepingBlock, "contexts", watched)

    def looked(mode: Any, *kernel: Any) -> Any:
        looks[0] += 1
        return look(mode, *kernel)

    looks, look = [0], kept_results._KernelMode.__torch_dispatch__
    monkeypatch.setattr(kept_results._Call, "result", counted)
    monkeypatch.setattr(kept_results._KernelMode, "__torch_dispatch__", looked)
    apply_checkpointing(at.denoiser, kind)
    at.loss()
    assert kept == worth and kept[0] > 0
    assert looks[0] < kernels[0] / 8, "Python for each kernel takes as long as recomputing them"


def test_layers_are_what_they_were_after_an_error() -> None:
    torch.manual_seed(0)
    block, function = Block(), F.scaled_dot_product_attention
    block.up.forward = partial(nn.Linear.forward, block.up)  # type: ignore[method-assign]  # as hooks of diffusers do
    own = block.up.forward
    with pytest.raises(RuntimeError, match="shape"), KeepingBlock(block, "light", 2).contexts()[0]:
        assert F.scaled_dot_product_attention is not function
        block(torch.randn(3, 8))
        block(torch.randn(3, 7))
    assert F.scaled_dot_product_attention is function
    assert block.up.forward is own and "forward" not in vars(block.down)


def test_attention_in_another_thread_is_not_kept() -> None:
    q = torch.randn(1, 1, 3, 8)
    call, _ = KeepingBlock(Block(), "light", 2).contexts()
    with call, ThreadPoolExecutor(1) as other:
        other.submit(F.scaled_dot_product_attention, q, q, q).result()
        assert not call._results
        F.scaled_dot_product_attention(q, q, q)
        assert len(call._results) == 1


def test_results_and_layers_are_gone_without_a_search_for_garbage() -> None:
    block, x = Block(), torch.randn(3, 8, requires_grad=True)
    call, _ = KeepingBlock(block, "light", 2).contexts()
    with call:
        block(x)
    layer, result = ref(block.up), ref(call._results[0][1])
    assert result() is not None
    gc.disable()
    try:
        del block, call, _
        assert (layer(), result()) == (None, None)
    finally:
        gc.enable()


def test_a_block_that_does_something_else_the_second_time_is_found_out() -> None:
    torch.manual_seed(0)
    block, passes = Block(), iter(range(2))

    def forward(x: Tensor) -> Any:
        return block.up(x).cos() if next(passes) == 0 else block.down(x.repeat(1, 4)).cos()

    x = torch.randn(3, 8, requires_grad=True)
    y = checkpoint(
        forward, x, use_reentrant=False, context_fn=KeepingBlock(block, "light", 0).contexts
    )
    with pytest.raises(RuntimeError, match=r"calls Linear\(8, 32\) where .*Linear\(32, 8\)"):
        y.sum().backward()
