"""Modulation layers outside the network against layers in it: the same bits, no weights where it computes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lora_trainer import families
from lora_trainer.config.config import CHECKPOINTING
from lora_trainer.network.block_swap import base_tensors, stream_blocks
from lora_trainer.network.checkpointing import apply_checkpointing
from lora_trainer.network.modulation import ModulatedNetwork, ModulationLayer
from lora_trainer.network.quantize import quantize
from tests.fakes.family_bases import CPU
from tests.fakes.late_copies import LateCopies
from tests.fakes.trainee import PROMPTS, Trainee, same, trainee

NAMES = [name for name in families.MODULES if families.family(name).modulation]
FAMILIES = pytest.mark.parametrize("name", NAMES)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny tensors on several threads are slower."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def taken_out(at: Trainee) -> ModulatedNetwork:
    endings = tuple(f".{ending}" for ending in at.family.modulation)
    names = [name for name in at.family.lora_targets(at.denoiser, "all") if name.endswith(endings)]
    return ModulatedNetwork(at.denoiser, names, device=CPU)


def rows(at: Trainee, network: ModulatedNetwork, *parts: slice) -> list[torch.Tensor]:
    """Return what the layers give for these parts of the batch."""
    names = at.family.modulated_by(at.facts)
    inputs = [
        at.family.modulation_input(
            at.denoiser,
            at.timesteps[part],
            {name: at.conditioning[name][part] for name in names},
            dtype=torch.float32,
        )
        for part in parts
    ]
    return network.outputs(inputs)


def test_the_families_are_those_with_a_quarter_of_their_weights_there() -> None:
    assert set(NAMES) == {"flux", "qwen", "sd3"}
    for name in NAMES:
        family = families.family(name)
        facts = family.facts_from_hub_id(family.default_source)
        assert facts is not None
        shapes, layers = family.linear_shapes(facts), family.modulation_layers(facts)
        share = sum(shapes[layer][0] * shapes[layer][1] for layer in layers)
        assert 0.2 < share / facts.parts["denoiser"].parameters < 0.35


@FAMILIES
def test_the_input_is_what_the_network_gives_its_layers(name: str) -> None:
    """And the layers are all that it is given to, but for the last of the network and of its texts."""
    at, seen = trainee(name), list[tuple[str, torch.Tensor]]()
    expected = at.family.modulation_input(
        at.denoiser, at.timesteps, at.conditioning, dtype=torch.float32
    )
    for layer, module in at.denoiser.named_modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(
                lambda _, inputs, layer=layer: seen.append((layer, inputs[0]))
            )
    with torch.no_grad():
        at.predict()
    given = {layer for layer, inputs in seen if torch.equal(inputs, expected)}
    endings = tuple(f".{ending}" for ending in at.family.modulation)
    named = {layer for layer, _ in seen if layer.endswith(endings)}
    assert given - named <= {"norm_out.linear"}
    assert named <= given


@FAMILIES
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_steps_are_the_same_bits(name: str, checkpointing: Any) -> None:
    at = trainee(name)
    apply_checkpointing(at.denoiser, checkpointing)
    whole, split = at.gradients(), at.gradients(micro_batch=1)
    network = taken_out(at)
    apply_checkpointing(at.denoiser, checkpointing)
    (all_rows,) = rows(at, network, slice(None))
    loads = network.loads
    assert loads == len(network.names) > 3
    with network.giving(all_rows):
        assert same(at.gradients(), whole)
    parts = [slice(index, index + 1) for index in range(len(PROMPTS))]
    found = []
    for part, own in zip(parts, rows(at, network, *parts), strict=True):
        with network.giving(own):
            loss = at.loss(part)
            loss.backward()
            found.append(loss.detach())
    grads = [parameter.grad for parameter in at.parameters]
    assert same([torch.stack(found), *(grad for grad in grads if grad is not None)], split)
    assert network.loads == 2 * loads, "a weight came for a single pass"


@FAMILIES
def test_rows_of_other_parts_of_a_batch_differ_by_rounding_alone(name: str) -> None:
    at = trainee(name)
    network = taken_out(at)
    (together,) = rows(at, network, slice(None))
    apart = rows(at, network, slice(0, 1), slice(1, 2))
    torch.testing.assert_close(torch.cat(apart), together, rtol=1e-5, atol=1e-6)


@FAMILIES
def test_a_pass_that_was_not_foreseen_has_its_weights_brought(name: str) -> None:
    at = trainee(name)
    apply_checkpointing(at.denoiser, "full")
    whole = at.gradients()
    with torch.no_grad():
        predicted = at.predict()
    network = taken_out(at)
    with torch.no_grad():
        assert torch.equal(at.predict(), predicted)
        assert torch.equal(at.predict(), predicted)
    assert network.loads <= 2 * len(network.names) + 1, "the next layer was not on its way"
    assert same(at.gradients(), whole)


@FAMILIES
def test_the_network_has_none_of_the_weights(name: str) -> None:
    at = trainee(name)
    weights = {key: tensor.clone() for key, tensor in at.denoiser.state_dict().items()}
    network = taken_out(at)
    gone = weights.keys() - at.denoiser.state_dict().keys()
    assert gone == {f"{layer}.{part}" for layer in network.names for part in ("weight", "bias")}
    at.denoiser.to("meta")  # what is in the network follows it, what is not stays
    assert network.host_bytes >= sum(weights[key].nbytes for key in gone)
    for layer in network.names:
        module = at.denoiser.get_submodule(layer)
        assert isinstance(module, ModulationLayer)
        assert not list(base_tensors(module))
    assert network.buffer_bytes < network.host_bytes


@pytest.mark.parametrize("kind", ["int8", "fp8", "nf4"])
@FAMILIES
def test_quantised_layers_are_taken_out_as_they_are(name: str, kind: Any) -> None:
    at = trainee(name, prepare=partial(quantize, kind=kind, device=CPU))
    whole = at.gradients()
    plain = taken_out(trainee(name)).host_bytes
    network = taken_out(at)
    (all_rows,) = rows(at, network, slice(None))
    with network.giving(all_rows):
        assert same(at.gradients(), whole)
    assert network.host_bytes < 0.6 * plain


@FAMILIES
def test_streamed_blocks_do_not_carry_them(name: str) -> None:
    at, other = trainee(name), trainee(name)
    apply_checkpointing(at.denoiser, "full")
    whole = at.gradients()
    network = taken_out(at)
    apply_checkpointing(at.denoiser, "full")
    streamed, plain = (
        stream_blocks(each.denoiser, count=2, device=CPU) for each in (at, _checkpointed(other))
    )
    assert streamed.host_bytes < 0.9 * plain.host_bytes
    (all_rows,) = rows(at, network, slice(None))
    with network.giving(all_rows):
        assert same(at.gradients(), whole)


def _checkpointed(at: Trainee) -> Trainee:
    apply_checkpointing(at.denoiser, "full")
    return at


@FAMILIES
def test_a_copy_is_waited_for_before_it_is_used(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    at = trainee(name)
    whole = at.gradients()
    monkeypatch.setattr("lora_trainer.network.modulation.CopyStream", LateCopies)
    network = taken_out(at)
    (all_rows,) = rows(at, network, slice(None))
    with network.giving(all_rows):
        assert same(at.gradients(), whole)
    assert same(at.gradients(), whole)


def test_rows_of_another_pass_are_refused() -> None:
    at = trainee("qwen")
    network = taken_out(at)
    (one,) = rows(at, network, slice(0, 1))
    with network.giving(one), pytest.raises(AssertionError, match="of another pass"):
        at.predict()
    assert network.rows is None
