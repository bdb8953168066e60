"""Adapters in other names: there and back without a loss, in every family and of every kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_trainer import families
from lora_trainer.common.errors import RequestError
from lora_trainer.families.base import FileFormat
from lora_trainer.lora.tensors import ModuleTensors
from lora_trainer.lora_file.inspect import inspect_file
from lora_trainer.tools.convert import convert
from tests.fakes.adapters import adapted, draw_module
from tests.fakes.family_bases import CPU, base_of, facts_of
from tests.fakes.tool_files import adapter_of, deltas, distance, networks_of, saved

WAYS = [
    (name, there, back)
    for name in families.MODULES
    for there in families.family(name).formats.written
    for back in families.family(name).formats.written
    if there != back or len(families.family(name).formats.written) == 1
]
"""(family, format of the file, format it goes through)."""


def some_of(name: str, **options: Any) -> dict[str, ModuleTensors]:
    """Return an adapter on every third layer: of all sorts, in a third of the time."""
    return dict(list(adapter_of(name, **options).items())[::3])


def tensors_of(file: Path) -> dict[str, Tensor]:
    return load_file(file)


def metadata_of(file: Path) -> dict[str, str]:
    with safe_open(file, framework="pt") as opened:
        return dict(opened.metadata())


def there_and_back(file: Path, name: str, *, back: FileFormat, through: FileFormat) -> list[Path]:
    """Return the file in the other format and that one in its own again."""
    base = str(base_of(name))
    other = convert(file, format=through, base=base, output=file.with_name("other.safetensors"))
    again = convert(other.file, format=back, base=base, output=file.with_name("again.safetensors"))
    return [other.file, again.file]


@pytest.mark.parametrize(("name", "own", "through"), WAYS)
@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_renaming_keeps_every_bit(
    name: str, own: FileFormat, through: FileFormat, precision: Any, tmp_path: Path
) -> None:
    adapter = some_of(name, scale=1.0)
    file = saved(tmp_path / "a.safetensors", name, adapter, format=own, precision=precision)
    other, again = there_and_back(file, name, back=own, through=through)
    first, last = tensors_of(file), tensors_of(again)
    assert first.keys() == last.keys()
    for key, tensor in first.items():
        assert last[key].dtype == tensor.dtype and torch.equal(last[key], tensor), key
    assert (tensors_of(other).keys() == first.keys()) == spelt_alike(name, adapter, own, through)


def spelt_alike(
    name: str, adapter: dict[str, ModuleTensors], one: FileFormat, other: FileFormat
) -> bool:
    """Whether two formats have one spelling: ComfyUI reads diffusers' names of some families."""
    family = families.family(name)
    parts = [key.partition(".") for key in adapter]
    return all(
        family.lora_key_name(one, component, module)
        == family.lora_key_name(other, component, module)
        for component, _, module in parts
    )


def test_diffusers_draws_the_same_with_the_converted_file(tmp_path: Path) -> None:
    """The reader here is not ours: weights after `fuse_lora` are base plus update, twice."""
    adapter = adapter_of("sd15", text=True, scale=0.7 / 4)
    file = saved(tmp_path / "a.safetensors", "sd15", adapter, format="kohya")
    other = convert(file, format="diffusers", base=str(base_of("sd15"))).file
    for each in (file, other):
        pipeline = families.family("sd15").plain_pipeline(
            facts_of("sd15"), dtype=torch.float32, device=CPU
        )
        pipeline.load_lora_weights(str(each.parent), weight_name=each.name)
        pipeline.fuse_lora(components=["unet", "text_encoder"])
        pipeline.unload_lora_weights()
        for component, network in networks_of("sd15").items():
            ours = {key: value for key, value in adapter.items() if key.startswith(component + ".")}
            wanted = adapted(network, ours).state_dict()
            fused = pipeline.unet if component == "denoiser" else pipeline.text_encoder
            found = fused.state_dict()
            assert max(float((found[key] - wanted[key]).abs().max()) for key in wanted) < 1e-6


# ---- precision


def test_half_precision_stays_where_it_rounds_nothing(tmp_path: Path) -> None:
    file = saved(
        tmp_path / "a.safetensors",
        "sd15",
        some_of("sd15", scale=4.0),  # moves the exponents only
        format="kohya",
        precision="fp16",
    )
    done = convert(file, format="diffusers", base=str(base_of("sd15")))
    assert (done.precision, done.notes) == ("fp16", ())
    assert {tensor.dtype for tensor in tensors_of(done.file).values()} == {torch.float16}


def test_half_precision_becomes_whole_where_it_would_round_and_is_forced_on_request(
    tmp_path: Path,
) -> None:
    adapter = some_of("sd15", scale=0.7 / 4)
    file = saved(tmp_path / "a.safetensors", "sd15", adapter, format="kohya", precision="fp16")
    base, live = str(base_of("sd15")), deltas(file, base_of("sd15"))
    done = convert(file, format="diffusers", base=base)
    assert done.precision == "fp32"
    assert any("fp32" in note and "--precision fp16" in note for note in done.notes)
    assert distance(deltas(done.file, base), live) < 1e-6

    forced = convert(file, format="diffusers", base=base, precision="fp16", force=True)
    assert forced.precision == "fp16"
    assert 1e-5 < distance(deltas(forced.file, base), live) < 2e-3


