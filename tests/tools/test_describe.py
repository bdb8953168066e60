"""Describing a file changes what its header tells people, and not one bit of its tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lora_trainer.cli import main
from lora_trainer.common.errors import InputError, MachineError, RequestError
from lora_trainer.lora_file import stream
from lora_trainer.lora_file.inspect import inspect_file
from lora_trainer.tools.describe import Description, describe
from tests.fakes.tool_files import entries_of

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


def body(path: Path) -> bytes:
    data = path.read_bytes()
    return data[8 + int.from_bytes(data[:8], "little") :]


def header(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    found: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return found


def test_tensors_stay_the_same_bits_and_other_entries_as_they_are(tmp_path: Path) -> None:
    file = adapter(tmp_path / "a.safetensors")
    before, body_before = header(file), body(file)
    done = describe(file, Description(title="new \u00fc", tags="a, b"), output=file, force=True)
    assert done.changed == ("modelspec.tags", "modelspec.title")
    assert body(file) == body_before
    after = header(file)
    assert entries_of(file) == {
        **METADATA,
        "modelspec.title": "new \u00fc",
        "modelspec.tags": "a, b",
    }
    del before["__metadata__"], after["__metadata__"]
    assert after == before
    assert load_file(file).keys() == before.keys()
    assert int.from_bytes(file.read_bytes()[:8], "little") % 8 == 0, "tensors stay aligned"


def test_an_empty_text_removes_and_none_keeps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, new = adapter(tmp_path / "a.safetensors"), tmp_path / "b.safetensors"
    before = file.read_bytes()
    assert main.run(["describe", str(file), "--author", "  ", "--output", str(new), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == {"file": str(new), "changed": ["modelspec.author"]}
    assert "modelspec.author" not in entries_of(new)
    assert entries_of(new)["modelspec.title"] == "old"
    assert file.read_bytes() == before
    assert main.run(["describe", str(file), "--title", "x", "--output", str(new)]) == 2
    assert main.run(["describe", str(file), "--title", "one"]) == 0
    assert entries_of(file)["modelspec.title"] == "one"


@pytest.mark.parametrize(
    ("hint", "expected"),
    [("Put 'zorble' into the prompt.", "Put 'blip' into the prompt."), ("my way", "my way")],
)
def test_the_hint_follows_the_trigger_unless_it_is_somebodys_own(
    hint: str, expected: str, tmp_path: Path
) -> None:
    file = adapter(tmp_path / "a.safetensors", **{"modelspec.usage_hint": hint})
    describe(file, Description(trigger="blip"), output=file, force=True)
    assert entries_of(file)["modelspec.trigger_phrase"] == "blip"
    assert entries_of(file)["modelspec.usage_hint"] == expected


def test_what_somebody_types_leaves_without_paths_and_tokens(tmp_path: Path) -> None:
    file = adapter(tmp_path / "a.safetensors")
    secret = "hf_" + "a" * 34
    told = f"from /home/me/pictures/x.png with {secret} \ud800"
    describe(file, Description(description=told), output=file, force=True)
    found = entries_of(file)["modelspec.description"]
    assert "/home/me" not in found
    assert secret not in found
    assert inspect_file(file).modules == 1


def test_what_cannot_be_leaves_everything_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = adapter(tmp_path / "a.safetensors")
    before = file.read_bytes()
    other = tmp_path / "b.safetensors"
    other.write_bytes(b"mine")
    new = Description(title="x")
    with pytest.raises(RequestError, match="exists already"):
        describe(file, new, output=other)
    with pytest.raises(RequestError, match="characters"):
        describe(file, Description(title="x" * 20_001), output=file, force=True)
    with pytest.raises(InputError, match="not a safetensors file"):
        describe(other, new, output=other, force=True)
    monkeypatch.setattr(stream, "_body_sha256", lambda *_, **__: "other")
    with pytest.raises(MachineError, match="other bytes"):
        describe(file, new, output=file, force=True)
    assert file.read_bytes() == before
    assert other.read_bytes() == b"mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors"]
