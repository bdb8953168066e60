"""Which folders a page may name: any on one's own machine, the named ones where others ask."""

from __future__ import annotations

from pathlib import Path

import pytest
from lora_trainer.gui.workplace import Workplace

from lora_trainer.common.errors import InputError


@pytest.fixture
def place(tmp_path: Path) -> Path:
    for name in ("runs/.gui/uploads/cats", "sets/owls/10_owl", "elsewhere"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path


def bounded(place: Path) -> Workplace:
    return Workplace(runs=place / "runs", roots=(place / "sets",))


def test_alone_every_folder_may_be_named(place: Path) -> None:
    work = Workplace(runs=place / "runs")
    assert work.folder(f' "{place / "elsewhere"}" ') == place / "elsewhere"
    (place / "sets" / "link").symlink_to(place / "elsewhere")
    assert work.folder(str(place / "sets" / "link")) == place / "elsewhere"
    assert work.folder(str(place / "sets")) == place / "sets"


def test_others_may_name_the_given_folders_and_the_runs(place: Path) -> None:
    work = bounded(place)
    assert work.folder(str(place / "sets" / "owls")) == place / "sets" / "owls"
    assert work.folder(str(place / "runs" / ".gui" / "uploads" / "cats")).name == "cats"
    for folder in (place, place / "elsewhere", place / "sets" / ".." / "elsewhere", "~", "/"):
        with pytest.raises(InputError, match="outside of the folders"):
            work.folder(str(folder))


@pytest.mark.parametrize("name", ["a.txt", "10_owl/a.png", "10_owl/sub", "metadata.jsonl"])
def test_a_dataset_with_a_link_out_of_them_is_refused(place: Path, name: str) -> None:
    owls = place / "sets" / "owls"
    (owls / name).symlink_to(place / "elsewhere")
    with pytest.raises(InputError, match="is a link out of the folders"):
        bounded(place).folder(str(owls))
    assert Workplace(runs=place / "runs").folder(str(owls)) == owls


def test_links_inside_of_them_are_no_matter(place: Path) -> None:
    owls = place / "sets" / "owls"
    (owls / "again").symlink_to(owls / "10_owl")
    (owls / "circle").symlink_to(owls / "circle")
    assert bounded(place).folder(str(owls)) == owls


@pytest.mark.parametrize("text", ["", "  ", "\0", "~nobody-of-that-name/x", "x" * 5000, "/a\nb"])
def test_what_is_no_folder_is_one_line(place: Path, text: str) -> None:
    for work in (bounded(place), Workplace(runs=place / "runs")):
        with pytest.raises(InputError) as error:
            work.folder(text)
        assert "\n" not in str(error.value)
