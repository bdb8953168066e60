"""Runs with captions of more than 75 tokens and clip skip, through the real command with its defaults."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from lora_trainer.run import prepare
from tests.fakes.family_bases import copy_of
from tests.fakes.runs import (
    QUIET,
    Toy,
    apart,
    events,
    problems,
    run_cli,
    settings_of,
    toy,
    trajectory,
)
from tests.test_prepare import PROCESSOR

pytestmark = pytest.mark.timeout(600)  # a loaded machine is no failure
LONG = ", ".join("one of the toys" for _ in range(12))
MORE: Mapping[str, Any] = {
    "adapter__new_tokens": 2,
    "adapter__text_encoder": True,
    "data__class_word": "thing",
    "data__emphasis": True,
    "data__trigger": "zwx",
    "objective__preservation_weight": 0.5,
    "output__save_every_steps": 0,
    "sampling__prompts": ["zwx toy", f"zwx {LONG}"],
    "train__batch_size": 3,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """Captions of two, three and one chunk."""
    place = toy(tmp_path_factory.mktemp("long"))
    copy_of("sd2", place.base)
    (place.dataset / "p1.txt").write_text(LONG)
    (place.dataset / "p2.txt").write_text(f"a (big:1.3) toy, {LONG}"[:60])
    assert place.train() == 0
    return place


def request(place: Toy, **settings: Any) -> prepare.Request:
    own = {"base.model": str(place.base), "data.resolution": 16}
    return prepare.Request(
        dataset=place.dataset, overrides={**own, "data.cache_dir": str(place.cache), **settings}
    )


def test_nothing_of_a_long_caption_is_lost(place: Toy) -> None:
    chunks = settings_of(place.run)["data.caption_tokens"] // 75
    assert chunks > 1
    assert not [row for row in problems(place.run) if row["code"] == "CAP-03"]
    with safe_open(place.run / "toy.safetensors", framework="numpy") as file:
        metadata = file.metadata()
    assert metadata["ss_max_token_length"] == str(75 * chunks)
    assert metadata["ss_clip_skip"] == "None"


def test_a_plan_says_how_much_is_read_and_check_what_is_cut(place: Toy) -> None:
    prepared = prepare.prepare(request(place), hardware=PROCESSOR)
    assert prepared.facts.chunks == settings_of(place.run)["data.caption_tokens"] // 75
    assert "of 6 have more than 75" in prepared.plan.origins["data.caption_tokens"].reason
    short = prepare.prepare(request(place, **{"data.caption_tokens": 75}), hardware=PROCESSOR)
    long_bytes, short_bytes = (one.plan.memory.phases["training"] for one in (prepared, short))
    assert long_bytes > short_bytes, "longer texts take more"
    (finding,) = [row for row in short.report.findings if row.kind == "caption-too-long"]
    assert "data.caption_tokens=auto" in finding.advice
    for tokens, room in ((75, 75), ("auto", 225)):
        asked = request(place, **{"data.caption_tokens": tokens})
        report, limit = prepare.examine(asked, hardware=PROCESSOR)
        assert (finding in report.findings) == (tokens == 75)
        assert limit is not None and limit["tokens"] == room


def test_what_is_read_changes_what_is_encoded_and_learned(place: Toy) -> None:
    (first,) = events(place.run, "cached")
    for name, change in (("cut", {"data__caption_tokens": 75}), ("skip", {"base__clip_skip": 2})):
        assert run_cli(place.arguments("--name", name, steps=2, **QUIET, **change)) == 0
        (cached,) = events(place.runs / name, "cached")
        assert (cached["texts"], cached["latents"]) == (first["texts"], 0)
        assert trajectory(place.runs / name)[0][1] != trajectory(place.run)[0][1]


def test_the_file_draws_what_the_trainer_showed(place: Toy, tmp_path: Path) -> None:
    """With text encoders, weights of words, a learned word, prior preservation, a long prompt and clip skip."""
    assert run_cli(place.arguments("--name", "more", steps=4, **MORE, base__clip_skip=2)) == 0
    run = place.runs / "more"
    assert settings_of(run)["data.caption_tokens"] > 75
    with safe_open(run / "more.safetensors", framework="numpy") as file:
        assert file.metadata()["ss_clip_skip"] == "2"
    prompts = [word for prompt in MORE["sampling__prompts"] for word in ("--prompt", prompt)]
    assert run_cli(["sample", str(run), *prompts, "--output", str(tmp_path)]) == 0
    shown = sorted((run / "samples" / "step-00000004").glob("*.png"))
    images = sorted(tmp_path.glob("*.png"))
    assert len(shown) == len(images) == 2
    assert all(apart(*pair) <= 2 for pair in zip(images, shown, strict=True))
