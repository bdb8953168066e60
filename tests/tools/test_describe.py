"""Describing a file changes what its header tells people, and not one bit of its tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lora_trainer.common.errors import InputError, MachineError, RequestError
from tests.fakes.adapters import body_of, entries_of, tool

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


def adapter(path: Path, **more: str) -> Path:
    values = np.random.default_rng(0).normal(size=(8, 320)).astype(np.float16)
    tensors: dict[str, Any] = {
        # Alphabetic order is not the file's: safetensors puts the widest first.
        f"{MODULE}.alpha": np.array(4, dtype=np.float32),
        f"{MODULE}.lora_down.weight": values,
        f"{MODULE}.lora_up.weight": np.full((320, 8), np.nan, dtype=np.float16),
    }
    save_file(tensors, path, metadata={**METADATA, **more})
    return path


def numbers(path: Path) -> dict[str, tuple[tuple[int, ...], bytes]]:
    return {key: (each.shape, each.tobytes()) for key, each in load_file(path).items()}


def test_tensors_stay_the_same_bits_and_other_entries_as_they_are(tmp_path: Path) -> None:
    file = adapter(tmp_path / "a.safetensors")
    before, tensors = body_of(file), numbers(file)
    done = tool("describe", file, title="new \u00fc", tags="a, b")
    assert done == {"file": str(file), "changed": ["modelspec.tags", "modelspec.title"]}
    assert body_of(file) == before
    new = {"modelspec.title": "new \u00fc", "modelspec.tags": "a, b"}
    assert entries_of(file) == {**METADATA, **new}
    assert numbers(file) == tensors
    assert int.from_bytes(file.read_bytes()[:8], "little") % 8 == 0, "tensors stay aligned"


def test_an_empty_text_removes_and_none_keeps(tmp_path: Path) -> None:
    file, new = adapter(tmp_path / "a.safetensors"), tmp_path / "b.safetensors"
    before = file.read_bytes()
    done = tool("describe", file, author="  ", title="", output=new)
    assert done == {"file": str(new), "changed": ["modelspec.author", "modelspec.title"]}
    assert not {"modelspec.author", "modelspec.title"} & entries_of(new).keys()
    assert entries_of(new)["modelspec.trigger_phrase"] == "zorble"
    assert file.read_bytes() == before


def test_the_hint_follows_the_trigger_unless_it_is_somebodys_own(tmp_path: Path) -> None:
    for hint, expected in (
        ("Put 'zorble' into the prompt.", "Put 'blip' into the prompt."),
        ("my way", "my way"),
    ):
        file = adapter(tmp_path / "a.safetensors", **{"modelspec.usage_hint": hint})
        tool("describe", file, trigger="blip")
        assert entries_of(file)["modelspec.trigger_phrase"] == "blip"
        assert entries_of(file)["modelspec.usage_hint"] == expected


def test_what_somebody_types_leaves_without_paths_and_tokens(tmp_path: Path) -> None:
    file = adapter(tmp_path / "a.safetensors")
    secret = "hf_" + "a" * 34
    tool("describe", file, description=f"from /home/me/pictures/x.png with {secret} \ud800")
    found = entries_of(file)["modelspec.description"]
    assert "/home/me" not in found
    assert secret not in found
    assert tool("inspect", file)["modules"] == 1


def test_what_cannot_be_leaves_everything_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, other = adapter(tmp_path / "a.safetensors"), tmp_path / "b.safetensors"
    before = file.read_bytes()
    other.write_bytes(b"mine")
    for output in (other, file):
        with pytest.raises(RequestError, match="exists already"):
            tool("describe", file, title="x", output=output)
    with pytest.raises(RequestError, match="characters"):
        tool("describe", file, title="x" * 20_001)
    with pytest.raises(InputError, match="not a safetensors file"):
        tool("describe", other, title="x")
    monkeypatch.setattr("lora_trainer.lora_file.tensor_file._body_sha256", lambda *_, **__: "other")
    with pytest.raises(MachineError, match="other bytes"):
        tool("describe", file, title="x")
    assert file.read_bytes() == before
    assert other.read_bytes() == b"mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors"]
