"""A crop that somebody has chosen is what is trained: its size, its pixels, its mask, its cache entries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lora_trainer.cache.encode import _pixels
from lora_trainer.captioning.caption_files import choose
from lora_trainer.common.errors import InputError
from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset.buckets import placing
from lora_trainer.dataset.crops import Crop, read_crops, written
from lora_trainer.dataset.images import decode
from lora_trainer.dataset.quality import inspect_images
from lora_trainer.dataset.scan import scan
from tests.fakes.studio import Studio, draw, studio_in

CROP = Crop(8, 4, 40, 36)


@pytest.fixture
def studio(tmp_path: Path) -> Studio:
    """Return the studio with one image of 64 x 48 px."""
    studio = studio_in(tmp_path)
    for path in studio.folder.iterdir():
        path.unlink()
    draw(studio.folder / "a.png", seed=1, size=(64, 48))
    draw(studio.folder / "b.png", seed=2, size=(64, 48))
    return studio


def crop(studio: Studio, **crops: object) -> None:
    rows = {f"{name}.png": list(box) for name, box in crops.items()}  # type: ignore[call-overload]  # any box
    (studio.folder / "crops.json").write_text(json.dumps(rows))


def keys(studio: Studio) -> dict[str, str]:
    """Return the names of the entries of each image, by kind and name."""
    return {
        f"{job.key.kind} {job.record.name}": digest for digest, job in studio.needs().images.items()
    }


def test_the_part_is_trained_under_a_cache_entry_of_its_own(studio: Studio) -> None:
    whole = keys(studio)
    crop(studio, a=CROP)
    part = keys(studio)
    assert part["latents b.png"] == whole["latents b.png"], "the others keep theirs"
    assert part["latents a.png"] != whole["latents a.png"]
    (job,) = [job for job in studio.needs().images.values() if job.record.name == "a.png"]
    assert (job.record.width_px, job.record.height_px) == CROP.size_px
    (pixels,) = _pixels([job], settings=studio.settings)
    with Image.open(studio.folder / "a.png") as image:
        expected = image.convert("RGB").crop(CROP).resize((16, 16), Image.Resampling.LANCZOS)
    np.testing.assert_array_equal(pixels, np.asarray(expected, np.float32) / 127.5 - 1.0)
    assert studio.work()[0] == 2
    crop(studio, a=(8, 4, 40, 35))
    assert studio.work()[0] == 1, "another crop is encoded anew, and nothing else"
    before = scan(studio.folder, settings=studio.settings).fingerprint
    (studio.folder / "crops.json").unlink()
    assert scan(studio.folder, settings=studio.settings).fingerprint != before
    assert keys(studio) == whole


def test_a_mask_of_another_size_is_cut_as_its_image_and_may_not_be_black_there(
    studio: Studio,
) -> None:
    mask = np.zeros((24, 32), np.uint8)
    mask[:, :16] = 255  # the left half, at half the size of the image
    Image.fromarray(mask).save(studio.folder / "a-masklabel.png")
    studio.settings = DataSettings(masks="files")
    whole = keys(studio)
    crop(studio, a=(16, 0, 48, 32))
    (job,) = [job for job in studio.needs().images.values() if job.key.kind == "masks"]
    assert job.key.digest != whole["masks a.png"]
    (values,) = _pixels([job], settings=studio.settings)
    half = values.shape[2] // 2
    assert values[..., :half].min() == 1.0 and values[..., half:].max() == 0.0
    crop(studio, a=(40, 0, 64, 32))
    studio.settings = DataSettings(masks="files", max_bad_fraction=0.9)
    found = [
        one
        for one in scan(studio.folder, settings=studio.settings).findings
        if one.kind == "bad-mask"
    ]
    # It is not black everywhere: who painted it would look for a fault in it.
    assert "inside the crop" in found[0].what and "black everywhere" not in found[0].what


def test_the_transparency_of_a_part_is_its_mask(studio: Studio) -> None:
    image = Image.new("RGBA", (64, 48), (200, 0, 0, 0))
    image.paste((0, 200, 0, 255), (0, 0, 32, 48))
    image.save(studio.folder / "a.png")
    studio.settings = DataSettings(masks="alpha")
    crop(studio, a=(16, 0, 48, 32))
    (job,) = [
        job
        for job in studio.needs().images.values()
        if job.key.kind == "masks" and job.record.name == "a.png"
    ]
    (values,) = _pixels([job], settings=studio.settings)
    assert values[..., 0].min() == 1.0 and values[..., -1].max() == 0.0


def test_what_is_kept_is_said_of_the_whole_image_and_a_model_describes_the_part(
    studio: Studio,
) -> None:
    crop(studio, a=CROP)
    place = placing(studio.settings, resolution_px=16, step_px=8)
    dataset = scan(studio.folder, settings=studio.settings, place_image=place)
    rows = inspect_images(dataset, settings=studio.settings, each=True).pictures
    row = next(one for one in rows if one["file"] == "a.png")
    assert (row["width_px"], row["height_px"]) == (64, 48)
    assert row["kept"] == pytest.approx([8 / 64, 4 / 48, 40 / 64, 36 / 48], abs=1e-4)
    (note,) = [one for one in dataset.findings if one.kind == "crops"]
    assert note.severity == "note" and "a.png" in note.what
    (target, _) = choose(studio.folder, overwrite=True).targets
    assert target.crop == CROP


@pytest.mark.parametrize("box", [(0, 0, 65, 48), (-1, 0, 40, 40), (0, 0, 15, 48), (30, 0, 20, 40)])
def test_a_crop_that_is_not_a_part_of_the_image_leaves_it_out(
    studio: Studio, box: tuple[int, ...]
) -> None:
    crop(studio, a=box, gone=CROP)
    settings = DataSettings(max_bad_fraction=0.9)
    dataset = scan(studio.folder, settings=settings)
    assert [record.name for record in dataset.records] == ["b.png"]
    found = {one.kind: one for one in dataset.findings}
    assert "is not a part of it" in found["unusable"].what
    assert any("gone.png" in one.what for one in dataset.findings if one.severity == "warning")
    with pytest.raises(InputError):
        decode(studio.folder / "a.png", settings=settings, crop=Crop(*box))


UNREADABLE = (
    "",
    "[]",
    '{"a.png": [0, 0, 1]}',
    '{"a.png": [0, 0, 1, 2.5]}',
    '{"a.png": [0, 0, true, 2]}',
)


@pytest.mark.parametrize("text", UNREADABLE)
def test_a_file_of_crops_that_cannot_be_read_stops_the_training(studio: Studio, text: str) -> None:
    (studio.folder / "crops.json").write_text(text)
    with pytest.raises(InputError, match="crops.json cannot be read"):
        scan(studio.folder, settings=studio.settings)


def test_a_caption_file_of_an_image_called_crops_is_one(studio: Studio) -> None:
    draw(studio.folder / "crops.png", seed=3, size=(64, 48))
    (studio.folder / "crops.json").write_text('{"caption": "many crops"}')
    records = scan(studio.folder, settings=studio.settings).records
    assert {record.name: record.caption for record in records}["crops.png"] == "many crops"


def test_crops_are_written_as_they_are_read() -> None:
    crops: dict[str, Any] = {'b "x".png': CROP, "10_cat/a.png": Crop(0, 0, 16, 16)}
    assert read_crops(written(crops).encode()) == crops
