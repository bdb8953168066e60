"""The newest sample images of a run, their prompts, and the thumbnail made of one."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from lora_trainer.reporting.sample_files import last_samples, sample_prompt, thumbnail_jpeg
from tests.fakes.sample_image import sample


def test_the_newest_step_with_images_is_taken_in_order(tmp_path: Path) -> None:
    assert last_samples(tmp_path / "absent") == []
    sample(tmp_path / "step-00000900" / "00.png")
    wanted = [sample(tmp_path / "step-00001000" / f"{i:02d}.png") for i in (0, 1)]
    (tmp_path / "step-00002000").mkdir()
    sample(tmp_path / "base" / "00.png")
    assert last_samples(tmp_path) == wanted


@pytest.mark.parametrize("prompt", ["a hat", "two\nlines", ""])
def test_the_prompt_is_in_the_image(prompt: str, tmp_path: Path) -> None:
    assert sample_prompt(sample(tmp_path / "a.png", prompt)) == prompt


def test_an_image_without_a_prompt(tmp_path: Path) -> None:
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")
    assert sample_prompt(tmp_path / "a.png") == ""


def test_thumbnails_are_small_jpegs(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (600, 300, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png")
    data = thumbnail_jpeg(tmp_path / "noise.png")
    with Image.open(io.BytesIO(data)) as opened:
        assert (opened.format, opened.mode, opened.size) == ("JPEG", "RGB", (128, 256))
    assert len(data) <= 48_000
    tiny = thumbnail_jpeg(sample(tmp_path / "tiny.png"))
    with Image.open(io.BytesIO(tiny)) as opened:
        assert opened.size == (8, 8), "not blown up"


def test_what_is_no_image_is_an_error_the_caller_can_catch(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"nothing")
    with pytest.raises(OSError, match="cannot identify"):
        thumbnail_jpeg(tmp_path / "a.png")
