"""The report of `check`: score and parts, advice per image, copies found by look."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFilter

from lora_trainer.cli import main
from lora_trainer.dataset.quality import near_duplicates

Report = dict[str, Any]
Check = Callable[..., Report]
BROKEN = b"no image"


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


@pytest.fixture
def check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Check:
    """Return a function that writes images, with captions or without (None), and checks them."""

    def run(
        images: Mapping[str, Image.Image | bytes],
        captions: Mapping[str, str | None] | None = None,
        *,
        side_px: int = 256,
        **settings: object,
    ) -> Report:
        folder = tmp_path / f"d{len(list(tmp_path.iterdir()))}"
        for name, image in images.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(image) if isinstance(image, bytes) else image.save(path)
            caption = (captions or {}).get(name, "a cat")
            if caption is not None:
                path.with_suffix(".txt").write_text(caption)
        cache = tmp_path / "cache"
        values = {"resolution": side_px, "min_score": 0, "cache_dir": cache, **settings}
        words = [f"data.{name}={value}" for name, value in values.items()]
        capsys.readouterr()
        line = ["check", str(folder), "--json", *(w for word in words for w in ("--set", word))]
        assert main.run(line) == 0
        return dict(json.loads(capsys.readouterr().out))

    return run


def said(report: Report, kind: str) -> dict[str | None, str]:
    """Return the images that a kind of finding is about, each with what it says."""
    return {row["file"]: row["what"] for row in report["findings"] if row["kind"] == kind}


# --- the score


def test_the_score_is_the_product_of_shares_and_of_what_the_rest_leaves(check: Check) -> None:
    rng = random.Random(0)
    images, captions = {}, {}
    for index in range(12):
        name = f"{rng.choice(('', '3_zib/'))}{index}.png"
        images[name] = photo(index, (rng.randrange(16, 300), rng.randrange(16, 300)))
        captions[name] = rng.choice((None, "", "a cat", "zib in a tree"))
    found = check(images, captions, trigger="zib")
    parts = found["parts"]
    assert len(parts) == 8 and all(0 < value <= 1 for value in parts.values())
    whole = parts["usable"] * parts["near_duplicates"] * parts["captions"]
    weights = {"resolution": 0.25, "sharpness": 0.2, "exposure": 0.1}
    weights |= {"aspect": 0.05, "trigger": 0.05}
    lost = sum(weight * (1 - parts[name]) for name, weight in weights.items())
    assert found["score"] == pytest.approx(whole * (1 - lost), abs=1e-3)


def test_what_cannot_be_read_or_shows_nothing_is_not_usable(check: Check, tmp_path: Path) -> None:
    other = tmp_path / "class"
    other.mkdir()
    photo(3).save(other / "c.png")
    (other / "broken.png").write_bytes(BROKEN)
    flat = Image.new("RGB", (256, 256), "teal")
    images = {"a.png": photo(1), "flat.png": flat, "b.png": BROKEN}
    found = check(images, regularisation_dir=other)
    assert found["parts"]["usable"] == pytest.approx(1 / 3, abs=1e-4)
    assert {*said(found, "unusable")} == {"b.png", "regularisation:broken.png"}


def test_a_score_below_the_least_is_a_warning_that_names_the_worst_parts(check: Check) -> None:
    images, captions = {"a.png": photo(1), "b.png": photo(1).resize((250, 250))}, {"b.png": None}
    assert said(check(images, captions, min_score=0.2), "score") == {}
    (what,) = said(check(images, captions, min_score=0.95), "score").values()
    assert "below data.min_score=0.95" in what
    assert "near_duplicates 0.50, captions 0.57" in what
    assert "exposure" not in what, "a part that costs nothing is not among the worst"


def test_each_picture_says_what_the_crop_keeps(check: Check) -> None:
    """By these shares an image is cut to the shape of its bucket, evenly on both sides."""
    found = check({"3_x/a.png": photo(1, (800, 256))})
    (row,) = found["pictures"]
    bucket_px = tuple(map(int, row["bucket"].split("x")))
    left, top, right, bottom = row["kept"]
    assert (row["file"], row["width_px"], row["height_px"]) == ("3_x/a.png", 800, 256)
    assert (top, bottom) == (0, 1) and left == pytest.approx(1 - right, abs=3e-3)
    assert (right - left) * 800 / 256 == pytest.approx(bucket_px[0] / bucket_px[1], abs=0.01)
    assert row["cropped_fraction"] == pytest.approx(1 - (right - left), abs=1e-4)
    assert (found["images"], found["buckets"]) == (1, {row["bucket"]: 3})
    assert found["parts"]["aspect"] == pytest.approx(1 - row["cropped_fraction"], abs=1e-4)
    what = f"loses {row['cropped_fraction']:.0%} of its area to the crop to {row['bucket']}"
    assert row["cropped_fraction"] > 0.25 and said(found, "cropped") == {"3_x/a.png": what}


# --- its parts


def test_resolution_and_sharpness_are_judged_at_the_trained_size(check: Check) -> None:
    flat_art = Image.new("RGB", (512, 512), "white")
    flat_art.paste("navy", (50, 60, 150, 160))
    pixels = np.asarray(photo(5, (512, 512)), dtype=np.float32)
    moved = [np.mean([np.roll(pixels, by, axis=axis) for by in range(14)], 0) for axis in (0, 1)]
    blurred = photo(4, (512, 512)).filter(ImageFilter.GaussianBlur(4))
    small = photo(1, (256, 256))
    images = {
        "sharp.png": photo(3, (512, 512)),
        "flat art.png": flat_art,
        "blurred.png": blurred,
        "down.png": Image.fromarray(moved[0].astype(np.uint8)),
        "right.png": Image.fromarray(moved[1].astype(np.uint8)),
        "small.png": small,
        "enough.png": photo(6, (410, 410)),  # 1.249 times
    }
    report = check(images, side_px=512)
    assert {*said(report, "blurred")} == {"blurred.png"}
    what = "is 256x256, enlarged 2.0 times to 512x512"
    assert said(report, "low-resolution") == {"small.png": what}
    assert report["parts"]["resolution"] == pytest.approx((5 + 0.5 + 410 / 512) / 7, abs=1e-4)
    scores = {row["file"]: row["score"] for row in report["pictures"]}
    assert scores["sharp.png"] > 0.95 and scores["small.png"] < 0.9
    for name in ("down.png", "right.png"):
        assert scores["blurred.png"] < scores[name] < 0.95, "also what moved in one direction"
    # Strongly, so that its slopes are rounded to single levels, whose steps are sharp.
    strongly = photo(4, (512, 512)).filter(ImageFilter.GaussianBlur(12))
    assert {*said(check({"strongly.png": strongly}, side_px=512), "blurred")} == {"strongly.png"}
    report = check({"blurred.png": blurred, "small.png": small}, side_px=64)
    assert report["parts"]["sharpness"] == 1 and report["findings"] == []


def test_exposure(check: Check) -> None:
    ranges = {
        (0, 255): None,
        (0, 60): "is nearly black",
        (225, 255): "is washed out",
        (120, 140): "has hardly any contrast",
        (30, 120): None,
    }
    line_art = Image.new("RGB", (200, 200), "white")
    for x in range(20, 180, 20):
        line_art.paste("black", (x, 20, x + 2, 180))
    images = {"line art.png": line_art}
    for low, high in ranges:
        values = np.linspace(low, high, 100 * 100).reshape(100, 100).astype(np.uint8)
        images[f"{(low, high)}.png"] = Image.fromarray(values).convert("RGB")
    found = check(images)
    faults = {f"{name}.png": fault for name, fault in ranges.items() if fault}
    assert (found["parts"]["exposure"], said(found, "exposure")) == (0.5, faults)


def test_captions_of_their_own_count(check: Check) -> None:
    names = ("a.png", "b.png", "3_zib/c.png", "d.png")
    images = {name: photo(index) for index, name in enumerate(names)}

    def part(*chosen: str, trigger: str = "", **captions: str | None) -> float:
        none = {"3_zib/c.png": None, "d.png": None, "b.png": None} | captions
        settings = {"trigger": trigger} if trigger else {}
        found = check({name: images[name] for name in chosen}, none, **settings)
        return float(found["parts"]["captions"])

    table = {"b.png": "from a table"}
    assert part(*names, **table) == pytest.approx(1 / (1 + 1.5 * 1.5 / 4), abs=1e-4)
    assert part("a.png", "b.png", **table) == 1
    assert part("3_zib/c.png") == pytest.approx(1 / 1.15, abs=1e-4)
    assert part("d.png") == pytest.approx(1 / 2.5, abs=1e-4)
    assert part("d.png", trigger="zibbo") == pytest.approx(1 / 1.15, abs=1e-4)


def test_the_trigger_part(check: Check) -> None:
    texts = ("zibbo in a tree", "a zibbo, waving", "the dog in a tree", "")
    images = {f"{index}.png": photo(index) for index in range(4)}
    captions = {f"{index}.png": text for index, text in enumerate(texts)}
    assert check(images, captions)["parts"]["trigger"] == 0.5
    assert check({"3.png": images["3.png"]}, captions)["parts"]["trigger"] == 0
    assert check(images, captions, trigger="dog")["parts"]["trigger"] == 1, "it is put in"


# --- copies


def test_resized_and_recompressed_copies_are_found_and_count_once(check: Check) -> None:
    image, buffer = photo(0, (320, 240)), io.BytesIO()
    image.save(buffer, "JPEG", quality=40)
    images = {
        "0.png": image,
        "1.png": image.resize((200, 150), Image.Resampling.LANCZOS),
        "2.png": image.resize((640, 480), Image.Resampling.BICUBIC),
        "3.jpg": buffer.getvalue(),
        "4.png": image.filter(ImageFilter.GaussianBlur(1)),
        "other.png": photo(2),
    }
    found = check(images)
    copies = said(found, "near-duplicate")
    assert copies == dict.fromkeys(("1.png", "2.png", "3.jpg", "4.png"), "looks the same as 0.png")
    assert found["parts"]["near_duplicates"] == pytest.approx(2 / 6, abs=1e-4)
    identical = check({"0.png": image, "1.png": image})
    assert said(identical, "near-duplicate") == {} and len(said(identical, "duplicate")) == 1
    scores = [row["score"] for row in identical["pictures"]]
    assert scores[1] < scores[0] - 0.1, "the score of an image falls with its own faults"


def test_different_pictures_are_not_taken_for_copies(check: Check) -> None:
    images = {f"{seed}.png": photo(seed) for seed in range(20)}
    images["mirrored.png"] = photo(1).transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    images["dark.png"] = photo(1).point(lambda value: value // 3)
    for colour in ("red", "blue"):
        images[f"{colour}.png"] = Image.new("RGB", (64, 64), colour)
    assert said(check(images), "near-duplicate") == {}


def test_small_things_on_a_plain_background_are_told_apart(check: Check) -> None:
    def on_black(*corners: tuple[int, int]) -> Image.Image:
        image = Image.new("RGB", (256, 256), (20, 20, 24))
        ImageDraw.Draw(image).polygon(corners, fill=(120, 40, 160))
        return image

    square = on_black((100, 100), (156, 100), (156, 156), (100, 156))
    copy = io.BytesIO()
    square.save(copy, "JPEG", quality=75)
    images = {
        "copy.jpg": copy.getvalue(),
        "bar.png": on_black((90, 118), (166, 118), (166, 138), (90, 138)),
        "square.png": square,
        "triangle.png": on_black((128, 96), (164, 160), (92, 160)),
    }
    assert said(check(images), "near-duplicate") == {"square.png": "looks the same as copy.jpg"}


def prints(*pairs: tuple[int, bytes]) -> list[Any]:
    """Return records with these structures and miniatures in colour."""
    return [
        SimpleNamespace(
            name=f"{index}",
            pair=None,
            measures=SimpleNamespace(structure=f"{structure:032x}", colours=colours.hex()),
        )
        for index, (structure, colours) in enumerate(pairs)
    ]


def differing(structure: int, bits: Iterable[int]) -> int:
    for bit in bits:
        structure ^= 1 << bit
    return structure


def test_every_pair_within_the_limit_is_found_by_its_bands() -> None:
    rng, grey = random.Random(2), bytes(48)
    for _ in range(60):
        structure = rng.getrandbits(128)
        for flips, expected in ((8, True), (9, False)):
            other = differing(structure, rng.sample(range(128), flips))
            assert bool(near_duplicates(prints((structure, grey), (other, grey)))) == expected


def test_of_many_pictures_each_is_a_copy_of_the_first_that_is_none_itself() -> None:
    rng = random.Random(3)
    originals = [(rng.getrandbits(128), rng.randbytes(48)) for _ in range(30)]
    pairs = []
    for _ in range(300):
        structure, colours = rng.choice(originals)
        other = bytes(min(255, max(0, c + rng.randint(-21, 21))) for c in colours)
        pairs.append((differing(structure, rng.sample(range(128), rng.randint(0, 7))), other))
    expected: dict[str, str] = {}
    for index, (structure, colours) in enumerate(pairs):
        for other, (its_structure, its_colours) in enumerate(pairs[:index]):
            is_close = (structure ^ its_structure).bit_count() <= 8
            apart = sum(abs(a - b) for a, b in zip(colours, its_colours, strict=True)) / 48
            if is_close and apart <= 12 and f"{other}" not in expected:
                expected[f"{index}"] = f"{other}"
                break
    assert near_duplicates(prints(*pairs)) == expected
    assert 30 < len(expected) < 250, "copies of copies, and colours too far apart"


def test_a_band_that_a_crowd_shares_is_looked_up_among_its_first_only() -> None:
    rng, grey = random.Random(4), bytes(48)
    crowd = [rng.getrandbits(120) for _ in range(100)]  # the first 8 bits are 0
    one_in_each_other_band = range(5, 120, 15)
    copies = [differing(crowd[index], one_in_each_other_band) for index in (31, 32)]
    twins = near_duplicates(prints(*((structure, grey) for structure in crowd + copies)))
    assert twins == {"100": "31"}


def test_captions_that_tell_no_image_from_another_are_remarked_on(check: Check) -> None:
    images = {f"{index}.png": photo(index) for index in range(6)}
    numbered = {name: f"moppel_0{name[0]}" for name in images}
    found = check(images, numbered)
    assert said(found, "same-caption")[None].startswith('6 of 6 captions say the same, "moppel_00"')
    assert said(found, "bare-caption") == {}
    bare = check(images, numbered, trigger="moppel")
    assert said(bare, "bare-caption")[None].startswith(
        "6 of 6 captions say nothing but the trigger"
    )
    assert said(bare, "same-caption") == {} and bare["parts"]["captions"] < 1
    counted = {name: f"a toy with {name[0]} legs" for name in images}
    assert said(check(images, counted), "same-caption") == {}
    told = {name: f"moppel on a {place}" for name, place in zip(images, "abcdef", strict=True)}
    for kind in ("same-caption", "bare-caption"):
        assert said(check(images, told, trigger="moppel"), kind) == {}
    few = {**told, "0.png": "a cat", "1.png": "a cat", "2.png": "a cat"}
    assert said(check(images, few), "same-caption") == {}
