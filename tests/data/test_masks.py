"""Masks: which file is whose, what is refused, where they land on the latents, and what is made again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from lora_trainer.common.errors import InputError
from lora_trainer.common.memo import HashMemo
from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset import images
from lora_trainer.dataset.buckets import Bucket, Placement, buckets_for, place
from lora_trainer.dataset.decode_memo import DatasetMemo
from lora_trainer.dataset.inspect_image import BAD_MASK
from lora_trainer.dataset.listing import list_dataset
from lora_trainer.dataset.masks import Mask, decode_mask, mask_values
from lora_trainer.dataset.records import Dataset
from lora_trainer.dataset.scan import scan
from tests.fakes.studio import Studio, draw, studio_in

FILES, ALPHA = DataSettings(masks="files"), DataSettings(masks="alpha")
EXIF_ORIENTATION, TURNED = 0x0112, 6


def white(path: Path, *, part: tuple[int, int, int, int], size: tuple[int, int] = (20, 20)) -> Path:
    """Write a mask that is white in a box."""
    path.parent.mkdir(exist_ok=True)
    mask = Image.new("L", size, 0)
    mask.paste(255, part)
    mask.save(path)
    return path


def scanned(folder: Path, settings: DataSettings = FILES, **changes: Any) -> Dataset:
    settings = settings.model_copy(update={"max_bad_fraction": 1.0, **changes})
    return scan(folder, settings=settings)


def masks_of(folder: Path, settings: DataSettings = FILES) -> dict[str, str | None]:
    found = list_dataset(folder, settings=settings).pictures
    return {picture.name: picture.mask_name for picture in found}


def findings(dataset: Dataset, kind: str) -> list[tuple[str | None, str]]:
    return [(one.file, one.what) for one in dataset.findings if one.kind == kind]


# ---- whose mask it is


def test_masks_lie_beside_their_pictures_or_in_a_folder_of_their_own(tmp_path: Path) -> None:
    for name in ("a.png", "b.JPG", "c.png", "10_x/d.png", "10_x/e.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        draw(tmp_path / name, seed=1)
    for name in ("a-masklabel.png", "masks/B.png", "masks/c-masklabel.png", "10_x/masks/d.webp"):
        white(tmp_path / name, part=(0, 0, 5, 5))
    white(tmp_path / "masks" / "a.png", part=(0, 0, 5, 5))
    assert masks_of(tmp_path) == {
        "a.png": "a-masklabel.png",  # the one beside it comes first
        "b.JPG": "masks/B.png",
        "c.png": "masks/c-masklabel.png",
        "10_x/d.png": "10_x/masks/d.webp",
        "10_x/e.png": None,
    }


def test_masks_are_no_pictures_whether_they_are_used_or_not(tmp_path: Path) -> None:
    draw(tmp_path / "a.png", seed=1)
    white(tmp_path / "a-masklabel.png", part=(0, 0, 5, 5))
    white(tmp_path / "masks" / "a.png", part=(0, 0, 5, 5))
    assert masks_of(tmp_path, DataSettings()) == {"a.png": None}
    (row,) = findings(scanned(tmp_path, DataSettings()), "unused-mask")
    assert row == (None, "masks are not used (1): a-masklabel.png")


def test_a_folder_named_masks_may_hold_pictures_of_masks(tmp_path: Path) -> None:
    draw(tmp_path / "a.png", seed=1)
    draw((tmp_path / "masks").mkdir() or tmp_path / "masks" / "venice.png", seed=2)
    assert masks_of(tmp_path, DataSettings()) == {"a.png": None, "masks/venice.png": None}
    assert masks_of(tmp_path) == {"a.png": None}, "not where masks are asked for"


def test_masks_without_a_picture_and_pictures_without_a_mask_are_named(tmp_path: Path) -> None:
    for index, name in enumerate(("a.png", "b.png")):
        draw(tmp_path / name, seed=index)
    white(tmp_path / "a-masklabel.png", part=(0, 0, 5, 5))
    white(tmp_path / "gone-masklabel.png", part=(0, 0, 5, 5))
    dataset = scanned(tmp_path)
    assert findings(dataset, "unused-mask") == [
        (None, "masks without an image (1): gone-masklabel.png")
    ]
    assert findings(dataset, "no-mask") == [
        (None, "1 of 2 images have no mask, all of them counts: b.png")
    ]
    assert not findings(scanned(tmp_path, DataSettings()), "no-mask")


def test_masks_of_pictures_that_were_taken_out_are_no_remark(tmp_path: Path) -> None:
    (tmp_path / "_excluded" / "10_x").mkdir(parents=True)
    (tmp_path / "10_x").mkdir()
    for name in ("a.png", "_excluded/b.jpg", "10_x/c.png", "_excluded/10_x/d.png"):
        draw(tmp_path / name, seed=len(name))
    for name in (
        "a-masklabel.png",
        "b-masklabel.png",
        "10_x/c-masklabel.png",
        "10_x/d-masklabel.png",
    ):
        white(tmp_path / name, part=(0, 0, 5, 5))
    assert not findings(scanned(tmp_path), "unused-mask")


# ---- what is refused


@pytest.mark.parametrize(
    ("size", "part", "reason"),
    [
        ((20, 20), (0, 0, 0, 0), "is black everywhere: nothing would be learned"),
        ((40, 20), (0, 0, 5, 5), "is 40x20, not of the shape of its image, 20x20"),
    ],
)
def test_a_mask_that_means_nothing_is_an_error_that_names_it(
    tmp_path: Path, size: tuple[int, int], part: tuple[int, int, int, int], reason: str
) -> None:
    for name in ("a", "b"):
        draw(tmp_path / f"{name}.png", seed=1)
    white(tmp_path / "a-masklabel.png", part=part, size=size)
    dataset = scanned(tmp_path)
    assert findings(dataset, BAD_MASK) == [("a-masklabel.png", reason)]
    assert [record.name for record in dataset.records] == ["b.png"]


def test_a_smaller_mask_of_the_same_shape_will_do(tmp_path: Path) -> None:
    draw(tmp_path / "a.png", seed=1, size=(100, 67))
    white(tmp_path / "a-masklabel.png", part=(0, 0, 5, 5), size=(25, 17))
    assert not findings(scanned(tmp_path), BAD_MASK)


def test_a_mask_that_is_no_picture_is_an_error(tmp_path: Path) -> None:
    draw(tmp_path / "a.png", seed=1)
    (tmp_path / "a-masklabel.png").write_text("not an image")
    with pytest.raises(InputError, match=r"a-masklabel\.png is not an image"):
        scanned(tmp_path)


def test_a_picture_that_is_transparent_everywhere_is_an_error(tmp_path: Path) -> None:
    Image.new("RGBA", (20, 20), (255, 0, 0, 0)).save(tmp_path / "a.png")
    draw(tmp_path / "b.png", seed=1)
    dataset = scanned(tmp_path, ALPHA)
    assert findings(dataset, BAD_MASK) == [
        ("a.png", "is transparent everywhere: nothing would be learned")
    ]
    assert findings(dataset, "no-mask")[0][1].endswith(
        "have no transparent part, all of them counts: b.png"
    )


def test_a_second_scan_opens_no_mask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, memo = tmp_path / "data", DatasetMemo(tmp_path / "cache")
    folder.mkdir()
    draw(folder / "a.png", seed=1)
    white(folder / "a-masklabel.png", part=(0, 0, 5, 5))
    first = scan(folder, settings=FILES, memo=memo)
    memo.save()
    monkeypatch.setattr(images, "_load", None)
    again = DatasetMemo(tmp_path / "cache")
    assert scan(folder, settings=FILES, memo=again) == first


# ---- where it lands


def test_values_are_means_over_the_pixels_of_each_latent() -> None:
    mask = Image.new("L", (16, 16), 0)
    mask.paste(255, (0, 0, 6, 8))
    whole = place(16, 16, buckets=[Bucket(16, 16)])
    values = mask_values(mask, whole, flip=False, factor=8)
    assert values.shape == (1, 2, 2) and values.dtype == np.float32
    assert values[0].tolist() == [[0.75, 0.0], [0.0, 0.0]]
    mirrored = mask_values(mask, whole, flip=True, factor=8)
    assert mirrored[0].tolist() == [[0.0, 0.75], [0.0, 0.0]]


def test_grey_is_a_weight() -> None:
    whole = place(16, 16, buckets=[Bucket(16, 16)])
    values = mask_values(Image.new("L", (16, 16), 51), whole, flip=False, factor=8)
    assert values == pytest.approx(np.full((1, 2, 2), 0.2))


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("size", [(64, 48), (37, 50), (200, 90)])
def test_a_mask_is_placed_as_its_picture(size: tuple[int, int], flip: bool) -> None:
    """The image itself as its mask: what the encoder sees, averaged over each latent."""
    from lora_trainer.dataset.buckets import cut

    noise = np.random.default_rng(3).integers(0, 256, (size[1] // 4, size[0] // 4), dtype=np.uint8)
    picture = Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC)
    placement = place(*size, buckets=buckets_for(resolution_px=32, step_px=8, max_aspect=2.0))
    values = mask_values(picture, placement, flip=flip, factor=4)
    seen = np.asarray(cut(picture, placement, flip=flip), dtype=np.float32) / 255
    height, width = seen.shape
    expected = seen.reshape(height // 4, 4, width // 4, 4).mean(axis=(1, 3))
    assert values.shape == (1, height // 4, width // 4)
    # The image is scaled by another filter than the mask.
    assert np.abs(values[0] - expected).mean() < 0.02
    assert np.corrcoef(values.ravel(), expected.ravel())[0, 1] > 0.98


def test_what_is_drawn_on_a_transparent_mask_counts(tmp_path: Path) -> None:
    drawn = Image.new("RGBA", (20, 20), (0, 0, 0, 0))
    drawn.paste((255, 255, 255, 255), (0, 0, 10, 20))
    drawn.save(tmp_path / "mask.png")
    mask = Mask(
        path=tmp_path / "mask.png", content_hash=hash_of(tmp_path / "mask.png"), of_alpha=False
    )
    pixels = np.asarray(decode_mask(mask, settings=FILES))
    assert pixels[:, :10].min() == 255 and pixels[:, 10:].max() == 0


def test_the_alpha_of_a_turned_picture_is_turned_with_it(tmp_path: Path) -> None:
    picture = Image.new("RGBA", (30, 20), (255, 0, 0, 0))
    picture.paste((255, 0, 0, 255), (0, 0, 15, 20))  # the left half is seen ...
    exif = Image.Exif()
    exif[EXIF_ORIENTATION] = TURNED
    picture.save(tmp_path / "a.png", exif=exif)
    (record,) = scanned(tmp_path, ALPHA).records
    assert (record.width_px, record.height_px) == (20, 30)
    assert record.mask is not None and record.mask.of_alpha
    pixels = np.asarray(decode_mask(record.mask, settings=ALPHA))
    assert pixels.shape == (30, 20)
    assert pixels[:15].min() == 255 and pixels[15:].max() == 0, "... which is the upper one upright"


def hash_of(path: Path) -> str:
    return HashMemo().sha256(path)


# ---- the cache


@pytest.fixture
def studio(tmp_path: Path) -> Studio:
    studio = studio_in(tmp_path)
    studio.settings = DataSettings(masks="files", flip=True)
    for index, size in enumerate(((20, 20), (40, 20))):
        white(studio.folder / f"p{index}-masklabel.png", part=(2, 2, 12, 14), size=size)
    return studio


def test_an_edited_mask_is_made_again_and_nothing_else(studio: Studio) -> None:
    assert studio.encode()[0].masks == 4, "two masks, and both mirrored"
    assert studio.encode()[0].masks == 0
    white(studio.folder / "p0-masklabel.png", part=(0, 0, 9, 9))
    done, images_seen, texts_seen = studio.encode()
    assert (done.masks, images_seen, texts_seen) == (2, None, None)


def test_a_mask_is_made_for_the_place_of_its_picture(studio: Studio) -> None:
    studio.encode()
    studio.resolution_px = 24
    assert studio.encode()[0].masks == 4
    studio.max_aspect = 1.0
    assert studio.encode()[0].masks == 2, "only the wide one is cut otherwise"


def test_neither_masks_nor_their_weight_change_the_latents(studio: Studio) -> None:
    studio.settings = DataSettings(flip=True)
    studio.encode()
    for settings in (FILES, DataSettings(masks="files", mask_background=0.5)):
        studio.settings = settings.model_copy(update={"flip": True})
        _, images_seen, texts_seen = studio.encode()
        assert (images_seen, texts_seen) == (None, None)
    assert studio.encode()[0].masks == 0, "the weight of the background is no part of an entry"


def test_entries_hold_the_values_of_the_mask(studio: Studio) -> None:
    wanted = studio.needs()
    studio.encode(wanted)
    for job in wanted.masks.values():
        entry = studio.cache.read(job.key)
        assert entry is not None
        assert job.record.mask is not None
        pixels = decode_mask(job.record.mask, settings=studio.settings)
        expected = mask_values(pixels, job.placement, flip=job.flip, factor=job.factor)
        assert np.array_equal(entry["mask"], expected)
        latent = studio.cache.read(
            next(one.key for one in wanted.latents.values() if one.record == job.record)
        )
        assert latent is not None and latent["mean"].shape[1:] == entry["mask"].shape[1:]
    sources = {source.mask for source in wanted.sources.values()}
    assert None in sources and len(sources) == 3


def test_a_mask_of_what_the_crop_leaves_out_is_an_error(studio: Studio) -> None:
    studio.max_aspect = 1.0
    white(studio.folder / "p1-masklabel.png", part=(0, 0, 4, 20), size=(40, 20))
    with pytest.raises(InputError, match=r"mask of p1\.png is black in all that its crop"):
        studio.encode()


def test_processes_share_masks_as_they_do_latents(studio: Studio) -> None:
    wanted = studio.needs()
    shares = [wanted.share(rank, 2).masks for rank in range(2)]
    assert sorted([*shares[0], *shares[1]]) == sorted(wanted.masks)


def test_placement_of_masks_needs_no_upscaling_trick() -> None:
    """A mask smaller than its bucket is enlarged by area, without ringing beyond [0, 1]."""
    placement = Placement(Bucket(32, 32), 32, 32, 0, 0, 0.0, True)
    mask = Image.new("L", (16, 16), 0)
    mask.paste(255, (4, 4, 12, 12))
    values = mask_values(mask, placement, flip=False, factor=4)
    assert values.min() >= 0.0 and values.max() <= 1.0
    assert float(values.mean()) == pytest.approx(0.25)