def test_a_value_beyond_the_precision_is_said_and_nothing_written(tmp_path: Path) -> None:
    adapter = some_of("sd15", size=300.0)
    file = saved(tmp_path / "a.safetensors", "sd15", adapter, format="kohya", precision="bf16")
    large = {key: tensor * 1e3 for key, tensor in tensors_of(file).items() if "alpha" not in key}
    save_file(tensors_of(file) | large, file)
    with pytest.raises(RequestError, match="fp16 ends at 6.55e.04.*--precision fp32"):
        convert(file, format="kohya", precision="fp16", base=str(base_of("sd15")))
    assert list(tmp_path.iterdir()) == [file]


# ---- files of others


def test_peft_settings_become_tensors_once(tmp_path: Path) -> None:
    """diffusers' own files state the strength in the header; a second one beside it would be refused."""
    name = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
    shape = tuple(networks_of("sd15")["denoiser"].get_parameter(f"{name}.weight").shape)
    module = draw_module(shape, rank=4, scale=1.0)
    settings = {"unet.r": 4, "unet.lora_alpha": 6}
    file = tmp_path / "peft.safetensors"
    save_file(
        {
            f"unet.{name}.lora_A.weight": module.tensors["down"],
            f"unet.{name}.lora_B.weight": module.tensors["up"],
        },
        file,
        metadata={"lora_adapter_metadata": json.dumps(settings), "mine": "kept"},
    )
    done = convert(file, format="kohya", base=str(base_of("sd15")))
    (value,) = deltas(done.file, base_of("sd15")).values()
    wanted = 1.5 * module.tensors["up"].double() @ module.tensors["down"].double()
    assert float((value - wanted).norm() / wanted.norm()) < 1e-6
    entries = metadata_of(done.file)
    assert "lora_adapter_metadata" not in entries
    assert (entries["mine"], entries["ss_network_dim"], entries["ss_network_alpha"]) == (
        "kept",
        "4",
        "6.0",
    )


def test_a_file_for_a_public_release_needs_no_base(tmp_path: Path) -> None:
    adapter = some_of("sdxl")
    file = saved(tmp_path / "a.safetensors", "sdxl", adapter, format="kohya")
    assert convert(file, format="diffusers").modules == len(adapter)


def test_a_file_of_the_embedded_base_names_it(tmp_path: Path) -> None:
    """Its U-Net has fewer levels than the public release; our own header says where it is from."""
    name = "up_blocks.0.attentions.0.proj_in"  # the public release has none at the deepest level
    adapter = {f"denoiser.{name}": draw_module((128, 128, 1, 1))}
    plain = saved(tmp_path / "a.safetensors", "sd15", adapter, format="kohya")
    stated = saved(
        tmp_path / "b.safetensors",
        "sd15",
        adapter,
        format="kohya",
        **{"lora_train.settings": json.dumps({"base.model": "embedded"})},
    )
    with pytest.raises(Exception, match="base with --base"):
        convert(plain, format="diffusers")
    assert convert(plain, format="diffusers", base="embedded").modules == 1
    assert convert(stated, format="diffusers").modules == 1


# ---- headers


def test_the_header_is_carried_over_and_what_changed_is_true(tmp_path: Path) -> None:
    file = saved(tmp_path / "a.safetensors", "sd15", some_of("sd15", scale=0.7 / 4), format="kohya")
    base = str(base_of("sd15"))
    done = convert(file, format="diffusers", base=base)
    before, after = metadata_of(file), metadata_of(done.file)
    changed = {key for key in before if before[key] != after.get(key)}
    assert changed == {
        *("modelspec.hash_sha256", "sshs_model_hash", "ss_network_alpha"),
    }
    assert (
        after["ss_network_alpha"],
        "lora_train.strength" in after,
        "lora_train.strength" in before,
    ) == ("4.0", True, False)
    back = convert(done.file, format="kohya", base=base, output=tmp_path / "back.safetensors")
    assert "lora_train.strength" not in metadata_of(back.file)
    for each in (done.file, back.file):
        assert not inspect_file(each).problems, "hash, alpha and rank are those of the tensors"


@pytest.mark.parametrize("kind", ["lora", "loha", "lokr"])
def test_the_stated_alpha_is_that_of_the_tensors(kind: str, tmp_path: Path) -> None:
    adapter = some_of("qwen", kind=kind, scale=0.7 / 4)
    file = saved(tmp_path / "a.safetensors", "qwen", adapter, format="kohya")
    done = convert(
        file, format="kohya", base=str(base_of("qwen")), output=tmp_path / "b.safetensors"
    )
    (alpha,) = {
        float(each) for key, each in tensors_of(done.file).items() if key.endswith(".alpha")
    }
    assert alpha == pytest.approx(0.7 if kind == "lora" else 4)
    assert float(metadata_of(done.file)["ss_network_alpha"]) == pytest.approx(alpha)
    assert not inspect_file(done.file).problems


def test_an_input_can_be_replaced_on_request(tmp_path: Path) -> None:
    file = saved(tmp_path / "a.safetensors", "sd15", some_of("sd15"), format="kohya")
    base = str(base_of("sd15"))
    live = deltas(file, base)
    convert(file, format="diffusers", base=base, output=file, force=True)
    assert distance(deltas(file, base), live) < 1e-6
    assert all(key.startswith("unet.") for key in tensors_of(file))
