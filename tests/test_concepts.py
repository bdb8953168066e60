"""What a LoRA is to teach changes a few presets, says why, and gives way to whatever somebody typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from lora_trainer.common.errors import RequestError
from lora_trainer.config.choices import CONCEPT, SETTINGS, Concept
from lora_trainer.config.config import setting_keys
from lora_trainer.config.layers import Resolved, read_settings_file, resolve
from lora_trainer.planning.run_time import run_length
from tests.fakes.runs import run_cli, toy


def resolved(
    overrides: dict[str, Any], *, config: Path | None = None, preset: str = "auto", **more: Any
) -> Resolved:
    return resolve(
        family="sd15",
        tier="10-12",
        priority="balanced",
        preset=preset,
        config_file=config and read_settings_file(config),
        overrides=overrides,
        **more,
    )


def test_every_kind_has_its_settings_each_with_a_reason() -> None:
    assert SETTINGS.keys() == set(get_args(Concept))
    for chosen in SETTINGS.values():
        assert chosen.keys() <= set(setting_keys())
        assert all(reason for _, reason in chosen.values())


@pytest.mark.parametrize(
    ("kind", "flip", "dropout"),
    [("any", False, 0.05), ("person", False, 0.0), ("object", False, 0.0), ("style", True, 0.1)],
)
def test_a_kind_is_a_layer_above_the_presets(kind: str, flip: bool, dropout: float) -> None:
    found = resolved({CONCEPT: kind})
    assert (found.config.data.flip, found.config.data.caption_dropout) == (flip, dropout)
    origin = found.origins["data.flip"]
    assert (origin.layer == f"concept {kind}", bool(origin.reason)) == ((kind != "any"),) * 2


def test_files_and_typed_settings_are_above_it(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps({CONCEPT: "style", "data.flip": False}))
    for found in (resolved({}, config=file), resolved({}, preset=str(file))):
        assert found.config.data.flip is False
        assert found.config.data.caption_dropout == 0.1
    typed = resolved({CONCEPT: "person", "data.caption_dropout": 0.3}, config=file)
    assert typed.config.data.caption_dropout == 0.3
    assert typed.origins["data.caption_dropout"].layer == "command line"


def test_a_resumed_run_keeps_what_was_settled() -> None:
    before = {CONCEPT: "style", "data.flip": False, "data.caption_dropout": 0.4}
    found = resolved({}, run_settings=before).config.data
    assert (found.flip, found.caption_dropout) == (False, 0.4)


def test_a_word_that_is_no_kind_is_refused() -> None:
    with pytest.raises(RequestError, match=CONCEPT):
        resolved({CONCEPT: "dog"})


def test_a_style_needs_fewer_views_of_more_pictures() -> None:
    plain, style, person = (
        run_length(images=100, batch_size=1, views=120, concept=concept)
        for concept in ("any", "style", "person")
    )
    assert style[0] == plain[0] / 2 == person[0] / 2
    assert style[1].startswith("style: 60 views")
    few = run_length(images=15, batch_size=1, views=120, concept="style")
    assert few[0] == run_length(images=15, batch_size=1, views=120)[0]


def test_the_command_line_has_a_word_for_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = toy(tmp_path)
    line = ["plan", str(place.dataset), "--base", "embedded", "--json"]
    cache = f"--set=data.cache_dir={place.cache}"
    assert run_cli([*line, cache, "--kind", "style"]) == 0
    row = json.loads(capsys.readouterr().out)["settings"]["data.flip"]
    assert row == {
        "value": True,
        "origin": "concept style",
        "reason": SETTINGS["style"]["data.flip"][1],
    }
    assert run_cli([*line, cache, "--kind", "dog"]) == 2
