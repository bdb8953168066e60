"""LoRA as one operation with its layer, against peft's own layers: same numbers, fewer bytes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from lora_trainer.network.live_storages import storage_key
from lora_trainer.network.quantize import QuantizedLinear
from tests.fakes.small_network import adapted, awaken

EXACT = {"rtol": 1e-12, "atol": 1e-12}
CPU = torch.device("cpu")
Pair = tuple[nn.Module, nn.Module]


class Holder(nn.Module):
    """One layer, which peft replaces by name."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        return found


def pair(layer: nn.Module, *, rank: int, alpha: float = 3.0, wide: torch.dtype) -> Pair:
    """Return peft's own adapted layer and ours, with the same random weights in `wide`."""
    theirs, ours = (Holder(copy.deepcopy(layer).requires_grad_(False)) for _ in range(2))
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=["layer"], init_lora_weights=False)
    inject_adapter_in_model(config, theirs)
    awaken(adapted(ours, "layer", alpha=alpha, rank=rank), size=0.3)
    for holder in (theirs, ours):
        for parameter in holder.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(wide)
    assert theirs.state_dict().keys() == ours.state_dict().keys()
    theirs.load_state_dict(ours.state_dict())
    return theirs.layer, ours.layer


def learned(layer: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in layer.named_parameters() if ".base_layer" not in f".{name}"}


def step(layer: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return the output and the gradients of x, A and B for a fixed gradient of the output."""
    x = x.detach().requires_grad_()
    y = layer(x)
    generator = torch.Generator().manual_seed(3)
    y.backward(torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype))
    gradients = {name: parameter.grad for name, parameter in learned(layer).items()}
    return y.detach(), {"x": x.grad, **gradients}


def assert_same(pair: Pair, x: Tensor, **tolerance: float) -> None:
    (y, gradients), (other_y, other_gradients) = (step(layer, x) for layer in pair)
    torch.testing.assert_close(other_y, y, **tolerance)
    assert gradients.keys() == other_gradients.keys() and len(gradients) == 3
    for name, gradient in gradients.items():
        torch.testing.assert_close(other_gradients[name], gradient, **tolerance)


def seen(forward: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return what `forward` returns and what autograd keeps of it."""
    kept: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        return forward(), kept


# ---- the same numbers


@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    inputs=st.integers(1, 9),
    out=st.integers(1, 9),
    rank=st.integers(1, 5),
    alpha=st.floats(0.1, 9.0),
    bias=st.booleans(),
    strided=st.booleans(),
)
def test_a_linear_layer_gives_what_peft_s_does(
    shape: list[int], inputs: int, out: int, rank: int, alpha: float, bias: bool, strided: bool
) -> None:
    layer = nn.Linear(inputs, out, bias=bias, dtype=torch.float64)
    layers = pair(layer, rank=rank, alpha=alpha, wide=torch.float64)
    x = torch.randn(*shape, inputs, dtype=torch.float64)
    if strided:
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    assert_same(layers, x, **EXACT)


@settings(max_examples=30, deadline=None)
@given(
    inputs=st.integers(1, 5),
    out=st.integers(1, 5),
    rank=st.integers(1, 4),
    kernel=st.sampled_from([1, 3]),
    stride=st.integers(1, 2),
    padding=st.sampled_from([0, 1, "same"]),
    bias=st.booleans(),
)
def test_a_convolution_gives_what_peft_s_does(
    inputs: int, out: int, rank: int, kernel: int, stride: int, padding: Any, bias: bool
) -> None:
    stride = 1 if padding == "same" else stride
    layer = nn.Conv2d(
        inputs, out, kernel, stride=stride, padding=padding, bias=bias, dtype=torch.float64
    )
    layers = pair(layer, rank=rank, wide=torch.float64)
    assert_same(layers, torch.randn(2, inputs, 6, 5, dtype=torch.float64), **EXACT)


