"""In how many chunks captions are read: counted as they are trained, as transformers counts; what is cut is said."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lora_trainer import families
from lora_trainer.common.memo import MemoTable
from lora_trainer.config.config import build_config
from lora_trainer.config.inputs import BaseSettings
from lora_trainer.dataset.caption_lengths import (
    MEMO,
    Reading,
    TokenCounter,
    caption_limit,
    reading_of,
    too_long,
)
from lora_trainer.dataset.records import ImageRecord
from lora_trainer.dataset.scan import scan
from lora_trainer.families.base import BaseFacts
from lora_trainer.families.locate import EMBEDDED, EMBEDDED_FOLDER, describe
from tests.fakes.family_bases import facts_of
from tests.fakes.runs import write_dataset

FAMILY = families.family("sd15")


@pytest.fixture(scope="module")
def facts() -> BaseFacts:
    return describe(BaseSettings(model=EMBEDDED))


def records_of(folder: Path, *captions: str) -> tuple[ImageRecord, ...]:
    """Return images with these captions; one token each of the embedded base's is a letter."""
    write_dataset(folder, images=len(captions))
    for number, caption in enumerate(captions):
        (folder / f"p{number}.txt").write_text(caption)
    return scanned(folder)


def scanned(folder: Path) -> tuple[ImageRecord, ...]:
    return scan(folder, settings=build_config({}).data).records


def reading(
    records: tuple[ImageRecord, ...], facts: BaseFacts, family: str = "sd15", **settings: Any
) -> Reading:
    values = {key.replace("__", "."): value for key, value in settings.items()}
    config = build_config(values)
    memo = MemoTable.load(Path(records[0].file).parent.parent / "memo", MEMO)
    chosen = families.family(family)
    return reading_of(records, config=config, facts=facts, family=chosen, memo=memo)


@pytest.mark.parametrize(("letters", "chunks"), [(1, 1), (75, 1), (76, 2), (226, 3)])
def test_the_longest_caption_decides(
    letters: int, chunks: int, facts: BaseFacts, tmp_path: Path
) -> None:
    found = reading(records_of(tmp_path / "d", "b c", "x " * letters), facts)
    assert found.chunks == chunks
    assert found.lengths is not None and found.lengths.longest == max(2, letters)
    assert f"the longest caption has {max(2, letters)} tokens" in found.reason
    assert ("1 of 2 have more than 75" in found.reason) == (letters > 75)
    cut = tuple(too_long(found, facts=facts))
    assert len(cut) == (letters > 225)
    if cut:
        assert "1 of 2 images have captions of more than the 225 tokens" in cut[0].what
        assert "226 in p1.png" in cut[0].what and "shorten them" in cut[0].advice


def test_what_is_asked_stands_and_what_it_cuts_is_said(facts: BaseFacts, tmp_path: Path) -> None:
    records = records_of(tmp_path / "d", "x " * 101, "y " * 80, "z")
    found = reading(records, facts, data__caption_tokens=75)
    assert (found.chunks, found.reason) == (1, "")
    (finding,) = too_long(found, facts=facts)
    assert (finding.severity, finding.code) == ("warning", "CAP-03")
    assert "2 of 3 images" in finding.what and "data.caption_tokens=auto" in finding.advice
    assert not tuple(too_long(reading(records, facts, data__caption_tokens=150), facts=facts))


def test_captions_are_counted_as_they_are_trained(facts: BaseFacts, tmp_path: Path) -> None:
    records = records_of(tmp_path / "d", "zibbo " + "x " * 60)

    def longest(**settings: Any) -> int:
        lengths = reading(records, facts, **settings).lengths
        assert lengths is not None
        return lengths.longest

    plain = longest()
    assert longest(data__caption_suffix="y y y") == plain + 3
    weighted = records_of(tmp_path / "w", "(x:1.3) y")
    config = {"data__emphasis": True}
    found = reading(weighted, facts, **config).lengths
    assert found is not None and found.longest == 2
    word = {"data__trigger": "zibbo", "adapter__new_tokens": 2}
    assert longest(**word) == 60 + 2
    of_class = {
        "data__trigger": "x",
        "data__class_word": "y y y",
        "objective__preservation_weight": 0.5,
    }
    assert longest(**of_class) > longest(data__trigger="x")


def test_captions_that_cannot_be_counted_are_read_in_one_piece(
    facts: BaseFacts, tmp_path: Path
) -> None:
    records, absent = records_of(tmp_path / "d", "x " * 200), replace(facts, layout=None)
    found = reading(records, absent)
    assert (found.chunks, found.lengths) == (1, None)
    assert "once the base is on this machine" in found.reason
    found = reading(records, facts_of("flux"), "flux", data__caption_tokens=225)
    assert found.chunks == 1 and "512 tokens in one piece" in found.reason
    limit = caption_limit(facts, chunks=3)
    assert limit is not None and (limit.tokens, limit.tokenizer) == (225, TOKENIZER)
    assert caption_limit(absent, chunks=1) is None
    assert caption_limit(replace(facts, max_tokens=256), chunks=1) is None


def test_lengths_are_remembered_until_a_text_changes(
    facts: BaseFacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "d"
    first = reading(records_of(folder, "x " * 80, "y"), facts)
    counted: list[int] = []
    real = TokenCounter.counts

    def counts(self: TokenCounter, captions: Sequence[str]) -> list[int]:
        counted.append(len(captions))
        return real(self, captions)

    monkeypatch.setattr(TokenCounter, "counts", counts)
    assert reading(scanned(folder), facts) == first and counted == []
    assert reading(scanned(folder), facts, data__caption_suffix="z").lengths != first.lengths
    (folder / "p1.txt").write_text("x " * 160)
    assert reading(scanned(folder), facts).chunks == 3
    assert counted == [2, 2]


TOKENIZER = EMBEDDED_FOLDER / "tokenizer"
CAPTIONS = (
    "",
    "zibbo, a teal creature with two antennae",
    "A  Photo\nof it's 1234 (very:1.2) # # caf\u00e9 \U0001f600 \u4e2d\u6587",
    "word, " * 60,
)


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


@pytest.mark.parametrize("content", [None, b"{"])
def test_a_tokenizer_that_cannot_be_read_counts_nothing(
    content: bytes | None, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_bytes(content)
    assert TokenCounter.load(tmp_path) is None
