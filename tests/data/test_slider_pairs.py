"""The pairs of images of a slider: which images are one, their strengths and captions, and what is left out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from PIL import Image

from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset.quality import near_duplicates
from lora_trainer.dataset.records import Dataset, ImageRecord, hold_out
from lora_trainer.dataset.scan import scan


def dataset(folder: Path, *names: str) -> Path:
    """Make images of these names, each of another colour."""
    for number, name in enumerate(names, start=1):
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64, 64), (number * 11, 255 - number * 11, 90)).save(file)
    return folder


def read(folder: Path) -> Dataset:
    return scan(folder, settings=DataSettings())


def by_name(found: Dataset) -> dict[str, ImageRecord]:
    return {record.name: record for record in found.records}


def test_images_of_one_name_in_more_and_less_are_a_pair_with_one_caption(tmp_path: Path) -> None:
    folder = dataset(tmp_path, "more/a.png", "less/A.webp", "more/b.png", "less/b.png")
    (folder / "more" / "a.txt").write_text("a man in a park", encoding="utf-8")
    (folder / "less" / "b.txt").write_text("a dog", encoding="utf-8")
    found = read(folder)
    records = by_name(found)
    assert {name: one.strength for name, one in records.items()} == {
        "more/a.png": 1.0,
        "less/A.webp": -1.0,
        "more/b.png": 1.0,
        "less/b.png": -1.0,
    }
    assert records["less/A.webp"].caption == "a man in a park"
    assert records["more/b.png"].caption == "a dog", "the caption of either side counts for both"
    for more, less in (("more/a.png", "less/A.webp"), ("more/b.png", "less/b.png")):
        assert records[less].pair == records[more].pair == records[more].sample_ids()[0]
    assert found.pairs == 2 and found.is_slider
    assert [one.kind for one in found.findings if one.severity != "note"] == []


def test_the_images_of_a_pair_may_look_alike_and_those_of_two_pairs_not(tmp_path: Path) -> None:
    folder = dataset(tmp_path, "more/a.png", "less/a.png", "more/b.png", "less/b.png")
    scene = Image.linear_gradient("L").resize((64, 64)).convert("RGB")
    for number, name in enumerate(("more/a", "less/a", "more/b")):
        changed = scene.copy()
        changed.putpixel((number, 0), (255, 0, 0))
        changed.save(folder / f"{name}.png")
    records = read(folder).records
    assert near_duplicates(records) == {"more/b.png": "less/a.png"}
    alone = [replace(record, pair=None) for record in records]
    assert near_duplicates(alone) == {"more/a.png": "less/a.png", "more/b.png": "less/a.png"}


def test_pairs_may_lie_in_subfolders_and_be_repeated(tmp_path: Path) -> None:
    folder = dataset(
        tmp_path, "old/3_more/a.png", "old/less/a.png", "new/more/a.png", "new/less/a.png"
    )
    records = by_name(read(folder))
    assert records["old/less/a.png"].pair == records["old/3_more/a.png"].pair
    assert records["old/less/a.png"].repeats == records["old/3_more/a.png"].repeats == 3
    assert records["new/less/a.png"].pair == records["new/more/a.png"].pair


def test_what_is_not_of_a_pair_is_left_out_and_named(tmp_path: Path) -> None:
    folder = dataset(tmp_path, "more/a.png", "less/a.png", "more/b.png", "less/c.png", "d.png")
    found = read(folder)
    assert {*by_name(found)} == {"more/a.png", "less/a.png"}
    (said,) = [one for one in found.findings if one.kind == "slider-pairs"]
    assert said.severity == "warning" and "3 images are not read" in said.what
    assert all(name in said.what for name in ("more/b.png", "less/c.png", "d.png"))


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (("more/a.png", "less/b.png"), True),
        (("more/a.png", "other/a.png"), False),
        (("one/more/a.png", "two/less/a.png"), True),
    ],
)
def test_without_a_pair_they_are_images_like_others(
    tmp_path: Path, names: tuple[str, ...], said: bool
) -> None:
    found = read(dataset(tmp_path, *names))
    assert {*by_name(found)} == {*names} and not found.is_slider
    assert all(one.strength == 1 and one.pair is None for one in found.records)
    assert any(one.kind == "slider-pairs" for one in found.findings) == said


def test_a_pair_is_held_out_together(tmp_path: Path) -> None:
    names = [f"{side}/{number}.png" for side in ("more", "less") for number in range(8)]
    records = read(dataset(tmp_path, *names)).records
    trained, held_out = hold_out(records, fraction=0.25, seed=3)
    assert len(held_out) == 4 and len(trained) == 12, "a quarter of the pairs"
    assert {one.pair for one in held_out}.isdisjoint({one.pair for one in trained})


def test_the_sides_exchanged_are_another_dataset(tmp_path: Path) -> None:
    folder = dataset(tmp_path, "more/a.png", "less/a.png")
    before = read(folder).fingerprint
    (folder / "more").rename(folder / "aside")
    (folder / "less").rename(folder / "more")
    (folder / "aside").rename(folder / "less")
    assert read(folder).fingerprint != before
