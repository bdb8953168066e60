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

from lora_trainer.lora import adapter_layers
from lora_trainer.network.gradient_checkpointing import storage_key
from lora_trainer.network.quantize import QuantizedLinear
from tests.fakes.small_network import MODULES, adapted, awaken, images, network

SMALL = "lora_trainer.lora.adapter_layers.SMALL_LAYER"
EXACT = {"rtol": 1e-12, "atol": 1e-12}
Pair = tuple[Any, Any]


def pair(
    net: nn.Module,
    *names: str,
    rank: int = 2,
    alpha: float = 3.0,
    wide: torch.dtype = torch.float64,
) -> Pair:
    """Return the network with peft's own adapted layers and with ours, with the same random weights in `wide`."""
    theirs, ours = (copy.deepcopy(net) for _ in range(2))
    chosen = list(names or MODULES)
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=chosen, init_lora_weights=False)
    inject_adapter_in_model(config, theirs)
    awaken(adapted(ours, *chosen, alpha=alpha, rank=rank))
    for each in (theirs, ours):
        for parameter in learned(each).values():
            parameter.data = parameter.data.to(wide)
    assert theirs.state_dict().keys() == ours.state_dict().keys()
    theirs.load_state_dict(ours.state_dict())
    return theirs, ours


def learned(net: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in net.named_parameters() if ".lora_" in f".{name}"}


def step(net: nn.Module, x: Tensor) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Return the output and the gradients of x, A and B for a fixed gradient of the output."""
    x = x.detach().requires_grad_()
    y = net(x)
    generator = torch.Generator().manual_seed(3)
    y.backward(torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y.dtype))
    gradients = {name: parameter.grad for name, parameter in learned(net).items()}
    return y.detach(), {"x": x.grad, **gradients}


def assert_same(pair: Pair, x: Tensor, **tolerance: float) -> None:
    (y, gradients), (other_y, other_gradients) = (step(net, x) for net in pair)
    torch.testing.assert_close(other_y, y, **tolerance)
    assert gradients.keys() == other_gradients.keys() and len(gradients) >= 3
    for name, gradient in gradients.items():
        assert (other_gradients[name] is None) == (gradient is None), name
        if gradient is not None:
            torch.testing.assert_close(other_gradients[name], gradient, **tolerance)


def seen(forward: Callable[[], Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Return what `forward` returns and what autograd keeps of it."""
    kept: list[Tensor] = []
    keep = lambda tensor: kept.append(tensor) or tensor  # noqa: E731 - shorter than a function
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        return forward(), kept


# ---- the same numbers


@settings(max_examples=60, deadline=None)
@given(
    inputs=st.integers(1, 9),
    out=st.integers(1, 9),
    rank=st.integers(1, 5),
    alpha=st.floats(0.1, 9.0),
    bias=st.booleans(),
    padding=st.sampled_from([0, 1, "same"]),
    small_layer=st.sampled_from([0, adapter_layers.SMALL_LAYER]),
)
def test_every_layer_gives_what_peft_s_does(
    inputs: int, out: int, rank: int, alpha: float, bias: bool, padding: Any, small_layer: int
) -> None:
    """The linear layer reads pixels, which are strided; convolutions with and without a stride."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SMALL, small_layer)
        compare(inputs, out, rank, alpha, bias, padding)


def compare(inputs: int, out: int, rank: int, alpha: float, bias: bool, padding: Any) -> None:
    net = network(torch.float64, inputs=inputs, out=out, bias=bias)
    net.point = nn.Conv2d(inputs, out, 3, padding=padding, bias=bias, dtype=torch.float64)
    layers = pair(net.requires_grad_(False), rank=rank, alpha=alpha)
    assert_same(layers, images(2, inputs).double(), **EXACT)
    tokens = images(2, inputs).double().flatten(2).mT
    for x in (tokens.contiguous(), tokens[0], tokens[0, 0]):
        assert_same((layers[0].linear, layers[1].linear), x, **EXACT)


def test_masters_and_gradients_are_float32_beside_16_bits() -> None:
    """And as near to exact numbers as the rounding of 16 bits allows."""
    dtype = torch.bfloat16
    net = network(dtype, inputs=24, out=40)
    x = images(3, 24).to(dtype)
    _, ours = pair(net, rank=4, wide=torch.float32)
    _, exact = pair(copy.deepcopy(net).double(), rank=4)
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
    net = network(inputs=64, out=128)
    net.linear = QuantizedLinear(net.linear, kind, device=torch.device("cpu"))
    theirs, ours = pair(net, "linear", rank=4, wide=torch.float32)
    x = images(2, 64).flatten(2).mT
    assert_same((theirs.linear, ours.linear), x, rtol=1e-4, atol=1e-4)
    y, kept = seen(lambda: ours.linear(x[:, :7].contiguous().requires_grad_()))
    assert y.grad_fn is not None and "FrozenAndLowRank" in y.grad_fn.name()
    assert max(tensor.nbytes for tensor in kept) < 4 * 64 * 128 / 2


class Shared(nn.Module):
    """Query, key and value of one input, and a layer after them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.out(self.q(x) + self.k(x) + self.v(x))
        return total


