"""The adapter of a run, of every kind: its start, its update, its groups, its precision, its state."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from peft.tuners.lokr.layer import factorization
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lora_trainer.common.errors import RequestError
from lora_trainer.common.randomness import Stream, draw_seed
from lora_trainer.config.learning import AdapterSettings
from lora_trainer.config.optimizers import OptimizerSettings
from lora_trainer.lora.adapter import Adapter, inject
from lora_trainer.lora.adapter_size import adapter_tensors
from lora_trainer.lora.tensors import update
from tests.fakes.small_network import adapted, awaken, images, network

KINDS: list[dict[str, Any]] = [
    {},
    {"rslora": True},
    {"dora": True},
    {"kind": "loha"},
    {"kind": "lokr"},
    {"kind": "lokr", "rank": 1},
    {"kind": "lokr", "rank": 1, "lokr_factor": 2},
    {"kind": "oft"},
]
BY_KIND = pytest.mark.parametrize("kind", KINDS, ids=str)


def saved(adapter: Adapter) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in adapter.state().items()}


def same(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# ---- the update


@hypothesis_settings(max_examples=50)
@given(
    kind=st.sampled_from(KINDS),
    inputs=st.integers(1, 9),
    out=st.integers(1, 12),
    rank=st.integers(1, 6),
    conv_rank=st.none() | st.integers(1, 3),
    alpha=st.floats(0.5, 9.0),
    bias=st.booleans(),
)
def test_any_shape_and_rank_is_that_of_the_updated_weights(
    kind: dict[str, Any],
    inputs: int,
    out: int,
    rank: int,
    conv_rank: int | None,
    alpha: float,
    bias: bool,
) -> None:
    net = network(inputs=inputs, out=out, bias=bias).double()
    merged, base = copy.deepcopy(net), copy.deepcopy(net).float()
    adapter = adapted(net.float(), alpha=alpha, **{"rank": rank, "conv_rank": conv_rank, **kind})
    awaken(adapter)
    for key, module in adapter.tensors().items():
        weight = merged.get_submodule(key.removeprefix("denoiser.")).get_parameter("weight")
        weight.add_(update(module, weight))
    image = torch.randn(1, inputs, 4, 4)
    outputs, trainable = net(image), [p.requires_grad for p in adapter.parameters()]
    torch.testing.assert_close(outputs.double(), merged(image.double()), rtol=1e-4, atol=1e-4)
    with pytest.raises(KeyError), adapter.off():
        assert torch.equal(net(image), base(image))
        raise KeyError
    assert torch.equal(net(image), outputs)
    assert [p.requires_grad for p in adapter.parameters()] == trainable


@BY_KIND
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_update_starts_at_zero_and_the_first_step_changes_every_layer(
    kind: dict[str, Any], dtype: torch.dtype
) -> None:
    """Masters are float32, and no random number of peft's decides whether a layer takes part."""
    net = network(dtype).train()
    plain = copy.deepcopy(net)
    adapter = adapted(net, **kind)
    image = images(2).to(dtype)
    with pytest.MonkeyPatch.context() as patch:
        # peft drops a LoHa or LoKr layer when torch.rand(1) is 0.0, once in 2**24 passes.
        patch.setattr(torch, "rand", lambda *_, **__: torch.zeros(1))
        live, base = net(image), plain(image)
    assert live.dtype == dtype
    # Products come from kernels that round differently; one sums the bias first.
    rounding = 2 * torch.finfo(dtype).eps * float(base.abs().max())
    is_lora = kind.get("kind", "lora") == "lora"
    torch.testing.assert_close(live, base, rtol=0, atol=rounding if is_lora else 0)
    live.float().square().mean().backward()
    for layer in adapter.layers.values():
        assert any(p.grad is not None and p.grad.any() for p in layer.parameters.values())
        assert all(p.dtype == torch.float32 and p.is_leaf for p in layer.parameters.values())


