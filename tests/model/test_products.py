"""Products with frozen int8 weights, code by code: exact sums, rows by themselves, and what they are used for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import lora_trainer
from lora_trainer import families
from lora_trainer.config import choices
from lora_trainer.config.choices import int8_rows_at_once
from lora_trainer.network import quantized_matmul
from lora_trainer.network.gradient_checkpointing import apply_checkpointing
from lora_trainer.network.quantize import QuantizedLinear, quantize
from lora_trainer.network.quantized_matmul import (
    Int8Layouts,
    Int8Product,
    int8_layouts,
    int8_product,
    quantized_rows,
)
from lora_trainer.training.loss import add_noise
from tests.fakes.cublas import Missing, without_layouts
from tests.fakes.family_bases import CPU, conditioning_of, facts_at
from tests.model.test_quantize import (
    ADAPTERS,
    FAMILIES,
    adapted,
    awaken,
    bench,
    cosine,
    joined,
    linear,
)

EIGHTS = st.integers(1, 6).map(lambda count: 8 * count)


def layer_of(matmul: Any = "int8", **values: Any) -> QuantizedLinear:
    return QuantizedLinear(linear(**values), "int8", device=CPU, matmul=matmul)


def codes(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """Return integers of which every row has the largest: they are their own codes."""
    found = torch.randint(-127, 128, (rows, columns), generator=generator)
    found[:, 0] = 127
    return found


def powers(rows: int, generator: torch.Generator) -> Tensor:
    """Return scales that round nothing, [rows, 1]."""
    return 2.0 ** torch.randint(-3, 4, (rows, 1), generator=generator)


# ---- one product


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 70), inner=EIGHTS, out=EIGHTS, plus=st.sampled_from(["none", "bias", "sum"])
)
def test_where_rounding_changes_nothing_both_passes_are_exact(
    rows: int, inner: int, out: int, plus: str
) -> None:
    generator = torch.Generator().manual_seed(rows * inner + out)
    weight, scale = codes(out, inner, generator), powers(out, generator)
    stored = (weight.to(torch.int8), scale)
    x = codes(rows, inner, generator) * powers(rows, generator)
    gradient = codes(rows, out, generator) * powers(rows, generator) / scale.T
    w = (weight * scale).double()
    for found, wanted in [
        (lambda other: Int8Product().forward(x, stored, other), x.double() @ w.T),
        (lambda other: Int8Product().backward(gradient, stored, other), gradient.double() @ w),
    ]:
        other = {
            "none": None,
            "bias": torch.ones(wanted.shape[1]),
            "sum": torch.full(wanted.shape, 3.0),
        }[plus]
        added = 0.0 if other is None else other.double()
        assert torch.equal(found(other).double(), wanted + added)


def test_a_number_is_off_by_half_a_step_of_its_row_at_most() -> None:
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    rounded, scale = quantized_rows(x)
    assert rounded.dtype == torch.int8 and scale.shape == (40, 1)
    assert bool(((rounded * scale - x.float()).abs() <= scale * 0.5001).all())
    assert torch.equal(rounded.abs().amax(dim=1), torch.full((40,), 127))


def test_a_row_is_rounded_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the other images of a pass nor the pieces it is computed in change a bit of it."""
    layer, x = layer_of(), torch.randn(100, 48, generator=torch.Generator().manual_seed(2))
    together = layer(x[None])[0]
    apart = torch.cat([layer(part[None])[0] for part in x.split([1, 9, 40, 50])])
    monkeypatch.setattr(choices, "INT8_TEMPORARY_BYTES", 1)
    assert int8_rows_at_once(48, 40) == 32
    assert torch.equal(together, apart)
    assert torch.equal(together, layer(x[None])[0])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_visible_in_its_row(value: float) -> None:
    layer, x = layer_of(), torch.randn(1, 5, 48)
    x[0, 3, 7] = value
    x.requires_grad_()
    outputs = layer(x)
    assert not outputs[0, 3].isfinite().any()
    assert outputs[0, [0, 1, 2, 4]].isfinite().all()
    outputs.nan_to_num().backward(torch.full_like(outputs, value))
    assert x.grad is not None and not x.grad.isfinite().any()


