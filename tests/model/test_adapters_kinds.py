"""Every kind of adapter on every sort of layer: the live forward pass is the update of its tensors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lora_trainer.common.errors import RequestError
from lora_trainer.config.learning import AdapterSettings
from lora_trainer.lora.adapter import Adapter, inject
from lora_trainer.lora.adapter_kinds import principal_factors
from lora_trainer.lora.tensors import row_norms, update

KINDS: list[dict[str, Any]] = [
    {},
    {"rslora": True},
    {"dora": True},
    {"init": "pissa"},
    {"kind": "loha"},
    {"kind": "lokr"},
    {"kind": "lokr", "rank": 1},
    {"kind": "lokr", "rank": 1, "lokr_factor": 2},
    {"kind": "oft"},
]
BY_KIND = pytest.mark.parametrize("kind", KINDS, ids=str)


class Network(nn.Module):
    """A linear layer, a 3x3 convolution with a stride and a 1x1 convolution, without a bias each."""

    def __init__(self, *, inputs: int = 6, out: int = 8, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, out, bias=bias)
        self.conv = nn.Conv2d(inputs, out, 3, stride=2, padding=1, bias=bias)
        self.point = nn.Conv2d(inputs, out, 1, bias=bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.linear(x.movedim(1, -1)), self.conv(x), self.point(x)


def network(dtype: torch.dtype = torch.float32, **shape: Any) -> Network:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Network(**shape).requires_grad_(False).to(dtype)


def adapted(net: Network, *, alpha: float = 6.0, **values: Any) -> Adapter:
    return inject(
        {"denoiser": net},
        modules={"denoiser": ("linear", "conv", "point")},
        settings=AdapterSettings.model_validate({"rank": 4, **values}),
        alpha=alpha,
        seed=1,
    )


def awaken(adapter: Adapter) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))


def merged(adapter: Adapter, net: Network) -> Network:
    """Return a copy of the plain network whose weights have the updates of the adapter's tensors."""
    changed = copy.deepcopy(net)
    for key, module in adapter.tensors().items():
        weight = changed.get_submodule(key.removeprefix("denoiser.")).get_parameter("weight")
        with torch.no_grad():
            weight.add_(update(module, weight).to(weight.dtype))
    return changed


@BY_KIND
@pytest.mark.parametrize("bias", [True, False])
def test_the_forward_pass_is_that_of_the_updated_weights(kind: dict[str, Any], bias: bool) -> None:
    net = network(bias=bias)
    plain = copy.deepcopy(net)
    adapter = adapted(net, **kind)
    awaken(adapter)
    image = torch.randn(2, 6, 8, 8)
    reference = merged(adapter, plain)
    for live, wanted, base in zip(net(image), reference(image), plain(image), strict=True):
        torch.testing.assert_close(live, wanted, rtol=1e-5, atol=1e-5)
        assert float((live - base).detach().abs().max()) > 1e-2


@settings(max_examples=40)
@given(
    kind=st.sampled_from(KINDS),
    inputs=st.integers(1, 9),
    out=st.integers(1, 12),
    rank=st.integers(1, 6),
    conv_rank=st.none() | st.integers(1, 3),
    alpha=st.floats(0.5, 9.0),
)
def test_any_shape_and_rank_is_that_of_the_updated_weights(
    kind: dict[str, Any], inputs: int, out: int, rank: int, conv_rank: int | None, alpha: float
) -> None:
    net = network(inputs=inputs, out=out).double()
    plain = copy.deepcopy(net)
    values = {"rank": rank, "conv_rank": conv_rank, **kind}
    adapter = adapted(net.float(), alpha=alpha, **values)
    awaken(adapter)
    image = torch.randn(1, inputs, 4, 4)
    reference = merged(adapter, plain)(image.double())
    for live, wanted in zip(net(image), reference, strict=True):
        torch.testing.assert_close(live.double(), wanted, rtol=1e-4, atol=1e-4)


