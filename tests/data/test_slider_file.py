"""The words of sliders, in this program's file and in those of other trainers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.common.errors import InputError
from lora_trainer.dataset.slider_file import Words, is_slider_file, read_sliders

AGE = ("a person", "an old person", "a young person")
# The four rows that sd-scripts makes of a slider: each side, from both strengths.
LECO_ROWS = """
[[prompts]]
target = "a person"
positive = "a young person"
unconditional = "an old person"
action = "erase"
[[prompts]]
target = "a person"
positive = "an old person"
unconditional = "a young person"
action = "enhance"
[[prompts]]
target = "a person"
positive = "an old person"
unconditional = "a young person"
action = "erase"
multiplier = -1.0
[[prompts]]
target = "a person"
positive = "a young person"
unconditional = "an old person"
action = "enhance"
multiplier = -1.0
"""
LECO_TARGETS = """
guidance_scale = 3.0
resolution = [512, 768]
neutral = ""
[[targets]]
target_class = "a person"
positive = "an old person"
negative = "a young person"
weight = 0.5
"""
ERASE = '[[prompts]]\ntarget = "van gogh"\n'


def job(**slider: Any) -> str:
    """Return a job of ai-toolkit as JSON, which is YAML too."""
    process = {"type": "concept_slider", "network": {"linear": 8}, "slider": slider}
    return json.dumps({"job": "extension", "config": {"name": "age", "process": [process]}})


CONCEPT = job(
    target_class=AGE[0],
    positive_prompt=AGE[1],
    negative_prompt=AGE[2],
    anchor_class="a house",
    guidance_strength=3.0,
)
OLD_JOB = job(
    targets=[{"target_class": AGE[0], "positive": AGE[1], "negative": AGE[2], "shuffle": True}],
    anchors=[{"prompt": "a house", "neg_prompt": "animal", "multiplier": 1.0}],
    resolutions=[[512, 512]],
)


def read(folder: Path, text: str, ending: str) -> Words:
    file = folder / f"words{ending}"
    file.write_text(text, encoding="utf-8")
    assert is_slider_file(file)
    return read_sliders(file)


@pytest.mark.parametrize(
    ("text", "ending", "trainer", "keep", "weight", "notes"),
    [
        (LECO_ROWS, ".toml", "sd-scripts", (), 1.0, []),
        (
            LECO_TARGETS,
            ".toml",
            "sd-scripts",
            (),
            0.5,
            ["guidance_scale = 3.0", "resolution = [512, 768]"],
        ),
        (CONCEPT, ".yaml", "ai-toolkit", ("a house",), 1.0, ["guidance_strength = 3.0"]),
        (OLD_JOB, ".json", "ai-toolkit", ("a house",), 1.0, ["resolutions = ", "shuffle = True"]),
    ],
    ids=["rows", "targets", "concept", "old"],
)
def test_words_of_other_trainers_are_one_direction(
    tmp_path: Path,
    text: str,
    ending: str,
    trainer: str,
    keep: tuple[str, ...],
    weight: float,
    notes: list[str],
) -> None:
    words = read(tmp_path, text, ending)
    (direction,) = words.directions
    assert (direction.target, direction.more, direction.less) == AGE
    assert (direction.keep, direction.weight, words.trainer) == (keep, weight, trainer)
    assert len(words.notes) == len(notes)
    assert all(note.startswith(start) for note, start in zip(words.notes, notes, strict=True))


def test_a_concept_to_erase_is_less_of_it(tmp_path: Path) -> None:
    (direction,) = read(tmp_path, ERASE, ".toml").directions
    assert (direction.target, direction.more, direction.less) == ("van gogh", "", "van gogh")


def test_attributes_stand_before_all_three_and_equal_directions_are_one(tmp_path: Path) -> None:
    table = '[[sliders]]\ntarget = "a person"\nmore = "old"\nattributes = ["man", "woman", "man"]\n'
    words = read(tmp_path, table * 2, ".toml")
    assert [each.texts for each in words.directions] == [
        ("man, a person", "man, old", "man"),
        ("woman, a person", "woman, old", "woman"),
    ]
    assert words.trainer == "" and words.notes == ()


@pytest.mark.parametrize(
    ("text", "ending", "said"),
    [
        ("- 1\n", ".yaml", "holds no table"),
        ("a: [", ".yml", "is not YAML"),
        ("{", ".json", "is not JSON"),
        (job(target_class="a"), ".json", "says neither more nor less"),
        ('[[prompts]]\ntarget = "a"\npositive = 3\n', ".toml", "valid string"),
        ('{"config": {"process": []}}', ".json", "has 'config'"),
    ],
)
def test_what_holds_no_words_is_refused(tmp_path: Path, text: str, ending: str, said: str) -> None:
    with pytest.raises(InputError) as caught:
        read(tmp_path, text, ending)
    assert said in str(caught.value)


def test_a_folder_of_that_name_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "age.toml").mkdir()
    assert not is_slider_file(tmp_path / "age.toml")
