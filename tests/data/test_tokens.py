"""Captions are counted as transformers counts them, from either form of CLIP's tokenizer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from lora_trainer.config.inputs import BaseSettings
from lora_trainer.dataset.tokens import TokenCounter, caption_limit
from lora_trainer.families.locate import EMBEDDED, EMBEDDED_FOLDER, describe

TOKENIZER = EMBEDDED_FOLDER / "tokenizer"
CAPTIONS = (
    "",
    "zibbo, a teal creature with two antennae",
    "A  Photo\nof it's 1234 (very:1.2) # # caf\u00e9 \U0001f600 \u4e2d\u6587",
    "word, " * 60,
)


def test_the_embedded_base_reads_75_tokens() -> None:
    facts = describe(BaseSettings(model=EMBEDDED))
    for chunks, tokens in ((1, 75), (3, 225)):
        limit = caption_limit(facts, chunks=chunks)
        assert limit is not None
        assert (limit.tokens, limit.tokenizer) == (tokens, TOKENIZER)


def test_a_base_that_is_not_here_or_reads_more_has_no_limit() -> None:
    facts = describe(BaseSettings(model=EMBEDDED))
    assert caption_limit(replace(facts, layout=None), chunks=1) is None
    assert caption_limit(replace(facts, max_tokens=256), chunks=1) is None


@pytest.mark.parametrize("form", ["tokenizer.json", "vocab.json"])
def test_counts_are_those_of_transformers(form: str, tmp_path: Path) -> None:
    from transformers import CLIPTokenizer

    counter = TokenCounter.load(TOKENIZER if form == "tokenizer.json" else slow_form(tmp_path))
    assert counter is not None
    whole = CLIPTokenizer.from_pretrained(str(TOKENIZER))
    assert counter.counts(CAPTIONS) == [counter.count(caption) for caption in CAPTIONS]
    for caption in CAPTIONS:
        expected = whole(" ".join(caption.split()), add_special_tokens=False, verbose=False)
        assert counter.count(caption) == len(expected.input_ids)


def slow_form(folder: Path) -> Path:
    """Write the same tokenizer as vocab.json and merges.txt, as older releases carry it."""
    model = json.loads((TOKENIZER / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    text = "\n".join(["#version: 0.2", *merges, ""])
    (folder / "merges.txt").write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("content", [None, b"{", b'{"model": {}}'])
def test_a_tokenizer_that_cannot_be_read_counts_nothing(
    content: bytes | None, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    assert TokenCounter.load(tmp_path) is None
