"""Files of other trainers: recognised, read to the number they were trained to, converted without a change, in use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional as F

from lora_trainer import families
from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.config.learning import AdapterSettings
from lora_trainer.lora.adapter import inject
from lora_trainer.lora.lora_hooks import attach_lora
from lora_trainer.lora.tensors import ModuleTensors, update
from lora_trainer.tools.adapters import open_source
from scripts.readers.trees import Tree
from tests.fakes.adapters import tool
from tests.lora_files.trainers import CASES, LISTING, Case, Expected, build, some

READ = [case for case in CASES if not case.refused]
LYCORIS = [case for case in READ if case.name.startswith("LyCORIS") and case.family == "sd15"]
WRITTEN = [
    case
    for case in READ
    if case.name.startswith(("LyCORIS", "ComfyUI", "OneTrainer kohya"))
    or any(kind in case.name for kind in ("DoRA", "OFT", "LoKr", "lokr"))
]
"""Files of each family and of each kind: what is written depends on these, and not on how it was spelt."""
TOLERANCE = 1e-5
MODULE = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"


def relative_error(module: ModuleTensors, expected: Expected) -> float:
    """Return |read - written| / |written| of a layer's update, in Frobenius norm."""
    wanted = expected.delta
    weight = expected.base_weight[expected.rows].double() if expected.written.based else None
    found = update(module, weight).double().reshape(wanted.shape)
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_file_is_recognised_and_read_to_the_update_it_holds(case: Case, tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    expected = build(case, file)
    seen = tool("inspect", file)
    assert seen["family"] == case.family
    assert seen["kinds"] == sorted({each.written.kind for each in expected.values()})
    assert seen["modules"] == sum(len(list(part.layers)) for part in case.parts)
    assert [problem for problem in seen["problems"] if problem["severity"] == "error"] == []
    if case in LYCORIS and not any(each.written.based for each in expected.values()):
        energy = sum(float(each.delta.square().sum()) for each in expected.values())
        assert sum(norm**2 for norm in seen["norms"].values()) == pytest.approx(energy, rel=1e-5)
    if case.refused:
        with pytest.raises(InputError, match=case.refused) as raised:
            tool("convert", file, format="comfyui", output=tmp_path / "b.safetensors")
        assert "\n" not in str(raised.value)
        assert not (tmp_path / "b.safetensors").exists()
        return
    with open_source(file) as source:
        assert set(source) == expected.keys()
        for key, each in some(expected, most=2).items():
            module = source[key]
            assert relative_error(module, each) < TOLERANCE, key
            if each.written.bias is not None:
                assert torch.equal(module.tensors["bias"].float(), each.written.bias[each.rows])


@pytest.mark.parametrize("case", LYCORIS, ids=str)
def test_a_tensor_without_numbers_is_an_error(case: Case, tmp_path: Path) -> None:
    """A write that was cut may leave one; it fits no layer of any kind."""
    file = tmp_path / "a.safetensors"
    build(case, file, most=1)
    tensors = load_file(file)
    largest = max(tensors, key=lambda key: tensors[key].numel())
    stated = {"ss_base_model_version": "sd_v1"}
    save_file({**tensors, largest: torch.empty(0)}, file, metadata=stated)
    with pytest.raises(InputError) as raised:
        tool("convert", file, format="kohya", output=tmp_path / "b.safetensors")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "b.safetensors").exists()


@pytest.mark.parametrize("case", WRITTEN, ids=str)
def test_a_file_converts_without_a_change(case: Case, tmp_path: Path) -> None:
    file, output = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    expected, formats = build(case, file, most=2), families.family(case.family).formats.written
    text = any(part.component != "denoiser" for part in case.parts)
    others = any(each.written.kind != "lora" for each in expected.values())
    biased = any(each.written.bias is not None for each in expected.values())
    odd = others or biased or "DoRA of inputs" in case.name
    done = set()
    for format in formats:
        options = {"output": output, "precision": "fp32", "force": True}
        try:
            notes = tool("convert", file, format=format, **options)["notes"]
        except RequestError as error:
            assert "not written in it" in error.found
            continue
        except InputError as error:
            joined = any(len(each.layer.parts) > 1 for each in expected.values())
            assert "Kronecker" in error.found and "lokr" in case.name.lower() and joined
            return
        done.add(format)
        unread = format in families.family(case.family).formats.unread
        in_kind = others or "DoRA" in case.name or (text and format == "comfyui")
        assert bool(notes) == (unread or in_kind)
        with open_source(output) as source:
            assert set(source) == expected.keys()
            for key, each in some(expected, most=1).items():
                assert relative_error(source[key], each) < TOLERANCE, (format, key)
    assert done == {*formats} - ({"diffusers"} if odd else set())


def test_shapes_are_those_that_readers_take(tmp_path: Path) -> None:
    """ComfyUI multiplies a weight by `rescale` as it is, and Tucker forms have the kernel in their second factor."""
    file, output = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    shapes: dict[str, list[torch.Size]] = {}
    for name, end in (("diag-OFT rescaled", "rescale"), ("LoKr tucker", "lokr_w2_b")):
        build(next(case for case in LYCORIS if f" {name} " in case.name), file)
        tool("convert", file, format="kohya", output=output, precision="fp32", force=True)
        for path in (file, output):
            tensors = load_file(path)
            shapes[f"{end} of {path.stem}"] = [
                tensors[key].shape for key in sorted(tensors) if key.endswith(end)
            ]
    assert shapes["rescale of a"] == shapes["rescale of b"]
    assert {len(shape) for shape in shapes["rescale of b"]} == {2, 4}
    assert [len(shape) for shape in shapes["lokr_w2_b of b"]] == [2] * 12


