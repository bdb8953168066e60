"""A prompt's options are read in one place; what is unknown or cannot be drawn is refused, never drawn as words."""

from __future__ import annotations

import pytest

from lora_trainer.common.errors import RequestError
from lora_trainer.config.prompt_line import (
    SamplePrompt,
    check_sizes,
    parted,
    plain_prompt,
    read_prompt,
    seeds,
)
from lora_trainer.reporting.sample_files import try_names


def test_a_prompt_is_parted_from_its_options() -> None:
    line = "a cat, in a hat --n low quality, blurry --w 512 --h 768 --d 42 --l 7.5 --S 28"
    assert read_prompt(line) == SamplePrompt(
        line=line, text="a cat, in a hat", negative="low quality, blurry", width_px=512,
        height_px=768, seed=42, guidance_scale=7.5, steps=28,
    )  # fmt: skip
    assert read_prompt("a --n --d -1 --l 1 --g 3.5") == SamplePrompt(
        line="a --n --d -1 --l 1 --g 3.5", text="a", negative="", guidance_scale=3.5
    )
    assert read_prompt("a cat --w=512 --d=-1").width_px == 512
    words = "well--known, -- a dash, x --"
    assert parted(words) == (words, {})
    assert read_prompt(words) == plain_prompt(words)


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("a cat --ar 16:9", "--ar, which is not read here"),
        ("a cat --ar=16:9", "--ar, which is not read here"),
        ("a cat --steps", "--steps, which is not read here"),
        ("a cat --d", "--d, which is not a number"),
        ("a cat --s 5000", "a whole number from 1 to 1,000"),
        ("a cat --l 0.5", "only a number from 1 to 50"),
        ("a cat --g nan", "only a number from 1 to 50"),
        ("a cat --w 51.5", "--w 51.5"),
        ("a cat --h 999999", "--h 999999"),
        ("a cat --l 7 --g 3", "two values of guidance"),
    ],
)
def test_what_cannot_be_drawn_is_refused(line: str, found: str) -> None:
    with pytest.raises(RequestError) as caught:
        read_prompt(line)
    assert found in caught.value.found and "a cat" in caught.value.found


def test_sizes_are_those_that_the_base_draws_and_the_plan_has_memory_for() -> None:
    def check(line: str) -> None:
        check_sizes([read_prompt(line)], step_px=64, planned_side_px=1024)

    check("tall --w 832 --h 1216")
    with pytest.raises(RequestError, match="multiples of 64") as caught:
        check("a cat --w 500")
    assert caught.value.fix == "write --w 512"
    with pytest.raises(RequestError, match="1024x1088 px; memory is planned for"):
        check("a cat --h 1088")
    check_sizes([read_prompt("a cat --h 4096")], step_px=64)


def test_each_prompt_has_a_seed_and_an_image_of_its_own() -> None:
    prompts = [read_prompt(line) for line in ("a", "b --d 42", "c --d 42", "d")]
    assert seeds(prompts, 5) == [5, 42, 42, 8]
    assert list(try_names("x", prompts, seed=5, strengths=[1.0]).values()) == [
        "x-5.png", "x-42.png", "x-42-2.png", "x-8.png",
    ]  # fmt: skip
    assert try_names("x", prompts[1:2], seed=5, strengths=[0.4, 1.0]) == {
        (0, 0.4): "x-42-x0.4.png", (0, 1.0): "x-42-x1.png",
    }  # fmt: skip


@pytest.mark.parametrize(
    "line",
    [
        "a --w64",
        "a --w:64",
        "a,--w 64",
        "a--w 64",
        "a \u2014w 64",
        "a \u2013s=5",
        "a--n ugly",
        "a \u2014n ugly",
    ],
)
def test_what_was_meant_as_an_option_is_not_drawn_as_words(line: str) -> None:
    with pytest.raises(RequestError, match="not read as an option"):
        read_prompt(line)


@pytest.mark.parametrize(
    "line",
    [
        "night \u2014 sky",
        "he said\u2014well",
        "rock\u2013n\u2013roll",
        "x--ray",
        "12\u201414 h",
        "wow--so nice",
    ],
)
def test_dashes_between_words_are_words(line: str) -> None:
    assert read_prompt(line).text == line
