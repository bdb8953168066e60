"""Regularisation images: told apart from the dataset, without its trigger, each with samples of its own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.config.config import build_config
from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset.captions import of_class
from lora_trainer.dataset.records import Dataset
from lora_trainer.dataset.scan import scan
from tests.fakes.studio import draw

MARKED = {"data.folders.2_toy.regularisation": True}


def scanned(folder: Path, settings: dict[str, Any]) -> Dataset:
    data: DataSettings = build_config({"data.trigger": "zwx", **settings}).data
    return scan(folder, settings=data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three images to learn, two in `2_toy`, two elsewhere."""
    for place, count in (("data", 3), ("data/2_toy", 2), ("other", 2)):
        (tmp_path / place).mkdir()
        for index in range(count):
            draw(tmp_path / place / f"p{index}.png", seed=len(place) * 10 + index)
            (tmp_path / place / f"p{index}.txt").write_text(f"a toy {index}")
    return tmp_path / "data"


def captions(dataset: Dataset) -> tuple[dict[str, str], dict[str, str]]:
    return (
        {record.name: record.caption for record in dataset.records},
        {record.name: record.caption for record in dataset.regularisation},
    )


def test_a_folder_elsewhere_is_read_too(folder: Path) -> None:
    other = {"data.regularisation_dir": str(folder.parent / "other")}
    dataset = scanned(folder, {**MARKED, **other})
    assert sorted(captions(dataset)[1].items()) == [
        ("2_toy/p0.png", "a toy 0"),
        ("2_toy/p1.png", "a toy 1"),
        ("regularisation:p0.png", "a toy 0"),
        ("regularisation:p1.png", "a toy 1"),
    ]
    assert [record.repeats for record in dataset.regularisation] == [2, 2, 1, 1]


def test_equal_pictures_have_samples_of_their_own(folder: Path) -> None:
    other = folder.parent / "other"
    shutil.copy(folder / "p0.png", other / "p0.png")
    shutil.copy(folder / "p0.png", folder / "2_toy" / "p0.png")
    dataset = scanned(folder, {**MARKED, "data.regularisation_dir": str(other)})
    records = (*dataset.records, *dataset.regularisation)
    ids = [sample for record in records for sample in record.sample_ids()]
    assert len(ids) == len(set(ids)) == 3 + 4 + 2
    twice = [finding for finding in dataset.findings if finding.kind == "regularisation"]
    assert [finding.file for finding in twice] == ["2_toy/p0.png", "regularisation:p0.png"]
    assert "same file as p0.png" in twice[0].what


def test_samples_keep_their_ids_when_a_folder_is_marked(folder: Path) -> None:
    def own(settings: dict[str, Any]) -> set[str]:
        found = scanned(folder, settings).records
        return {sample for one in found if one.folder == "." for sample in one.sample_ids()}

    assert own({}) == own(MARKED)


def test_what_is_there_is_part_of_the_fingerprint(folder: Path) -> None:
    other = {"data.regularisation_dir": str(folder.parent / "other")}
    found = [scanned(folder, settings).fingerprint for settings in ({}, MARKED, other)]
    (folder.parent / "other" / "p0.txt").write_text("another toy")
    found.append(scanned(folder, other).fingerprint)
    assert len(set(found)) == 4


def test_findings_name_the_other_folder(folder: Path) -> None:
    (folder.parent / "other" / "p0.txt").unlink()
    (folder.parent / "other" / "cut.png").write_bytes(b"no picture")
    other = {"data.regularisation_dir": str(folder.parent / "other")}
    dataset = scanned(folder, {**other, "data.max_bad_fraction": 0.5})
    assert "regularisation:cut.png" in {finding.file for finding in dataset.findings}


def test_folders_that_make_no_sense_are_refused(folder: Path) -> None:
    inside = {"data.regularisation_dir": str(folder / "2_toy")}
    with pytest.raises(RequestError, match=r"lies in the dataset") as refused:
        scanned(folder, inside)
    assert refused.value.fix.startswith("--set data.folders.2_toy.regularisation=true")
    with pytest.raises(InputError, match="none is left to learn"):
        scanned(folder, {"data.folders": {".": {"regularisation": True}}, **MARKED})
    with pytest.raises(InputError, match="does not exist"):
        scanned(folder, {"data.regularisation_dir": str(folder.parent / "nowhere")})


@pytest.mark.parametrize(
    ("caption", "expected"),
    [
        ("zwx, a toy", "woman, a toy"),
        ("a photo of ZWX, smiling", "a photo of woman, smiling"),
        ("zwxy is another word", None),
        ("", None),
    ],
)
def test_the_class_takes_the_place_of_the_trigger(caption: str, expected: str | None) -> None:
    assert of_class(caption, trigger="zwx", class_word="woman") == expected
    assert of_class(caption, trigger=None, class_word="woman") is None


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"objective.prior": "base"}, "objective.prior=base needs regularisation images"),
        ({"objective.preservation_weight": 1.0}, "replaces data.trigger by data.class_word"),
        (
            {"objective.preservation_weight": 1.0, "data.trigger": "zwx"},
            "replaces data.trigger by data.class_word",
        ),
    ],
)
def test_what_lacks_its_other_half_is_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=reason):
        build_config(settings)
