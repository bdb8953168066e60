"""In how many chunks captions are read: counted as they are trained, as transformers counts; what is cut is said."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.cli import main
from lora_trainer.dataset import caption_rules
from lora_trainer.families.files.locate import EMBEDDED_FOLDER
from tests.fakes.runs import write_dataset

TOKENIZER = EMBEDDED_FOLDER / "tokenizer"
Ask = Callable[..., dict[str, Any]]


@pytest.fixture
def ask(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Ask:
    """Return a function that answers `plan` or `check` of a dataset in JSON."""

    def answer(command: str, *words: str, **settings: object) -> dict[str, Any]:
        for key, value in {**settings, "data__cache_dir": tmp_path / "cache"}.items():
            words += ("--set", f"{key.replace('__', '.')}={value}")
        capsys.readouterr()
        assert main.run([command, str(tmp_path / "d"), *words, "--json"]) == 0
        return dict(json.loads(capsys.readouterr().out))

    return answer


def write(folder: Path, *captions: str) -> None:
    """Write images with these captions; one token each of the embedded base's is a letter."""
    if not (folder / "d").exists():
        write_dataset(folder / "d", images=len(captions))
    for number, caption in enumerate(captions):
        (folder / "d" / f"p{number}.txt").write_text(caption)


def tokens(ask: Ask, *words: str, **settings: object) -> tuple[Any, str]:
    """Return the planned number of tokens, and why."""
    planned = ask("plan", *words, **settings)["settings"]["data.caption_tokens"]
    return planned["value"], planned["reason"]


def cut(ask: Ask, **settings: object) -> list[dict[str, Any]]:
    """Return the findings about captions that are cut."""
    rows = ask("check", **settings)["findings"]
    return [row for row in rows if row["kind"].startswith("caption-too-long")]


@pytest.mark.parametrize(("letters", "planned"), [(1, 75), (75, 75), (76, 150), (226, 225)])
def test_the_longest_caption_decides(letters: int, planned: int, ask: Ask, tmp_path: Path) -> None:
    write(tmp_path, "b c", "x " * letters)
    value, reason = tokens(ask)
    assert value == planned
    assert f"the longest caption has {max(2, letters)} tokens" in reason
    assert ("1 of 2 have more than 75" in reason) == (letters > 75)
    findings = cut(ask)
    assert len(findings) == (letters > 225)
    if findings:
        assert "1 of 2 images have captions longer than the 225 tokens" in findings[0]["what"]
        assert "226 in p1.png" in findings[0]["what"] and "shorten" in findings[0]["advice"]


def test_what_is_asked_stands_and_what_it_cuts_is_said(ask: Ask, tmp_path: Path) -> None:
    write(tmp_path, "x " * 101, "y " * 80, "z")
    assert tokens(ask, data__caption_tokens=75) == (75, "")
    (finding,) = cut(ask, data__caption_tokens=75)
    assert (finding["severity"], finding["code"]) == ("warning", "CAP-03")
    assert "2 of 3 images" in finding["what"]
    assert "data.caption_tokens=auto" in finding["advice"]
    assert not cut(ask, data__caption_tokens=150)


def test_captions_are_counted_as_they_are_trained(ask: Ask, tmp_path: Path) -> None:
    write(tmp_path, "zibbo " + "x " * 60)

    def longest(**settings: object) -> int:
        return int(re.findall(r"\d+", tokens(ask, **settings)[1])[0])

    plain = longest()
    assert longest(data__caption_suffix="y y y") == plain + 3
    assert longest(data__trigger="zibbo", adapter__new_tokens=2) == 60 + 2
    of_class = {"data__class_word": "y y y", "objective__preservation_weight": 0.5}
    assert longest(data__trigger="x", **of_class) > longest(data__trigger="x")
    write(tmp_path, "(x:1.3) y")
    assert longest(data__emphasis=True) == 2


def test_captions_that_cannot_be_counted_are_read_in_one_piece(ask: Ask, tmp_path: Path) -> None:
    write(tmp_path, "x " * 200)
    absent = ("--base", "stable-diffusion-v1-5/stable-diffusion-v1-5")
    value, reason = tokens(ask, *absent, "--vram", "12")
    assert value == 75 and "once the base is on this machine" in reason
    assert ask("check", *absent)["caption_limit"] is None
    flux = ("--base", "black-forest-labs/FLUX.1-dev")
    value, reason = tokens(ask, *flux, "--vram", "24", data__caption_tokens=225)
    assert value == "auto" and "512 tokens in one piece" in reason
    assert ask("check")["caption_limit"] == {"tokens": 225, "tokenizer": str(TOKENIZER)}


def test_lengths_are_remembered_until_a_text_changes(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "x " * 80, "y")
    first = tokens(ask)
    counted: list[int] = []
    real = caption_rules.count_tokens

    def counts(tokenizer: Any, captions: Sequence[str]) -> list[int]:
        counted.append(len(captions))
        return real(tokenizer, captions)

    monkeypatch.setattr(caption_rules, "count_tokens", counts)
    assert tokens(ask) == first and counted == []
    assert tokens(ask, data__caption_suffix="z") != first
    write(tmp_path, "x " * 80, "x " * 160)
    assert tokens(ask)[0] == 225
    assert counted == [2, 2]


CAPTIONS = (
    "",
    "zibbo, a teal creature with two antennae",
    "A  Photo\nof it's 1234 (very:1.2) # # caf\u00e9 \U0001f600 \u4e2d\u6587",
    "word, " * 60,
)


@pytest.mark.parametrize("form", ["tokenizer.json", "vocab.json"])
def test_counts_are_those_of_transformers(form: str, tmp_path: Path) -> None:
    from transformers import CLIPTokenizer

    folder = TOKENIZER if form == "tokenizer.json" else slow_form(tmp_path)
    tokenizer = caption_rules.read_tokenizer(folder)
    assert tokenizer is not None
    whole = CLIPTokenizer.from_pretrained(str(TOKENIZER))
    cleaned = [" ".join(caption.split()) for caption in CAPTIONS]
    expected = whole(cleaned, add_special_tokens=False, verbose=False).input_ids
    assert caption_rules.count_tokens(tokenizer, CAPTIONS) == list(map(len, expected))


def slow_form(folder: Path) -> Path:
    """Write the same tokenizer as vocab.json and merges.txt, as older releases carry it."""
    model = json.loads((TOKENIZER / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    text = "\n".join(["#version: 0.2", *merges, "", ""])
    (folder / "merges.txt").write_text(text, encoding="utf-8")
    return folder


def test_a_tokenizer_that_cannot_be_read_counts_nothing(tmp_path: Path) -> None:
    assert caption_rules.read_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.json").write_bytes(b"{")
    assert caption_rules.read_tokenizer(tmp_path) is None