def test_rows_of_a_kronecker_product_become_a_lora_when_asked(tmp_path: Path) -> None:
    """What no file can state exactly is approximated, and the error is said."""
    case = next(case for case in CASES if case.name == "musubi-tuner 0.2 lokr FLUX.2")
    file, output = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    expected = build(case, file, most=1)
    done = tool("resize", file, rank=2, output=output, precision="fp32")
    assert done["cuts"].keys() == expected.keys()
    with open_source(output) as source:
        for key, each in expected.items():
            lost = relative_error(source[key], each) ** 2
            assert done["cuts"][key]["energy"] == pytest.approx(1 - lost, abs=1e-5)
            assert source[key].rank == 2


FACTORS = {f"{MODULE}.lora_down.weight": (2, 320), f"{MODULE}.lora_up.weight": (320, 2)}


CODE = """
import sys
from pathlib import Path
from lora_trainer.cli import tools
from lora_trainer.common.errors import InputError
output = Path(sys.argv[1]) / "b.safetensors"
for file in sys.argv[2:]:
    for refused in (
        lambda: tools.convert(Path(file), format="diffusers"),
        lambda: tools.merge([f"{file}:0.5"], output=output),
        lambda: tools.resize(Path(file), output=output, rank=1),
    ):
        try:
            refused()
        except InputError as error:
            print(error)
sys.exit("torch" in sys.modules)
"""


def test_other_files_are_refused_by_what_they_are(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    for other in LISTING["other"]:
        shapes = other["shapes"] | (FACTORS if "lora" in other else {})
        tensors = {key: torch.ones(shape) for key, shape in shapes.items()}
        save_file(tensors, file, metadata={"ss_base_model_version": "sd_v1"})
        with pytest.raises(InputError, match=other["reason"]) as raised:
            tool("convert", file, format="diffusers", output=tmp_path / "b.safetensors")
        assert "\n" not in str(raised.value)


def test_what_fits_no_base_is_refused_without_torch(tmp_path: Path) -> None:
    files = []
    for number, unusable in enumerate(LISTING["unusable"]):
        files.append(str(tmp_path / f"{number}.safetensors"))
        tensors = {key: torch.zeros(shape) for key, shape in unusable["shapes"].items()}
        save_file(tensors, files[-1])
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path), *files],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    reasons = [unusable["reason"] for unusable in LISTING["unusable"] for _ in range(3)]
    for line, reason in zip(done.stdout.splitlines(), reasons, strict=True):
        assert reason in line
    assert done.returncode == 0, "torch was imported to refuse a file"


def opened(name: str, folder: Path) -> tuple[str, ModuleTensors, Expected, Tree]:
    """Return one layer of a file: its name, its tensors, what was written, and a base with this layer alone."""
    (case,) = (case for case in CASES if case.name == f"LyCORIS 3.2 {name} sd15")
    file = folder / "a.safetensors"
    written = build(case, file, most=2)
    norms = {key: each for key, each in written.items() if each.written.kind == "norm"}
    ((key, expected),) = some(norms or written, most=1).items()
    with open_source(file) as source:
        module = source[key]
    layer = key.removeprefix("denoiser.")
    weight = expected.base_weight[expected.rows]
    return layer, module, expected, Tree().hold({f"{layer}.weight": weight})


@pytest.mark.parametrize("name", ["LoCon tucker", "BOFT", "GLoRA", "full with biases"])
def test_validate_adds_what_the_file_holds(name: str, tmp_path: Path) -> None:
    key, module, expected, base = opened(name, tmp_path)
    layer = base.get_submodule(key)
    is_linear = isinstance(layer, nn.Linear)
    x = torch.randn(2, expected.layer.inputs[0], *(() if is_linear else (5, 5)))
    apply = F.linear if is_linear else F.conv2d
    wanted = apply(x, expected.delta.float(), expected.written.bias)
    before = layer(x)
    with attach_lora({"denoiser": base}, {f"denoiser.{key}": module}).at(1.0):
        change = layer(x) - before
    assert float((change - wanted).norm() / wanted.norm()) < 1e-4


def test_what_cannot_be_measured_or_continued_is_refused_with_the_reason(tmp_path: Path) -> None:
    key, module, _, base = opened("train_norm", tmp_path)
    with pytest.raises(InputError, match="changes the norm"):
        attach_lora({"denoiser": base}, {f"denoiser.{key}": module})
    for name, kind, reason in (
        ("GLoRA", "lora", "a glora adapter, which is not trained here"),
        ("LoHa", "lora", "adapter.kind=loha"),
        ("BOFT", "oft", "has rank 8"),
    ):
        key, module, _, base = opened(name, tmp_path)
        settings = AdapterSettings(kind=kind, rank=module.rank, conv_rank=module.rank)
        modules = {"denoiser": [key]}
        adapter = inject({"denoiser": base}, modules=modules, settings=settings, alpha=1.0, seed=0)
        with pytest.raises(RequestError, match=reason):
            adapter.load_tensors({f"denoiser.{key}": module})
