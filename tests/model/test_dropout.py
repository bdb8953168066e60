"""Dropout masks: a pure function of sample and layer, the right share, in the right places."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lora_trainer.common.randomness import Stream, draw_seed
from lora_trainer.config.learning import AdapterSettings
from lora_trainer.lora.adapter import Adapter, inject
from lora_trainer.lora.dropout import SampleMasks, halves

SEEDS = [draw_seed(7, Stream.ADAPTER_DROPOUT, 0, f"s{k}") for k in range(4)]
DROPOUTS: list[dict[str, Any]] = [
    {"dropout": 0.5},
    {"rank_dropout": 0.5},
    {"module_dropout": 0.5},
    {"dropout": 0.3, "rank_dropout": 0.3, "module_dropout": 0.3},
]
KINDS: list[dict[str, Any]] = [
    *DROPOUTS,
    {"dora": True, "dropout": 0.5, "rank_dropout": 0.2},
    {"kind": "loha", "dropout": 0.5},
    {"kind": "lokr", "dropout": 0.5},
]


def halved(seeds: Sequence[int]) -> Tensor:
    return torch.tensor([halves(seed) for seed in seeds])


class Network(nn.Module):
    """Tokens [B, 5, 6] through a linear layer, images [B, 4, 6, 6] through a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)
        self.conv = nn.Conv2d(4, 8, 3, padding=1)

    def forward(self, tokens: Tensor, image: Tensor) -> Tensor:
        first = self.linear(tokens).flatten(1)
        return torch.cat([first, self.conv(image).flatten(1)], dim=1)


def adapted(*, dtype: torch.dtype = torch.float32, **settings: Any) -> tuple[Network, Adapter]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = Network().requires_grad_(False).to(dtype)
    chosen = AdapterSettings.model_validate({"rank": 4, **settings})
    modules = {"denoiser": ["linear", "conv"]}
    adapter = inject({"denoiser": network}, modules=modules, settings=chosen, alpha=4.0, seed=1)
    generator = torch.Generator().manual_seed(17)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return network, adapter


def inputs(count: int = 4) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return (
        torch.randn(count, 5, 6, generator=generator),
        torch.randn(count, 4, 6, 6, generator=generator),
    )


def masks_of(adapter: Adapter) -> SampleMasks:
    assert adapter.masks is not None
    return adapter.masks


def mask(
    values: dict[str, float] | None = None, *, width: int, seeds: list[int], **add: Any
) -> Tensor:
    masks = SampleMasks()
    other = masks.add("another layer", width=3, share=0.5)
    made = masks.add("a layer", width=width, share=0.5, **add)
    with masks.of(halved(seeds)):
        assert other(torch.ones(len(seeds), 3)).shape == (len(seeds), 3)
        return made(torch.ones(len(seeds), width))


# ---- masks


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_the_share_is_dropped_and_the_mean_kept(share: float) -> None:
    masks = SampleMasks()
    made = masks.add("a layer", width=5000, share=share)
    with masks.of(halved(SEEDS)):
        found = made(torch.ones(4, 5000))
    dropped = (found == 0).float().mean(dim=1)
    assert dropped.tolist() == pytest.approx([share] * 4, abs=0.03)
    assert sorted(set(found.flatten().tolist())) == pytest.approx([0.0, 1 / (1 - share)])


def test_samples_layers_and_channels_are_dropped_independently() -> None:
    masks = SampleMasks()
    made = [masks.add(f"layer {k}", width=4000, share=0.5) for k in range(3)]
    with masks.of(halved(SEEDS)):
        rows = torch.cat([one(torch.ones(4, 4000)) for one in made]) - 1.0  # +1 or -1
    for one, other in itertools.combinations(rows, 2):
        assert abs(float((one * other).mean())) < 0.09
    for lag in (1, 2, 7):
        assert abs(float((rows[:, lag:] * rows[:, :-lag]).mean())) < 0.03


def test_masks_are_the_bits_they_have_always_been() -> None:
    """A resumed run must drop what it dropped before, on any machine."""
    found = mask(width=24, seeds=[1, 2**62 + 12345])
    text = ["".join(str(int(value > 0)) for value in row) for row in found.tolist()]
    assert text == PINNED


PINNED = ["011100010101011110110110", "110101110000000111100100"]


def test_nothing_is_dropped_outside_of_a_batch() -> None:
    masks = SampleMasks()
    made = masks.add("a layer", width=8, share=0.5)
    ones = torch.ones(4, 8)
    assert made(ones) is ones
    with masks.of(halved(SEEDS)):
        rows = made(torch.ones(3 * len(SEEDS), 8))
        assert torch.equal(rows, made(ones).repeat_interleave(3, dim=0)), "by sample"
    with pytest.raises(ZeroDivisionError), masks.of(halved(SEEDS)):
        assert made(ones) is not ones
        raise ZeroDivisionError
    assert made(ones) is ones, "also after an error"


