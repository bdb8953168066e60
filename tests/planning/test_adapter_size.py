"""Ranks, scales and parameter counts: what is planned is what is injected."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from peft.tuners.lokr.layer import factorization
from torch import nn

from lora_trainer import families
from lora_trainer.config.learning import AdapterSettings
from lora_trainer.costs.cost_table import adapter_shapes
from lora_trainer.lora.adapter import inject
from lora_trainer.lora.adapter_size import (
    adapter_tensors,
    block_size,
    factorise,
    first_match,
    layer_width,
    rebuilt_elements,
    total_elements,
)
from tests.fakes.family_bases import denoiser_of, facts_of

KINDS = [
    {},
    {"dora": True},
    {"conv_rank": 2},
    {"rank_pattern": {"^conv$": 3, "line": 5}},
    {"kind": "loha"},
    {"kind": "loha", "conv_rank": 3},
    {"kind": "lokr"},
    {"kind": "lokr", "rank": 1},
    {"kind": "lokr", "rank": 1, "lokr_factor": 3},
    {"kind": "lokr", "rank": 2, "conv_rank": 1, "lokr_factor": 4},
    {"kind": "oft"},
    {"kind": "oft", "rank": 5},
]


def settings(**values: Any) -> AdapterSettings:
    return AdapterSettings.model_validate({"rank": 4, **values})


def planned(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A plan does not tell a 1x1 convolution from a linear layer."""
    if len(shape) < 4 or shape[-2:] != (1, 1):
        return shape
    return shape[1:2] if shape[0] == 1 else shape[:2]


@pytest.mark.parametrize("values", KINDS, ids=str)
def test_the_count_is_that_of_the_injected_adapter(values: dict[str, Any]) -> None:
    network = nn.ModuleDict(
        {"linear": nn.Linear(24, 36), "conv": nn.Conv2d(6, 20, 3), "point": nn.Conv2d(10, 14, 1)}
    )
    shapes = {"linear": (24, 36), "conv": (54, 20, 9), "point": (10, 14)}
    chosen = settings(**values)
    adapter = inject(
        {"denoiser": network},
        modules={"denoiser": list(shapes)},
        settings=chosen,
        alpha=4.0,
        seed=0,
    )
    injected = Counter(planned(tuple(parameter.shape)) for parameter in adapter.parameters())
    assert Counter(map(planned, adapter_tensors(shapes, chosen).elements())) == injected
    real = sum(parameter.numel() for parameter in adapter.parameters())
    assert total_elements(injected) == real


@pytest.mark.parametrize(
    "values",
    [
        {"conv_rank": 2},
        {"kind": "loha", "conv_rank": 2},
        {"kind": "lokr", "rank": 1},
        {"kind": "lokr", "conv_rank": 1, "lokr_factor": 2},
        {"dora": True, "rank_pattern": {"conv": 3}},
    ],
    ids=str,
)
def test_the_plan_knows_which_layers_of_a_base_are_convolutions(values: dict[str, Any]) -> None:
    """A 3x3 convolution has a rank of its own, and LoKr splits its channels, not its kernel."""
    family, facts = families.family(families.DEFAULT_FAMILY), facts_of(families.DEFAULT_FAMILY)
    denoiser, chosen = denoiser_of(family.name), settings(targets="all", **values)
    modules = {"denoiser": family.lora_targets(denoiser, "all")}
    adapter = inject({"denoiser": denoiser}, modules=modules, settings=chosen, alpha=4.0, seed=0)
    injected = sum(parameter.numel() for parameter in adapter.parameters())
    shapes = adapter_shapes(family, facts, targets="all")
    assert total_elements(adapter_tensors(shapes, chosen)) == injected


@given(dimension=st.integers(1, 3000), factor=st.sampled_from([-1, 1, 2, 3, 4, 7, 8, 16, 64]))
def test_lokr_splits_as_peft(dimension: int, factor: int) -> None:
    assert factorise(dimension, factor=factor) == factorization(dimension, factor)


@given(out=st.integers(1, 2000), rank=st.integers(1, 64))
def test_the_blocks_of_a_rotation_are_the_largest_that_fit(out: int, rank: int) -> None:
    size = block_size(out, rank=rank)
    assert out % size == 0 and size <= rank
    assert not any(out % larger == 0 for larger in range(size + 1, min(rank, out) + 1))


def test_a_pattern_or_a_convolution_keeps_the_strength_of_the_update() -> None:
    chosen = settings(rank_pattern={"narrow": 2}, conv_rank=8)
    for name, kernel, rank in [("wide", 1, 4), ("narrow", 1, 2), ("c", 9, 8), ("narrow_c", 9, 2)]:
        width = layer_width(f"denoiser.{name}", kernel=kernel, settings=chosen, alpha=6.0)
        assert width.rank == rank and width.scale == pytest.approx(1.5)


def test_convolutions_have_an_alpha_of_their_own() -> None:
    chosen = settings(conv_rank=8, conv_alpha=2.0, rank_pattern={"special": 4})
    plain = layer_width("denoiser.c", kernel=9, settings=chosen, alpha=4.0)
    special = layer_width("denoiser.special", kernel=9, settings=chosen, alpha=4.0)
    assert (plain.scale, special.scale) == (0.25, 0.25)
    assert layer_width("denoiser.c", kernel=1, settings=chosen, alpha=4.0).scale == 1.0


def test_rank_stabilised_scaling_divides_by_the_root() -> None:
    chosen = settings(rank=16, rslora=True, rank_pattern={"narrow": 4})
    assert layer_width("denoiser.a", kernel=1, settings=chosen, alpha=8.0).scale == 2.0
    assert layer_width("denoiser.narrow", kernel=1, settings=chosen, alpha=8.0).scale == 1.0


def test_the_first_pattern_wins_and_sees_the_module_or_the_whole_name() -> None:
    found = [
        first_match(key, [r"^denoiser\.up", "^mid", "attn", "mid"])
        for key in ("denoiser.up.0", "denoiser.mid.attn", "denoiser.down.attn", "text_encoder.x")
    ]
    assert found == [r"^denoiser\.up", "^mid", "attn", None]


def test_only_loha_and_lokr_rebuild_whole_weights() -> None:
    shapes = {"a": (24, 36), "b": (54, 20, 9)}
    whole = 24 * 36 + 54 * 20
    found = {kind: rebuilt_elements(shapes, settings(kind=kind)) for kind in ("loha", "lokr")}
    assert found == {"loha": whole, "lokr": whole}
    assert rebuilt_elements(shapes, settings(dora=True)) == 0
