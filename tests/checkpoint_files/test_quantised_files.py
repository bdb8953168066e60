"""Files in ComfyUI's quantised layouts: loaded to the values that they stand for, or refused in one line."""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_trainer import families
from lora_trainer.common.errors import InputError
from lora_trainer.config.inputs import BaseSettings
from lora_trainer.families.base.releases import text_network
from lora_trainer.families.files import recognise
from lora_trainer.families.files.deferred import Deferred, settled
from lora_trainer.families.files.locate import describe
from lora_trainer.families.files.weight_files import (
    TensorReader,
    read_header,
    read_tensors,
    refuse_quantised,
)
from lora_trainer.network.quantize import QuantizedLinear, quantize
from tests.checkpoint_files.cases import Case
from tests.checkpoint_files.files import write
from tests.checkpoint_files.layouts import text
from tests.fakes.family_bases import (
    CPU,
    base_of,
    denoiser_of,
    encoder_of,
    facts_at,
    facts_of,
    network_of,
)
from tests.fakes.ldm_file import unet_tensors
from tests.fakes.original_names import NORMS, original_names, split_at
from tests.fakes.quantised import LAYOUTS, quantised
from tests.fakes.runs import run_cli, toy, trajectory

KITCHEN = Path(__file__).with_name("kitchen.safetensors")
PREFIX = "model.diffusion_model."
EXACT = dict.fromkeys(LAYOUTS, 0.0) | {"convrot": 1e-6}
"""Layout -> the error allowed: sums of a product of matrices may come in another order."""


@pytest.fixture(autouse=True)
def tiny_flux(monkeypatch: pytest.MonkeyPatch) -> None:
    split_at(monkeypatch, inner=32)


def written(tensors: Mapping[str, Tensor], file: Path, metadata: Mapping[str, str] = {}) -> Path:
    whole = {key: tensor.contiguous() for key, tensor in tensors.items()}
    save_file(whole, file, metadata=dict(metadata))
    return file


def denoiser_tensors(name: str) -> dict[str, Tensor]:
    """Return a family's tiny denoiser as its release's file has it."""
    if (
        name in NORMS and name != "lumina2"
    ):  # diffusers' conversion of it knows the release's width only
        state = original_names(name, denoiser_of(name).state_dict())
        return {PREFIX + key: tensor for key, tensor in state.items()}
    if families.family(name).traits.folder == "unet":
        return dict(unet_tensors(base_of(name)))
    return dict(denoiser_of(name).state_dict())


def test_what_comfy_kitchen_wrote_is_read_to_what_it_reads() -> None:
    """`scripts/kitchen_file.py` made the file: weights by its `quantize`, values by its `dequantize` in float32."""
    with safe_open(KITCHEN, framework="pt") as file:
        metadata, wanted = file.metadata(), load_file(KITCHEN)
    names = [key.removesuffix(".values") for key in wanted if key.endswith(".values")]
    layers = json.loads(metadata["_quantization_metadata"])["layers"]
    formats = {entry["format"] for entry in layers.values()}
    assert formats == {"float8_e4m3fn", "int8_tensorwise", "mxfp8", "nvfp4"}
    refuse_quantised(KITCHEN)
    header, read = (
        read_header(KITCHEN),
        read_tensors(KITCHEN, {name: f"{name}.weight" for name in names}, dtype=torch.float32),
    )
    for name in names:
        values = wanted[f"{name}.values"]
        assert header[f"{name}.weight"].shape == values.shape == read[name].shape
        torch.testing.assert_close(read[name], values, rtol=0, atol=1e-6, msg=name)
        if not layers[name].get("convrot"):
            assert torch.equal(read[name], values), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_formulas_of_the_tests_are_those_that_are_read(layout: str, tmp_path: Path) -> None:
    """More than one tile of scales, and more rows than are computed at a time."""
    weight = torch.randn(300, 576, generator=torch.Generator().manual_seed(0))
    stored, metadata, values, _ = quantised({"a.weight": weight}, layout)
    file = written(stored, tmp_path / "a.safetensors", metadata)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lora_trainer.families.files.dequantise.ROWS_BYTES", 2**16)
        read = read_tensors(file, {"a": "a.weight"}, dtype=torch.float32)
    torch.testing.assert_close(read["a"], values["a.weight"], rtol=0, atol=EXACT[layout])