@pytest.mark.parametrize("kind", ["linear", "convolution"])
def test_masters_and_gradients_are_float32_beside_16_bits(kind: str) -> None:
    """And as near to exact numbers as the rounding of 16 bits allows."""
    dtype = torch.bfloat16
    layer: nn.Module = nn.Linear(24, 40) if kind == "linear" else nn.Conv2d(6, 10, 3, padding=1)
    x = torch.randn(3, 50, 24) if kind == "linear" else torch.randn(3, 6, 8, 8)
    layer, x = layer.to(dtype), x.to(dtype)
    _, ours = pair(layer, rank=4, wide=torch.float32)
    exact = pair(copy.deepcopy(layer).double(), rank=4, wide=torch.float64)[1]
    exact.load_state_dict(ours.state_dict())
    _, kept = seen(lambda: ours(x.detach().requires_grad_()))
    assert all(tensor.dtype == dtype for tensor in kept if tensor.numel() >= x.numel())
    (y, gradients), (wanted_y, wanted) = step(ours, x), step(exact, x.double())
    assert y.dtype == dtype
    assert all(parameter.dtype == torch.float32 for parameter in learned(ours).values())
    for found, true in [(y, wanted_y), *zip(gradients.values(), wanted.values(), strict=True)]:
        assert found is not None and true is not None
        assert (found.double() - true).norm() < 2 * torch.finfo(dtype).eps * true.norm()
    assert {name: g.dtype for name, g in gradients.items() if g is not None} == {
        name: dtype if name == "x" else torch.float32 for name in gradients
    }


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_quantised_base_is_restored_and_never_kept(kind: Any) -> None:
    if kind == "nf4":
        pytest.importorskip("bitsandbytes")
    plain = nn.Linear(64, 128)
    layer = QuantizedLinear(plain, kind, device=CPU)
    layers = pair(layer, rank=4, wide=torch.float32)
    x = torch.randn(2, 7, 64)
    assert_same(layers, x, rtol=1e-4, atol=1e-4)
    y, kept = seen(lambda: layers[1](x.requires_grad_()))
    assert y.grad_fn is not None and "FrozenAndLowRank" in y.grad_fn.name()
    whole = 4 * 64 * 128
    assert max(tensor.nbytes for tensor in kept) < whole / 2


class Shared(nn.Module):
    """Query, key and value of one input, and a layer after them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(6, 6) for _ in range(3))
        self.out = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.out(self.q(x) + self.k(x) + self.v(x))
        return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_that_read_one_input_keep_it_once_and_as_it_is(dtype: torch.dtype) -> None:
    network = Shared().to(dtype)
    adapted(network.requires_grad_(False), "q", "k", "v", "out")
    source = torch.randn(3, 5, 6, dtype=dtype, requires_grad=True)
    x = source * 2
    _, kept = seen(lambda: network(x))
    owned = {storage_key(parameter) for parameter in network.parameters()}
    made = {
        storage_key(t): t.untyped_storage().nbytes() for t in kept if storage_key(t) not in owned
    }
    assert storage_key(x) in made
    assert sorted(made.values()) == [x.nbytes, x.nbytes], "the input of three, and that of the last"


# ---- parts that are frozen, off, hooked or of another kind


@pytest.mark.parametrize("frozen", ["lora_A", "lora_B"])
@pytest.mark.parametrize("kind", ["linear", "hooked", "convolution"])
def test_what_is_frozen_gets_no_gradient_and_the_rest_the_same(kind: str, frozen: str) -> None:
    layer: nn.Module = nn.Conv2d(4, 5, 3) if kind == "convolution" else nn.Linear(4, 5)
    layers = pair(layer.double(), rank=2, wide=torch.float64)
    for each in layers:
        if kind == "hooked":
            each.get_submodule("base_layer").register_forward_hook(lambda *_: None)
        for name, parameter in learned(each).items():
            parameter.requires_grad_(frozen not in name)
    x = torch.randn(2, 4, 6, 6) if kind == "convolution" else torch.randn(2, 3, 4)
    (y, gradients), (other_y, others) = (step(each, x.double()) for each in layers)
    torch.testing.assert_close(other_y, y, **EXACT)
    assert [gradient is None for gradient in others.values()].count(True) == 1
    for name, gradient in gradients.items():
        assert (others[name] is None) == (gradient is None)
        if gradient is not None:
            torch.testing.assert_close(others[name], gradient, **EXACT)


class Twice(nn.Linear):
    """A layer that is more than its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


CHANGES = ["a hook after it", "a hook before it", "another forward", "another class"]


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_more_than_a_product_with_the_weight_is_kept(change: str) -> None:
    plain = Twice(4, 5) if change == "another class" else nn.Linear(4, 5)
    layers = pair(plain.double(), rank=2, wide=torch.float64)
    for base in (each.get_submodule("base_layer") for each in layers):
        if change == "a hook after it":
            base.register_forward_hook(lambda _module, _inputs, output: output + 1)
        elif change == "a hook before it":
            base.register_forward_pre_hook(lambda _module, inputs: (inputs[0] * 2,))
        elif change == "another forward":  # as diffusers brings weights
            base.forward = lambda x, forward=base.forward: forward(x) + 1
    x = torch.randn(3, 4, dtype=torch.float64)
    assert_same(layers, x, **EXACT)
    y = layers[1](x)
    assert "FrozenAndLowRank" not in y.grad_fn.name()
