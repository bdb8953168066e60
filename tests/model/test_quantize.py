"""A frozen base in 4 or 8 bits: what is stored, what is computed from it, and the gradients it gives."""

from __future__ import annotations

import sys
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lora_trainer import families
from lora_trainer.common.errors import MachineError
from lora_trainer.config import declare
from lora_trainer.config.learning import AdapterSettings
from lora_trainer.families.base.layout import DENOISER
from lora_trainer.lora.adapter import inject
from lora_trainer.lora.tensors import update
from lora_trainer.network import quantize as quantizing
from lora_trainer.network.quantize import QuantizedLinear, quantizable, quantize
from tests.fakes.family_bases import CPU

KINDS = pytest.mark.parametrize("kind", ["int8", "fp8", "nf4"])
ADAPTERS: list[dict[str, Any]] = [
    {},
    {"dora": True},
    {"kind": "loha"},
    {"kind": "lokr", "rank": 1},
    {"kind": "oft"},
]


def linear(
    inputs: int = 48, out: int = 40, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> nn.Linear:
    generator = torch.Generator().manual_seed(seed)
    layer = nn.Linear(inputs, out).requires_grad_(False)
    layer.weight.copy_(torch.randn(out, inputs, generator=generator) / inputs**0.5)
    layer.bias.copy_(torch.randn(out, generator=generator))
    return layer.to(dtype)


def quantized(layer: nn.Linear, kind: Any) -> QuantizedLinear:
    return QuantizedLinear(layer, kind, device=CPU)


def plain(layer: QuantizedLinear) -> nn.Linear:
    """Return the ordinary layer that a quantised one stands for."""
    made = nn.Linear(layer.in_features, layer.out_features).requires_grad_(False)
    made.weight.copy_(layer.weight)
    made.bias.copy_(layer.bias)
    return made


@pytest.mark.parametrize("adapter", [{}, {"kind": "loha"}, {"kind": "lokr", "rank": 1}])
def test_no_weight_is_restored_to_be_given_an_adapter(
    adapter: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    network = nn.Sequential(quantized(linear(seed=1), "int8"), quantized(linear(40), "int8"))
    restored: list[QuantizedLinear] = []
    real = QuantizedLinear.restored
    monkeypatch.setattr(
        QuantizedLinear,
        "restored",
        lambda layer, stored: restored.append(layer) or real(layer, stored),
    )
    made = inject(
        {DENOISER: network},
        modules={DENOISER: ["0", "1"]},
        settings=AdapterSettings(**{"rank": 4, **adapter}),
        alpha=4.0,
        seed=1,
    )
    assert len(made.layers) == 2 and not restored
    network(torch.ones(2, 48))
    assert len(restored) >= 2  # they have their values again


# ---- what is stored


@KINDS
@settings(deadline=None, max_examples=25)
@given(inputs=st.integers(1, 300), out=st.integers(1, 130))
def test_a_predicted_byte_is_a_stored_byte(kind: Any, inputs: int, out: int) -> None:
    layer = quantized(linear(inputs, out), kind)
    stored_bytes = sum(buffer.nbytes for buffer in layer.buffers())
    assert stored_bytes == declare.weight_bytes(fan_in=inputs, out=out, precision=kind)
    assert [name for name, _ in layer.named_parameters()] == ["bias"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_is_off_by_no_more_than_its_bits_say(dtype: torch.dtype) -> None:
    layer = linear(dtype=dtype)
    exact, rows = layer.weight.double(), layer.weight.double().abs().amax(dim=1, keepdim=True)
    rounding = torch.finfo(dtype).eps * rows
    int8 = quantized(layer, "int8").weight
    fp8 = quantized(layer, "fp8").weight
    assert int8.dtype == fp8.dtype == dtype
    assert bool(((int8.double() - exact).abs() <= rows / 254 + rounding).all())
    # Three bits of mantissa; the smallest numbers have a fixed step, 2**-9 of 448.
    step = torch.maximum(exact.abs() / 16, rows / 448 / 2**10)
    assert bool(((fp8.double() - exact).abs() <= step + rounding).all())
    # Sixteen levels for normal numbers, and scales in 8 bits (Dettmers et al. 2023): a tenth.
    nf4 = quantized(layer, "nf4").weight
    assert (nf4.double() - exact).norm() < 0.15 * exact.norm()


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rows_of_zeros_and_of_very_large_and_small_numbers_stay_finite(
    kind: Any, dtype: torch.dtype
) -> None:
    layer = linear(64, 4, dtype=dtype)
    for row, value in enumerate((0.0, 6e4, 6e-8, 9e-43)):  # the last over its scale is 642 in fp8
        layer.weight[row] = value
    found = quantized(layer, kind).weight
    assert bool(found.isfinite().all())
    assert not found[0].any()
    torch.testing.assert_close(found[1], layer.weight[1], rtol=0.01, atol=0)


# ---- what is computed from it


@KINDS
@pytest.mark.parametrize("shape", [(48,), (3, 48), (2, 5, 48)])
def test_a_quantised_layer_is_the_plain_layer_of_its_weight(
    kind: Any, shape: tuple[int, ...]
) -> None:
    """Forward and backward: all the loss of precision is in the weight."""
    layer = quantized(linear(), kind)
    generator = torch.Generator().manual_seed(2)
    inputs, weights = torch.randn(shape, generator=generator), None
    found = []
    for each in (layer, plain(layer)):
        x = inputs.clone().requires_grad_()
        output = each(x)
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(3))
        (output * weights).sum().backward()
        found.append((output.detach(), x.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-6)


@KINDS
def test_nothing_but_what_is_stored_is_kept_and_all_is_in_the_dtype_of_the_network(
    kind: Any,
) -> None:
    layer = QuantizedLinear(linear(dtype=torch.bfloat16), kind, device=CPU)
    x = torch.randn(1, 3, 48, dtype=torch.bfloat16, requires_grad=True)
    kept: list[Tensor] = []
    keep = lambda tensor: kept.append(tensor) or tensor  # noqa: E731 - shorter than a function
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = layer(x)
    outputs.float().sum().backward()
    assert x.grad is not None
    assert outputs.dtype == layer.weight.dtype == x.grad.dtype == torch.bfloat16
    own = {buffer.untyped_storage().data_ptr() for buffer in layer.buffers()}
    assert kept and {tensor.untyped_storage().data_ptr() for tensor in kept} <= own


# ---- which layers


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.conv = nn.Linear(8, 8), nn.Conv2d(2, 2, 1)
        self.norm, self.time = nn.LayerNorm(8), nn.Linear(8, 8)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Sequential(nn.Linear(8, 8), nn.SiLU())
        self.blocks = nn.ModuleList([Block(), Block()])
        self.blocks_out = nn.Linear(8, 8)


def test_linear_layers_of_repeated_blocks_are_quantised_and_nothing_else() -> None:
    net = Network().requires_grad_(False).eval()
    wanted = {f"blocks.{index}.{name}": (8, 8) for index in (0, 1) for name in ("linear", "time")}
    assert quantizable(net) == wanted
    quantize(net, "int8", device=CPU, skip={"time"})
    found = {name for name, module in net.named_modules() if isinstance(module, QuantizedLinear)}
    assert found == {"blocks.0.linear", "blocks.1.linear"}
    assert not any(module.training for module in net.modules())
    assert quantizable(net, skip={"time"}) == {}, "what is quantised is not quantised again"


@pytest.mark.parametrize("name", families.NAMES)
def test_a_family_keeps_its_embeddings_and_most_of_its_weights_are_quantised(name: str) -> None:
    """On the default release's true size, without a weight."""
    family = families.family(name)
    with torch.device("meta"):
        network = family.training_denoiser(family.published[0].architecture)
    found = quantizable(network, skip=family.traits.quantization_skip)
    linears = {
        key: layer.in_features * layer.out_features
        for key, layer in network.named_modules()
        if isinstance(layer, nn.Linear)
    }
    kept = linears.keys() - found.keys()
    share = sum(linears[key] for key in found) / sum(linears.values())
    assert share > 0.89, sorted(kept)
    edges = ("proj_out", "x_embedder", "context_embedder", "img_in", "txt_in", "norm_out.linear")
    assert not found.keys() & set(edges)
    assert not any("time_embed" in key or "time_emb_proj" in key for key in found)


@KINDS
def test_each_layer_is_freed_before_the_next_is_quantised(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peak is the network being quantised and one layer's temporaries."""
    net = Network().requires_grad_(False)
    weights = [weakref.ref(net.get_submodule(name).weight) for name in quantizable(net)]
    alive: list[int] = []
    made = QuantizedLinear.__init__

    def counting(self: QuantizedLinear, *args: Any, **kwargs: Any) -> None:
        alive.append(sum(weight() is not None for weight in weights))
        made(self, *args, **kwargs)

    monkeypatch.setattr(QuantizedLinear, "__init__", counting)
    quantize(net, kind, device=CPU)
    assert alive == [4, 3, 2, 1]
    assert not any(weight() is not None for weight in weights)


def test_a_missing_bitsandbytes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    net = Network().requires_grad_(False)
    with pytest.raises(MachineError, match="nf4 needs bitsandbytes"):
        quantize(net, "nf4", device=CPU)
    quantize(net, "fp8", device=CPU)


# ---- adapters on top


def test_layers_are_chosen_without_restoring_a_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a large base on the host that took minutes."""
    family = families.family("zimage")
    network = nn.Module()
    network.layers = nn.ModuleList([nn.Module()])
    ending = family.traits.endings["attention"][0]
    place, _, last = ending.rpartition(".")
    parent = network.layers[0]
    for name in filter(None, place.split(".")):
        parent.add_module(name, nn.Module())
        parent = parent.get_submodule(name)
    parent.add_module(last, quantized(linear(), "int8"))

    def restored(*_: Any) -> None:
        raise AssertionError("a weight was restored")

    monkeypatch.setattr(QuantizedLinear, "restored", restored)
    assert family.lora_targets(network, "attention") == [f"layers.0.{ending}"]


@KINDS
@pytest.mark.parametrize("values", ADAPTERS, ids=str)
def test_an_adapter_of_any_kind_changes_the_weight_that_is_stored(
    kind: Any, values: dict[str, Any]
) -> None:
    layer = quantized(linear(), kind)
    net, stands_for = nn.Sequential(layer), plain(layer)
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(3, 48, generator=generator)
    adapter = inject(
        {DENOISER: net},
        modules={DENOISER: ("0",)},
        settings=AdapterSettings.model_validate({"rank": 4, **values}),
        alpha=4.0,
        seed=1,
    )
    torch.testing.assert_close(net(inputs), stands_for(inputs), rtol=1e-5, atol=1e-5)
    with torch.no_grad():  # while one factor is zero the other has no gradient
        for parameter in adapter.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    net(inputs).square().sum().backward()
    assert all(
        parameter.dtype == torch.float32 and parameter.grad is not None and parameter.grad.any()
        for parameter in adapter.parameters()
    )
    found = adapter.layers["denoiser.0"]
    stands_for.weight.add_(update(found.tensors(), stands_for.weight))
    torch.testing.assert_close(net(inputs), stands_for(inputs), rtol=1e-4, atol=1e-5)


def test_a_layer_is_quantised_on_the_device_and_stays_where_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A network too large for the device is loaded into host memory, and may stay there."""
    moves: list[str] = []

    def encode(weight: Tensor) -> dict[str, Tensor]:
        moves.append(f"quantised on {weight.device}")
        codes: Any = torch.zeros(1)
        codes.to = lambda device: moves.append(f"kept on {device}") or codes
        return {"codes": codes}

    monkeypatch.setitem(quantizing._CODECS, "int8", (encode, quantizing._decode_scaled))  # type: ignore[arg-type]
    quantize(Network(), "int8", device=torch.device("meta"), skip={"time"})
    assert moves == ["quantised on meta", "kept on cpu"] * 2
