"""Masks as cache entries: where they land on the latents, and which are made again. Whose they are: dataset_layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from lora_trainer.common.errors import InputError
from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset.masks import MAX_LABEL, read_mask
from lora_trainer.dataset.scan import scan
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


BOX = np.zeros((16, 16), np.uint8)
BOX[2:12, 3:9] = 1


def _palette(*colours: tuple[int, int, int]) -> Image.Image:
    """Return the box as an image of labels with these colours."""
    image = Image.fromarray(BOX).convert("P")
    image.putdata(BOX.ravel().tolist())
    image.putpalette([channel for colour in colours for channel in colour])
    return image


def _drawn(colour: tuple[int, int, int]) -> Image.Image:
    image = Image.new("RGBA", (16, 16))
    image.putalpha(Image.fromarray(BOX * 255))
    image.paste((*colour, 255), mask=Image.fromarray(BOX * 255))
    return image


def _several() -> NDArray[np.uint8]:
    labels = BOX.copy()
    labels[5:9, 4:7] = 7
    return labels


# The same box as programs write it, and how that is told; its channel in the names of cache entries.
LABELS, DRAWN = "mask-read labels", "mask-read drawn"
WRITTEN: dict[str, tuple[Image.Image, str]] = {
    "0 and 255": (Image.fromarray(BOX * 255), ""),
    "0 and 1": (Image.fromarray(BOX), LABELS),
    "0 to 7": (Image.fromarray(_several()), LABELS),
    "labels with borders of 255": (Image.fromarray(np.where(_several() == 7, 255, BOX)), LABELS),
    "one bit": (Image.fromarray(BOX * 255).convert("1"), ""),
    "16 bits": (Image.fromarray(BOX.astype(np.uint16) * 65535), ""),
    "16 bits, 0 and 1": (Image.fromarray(BOX.astype(np.uint16)), LABELS),
    "16 bits, 0 and 255": (Image.fromarray(BOX.astype(np.uint16) * 255), "mask-read 8 of 16 bits"),
    "RGB, 0 and 1": (Image.fromarray(np.stack([BOX] * 3, axis=-1)), LABELS),
    "palette of black and white": (_palette((0, 0, 0), (255, 255, 255)), ""),
    "palette of greys 0 and 1": (_palette((0, 0, 0), (1, 1, 1)), LABELS),
    "palette of VOC": (_palette((0, 0, 0), (128, 0, 0)), LABELS),
    "palette whose first is not black": (_palette((120, 0, 90), (4, 40, 3)), LABELS),
    "palette of nothing but black": (_palette((0, 0, 0), (0, 0, 0)), LABELS),
    "colours of VOC": (_palette((0, 0, 0), (0, 64, 0)).convert("RGB"), LABELS),
    "drawn in white on nothing": (_drawn((255, 255, 255)), ""),
    "drawn in black on nothing": (_drawn((0, 0, 0)), DRAWN),
    "drawn in red on nothing": (_drawn((200, 20, 20)), DRAWN),
    "black and white, opaque": (Image.fromarray(BOX * 255).convert("RGBA"), ""),
    "floating point": (Image.fromarray(BOX.astype(np.float32)), ""),
    "32 bits, 0 and 1": (Image.fromarray(BOX.astype(np.int32)), LABELS),
}


@pytest.mark.parametrize("written", WRITTEN)
def test_a_mask_is_the_same_however_a_program_writes_it(written: str, alone: Studio) -> None:
    mask, told = WRITTEN[written]
    suffix = ".tif" if mask.mode in ("F", "I") else ".png"
    mask.save(alone.folder / f"p0-masklabel{suffix}")
    values, _ = entries(alone)
    assert values == pytest.approx(BOX.reshape(8, 2, 8, 2).mean(axis=(1, 3)))
    (key,) = {
        json.loads(job.key.fields)["channel"]
        for job in alone.needs().images.values()
        if job.key.kind == "masks"
    }
    assert f"mask-read {key}" == told or (key, told) == ("brightness", "")
    findings = scan(alone.folder, settings=alone.settings).findings
    kinds = [finding.kind for finding in findings if "mask" in finding.kind]
    assert kinds == (["mask-read"] if told else [])


@pytest.mark.parametrize(
    "labels, written",
    [
        ((1,), "JPEG at 90"),
        ((3,), "JPEG at 95"),
        ((24,), "JPEG at 75"),
        (tuple(range(1, 8)), "WEBP at 80"),
    ],
    ids=str,
)
def test_noise_of_a_lossy_format_is_not_a_label(
    labels: tuple[int, ...], written: str, alone: Studio
) -> None:
    """Noise is added where labels are far enough from black to tell it from them."""
    counts = np.zeros((160, 160), np.uint8)
    for band, label in zip(np.array_split(np.arange(16, 144), len(labels)), labels, strict=True):
        counts[band, 32:104] = label
    drawn = np.random.default_rng(1).normal(0, labels[0] > 1, counts.shape).round()
    mask = Image.fromarray((counts + drawn).clip(0, MAX_LABEL).astype(np.uint8))
    format, quality = written.split(" at ")
    path = alone.folder / f"p0-masklabel.{format.lower()}"
    mask.save(path, format, quality=int(quality))
    values, meaning = read_mask(path, settings=FILES)
    assert meaning == "lossy labels"
    assert ((np.asarray(values) > 0) != (counts > 0)).mean() < 0.06
    findings = scan(alone.folder, settings=alone.settings).findings
    (said,) = (one for one in findings if one.kind == "mask-read")
    assert (said.severity, "PNG" in said.advice) == ("warning", True)


def test_label_1_with_more_noise_than_the_format_makes_is_warned_of(alone: Studio) -> None:
    """Such noise is as large as the label: no rule tells them apart, so a mask like this is named."""
    counts = np.zeros((160, 160), np.uint8)
    counts[40:120, 40:120] = 1
    noise = np.random.default_rng(1).normal(0, 1, counts.shape).round()
    mask = Image.fromarray((counts + noise).clip(0, 255).astype(np.uint8))
    mask.save(alone.folder / "p0-masklabel.jpg", quality=95)
    findings = scan(alone.folder, settings=alone.settings).findings
    (said,) = (one for one in findings if one.kind == "mask-read")
    assert (said.severity, "PNG" in said.advice) == ("warning", True)


def _spoken(alone: Studio, mask: NDArray[np.uint8]) -> list[str]:
    Image.fromarray(mask).save(alone.folder / "p0-masklabel.png")
    findings = scan(alone.folder, settings=alone.settings).findings
    return [finding.what for finding in findings if "mask" in finding.kind]


def test_a_mask_that_may_mean_another_thing_is_named(alone: Studio) -> None:
    assert _spoken(alone, BOX * 90) == [
        "1 masks have no bright pixel (the brightest is 90 of 255): p0.png"
    ]
    swapped = np.full((16, 16), 255, np.uint8)
    swapped[4:12, 4:12] = 0
    assert _spoken(alone, swapped) == [
        "1 of 1 masks are white at all edges and black in the middle: p0.png"
    ]
    photo = np.random.default_rng(1).integers(0, 256, (16, 16, 3), dtype=np.uint8)
    assert _spoken(alone, photo) == [
        "1 of 1 masks have many colours; the brightest channel counts: p0.png"
    ]
    soft = np.linspace(0, 255, 256).astype(np.uint8).reshape(16, 16)
    assert _spoken(alone, soft) == []


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
    with pytest.raises(InputError, match=r"mask of p1\.png is black everywhere in its crop"):
        studio.encode()


def test_a_mask_that_shows_nothing_is_to_be_replaced_whatever_share_of_images_may_be_bad(
    tmp_path: Path,
) -> None:
    Image.new("RGB", (16, 16), "red").save(tmp_path / "a.png")
    mask = tmp_path / "a-masklabel.png"
    Image.new("L", (16, 16), 0).save(mask)
    with pytest.raises(InputError, match="is black everywhere") as caught:
        scan(tmp_path, settings=DataSettings(masks="files"))
    assert "raise data.max_bad_fraction" not in str(caught.value)
    mask.unlink()
    (tmp_path / "a.png").write_bytes(b"")
    with pytest.raises(InputError, match="raise data.max_bad_fraction"):
        scan(tmp_path, settings=DataSettings(masks="files"))


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
