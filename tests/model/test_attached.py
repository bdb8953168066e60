"""A LoRA file beside the layers of a base: off it is the base bit by bit, at full strength what merging gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lora_trainer.common.errors import InputError
from lora_trainer.lora.lora_hooks import attach_assistant, attach_lora
from lora_trainer.lora.tensors import ModuleTensors, update
from lora_trainer.network.quantize import QuantizedLinear
from tests.fakes.adapters import adapter_for, draw_module
from tests.fakes.small_network import MODULES, Network, adapted, images, network

KINDS: list[dict[str, Any]] = [
    {"kind": "lora"},
    {"kind": "lora", "dora": True},
    {"kind": "loha"},
    {"kind": "lokr"},
    {"kind": "oft"},
]
BY_KIND = pytest.mark.parametrize("kind", KINDS, ids=str)


def file(**kind: Any) -> dict[str, ModuleTensors]:
    return adapter_for("denoiser", network(), MODULES, **kind)


def merged(tensors: dict[str, ModuleTensors], strength: float = 1.0) -> Network:
    """Return the network with the updates in its weights."""
    base = network()
    for key, module in tensors.items():
        weight = base.get_parameter(f"{key.removeprefix('denoiser.')}.weight")
        weight += strength * update(module, weight)
    return base


@BY_KIND
@pytest.mark.parametrize("strength", [0.5, 1.5])
def test_any_kind_at_any_strength_is_what_merging_gives(
    kind: dict[str, Any], strength: float
) -> None:
    base, x, tensors = network(), images(), file(**kind)
    plain, expected, names = base(x), merged(tensors, strength)(x), base.state_dict().keys()
    assert (expected - plain).abs().max() > 1e-3
    dial = attach_lora({"denoiser": base}, tensors)
    assert torch.equal(base(x), plain)
    with pytest.raises(ZeroDivisionError), dial.at(strength):
        assert torch.allclose(base(x), expected, atol=1e-5)
        with dial.at(0):
            assert torch.equal(base(x), plain)
        assert torch.allclose(base(x), expected, atol=1e-5)
        raise ZeroDivisionError
    assert torch.equal(base(x), plain), "it goes back where a block fails"
    assert base.state_dict().keys() == names
    assert not any(parameter.requires_grad for parameter in base.parameters())


@BY_KIND
@pytest.mark.parametrize("order", ["before", "after"])
def test_an_assistant_is_on_beside_whatever_adapts_the_layers(
    kind: dict[str, Any], order: str
) -> None:
    base, x = network(), images()
    if order == "before":
        attach_assistant(base, file())
    adapted(base, alpha=4.0, **kind)
    if order == "after":
        attach_assistant(base, file())
    torch.testing.assert_close(base(x), merged(file())(x), rtol=1e-4, atol=1e-5)


def test_what_is_no_plain_lora_of_this_denoiser_is_refused() -> None:
    plain = file()["denoiser.linear"]
    cases: list[tuple[dict[str, ModuleTensors], str]] = [
        (file(kind="loha"), "is a LoHa adapter"),
        (file(dora=True), "is a DoRA adapter"),
        ({"text_encoder.linear": plain}, r"changes text_encoder\.linear"),
        ({"denoiser.other": plain}, r"changes denoiser\.other"),
        ({"denoiser.linear": draw_module((10, 6))}, r"linear, .* not have in that size"),
        ({**file(), "denoiser.linear": draw_module((8, 4))}, r"changes denoiser\.linear"),
    ]
    base = network()
    for tensors, message in cases:
        with pytest.raises(InputError, match=message):
            attach_assistant(base, tensors)
    with pytest.raises(InputError, match=r"denoiser\.linear"):
        attach_lora({"denoiser": base}, {"denoiser.linear": draw_module((10, 6), kind="oft")})
    assert not base.linear._forward_hooks and not base.conv._forward_hooks


def test_half_precision_factors_run_in_the_dtype_of_their_input() -> None:
    def half(tensors: Any) -> dict[str, Tensor]:
        return {name: tensor.half() for name, tensor in tensors.items()}

    base = network(torch.bfloat16)
    tensors = {key: replace(each, tensors=half(each.tensors)) for key, each in file().items()}
    with attach_lora({"denoiser": base}, tensors).at(1.0):
        assert base(images().bfloat16()).dtype == torch.bfloat16


def test_no_quantised_layer_is_dequantised_to_learn_its_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the blocks of a large base lie in the machine's memory that takes a minute, as often as it is asked."""
    base, tensors = network(), file(kind="lora")
    for name, layer in [*base.named_modules()]:
        if type(layer) is nn.Linear:
            base.set_submodule(name, QuantizedLinear(layer, "int8", device=torch.device("cpu")))
    monkeypatch.setattr(QuantizedLinear, "restored", lambda *_: pytest.fail("dequantised"))
    attach_lora({"denoiser": base}, tensors)
