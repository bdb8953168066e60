"""Adapters in other names: there and back without a loss, in every family and of every kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_trainer import families
from lora_trainer.common.errors import RequestError
from lora_trainer.families.base import FileFormat
from lora_trainer.lora.tensors import ModuleTensors, split_key
from lora_trainer.lora_file.inspect import inspect_file
from lora_trainer.tools.convert import convert
from tests.fakes.adapters import draw_module
from tests.fakes.family_bases import base_of
from tests.fakes.tool_files import adapter_of, deltas, distance, entries_of, networks_of, saved

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


@pytest.mark.parametrize(("name", "own", "through"), WAYS)
def test_renaming_keeps_every_bit(
    name: str, own: FileFormat, through: FileFormat, tmp_path: Path
) -> None:
    adapter, base = some_of(name, scale=1.0), str(base_of(name))
    file = saved(tmp_path / "a.safetensors", name, adapter, format=own, precision="fp16")
    other = convert(file, format=through, base=base, output=tmp_path / "other.safetensors").file
    again = convert(other, format=own, base=base, output=tmp_path / "again.safetensors").file
    first, last = load_file(file), load_file(again)
    assert first.keys() == last.keys()
    for key, tensor in first.items():
        assert last[key].dtype == tensor.dtype and torch.equal(last[key], tensor), key
    spelt = families.family(name).lora_key_name
    names = {form: [spelt(form, *split_key(key)) for key in adapter] for form in (own, through)}
    # ComfyUI reads diffusers' names of some families.
    assert (load_file(other).keys() == first.keys()) == (names[own] == names[through])


# ---- precision


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
    convert(file, format="diffusers", base=base, output=file, force=True)
    assert distance(deltas(file, base), live) < 1e-6


def test_a_value_beyond_the_precision_is_said_and_nothing_written(tmp_path: Path) -> None:
    adapter = some_of("sd15", size=300.0)
    file = saved(tmp_path / "a.safetensors", "sd15", adapter, format="kohya", precision="bf16")
    large = {key: tensor * 1e3 for key, tensor in load_file(file).items() if "alpha" not in key}
    save_file(load_file(file) | large, file)
    with pytest.raises(RequestError, match="fp16 ends at 6.55e.04.*--precision fp32"):
        convert(file, format="kohya", precision="fp16", base=str(base_of("sd15")))
    assert list(tmp_path.iterdir()) == [file]


# ---- files of others


def test_peft_settings_become_tensors_once(tmp_path: Path) -> None:
    """diffusers' own files state the strength in the header; a second one beside it would be refused."""
    name = "down_blocks.0.attentions.0.transformer_blocks.0.attn1.to_q"
    shape = tuple(networks_of("sd15")["denoiser"].get_parameter(f"{name}.weight").shape)
    module = draw_module(shape, rank=4, scale=1.0)
    factors = {"lora_A": module.tensors["down"], "lora_B": module.tensors["up"]}
    settings = json.dumps({"unet.r": 4, "unet.lora_alpha": 6})
    file = tmp_path / "peft.safetensors"
    tensors = {f"unet.{name}.{end}.weight": factor for end, factor in factors.items()}
    save_file(tensors, file, metadata={"lora_adapter_metadata": settings, "mine": "kept"})
    done = convert(file, format="kohya", base=str(base_of("sd15")))
    (value,) = deltas(done.file, base_of("sd15")).values()
    wanted = 1.5 * module.tensors["up"].double() @ module.tensors["down"].double()
    assert float((value - wanted).norm() / wanted.norm()) < 1e-6
    entries = entries_of(done.file)
    assert "lora_adapter_metadata" not in entries
    stated = ("mine", "ss_network_dim", "ss_network_alpha")
    assert [entries[key] for key in stated] == ["kept", "4", "6.0"]


def test_a_file_of_the_embedded_base_names_it(tmp_path: Path) -> None:
    """Its U-Net has fewer levels than the public release; our own header says where it is from."""
    name = "up_blocks.0.attentions.0.proj_in"  # the public release has none at the deepest level
    adapter = {f"denoiser.{name}": draw_module((128, 128, 1, 1))}
    plain = saved(tmp_path / "a.safetensors", "sd15", adapter, format="kohya")
    settings = {"lora_train.settings": json.dumps({"base.model": "embedded"})}
    stated = saved(tmp_path / "b.safetensors", "sd15", adapter, format="kohya", **settings)
    with pytest.raises(Exception, match="base with --base"):
        convert(plain, format="diffusers")
    assert convert(plain, format="diffusers", base="embedded").modules == 1
    assert convert(stated, format="diffusers").modules == 1


# ---- headers


def test_the_header_is_carried_over_and_what_changed_is_true(tmp_path: Path) -> None:
    file = saved(tmp_path / "a.safetensors", "sd15", some_of("sd15", scale=0.7 / 4), format="kohya")
    base = str(base_of("sd15"))
    done = convert(file, format="diffusers", base=base)
    before, after = entries_of(file), entries_of(done.file)
    changed = {key for key in before if before[key] != after.get(key)}
    assert changed == {"modelspec.hash_sha256", "sshs_model_hash", "ss_network_alpha"}
    assert after.keys() - before.keys() == {"lora_train.strength"}
    assert after["ss_network_alpha"] == "4.0"
    back = convert(done.file, format="kohya", base=base, output=tmp_path / "back.safetensors")
    assert "lora_train.strength" not in entries_of(back.file)
    for each in (done.file, back.file):
        assert not inspect_file(each).problems, "hash, alpha and rank are those of the tensors"


@pytest.mark.parametrize("kind", ["lora", "lokr"])
def test_the_stated_alpha_is_that_of_the_tensors(kind: str, tmp_path: Path) -> None:
    adapter, base = some_of("qwen", kind=kind, scale=0.7 / 4), str(base_of("qwen"))
    file = saved(tmp_path / "a.safetensors", "qwen", adapter, format="kohya")
    done = convert(file, format="kohya", base=base, output=tmp_path / "b.safetensors")
    (alpha,) = {float(each) for key, each in load_file(done.file).items() if key.endswith(".alpha")}
    assert alpha == pytest.approx(0.7 if kind == "lora" else 4)
    assert float(entries_of(done.file)["ss_network_alpha"]) == pytest.approx(alpha)
    assert not inspect_file(done.file).problems