@BY_KIND
def test_what_autograd_keeps_grows_with_the_tokens_not_with_tokens_times_ranks(
    kind: dict[str, Any],
) -> None:
    """A rotation written as a broadcast product kept one copy of its matrices for every token."""
    net = nn.ModuleDict({"linear": nn.Linear(32, 64)}).requires_grad_(False)
    adapted(net, "linear", **{**kind, "rank": 16})
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    tokens = torch.randn(256, 32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        held = net["linear"](tokens)
    assert sum(kept.values()) < 4 * (256 * (32 + 3 * 64) + 3 * 32 * 64)
    assert held.shape == (256, 64)


# ---- the start


@pytest.mark.parametrize("settings", [{}, {"kind": "loha"}, {"kind": "lokr", "rank": 1}], ids=str)
def test_a_layer_starts_by_its_name_and_the_seed_whatever_else_is_adapted(
    settings: dict[str, Any],
) -> None:
    """The trajectory of a run must not depend on the version it was started with."""
    alone = adapted(None, "conv", **settings).state()
    together = adapted(text=network(), **settings).state()
    other = adapted(seed=2, **settings).state()
    if not settings:
        generator = torch.Generator().manual_seed(draw_seed(1, Stream.ADAPTER_INIT, "conv"))
        wanted = torch.empty(4, 6, 3, 3)
        nn.init.kaiming_uniform_(wanted, a=math.sqrt(5), generator=generator)
        assert torch.equal(alone["denoiser.conv.down"], wanted)
        assert not torch.equal(
            together["denoiser.linear.down"], together["text_encoder.linear.down"]
        )
    assert not any(tensor.requires_grad for tensor in together.values())
    assert all(torch.equal(alone[name], together[name]) for name in alone)
    drawn = [name for name in alone if alone[name].any()]
    assert drawn and not any(torch.equal(together[name], other[name]) for name in drawn)
    assert len({float(alone[name].flatten()[0]) for name in drawn}) == len(drawn)


class Waits(TorchDispatchMode):
    """Counts the calls whose answer the host would wait for on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found = list[str]()
        self._drawn_on_host = False

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = str(function)
        if "rand" in name:  # peft asks the processor's generator whether a module is dropped
            self._drawn_on_host = True
        elif "_local_scalar_dense" in name and self._drawn_on_host:
            self._drawn_on_host = False
        elif "_local_scalar_dense" in name or "check_errors" in name or "nonzero" in name:
            self.found.append(name)
        return function(*args, **(kwargs or {}))


@BY_KIND
def test_a_pass_through_an_adapter_waits_for_no_answer_of_the_device(kind: dict[str, Any]) -> None:
    net = network()
    adapter = adapted(net, **{"rank": 2, "conv_rank": 2, **kind})
    awaken(adapter)
    with Waits() as waits:
        net(images()).square().mean().backward()
    assert waits.found == []


def test_exactly_the_named_modules_are_adapted_at_their_ranks() -> None:
    """peft takes a name in a list for every name that ends with it."""
    net = nn.ModuleDict({"linear": nn.Linear(6, 8), "outer": network()}).requires_grad_(False)
    names = ("linear", "outer.linear", "outer.conv")
    adapter = adapted(net, *names, conv_rank=2, rank_pattern={"^outer.linear": 3})
    assert {name for name, each in net.named_modules() if isinstance(each, LoraLayer)} == {*names}
    trainable = {id(parameter) for parameter in net.parameters() if parameter.requires_grad}
    assert trainable == {id(parameter) for parameter in adapter.parameters()}
    assert [len(adapter.state()[f"denoiser.{name}.down"]) for name in names] == [4, 3, 2]
    # Readers ignore the alpha of a LoKr of full factors.
    for rank, tensors, scale in ((4, {"w1", "w2"}, 1.0), (1, {"w1", "w2_a", "w2_b"}, 2.0)):
        module = adapted(kind="lokr", rank=rank, alpha=2.0).tensors()["denoiser.linear"]
        assert (set(module.tensors), module.scale) == (tensors, scale)


@pytest.mark.parametrize(
    ("settings", "alpha", "widths"),
    [
        ({"rank_pattern": {"^denoiser\\.linear": 2, "lin": 3}, "conv_rank": 8}, 6.0,
         {"linear": (2, 1.5), "conv": (8, 1.5), "point": (4, 1.5)}),
        ({"conv_rank": 8, "conv_alpha": 2.0}, 4.0, {"linear": (4, 1.0), "conv": (8, 0.25)}),
        ({"conv_rank": 8, "conv_alpha": 2.0, "rank_pattern": {"co": 4}}, 4.0, {"conv": (4, 0.25)}),
        ({"rank": 16, "rslora": True, "rank_pattern": {"point": 4}}, 8.0,
         {"linear": (16, 2.0), "point": (4, 1.0)}),
    ],
)  # fmt: skip
def test_a_pattern_or_a_convolution_keeps_the_strength_and_the_first_pattern_wins(
    settings: dict[str, Any], alpha: float, widths: dict[str, tuple[int, float]]
) -> None:
    layers = adapted(alpha=alpha, **settings).layers
    own = {name: layers[f"denoiser.{name}"].width for name in widths}
    assert {name: (each.rank, each.scale) for name, each in own.items()} == widths


def planned(shapes: dict[str, tuple[int, ...]], **settings: Any) -> Counter[tuple[int, ...]]:
    return adapter_tensors(shapes, AdapterSettings.model_validate({"rank": 4, **settings}))


@pytest.mark.parametrize(
    "settings",
    [*KINDS, {"conv_rank": 2}, {"rank_pattern": {"^conv$": 3, "line": 5}},
     {"kind": "loha", "conv_rank": 3}, {"kind": "lokr", "rank": 3},
     {"kind": "lokr", "rank": 2, "conv_rank": 1, "lokr_factor": 4}, {"kind": "oft", "rank": 5}],
    ids=str,
)  # fmt: skip
def test_the_planned_tensors_are_the_injected_ones(settings: dict[str, Any]) -> None:
    """A plan does not tell a 1x1 convolution from a linear layer."""
    adapter = adapted(network(inputs=24, out=36), **settings)
    shapes = {"linear": (24, 36), "conv": (24 * 9, 36, 9), "point": (24, 36)}
    injected = Counter(
        shape if shape[-2:] != (1, 1) else tuple(side for side in shape if side != 1)
        for shape in (tuple(parameter.shape) for parameter in adapter.parameters())
    )
    written = Counter[tuple[int, ...]]()
    for shape, count in planned(shapes, **settings).items():
        written[shape if shape[-2:] != (1, 1) else tuple(s for s in shape if s != 1)] += count
    assert written == injected


@given(size=st.integers(1, 2048), factor=st.sampled_from([-1, 1, 2, 3, 4, 7, 8, 16, 64]))
def test_a_lokr_splits_as_peft_and_a_rotation_has_the_largest_blocks(
    size: int, factor: int
) -> None:
    left, right = factorization(size, factor)
    tensors = planned({"layer": (size, size)}, kind="lokr", rank=1024, lokr_factor=factor)
    assert tensors == Counter([(left, left), (right, right)])
    rank = max(1, factor)
    ((count, block, _),) = planned({"layer": (1, size)}, kind="oft", rank=rank)
    assert count * block == size and block <= rank
    assert not any(size % larger == 0 for larger in range(block + 1, min(rank, size) + 1))


def test_other_layers_are_refused_by_name() -> None:
    for layer in (nn.LayerNorm(4), nn.Conv2d(4, 4, 3, groups=4)):
        with pytest.raises(RequestError, match=r"cannot change denoiser\.odd: it is a"):
            adapted(nn.ModuleDict({"odd": layer}), "odd")
    with pytest.raises(RequestError, match="no layer of the text encoder 2 matches"):
        inject({}, modules={"text_encoder_2": []}, settings=AdapterSettings(), alpha=4.0, seed=0)


# ---- parameter groups


def groups(adapter: Adapter, **settings: Any) -> list[tuple[float, list[int]]]:
    chosen = OptimizerSettings.model_validate({"learning_rate": 1e-3, **settings})
    return [(g["lr_scale"], [id(p) for p in g["params"]]) for g in adapter.groups(chosen)]


def ids(adapter: Adapter, *keys: str, side: str = "") -> list[int]:
    layers = [adapter.layers[key].parameters for key in keys or adapter.layers]
    return [id(p) for layer in layers for name, p in layer.items() if side in name]


def test_a_group_for_each_rate_in_module_order() -> None:
    adapter = adapted()
    assert groups(adapter) == [(1.0, [id(p) for p in adapter.parameters()])]
    slow, fast = groups(adapter, lora_plus_ratio=16.0)
    assert slow == (1.0, ids(adapter, side="down")) and fast == (16.0, ids(adapter, side="up"))
    adapter = adapted(text=network())
    for rate, scale in ((None, 0.5), (2e-4, 0.2)):
        denoiser, text = groups(adapter, text_encoder_learning_rate=rate)
        assert denoiser[0] == 1.0 and text[0] == pytest.approx(scale)
        assert text[1] == ids(adapter, "text_encoder.linear")
    # Patterns multiply these, and 0 freezes.
    pattern = {"conv": 0.0, "^point": 3.0, "^text_encoder": 0.1}
    scales = [scale for scale, _ in groups(adapter, learning_rate_pattern=pattern)]
    assert scales == [1.0, 3.0, pytest.approx(0.05)]
    trained = {id(parameter) for parameter in adapter.parameters()}
    assert trained == {*ids(adapter)} - {*ids(adapter, "denoiser.conv")}
    assert "denoiser.conv.up" in adapter.state(), "a frozen layer is saved all the same"
    with pytest.raises(RequestError, match="freezes every layer"):
        groups(adapter, learning_rate_pattern={".": 0.0})


# ---- rounding


@BY_KIND
def test_rounded_computes_what_a_reader_of_the_file_does(kind: dict[str, Any]) -> None:
    net, plain = network(), network()
    adapter = adapted(net, "conv", **kind)
    awaken(adapter)
    before, module = saved(adapter), adapter.tensors()["denoiser.conv"]
    written = {name: tensor.half().float() for name, tensor in module.tensors.items()}
    image = images(2)
    unrounded = net.conv(image)
    with adapter.rounded(torch.float16):
        assert same(adapter.tensors()["denoiser.conv"].tensors, written)
        live = net.conv(image)
    plain.conv.weight.add_(update(replace(module, tensors=written), plain.conv.weight))
    torch.testing.assert_close(live, plain.conv(image), rtol=1e-4, atol=1e-5)
    assert same(adapter.state(), before)
    assert torch.equal(net.conv(image), unrounded) and not torch.equal(live, unrounded)


def test_rounded_gives_the_bits_back_when_rounding_runs_out_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapter = adapted()
    awaken(adapter)
    before, to, calls = saved(adapter), Tensor.to, list[int]()

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


# ---- going on from a file


@pytest.mark.parametrize(
    "settings", [{}, {"dora": True}, {"kind": "loha"}, {"kind": "lokr", "rank": 1}], ids=str
)
def test_a_file_gives_the_same_update_at_another_alpha_and_the_same_bits_at_its_own(
    settings: dict[str, Any],
) -> None:
    source = adapted(seed=9, alpha=3.0, **settings)
    awaken(source)
    target, alike = adapted(alpha=8.0, **settings), adapted(alpha=3.0, averaged=True, **settings)
    target.load_tensors(source.tensors())
    alike.load_tensors(source.tensors())
    weight = network().conv.weight
    wanted, scaled = (update(a.tensors()["denoiser.conv"], weight) for a in (source, target))
    torch.testing.assert_close(scaled, wanted, rtol=1e-5, atol=1e-6)
    assert wanted.any() and source.layers["denoiser.conv"].width.scale == 3.0 / source.rank
    with alike.swapped(alike.average):
        averages = saved(alike)
    for name, tensor in source.state().items():
        assert torch.equal(alike.state()[name], tensor) and torch.equal(averages[name], tensor)


def test_a_linear_layer_written_as_a_convolution_is_taken() -> None:
    source, target = adapted(None, "linear"), adapted(None, "linear", seed=2)
    module = source.tensors()["denoiser.linear"]
    shaped = {name: tensor[..., None, None] for name, tensor in module.tensors.items()}
    target.load_tensors({"denoiser.linear": replace(module, tensors=shaped)})
    assert same(target.state(), source.state())
    biased = replace(module, tensors={**module.tensors, "bias": torch.ones(8)})
    with pytest.raises(RequestError, match=r"has rank 4, bias in denoiser\.linear"):
        target.load_tensors({"denoiser.linear": biased})


@pytest.mark.parametrize(
    ("other", "problem", "fix"),
    [
        ({"kind": "loha"}, "holds a loha adapter, this run trains lora", "adapter.kind=loha"),
        ({"dora": True}, "holds a lora dora adapter", "adapter.dora=true"),
        ({"rank": 8}, "has rank 8 in denoiser.linear, this run has rank 4", "adapter.rank"),
        ({"conv_rank": 2}, "has rank 2 in denoiser.conv", "conv_rank"),
        (
            {"modules": ("linear", "conv")},
            "changes 0 layers that this run",
            "adapter.targets, adapter.refiners and",
        ),
        ({"text": True}, "changes 1 layers", "and adapter.text_encoder"),
        ({"averaged": True}, "", ""),  # only a state has an average
    ],
    ids=str,
)
def test_a_file_or_state_of_another_adapter_is_refused_by_what_differs(
    other: dict[str, Any], problem: str, fix: str
) -> None:
    adapter, options = adapted(), dict(other)
    before, modules = saved(adapter), options.pop("modules", ())
    if "text" in options:
        options["text"] = network()
    another = adapted(None, *modules, **options)
    with pytest.raises(RequestError, match="another rank or other layers"):
        adapter.load_state(another.state())
    if problem:
        with pytest.raises(RequestError) as error:
            adapter.load_tensors(another.tensors())
        assert problem in error.value.found and fix in error.value.fix
    assert same(adapter.state(), before)


# ---- the running average


@pytest.mark.parametrize("decay", [0.5, 0.99])
def test_the_average_is_its_formula_and_the_weights_come_back(decay: float) -> None:
    """avg <- d avg + (1 - d) w with d = min(decay, step / (step + 9)), in float64."""

    def live() -> list[Tensor]:
        return [parameter.detach().clone() for parameter in adapter.parameters()]

    adapter = adapted(averaged=True)
    parameters, wanted = adapter.parameters(), [value.double() for value in live()]
    for step in range(1, 30):
        awaken(adapter)
        adapter.update_average(step, decay=decay)
        share = min(decay, step / (step + 9))
        wanted = [share * a + (1 - share) * b for a, b in zip(wanted, live(), strict=True)]
    before = saved(adapter)
    with pytest.raises(ZeroDivisionError), adapter.swapped(adapter.average):
        for one, other in zip(live(), wanted, strict=True):
            assert one.dtype == torch.float32
            torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-6)
        with adapter.rounded(torch.bfloat16):
            assert all(torch.equal(value, value.bfloat16().float()) for value in live())
        raise ZeroDivisionError
    assert same(adapter.state(), before)
    assert all(one is other for one, other in zip(adapter.parameters(), parameters, strict=True))
    other = adapted(averaged=True, seed=2)
    other.load_state(before)
    assert same(other.state(), before)


# ---- the limit on norms


@pytest.mark.parametrize(
    "settings",
    [{}, {"rslora": True}, {"kind": "loha"}, {"kind": "lokr", "rank": 1}, {"kind": "lokr"}],
    ids=str,
)
def test_a_larger_update_comes_back_to_the_limit_and_all_others_keep_their_bits(
    settings: dict[str, Any],
) -> None:
    adapter = adapted(None, "linear", "conv", **settings)
    large, small = adapter.layers.values()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for layer, spread in ((large, 2.0), (small, 0.5)):
            for parameter in layer.parameters.values():
                parameter.copy_(spread * torch.randn(parameter.shape, generator=generator))

    def updates() -> list[Tensor]:
        return [update(module).double() for module in adapter.tensors().values()]

    first, second = updates()
    norms = [float(each.norm()) for each in (first, second)]
    assert [float(layer.update_norm()) for layer in (large, small)] == pytest.approx(
        norms, rel=1e-5
    )
    limit, before = sum(norms) / 2, saved(adapter)
    adapter.limit_norms(limit)
    once = saved(adapter)
    torch.testing.assert_close(updates()[0], first * limit / norms[0], rtol=1e-4, atol=1e-5)
    ratios = [float((once[n] / before[n]).mean()) for n in once if n.startswith("denoiser.linear")]
    root = (limit / norms[0]) ** (1 / len(ratios))
    assert ratios == pytest.approx([root] * len(ratios), rel=1e-4), "each factor takes its share"
    assert all(torch.equal(once[n], before[n]) for n in once if n.startswith("denoiser.conv"))
    adapter.limit_norms(limit)
    assert same(adapter.state(), once), "a step that was skipped must leave the weights"


def test_updates_of_zero_and_frozen_layers_are_left_alone_by_the_limit() -> None:
    adapter = adapted(None, "linear", "conv")
    adapter.limit_norms(1.0)
    assert all(bool(value.isfinite().all()) for value in adapter.state().values())
    awaken(adapter)
    frozen, trained = adapter.layers.values()
    for parameter in frozen.parameters.values():
        parameter.requires_grad_(False)
    before = [parameter.clone() for parameter in frozen.parameters.values()]
    adapter.limit_norms(0.01)
    assert all(map(torch.equal, before, frozen.parameters.values()))
    assert float(trained.update_norm()) == pytest.approx(0.01, rel=1e-4)
