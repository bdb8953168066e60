"""Masks as cache entries: where they land on the latents, and which are made again. Whose they are: dataset_layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lora_trainer.common.errors import InputError
from lora_trainer.config.inputs import DataSettings
from tests.fakes.studio import Studio, draw, studio_in

FILES, ALPHA = DataSettings(masks="files", flip=True), DataSettings(masks="alpha", flip=True)
EXIF_ORIENTATION, TURNED = 0x0112, 6


def white(path: Path, *, part: tuple[int, int, int, int], size: tuple[int, int] = (20, 20)) -> Path:
    """Write a mask that is white in a box."""
    mask = Image.new("L", size, 0)
    mask.paste(255, part)
    mask.save(path)
    return path


@pytest.fixture
def studio(tmp_path: Path) -> Studio:
    """Two of three images have masks."""
    studio = studio_in(tmp_path)
    studio.settings = FILES
    for index, size in enumerate(((20, 20), (40, 20))):
        white(studio.folder / f"p{index}-masklabel.png", part=(2, 2, 12, 14), size=size)
    return studio


@pytest.fixture
def alone(tmp_path: Path) -> Studio:
    """One image without a mask, p0.png, of 16x16 pixels as its bucket."""
    studio = studio_in(tmp_path)
    for file in studio.folder.glob("p[12]*"):
        file.unlink()
    draw(studio.folder / "p0.png", seed=1, size=(16, 16))
    studio.settings = FILES
    return studio


def entries(studio: Studio) -> tuple[Any, Any]:
    """Return the values [H, W] of the only mask, and those of the mirrored image."""
    wanted = studio.needs()
    studio.encode(wanted)
    masks = (job for job in wanted.images.values() if job.key.kind == "masks")
    by_flip = {job.flip: studio.cache.read(job.key) for job in masks}
    plain, mirrored = by_flip[False], by_flip[True]
    assert plain is not None and mirrored is not None
    for entry in (plain, mirrored):
        assert entry["mask"].dtype == np.float32 and entry["mask"].shape[0] == 1
        assert entry["mask"].min() >= 0 and entry["mask"].max() <= 1
    assert np.array_equal(mirrored["mask"], plain["mask"][:, :, ::-1])
    return plain["mask"][0], mirrored["mask"][0]


# ---- where it lands


def test_values_are_means_over_the_pixels_of_each_latent(alone: Studio) -> None:
    """Of a transparent mask only what is drawn counts."""
    mask = Image.new("RGBA", (16, 16), (255, 255, 255, 0))
    mask.paste((255, 255, 255, 255), (0, 0, 5, 8))
    mask.paste((51, 51, 51, 255), (0, 8, 16, 16))
    mask.save(alone.folder / "p0-masklabel.png")
    values, _ = entries(alone)
    expected = np.zeros((8, 8))
    expected[:4, :2], expected[:4, 2], expected[4:] = 1.0, 0.5, 0.2
    assert values == pytest.approx(expected)


def test_a_mask_is_placed_as_its_image(alone: Studio) -> None:
    """The image itself as its mask: what the encoder sees, averaged over each latent."""
    alone.resolution_px, size = 32, (37, 50)
    noise = np.random.default_rng(3).integers(0, 256, (size[1] // 4, size[0] // 4), dtype=np.uint8)
    picture = Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC)
    for name in ("p0.png", "p0-masklabel.png"):
        picture.save(alone.folder / name)
    wanted = alone.needs()
    _, encoder, _ = alone.encode(wanted)
    assert encoder is not None
    latents, masks = (
        [job for job in wanted.images.values() if job.key.kind == kind]
        for kind in ("latents", "masks")
    )
    for job, seen in zip(latents, encoder.seen, strict=True):
        (mask,) = (one for one in masks if one.flip == job.flip)
        entry = alone.cache.read(mask.key)
        assert entry is not None
        pixels, factor = (seen[0].numpy() + 1) / 2, job.factor
        height, width = (side // factor for side in pixels.shape)
        expected = pixels.reshape(height, factor, width, factor).mean(axis=(1, 3))
        assert entry["mask"].shape == (1, height, width)
        # The image is scaled by another filter than the mask.
        assert np.abs(entry["mask"][0] - expected).mean() < 0.03
        assert np.corrcoef(entry["mask"].ravel(), expected.ravel())[0, 1] > 0.97


def test_the_alpha_of_a_turned_image_is_turned_with_it(alone: Studio) -> None:
    picture = Image.new("RGBA", (16, 16), (255, 0, 0, 0))
    picture.paste((255, 0, 0, 255), (0, 0, 8, 16))  # the left half is seen ...
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = TURNED
    picture.save(alone.folder / "p0.png", exif=exif)
    alone.settings = ALPHA
    values, _ = entries(alone)
    assert values[:4].min() == 1 and values[4:].max() == 0, "... which is the upper one upright"


def test_a_mask_of_what_the_crop_leaves_out_is_an_error(studio: Studio) -> None:
    studio.max_aspect = 1.0
    white(studio.folder / "p1-masklabel.png", part=(0, 0, 4, 20), size=(40, 20))
    with pytest.raises(InputError, match=r"mask of p1\.png is black in all that its crop"):
        studio.encode()


# ---- what is made again


def test_an_edited_mask_is_made_again_and_nothing_else(studio: Studio) -> None:
    assert studio.encode()[0]["masks"] == 4, "two masks, and both mirrored"
    assert studio.encode()[0]["masks"] == 0
    white(studio.folder / "p0-masklabel.png", part=(0, 0, 9, 9))
    studio.settings = FILES.model_copy(update={"mask_background": 0.5})
    done, images_seen, texts_seen = studio.encode()
    assert (done["masks"], images_seen, texts_seen) == (2, None, None)
    studio.max_aspect = 1.0
    assert studio.encode()[0]["masks"] == 2, "only the wide one is cut otherwise"


def _jobs_of(name: str, wanted: Any) -> list[Any]:
    """Return the jobs of an image: its latents, then its mask, each plain and mirrored."""
    jobs = [job for job in wanted.images.values() if job.record.name == name]
    return sorted(jobs, key=lambda job: job.key.kind)


def test_samples_have_the_masks_of_their_images_and_processes_share_them(studio: Studio) -> None:
    wanted = studio.needs()
    latents, mirrored, mask, _ = (json.loads(job.key.fields) for job in _jobs_of("p0.png", wanted))
    crop = {"bucket": "16x16", "crop": "0,0", "flip": 0, "scaled": "16x16"}
    hashes = {name: latents.pop(name) for name in ("image", "encoder")} | {"mask": mask.pop("mask")}
    assert set(map(len, hashes.values())) == {64} and mirrored["flip"] == 1
    assert latents == {**crop, "background": ""}, "caches on disk have these names"
    assert mask == {**crop, "channel": "brightness", "factor": 2}
    sources = {source.views[0].mask for source in wanted.sources.values()}
    assert None in sources and len(sources) == 3
    shares = [wanted.share(rank, 2).keys() for rank in range(2)]
    assert {key.kind for key in shares[0]} == {"latents", "masks", "text"}
    digests = [key.digest for key in (*shares[0], *shares[1])]
    every_key = wanted.keys()
    assert sorted(digests) == sorted(key.digest for key in every_key)
