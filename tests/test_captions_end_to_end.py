"""Whole trainings with all rules for captions: the split does not matter, a resume is exact, all options act."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from lora_trainer.config.config import build_config
from lora_trainer.run.prepare import Request, prepare
from lora_trainer.run.run_folder import read_run
from tests.fakes.family_bases import base_of
from tests.fakes.runs import (
    Toy,
    contents,
    events,
    last_state,
    python,
    run_cli,
    toy,
    trajectory,
)
from tests.test_prepare import PROCESSOR
from tests.test_resume_kill import DRIVER

ALL: dict[str, Any] = {
    "data__trigger": "zibbo",
    "data__caption_lines": "one",
    "data__wildcards": True,
    "data__shuffle_tags": True,
    "data__keep_tokens_separator": "|||",
    "data__secondary_separator": ";;;",
    "data__tag_dropout": 0.3,
    "data__caption_prefix": "{photo|drawing},",
    "data__caption_suffix": "end",
    "data__caption_dropout": 0.1,
    "data__caption_dropout_every_epochs": 3,
    "data__emphasis": True,
    "data__folders": {"more": {"weight": 2.0, "flip": True, "repeats": 2, "tag_dropout": 0.0}},
    "logging__trackers": [],
    "sampling__every_steps": 0,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    place = toy(tmp_path_factory.mktemp("captions"), images=4).with_base()
    more = toy(tmp_path_factory.mktemp("more"), images=6).dataset
    (place.dataset / "more").mkdir()
    for index in (4, 5):
        (more / f"p{index}.png").rename(place.dataset / "more" / f"p{index}.png")
    for index in range(6):
        folder = place.dataset / "more" if index > 3 else place.dataset
        lines = [f"toy ||| {{red|blue}} hat, a;;;b, (c:1.4), d{line} ||| x" for line in range(2)]
        (folder / f"p{index}.txt").write_text("\n".join(lines))
    return place


def first_norm(run: Path) -> float:
    return float(events(run, "step")[0]["grad_norm"])


def test_the_split_into_micro_batches_changes_nothing(place: Toy) -> None:
    norms, weights = [], []
    for cap in (4, 2, 1):
        name = f"split-{cap}"
        settings = {**ALL, "train__batch_size": 4, "memory__micro_batch": cap}
        assert place.train("--name", name, steps=2, **settings) == 0
        norms.append(first_norm(place.runs / name))
        weights.append(load_file(place.runs / name / f"{name}.safetensors"))
    assert norms[1:] == [pytest.approx(norms[0], rel=1e-5)] * 2
    assert all(found.keys() == weights[0].keys() for found in weights)


@pytest.mark.parametrize("text_encoder", [False, True])
def test_a_killed_run_goes_on_to_the_same_bits(place: Toy, text_encoder: bool) -> None:
    settings = {**ALL, "adapter__text_encoder": text_encoder, "train__batch_size": 3}
    whole, cut = (f"{name}-{text_encoder}".lower() for name in ("whole", "cut"))
    assert place.train("--name", whole, **settings) == 0
    line = place.arguments("--name", cut, **settings)
    after_two_steps = ("lora_trainer.checkpoint.writer", "freeze", 3, False)
    done = python(DRIVER, json.dumps([(line, after_two_steps)]))
    assert done.stderr.split()[-1] == "-9"
    assert run_cli([*line, "--resume"]) == 0
    run, expected = place.runs / cut, place.runs / whole
    assert [(row["exactness"], row["step"]) for row in events(run, "resumed")] == [("EXACT", 2)]
    assert trajectory(run) == trajectory(expected)
    assert contents(last_state(run)) == contents(last_state(expected))


ACTING: dict[str, Any] = {
    "data__caption_lines": "one",
    "data__emphasis": True,
    "data__folders": {"more": {"weight": 5.0}},
}
"""What is not told apart by the texts alone, which tests/data/test_caption_rules.py does."""


@pytest.fixture(scope="module")
def plain(place: Toy) -> list[tuple[Any, ...]]:
    return losses_of(place, "plain")


def losses_of(place: Toy, name: str, **settings: Any) -> list[tuple[Any, ...]]:
    quiet = {"logging__trackers": [], "sampling__every_steps": 0, "train__batch_size": 6}
    quiet["train__validate_every_steps"] = 0
    assert place.train("--name", name, steps=2, **{**quiet, **settings}) == 0
    return trajectory(place.runs / name)


@pytest.mark.parametrize("key", ACTING)
def test_options_reach_the_training(key: str, place: Toy, plain: list[tuple[Any, ...]]) -> None:
    assert losses_of(place, key.replace("_", "-"), **{key: ACTING[key]}) != plain


def test_what_is_planned_is_what_is_encoded(place: Toy) -> None:
    overrides = {key.replace("__", "."): value for key, value in ALL.items()}
    overrides |= {"base.model": str(place.base), "data.cache_dir": str(place.folder / "count")}
    overrides |= {"data.resolution": 16, "data.validation_fraction": 0.0}
    prepared = prepare(Request(dataset=place.dataset, overrides=overrides), hardware=PROCESSOR)
    fewer = prepare(
        Request(dataset=place.dataset, overrides={**overrides, "data.caption_variants": 2}),
        hardware=PROCESSOR,
    )
    assert fewer.plan.disk_bytes["cache"] < prepared.plan.disk_bytes["cache"]
    count = {**ALL, "data__cache_dir": str(place.folder / "count"), "data__validation_fraction": 0}
    assert place.train("--name", "count", steps=2, **count) == 0
    (cached,) = events(place.runs / "count", "cached")
    files = (place.folder / "count").rglob("*.safetensors")
    assert cached["latents"] == 4 + 2 * 2
    # All six captions are the same texts: two lines, five texts each and one in the plain form.
    assert cached["texts"] <= 2 * 5 + 2
    assert sum(file.stat().st_size for file in files) <= 1.2 * prepared.plan.disk_bytes["cache"]


def test_one_setting_of_a_folder_on_the_command_line(place: Toy, tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("[data.folders.more]\nrepeats = 3\nweight = 0.5\n")
    line = place.arguments("--config", str(file), "--name", "one", steps=2, logging__trackers=[])
    assert run_cli([*line, "--set", "data.folders.more.repeats=5"]) == 0
    settings = read_run(place.runs / "one")["settings"]
    assert settings["data.folders"] == {"more": {"repeats": 5, "weight": 0.5}}
    assert build_config(settings).data.of_folder("more").repeats == 5


def test_bases_without_clip_alone_refuse_weights_of_words(
    place: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["--set", "data.emphasis=true", "--set", f"data.cache_dir={place.cache}"]
    assert run_cli(["plan", str(place.dataset), "--base", str(base_of("sd3")), *settings]) == 2
    assert "support no prompt weights" in capsys.readouterr().err
