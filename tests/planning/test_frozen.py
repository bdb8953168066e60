"""Bytes of a frozen base: as `network/quantize.py` stores them and `network/block_swap.py` moves them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lora_trainer.families import MODULES, family
from lora_trainer.network.block_swap import repeated_blocks
from lora_trainer.network.quantize import QuantizedLinear, quantizable, quantize
from lora_trainer.planning.loads import RememberedCosts
from tests.fakes.family_bases import denoiser_of, facts_of
from tests.fakes.plans import load_of

CPU = torch.device("cpu")


def frozen(name: str, kept_as: Any) -> Any:
    costs = RememberedCosts(family=family(name), facts=facts_of(name))
    return costs.frozen_base(load_of(precision="fp32", base_precision=kept_as))


@pytest.mark.parametrize("name", MODULES)
def test_the_layers_counted_are_those_that_are_quantised(name: str) -> None:
    """Or nearly: what no adapter can change is not in the table, so a little less is counted."""
    counted = frozen(name, "int8").shapes
    real = quantizable(denoiser_of(name), skip=family(name).traits.quantization_skip)
    assert counted.items() <= real.items()
    left_out = sum(fan_in * out for key, (fan_in, out) in real.items() if key not in counted)
    assert left_out <= 0.25 * sum(fan_in * out for fan_in, out in real.values())


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_predicted_bytes_are_stored_bytes(name: str, kind: Any) -> None:
    network, counted = denoiser_of(name), frozen(name, kind)
    quantize(network, kind, device=CPU, skip=family(name).traits.quantization_skip)
    for module, size in counted.layer_bytes.items():
        layer = network.get_submodule(module)
        assert isinstance(layer, QuantizedLinear)
        assert layer.stored_bytes == size, module
    assert counted.bytes == counted.linear_bytes + counted.other_bytes


@pytest.mark.parametrize("name", MODULES)
def test_blocks_are_those_that_can_be_streamed(name: str) -> None:
    blocks = repeated_blocks(denoiser_of(name))
    counted = frozen(name, "fp32").block_bytes
    assert len(counted) == len(blocks)
    for size, block in zip(counted, blocks.values(), strict=True):
        real = sum(parameter.nbytes for parameter in block.parameters())
        assert 0.5 * real < size <= real
