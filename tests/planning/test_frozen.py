"""Bytes of a frozen base: as `network/quantize.py` stores them and `network/block_swap.py` moves them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lora_trainer.costs.base_costs import BaseCosts
from lora_trainer.families import MODULES, family
from lora_trainer.network.block_swap import repeated_blocks
from lora_trainer.network.quantize import QuantizedLinear, quantizable, quantize
from tests.fakes.family_bases import denoiser_of, facts_of

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", MODULES)
def test_the_bytes_and_blocks_of_a_base_are_those_of_its_network(name: str) -> None:
    """Or nearly: what no adapter can change is not in the table, so a little less is counted."""
    skip = family(name).traits.quantization_skip
    costs = BaseCosts(family=family(name), facts=facts_of(name))
    network, counted = denoiser_of(name), costs.frozen_base("fp32", "fp32")
    blocks = repeated_blocks(network)
    assert len(counted.block_bytes) == len(blocks)
    for size, block in zip(counted.block_bytes, blocks.values(), strict=True):
        real_bytes = sum(parameter.nbytes for parameter in block.parameters())
        assert 0.5 * real_bytes < size <= real_bytes
    real = quantizable(network, skip=skip)
    assert counted.shapes.items() <= real.items()
    left_out = sum(fan_in * out for key, (fan_in, out) in real.items() if key not in counted.shapes)
    assert left_out <= 0.25 * sum(fan_in * out for fan_in, out in real.values())
    kind: Any = "nf4" if name in ("sd15", "flux") else "int8"
    counted = costs.frozen_base("fp32", kind)
    quantize(network, kind, device=CPU, skip=skip)
    for module, size in counted.layer_bytes.items():
        layer = network.get_submodule(module)
        assert isinstance(layer, QuantizedLinear)
        assert sum(buffer.nbytes for buffer in layer.buffers()) == size, module
