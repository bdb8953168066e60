"""Browsing: what a folder shows, where it begins, and that nothing is listed which may not be named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from lora_trainer.gui import browse
from lora_trainer.gui.workplace import Workplace

from lora_trainer.common.errors import InputError


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A folder with model files, pictures, a model in diffusers' layout, and links to outside."""
    folder = tmp_path / "data" / "models"
    (folder / "whole").mkdir(parents=True)
    (folder / "whole" / "model_index.json").write_text("{}", encoding="utf-8")
    (folder / "Pony.safetensors").write_bytes(b"x" * 2048)
    (folder / "flux.gguf").write_bytes(b"x")
    (folder / "old.ckpt").write_bytes(b"x")
    (folder / "a.png").write_bytes(b"x")
    (folder / ".hidden").mkdir()
    (tmp_path / "secret").mkdir()
    (folder / "out").symlink_to(tmp_path / "secret")
    (folder / "nowhere").symlink_to(tmp_path / "gone")
    return folder


def names(answer: dict[str, Any]) -> list[str]:
    return [row["name"] for row in answer["rows"]]


def test_a_base_is_a_model_file_or_the_folder_of_a_whole_model(models: Path) -> None:
    work = Workplace(runs=models.parent / "runs")
    answer = browse.listing(work, "base", str(models))
    assert names(answer) == ["out", "whole", "flux.gguf", "Pony.safetensors"]
    assert [row["said"] for row in answer["rows"] if row["file"]] == ["1 B", "2.0 KiB"]
    assert (answer["can"], answer["above"]) == (False, str(models.parent))
    assert browse.listing(work, "base", str(models / "whole"))["can"]
    assert browse.listing(work, "base", str(models / "flux.gguf"))["folder"] == str(models)


def test_a_dataset_is_a_folder_and_says_how_many_images_it_has(models: Path) -> None:
    answer = browse.listing(Workplace(runs=models.parent / "runs"), "dataset", str(models))
    assert (names(answer), answer["said"], answer["can"]) == (
        ["out", "whole"],
        "1 image here",
        True,
    )


def test_a_server_for_others_lists_nothing_outside_of_its_folders(models: Path) -> None:
    work = Workplace(runs=models.parent / "runs", roots=(models,))
    answer = browse.listing(work, "base", "")
    assert (answer["folder"], answer["above"]) == (str(models), "")
    assert "out" not in names(answer)
    for path in (models.parent, models / "out", models / "..", Path("/")):
        with pytest.raises(InputError, match="outside of the folders"):
            browse.listing(work, "base", str(path))
        with pytest.raises(InputError, match="outside of the folders"):
            browse.remember(work, "base", str(path))


def test_it_begins_where_the_last_choice_was(models: Path) -> None:
    work = Workplace(runs=models.parent / "runs")
    browse.remember(work, "base", str(models / "Pony.safetensors"))
    browse.remember(work, "dataset", str(models))
    assert browse.listing(work, "base", "")["folder"] == str(models)
    assert browse.listing(work, "dataset", "")["folder"] == str(models.parent)
    (work.own / "browsed.json").write_text("{", encoding="utf-8")
    assert browse.listing(work, "base", "")["folder"] == str(Path.home())


def test_a_folder_that_is_gone_is_refused_in_a_line(models: Path) -> None:
    with pytest.raises(InputError, match="cannot be opened"):
        browse.listing(Workplace(runs=models.parent), "dataset", str(models / "gone"))
