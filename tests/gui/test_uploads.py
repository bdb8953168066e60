"""Images that come to this machine or are on it: uploads, zips (SEC-06), browsing."""

from __future__ import annotations

import errno
import os
import stat
import struct
import time
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lora_trainer.gui import archives, browse, dataset_upload, uploads
from lora_trainer.gui.archives import Limits, Received, unpack
from lora_trainer.gui.posted import Posted
from lora_trainer.gui.upload_names import safe_name
from lora_trainer.gui.uploads import Upload, save_files
from lora_trainer.gui.workplace import Workplace

from lora_trainer.common.errors import InputError, LoraTrainError, MachineError, RequestError


def tree(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


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


PICTURE = b"not decoded here"
STANDARD = Limits()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """Return a folder to work in; nothing beside it may change."""
    (tmp_path / "beside.txt").write_text("untouched")
    folder = tmp_path / "place"
    folder.mkdir()
    yield folder
    assert sorted(path.name for path in tmp_path.iterdir()) == ["beside.txt", "place"]
    assert (tmp_path / "beside.txt").read_text() == "untouched"


def packed(place: Path, *entries: tuple[str | zipfile.ZipInfo, bytes]) -> Path:
    archive = place / "set.zip"
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as content:
        for name, data in entries:
            content.writestr(name, data)
    return archive


def refused(place: Path, archive: Path, limits: Limits = STANDARD) -> str:
    """Return why an archive is refused, having seen that nothing was left behind."""
    with pytest.raises(InputError) as error:
        unpack(archive, into=place / "data" / "new", limits=limits)
    left = {path.name for path in place.rglob("*")} - {"data"}
    assert left <= {archive.name}
    return str(error.value)


def test_pictures_and_captions_are_unpacked_and_the_rest_is_told(place: Path) -> None:
    entries = [(name, name.encode()) for name in ("a.png", "a.txt", "10_cat/b.JPG", "notes.pdf")]
    got = unpack(packed(place, *entries), into=place / "data" / "new")
    assert got == Received(
        folder=place / "data" / "new",
        images=2,
        captions=1,
        left_out=("notes.pdf: is neither a picture nor a caption",),
    )
    assert tree(got.folder) == {"a.png", "a.txt", "10_cat/b.JPG"}
    assert (got.folder / "a.txt").read_bytes() == b"a.txt"


def test_a_packed_folder_is_the_dataset_itself(place: Path) -> None:
    names = ["my set/", "my set/a.png", "my set/b/c.png", "__MACOSX/._a.png", "my set/.DS_Store"]
    got = unpack(packed(place, *((name, b"x") for name in names)), into=place / "new")
    assert tree(got.folder) == {"a.png", "b/c.png"}
    assert got.left_out == ()


def test_a_zip_of_windows_has_folders_too(place: Path) -> None:
    archive = packed(place, ("sub_a.png", PICTURE), ("b.png", PICTURE))
    archive.write_bytes(archive.read_bytes().replace(b"sub_a.png", b"sub\\a.png"))
    assert tree(unpack(archive, into=place / "new").folder) == {"sub/a.png", "b.png"}


CLIMBING = (
    ["../x.png", "a/../../x.png", "..\\x.png", "a\\..\\..\\x.png", "/etc/x.png", "//host/s/x.png"]
    + ["\\\\host\\share\\x.png", "C:\\x.png", "C:x.png", "c:/x.png", "\\x.png", "..", "../", "/"]
    + ["a/..", "a//x.png", "./../x.png", "a/./../../x.png", "file:///x.png", "....//../x.png"]
)


@pytest.mark.parametrize("name", CLIMBING)
def test_a_name_that_leads_out_refuses_the_archive(place: Path, name: str) -> None:
    info = zipfile.ZipInfo("q" * len(name))
    archive = packed(place, ("a.png", PICTURE), (info, PICTURE))
    archive.write_bytes(archive.read_bytes().replace(info.filename.encode(), name.encode()))
    assert "leads out of it" in refused(place, archive)


def test_a_name_with_a_nul_refuses_the_archive(place: Path) -> None:
    archive = packed(place, ("a.png", PICTURE), ("b_.png", PICTURE))
    archive.write_bytes(archive.read_bytes().replace(b"b_.png", b"b\0.png"))
    assert "leads out of it" in refused(place, archive)


@pytest.mark.parametrize(
    "kind", [stat.S_IFLNK, stat.S_IFIFO, stat.S_IFCHR, stat.S_IFBLK, stat.S_IFSOCK]
)
def test_links_and_devices_refuse_the_archive(place: Path, kind: int) -> None:
    link = zipfile.ZipInfo("link.png")
    link.create_system, link.external_attr = 3, (kind | 0o777) << 16
    archive = packed(place, ("a.png", PICTURE), (link, b"/etc/passwd"))
    assert "a link or a device" in refused(place, archive)


def test_a_bomb_is_refused_before_it_is_unpacked(place: Path) -> None:
    archive = packed(place, ("a.png", bytes(20 * 2**20)))
    assert archive.stat().st_size * 900 < 20 * 2**20
    assert "as a bomb does" in refused(place, archive)
    huge = packed(place, ("a.png", os.urandom(2**21)))
    assert "holds a file of" in refused(place, huge, Limits(file_bytes=2**20))
    many = packed(place, *((f"{n}.png", os.urandom(1000)) for n in range(5)))
    assert "unpacks to 5,000 bytes" in refused(place, many, Limits(total_bytes=4000))


def test_an_entry_larger_than_it_says_is_refused(place: Path) -> None:
    archive = packed(place, ("a.png", bytes(100_000)))
    size = struct.pack("<I", 100_000)
    archive.write_bytes(archive.read_bytes().replace(size, struct.pack("<I", 10)))
    assert "no zip that can be unpacked" in refused(place, archive)


def test_too_many_files_are_refused(place: Path) -> None:
    archive = packed(place, ("a.png", PICTURE))
    data = archive.read_bytes()
    entry, end = data.index(b"PK\1\2"), data.index(b"PK\5\6")
    listed = data[entry:end] * 100_000  # written one by one it would take most of the test's time
    ending = data[end : end + 12] + struct.pack("<II", len(listed), entry) + data[end + 20 :]
    archive.write_bytes(data[:entry] + listed + ending)
    assert "holds 100,000 files, 20,000 are allowed" in refused(place, archive)


def test_a_list_of_files_without_end_is_not_read(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "_DIRECTORY_MAX_BYTES", 2**16)
    archive = packed(place, *((f"{'n' * 200}{number}.png", b"") for number in range(500)))
    assert "its list of files is too long" in refused(place, archive)


def test_encrypted_and_unusual_archives_are_refused(place: Path) -> None:
    data = packed(place, ("a.png", PICTURE)).read_bytes()
    at = data.index(b"PK\1\2")
    locked, unusual = bytearray(data), bytearray(data)
    locked[at + 8] |= 1
    unusual[at + 10] = 97
    (place / "set.zip").write_bytes(locked)
    assert "is encrypted" in refused(place, place / "set.zip")
    (place / "set.zip").write_bytes(unusual)
    assert "an unusual method" in refused(place, place / "set.zip")


def test_an_archive_without_pictures_is_refused(place: Path) -> None:
    assert "holds no pictures" in refused(place, packed(place, ("a.txt", b"x")))
    assert "holds no pictures" in refused(place, packed(place))


def test_what_is_no_archive_is_refused(place: Path) -> None:
    archive = place / "set.zip"
    for data in (b"", b"PK", b"Rar!" + bytes(100), b"PK\5\6" + bytes(18)[:-4]):
        archive.write_bytes(data)
        refused(place, archive)
    with pytest.raises(InputError):
        unpack(place / "none.zip", into=place / "new")


def test_damage_anywhere_is_one_line_and_leaves_nothing(place: Path) -> None:
    whole = packed(place, ("a.png", os.urandom(300)), ("b.txt", b"caption " * 50)).read_bytes()
    archive = place / "set.zip"
    for at in range(0, len(whole), 7):
        for damaged in (whole[:at], whole[:at] + b"\xff" + whole[at + 1 :]):
            archive.write_bytes(damaged)
            try:
                folder = unpack(archive, into=place / "new").folder
            except LoraTrainError as error:
                assert "\n" not in str(error)  # noqa: PT017 - either outcome is right
                assert not (place / "new").exists()
            else:
                for path in (folder / name for name in tree(folder)):
                    path.unlink()
                folder.rmdir()
            assert {path.name for path in place.iterdir()} == {"set.zip"}


def test_a_full_disk_leaves_nothing(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = packed(place, ("a.png", PICTURE))

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(archives, "_chunks", full)
    with pytest.raises(MachineError, match="No space left"):
        unpack(archive, into=place / "new")
    assert {path.name for path in place.iterdir()} == {"set.zip"}


def test_what_does_not_fit_is_not_begun(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "_FREE_AFTERWARDS_BYTES", 2**62)
    with pytest.raises(MachineError, match="do not fit"):
        unpack(packed(place, ("a.png", PICTURE)), into=place / "new")
    assert {path.name for path in place.iterdir()} == {"set.zip"}


def test_files_of_one_name_keep_apart(place: Path) -> None:
    names = ["a.png", "A.png", "sub/a?.png", "sub/a*.png"]
    folder = unpack(packed(place, *((name, name.encode()) for name in names)), into=place / "n")
    assert tree(folder.folder) == {"a.png", "A-2.png", "sub/a_.png", "sub/a_-2.png"}


def test_checksums_are_looked_at(place: Path) -> None:
    archive = packed(place, ("a.png", PICTURE))
    checksum = struct.pack("<I", zlib.crc32(PICTURE))
    archive.write_bytes(archive.read_bytes().replace(checksum, b"\1\2\3\4"))
    assert "Bad CRC" in refused(place, archive)


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