# ---- layers


@pytest.mark.parametrize("settings", KINDS, ids=str)
def test_a_sample_is_dropped_the_same_in_any_batch(settings: dict[str, Any]) -> None:
    network, adapter = adapted(**settings)
    tokens, image = inputs()
    free = network(tokens, image)
    with masks_of(adapter).of(halved(SEEDS)):
        together = network(tokens, image)
    assert float((together - free).abs().max().detach()) > 0.01
    for k, seed in enumerate(SEEDS):
        with masks_of(adapter).of(halved([seed])):
            alone = network(tokens[k : k + 1], image[k : k + 1])
        torch.testing.assert_close(alone[0], together[k], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("settings", KINDS, ids=str)
def test_in_16_bits_it_is_the_same_but_for_rounding(settings: dict[str, Any]) -> None:
    """The base of most GPUs is in bf16, and nothing behind an adapted layer takes float32 there."""
    outputs = []
    for dtype in (torch.float32, torch.bfloat16):
        network, adapter = adapted(dtype=dtype, **settings)
        tokens, image = (values.to(dtype).requires_grad_() for values in inputs())
        with masks_of(adapter).of(halved(SEEDS)):
            outputs.append(network(tokens, image))
            outputs[-1].float().sum().backward()
        assert outputs[-1].dtype == dtype
        assert all(p.grad is not None and p.grad.isfinite().all() for p in adapter.parameters())
    exact, rounded = (each.detach().float() for each in outputs)
    assert (rounded - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize("shape", [(4, 6), (4, 5, 6), (4, 2, 3, 6), None], ids=str)
def test_a_dropped_lora_is_its_formula(shape: tuple[int, ...] | None) -> None:
    """W x + B (r * A (m * x)), with masks of numbers that are read off one layer at a time; None: a convolution."""
    network, adapter = adapted(dropout=0.4, rank_dropout=0.3, module_dropout=0.3)
    name, channels = ("linear", 6) if shape else ("conv", 4)
    masks, layer = SampleMasks(), network.get_submodule(name)
    into = masks.add(f"denoiser.{name}.input", width=channels, share=0.4)
    ranks = masks.add(f"denoiser.{name}.rank", width=4, share=0.3)
    whole = masks.add(f"denoiser.{name}.module", width=1, share=0.3, rescaled=False)
    x = torch.randn(
        shape or (4, 4, 6, 6), generator=torch.Generator().manual_seed(5)
    ).requires_grad_()
    with masks.of(halved(SEEDS)), masks_of(adapter).of(halved(SEEDS)):
        first, second = into(torch.ones(4, channels)), ranks(torch.ones(4, 4))
        second, found = second * whole(torch.ones(4, 1)), layer(x)
        of_output = torch.randn_like(found)
        leaves = [x, *adapter.layers[f"denoiser.{name}"].parameters.values()]
        gradients = torch.autograd.grad(found, leaves, of_output)
    factors = adapter.layers[f"denoiser.{name}"].parameters
    if shape:
        rows = (4, *(1,) * (len(shape) - 2), -1)
        middle = (x * first.reshape(rows)) @ factors["down"].T * second.reshape(rows)
        change = middle @ factors["up"].T
    else:
        middle = F.conv2d(x * first[..., None, None], factors["down"], padding=1)
        change = F.conv2d(middle * second[..., None, None], factors["up"])
    base: Any = layer
    wanted = base.base_layer(x) + change
    torch.testing.assert_close(found, wanted)
    by_hand = torch.autograd.grad(wanted, leaves, of_output)
    torch.testing.assert_close(gradients, by_hand, rtol=1e-4, atol=1e-5)
    assert not torch.equal(found, layer(x)), "something was dropped"


@pytest.mark.parametrize("kind", ["lora", "loha", "lokr"])
def test_a_module_is_off_or_as_it_is(kind: str) -> None:
    network, adapter = adapted(kind=kind, module_dropout=0.5)
    tokens, image = inputs()
    live = network(tokens, image)[:, :40]
    plain: Any = network.linear
    base = plain.base_layer(tokens).flatten(1)
    seeds = [draw_seed(9, Stream.ADAPTER_DROPOUT, k) for k in range(4 * 16)]
    off = 0
    for first in range(0, len(seeds), 4):
        with masks_of(adapter).of(halved(seeds[first : first + 4])):
            found = network(tokens, image)[:, :40]
        for k in range(4):
            is_off = torch.allclose(found[k], base[k], atol=1e-6)
            off += is_off
            assert is_off or torch.allclose(found[k], live[k], atol=1e-6)
    assert 20 < off < 44


def test_without_dropout_there_are_no_masks() -> None:
    assert adapted()[1].masks is None
