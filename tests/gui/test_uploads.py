"""What a browser sent gets safe names, and lands in a folder of ours."""

from __future__ import annotations

import os
import time
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lora_trainer.gui import dataset_upload, uploads
from lora_trainer.gui.posted import Posted
from lora_trainer.gui.upload_names import safe_name
from lora_trainer.gui.uploads import Upload, save_files
from lora_trainer.gui.workplace import Workplace

from lora_trainer.common.errors import InputError, RequestError


def tree(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


# ---- names


@pytest.mark.parametrize(
    ("name", "safe"),
    [
        ("photo 1.PNG", "photo 1.PNG"),
        ("Größe 日本.jpg", "Größe 日本.jpg"),
        ("../../etc/passwd", "passwd"),
        ("C:\\a\\b.png", "b.png"),
        (".htaccess", "htaccess"),
        ("...", ""),
        ("", ""),
        ("a/", ""),
        ("--flag.png", "flag.png"),
        ("-.png", ""),
        ("a\nb\0c\u202e.png", "a_b_c_.png"),
        ("$(x);`y`.png", "$(x);`y`.png"),
        ("CON.png", "_CON.png"),
        ("nul.tar.png", "_nul.tar.png"),
        ("a:b|c?.png ", "a_b_c_.png"),
        ("\udcff.png", "_.png"),
    ],
)
def test_names_are_made_safe(name: str, safe: str) -> None:
    assert safe_name(name) == safe


@given(st.text(max_size=200))
def test_any_name_is_one_visible_file_or_nothing(name: str) -> None:
    safe = safe_name(name)
    assert len(safe.encode()) <= 255
    if safe:
        assert PurePosixPath(safe).name == safe
        assert safe[0] not in ".- "
        assert safe.isprintable()
        assert safe_name(safe) == safe or len(name.encode(errors="replace")) > 140


# ---- single files


def uploaded(work: Workplace, *names: str) -> list[Upload]:
    files = []
    for number, name in enumerate(names):
        path = work.own / "incoming" / f"{number:04x}" / "blob"
        path.parent.mkdir(parents=True)
        path.write_bytes(f"{number}".encode())
        files.append(Upload(path=path, name=name))
    return files


def test_uploaded_files_get_safe_names_of_their_own(tmp_path: Path) -> None:
    work = Workplace(runs=tmp_path)
    into = uploads.upload_folder(work, "my ../ cats")
    assert into == tmp_path / ".gui" / "uploads" / "cats"
    names = ["set/a.png", "set/a.txt", "../../b.png", "virus.exe", "other/a.png", "other/a.txt"]
    got = save_files(work, uploaded(work, *names), into=into)
    assert (got.images, got.captions) == (3, 2)
    assert got.left_out == ("virus.exe: is neither a picture nor a caption",)
    contents = {name: (into / name).read_text() for name in tree(into)}
    assert contents == {"a.png": "0", "a.txt": "1", "b.png": "2", "a-2.png": "4", "a-2.txt": "5"}


def test_more_files_take_no_caption_away_from_those_before(tmp_path: Path) -> None:
    work = Workplace(runs=tmp_path)
    into = uploads.upload_folder(work, "x")
    into.mkdir(parents=True)
    (into / "a.png").write_text("before")
    save_files(work, uploaded(work, "a.png", "a.txt"), into=into)
    assert tree(into) == {"a.png", "a-2.png", "a-2.txt"}
    assert (into / "a.png").read_text() == "before"
    assert uploads.upload_folder(work, "x").name == "x-2"


def test_only_what_was_uploaded_is_taken(tmp_path: Path) -> None:
    work = Workplace(runs=tmp_path / "runs")
    secret = tmp_path / "secret.png"
    secret.write_bytes(b"secret")
    link = work.own / "incoming" / "link.png"
    link.parent.mkdir(parents=True)
    link.symlink_to(secret)
    for path in (secret, link, work.own / "incoming" / ".." / ".." / ".." / "secret.png"):
        with pytest.raises(InputError, match="was not uploaded"):
            save_files(work, [Upload(path=path, name="a.png")], into=work.own / "uploads" / "x")
    assert not (work.own / "uploads").exists()


def test_old_uploads_are_forgotten(tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "blob").write_bytes(b"x")
    os.utime(tmp_path / "old", (time.time() - 1000,) * 2)
    uploads.forget_old(tmp_path, kept_s=500)
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    uploads.forget_old(tmp_path / "missing", kept_s=500)


BATCH = "0123456789abcdef"


def batch(work: Workplace, *contents: bytes) -> None:
    folder = dataset_upload.batch_folder(work, BATCH)
    folder.mkdir(parents=True)
    for number, content in enumerate(contents):
        (folder / str(number)).write_bytes(content)


def test_what_a_browser_sent_becomes_a_folder_of_its_own(tmp_path: Path) -> None:
    work = Workplace(runs=tmp_path)
    batch(work, b"picture", b"program")
    posted = Posted.of({"name": "my set", "files": ["x.png", "y.exe"]})
    answer = dataset_upload.receive(work, BATCH, posted)
    assert Path(answer["received"]) == work.own / "uploads" / "my set"
    assert "1 image and 0 captions" in answer["said"]
    assert "y.exe" in answer["said"]
    assert not dataset_upload.batch_folder(work, BATCH).exists()


@pytest.mark.parametrize(
    ("name", "files"),
    [
        (BATCH, ["x.png"]),
        (BATCH, []),
        (BATCH, [5]),
        (BATCH, "x.png"),
        ("../../outside", ["x.png"]),
        ("", ["x.png"]),
    ],
)
def test_files_that_did_not_arrive_make_no_folder(name: str, files: Any, tmp_path: Path) -> None:
    work = Workplace(runs=tmp_path)
    with pytest.raises((InputError, RequestError)):
        dataset_upload.receive(work, name, Posted.of({"name": "n", "files": files}))
    assert not (work.own / "uploads").exists()


def test_the_example_is_a_copy_that_may_be_changed(tmp_path: Path) -> None:
    work = Workplace(runs=tmp_path)
    folder = uploads.example(work)
    assert len([path for path in folder.iterdir() if path.suffix != ".txt"]) == 16
    (folder / "zibbo_01.txt").write_text("mine")
    assert uploads.example(work) == folder
    assert (folder / "zibbo_01.txt").read_text() == "mine"
