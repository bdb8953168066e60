"""Excluded pictures go with their captions, come back with them, and nothing is ever overwritten."""

from __future__ import annotations

from pathlib import Path

import pytest
from lora_trainer.gui import exclusion
from lora_trainer.gui.journal import Journal
from PIL import Image

from lora_trainer.common.errors import InputError
from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset.listing import EXCLUDED_FOLDER, ImageFile, list_dataset

EXTENSIONS = (".txt", ".caption")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "set"
    folder.mkdir()
    return folder


@pytest.fixture
def journal(root: Path, tmp_path: Path) -> Journal:
    return Journal(root=root, folder=tmp_path / "undo")


def add(root: Path, name: str, caption: str | None = None, *, shade: int = 0) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (shade, 0, 0)).save(path)
    if caption is not None:
        path.with_suffix(".txt").write_text(caption)


def files(root: Path) -> dict[str, bytes]:
    found = sorted(path for path in root.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in found}


def listed(folder: Path) -> tuple[ImageFile, ...]:
    return list_dataset(folder, settings=DataSettings()).pictures


def move(journal: Journal, *names: str, back: bool = False) -> None:
    act = exclusion.put_back if back else exclusion.exclude
    every = listed(journal.root / EXCLUDED_FOLDER if back else journal.root)
    chosen = [picture for picture in every if picture.name in names]
    assert len(chosen) == len(names)
    changes = act(chosen, every=every, root=journal.root, extensions=EXTENSIONS)
    with journal.locked():
        assert not journal.perform("move", changes).left


def test_out_and_back(journal: Journal, root: Path) -> None:
    add(root, "a.png", "one")
    add(root, "b.png")
    before = files(root)
    move(journal, "a.png")
    assert sorted(files(root)) == ["_excluded/a.png", "_excluded/a.txt", "b.png"]
    assert [picture.name for picture in listed(root)] == ["b.png"]
    move(journal, "a.png", back=True)
    assert files(root) == before
    assert not (root / "_excluded").exists(), "an empty folder of ours is cleared away"
    journal.undo()
    journal.undo()
    assert files(root) == before


def test_the_folder_of_a_picture_is_kept(journal: Journal, root: Path) -> None:
    add(root, "3_cat/a.png", "one")
    add(root, "b.png")
    move(journal, "3_cat/a.png")
    assert {"_excluded/3_cat/a.png", "_excluded/3_cat/a.txt"} < set(files(root))
    move(journal, "3_cat/a.png", back=True)
    assert [picture.repeats for picture in listed(root)] == [3, 1]


def test_a_taken_name_gets_a_number_with_its_caption(journal: Journal, root: Path) -> None:
    add(root, "_excluded/a.png", "before", shade=9)
    add(root, "a.png", "one")
    add(root, "b.png")
    old = files(root)
    move(journal, "a.png")
    now = files(root)
    assert now["_excluded/a.png"] == old["_excluded/a.png"]
    assert now["_excluded/a.txt"] == b"before"
    assert now["_excluded/a-2.png"] == old["a.png"]
    assert now["_excluded/a-2.txt"] == b"one"


def test_a_caption_in_the_way_counts_as_taken(journal: Journal, root: Path) -> None:
    """Else the picture would come back with the words of another."""
    add(root, "a.png")
    add(root, "b.png")
    (root / "_excluded").mkdir()
    (root / "_excluded/a.caption").write_text("not mine")
    move(journal, "a.png")
    assert "_excluded/a-2.png" in files(root)


def test_a_shared_caption_stays_and_is_copied(journal: Journal, root: Path) -> None:
    add(root, "a.png", "both")
    add(root, "a.jpg", shade=200)
    before = files(root)
    move(journal, "a.png")
    assert sorted(files(root)) == ["_excluded/a.png", "_excluded/a.txt", "a.jpg", "a.txt"]
    add(root, "z.png")
    move(journal, "a.jpg")
    assert files(root)["_excluded/a.txt"] == b"both"
    assert "a.txt" not in files(root)
    move(journal, "a.png", back=True)
    move(journal, "a.jpg", back=True)
    assert {name: data for name, data in files(root).items() if name != "z.png"} == before


def test_both_users_of_a_caption_go_in_one_step(journal: Journal, root: Path) -> None:
    add(root, "a.png", "both")
    add(root, "a.jpg", shade=200)
    add(root, "z.png")
    before = files(root)
    move(journal, "a.png", "a.jpg")
    assert sorted(files(root)) == ["_excluded/a.jpg", "_excluded/a.png", "_excluded/a.txt", "z.png"]
    journal.undo()
    assert files(root) == before


def test_the_line_of_an_excluded_picture_stays_and_counts_again(
    journal: Journal, root: Path
) -> None:
    add(root, "a.png")
    add(root, "b.png")
    (root / "metadata.jsonl").write_text('{"file_name": "a.png", "text": "x"}')
    move(journal, "a.png")
    kinds = {finding.kind for finding in list_dataset(root, settings=DataSettings()).findings}
    assert kinds == {"excluded"}, "no word of a caption without a picture"
    move(journal, "a.png", back=True)
    assert listed(root)[0].stand_ins[0].text == "x"


def test_a_link_is_not_moved(journal: Journal, root: Path) -> None:
    add(root, "a.png")
    (root / "b.png").symlink_to("a.png")
    with pytest.raises(InputError, match="is a link"):
        move(journal, "b.png")