@pytest.mark.parametrize(
    ("name", "listed"), [(name, number % 2 == 1) for number, name in enumerate(families.NAMES)]
)
def test_every_family_s_denoiser_is_read_from_a_quantised_file(
    name: str, listed: bool, tmp_path: Path
) -> None:
    """Layouts by turns, so that every conversion of names gets each; stated beside the weights, or in the metadata."""
    stored, metadata, values, used = quantised(denoiser_tensors(name), *LAYOUTS, listed=listed)
    assert len(used) >= 4, used
    plain = written(values, tmp_path / f"{name}-base.safetensors")
    wanted = network_of(facts_at(base_of(name), family=name, denoiser=plain)).state_dict()
    file = written(stored, plain, metadata)
    assert families.detect_file(read_header(file)) == (families.family(name), {"denoiser"})
    facts = facts_at(base_of(name), family=name, denoiser=file)
    assert facts.parts["denoiser"] == facts_of(name).parts["denoiser"]
    found = network_of(facts).state_dict()
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-6, msg=key)


@pytest.mark.parametrize("name", [name for name in NORMS if name != "sd3"])
def test_text_encoders_are_read_from_quantised_files(name: str, tmp_path: Path) -> None:
    """Named by `base.text_encoders`, recognised by their tensors; Stable Diffusion 3 has FLUX's encoders."""
    folders = [base_of(name) / component for component in families.family(name).text.roles]
    files = dict[str, tuple[str, ...]]()
    for kind in ("plain", "quantised"):
        for number, folder in enumerate(folders):
            (source,) = folder.glob("*.safetensors")
            stored, metadata, values, used = quantised(load_file(source), *LAYOUTS)
            assert len(used) >= 4, used
            tensors = values if kind == "plain" else stored
            file = written(tensors, tmp_path / f"{kind}-{number}.safetensors", metadata)
            files[kind] = (*files.get(kind, ()), str(file))
    wanted, found = (
        {
            f"{component}.{key}": tensor
            for component, network in encoder_of(facts).networks.items()
            for key, tensor in network.state_dict().items()
        }
        for facts in (
            describe(BaseSettings(model=str(base_of(name)), text_encoders=files[kind]))
            for kind in ("plain", "quantised")
        )
    )
    assert found.keys() == wanted.keys()
    for key, tensor in wanted.items():
        torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-6, msg=key)


@pytest.mark.parametrize(
    ("file", "role", "layout", "kind"),
    [
        ("t5xxl_fp8_scaled", "t5xxl", "float8_e4m3fn", "t5"),
        ("t5xxl_int8_convrot", "t5xxl", "int8_tensorwise", "t5"),
        ("qwen_3_4b_fp8_mixed", "qwen3_4b", "float8_e4m3fn", "qwen3"),
        ("qwen_3_4b_fp4_mixed", "qwen3_4b", "nvfp4", "qwen3"),
        ("gemma_2_2b_mxfp8", "gemma2_2b", "mxfp8", "gemma2"),
    ],
)
def test_text_encoders_of_true_size_are_recognised(
    file: str, role: str, layout: str, kind: str, tmp_path: Path
) -> None:
    shapes = text(role)
    case = Case(file, shapes, layout=layout, file=f"{file}.safetensors")
    path = write(case, tmp_path)
    refuse_quantised(path)
    header = read_header(path)
    assert {name: info.shape for name, info in header.items()} == shapes
    found = recognise.text_encoder_in(header)
    assert found is not None and found[1:] == (kind, text_network(role).width)


