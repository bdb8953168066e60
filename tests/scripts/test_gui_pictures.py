"""The pictures of the interface are refused where they show nothing."""

from __future__ import annotations

import io

import pytest
from PIL import Image

pytest.importorskip("playwright", reason="playwright is not installed (extra `dev`)")
pytest.importorskip("gradio", reason="gradio is not installed (extra `gui`)")

from scripts.gui_pictures import drawn  # noqa: E402 - after importorskip


def content(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def test_a_picture_of_one_colour_is_refused() -> None:
    image = Image.new("RGB", (8, 8), (17, 17, 17))
    with pytest.raises(RuntimeError, match="train-findings is one flat colour"):
        drawn(content(image), name="train-findings")
    image.putpixel((3, 3), (18, 17, 17))
    assert drawn(content(image), name="train-findings").size == (8, 8)
