"""Tokenizers that pad with "!", as the releases of Stable Diffusion 2, XL and 3 configure theirs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_trainer import families
from tests.fakes.bases.parts import clip_tokenizer
from tests.fakes.family_bases import CPU, copy_of, facts_at
from tests.fakes.json_files import edit_json

PADS_WITH_ZERO = [("sd2", "tokenizer"), ("sdxl", "tokenizer_2"), ("sd3", "tokenizer_2")]
"""Families, and the tokenizer whose tokenizer_config.json has pad_token "!" with number 0."""
BANG: dict[str, Any] = {
    "content": "!",
    "lstrip": False,
    "normalized": False,
    "rstrip": False,
    "single_word": False,
    "special": True,
}


def released(base: Path, tokenizer: str) -> Path:
    """Let a tokenizer pad as the releases' do: vocabulary and merges alone, "!" among its special tokens."""
    folder = base / tokenizer
    whole = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(whole["model"]["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in whole["model"]["merges"])
    (folder / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
    added = {str(token["id"]): token for token in whole["added_tokens"]}
    kept = {key: {k: v for k, v in token.items() if k != "id"} for key, token in added.items()}
    edit_json(
        folder / "tokenizer_config.json",
        pad_token="!",
        added_tokens_decoder={"0": BANG, **kept},
        tokenizer_class="CLIPTokenizer",
    )
    return base


@pytest.mark.parametrize(("name", "tokenizer"), PADS_WITH_ZERO)
def test_a_padding_character_in_a_caption_is_text(
    tmp_path: Path, name: str, tokenizer: str
) -> None:
    """It was read as padding, 0, where every other program but diffusers reads 256 (OpenCLIP's numbers)."""
    facts = facts_at(released(copy_of(name, tmp_path / "base"), tokenizer))
    encoder = families.family(name).load_text_encoder(facts, dtype=torch.float32, device=CPU)
    component = tokenizer.replace("tokenizer", "text_encoder")
    plain = clip_tokenizer()  # pads with the end of a text
    for caption in ("wow! a red square!", "!", "red !! blue", "a square"):
        numbers = encoder.tokenize([caption])[component][0].tolist()
        expected = plain(caption).input_ids
        assert numbers == expected + [0] * (77 - len(expected)), caption
    assert plain.convert_tokens_to_ids("!") == 0
