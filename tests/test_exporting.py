"""What a run puts into its files beyond the adapter: nothing there keeps the file from being written."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open

from tests.fakes.runs import problems, toy
from tests.fakes.sample_image import sample

THUMBNAIL = "modelspec.thumbnail"
SETTINGS = {
    "output__save_every_steps": 1,
    "output__keep_last": 9,
    "sampling__every_steps": 0,
    "train__validate_every_steps": 0,
}


def thumbnail(file: Path) -> Image.Image | None:
    """Return the thumbnail in the header of an exported file."""
    with safe_open(file, framework="np") as tensors:
        assert tensors.keys()
        kind, _, data = tensors.metadata().get(THUMBNAIL, "").partition(";base64,")
    if not data:
        return None
    assert kind == "data:image/jpeg" and len(data) <= 48_000 * 4 / 3 + 4
    return Image.open(io.BytesIO(base64.b64decode(data)))


def noise(file: Path, width_px: int, height_px: int) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (height_px, width_px, 3), dtype=np.uint8)
    file.parent.mkdir(parents=True)
    Image.fromarray(pixels).save(file)
    return file


def test_the_newest_sample_is_the_thumbnail_and_one_that_cannot_be_read_costs_the_thumbnail_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is reduced and never enlarged; each export of the run finds another image."""
    large, small = (
        noise(tmp_path / "a" / "00.png", 300, 600),
        noise(tmp_path / "b" / "00.png", 8, 8),
    )
    cut = sample(tmp_path / "cut" / "00.png")
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    nothing = sample(tmp_path / "nothing" / "00.png")
    nothing.write_bytes(b"nothing")
    images = iter([large, small, cut, nothing, tmp_path / "gone" / "00.png"])
    monkeypatch.setattr("lora_trainer.run.saving.last_samples", lambda _: [next(images)])
    place = toy(tmp_path, images=3).with_base()
    assert place.train(steps=5, **SETTINGS) == 0
    files = [place.run / f"toy-step{step:08d}.safetensors" for step in range(1, 5)]
    sizes = [
        None if (image := thumbnail(file)) is None else (image.mode, image.size)
        for file in (*files, place.run / "toy.safetensors")
    ]
    assert sizes == [("RGB", (128, 256)), ("RGB", (8, 8)), None, None, None]
    rows = [row for row in problems(place.run) if "thumbnail" in row["what"]]
    assert [row["severity"] for row in rows] == ["note"] * 3
    for row, folder in zip(rows, ("cut", "nothing", "gone"), strict=True):
        assert f"{folder}/00.png" in row["what"]
        assert str(tmp_path) not in row["what"], "no path of this machine"
