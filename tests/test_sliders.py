"""A slider by the real command: from a file of words to a LoRA, for several families; what it costs and refuses."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lora_trainer.lora_file.read import read_contents
from lora_trainer.run.prepare import Request, prepare
from lora_trainer.run.run_folder import name_of_new_run
from tests.fakes.family_bases import base_of, facts_of, side_of
from tests.fakes.runs import (
    BETWEEN_SAVES,
    Toy,
    apart,
    assert_same_run,
    events,
    problems,
    run_cli,
    run_killed,
    trajectory,
)

pytestmark = pytest.mark.timeout(400)  # a loaded machine is not a failure
WORDS = """
[[sliders]]
target = "a person"
more = "an old person"
less = "a young person"
attributes = ["woman", "man"]
keep = ["a house"]
"""
SETTINGS: Mapping[str, Any] = {
    "adapter__rank": 2,
    "adapter__targets": "attention",
    "data__validation_fraction": 0.0,
    "logging__trackers": [],
    "memory__gradient_checkpointing": "none",
    "optimizer__learning_rate": 0.02,
    "optimizer__schedule": "constant",
    "output__precision": "fp32",
    "sampling__every_steps": 0,
    "sampling__prompts": [],
    "sampling__steps": 1,
    "slider__denoising_steps": 2,
    "train__precision": "fp32",
    "train__validate_every_steps": 0,
}


@dataclass(frozen=True, kw_only=True)
class Place(Toy):
    """A file of words for the tiny base of a family."""

    name: str

    @property
    def dataset(self) -> Path:
        return self.folder / "age.toml"

    @property
    def base(self) -> Path:
        return base_of(self.name)

    def command(self, run: str, *more: str, steps: int = 4, **settings: Any) -> list[str]:
        side = side_of(facts_of(self.name))
        chosen = {**SETTINGS, "data__resolution": side, **settings}
        return self.arguments("--name", run, *more, steps=steps, **chosen)


def words(folder: Path, name: str, text: str = WORDS) -> Place:
    place = Place(folder=folder, name=name)
    place.dataset.write_text(text, encoding="utf-8")
    return place


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The words with an uninterrupted run `whole`, and a killed one beside it."""
    place = words(tmp_path_factory.mktemp("slider"), "sd15")
    drawn = {"sampling__every_steps": 4, "train__batch_size": 2}
    assert run_cli(place.command("whole", **drawn, output__measure=True)) == 0
    run_killed([(place.command("killed", **drawn), BETWEEN_SAVES)])
    return place


def test_a_killed_slider_goes_on_to_the_same_bits(place: Place) -> None:
    again = place.command("killed", "--resume", sampling__every_steps=4, train__batch_size=2)
    assert run_cli(again) == 0
    assert_same_run(place.runs / "killed", place.runs / "whole")


def test_passes_of_one_sample_give_the_same_numbers(place: Place) -> None:
    single = place.command("single", memory__micro_batch=1, train__batch_size=2)
    assert run_cli(single) == 0
    one, two = (trajectory(place.runs / run) for run in ("single", "whole"))
    for row, other in zip(one, two, strict=True):
        assert row[1:] == pytest.approx(other[1:], rel=1e-3)


def test_its_prompts_are_drawn_at_five_strengths_with_one_seed(place: Place) -> None:
    whole = place.runs / "whole"
    first, last = events(whole, "sample")
    lines = [image["prompt"] for image in last["images"]]
    assert lines[:5] == [f"woman, a person --m {strength}" for strength in (-2, -1, 0, 1, 2)]
    assert lines[5] == "man, a person --m -2" and len(lines) == 10
    assert len({image["seed"] for image in last["images"]}) == 2
    before, after = ([whole / image["file"] for image in each["images"]] for each in (first, last))
    assert apart(before[0], before[4]) == 0, "the untouched base has one image"
    assert apart(after[2], before[2]) == 0, "strength 0 is the base"
    assert apart(after[0], after[2]) > 0 and apart(after[4], after[2]) > 0


def test_nothing_but_texts_is_encoded_and_nothing_is_complained_about(place: Place) -> None:
    (cached,) = events(place.runs / "whole", "cached")
    assert cached["latents"] == 0 and cached["texts"] == 8, (
        "3 prompts of 2 attributes, 1 kept, none"
    )
    said = [each["what"] for each in problems(place.runs / "whole") if each["severity"] != "note"]
    assert said == []