def test_a_layer_s_factors_of_its_inputs_are_part_of_its_weight(tmp_path: Path) -> None:
    weight = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))
    stored, _, values, _ = quantised({"a.weight": weight}, "nvfp4")
    factors = torch.rand(32) + 0.5
    file = written(stored | {"a.pre_quant_scale": factors}, tmp_path / "a.safetensors")
    read = read_tensors(file, {"a": "a.weight"}, dtype=torch.float32)["a"]
    assert torch.equal(read, values["a.weight"] * factors)
    inputs = torch.randn(3, 32)
    torch.testing.assert_close(inputs @ read.T, (inputs * factors) @ values["a.weight"].T)


def test_rows_that_fill_up_a_block_are_cut_off(tmp_path: Path) -> None:
    """As many as the bias has rows, where the file does not say the weight's own shape."""
    weight = torch.randn(30, 64, generator=torch.Generator().manual_seed(0))
    padded = torch.nn.functional.pad(weight, (0, 0, 0, 2))
    stored, _, values, _ = quantised({"a.weight": padded}, "nvfp4")
    file = written(stored | {"a.bias": torch.zeros(30)}, tmp_path / "a.safetensors")
    assert read_header(file)["a.weight"].shape == (30, 64)
    read = read_tensors(file, {"a": "a.weight"}, dtype=torch.float32)["a"]
    assert torch.equal(read, values["a.weight"][:30])


# ---- into the planned precision, one layer at a time


class Watch:
    """Follows the tensors that are read from files: how many bytes of them are alive at once."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.peak_bytes, self._alive = 0, dict[int, int]()
        self.sizes, real = list[int](), TensorReader.read

        def read(reader: TensorReader, name: str) -> Tensor:
            tensor = real(reader, name)
            self.sizes.append(tensor.nbytes)
            number = len(self.sizes)
            self._alive[number] = tensor.nbytes
            weakref.finalize(tensor.untyped_storage(), self._alive.pop, number)
            self.peak_bytes = max(self.peak_bytes, sum(self._alive.values()))
            return tensor

        patch.setattr(TensorReader, "read", read)


@pytest.mark.parametrize("name", families.NAMES)
def test_a_quantised_load_gives_the_bits_of_a_whole_one_layer_by_layer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a file in ComfyUI's layouts, and from a folder; int8 stands for all, which share the seam."""
    stored, metadata, _, _ = quantised(denoiser_tensors(name), *LAYOUTS)
    file = written(stored, tmp_path / f"{name}-base.safetensors", metadata)
    family = families.family(name)
    quantise = partial(quantize, kind="int8", device=CPU, skip=family.traits.quantization_skip)
    for facts in (facts_at(base_of(name), family=name, denoiser=file), facts_of(name)):
        whole = network_of(facts, torch.bfloat16)
        quantise(whole)
        with monkeypatch.context() as patch:
            watch = Watch(patch)
            network = family.load_denoiser(
                facts, dtype=torch.bfloat16, device=CPU, quantise=quantise
            )
        wanted, found = whole.state_dict(), network.state_dict()
        assert found.keys() == wanted.keys() and not network.training
        for key, tensor in wanted.items():
            assert type(found[key]) is Tensor, key
            assert torch.equal(found[key].float(), tensor.float()), key
        assert not any(parameter.requires_grad for parameter in network.parameters())
        kept = sum(tensor.nbytes for tensor in wanted.values() if tensor.dtype == torch.bfloat16)
        # A tensor from which several layers are made, and one of these.
        assert watch.peak_bytes <= kept + 2 * max(watch.sizes)
        assert any(isinstance(module, QuantizedLinear) for module in network.modules())