@BY_KIND
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_update_starts_at_zero(kind: dict[str, Any], dtype: torch.dtype) -> None:
    net = network(dtype)
    plain = copy.deepcopy(net)
    adapter = adapted(net, **kind)
    image = torch.randn(2, 6, 8, 8).to(dtype)
    for live, base in zip(net(image), plain(image), strict=True):
        assert live.dtype == dtype
        if "init" in kind or kind.get("kind", "lora") == "lora":
            # Products come from kernels that round differently; one sums the bias first.
            rounding = 2 * torch.finfo(dtype).eps * float(base.abs().max())
            torch.testing.assert_close(live, base, rtol=0, atol=rounding)
        else:
            assert torch.equal(live, base)
    assert all(parameter.dtype == torch.float32 for parameter in adapter.parameters())
    assert all(parameter.is_leaf for parameter in adapter.parameters())


@BY_KIND
def test_masters_on_a_half_precision_base_are_those_of_a_float32_base(kind: dict[str, Any]) -> None:
    rounded = network(torch.bfloat16)
    exact, half = adapted(copy.deepcopy(rounded).float(), **kind), adapted(rounded, **kind)
    for name, tensor in half.state().items():
        torch.testing.assert_close(tensor, exact.state()[name], rtol=1e-5, atol=1e-6)


@BY_KIND
def test_the_first_step_changes_every_layer(kind: dict[str, Any]) -> None:
    """A zero update must not have a zero gradient in all of its tensors."""
    net = network()
    adapter = adapted(net, **kind)
    outputs = net(torch.randn(2, 6, 8, 8))
    torch.stack([output.square().mean() for output in outputs]).sum().backward()
    for layer in adapter.layers.values():
        assert any(p.grad is not None and p.grad.any() for p in layer.parameters.values())


@BY_KIND
def test_gradients_are_the_same_with_checkpointing(kind: dict[str, Any]) -> None:
    found = []
    image = torch.randn(2, 6, 8, 8, generator=torch.Generator().manual_seed(4))
    for recompute in (False, True):
        net = network()
        adapter = adapted(net, **kind)
        awaken(adapter)
        outputs = checkpoint(net, image, use_reentrant=False) if recompute else net(image)
        torch.stack([output.square().mean() for output in outputs]).sum().backward()
        found.append([parameter.grad for parameter in adapter.parameters()])
    for plain, again in zip(*found, strict=True):
        assert plain is not None and again is not None and torch.equal(plain, again)


@BY_KIND
def test_the_forward_pass_draws_no_random_numbers_that_matter(kind: dict[str, Any]) -> None:
    """peft drops a LoHa or LoKr layer when torch.rand(1) is 0.0, once in 2**24 passes."""
    net = network().train()
    adapter = adapted(net, **kind)
    awaken(adapter)
    image = torch.randn(2, 6, 8, 8)
    wanted = net(image)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "rand", lambda *_, **__: torch.zeros(1))
        found = net(image)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


def test_readers_ignore_the_alpha_of_a_lokr_of_full_factors() -> None:
    adapter = adapted(network(), kind="lokr", alpha=1.0)
    module = adapter.tensors()["denoiser.linear"]
    assert set(module.tensors) == {"w1", "w2"} and module.scale == 1.0
    factored = adapted(network(), kind="lokr", rank=1, alpha=2.0).tensors()["denoiser.linear"]
    assert set(factored.tensors) == {"w1", "w2_a", "w2_b"} and factored.scale == 2.0


def test_dora_starts_at_the_norms_of_the_weight() -> None:
    net = network()
    plain = copy.deepcopy(net)
    adapter = adapted(net, dora=True)
    for name in ("linear", "conv", "point"):
        weight = plain.get_submodule(name).get_parameter("weight")
        magnitude = adapter.tensors()[f"denoiser.{name}"].tensors["magnitude"]
        torch.testing.assert_close(magnitude, row_norms(weight))