def test_the_file_says_what_it_slides(place: Place) -> None:
    metadata = read_contents(place.runs / "whole" / "whole.safetensors").metadata
    directions = json.loads(metadata["lora_train.slider"])
    assert [each["target"] for each in directions] == ["woman, a person", "man, a person"]
    assert directions[0]["more"] == "woman, an old person" and directions[0]["keep"] == ["a house"]
    assert metadata["modelspec.usage_hint"].startswith("A slider")
    reach = json.loads(metadata["lora_train.slider_reach"])
    (measured,) = events(place.runs / "whole", "measured")
    assert measured["reach"] == reach and len(reach) == 2


def test_the_report_shows_the_strengths_side_by_side(place: Place) -> None:
    page = (place.runs / "whole" / "report.html").read_text(encoding="utf-8")
    strip = page[page.index("From less to more") : page.index("<h2>Samples</h2>")]
    for strength in ("strength -2", "strength 0", "strength 2"):
        assert strip.count(f">{strength}<") == 1
    assert strip.count("<img") == 10 and strip.count("woman, a person<small>") == 1
    assert "Strength 1 goes" in strip and "--m" not in strip.replace("alt=", "").split("<img")[0]


@pytest.mark.parametrize("name", ["sdxl", "flux", "zimage", "anima"])
def test_any_family_trains_one(name: str, tmp_path: Path) -> None:
    place = words(tmp_path, name)
    assert run_cli(place.command("one", steps=2, train__batch_size=2)) == 0
    losses = [row["loss"] for row in events(place.runs / "one", "step")]
    assert len(losses) == 2 and all(loss > 0 for loss in losses)
    assert (place.runs / "one" / "one.safetensors").is_file()


def test_a_run_is_called_by_the_file_without_its_extension(tmp_path: Path) -> None:
    place, folder = words(tmp_path, "sd15"), tmp_path / "age.v2"
    folder.mkdir()
    assert name_of_new_run(place.dataset, "auto") == "age"
    assert name_of_new_run(folder, "auto") == "age.v2", "a folder has no extension"


@dataclass(frozen=True, kw_only=True)
class Pairs(Place):
    """Pairs of images for the tiny base of a family."""

    @property
    def dataset(self) -> Path:
        return self.folder / "pairs"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    """Two pairs with a run `whole` of them."""
    place = Pairs(folder=tmp_path_factory.mktemp("pairs"), name="sd15")
    for number in range(2):
        for side, colour in (("more", "red"), ("less", "blue")):
            (place.dataset / side).mkdir(parents=True, exist_ok=True)
            image = Image.new("RGB", (64, 64), colour)
            image.putpixel((number, number), (255, 255, 255))
            image.save(place.dataset / side / f"{number}.png")
        text = place.dataset / "more" / f"{number}.txt"
        text.write_text(f"a wall {number}", encoding="utf-8")
    assert run_cli(place.command("whole", sampling__every_steps=4, train__batch_size=2)) == 0
    return place


def test_pairs_of_images_become_a_slider(pairs: Pairs) -> None:
    whole = pairs.runs / "whole"
    first, last = events(whole, "sample")
    lines = [image["prompt"] for image in last["images"]]
    assert lines[:5] == [f"a wall 0 --m {strength}" for strength in (-2, -1, 0, 1, 2)]
    before, after = ([whole / image["file"] for image in each["images"]] for each in (first, last))
    assert apart(after[2], before[2]) == 0, "strength 0 is the base"
    assert apart(after[0], after[2]) > 0 and apart(after[4], after[2]) > 0
    (cached,) = events(whole, "cached")
    assert cached["latents"] == 4
    (started,) = events(whole, "run_started")
    assert (started["pairs"], started["images"], started["directions"]) == (2, 4, 0)
    metadata = read_contents(whole / "whole.safetensors").metadata
    assert json.loads(metadata["lora_train.slider"]) == [{"pairs": 2}]
    assert metadata["modelspec.usage_hint"].startswith("A slider")
    page = (whole / "report.html").read_text(encoding="utf-8")
    assert "From less to more" in page


def test_passes_of_one_image_of_a_pair_give_the_same_numbers(pairs: Pairs) -> None:
    single = pairs.command("single", memory__micro_batch=1, train__batch_size=2)
    assert run_cli(single) == 0
    one, two = (trajectory(pairs.runs / run) for run in ("single", "whole"))
    for row, other in zip(one, two, strict=True):
        assert row[1:] == pytest.approx(other[1:], rel=1e-3)


def test_the_plan_counts_both_images_of_a_pair(
    pairs: Pairs, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"base.model": str(pairs.base), "data.resolution": 16, "train.batch_size": 2}
    prepared = prepare(Request(dataset=pairs.dataset, overrides=asked))
    assert prepared.config.train.steps == 500 and prepared.inputs.samples_per_epoch == 2
    (pairs.dataset / "less").rename(pairs.dataset / "aside")
    try:
        plain = prepare(Request(dataset=pairs.dataset, overrides=asked))
    finally:
        (pairs.dataset / "aside").rename(pairs.dataset / "less")
    assert prepared.plan.idle_step_s == pytest.approx(2 * plain.plan.idle_step_s, rel=0.15)
    line = ["plan", str(pairs.dataset), "--base", str(pairs.base)]
    capsys.readouterr()
    assert run_cli(line) == 0
    assert "a slider of 2 pairs of images" in " ".join(capsys.readouterr().out.split())


