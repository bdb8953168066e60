"""A LoRA file beside the layers of a base: off it is the base bit by bit, at full strength what merging gives."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lora_trainer.common.errors import InputError
from lora_trainer.config.learning import AdapterSettings
from lora_trainer.lora.adapter import inject
from lora_trainer.lora.adapter_size import AdapterKind
from lora_trainer.lora.lora_hooks import attach_assistant, attach_lora
from lora_trainer.lora.tensors import ModuleTensors, update
from tests.fakes.adapters import Draws, draw_module, with_magnitude

KINDS: list[tuple[AdapterKind, bool]] = [
    ("lora", False),
    ("lora", True),
    ("loha", False),
    ("lokr", False),
    ("oft", False),
]


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


def file(kind: AdapterKind = "lora", *, dora: bool = False) -> dict[str, ModuleTensors]:
    modules = {}
    for name in ("conv", "linear"):
        weight = network().get_submodule(name).weight
        assert isinstance(weight, Tensor)
        module = draw_module(tuple(weight.shape), kind=kind)
        modules[f"denoiser.{name}"] = with_magnitude(module, weight) if dora else module
    return modules


def merged(tensors: dict[str, ModuleTensors], strength: float = 1.0) -> Network:
    """Return the network with the updates in its weights."""
    base = network()
    for key, module in tensors.items():
        weight = base.get_submodule(key.removeprefix("denoiser.")).weight
        assert isinstance(weight, Tensor)
        weight += strength * update(module, weight).reshape(weight.shape)
    return base


@pytest.mark.parametrize(("kind", "dora"), KINDS)
@pytest.mark.parametrize("strength", [0.5, 1.5])
def test_any_kind_at_any_strength_is_what_merging_gives(
    kind: AdapterKind, dora: bool, strength: float
) -> None:
    base, x = network(), Draws(1)(2, 4, 6, 6)
    tensors, plain = file(kind, dora=dora), base(x)
    names = dict(base.named_parameters()).keys()
    expected = merged(tensors, strength)(x)
    assert (expected - plain).abs().max() > 1e-3
    dial = attach_lora({"denoiser": base}, tensors)
    assert torch.equal(base(x), plain)
    with pytest.raises(ZeroDivisionError), dial.at(strength):
        assert torch.allclose(base(x), expected, atol=2e-6)
        with dial.at(0):
            assert torch.equal(base(x), plain)
        assert torch.allclose(base(x), expected, atol=2e-6)
        raise ZeroDivisionError
    assert torch.equal(base(x), plain), "it goes back where a block fails"
    assert dict(base.named_parameters()).keys() == names == base.state_dict().keys()
    assert not any(parameter.requires_grad for parameter in base.parameters())


@pytest.mark.parametrize(("kind", "dora"), KINDS)
@pytest.mark.parametrize("order", ["before", "after"])
def test_an_assistant_is_on_beside_whatever_adapts_the_layers(
    kind: Any, dora: bool, order: str
) -> None:
    base, x = network(), Draws(1)(2, 4, 6, 6)
    if order == "before":
        attach_assistant(base, file())
    inject(
        {"denoiser": base},
        modules={"denoiser": ("linear", "conv")},
        settings=AdapterSettings(rank=4, kind=kind, dora=dora),
        alpha=4.0,
        seed=1,
    )
    if order == "after":
        attach_assistant(base, file())
    torch.testing.assert_close(base(x), merged(file())(x), rtol=1e-4, atol=1e-5)


def test_an_assistant_that_is_no_plain_lora_of_this_denoiser_is_refused() -> None:
    plain = file()["denoiser.linear"]
    other = draw_module((10, 6))
    cases: list[tuple[dict[str, ModuleTensors], str]] = [
        (file("loha"), "is a LoHa adapter"),
        (file(dora=True), "is a DoRA adapter"),
        ({"text_encoder.linear": plain}, r"changes text_encoder\.linear"),
        ({"denoiser.other": plain}, r"changes denoiser\.other"),
        ({"denoiser.linear": other}, r"changes denoiser\.linear, .* not have in that size"),
        ({**file(), "denoiser.linear": draw_module((8, 4))}, r"changes denoiser\.linear"),
    ]
    for tensors, message in cases:
        base = network()
        with pytest.raises(InputError, match=message):
            attach_assistant(base, tensors)
        assert not base.linear._forward_hooks and not base.conv._forward_hooks


def test_a_rotation_of_another_size_is_refused() -> None:
    tensors = {"denoiser.linear": draw_module((10, 6), kind="oft")}
    with pytest.raises(InputError, match=r"denoiser\.linear"):
        attach_lora({"denoiser": network()}, tensors)


def test_half_precision_factors_run_in_the_dtype_of_their_input() -> None:
    base, tensors = copy.deepcopy(network()).to(torch.bfloat16), file()
    half = {
        key: replace(module, tensors={n: t.half() for n, t in module.tensors.items()})
        for key, module in tensors.items()
    }
    with attach_lora({"denoiser": base}, half).at(1.0):
        assert base(Draws(1)(2, 4, 6, 6).bfloat16()).dtype == torch.bfloat16
