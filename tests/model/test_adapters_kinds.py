"""Every kind of adapter on every sort of layer: the live forward pass is the update of its tensors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lora_trainer.config.learning import AdapterSettings
from lora_trainer.lora.adapter import Adapter, inject
from lora_trainer.lora.tensors import update

KINDS: list[dict[str, Any]] = [
    {},
    {"rslora": True},
    {"dora": True},
    {"kind": "loha"},
    {"kind": "lokr"},
    {"kind": "lokr", "rank": 1},
    {"kind": "lokr", "rank": 1, "lokr_factor": 2},
    {"kind": "oft"},
]
BY_KIND = pytest.mark.parametrize("kind", KINDS, ids=str)


class Network(nn.Module):
    """A linear layer, a 3x3 convolution with a stride and a 1x1 convolution, without a bias each."""

    def __init__(self, *, inputs: int = 6, out: int = 8, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, out, bias=bias)
        self.conv = nn.Conv2d(inputs, out, 3, stride=2, padding=1, bias=bias)
        self.point = nn.Conv2d(inputs, out, 1, bias=bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.linear(x.movedim(1, -1)), self.conv(x), self.point(x)


def network(dtype: torch.dtype = torch.float32, **shape: Any) -> Network:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Network(**shape).requires_grad_(False).to(dtype)


def adapted(net: Network, *, alpha: float = 6.0, **values: Any) -> Adapter:
    return inject(
        {"denoiser": net},
        modules={"denoiser": ("linear", "conv", "point")},
        settings=AdapterSettings.model_validate({"rank": 4, **values}),
        alpha=alpha,
        seed=1,
    )


def awaken(adapter: Adapter) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))


def merged(adapter: Adapter, net: Network) -> Network:
    """Return a copy of the plain network whose weights have the updates of the adapter's tensors."""
    changed = copy.deepcopy(net)
    for key, module in adapter.tensors().items():
        weight = changed.get_submodule(key.removeprefix("denoiser.")).get_parameter("weight")
        with torch.no_grad():
            weight.add_(update(module, weight).to(weight.dtype))
    return changed


@settings(max_examples=40)
@given(
    kind=st.sampled_from(KINDS),
    inputs=st.integers(1, 9),
    out=st.integers(1, 12),
    rank=st.integers(1, 6),
    conv_rank=st.none() | st.integers(1, 3),
    alpha=st.floats(0.5, 9.0),
    bias=st.booleans(),
)
def test_any_shape_and_rank_is_that_of_the_updated_weights(
    kind: dict[str, Any],
    inputs: int,
    out: int,
    rank: int,
    conv_rank: int | None,
    alpha: float,
    bias: bool,
) -> None:
    net = network(inputs=inputs, out=out, bias=bias).double()
    plain = copy.deepcopy(net)
    values = {"rank": rank, "conv_rank": conv_rank, **kind}
    adapter = adapted(net.float(), alpha=alpha, **values)
    awaken(adapter)
    image = torch.randn(1, inputs, 4, 4)
    reference = merged(adapter, plain)(image.double())
    for live, wanted in zip(net(image), reference, strict=True):
        torch.testing.assert_close(live.double(), wanted, rtol=1e-4, atol=1e-4)


@BY_KIND
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_update_starts_at_zero(kind: dict[str, Any], dtype: torch.dtype) -> None:
    net = network(dtype)
    plain = copy.deepcopy(net)
    adapter = adapted(net, **kind)
    image = torch.randn(2, 6, 8, 8).to(dtype)
    for live, base in zip(net(image), plain(image), strict=True):
        assert live.dtype == dtype
        if kind.get("kind", "lora") == "lora":
            # Products come from kernels that round differently; one sums the bias first.
            rounding = 2 * torch.finfo(dtype).eps * float(base.abs().max())
            torch.testing.assert_close(live, base, rtol=0, atol=rounding)
        else:
            assert torch.equal(live, base)
    assert all(parameter.dtype == torch.float32 for parameter in adapter.parameters())
    assert all(parameter.is_leaf for parameter in adapter.parameters())


@BY_KIND
def test_the_first_step_changes_every_layer(kind: dict[str, Any]) -> None:
    """A zero update must not have a zero gradient in all of its tensors."""
    net = network()
    adapter = adapted(net, **kind)
    outputs = net(torch.randn(2, 6, 8, 8))
    torch.stack([output.square().mean() for output in outputs]).sum().backward()
    for layer in adapter.layers.values():
        assert any(p.grad is not None and p.grad.any() for p in layer.parameters.values())


@BY_KIND
def test_the_forward_pass_draws_no_random_numbers_that_matter(kind: dict[str, Any]) -> None:
    """peft drops a LoHa or LoKr layer when torch.rand(1) is 0.0, once in 2**24 passes."""
    net = network().train()
    adapter = adapted(net, **kind)
    awaken(adapter)
    image = torch.randn(2, 6, 8, 8)
    wanted = net(image)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "rand", lambda *_, **__: torch.zeros(1))
        found = net(image)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_readers_ignore_the_alpha_of_a_lokr_of_full_factors() -> None:
    adapter = adapted(network(), kind="lokr", alpha=1.0)
    module = adapter.tensors()["denoiser.linear"]
    assert set(module.tensors) == {"w1", "w2"} and module.scale == 1.0
    factored = adapted(network(), kind="lokr", rank=1, alpha=2.0).tensors()["denoiser.linear"]
    assert set(factored.tensors) == {"w1", "w2_a", "w2_b"} and factored.scale == 2.0


# ---- memory


@BY_KIND
def test_what_autograd_keeps_grows_with_the_tokens_not_with_tokens_times_ranks(
    kind: dict[str, Any],
) -> None:
    """A rotation written as a broadcast product kept one copy of its matrices for every token."""
    net = nn.ModuleDict({"linear": nn.Linear(32, 64)}).requires_grad_(False)
    chosen = AdapterSettings.model_validate({**kind, "rank": 16})
    modules = {"denoiser": ("linear",)}
    inject({"denoiser": net}, modules=modules, settings=chosen, alpha=1.0, seed=0)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    tokens = torch.randn(256, 32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        held = net["linear"](tokens)
    assert sum(kept.values()) < 4 * (256 * (32 + 3 * 64) + 3 * 32 * 64)
    assert held.shape == (256, 64)
