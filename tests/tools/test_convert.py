"""Adapters in other names and with other texts in their headers: not a bit of an update is lost."""

from __future__ import annotations

import json
from hashlib import sha256
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_trainer import families
from lora_trainer.common.errors import InputError, MachineError, RequestError
from tests.fakes.adapters import (
    Draws,
    adapter_of,
    body_of,
    deltas,
    distance,
    draw_module,
    entries_of,
    networks_of,
    saved,
    tool,
)
from tests.fakes.family_bases import base_of

WAYS = [
    (name, own, through)
    for name in families.NAMES
    for formats in [families.family(name).formats.written]
    # A family of one format has no second to go through.
    for own, through in list(combinations(formats, 2)) or [(*formats, *formats)]
]
"""(family, format of the file, format it goes through)."""


def sd15() -> Path:
    return base_of("sd15")


@pytest.mark.parametrize(("name", "own", "through"), WAYS)
def test_renaming_keeps_every_bit(name: str, own: Any, through: Any, tmp_path: Path) -> None:
    adapter, base = adapter_of(name, every=3, scale=1.0), base_of(name)
    file = saved(tmp_path / "a.safetensors", name, adapter, format=own, precision="fp16")
    other, again = tmp_path / "other.safetensors", tmp_path / "again.safetensors"
    tool("convert", file, format=through, base=base, output=other)
    tool("convert", other, format=own, base=base, output=again)
    first, last = load_file(file), load_file(again)
    assert first.keys() == last.keys()
    for key, tensor in first.items():
        assert last[key].dtype == tensor.dtype and torch.equal(last[key], tensor), key
    family = families.family(name)
    spelt = family.lora_key_name
    names = {form: [spelt(form, *key.split(".", 1)) for key in adapter] for form in (own, through)}
    # ComfyUI reads diffusers' names of some families.
    are_equal = names[own] == names[through] and not family.formats.original
    assert (load_file(other).keys() == first.keys()) == are_equal


# ---- precision and header


def test_half_precision_becomes_whole_where_it_would_round_and_is_forced_on_request(
    tmp_path: Path,
) -> None:
    """What changes in the header is true of the new tensors, and all else is carried over."""
    adapter = adapter_of("sd15", every=3, scale=0.7 / 4)
    file = saved(tmp_path / "a.safetensors", "sd15", adapter, format="kohya", precision="fp16")
    live, before = deltas(file, sd15()), entries_of(file)
    done = tool("convert", file, format="diffusers", base=sd15())
    assert done["precision"] == "fp32"
    assert any("fp32" in note and "--precision fp16" in note for note in done["notes"])
    assert distance(deltas(done["file"], sd15()), live) < 1e-6
    after = entries_of(done["file"])
    changed = {key for key in before if before[key] != after.get(key)}
    assert changed == {"modelspec.hash_sha256", "sshs_model_hash", "ss_network_alpha"}
    assert after.keys() - before.keys() == {"lora_train.strength"}
    assert after["ss_network_alpha"] == "4.0"
    back = tool(
        "convert", done["file"], format="kohya", base=sd15(), output=tmp_path / "b.safetensors"
    )
    assert "lora_train.strength" not in entries_of(back["file"])
    own = tool("convert", file, format="kohya", base=sd15(), output=tmp_path / "c.safetensors")
    assert entries_of(own["file"])["ss_network_alpha"] == "0.7", "as far as a float32 states it"
    for each in (done, back):
        assert not tool("inspect", each["file"])["problems"], "hash, alpha and rank are right"

    forced = tool("convert", file, format="diffusers", base=sd15(), precision="fp16", force=True)
    assert forced["precision"] == "fp16"
    assert 1e-5 < distance(deltas(forced["file"], sd15()), live) < 2e-3
    tool("convert", file, format="diffusers", base=sd15(), output=file, force=True)
    assert distance(deltas(file, sd15()), live) < 1e-6


def test_a_value_beyond_the_precision_is_said_and_nothing_written(tmp_path: Path) -> None:
    adapter = adapter_of("sd15", every=3, size=300.0)
    file = saved(tmp_path / "a.safetensors", "sd15", adapter, format="kohya", precision="bf16")
    large = {key: tensor * 1e3 for key, tensor in load_file(file).items() if "alpha" not in key}
    save_file(load_file(file) | large, file)
    with pytest.raises(RequestError, match="fp16 ends at 6.55e.04.*--precision fp32"):
        tool("convert", file, format="kohya", precision="fp16", base=sd15())
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
    done = tool("convert", file, format="kohya", base=sd15())
    (value,) = deltas(done["file"], sd15()).values()
    wanted = 1.5 * module.tensors["up"].double() @ module.tensors["down"].double()
    assert float((value - wanted).norm() / wanted.norm()) < 1e-6
    entries = entries_of(done["file"])
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
        tool("convert", plain, format="diffusers")
    assert tool("convert", plain, format="diffusers", base="embedded")["modules"] == 1
    assert tool("convert", stated, format="diffusers")["modules"] == 1


