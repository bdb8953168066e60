"""Norms of updates beside their weights, and the share of the rank that is used."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from lora_trainer.lora.adapter_size import AdapterKind
from lora_trainer.lora.tensors import update
from lora_trainer.run.saving import weight_figures
from tests.fakes.adapters import draw_module, with_magnitude


def layer(shape: tuple[int, ...]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if len(shape) == 2:
            return nn.Sequential(nn.Linear(shape[1], shape[0])).requires_grad_(False)
        return nn.Sequential(nn.Conv2d(shape[1], shape[0], shape[2])).requires_grad_(False)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("lora", (6, 4, 3, 3)), ("loha", (8, 6)), ("lokr", (6, 4, 3, 3)), ("oft", (8, 6))],
)
def test_norms_are_those_of_the_whole_matrices(kind: AdapterKind, shape: tuple[int, ...]) -> None:
    base, module = layer(shape), draw_module(shape, kind=kind)
    weight = base[0].weight  # type: ignore[index]  # a Sequential
    found = weight_figures({"denoiser": base}, {"denoiser.0": module})
    expected = float(update(module, weight).norm() / weight.norm())
    assert found.relative_norms == {"denoiser.0": pytest.approx(expected, rel=1e-5)}
    assert found.finite


def test_the_rank_used_is_that_of_the_update_or_why_it_has_none() -> None:
    module, base = draw_module((16, 12), rank=4), layer((16, 12))
    one = {**module.tensors, "up": module.tensors["up"].clone()}
    one["up"][:, 1:] = 0
    for each, low, high in ((replace(module, tensors=one), 0.2499, 0.2501), (module, 0.5, 1)):
        figures = weight_figures({"denoiser": base}, {"denoiser.0": each})
        assert low < figures.ranks_used["denoiser.0"] <= high
    weight = base[0].weight  # type: ignore[index]  # a Sequential
    dora = with_magnitude(module, weight)
    figures = weight_figures({"denoiser": base}, {"denoiser.0": dora})
    assert figures.ranks_used == {} and "DoRA" in figures.why_not


def test_what_is_dead_exploded_or_no_number_is_named() -> None:
    base, module = layer((8, 6)), draw_module((8, 6))

    def figures(factor: float) -> list[list[str]]:
        tensors = {**module.tensors, "up": module.tensors["up"] * factor}
        found = weight_figures({"denoiser": base}, {"denoiser.0": replace(module, tensors=tensors)})
        return [found.dead, found.exploded, [] if found.finite else ["not finite"]]

    assert figures(0.0) == [["denoiser.0"], [], []]
    assert figures(1.0) == [[], [], []]
    assert figures(1e3) == [[], ["denoiser.0"], []]
    assert figures(math.nan) == [[], ["denoiser.0"], ["not finite"]]
