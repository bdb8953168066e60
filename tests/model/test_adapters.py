"""The adapter: its start, its forward pass, its precision and its state."""

from __future__ import annotations

import pytest
import torch
from peft.tuners.lora import LoraLayer
from torch import nn

from lora_trainer.errors import RequestError
from lora_trainer.model.adapters import Adapter, inject
from tests.fakes.training import awaken

MODULES = ("first.linear", "second.linear", "second.conv")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 10)
        self.conv = nn.Conv2d(4, 8, 3, stride=2, padding=1)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()


def network(dtype: torch.dtype = torch.float32) -> Network:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Network().requires_grad_(False).to(dtype)


def adapted(
    *modules: str, seed: int = 1, rank: int = 4, net: Network | None = None, alpha: float = 8.0
) -> Adapter:
    return inject(net or network(), modules=modules or MODULES, rank=rank, alpha=alpha, seed=seed)


def downs(adapter: Adapter) -> dict[str, torch.Tensor]:
    return {name: down.detach() for name, (down, _) in adapter.pairs.items()}


# ---- the start


def test_the_update_starts_at_zero() -> None:
    net, plain = network(), network()
    adapter = adapted(net=net)
    x = torch.randn(2, 6)
    assert torch.equal(net.first.linear(x), plain.first.linear(x))
    assert all(float(down.abs().max()) > 0 for down in downs(adapter).values())


def test_a_pair_starts_the_same_whatever_else_is_adapted() -> None:
    torch.manual_seed(5)
    alone = adapted("second.conv")
    torch.manual_seed(6)
    assert torch.equal(downs(alone)["second.conv"], downs(adapted())["second.conv"])


def test_pairs_of_one_shape_and_other_seeds_start_differently() -> None:
    one, other = downs(adapted()), downs(adapted(seed=2))
    assert not torch.equal(one["first.linear"], one["second.linear"])
    assert not any(torch.equal(one[name], other[name]) for name in MODULES)


def test_the_start_has_kaimings_spread() -> None:
    """kaiming_uniform with a = sqrt(5): uniform within 1 / sqrt(fan in)."""
    values = downs(adapted("first.conv", rank=64))["first.conv"]
    bound = (4 * 9) ** -0.5
    assert float(values.abs().max()) <= bound
    assert float(values.std()) == pytest.approx(bound / 3**0.5, rel=0.05)


def test_exactly_the_named_modules_are_adapted_and_only_pairs_train() -> None:
    net = network()
    adapter = adapted("first.linear", "second.conv", net=net)
    found = {name for name, module in net.named_modules() if isinstance(module, LoraLayer)}
    assert found == {"first.linear", "second.conv"}
    trainable = {id(p) for p in net.parameters() if p.requires_grad}
    assert trainable == {id(parameter) for parameter in adapter.parameters()}


def test_no_module_is_an_error() -> None:
    with pytest.raises(RequestError, match="adapter.targets"):
        inject(network(), modules=[], rank=4, alpha=4.0, seed=0)


# ---- the forward pass


@pytest.mark.parametrize("alpha", [4.0, 1.0, 12.0])
def test_the_forward_pass_adds_the_scaled_product(alpha: float) -> None:
    net, plain = network(), network()
    adapter = adapted(net=net, alpha=alpha)
    awaken(adapter)
    x, image = torch.randn(3, 6), torch.randn(2, 4, 8, 8)
    down, up = adapter.pairs["first.linear"]
    update = x @ down.T @ up.T * alpha / 4
    torch.testing.assert_close(net.first.linear(x), plain.first.linear(x) + update)
    down, up = adapter.pairs["second.conv"]
    middle = nn.functional.conv2d(image, down, stride=2, padding=1)
    update = nn.functional.conv2d(middle, up) * alpha / 4
    torch.testing.assert_close(net.second.conv(image), plain.second.conv(image) + update)
    assert float(update.detach().abs().max()) > 1e-3


def test_pairs_are_the_live_parameters() -> None:
    net = network()
    adapter = adapted("first.linear", net=net)
    x = torch.ones(1, 6)
    before = net.first.linear(x).detach()
    with torch.no_grad():
        adapter.parameters()[1].fill_(1.0)
    assert not torch.equal(net.first.linear(x), before)


def test_masters_are_float32_on_a_half_precision_base() -> None:
    net = network(torch.bfloat16)
    adapter = adapted(net=net)
    assert all(parameter.dtype == torch.float32 for parameter in adapter.parameters())
    assert net.first.linear(torch.ones(1, 6, dtype=torch.bfloat16)).dtype == torch.bfloat16
    wanted = downs(adapted())
    assert all(torch.equal(value, wanted[name]) for name, value in downs(adapter).items())
    assert set(adapter.tensors()) == set(MODULES)


# ---- rounding


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounded_holds_the_exported_values_and_gives_the_bits_back(dtype: torch.dtype) -> None:
    adapter = adapted()
    awaken(adapter)
    exact = [parameter.detach().clone() for parameter in adapter.parameters()]
    with adapter.rounded(dtype):
        for parameter, value in zip(adapter.parameters(), exact, strict=True):
            assert torch.equal(parameter, value.to(dtype).float())
            assert not torch.equal(parameter, value)
    assert all(torch.equal(p, value) for p, value in zip(adapter.parameters(), exact, strict=True))


def test_rounded_gives_the_bits_back_after_an_error() -> None:
    adapter = adapted()
    exact = [parameter.detach().clone() for parameter in adapter.parameters()]
    with pytest.raises(KeyError), adapter.rounded(torch.bfloat16):
        raise KeyError
    assert all(torch.equal(p, value) for p, value in zip(adapter.parameters(), exact, strict=True))


# ---- state


def test_a_state_is_restored_into_the_live_parameters() -> None:
    source = adapted(seed=9)
    awaken(source)
    net = network()
    target = adapted(net=net)
    live = [id(parameter) for parameter in target.parameters()]
    target.load_state({name: tensor.clone() for name, tensor in source.state().items()})
    assert [id(parameter) for parameter in target.parameters()] == live
    for one, other in zip(target.parameters(), source.parameters(), strict=True):
        assert torch.equal(one, other) and one.requires_grad


@pytest.mark.parametrize(
    "other", [adapted(rank=8), adapted("first.linear"), adapted(*MODULES, "first.conv")]
)
def test_a_state_of_another_adapter_is_refused(other: Adapter) -> None:
    adapter = adapted()
    before = {name: tensor.clone() for name, tensor in adapter.state().items()}
    with pytest.raises(RequestError, match="another rank or other layers"):
        adapter.load_state(other.state())
    assert all(torch.equal(tensor, before[name]) for name, tensor in adapter.state().items())


def test_state_names_say_module_and_side() -> None:
    state = adapted().state()
    assert list(state) == [f"{name}.{side}" for name in MODULES for side in ("down", "up")]
    assert not any(tensor.requires_grad for tensor in state.values())
