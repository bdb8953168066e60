"""Networks that compute beside where they lie: the same numbers, and the CPU to their callers."""

from __future__ import annotations

import pytest
import torch
from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

from lora_trainer.network.block_swap import offload

CPU = torch.device("cpu")
IDS = torch.arange(8).reshape(1, 8)


def t5() -> torch.nn.Module:
    torch.manual_seed(0)
    config = T5Config(vocab_size=20, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4)
    return T5EncoderModel(config).eval().requires_grad_(False)


def clip() -> torch.nn.Module:
    torch.manual_seed(0)
    config = CLIPTextConfig(
        vocab_size=20,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        bos_token_id=0,
        eos_token_id=1,
    )
    return CLIPTextModel(config).eval().requires_grad_(False)


@pytest.mark.parametrize("network", [t5(), clip()], ids=["t5", "clip"])
def test_an_offloaded_network_gives_the_same_bits_on_the_cpu(network: torch.nn.Module) -> None:
    with torch.no_grad():
        before = network(IDS, output_hidden_states=True)
        offload(network, CPU)
        after = network(IDS, output_hidden_states=True)
    assert type(after) is type(before)
    assert torch.equal(after[0], before[0])
    for one, other in zip(after.hidden_states, before.hidden_states, strict=True):
        assert torch.equal(one, other)
        assert one.device == CPU
    assert next(network.parameters()).device == CPU


def test_layers_are_only_on_the_device_while_they_run() -> None:
    """Each linear layer is brought and taken away once for a pass."""
    network = clip()
    offload(network, CPU)
    hooked = [module for module in network.modules() if hasattr(module, "_diffusers_hook")]
    layers = [module for module in network.modules() if isinstance(module, torch.nn.Linear)]
    assert layers and all(layer in hooked for layer in layers)
