"""The dataset report: its score and parts, advice per image, copies found by look."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFilter

from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset.buckets import Place, cut, placing
from lora_trainer.dataset.images import Measures, crispness_of, measure
from lora_trainer.dataset.quality import DatasetReport, inspect_images
from lora_trainer.dataset.records import Dataset, ImageRecord, finding

EXAMPLE = Path(__file__).resolve().parents[2] / "datasets" / "example"
PLAIN = DataSettings()
UNGATED = DataSettings(min_score=0)


def photo(seed: int, size: tuple[int, int] = (256, 256)) -> Image.Image:
    """An image with detail at every scale, as photographs have (1/f spectrum), in some colour."""
    rng = np.random.default_rng(seed)
    width_px, height_px = size
    waves = np.fft.fft2(rng.standard_normal((height_px, width_px)))
    distance = np.hypot(*np.meshgrid(np.fft.fftfreq(width_px), np.fft.fftfreq(height_px)))
    distance[0, 0] = np.inf
    values = np.fft.ifft2(waves / distance).real
    values = (values - values.min()) / np.ptp(values)
    colour = rng.uniform(120, 255, 3)
    return Image.fromarray((values[..., None] * colour).astype(np.uint8))


def record(image: Image.Image, name: str = "a.png", **changes: Any) -> ImageRecord:
    plain = ImageRecord(
        file=name,
        name=name,
        content_hash=f"hash of {name}",
        width_px=image.width,
        height_px=image.height,
        written=("a cat",),
        caption="a cat",
        caption_source="a.txt",
        repeats=1,
        copy_index=0,
        measures=measure(image),
    )
    return replace(plain, **changes)


def report(
    records: Sequence[ImageRecord], *, side_px: int = 256, settings: DataSettings = PLAIN
) -> DatasetReport:
    records = placed(records, side_px)
    dataset = Dataset(folder=Path(), records=records, findings=(), fingerprint="")
    return inspect_images(dataset, settings=settings)


def placed(records: Sequence[ImageRecord], side_px: int) -> tuple[ImageRecord, ...]:
    return tuple(
        replace(one, placements=at(side_px)(one.width_px, one.height_px)) for one in records
    )


def at(side_px: int) -> Place:
    data = DataSettings(resolution=side_px, max_aspect=2.0)
    return placing(data, resolution_px=0, step_px=side_px // 8)


def twins(records: Sequence[ImageRecord]) -> dict[str | None, str]:
    """Return the images that look like an earlier one, each with what is said of it."""
    found = report(records, settings=UNGATED).findings
    return {row.file: row.what for row in found if row.kind == "near-duplicate"}


def kinds(found: DatasetReport) -> list[tuple[str, str | None]]:
    return [(finding.kind, finding.file) for finding in found.findings]


# --- the score


def test_the_score_is_the_product_of_shares_and_of_what_the_rest_leaves() -> None:
    rng = random.Random(0)
    records = [
        record(
            photo(index, (rng.randrange(16, 300), rng.randrange(16, 300))),
            f"{index}.png",
            caption_source=rng.choice((None, "folder name", "a.txt")),
            caption=rng.choice(("", "a cat")),
        )
        for index in range(12)
    ]
    found = report(records)
    assert len(found.parts) == 8
    assert all(0 <= value <= 1 for value in found.parts.values())
    parts = found.parts
    whole = parts["usable"] * parts["near_duplicates"] * parts["captions"]
    lost = (
        0.25 * (1 - parts["resolution"])
        + 0.2 * (1 - parts["sharpness"])
        + 0.1 * (1 - parts["exposure"])
        + 0.05 * (1 - parts["aspect"])
        + 0.05 * (1 - parts["trigger"])
    )
    assert found.score == pytest.approx(whole * (1 - lost))


def test_what_cannot_be_read_or_shows_nothing_is_not_usable() -> None:
    records = [record(photo(1)), record(Image.new("RGB", (256, 256), "teal"), "flat.png")]
    damaged = finding("unusable", "b.png", what="is damaged", advice="", code="IMG-01")
    elsewhere = replace(damaged, file="regularisation:c.png")
    dataset = Dataset(
        folder=Path(), records=placed(records, 256), findings=(damaged, elsewhere), fingerprint=""
    )
    found = inspect_images(dataset, settings=PLAIN)
    assert found.parts["usable"] == pytest.approx(1 / 3)


def test_a_score_below_the_least_is_a_warning_that_names_the_worst_parts() -> None:
    records = [record(photo(1)), record(photo(1), name="b.png", caption_source=None)]

    def said(least: float) -> list[str]:
        found = report(records, settings=DataSettings(min_score=least)).findings
        return [finding.what for finding in found if finding.kind == "score"]

    assert said(0.2) == []
    (what,) = said(0.95)
    assert "below data.min_score=0.95" in what
    assert "near_duplicates 0.50, captions 0.57" in what
    assert "exposure" not in what, "a part that costs nothing is not among the worst"


def test_each_picture_says_what_the_crop_keeps() -> None:
    """Cut out by these shares, an image is what training sees of it."""
    image = photo(1, (600, 256))
    one = record(image, repeats=3)
    found = report([one], settings=UNGATED)
    rows = json.loads(json.dumps([found.to_json(), *(one.to_json() for one in found.pictures)]))
    whole, row = rows
    assert set(whole) == {"images", "score", "parts", "findings", "buckets"}
    assert (whole["images"], whole["buckets"]) == (1, {row["bucket"]: 3})
    assert whole["parts"]["aspect"] == pytest.approx(1 - row["cropped_fraction"], abs=1e-4)
    assert whole["findings"] == [
        {
            "kind": "cropped",
            "severity": "note",
            "file": "a.png",
            "what": f"loses {row['cropped_fraction']:.0%} of its area to the crop to {row['bucket']}",
            "advice": "crop it yourself, or raise data.max_aspect",
            "code": "",
        }
    ]
    assert (row["file"], row["width_px"], row["height_px"]) == ("a.png", 600, 256)
    left, top, right, bottom = row["kept"]
    assert row["cropped_fraction"] == pytest.approx(1 - (right - left) * (bottom - top), abs=1e-4)
    box = (left * 600, top * 256, right * 600, bottom * 256)
    placement = placed([one], 256)[0].placement
    assert row["bucket"] == str(placement.bucket)
    bucket_px = (placement.bucket.width_px, placement.bucket.height_px)
    by_shares = image.resize(bucket_px, Image.Resampling.LANCZOS, box=box)
    trained = cut(image, placement, flip=False)
    difference = np.abs(np.asarray(by_shares, float) - np.asarray(trained, float))
    assert difference.mean() < 1


def test_the_score_of_a_picture_falls_with_its_own_faults_alone() -> None:
    good, small = record(photo(1), "good.png"), record(photo(2, (64, 64)), "small.png")
    twin = record(photo(1), "twin.png", caption_source=None)
    scores = {p.record.name: p.score for p in report([good, small, twin]).pictures}
    assert scores["good.png"] > 0.95
    assert scores["small.png"] < scores["good.png"] - 0.1
    assert scores["twin.png"] < scores["good.png"] - 0.2
    assert scores["good.png"] == report([good]).pictures[0].score


# --- its parts


@pytest.mark.parametrize(
    ("size", "part", "advised"),
    [((512, 512), 1.0, False), ((220, 220), 220 / 256, False), ((128, 128), 0.5, True)],
)  # fmt: skip
def test_resolution_is_how_little_a_picture_is_enlarged(
    size: tuple[int, int], part: float, advised: bool
) -> None:
    found = report([record(photo(1, size))])
    assert found.parts["resolution"] == pytest.approx(part)
    said = [finding.what for finding in found.findings if finding.kind == "low-resolution"]
    assert said == (["is 128x128, enlarged 2.0 times to 256x256"] if advised else [])


@pytest.mark.parametrize(("blur_px", "sharp", "advised"), [(0, True, False), (4, False, True)])
def test_sharpness_is_judged_at_the_trained_size(blur_px: int, sharp: bool, advised: bool) -> None:
    image = photo(3, (512, 512)).filter(ImageFilter.GaussianBlur(blur_px))
    found = report([record(image)], side_px=512)
    assert (found.parts["sharpness"] == 1) == sharp
    assert (("blurred", "a.png") in kinds(found)) == advised
    small = report([record(image)], side_px=64)
    assert small.parts["sharpness"] == 1
    assert small.findings == ()


def test_crispness_falls_with_blur_and_knows_flat_art() -> None:
    flat_art = Image.new("L", (200, 200), 200)
    flat_art.paste(40, (50, 60, 150, 160))
    for image in (photo(4).convert("L"), flat_art):
        values = [
            crispness_of(
                np.asarray(image.filter(ImageFilter.GaussianBlur(blur_px)), dtype=np.float32)
            )
            for blur_px in (0, 1, 2, 4)
        ]
        assert values == sorted(values, reverse=True)
        assert values[0] > 0.65
        assert values[3] < 0.3
    gray = np.asarray(photo(5).convert("L"), dtype=np.float32)
    moved = np.mean([np.roll(gray, shift, axis=1) for shift in range(14)], axis=0)
    assert crispness_of(moved.astype(np.float32)) < 0.45 < 0.6 < crispness_of(gray), "one direction"
    assert crispness_of(np.full((50, 50), 7, dtype=np.float32)) == 0
    assert crispness_of(np.zeros((5, 5), dtype=np.float32)) == 0


@pytest.mark.parametrize(
    ("low", "high", "fault"),
    [
        (0, 255, None),
        (0, 60, "is nearly black"),
        (225, 255, "is washed out"),
        (120, 140, "has hardly any contrast"),
        (30, 120, None),
    ],
)
def test_exposure(low: int, high: int, fault: str | None) -> None:
    values = np.linspace(low, high, 100 * 100).reshape(100, 100).astype(np.uint8)
    image = Image.fromarray(values).convert("RGB")
    found = report([record(image), record(photo(1), "b.png")])
    assert found.parts["exposure"] == (1 if fault is None else 0.5)
    assert [finding.what for finding in found.findings if finding.kind == "exposure"] == (
        [fault] if fault else []
    )


def test_line_art_on_white_is_not_washed_out() -> None:
    image = Image.new("RGB", (200, 200), "white")
    for x in range(20, 180, 20):
        image.paste("black", (x, 20, x + 2, 180))
    assert "exposure" not in [kind for kind, _ in kinds(report([record(image)]))]


def test_captions_of_their_own_count() -> None:
    sources = ("a.txt", "metadata.jsonl", "folder name", None)
    records = [
        record(photo(index), f"{index}.png", caption_source=source)
        for index, source in enumerate(sources)
    ]
    assert report(records).parts["captions"] == pytest.approx(1 / (1 + 1.5 * 1.5 / 4))
    assert report(records[:2]).parts["captions"] == 1
    for named, lack in ((records[2:3], 0.1), (records[3:], 1.0)):
        assert report(named).parts["captions"] == pytest.approx(1 / (1 + 1.5 * lack))
    asked = DataSettings(trigger="zibbo")
    assert report(records[3:], settings=asked).parts["captions"] == pytest.approx(1 / 1.15)


def test_the_trigger_part() -> None:
    texts = ("zibbo in a tree", "a zibbo, waving", "the dog in a tree", "")
    records = [
        record(photo(index), f"{index}.png", caption=text) for index, text in enumerate(texts)
    ]
    assert report(records).parts["trigger"] == 0.5
    asked = DataSettings(trigger="dog")
    assert report(records, settings=asked).parts["trigger"] == 0.25
    assert report(records[3:]).parts["trigger"] == 0


# --- copies


def test_resized_and_recompressed_copies_are_found() -> None:
    for seed in range(2):
        image = photo(seed, (320, 240))
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=40)
        copies = [
            image.resize((200, 150), Image.Resampling.LANCZOS),
            image.resize((640, 480), Image.Resampling.BICUBIC),
            Image.open(buffer).convert("RGB"),
            image.filter(ImageFilter.GaussianBlur(1)),
        ]
        for copy in copies:
            (what,) = twins([record(image), record(copy, "b.png")]).values()
            assert "a.png" in what


def test_different_pictures_are_not_taken_for_copies() -> None:
    records = [record(photo(seed), f"{seed}.png") for seed in range(20)]
    one = photo(1)
    records += [
        record(one.transpose(Image.Transpose.FLIP_LEFT_RIGHT), "mirrored.png"),
        record(one.point(lambda value: value // 3), "dark.png"),
        *(record(Image.new("RGB", (64, 64), colour), colour) for colour in ("red", "blue")),
    ]
    assert twins(records) == {}


def test_a_group_of_copies_counts_once() -> None:
    records = [record(photo(1), f"{index}.png") for index in range(4)]
    records.append(record(photo(2), "other.png"))
    found = report(records)
    assert all("0.png" in what for what in twins(records).values())
    assert found.parts["near_duplicates"] == pytest.approx(2 / 5)
    files = [finding.file for finding in found.findings if finding.kind == "near-duplicate"]
    assert files == ["1.png", "2.png", "3.png"]
    identical = [replace(one, content_hash="same") for one in records[:2]]
    assert report(identical, settings=UNGATED).findings == ()  # the scan has named them


def test_every_pair_within_the_limit_is_found_by_its_bands() -> None:
    rng = random.Random(2)
    plain = record(photo(1))

    def with_bits(bits: int) -> Measures:
        return plain.measures._replace(structure=f"{bits:032x}")

    for _ in range(60):
        structure = rng.getrandbits(128)
        for flips, expected in ((8, True), (9, False)):
            other = structure
            for bit in rng.sample(range(128), flips):
                other ^= 1 << bit
            pair = [
                replace(plain, name=f"{index}", content_hash=f"{index}", measures=with_bits(bits))
                for index, bits in enumerate((structure, other))
            ]
            assert bool(twins(pair)) == expected
