"""An adapter on a dial: off it is the base bit by bit, at full strength what merging it would give."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from lora_trainer.common.errors import InputError
from lora_trainer.lora.adapter_size import AdapterKind
from lora_trainer.lora.lora_hooks import attach_lora
from lora_trainer.lora.tensors import ModuleTensors, update
from tests.fakes.adapters import Draws, draw_module, with_magnitude


class Network(nn.Module):
    """A convolution and a linear layer, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 3, padding=1, stride=2)
        self.linear = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(self.conv(x).mean(dim=(2, 3)))
        return y


def network() -> Network:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Network().requires_grad_(False)


def adapter(kind: AdapterKind, base: Network, *, dora: bool = False) -> dict[str, ModuleTensors]:
    found = {}
    for name in ("conv", "linear"):
        weight = base.get_submodule(name).weight
        assert isinstance(weight, Tensor)
        module = draw_module(tuple(weight.shape), kind=kind)
        found[f"denoiser.{name}"] = with_magnitude(module, weight) if dora else module
    return found


def merged(base: Network, tensors: dict[str, ModuleTensors], strength: float) -> Network:
    """Return the network with the updates in its weights."""
    other = copy.deepcopy(base)
    for key, module in tensors.items():
        weight = other.get_submodule(key.removeprefix("denoiser.")).weight
        assert isinstance(weight, Tensor)
        weight += strength * update(module, weight).reshape(weight.shape)
    return other


@pytest.mark.parametrize(
    ("kind", "dora"),
    [("lora", False), ("lora", True), ("loha", False), ("lokr", False), ("oft", False)],
)
@pytest.mark.parametrize("strength", [0.5, 1.5])
def test_any_kind_at_any_strength_is_what_merging_gives(
    kind: AdapterKind, dora: bool, strength: float
) -> None:
    base, x = network(), Draws(1)(2, 4, 6, 6)
    tensors, plain = adapter(kind, base, dora=dora), base(x)
    expected = merged(base, tensors, strength)(x)
    assert (expected - plain).abs().max() > 1e-3
    dial = attach_lora({"denoiser": base}, tensors)
    assert torch.equal(base(x), plain)
    with pytest.raises(ZeroDivisionError), dial.at(strength):
        assert torch.allclose(base(x), expected, atol=2e-6)
        raise ZeroDivisionError
    assert torch.equal(base(x), plain), "it goes back where a block fails"


@pytest.mark.parametrize("kind", ["lora", "oft"])
def test_an_adapter_of_another_size_is_refused(kind: AdapterKind) -> None:
    base = network()
    tensors = {"denoiser.linear": draw_module((10, 4), kind=kind)}
    with pytest.raises(InputError, match="denoiser.linear"):
        attach_lora({"denoiser": base}, tensors)


def test_half_precision_factors_run_in_the_dtype_of_their_input() -> None:
    base = network().to(torch.bfloat16)
    tensors = {
        key: replace(module, tensors={n: t.half() for n, t in module.tensors.items()})
        for key, module in adapter("lora", network()).items()
    }
    dial = attach_lora({"denoiser": base}, tensors)
    with dial.at(1.0):
        assert base(Draws(1)(2, 4, 6, 6).bfloat16()).dtype == torch.bfloat16