@pytest.mark.parametrize(
    ("dtype", "small_layer", "middles"),
    [(torch.float32, 0, 0), (torch.bfloat16, 0, 0), (torch.float32, 36, 4)],
)
def test_layers_that_read_one_input_keep_it_once_and_as_it_is(
    dtype: torch.dtype, small_layer: int, middles: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small layers keep x A^T too, which is as long as the rank is."""
    monkeypatch.setattr(SMALL, small_layer)
    net = Shared().requires_grad_(False).to(dtype)
    awaken(adapted(net, "q", "k", "v", "out"))
    x = torch.randn(3, 5, 6, dtype=dtype, requires_grad=True) * 2
    _, kept = seen(lambda: net(x))
    owned = {storage_key(parameter) for parameter in net.parameters()}
    made = {
        storage_key(t): t.untyped_storage().nbytes() for t in kept if storage_key(t) not in owned
    }
    assert storage_key(x) in made
    middle_bytes = x.nbytes // 6 * net.q.r["default"]
    inputs = [x.nbytes, x.nbytes]  # the input of three, and that of the last
    assert sorted(made.values()) == [middle_bytes] * middles + inputs


def test_a_layer_s_weights_and_dtype_alone_say_whether_it_is_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows must not: how many there are depends on how a device's memory splits a batch."""
    composed: list[int] = []
    plain = adapter_layers.composed

    def watched(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        composed.append(x.shape[0])
        return plain(x, *args, **kwargs)

    monkeypatch.setattr(adapter_layers, "composed", watched)
    for out, dtype in ((1000, torch.float32), (1001, torch.float32), (1000, torch.bfloat16)):
        net = nn.Sequential(nn.Linear(100, out, dtype=dtype)).requires_grad_(False)
        awaken(adapted(net, "0"))
        for rows in (1, 300):
            net(torch.randn(rows, 100, dtype=dtype))
    assert composed == [1, 300]


# ---- parts that are frozen, off, hooked or of another kind


@pytest.mark.parametrize("frozen", ["lora_A", "lora_B"])
@pytest.mark.parametrize(("hooked", "small_layer"), [(False, 0), (True, 0), (False, 100)])
def test_what_is_frozen_gets_no_gradient_and_the_rest_the_same(
    hooked: bool, small_layer: int, frozen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SMALL, small_layer)
    layers = pair(network(torch.float64))
    for each in layers:
        if hooked:
            each.linear.base_layer.register_forward_hook(lambda *_: None)
        for name, parameter in learned(each).items():
            parameter.requires_grad_(frozen not in name)
    assert_same(layers, images().double(), **EXACT)
    gradients = [parameter.grad for parameter in learned(layers[1]).values()]
    assert [gradient is None for gradient in gradients].count(True) == len(MODULES)


class Twice(nn.Linear):
    """A layer that is more than its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    "change", ["a hook after it", "a hook before it", "another forward", "of another class"]
)
def test_what_the_base_layer_computes_besides_is_kept(change: str) -> None:
    net = network(torch.float64)
    if change == "of another class":
        net.linear = Twice(6, 8, dtype=torch.float64).requires_grad_(False)
    layers = pair(net, "linear")
    for base in (each.linear.base_layer for each in layers):
        if change == "a hook after it":
            base.register_forward_hook(lambda _module, _inputs, output: output + 1)
        elif change == "a hook before it":
            base.register_forward_pre_hook(lambda _module, inputs: (inputs[0] * 2,))
        elif change == "another forward":  # as diffusers brings weights
            plain = base.forward
            base.forward = lambda x, plain=plain: plain(x) + 1
    linears = layers[0].linear, layers[1].linear
    x = images().double().flatten(2).mT
    assert_same(linears, x, **EXACT)
    assert "FrozenAndLowRank" not in linears[1](x).grad_fn.name()


@pytest.mark.parametrize("dora", [False, True])
def test_dora_is_peft_s(dora: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SMALL, 0)
    net = network()
    adapter = awaken(adapted(net, "linear", dora=dora))
    y = net.linear(torch.randn(2, 6))
    assert y.grad_fn is not None
    assert ("FrozenAndLowRank" in y.grad_fn.name()) != dora
    y.sum().backward()
    assert all(parameter.grad is not None for parameter in adapter.parameters())
