"""Ranks, scales and parameter counts: what is planned is what is injected."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from peft.tuners.lokr.layer import factorization
from torch import nn

from lora_trainer.config.learning import AdapterSettings
from lora_trainer.lora.adapter import inject
from lora_trainer.lora.adapter_size import (
    adapter_tensors,
    block_size,
    factorise,
    layer_width,
    total_elements,
)

KINDS = [
    {},
    {"dora": True},
    {"conv_rank": 2},
    {"rank_pattern": {"^conv$": 3, "line": 5}},
    {"kind": "loha"},
    {"kind": "loha", "conv_rank": 3},
    {"kind": "lokr"},
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


@given(dimension=st.integers(1, 3000), factor=st.sampled_from([-1, 1, 2, 3, 4, 7, 8, 16, 64]))
def test_lokr_splits_as_peft(dimension: int, factor: int) -> None:
    assert factorise(dimension, factor=factor) == factorization(dimension, factor)


@given(out=st.integers(1, 2000), rank=st.integers(1, 64))
def test_the_blocks_of_a_rotation_are_the_largest_that_fit(out: int, rank: int) -> None:
    size = block_size(out, rank=rank)
    assert out % size == 0 and size <= rank
    assert not any(out % larger == 0 for larger in range(size + 1, min(rank, out) + 1))


def test_rank_alpha_and_scale_of_a_layer() -> None:
    """A pattern or a convolution keeps the strength of the update; the first pattern wins."""
    patterns = {"^denoiser\\.narrow": 2, "narrow": 3}
    for chosen, alpha, wanted in (
        (settings(rank_pattern=patterns, conv_rank=8), 6.0,
         {"wide": (4, 1.5), "narrow": (2, 1.5), "c.conv": (8, 1.5), "narrow.conv": (2, 1.5)}),
        (settings(conv_rank=8, conv_alpha=2.0, rank_pattern={"special": 4}), 4.0,
         {"wide": (4, 1.0), "c.conv": (8, 0.25), "special.conv": (4, 0.25)}),
        (settings(rank=16, rslora=True, rank_pattern={"a": 4}), 8.0, {"b": (16, 2.0), "a": (4, 1.0)}),
    ):  # fmt: skip
        for name, (rank, scale) in wanted.items():
            kernel = 9 if name.endswith("conv") else 1
            width = layer_width(f"denoiser.{name}", kernel=kernel, settings=chosen, alpha=alpha)
            assert (width.rank, width.scale) == (rank, pytest.approx(scale)), name
