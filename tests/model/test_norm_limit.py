"""No update is larger than its limit, and those below it keep their bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lora_trainer.config.learning import AdapterSettings
from lora_trainer.lora.adapter import Adapter, inject
from lora_trainer.lora.tensors import update

KINDS: list[dict[str, Any]] = [
    {},
    {"rslora": True},
    {"kind": "loha"},
    {"kind": "lokr", "rank": 1},
    {"kind": "lokr", "rank": 16},
]


def adapted(spread: float, **settings: Any) -> Adapter:
    """Return an adapter of a linear layer and a convolution whose updates differ in size."""
    network = nn.Sequential(nn.Linear(6, 10), nn.Conv2d(4, 8, 3)).requires_grad_(False)
    chosen = AdapterSettings.model_validate({"rank": 4, **settings})
    adapter = inject(
        {"denoiser": network}, modules={"denoiser": ["0", "1"]}, settings=chosen, alpha=8.0, seed=1
    )
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for index, parameter in enumerate(adapter.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
            parameter *= spread if index < len(adapter.parameters()) // 2 else 0.5
    return adapter


def norms(adapter: Adapter) -> list[float]:
    """Return the norm of each whole update, formed in float64."""
    return [float(update(module).double().norm()) for module in adapter.tensors().values()]


def values(adapter: Adapter) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in adapter.parameters()]


@pytest.mark.parametrize("settings", KINDS, ids=str)
def test_the_norm_is_that_of_the_whole_update(settings: dict[str, Any]) -> None:
    adapter = adapted(0.7, **settings)
    found = [float(layer.update_norm()) for layer in adapter.layers.values()]
    assert found == pytest.approx(norms(adapter), rel=1e-5)


@pytest.mark.parametrize("settings", KINDS, ids=str)
def test_what_is_larger_comes_back_to_the_limit_and_the_rest_stays(
    settings: dict[str, Any],
) -> None:
    adapter = adapted(2.0, **settings)
    first, second = norms(adapter)
    assert second < first
    limit = (first + second) / 2
    directions = [
        update(module) / float(update(module).norm()) for module in adapter.tensors().values()
    ]
    before = values(adapter)
    adapter.limit_norms(limit)
    assert norms(adapter) == pytest.approx([limit, second], rel=1e-5)
    for module, direction in zip(adapter.tensors().values(), directions, strict=True):
        now = update(module)
        torch.testing.assert_close(now / float(now.norm()), direction, rtol=1e-4, atol=1e-5)
    half = len(before) // 2
    after = values(adapter)
    assert all(torch.equal(a, b) for a, b in zip(after[half:], before[half:], strict=True))
    shares = [float((a / b).mean()) for a, b in zip(after[:half], before[:half], strict=True)]
    assert shares == pytest.approx([(limit / first) ** (1 / half)] * half, rel=1e-4)


@pytest.mark.parametrize("settings", KINDS, ids=str)
def test_doing_it_again_changes_no_bit(settings: dict[str, Any]) -> None:
    """A step that was skipped must leave the weights as they are."""
    for spread in (0.9, 1.3, 2.0, 3.7):
        adapter = adapted(spread, **settings)
        adapter.limit_norms(1.0)
        once = values(adapter)
        adapter.limit_norms(1.0)
        assert all(torch.equal(a, b) for a, b in zip(values(adapter), once, strict=True))


def test_updates_that_are_zero_stay_zero() -> None:
    adapter = adapted(0.0)
    adapter.limit_norms(1.0)
    assert all(bool(value.isfinite().all()) for value in values(adapter))


def test_frozen_layers_are_left_alone() -> None:
    adapter = adapted(5.0)
    frozen, trained = adapter.layers.values()
    for parameter in frozen.parameters.values():
        parameter.requires_grad_(False)
    before = {name: tensor.detach().clone() for name, tensor in frozen.parameters.items()}
    adapter.limit_norms(0.1)
    assert all(torch.equal(before[name], frozen.parameters[name]) for name in before)
    assert float(trained.update_norm()) == pytest.approx(0.1, rel=1e-5)