MODULE = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"
METADATA = {
    "modelspec.title": "old",
    "modelspec.author": "somebody",
    "modelspec.trigger_phrase": "zorble",
    "modelspec.usage_hint": "Put 'zorble' into the prompt.",
    "modelspec.hash_sha256": "0x00",
    "ss_training_comment": "kept",
    "sshs_legacy_hash": "12345678",
}


def described(path: Path) -> Path:
    tensors = {
        # Alphabetic order is not the file's: safetensors puts the widest first.
        f"{MODULE}.alpha": torch.tensor(4.0),
        f"{MODULE}.lora_down.weight": Draws()(8, 320).half(),
        f"{MODULE}.lora_up.weight": torch.full((320, 8), torch.nan).half(),
    }
    save_file(tensors, path, metadata=METADATA)
    return path


# ---- texts in the header


SECRET = "hf_" + "a" * 34
TEXTS: list[tuple[dict[str, str], dict[str, str | None]]] = [
    ({"title": "new \u00fc", "tags": "a, b"}, {"title": "new \u00fc", "tags": "a, b"}),
    # An empty text removes an entry; the hint follows the trigger unless it is somebody's own.
    (
        {"author": "  ", "trigger": "blip"},
        {"author": None, "trigger_phrase": "blip", "usage_hint": "Put 'blip' into the prompt."},
    ),
    # What somebody types leaves without paths, tokens and lone surrogates.
    (
        {"description": f"from /home/me/pictures/x.png with {SECRET} \ud800"},
        {"description": "from [path] with [token] ?"},
    ),
]


@pytest.mark.parametrize(("texts", "entries"), TEXTS)
def test_texts_change_their_entries_and_no_bit_of_a_tensor(
    texts: dict[str, str], entries: dict[str, str | None], tmp_path: Path
) -> None:
    file, new = described(tmp_path / "a.safetensors"), tmp_path / "b.safetensors"
    before, tensors = file.read_bytes(), load_file(file)
    changes = {f"modelspec.{name}": text for name, text in entries.items()}
    done = tool("describe", file, output=new, **texts)
    assert done == {"file": str(new), "changed": sorted(changes)}
    wanted = {key: text for key, text in {**METADATA, **changes}.items() if text is not None}
    assert entries_of(new) == wanted
    assert body_of(new) == body_of(file) and load_file(new).keys() == tensors.keys()
    assert all(load_file(new)[key].shape == each.shape for key, each in tensors.items())
    assert int.from_bytes(new.read_bytes()[:8], "little") % 8 == 0, "tensors stay aligned"
    assert tool("inspect", new)["modules"] == 1 and file.read_bytes() == before


def test_a_hint_of_somebodys_own_stays_and_a_file_takes_its_own_place(tmp_path: Path) -> None:
    file = described(tmp_path / "a.safetensors")
    own = {**METADATA, "modelspec.usage_hint": "my way"}
    save_file({"a": torch.ones(1)}, file, metadata=own)
    tool("describe", file, trigger="blip")
    assert entries_of(file) == own | {"modelspec.trigger_phrase": "blip"}


def test_what_cannot_be_leaves_everything_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, other = described(tmp_path / "a.safetensors"), tmp_path / "b.safetensors"
    before = file.read_bytes()
    other.write_bytes(b"mine")
    for output in (other, file):
        with pytest.raises(RequestError, match="exists already"):
            tool("describe", file, title="x", output=output)
    with pytest.raises(RequestError, match="characters"):
        tool("describe", file, title="x" * 20_001)
    with pytest.raises(InputError, match="is a file of another kind"):
        tool("describe", other, title="x")
    monkeypatch.setattr(
        "lora_trainer.lora_file.tensor_file.file_digest", lambda *_: sha256(b"other")
    )
    with pytest.raises(MachineError, match="other bytes"):
        tool("describe", file, title="x")
    assert file.read_bytes() == before
    assert other.read_bytes() == b"mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors"]
