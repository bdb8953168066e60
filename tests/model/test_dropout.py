"""Masks by sample: a pure function of sample and layer, the right share, in the right places; ranks by noise."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lora_trainer.common.randomness import Stream, draw_seed
from lora_trainer.config.learning import AdapterSettings
from lora_trainer.lora.adapter import Adapter
from lora_trainer.lora.dropout import SampleMasks, gates, halves
from tests.fakes.small_network import Network, adapted, awaken, images, network

TIMESTEPS = [0.0, 250.0, 600.0, 1000.0]
SEEDS = [draw_seed(7, Stream.ADAPTER_DROPOUT, 0, f"s{k}") for k in range(4)]
KINDS: list[dict[str, Any]] = [
    {"dropout": 0.5},
    {"rank_dropout": 0.5},
    {"module_dropout": 0.5},
    {"dropout": 0.3, "rank_dropout": 0.3, "module_dropout": 0.3},
    {"dora": True, "dropout": 0.5, "rank_dropout": 0.2},
    {"noise_rank": 1},
    {"noise_rank": 1, "noise_rank_power": 2.0, "rank_dropout": 0.3},
    {"kind": "loha", "dropout": 0.5},
    {"kind": "lokr", "dropout": 0.5},
]


def halved(seeds: list[int]) -> Tensor:
    return torch.tensor([halves(seed) for seed in seeds])


def trained(dtype: torch.dtype = torch.float32, **settings: Any) -> tuple[Network, Adapter]:
    net = network(dtype)
    return net, awaken(adapted(net, alpha=4.0, **settings), size=0.3)


def times(timesteps: list[float] = TIMESTEPS) -> Tensor:
    return torch.tensor(timesteps)


def masked(adapter: Adapter, seeds: list[int], timesteps: list[float] | None = None) -> Any:
    assert adapter.masks is not None
    return adapter.masks.of(halved(seeds), times(timesteps or [0.0] * len(seeds)))


# ---- masks


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_the_share_is_dropped_and_the_mean_kept(share: float) -> None:
    """Which are dropped, sample by sample and layer by layer, is told by the bits below."""
    masks = SampleMasks()
    made = masks.add("layer", width=4000, share=share)
    with masks.of(halved(SEEDS), times()):
        rows = made(torch.ones(4, 4000))
    dropped = (rows == 0).float()
    assert dropped.mean(dim=1).tolist() == pytest.approx([share] * 4, abs=0.03)
    assert sorted(set(rows.flatten().tolist())) == pytest.approx([0.0, 1 / (1 - share)])


def test_masks_are_the_bits_they_have_always_been() -> None:
    """A resumed run must drop what it dropped before, on any machine, whatever other layers there are."""
    masks = SampleMasks()
    other = masks.add("another layer", width=3, share=0.5)
    made = masks.add("a layer", width=24, share=0.5)
    with masks.of(halved([1, 2**62 + 12345]), times([3.0, 900.0])):
        assert other(torch.ones(2, 3)).shape == (2, 3)
        rows = made(torch.ones(2, 24)).tolist()
    text = ["".join(str(int(value > 0)) for value in row) for row in rows]
    assert text == ["011100010101011110110110", "110101110000000111100100"]


def test_nothing_is_dropped_outside_of_a_batch() -> None:
    masks = SampleMasks()
    made, ones = masks.add("a layer", width=8, share=0.5), torch.ones(4, 8)
    assert made(ones) is ones
    with pytest.raises(ZeroDivisionError), masks.of(halved(SEEDS), times()):
        rows = made(torch.ones(3 * len(SEEDS), 8))
        assert torch.equal(rows, made(ones).repeat_interleave(3, dim=0)), "by sample"
        raise ZeroDivisionError
    assert made(ones) is ones, "also after an error"
    assert adapted().masks is None


@pytest.mark.parametrize("power", [1, 2, 0.5])
@pytest.mark.parametrize(("rank", "least"), [(16, 8), (16, 1), (7, 3), (4, 4), (1, 1)])
def test_the_ranks_at_a_timestep_are_the_papers_formula(
    rank: int, least: int, power: float
) -> None:
    """Whole timesteps, as Stable Diffusion counts them, and with fractions of a thousandth, as flow has them."""
    masks, ones = SampleMasks(), torch.ones(1001, rank)
    by_noise = masks.add_by_noise(rank=rank, least=least, power=power)
    seeds, whole = halved([1] * 1001), torch.arange(1001)
    with masks.of(seeds, whole):
        rows = by_noise(ones)
    for timestep, row in enumerate(rows):
        clean = Fraction(1000 - timestep, 1000)
        if power == 0.5:  # floor of a root: the largest whole number whose square is not above
            spare = math.isqrt(int(clean * (rank - least) ** 2))
        else:
            spare = math.floor(clean ** int(power) * (rank - least))
        assert row.tolist() == [1.0] * (least + spare) + [0.0] * (rank - least - spare), timestep
    fractions = whole[:-1] + 0.5
    with masks.of(seeds[:-1], fractions):
        counts = by_noise(ones[:-1]).sum(dim=1)
    expected = torch.floor(((1000 - fractions.double()) / 1000) ** power * (rank - least)) + least
    assert torch.equal(counts.double(), expected)


def test_text_encoders_keep_all_ranks_at_every_timestep() -> None:
    settings, masks = AdapterSettings(noise_rank=1), SampleMasks()
    assert gates(masks, "text_encoder.layer", settings, channels=6, rank=4) == ([], [])
    _, (by_noise,) = gates(masks, "denoiser.layer", settings, channels=6, rank=4)
    with masks.of(halved(SEEDS), times()):
        assert by_noise(torch.ones(4, 4)).sum(dim=1).tolist() == [4, 3, 2, 1]


# ---- layers


@pytest.mark.parametrize("settings", KINDS, ids=str)
def test_a_sample_is_dropped_the_same_in_any_batch_and_in_16_bits(settings: dict[str, Any]) -> None:
    """The base of most GPUs is in bf16, and nothing behind an adapted layer takes float32 there."""
    net, adapter = trained(**settings)
    free = net(images())
    with masked(adapter, SEEDS, TIMESTEPS):
        together = net(images())
    assert float((together - free).abs().max().detach()) > 0.01
    for k, (seed, timestep) in enumerate(zip(SEEDS, TIMESTEPS, strict=True)):
        with masked(adapter, [seed], [timestep]):
            alone = net(images()[k : k + 1])
        torch.testing.assert_close(alone[0], together[k], rtol=1e-5, atol=1e-6)
    net, adapter = trained(torch.bfloat16, **settings)
    with masked(adapter, SEEDS, TIMESTEPS):
        rounded = net(images().bfloat16().requires_grad_())
        rounded.float().sum().backward()
    assert rounded.dtype == torch.bfloat16
    assert all(p.grad is not None and p.grad.isfinite().all() for p in adapter.parameters())
    assert (rounded.float() - together).norm() < 0.02 * together.norm()


@pytest.mark.parametrize("shape", [(4, 6), (4, 5, 6), (4, 2, 3, 6), None], ids=str)
def test_a_dropped_lora_is_its_formula(shape: tuple[int, ...] | None) -> None:
    """W x + B (r * A (m * x)), with masks of numbers that are read off one layer at a time; None: a convolution."""
    net, adapter = trained(dropout=0.4, rank_dropout=0.3, module_dropout=0.3, noise_rank=1)
    name = "linear" if shape else "point"
    masks, layer = SampleMasks(), net.get_submodule(name)
    into = masks.add(f"denoiser.{name}.input", width=6, share=0.4)
    ranks = masks.add(f"denoiser.{name}.rank", width=4, share=0.3)
    whole = masks.add(f"denoiser.{name}.module", width=1, share=0.3, rescaled=False)
    x = images() if shape is None else images(36).flatten()[: torch.Size(shape).numel()]
    x = x.reshape(shape or x.shape).requires_grad_()
    factors = adapter.layers[f"denoiser.{name}"].parameters
    leaves = [x, *factors.values()]
    by_noise = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]])
    with masks.of(halved(SEEDS), times()), masked(adapter, SEEDS, TIMESTEPS):
        first, second = into(torch.ones(4, 6)), ranks(torch.ones(4, 4)) * by_noise
        second, live = second * whole(torch.ones(4, 1)), layer(x)
        of_output = torch.randn_like(live)
        gradients = torch.autograd.grad(live, leaves, of_output)
    if shape:
        rows = (4, *(1,) * (len(shape) - 2), -1)
        middle = (x * first.reshape(rows)) @ factors["down"].T * second.reshape(rows)
        change = middle @ factors["up"].T
    else:
        middle = F.conv2d(x * first[..., None, None], factors["down"])
        change = F.conv2d(middle * second[..., None, None], factors["up"])
    wanted = layer.base_layer(x) + change  # type: ignore[operator]  # peft's own
    torch.testing.assert_close(live, wanted)
    by_hand = torch.autograd.grad(wanted, leaves, of_output)
    torch.testing.assert_close(gradients, by_hand, rtol=1e-4, atol=1e-5)
    assert not torch.equal(live, layer(x)), "something was dropped"


@pytest.mark.parametrize("kind", ["lora", "loha", "lokr"])
def test_a_module_is_off_or_as_it_is(kind: str) -> None:
    net, adapter = trained(kind=kind, module_dropout=0.5)
    tokens = images(64).flatten(2).mT
    live, base = net.linear(tokens), network().linear(tokens)
    with masked(adapter, [draw_seed(9, Stream.ADAPTER_DROPOUT, k) for k in range(64)]):
        dropped = net.linear(tokens)
    off = [torch.allclose(dropped[k], base[k], atol=1e-6) for k in range(64)]
    assert 20 < sum(off) < 44
    assert all(off[k] or torch.allclose(dropped[k], live[k], atol=1e-6) for k in range(64))
