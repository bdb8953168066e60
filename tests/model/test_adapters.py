"""The adapter of a run: its start, its parameters and groups, its precision, its state."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from lora_trainer.common.errors import RequestError
from lora_trainer.common.randomness import Stream, draw_seed
from lora_trainer.config.learning import AdapterSettings, OptimizerSettings
from lora_trainer.lora.adapter import Adapter, inject
from lora_trainer.lora.tensors import AdapterTensors, update

MODULES = ("first.linear", "second.linear", "second.conv")
KINDS: list[dict[str, Any]] = [
    {},
    {"dora": True},
    {"kind": "loha"},
    {"kind": "lokr", "rank": 1},
    {"kind": "oft"},
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 10)
        self.conv = nn.Conv2d(4, 8, 3, stride=2, padding=1)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()


def network(dtype: torch.dtype = torch.float32) -> Network:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Network().requires_grad_(False).to(dtype)


def adapted(
    *modules: str,
    seed: int = 1,
    net: nn.Module | None = None,
    alpha: float = 8.0,
    text: nn.Module | None = None,
    averaged: bool = False,
    **settings: Any,
) -> Adapter:
    chosen = AdapterSettings.model_validate({"rank": 4, **settings})
    networks, names = {"denoiser": net or network()}, {"denoiser": modules or MODULES}
    if text is not None:
        networks["text_encoder"] = text
        names["text_encoder"] = ("first.linear",)
    return inject(
        networks,
        modules=names,
        settings=chosen,
        alpha=alpha,
        seed=seed,
        averaged=averaged,
    )


def awaken(adapter: Adapter) -> None:
    generator = torch.Generator().manual_seed(17)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def values(adapter: Adapter, module: str, component: str = "denoiser") -> dict[str, Tensor]:
    tensors = adapter.tensors()[f"{component}.{module}"].tensors
    return {name: tensor.clone() for name, tensor in tensors.items()}


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ---- the start


def test_a_lora_starts_at_the_draw_that_its_module_name_always_had() -> None:
    """The trajectory of a run must not depend on the version it was started with."""
    generator = torch.Generator().manual_seed(draw_seed(1, Stream.ADAPTER_INIT, "second.conv"))
    wanted = nn.init.kaiming_uniform_(torch.empty(4, 4, 3, 3), a=math.sqrt(5), generator=generator)
    found = values(adapted(), "second.conv")
    assert torch.equal(found["down"], wanted) and not found["up"].any()


def test_text_encoders_draw_their_own_numbers() -> None:
    adapter = adapted("first.linear", text=network())
    assert list(adapter.layers) == ["denoiser.first.linear", "text_encoder.first.linear"]
    denoiser = values(adapter, "first.linear")
    text = values(adapter, "first.linear", "text_encoder")
    assert not torch.equal(denoiser["down"], text["down"])


@pytest.mark.parametrize("settings", KINDS, ids=str)
def test_a_layer_starts_the_same_whatever_else_is_adapted(settings: dict[str, Any]) -> None:
    torch.manual_seed(5)
    alone = adapted("second.conv", **settings)
    torch.manual_seed(6)
    assert same(values(alone, "second.conv"), values(adapted(**settings), "second.conv"))


@pytest.mark.parametrize("settings", [{}, {"kind": "loha"}, {"kind": "lokr", "rank": 1}], ids=str)
def test_layers_of_one_shape_and_other_seeds_start_differently(settings: dict[str, Any]) -> None:
    one, other = adapted(**settings), adapted(seed=2, **settings)
    first, second = (values(one, name) for name in ("first.linear", "second.linear"))
    assert not same(first, second)
    assert not same(first, values(other, "first.linear"))
    drawn = [tensor for tensor in first.values() if tensor.any()]
    assert len({float(tensor.flatten()[0]) for tensor in drawn}) == len(drawn)


def test_exactly_the_named_modules_are_adapted_and_only_their_parameters_train() -> None:
    """peft takes a name in a list for every name that ends with it."""
    net = network()
    net.outer = Network().requires_grad_(False)
    adapter = adapted("first.linear", "second.conv", net=net)
    found = {name for name, module in net.named_modules() if isinstance(module, LoraLayer)}
    assert found == {"first.linear", "second.conv"}
    trainable = {id(p) for p in net.parameters() if p.requires_grad}
    assert trainable == {id(parameter) for parameter in adapter.parameters()}


def test_ranks_by_pattern_and_for_convolutions_reach_the_layers() -> None:
    adapter = adapted(conv_rank=2, rank_pattern={"first": 3})
    found = {key: (layer.width.rank, layer.width.scale) for key, layer in adapter.layers.items()}
    assert found == {
        "denoiser.first.linear": (3, 2.0),
        "denoiser.second.linear": (4, 2.0),
        "denoiser.second.conv": (2, 2.0),
    }
    assert all(
        len(values(adapter, name)["down"]) == rank
        for name, rank in zip(MODULES, (3, 4, 2), strict=True)
    )


def test_no_module_is_an_error() -> None:
    settings = AdapterSettings()
    with pytest.raises(RequestError, match="no layer of the text encoder 2 matches"):
        inject({}, modules={"text_encoder_2": []}, settings=settings, alpha=4.0, seed=0)


@pytest.mark.parametrize(
    "layer", [nn.LayerNorm(4), nn.Conv2d(4, 4, 3, groups=4), nn.Conv3d(2, 2, 1), nn.Embedding(3, 4)]
)
@pytest.mark.parametrize("kind", ["lora", "oft", "loha"])
def test_other_layers_are_refused_by_name(layer: nn.Module, kind: str) -> None:
    with pytest.raises(RequestError, match=r"cannot change denoiser\.odd: it is a"):
        adapted("odd", net=nn.ModuleDict({"odd": layer}), kind=kind)


# ---- parameter groups


def groups(adapter: Adapter, **settings: Any) -> list[tuple[float, list[nn.Parameter]]]:
    chosen = OptimizerSettings.model_validate({"learning_rate": 1e-3, **settings})
    return [(group["lr_scale"], group["params"]) for group in adapter.groups(chosen)]


def test_a_plain_lora_is_one_group_in_module_order() -> None:
    adapter = adapted()
    [(scale, parameters)] = groups(adapter)
    assert scale == 1.0
    assert [id(p) for p in parameters] == [id(p) for p in adapter.parameters()]
    names = [f"{key}.{name}" for key, layer in adapter.layers.items() for name in layer.parameters]
    assert names == list(adapter.state())


@pytest.mark.parametrize(("rate", "scale"), [(None, 0.5), (2e-4, 0.2)])
def test_text_encoders_learn_at_their_own_rate(rate: float | None, scale: float) -> None:
    adapter = adapted(text=network())
    found = groups(adapter, text_encoder_learning_rate=rate)
    assert [each for each, _ in found] == [1.0, pytest.approx(scale)]
    text = adapter.layers["text_encoder.first.linear"].parameters.values()
    assert {id(p) for p in found[1][1]} == {id(p) for p in text}


def test_lora_plus_speeds_up_the_up_matrices() -> None:
    adapter = adapted()
    slow, fast = groups(adapter, lora_plus_ratio=16.0)
    assert (slow[0], fast[0]) == (1.0, 16.0)
    ups = [layer.parameters["up"] for layer in adapter.layers.values()]
    assert [id(p) for p in fast[1]] == [id(p) for p in ups] and len(slow[1]) == len(ups)


def test_patterns_scale_and_freeze() -> None:
    adapter = adapted(text=network())
    pattern = {"conv": 0.0, r"^second\.": 3.0, "^text_encoder": 0.1}
    found = groups(adapter, learning_rate_pattern=pattern)
    assert [scale for scale, _ in found] == [1.0, 3.0, pytest.approx(0.05)]
    frozen = adapter.layers["denoiser.second.conv"].parameters.values()
    assert not any(parameter.requires_grad for parameter in frozen)
    grouped = {id(parameter) for _, own in found for parameter in own}
    assert grouped == {id(p) for p in adapter.parameters()} and len(grouped) == 6
    assert "denoiser.second.conv.up" in adapter.state(), "a frozen layer is saved all the same"


def test_freezing_everything_is_refused() -> None:
    with pytest.raises(RequestError, match="freezes every layer"):
        groups(adapted(), learning_rate_pattern={".": 0.0})


# ---- rounding


@pytest.mark.parametrize("settings", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounded_computes_what_a_reader_of_the_file_does(
    dtype: torch.dtype, settings: dict[str, Any]
) -> None:
    net, plain = network(), network()
    adapter = adapted("second.conv", net=net, **settings)
    awaken(adapter)
    exact = adapter.state() | {}
    before = {name: tensor.clone() for name, tensor in exact.items()}
    module = adapter.tensors()["denoiser.second.conv"]
    written = {name: tensor.to(dtype).float() for name, tensor in module.tensors.items()}
    image = torch.randn(2, 4, 8, 8)
    unrounded = net.second.conv(image)
    with adapter.rounded(dtype):
        assert same(adapter.tensors()["denoiser.second.conv"].tensors, written)
        live = net.second.conv(image)
    with torch.no_grad():
        read = replace(module, tensors=written)
        plain.second.conv.weight.add_(update(read, plain.second.conv.weight))
    torch.testing.assert_close(live, plain.second.conv(image), rtol=1e-4, atol=1e-5)
    assert same(adapter.state(), before)
    assert torch.equal(net.second.conv(image), unrounded) and not torch.equal(live, unrounded)


def test_rounded_gives_the_bits_back_after_an_error() -> None:
    adapter = adapted()
    before = {name: tensor.clone() for name, tensor in adapter.state().items()}
    with pytest.raises(KeyError), adapter.rounded(torch.bfloat16):
        raise KeyError
    assert same(adapter.state(), before)


def test_rounded_gives_the_bits_back_when_rounding_runs_out_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapter = adapted()
    awaken(adapter)
    before = {name: tensor.clone() for name, tensor in adapter.state().items()}
    to, calls = Tensor.to, list[int]()

    def full(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
        calls.append(1)
        if len(calls) == len(before) // 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return to(tensor, *args, **options)

    monkeypatch.setattr(Tensor, "to", full)
    with pytest.raises(torch.OutOfMemoryError), adapter.rounded(torch.bfloat16):
        raise AssertionError("the block must not run")
    monkeypatch.undo()
    assert len(calls) > 1, "some were rounded already"
    assert same(adapter.state(), before)


# ---- state


@pytest.mark.parametrize("settings", KINDS, ids=str)
def test_a_state_is_restored_into_the_live_parameters(settings: dict[str, Any]) -> None:
    source_net, net = network(), network()
    source = adapted(net=source_net, seed=9, **settings)
    awaken(source)
    saved = {name: tensor.clone() for name, tensor in source.state().items()}
    target = adapted(net=net, **settings)
    live = [id(parameter) for parameter in target.parameters()]
    target.load_state(saved)
    assert [id(parameter) for parameter in target.parameters()] == live
    assert all(parameter.requires_grad for parameter in target.parameters())
    assert same(target.state(), saved)
    image = torch.randn(1, 4, 6, 6)
    assert torch.equal(net.second.conv(image), source_net.second.conv(image))


@pytest.mark.parametrize("other", [{"rank": 8}, {"kind": "loha"}, {"dora": True}], ids=str)
def test_a_state_of_another_adapter_is_refused(other: dict[str, Any]) -> None:
    _refused(adapted(**other))


def test_a_state_of_other_layers_is_refused() -> None:
    _refused(adapted("first.linear"))
    _refused(adapted(*MODULES, "first.conv"))


def _refused(other: Adapter) -> None:
    adapter = adapted()
    before = {name: tensor.clone() for name, tensor in adapter.state().items()}
    with pytest.raises(RequestError, match="another rank or other layers"):
        adapter.load_state(other.state())
    assert same(adapter.state(), before)


def test_state_names_say_component_module_and_tensor() -> None:
    state = adapted("first.linear", text=network()).state()
    keys = [
        f"{component}.first.linear.{side}"
        for component in ("denoiser", "text_encoder")
        for side in ("down", "up")
    ]
    assert list(state) == keys
    assert not any(tensor.requires_grad for tensor in state.values())


# ---- going on from a file


@pytest.mark.parametrize(
    "settings", [{}, {"dora": True}, {"kind": "loha"}, {"kind": "lokr", "rank": 1}], ids=str
)
def test_a_file_of_another_alpha_gives_the_same_update(settings: dict[str, Any]) -> None:
    net = network()
    source = adapted(seed=9, alpha=3.0, **settings)
    awaken(source)
    target = adapted(net=net, alpha=8.0, **settings)
    target.load_tensors(source.tensors())
    weight = network().second.conv.weight
    wanted, found = (
        update(each.tensors()["denoiser.second.conv"], weight) for each in (source, target)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    assert wanted.any() and source.layers["denoiser.second.conv"].width.scale == 3.0 / source.rank


def test_a_file_of_the_same_alpha_is_taken_bit_for_bit() -> None:
    source = adapted(seed=9, alpha=3.0)
    awaken(source)
    target = adapted(alpha=3.0)
    target.load_tensors(source.tensors())
    assert same(target.state(), source.state())


def test_a_linear_layer_written_as_a_convolution_is_taken() -> None:
    source = adapted("first.linear")
    module = source.tensors()["denoiser.first.linear"]
    shaped = {name: tensor[..., None, None] for name, tensor in module.tensors.items()}
    target = adapted("first.linear", seed=2)
    target.load_tensors({"denoiser.first.linear": replace(module, tensors=shaped)})
    assert same(target.state(), source.state())


@pytest.mark.parametrize(
    ("other", "found", "fix"),
    [
        ({"kind": "loha"}, "holds a loha adapter, this run trains lora", "adapter.kind=loha"),
        ({"dora": True}, "holds a lora dora adapter", "adapter.dora=true"),
        ({"rank": 8}, "has rank 8 in denoiser.first.linear, this run has 4", "adapter.rank"),
        ({"conv_rank": 2}, "has rank 2 in denoiser.second.conv", "conv_rank"),
    ],
    ids=str,
)
def test_a_file_of_another_adapter_is_refused_by_what_differs(
    other: dict[str, Any], found: str, fix: str
) -> None:
    adapter = adapted()
    before = {name: tensor.clone() for name, tensor in adapter.state().items()}
    with pytest.raises(RequestError) as error:
        adapter.load_tensors(adapted(**other).tensors())
    assert found in error.value.found and fix in error.value.fix
    assert same(adapter.state(), before)


def test_a_file_of_other_layers_is_refused_with_the_settings_to_look_at() -> None:
    def refusal(tensors: AdapterTensors) -> RequestError:
        with pytest.raises(RequestError) as error:
            adapted().load_tensors(tensors)
        return error.value

    fewer = refusal(adapted("first.linear", "second.linear").tensors())
    assert "changes 0 layers" in fewer.found and "lacks 1" in fewer.found
    assert "second.conv" in fewer.found and "text_encoder" not in fewer.fix
    text = refusal(adapted(text=network()).tensors())
    assert "changes 1 layers" in text.found and "adapter.text_encoder" in text.fix


# ---- the running average


def live(adapter: Adapter) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in adapter.parameters()]


@pytest.mark.parametrize("settings", KINDS, ids=str)
@pytest.mark.parametrize("decay", [0.5, 0.99])
def test_the_average_is_its_formula(settings: dict[str, Any], decay: float) -> None:
    """avg <- d avg + (1 - d) w with d = min(decay, step / (step + 9)), in float64."""
    adapter = adapted(averaged=True, **settings)
    wanted = [value.double() for value in live(adapter)]
    for step in range(1, 30):
        awaken(adapter)
        adapter.update_average(step, decay=decay)
        share = min(decay, step / (step + 9))
        wanted = [share * a + (1 - share) * b for a, b in zip(wanted, live(adapter), strict=True)]
    before = live(adapter)
    with adapter.averaged():
        found = live(adapter)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)
    assert not all(torch.equal(a, b) for a, b in zip(found, before, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(live(adapter), before, strict=True))


def test_weights_come_back_after_an_error_and_keep_their_gradients() -> None:
    adapter = adapted(averaged=True)
    awaken(adapter)
    before, parameters = live(adapter), adapter.parameters()
    with pytest.raises(ZeroDivisionError), adapter.averaged():
        assert not torch.equal(live(adapter)[1], before[1])
        raise ZeroDivisionError
    assert all(torch.equal(a, b) for a, b in zip(live(adapter), before, strict=True))
    assert all(one is other for one, other in zip(adapter.parameters(), parameters, strict=True))
    assert all(parameter.requires_grad for parameter in adapter.parameters())


def test_the_average_is_part_of_the_state_and_comes_back() -> None:
    adapter, other = adapted(averaged=True), adapted(averaged=True, seed=2)
    awaken(adapter)
    adapter.update_average(1, decay=0.9)
    state = {name: tensor.clone() for name, tensor in adapter.state().items()}
    averages = [name for name in state if name.startswith("average.")]
    assert len(averages) == len(adapter.parameters())
    other.load_state(state)
    assert same(other.state(), state)
    with pytest.raises(RequestError, match="belongs to an adapter of another"):
        adapted().load_state(state)


def test_rounded_weights_leave_the_average_alone() -> None:
    adapter = adapted(averaged=True)
    awaken(adapter)
    adapter.update_average(1, decay=0.9)
    state = {name: tensor.clone() for name, tensor in adapter.state().items()}
    with adapter.averaged(), adapter.rounded(torch.bfloat16):
        shown = values(adapter, "first.linear")
        assert torch.equal(shown["up"], shown["up"].bfloat16().float())
        up = state["average.denoiser.first.linear.up"]
        assert torch.equal(shown["up"], up.bfloat16().float())
    assert same(adapter.state(), state)


def test_an_average_starts_at_the_file_that_is_gone_on_from() -> None:
    first, second = adapted(seed=3), adapted(averaged=True)
    awaken(first)
    second.load_tensors(first.tensors())
    with second.averaged():
        assert same(values(second, "second.conv"), values(first, "second.conv"))