# ---- PiSSA


def matrix(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize(("rows", "columns", "rank"), [(9, 6, 3), (40, 90, 4), (6, 9, 6)])
def test_pissa_takes_the_best_part_of_its_rank(rows: int, columns: int, rank: int) -> None:
    weight = matrix(rows, columns)
    generator = torch.Generator().manual_seed(0)
    down, up = principal_factors(weight, rank=rank, generator=generator)
    left, singular, right = torch.linalg.svd(weight, full_matrices=False)
    best = (left[:, :rank] * singular[:rank]) @ right[:rank]
    least = float((weight - best).norm())
    assert float((weight - up @ down).norm()) <= 1.01 * least + 1e-4
    torch.testing.assert_close(up.norm(dim=0), down.norm(dim=1), rtol=1e-4, atol=1e-5)


def test_pissa_pads_a_rank_beyond_the_weight_with_zeros() -> None:
    weight = matrix(3, 5)
    down, up = principal_factors(weight, rank=7, generator=torch.Generator())
    assert down.shape == (7, 5) and up.shape == (3, 7)
    torch.testing.assert_close(up @ down, weight)


def test_pissa_is_the_same_however_often_it_is_computed() -> None:
    first, second = (adapted(network(), init="pissa").state() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_pissa_starts_at_the_weight_itself_and_leaves_the_base_alone() -> None:
    net = network()
    plain = copy.deepcopy(net)
    adapter = adapted(net, init="pissa", rank=6, alpha=3.0)
    layer = adapter.layers["denoiser.linear"]
    start = layer.parameters["up"] @ layer.parameters["down"] * layer.width.scale
    torch.testing.assert_close(start.detach(), plain.linear.weight)  # rank 6 is all of it
    assert torch.equal(net.linear.base_layer.weight, plain.linear.weight)
    module = adapter.tensors()["denoiser.conv"]
    assert module.rank == 12 and module.tensors["down"].shape == (12, 6, 3, 3)
    assert float(update(module).abs().max()) < 1e-6


def test_pissa_resumes_without_a_second_decomposition(monkeypatch: pytest.MonkeyPatch) -> None:
    first = adapted(network(), init="pissa").state()

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("decomposed again")

    monkeypatch.setattr("lora_trainer.lora.inject.principal_factors", fail)
    arguments: dict[str, Any] = {
        "modules": {"denoiser": ("linear", "conv", "point")},
        "settings": AdapterSettings(rank=4, init="pissa"),
        "alpha": 6.0,
        "seed": 1,
    }
    again = inject({"denoiser": network()}, **arguments, initial=first).state()
    assert all(torch.equal(first[name], again[name]) for name in first)
    with pytest.raises(RequestError, match="no PiSSA start of denoiser.linear"):
        inject({"denoiser": network()}, **arguments, initial={"denoiser.linear.up": torch.ones(1)})


def test_pissa_refuses_quantised_weights() -> None:
    weight = torch.zeros(4, 4, dtype=torch.uint8)
    with pytest.raises(RequestError, match="quantised"):
        principal_factors(weight, rank=2, generator=torch.Generator())


# ---- memory


@BY_KIND
def test_what_autograd_keeps_grows_with_the_tokens_not_with_tokens_times_ranks(
    kind: dict[str, Any],
) -> None:
    """A rotation written as a broadcast product kept one copy of its matrices for every token."""
    net = nn.ModuleDict({"linear": nn.Linear(32, 64)}).requires_grad_(False)
    chosen = AdapterSettings.model_validate({**kind, "rank": 16})
    modules = {"denoiser": ("linear",)}
    inject({"denoiser": net}, modules=modules, settings=chosen, alpha=1.0, seed=0)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    tokens = torch.randn(256, 32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        held = net["linear"](tokens)
    assert sum(kept.values()) < 4 * (256 * (32 + 3 * 64) + 3 * 32 * 64)
    assert held.shape == (256, 64)