def test_no_view_keeps_a_mapped_file_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Norms stand between the weights: one that was a view would keep all that was read with it."""
    tensors = {key: tensor.bfloat16() for key, tensor in denoiser_tensors("zimage").items()}
    file = written(tensors, tmp_path / "z_image.safetensors")
    facts = facts_at(base_of("zimage"), family="zimage", denoiser=file)
    views, real = list[weakref.ref[Any]](), safetensors.safe_open

    class Watched:
        def __init__(self, *args: Any, **options: Any) -> None:
            self.file = real(*args, **options)

        def __enter__(self) -> Watched:
            self.file.__enter__()
            return self

        def __exit__(self, *error: Any) -> None:
            self.file.__exit__(*error)

        def get_tensor(self, name: str) -> Tensor:
            tensor: Tensor = self.file.get_tensor(name)
            views.append(weakref.ref(tensor.untyped_storage()))
            return tensor

    quantise = partial(quantize, kind="int8", device=CPU)
    with monkeypatch.context() as patch:
        patch.setattr("lora_trainer.families.files.weight_files.safe_open", Watched)
        family = families.family("zimage")
        network = family.load_denoiser(facts, dtype=torch.bfloat16, device=CPU, quantise=quantise)
    assert views and not any(view() is not None for view in views)
    assert network.state_dict()


def test_tensors_that_are_not_the_network_s_are_refused_before_one_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensors = denoiser_tensors("flux") | {f"{PREFIX}txt_in.weight": torch.zeros(8, 96)}
    file = written(tensors, tmp_path / "flux.safetensors")
    facts = facts_at(base_of("flux"), family="flux", denoiser=file)
    watch = Watch(monkeypatch)
    family, quantise = families.family("flux"), partial(quantize, kind="int8", device=CPU)
    with pytest.raises(InputError, match="not that of its companion"):
        family.load_denoiser(facts, dtype=torch.bfloat16, device=CPU, quantise=quantise)
    assert not watch.sizes


def test_what_is_computed_of_a_deferred_tensor_is_read_when_it_is_asked_for() -> None:
    asked = list[str]()
    values = {"a": torch.arange(24.0).reshape(12, 2), "b": torch.tensor([3.0])}

    def deferred(name: str) -> Deferred:
        def value() -> Tensor:
            asked.append(name)
            return values[name]

        return Deferred(values[name].to("meta"), value)

    query, key, value = deferred("a").chunk(3)
    joined = torch.cat([key, query]).t().contiguous()
    assert joined.shape == (2, 8) and value.dtype == torch.float32 and not asked
    assert torch.equal(settled(joined), torch.cat([values["a"][4:8], values["a"][:4]]).t())
    assert asked == ["a", "a"]
    assert deferred("b").item() == 3.0, "numbers have no form that is deferred"


def test_the_command_trains_on_a_quantised_file_as_on_its_values(tmp_path: Path) -> None:
    exact = [layout for layout in LAYOUTS if not EXACT[layout]]
    stored, metadata, values, used = quantised(unet_tensors(base_of("sd15")), *exact)
    assert used == {*exact}
    place, runs = toy(tmp_path), []
    for name, tensors in (("quantised", stored), ("plain", values)):
        file = written(tensors, tmp_path / f"{name}.safetensors", metadata)
        line = place.arguments(
            *("--name", name),
            steps=2,
            base__companion=str(base_of("sd15")),
            memory__base_precision="int8",
            sampling__every_steps=0,
            train__validate_every_steps=0,
        )
        line[line.index("--base") + 1] = str(file)
        assert run_cli(line) == 0
        runs.append(trajectory(place.runs / name))
    assert len(runs[0]) == 2 and runs[0] == runs[1]


# ---- what is not read


def stating(**entry: Any) -> dict[str, Tensor]:
    content = json.dumps(entry).encode()
    return {"comfy_quant": torch.tensor(list(content), dtype=torch.uint8)}


def turned(group: Any) -> dict[str, Tensor]:
    return stating(format="int8_tensorwise", params={"convrot": True, "convrot_groupsize": group})


TWO, BYTES = torch.ones(2), torch.zeros(16, 2, dtype=torch.uint8)
DAMAGED: Mapping[str, tuple[str, str | dict[str, Tensor], str]] = {
    "no scale": ("fp8", "weight_scale", "as float8_e4m3fn, but the scale of a.weight is missing"),
    "factors of other inputs": ("fp8", {"pre_quant_scale": TWO}, "(a.pre_quant_scale is [2])"),
    "called mxfp8": ("fp8", stating(format="mxfp8"), "as mxfp8 (a.weight_scale is F32 [])"),
    "called int8": ("fp8", stating(format="int8_tensorwise"), "as int8_tensorwise (a.weight is F8"),
    "no words": ("fp8", {"comfy_quant": BYTES[:, 0]}, "as an unknown layout (a.weight)"),
    "half a scale": ("nvfp4", "weight_scale_2", "as nvfp4, but the scale of a.weight is missing"),
    "two numbers": ("nvfp4", {"weight_scale_2": TWO}, "as nvfp4 (a.weight_scale_2 is [2])"),
    "scales in rows": ("nvfp4", {"weight_scale": BYTES}, "as nvfp4 (a.weight_scale is U8 [16, 2])"),
    "turned": ("nvfp4", stating(format="nvfp4", convrot=True), "as nvfp4 ConvRot (a.weight)"),
    "of others": ("nvfp4", "comfy_quant", "without saying its layout (a.weight is U8)"),
    "was larger": ("nvfp4", stating(format="nvfp4", orig_shape=[16, 80]), "orig_shape [16, 80]"),
    "few blocks": ("mxfp8", {"weight_scale": BYTES}, "as mxfp8 (a.weight_scale is U8 [16, 2])"),
    "wide scales": (
        "mxfp8",
        {"weight_scale": torch.ones(128, 4)},
        "as mxfp8 (a.weight_scale is F32",
    ),
    "no word": ("int8", "comfy_quant", "without saying its layout (a.weight is I8)"),
    "blocks": ("int8", {"weight_scale": torch.ones(4, 4)}, "(a.weight_scale is F32 [4, 4])"),
    "of tomorrow": ("int8", stating(format="asym_w4a8_int8"), "as asym_w4a8_int8 (a.weight)"),
    "a turn of 32": ("convrot", turned(32), "as int8_tensorwise ConvRot in groups of 32"),
    "a turn of 256": ("convrot", turned(256), "as int8_tensorwise ConvRot in groups of 256"),
    "a turn of words": ("convrot", turned("x"), "as int8_tensorwise ConvRot in groups of x"),
}
"""What is wrong -> the layout, the tensor that is missing or those that are other ones, what is said."""


@pytest.mark.parametrize("kind", DAMAGED)
def test_damaged_and_unknown_layouts_are_refused_by_their_name(kind: str, tmp_path: Path) -> None:
    """By a plan, and with the same words where a plan was passed over."""
    layout, change, said = DAMAGED[kind]
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    stored, _, _, _ = quantised({"a.weight": weight}, layout)
    if isinstance(change, str):
        del stored[f"a.{change}"]
    else:
        stored |= {f"a.{name}": tensor for name, tensor in change.items()}
    file = written(stored, tmp_path / "a.safetensors")
    for read in (refuse_quantised, read_a):
        with pytest.raises(
            InputError, match=rf"a\.safetensors is quantised .*{re.escape(said)}"
        ) as raised:
            read(file)
        assert "\n" not in str(raised.value) and "readable are" in raised.value.found
    assert list(read_header(file)) == ["a.weight"]


def read_a(file: Path) -> object:
    return read_tensors(file, {"a": "a.weight"}, dtype=torch.float32)


def test_a_list_of_layers_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    stored, _, _, _ = quantised({"a.weight": torch.ones(16, 64)}, "nvfp4", listed=True)
    for broken in ("[", '{"layers": 1}'):
        file = written(stored, tmp_path / "a.safetensors", {"_quantization_metadata": broken})
        with pytest.raises(InputError, match="its _quantization_metadata cannot be read"):
            refuse_quantised(file)
    entry = {"layers": {"a": {"format": "nvfp4"}, "gone": {"format": "nvfp4"}}}
    refuse_quantised(written(stored, file, {"_quantization_metadata": json.dumps(entry)}))
