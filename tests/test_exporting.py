"""What a run puts into its files beyond the adapter: nothing there keeps the file from being written."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open

from lora_trainer.common.events import read_jsonl
from lora_trainer.run import saving
from tests.fakes.runs import Toy, toy
from tests.fakes.sample_image import sample

THUMBNAIL = "modelspec.thumbnail"
SETTINGS = {
    "output__save_every_steps": 0,
    "sampling__every_steps": 0,
    "train__validate_every_steps": 0,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return toy(tmp_path_factory.mktemp("exporting"), images=3).with_base()


def thumbnail(place: Toy, name: str) -> Image.Image | None:
    """Return the thumbnail in the header of a run's exported file."""
    with safe_open(place.runs / name / f"{name}.safetensors", framework="np") as file:
        assert file.keys()
        kind, _, data = file.metadata().get(THUMBNAIL, "").partition(";base64,")
    if not data:
        return None
    assert kind == "data:image/jpeg" and len(data) <= 48_000 * 4 / 3 + 4
    return Image.open(io.BytesIO(base64.b64decode(data)))


@pytest.mark.parametrize(("size_px", "thumbnail_px"), [((300, 600), (128, 256)), ((8, 8), (8, 8))])
def test_the_newest_sample_is_the_thumbnail_reduced_and_never_enlarged(
    size_px: tuple[int, int],
    thumbnail_px: tuple[int, int],
    place: Toy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (*size_px[::-1], 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "noise.png")
    monkeypatch.setattr(saving, "last_samples", lambda _: [tmp_path / "noise.png"])
    name = f"of-{size_px[0]}"
    assert place.train("--name", name, steps=1, **SETTINGS) == 0
    image = thumbnail(place, name)
    assert image is not None and (image.mode, image.size) == ("RGB", thumbnail_px)


@pytest.mark.parametrize("damage", ["cut short", "no image", "gone"])
def test_a_sample_that_cannot_be_read_costs_the_thumbnail_only(
    damage: str, place: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = sample(tmp_path / "step-00000001" / "00.png")
    whole = image.read_bytes()
    match damage:
        case "cut short":
            image.write_bytes(whole[: len(whole) // 2])
        case "no image":
            image.write_bytes(b"nothing")
        case "gone":
            image.unlink()
    monkeypatch.setattr(saving, "last_samples", lambda _: [image])
    name = damage.replace(" ", "-")
    assert place.train("--name", name, steps=1, **SETTINGS) == 0
    run = place.runs / name
    assert thumbnail(place, name) is None
    (row,) = (row for row in read_jsonl(run / "problems.jsonl") if "thumbnail" in row["what"])
    assert row["severity"] == "note" and "step-00000001/00.png" in row["what"]
    assert str(tmp_path) not in row["what"], "no path of this machine"
