"""Bucket sizes, where an image is placed, and what is cut from it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from lora_trainer.common.errors import RequestError
from lora_trainer.dataset.buckets import Bucket, buckets_for, cut, place

SD15 = buckets_for(resolution_px=512, step_px=64, max_aspect=2.0)
sides = st.integers(16, 5000)


def test_the_table_of_sd15() -> None:
    assert " ".join(map(str, SD15)) == "384x640 448x576 512x512 576x448 640x384"


@given(
    st.integers(1, 20).flatmap(
        lambda step: st.tuples(st.just(8 * step), st.integers(8 * step, 1200))
    ),
    st.floats(1.0, 8.0),
)
def test_rules_every_bucket_keeps(sizes: tuple[int, int], max_aspect: float) -> None:
    step_px, resolution_px = sizes
    buckets = buckets_for(resolution_px=resolution_px, step_px=step_px, max_aspect=max_aspect)
    side_px = resolution_px // step_px * step_px
    assert Bucket(side_px, side_px) in buckets
    assert len(set(buckets)) == len(buckets)
    for bucket in buckets:
        width_px, height_px = bucket.width_px, bucket.height_px
        assert width_px % step_px == height_px % step_px == 0
        assert 0 < width_px * height_px <= resolution_px**2
        assert max(width_px, height_px) <= max_aspect * min(width_px, height_px)
        assert Bucket(height_px, width_px) in buckets
        taller_fits = width_px * (height_px + step_px) <= resolution_px**2
        wider_fits = (width_px + step_px) * height_px <= resolution_px**2
        assert not (taller_fits and wider_fits) or width_px == height_px == side_px


def test_a_resolution_below_one_step_is_refused() -> None:
    with pytest.raises(RequestError, match=r"data\.resolution=63 .* 64 px"):
        buckets_for(resolution_px=63, step_px=64, max_aspect=2.0)


@given(sides, sides)
def test_an_image_covers_the_nearest_bucket_undistorted_and_centred(
    width_px: int, height_px: int
) -> None:
    placement = place(width_px, height_px, buckets=SD15)
    bucket = placement.bucket

    def distance(one: Bucket) -> float:
        return abs(math.log(one.width_px / one.height_px) - math.log(width_px / height_px))

    assert distance(bucket) == pytest.approx(min(map(distance, SD15)), abs=1e-9)
    over_width = placement.scaled_width_px - bucket.width_px
    over_height = placement.scaled_height_px - bucket.height_px
    assert min(over_width, over_height) == 0
    assert placement.left_px == over_width // 2
    assert placement.top_px == over_height // 2
    scale = max(bucket.width_px / width_px, bucket.height_px / height_px)
    assert abs(placement.scaled_width_px - width_px * scale) <= 0.5001
    assert abs(placement.scaled_height_px - height_px * scale) <= 0.5001
    area = placement.scaled_width_px * placement.scaled_height_px
    lost = 1 - bucket.width_px * bucket.height_px / area
    assert placement.cropped_fraction == pytest.approx(lost)
    assert placement.upscaled == (scale > 1)


def test_of_equally_near_buckets_the_larger_is_chosen() -> None:
    small_first = (Bucket(64, 64), Bucket(128, 128))
    assert place(50, 50, buckets=small_first).bucket == Bucket(128, 128)
    assert place(100, 100, buckets=(Bucket(120, 60), Bucket(90, 180))).bucket == Bucket(90, 180)


def test_cut_takes_the_middle_and_mirrors_it() -> None:
    # Left third red, middle green, right third blue with a white top right corner of the middle.
    image = Image.new("RGB", (300, 100), "green")
    image.paste("red", (0, 0, 100, 100))
    image.paste("blue", (200, 0, 300, 100))
    image.paste("white", (150, 0, 200, 50))
    placement = place(300, 100, buckets=(Bucket(100, 100),))
    plain = cut(image, placement, flip=False)
    assert plain.size == (100, 100)
    assert plain.tobytes() == image.crop((100, 0, 200, 100)).tobytes()
    mirrored = np.asarray(cut(image, placement, flip=True))
    assert (mirrored == np.asarray(plain)[:, ::-1]).all()
    assert not (mirrored == np.asarray(plain)).all()
