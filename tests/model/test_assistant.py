"""The assistant: beside the layers while training, off while sampling, never in the weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from lora_trainer.common.errors import InputError
from lora_trainer.config.learning import AdapterSettings
from lora_trainer.lora.adapter import inject
from lora_trainer.lora.lora_hooks import attach_assistant
from lora_trainer.lora.tensors import AdapterTensors, ModuleTensors, update

KINDS = [{}, {"dora": True}, {"kind": "loha"}, {"kind": "oft"}]


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.conv = nn.Linear(6, 8), nn.Conv2d(6, 8, 3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        total: Tensor = self.linear(x.movedim(1, -1)).mean() + self.conv(x).mean()
        return total


def network(dtype: torch.dtype = torch.float32) -> Network:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Network().requires_grad_(False).to(dtype)


def file(component: str = "denoiser", *, out: int = 8) -> AdapterTensors:
    generator = torch.Generator().manual_seed(5)

    def module(*kernel: int) -> ModuleTensors:
        down = torch.randn(3, 6, *kernel, generator=generator)
        up = torch.randn(out, 3, *(1,) * len(kernel), generator=generator)
        return ModuleTensors(kind="lora", tensors={"down": down, "up": up}, rank=3, scale=0.5)

    return {f"{component}.linear": module(), f"{component}.conv": module(3, 3)}


def inject_into(net: Network, **settings: object) -> None:
    inject(
        {"denoiser": net},
        modules={"denoiser": ("linear", "conv")},
        settings=AdapterSettings.model_validate({"rank": 4, **settings}),
        alpha=4.0,
        seed=1,
    )


def assisted() -> Network:
    """Return a plain network with the assistant in its weights."""
    net = network()
    for key, module in file().items():
        layer = net.get_submodule(key.removeprefix("denoiser."))
        with torch.no_grad():
            layer.get_parameter("weight").add_(update(module))
    return net


@pytest.mark.parametrize("settings", KINDS, ids=str)
@pytest.mark.parametrize("order", ["before", "after"])
def test_it_runs_beside_the_layers_whatever_adapts_them(
    settings: dict[str, object], order: str
) -> None:
    net = network()
    if order == "before":
        attach_assistant(net, file())
    inject_into(net, **settings)
    if order == "after":
        attach_assistant(net, file())
    image, reference = torch.randn(2, 6, 8, 8), assisted()
    torch.testing.assert_close(net.conv(image), reference.conv(image), rtol=1e-4, atol=1e-5)
    rows = image.movedim(1, -1)
    torch.testing.assert_close(net.linear(rows), reference.linear(rows), rtol=1e-4, atol=1e-5)


def test_off_is_the_base_itself_and_ends_with_its_block() -> None:
    net, plain = network(), network()
    assistant = attach_assistant(net, file())
    image = torch.randn(2, 6, 8, 8)
    on = net.conv(image)
    with assistant.at(0):
        assert torch.equal(net.conv(image), plain.conv(image))
        with assistant.at(0):
            pass
        assert torch.equal(net.conv(image), plain.conv(image))
    assert torch.equal(net.conv(image), on) and not torch.equal(on, plain.conv(image))
    with pytest.raises(KeyError), assistant.at(0):
        raise KeyError
    assert torch.equal(net.conv(image), on)


def test_it_has_nothing_to_train_and_changes_no_weight() -> None:
    net, plain = network(), network()
    names = dict(net.named_parameters()).keys()
    attach_assistant(net, file())
    assert dict(net.named_parameters()).keys() == names == net.state_dict().keys()
    for one, other in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other) and not one.requires_grad


def test_anything_but_a_plain_lora_of_this_denoiser_is_refused() -> None:
    loha = ModuleTensors(kind="loha", tensors={}, rank=2, scale=1.0)
    plain = file()["denoiser.linear"]
    magnitude = {**plain.tensors, "magnitude": torch.ones(8)}
    dora = ModuleTensors(kind="lora", tensors=magnitude, rank=3, scale=1.0)
    cases: list[tuple[AdapterTensors, str]] = [
        ({"denoiser.linear": loha}, "is a LoHa adapter"),
        ({"denoiser.linear": dora}, "is a DoRA adapter"),
        (file("text_encoder"), r"changes text_encoder\.linear"),
        ({"denoiser.other": plain}, r"changes denoiser\.other"),
        (file(out=9), r"changes denoiser\.linear, which this base does not have in that size"),
    ]
    for tensors, message in cases:
        net = network()
        with pytest.raises(InputError, match=message):
            attach_assistant(net, tensors)
        assert not net.linear._forward_hooks and not net.conv._forward_hooks