def test_pairs_need_a_strength_below_zero_and_are_not_measured_at_one(
    pairs: Pairs, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert run_cli(pairs.command("refused", adapter__dora=True)) == 2
    assert "adapter.dora=true is not possible for a slider" in " ".join(
        capsys.readouterr().err.split()
    )
    assert run_cli(["validate", str(pairs.runs / "whole"), str(pairs.dataset)]) == 2
    assert "has the pairs of a slider" in " ".join(capsys.readouterr().err.split())


def planned(place: Place, capsys: pytest.CaptureFixture[str], **settings: Any) -> Any:
    line = place.command("planned", **settings)
    capsys.readouterr()
    assert run_cli(["plan", *line[:3], *line[7:-2], "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_plan_counts_the_denoising_and_the_goals(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    def seconds(**settings: Any) -> float:
        """Return the time of a step on an idle machine."""
        asked = {"base.model": str(place.base), "data.resolution": 16, "train.batch_size": 1}
        asked |= {key.replace("__", "."): value for key, value in settings.items()}
        return prepare(Request(dataset=place.dataset, overrides=asked)).plan.idle_step_s

    # Passes of a draw, forward: two samples of 2 x 2 denoising steps, base and 2 more, one forward and back (3).
    without = {"slider__keep_weight": 0.0}
    few, many = (seconds(slider__denoising_steps=n, **without) for n in (2, 10))
    assert 2.3 < many / few < 3.1, "(20 + 3 + 3) / (4 + 3 + 3) forward passes"
    kept = seconds(slider__denoising_steps=10)
    assert 1.8 < kept / many < 2.0, "as many again, without the two prompts of a direction"
    record = planned(place, capsys)
    assert record["settings"]["train.batch_size"]["origin"] == "slider"
    line = ["plan", str(place.dataset), "--base", str(place.base)]
    assert run_cli(line) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "a slider of 2 directions in words" in said and "0 images" not in said


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"adapter__dora": True}, "adapter.dora=true is not possible for a slider"),
        ({"adapter__kind": "oft"}, "adapter.kind=oft is not possible for a slider"),
        ({"objective__contrast_scale": 3.0}, "objective.contrast_scale=3.0 is not possible"),
        ({"output__keep_best": True}, "keep_best"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    place: Place, capsys: pytest.CaptureFixture[str], settings: Mapping[str, Any], said: str
) -> None:
    capsys.readouterr()
    assert run_cli(place.command("refused", **settings)) == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "[[sliders]]\ntarget = 'a'\nmore = 'b'\nless = 'b'\n",
            "says the same as more and as less",
        ),
        ("[[sliders]]\ntarget = 'a'\n", "says neither more nor less"),
        ("[[sliders]]\nmore = 'a'\nles = 'b'\n", "has 'les'"),
        ("[[sliders]]\nmore = 'a'\nweight = -1\n", "weight: input should be greater than 0"),
        ("[[slider]]\nmore = 'a'\n", "has 'slider'"),
        ("", "has no [[sliders]]"),
        ("more = ", "is not TOML"),
    ],
)
def test_words_that_cannot_be_used_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, said: str
) -> None:
    place = words(tmp_path, "sd15", text)
    capsys.readouterr()
    assert run_cli(["check", str(place.dataset), "--base", str(place.base)]) == 3
    assert said in " ".join(capsys.readouterr().err.split())


def test_a_slider_is_checked_and_not_validated_on_images(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert run_cli(["check", str(place.dataset), "--base", str(place.base)]) == 0
    assert "is a slider" in capsys.readouterr().out
    assert run_cli(["validate", str(place.runs / "whole"), str(place.dataset)]) == 2
    assert "measured on images" in " ".join(capsys.readouterr().err.split())


def test_changed_words_are_another_dataset(place: Place, tmp_path: Path) -> None:
    """A resume says so; the words of one attribute more are texts to encode, and no others."""
    other = words(tmp_path, "sd15", WORDS.replace('["woman", "man"]', '["woman", "man", "child"]'))
    line = other.command("other", steps=2)
    line[[*line].index(next(each for each in line if "cache_dir" in each))] = (
        f"data.cache_dir={json.dumps(str(place.cache))}"
    )
    assert run_cli(line) == 0
    assert events(other.runs / "other", "cached")[0]["texts"] == 3