@pytest.mark.parametrize("value", [0.0, 1e-44, 1e-30, 3e38])
def test_rows_of_the_smallest_and_largest_numbers_are_no_special_case(value: float) -> None:
    rounded, scale = quantized_rows(torch.full((2, 8), value))
    torch.testing.assert_close(rounded * scale, torch.full((2, 8), value), rtol=0.01, atol=1e-30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_it_computes_in_the_dtype_of_the_network_near_the_dequantized_layer(
    dtype: torch.dtype, bias: bool
) -> None:
    found = []
    for matmul in ("int8", "dequantized"):
        plain = linear(dtype=dtype)
        plain.bias = plain.bias if bias else None  # type: ignore[assignment]  # a layer may have none
        layer = QuantizedLinear(plain, "int8", device=CPU, matmul=matmul)  # type: ignore[arg-type]  # one of the literals
        x = torch.randn(2, 9, 48, generator=torch.Generator().manual_seed(3)).to(dtype)
        outputs = layer(x.requires_grad_())
        outputs.backward(
            torch.randn(outputs.shape, generator=torch.Generator().manual_seed(4)).to(dtype)
        )
        assert x.grad is not None and outputs.dtype == x.grad.dtype == dtype
        found.append((outputs.detach(), x.grad))
    for one, other in zip(*found, strict=True):
        assert cosine(one, other) > 0.9999
        assert not torch.equal(one, other), "the setting is not used"


def test_the_operator_is_one_that_torch_can_look_into() -> None:
    x, plus = torch.randn(4, 16), torch.randn(4, 8)
    stored = torch.randint(-127, 128, (8, 16), dtype=torch.int8).T, torch.rand(1, 8)
    torch.library.opcheck(
        int8_product, (x, *stored, plus), test_utils=("test_schema", "test_faketensor")
    )


# ---- where it is used


@pytest.mark.parametrize(
    ("shape", "size"),
    [((5, 48), {}), ((48,), {}), ((2, 5, 44), {"inputs": 44}), ((2, 5, 48), {"out": 42})],
)
def test_vectors_and_odd_sizes_are_dequantized(
    shape: tuple[int, ...], size: dict[str, int]
) -> None:
    x = torch.randn(shape)
    assert torch.equal(layer_of(**size)(x), layer_of("dequantized", **size)(x))


@pytest.mark.parametrize("values", ADAPTERS, ids=str)
def test_adapters_of_all_kinds_learn_beside_it(values: dict[str, Any]) -> None:
    found = []
    for matmul in ("int8", "dequantized"):
        net = nn.Sequential(layer_of(matmul))  # type: ignore[arg-type]  # one of the literals
        adapter = adapted(net, names=("0",), **values)
        awaken(adapter)
        x = torch.randn(2, 9, 48, generator=torch.Generator().manual_seed(3), requires_grad=True)
        net(x).square().sum().backward()
        gradients = [parameter.grad for parameter in adapter.parameters()]
        found.append([x.grad, *gradients])
    for one, other in zip(*found, strict=True):
        assert one is not None and other is not None
        assert cosine(one, other) > 0.999


# ---- GPUs without a layout

SHAPES = [(48, 40), (8, 16), (48, 40)]


def test_a_processor_has_both_layouts() -> None:
    assert int8_layouts(SHAPES, device=CPU) == Int8Layouts()


@pytest.mark.parametrize("missing", ["refused", "wrong", "everything"])
def test_what_a_card_refuses_or_computes_wrongly_is_seen(
    missing: Missing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error alone would not do: cuBLAS has given wrong sums without one."""
    calls = without_layouts(monkeypatch, missing)
    layouts = int8_layouts(SHAPES, device=CPU)
    assert bool(layouts.against_forward) == (missing == "everything")
    assert ("wrong sums" if missing == "wrong" else "NOT_SUPPORTED") in layouts.against_backward
    assert len(calls) <= 8, "a shape is tried twice, or goes on being tried once it is known"


def test_a_full_card_is_no_missing_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch, "_int_mm", full)
    with pytest.raises(torch.OutOfMemoryError):
        int8_layouts(SHAPES, device=CPU)


@pytest.mark.parametrize("missing", ["refused", "wrong"])
def test_without_the_layout_of_the_backward_pass_that_is_dequantized(
    missing: Missing, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(2, 9, 48, generator=torch.Generator().manual_seed(3))
    weights = torch.randn(2, 9, 40, generator=torch.Generator().manual_seed(4))

    def passes(net: nn.Module) -> tuple[Tensor, Tensor]:
        given = x.clone().requires_grad_()
        outputs = net(given)
        outputs.backward(weights)
        assert given.grad is not None
        return outputs.detach(), given.grad

    both, dequantized = passes(layer_of("int8")), passes(layer_of("dequantized"))
    without_layouts(monkeypatch, missing)
    net = nn.ModuleDict({"blocks": nn.ModuleList([linear()])})
    layouts = quantize(net, "int8", device=CPU, matmul="int8")
    assert layouts is not None and layouts.against_backward and not layouts.against_forward
    outputs, gradient = passes(net.get_submodule("blocks.0"))
    assert torch.equal(outputs, both[0])
    assert torch.equal(gradient, dequantized[1])


# ---- whole networks


@FAMILIES
def test_gradients_point_where_those_of_the_dequantized_base_do(name: str) -> None:
    """Every layer's, but for the noisiest of 8 to 32 channels: those of a real base, see the embedded one."""
    found = bench(name, "int8", matmul="int8").gradients()
    for other, whole in ((bench(name, "int8"), 0.9999), (bench(name, None), 0.9999)):
        exact = other.gradients()
        each = sorted(cosine(a, b) for a, b in zip(found[1:], exact[1:], strict=True) if b.any())
        assert cosine(joined(found), joined(exact)) > whole
        assert each[len(each) // 20] > 0.999
        assert each[0] > 0.98
        assert float(found[0]) == pytest.approx(float(exact[0]), rel=5e-4)
        assert not torch.equal(joined(found), joined(exact)), "the setting is not used"


@pytest.mark.parametrize("kind", ["light", "selective", "full"])
def test_recomputing_blocks_changes_no_bit_and_its_results_are_kept_as_other_products_are(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[None] = []
    real = quantized_matmul._product

    def counting(*args: Any, **kwargs: Any) -> Tensor:
        calls.append(None)
        return real(*args, **kwargs)

    monkeypatch.setattr(quantized_matmul, "_product", counting)
    plain, recomputed = (bench("flux", "int8", matmul="int8") for _ in range(2))
    gradients, once = plain.gradients(), len(calls)
    apply_checkpointing(recomputed.denoiser, kind)
    assert all(map(torch.equal, gradients, recomputed.gradients()))
    again = len(calls) - 2 * once
    assert again == 0 if kind == "light" else again > 0


def test_every_layer_of_the_embedded_base_learns_the_same() -> None:
    """A trained network: the cosine of each gradient is above 0.999, the dequantized and the plain base's."""
    found, exact, plain = (
        embedded_gradients(kind, matmul)
        for kind, matmul in (("int8", "int8"), ("int8", "dequantized"), (None, "dequantized"))
    )
    for others in (exact, plain):
        assert min(map(cosine, found, others)) > 0.999


def embedded_gradients(kind: Any | None, matmul: Any) -> list[Tensor]:
    """Return those of a step on smooth latents at four timesteps."""
    family, facts = (
        families.family("sd15"),
        facts_at(Path(lora_trainer.__file__).parent / "embedded"),
    )
    denoiser = family.load_denoiser(facts, dtype=torch.float32, device=CPU)
    if kind is not None:
        quantize(denoiser, kind, device=CPU, skip=family.traits.quantization_skip, matmul=matmul)
    adapter = adapted(denoiser, names=tuple(family.lora_targets(denoiser, "transformer")))
    awaken(adapter)
    generator, timesteps = torch.Generator().manual_seed(5), torch.tensor([20, 300, 600, 980])
    latents = F.interpolate(torch.randn((4, 4, 4, 4), generator=generator), 32, mode="bicubic")
    noise = torch.randn(latents.shape, generator=generator)
    signal = torch.as_tensor(facts.alphas_cumprod())[timesteps].float()
    noisy = add_noise(latents, noise, signal.sqrt(), (1 - signal).sqrt())
    texts = conditioning_of(family, facts, ("a teal creature", "waving", "smiling", ""))
    family.predict(denoiser, noisy, timesteps, texts).sub(noise).square().mean().backward()
    return [g for parameter in adapter.parameters() if (g := parameter.grad) is not None]
