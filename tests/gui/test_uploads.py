"""Images that come to this machine or are on it: uploads, zips (SEC-06), browsing."""

from __future__ import annotations

import asyncio
import errno
import io
import os
import shutil
import stat
import struct
import threading
import time
import tomllib
import zipfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from lora_trainer.gui import archives, upload_names, uploads
from lora_trainer.gui.shared import browse
from lora_trainer.gui.workplace import Workplace
from pydantic import ValidationError

from lora_trainer.common.errors import InputError, LoraTrainError, MachineError, RequestError
from tests.fakes.gui_server import ROOT
from tests.gui.conftest import tree

BATCH = "0123456789abcdef"
PICTURE = b"not decoded here"


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Workplace]:
    """A runs folder; nothing beside it may change."""
    (tmp_path / "beside.txt").write_text("untouched")
    (tmp_path / "runs").mkdir()
    yield Workplace(runs=tmp_path / "runs")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["beside.txt", "runs"]
    assert (tmp_path / "beside.txt").read_text() == "untouched"


def uploaded(work: Workplace, name: str, files: dict[str, bytes]) -> tuple[dict[str, bytes], str]:
    """Send files; return the dataset that they become and what is said of it."""
    folder = work.own / "incoming" / BATCH
    folder.mkdir(parents=True, exist_ok=True)
    for number, content in enumerate(files.values()):
        (folder / str(number)).write_bytes(content)
    asked = uploads.Files(name=name, files=list(files))
    answer = uploads.receive(work, BATCH, asked)
    assert uploads.receive(work, BATCH, asked) == answer, "asked again: the answer was lost"
    assert [path.name for path in folder.iterdir()] == ["answer.json"]
    shutil.rmtree(folder)
    return tree(Path(answer["received"])), answer["said"]


def sent(name: str, content: bytes, batch: str, work: Workplace) -> dict[str, Any]:
    """Send one file under its own number of a batch; return the answer."""
    (work.own / "incoming" / batch).mkdir(parents=True)
    (work.own / "incoming" / batch / "0").write_bytes(content)
    return uploads.receive(work, batch, uploads.Files(name="cats", files=[name]))


def test_uploads_of_one_name_at_once_are_folders_of_their_own(
    work: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    together = threading.Barrier(6)

    def numbered(name: str) -> Iterator[str]:
        together.wait(timeout=60)  # all see the name as free
        yield from upload_names.numbered(name)

    monkeypatch.setattr(uploads, "numbered", numbered)
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr("a.png", b"zip")

    def send(number: int) -> dict[str, bytes]:
        batch = f"{number:016x}"
        if number < 3:
            answer = sent("cats.zip", packed.getvalue(), batch, work)
        else:
            answer = sent("a.png", b"%d" % number, batch, work)
        return tree(Path(answer["received"]))

    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(send, range(6)))
    assert found == [{"a.png": b"zip"}] * 3 + [{"a.png": b"%d" % number} for number in (3, 4, 5)]
    names = sorted(path.name for path in (work.own / "uploads").iterdir())
    assert names == ["cats", *(f"cats-{number}" for number in range(2, 7))]


def test_a_file_that_is_sent_again_while_the_first_is_read_is_whole(work: Workplace) -> None:
    pytest.importorskip("starlette", reason="starlette comes with gradio (extra `gui`)")
    from starlette.routing import Router

    router = Router(routes=uploads.routes(work))
    folder = work.own / "incoming" / BATCH
    statuses: list[int] = []

    async def put(parts: list[bytes], wait: asyncio.Event, done: asyncio.Event) -> None:
        async def receive() -> Any:
            if len(parts) == 1:
                await wait.wait()
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

        async def send(message: Any) -> None:
            statuses.append(message.get("status", 0))

        path = f"/upload/{BATCH}/0"
        scope = {"type": "http", "method": "PUT", "path": path, "headers": [], "query_string": b""}
        await router(scope, receive, send)
        done.set()

    async def both() -> None:
        at_once, second_done, first_done = asyncio.Event(), asyncio.Event(), asyncio.Event()
        at_once.set()
        first = asyncio.create_task(put([b"first, ", b"whole"], second_done, first_done))
        await asyncio.sleep(0)  # it has written its first part and waits
        await put([b"second, ", b"whole"], at_once, second_done)
        assert (folder / "0").read_bytes() == b"second, whole"
        await first

    asyncio.run(both())
    assert [status for status in statuses if status] == [204, 204]
    assert tree(folder) == {"0": b"first, whole"}


def test_names_are_made_safe_and_their_own_in_a_new_folder(work: Workplace) -> None:
    for name, safe in (
        ("Gr\u00f6\u00dfe \u65e5\u672c 1.PNG", "Gr\u00f6\u00dfe \u65e5\u672c 1.PNG"),
        ("C:\\a\\b.png", "b.png"),
        (".htaccess.png", "htaccess.png"),
        ("a\nb\0c\u202e.png", "a_b_c_.png"),
        ("nul.tar.png", "_nul.tar.png"),
        ("a:b|c?.png ", "a_b_c_.png"),
    ):
        assert uploaded(work, "x", {name: PICTURE})[0] == {safe: PICTURE}
    names = ["set/a.png", "set/a.txt", "../../b.png", "virus.exe", "other/a.png", "other/a.txt"]
    sent = {name: str(number).encode() for number, name in enumerate(names)}
    got, said = uploaded(work, "my ../ cats", sent)
    wanted = {
        "set/a.png": b"0",
        "set/a.txt": b"1",
        "b.png": b"2",
        "other/a.png": b"4",
        "other/a.txt": b"5",
    }
    assert got == wanted, "no picture has the caption of another"
    got, _ = uploaded(work, "x", {"a.png": b"0", "A.PNG": b"1", "a.txt": b"2"})
    assert got == {"a.png": b"0", "A-2.PNG": b"1", "a.txt": b"2"}
    assert said.startswith("Added: 3 image files and 2 captions.")
    assert "virus.exe: is neither a picture nor a caption" in said
    uploaded(work, "my ../ cats", sent)
    assert sorted(path.name for path in (work.own / "uploads").glob("c*")) == ["cats", "cats-2"]
    # The example is a copy that may be changed.
    folder = uploads.example(work)
    assert len([path for path in folder.iterdir() if path.suffix != ".txt"]) == 16
    (folder / "zibbo_01.txt").write_text("mine")
    assert uploads.example(work) == folder
    assert (folder / "zibbo_01.txt").read_text() == "mine"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.text(max_size=200, alphabet=st.characters(exclude_categories=["Cs"])))
def test_any_name_is_one_visible_file_or_nothing(work: Workplace, name: str) -> None:
    for safe in uploaded(work, name, {f"{name}.png": PICTURE})[0]:
        for part in PurePosixPath(safe).parts:
            assert len(part.encode()) <= 255 and part.isprintable()
            assert part not in ("/", "..") and part[0] not in ".- "


def test_files_that_did_not_arrive_make_no_folder(work: Workplace) -> None:
    secret = work.runs / "secret.png"
    secret.write_bytes(b"secret")
    for name, files in (
        *((BATCH, wrong) for wrong in (["x.png"], [], [5], "x.png")),
        *((name, ["x.png"]) for name in ("../../outside", "")),
    ):
        with pytest.raises((InputError, RequestError, ValidationError)):
            asked = uploads.Files.model_validate({"name": "n", "files": files})
            uploads.receive(work, name, asked)
    waiting = work.own / "incoming" / BATCH
    waiting.mkdir(parents=True)
    (waiting / "0").symlink_to(secret)
    with pytest.raises(InputError, match="was not uploaded"):
        uploads.receive(work, BATCH, uploads.Files(name="n", files=["a.png"]))
    (waiting / "1").write_bytes(PICTURE)
    with pytest.raises(InputError, match="a zip came with other files"):
        uploads.receive(work, BATCH, uploads.Files(name="n", files=["a.zip", "a.png"]))
    assert not list((work.own / "uploads").iterdir())
    os.utime(waiting, (time.time() - 1000,) * 2)
    (work.own / "incoming" / "new").mkdir()
    uploads.forget_old(work.own / "incoming", kept_s=500)
    assert [path.name for path in (work.own / "incoming").iterdir()] == ["new"]


def test_pairs_are_pairs_however_they_are_uploaded(work: Workplace) -> None:
    """A dropped folder and a zip keep the folders that say which image is a reference of which."""
    text = (ROOT / "tests" / "data" / "pair_layouts.toml").read_text(encoding="utf-8")
    for layout in tomllib.loads(text)["layouts"]:
        names = (*layout["images"], *layout.get("files", ()))
        files = {name: name.encode() for name in names}
        common = {name.partition("/")[0] for name in names}
        inner = {name.partition("/")[2]: data for name, data in files.items()}
        expected = inner if len(common) == 1 else files
        assert uploaded(work, "", {"set.zip": packed(*files.items())})[0] == expected
        for folder in ("mine", "10_cats"):
            dropped = {f"{folder}/{name}": data for name, data in files.items()}
            assert uploaded(work, folder, dropped)[0] == files
            assert uploaded(work, "", {"set.zip": packed(*dropped.items())})[0] == files


def packed(*entries: tuple[str | zipfile.ZipInfo, bytes]) -> bytes:
    """Return a zip."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in entries:
            archive.writestr(name, data)
    return content.getvalue()


def unpacked(work: Workplace, data: bytes) -> tuple[dict[str, bytes], str]:
    return uploaded(work, "", {"set.zip": data})


def refused(work: Workplace, data: bytes, **limits: Any) -> str:
    """Return why a zip is refused, having seen that nothing was left behind."""
    archive = work.runs / "set.zip"
    archive.write_bytes(data)
    with pytest.raises(InputError) as error:
        archives.unpack(archive, into=work.runs / "data", limits=archives.Limits(**limits))
    archive.unlink()
    assert tree(work.runs) == {} and not (work.runs / "data").exists()
    return str(error.value)


def test_pictures_and_captions_are_unpacked_and_the_rest_is_told(work: Workplace) -> None:
    names = ("a.png", "a.txt", "10_cat/b.JPG", "notes.pdf")
    got, said = unpacked(work, packed(*((name, name.encode()) for name in names)))
    assert got == {name: name.encode() for name in names[:3]}
    assert said.startswith("Added: 2 image files and 1 caption.")
    assert "notes.pdf: is neither a picture nor a caption" in said
    litter = ["my set/", "my set/a.png", "my set/b/c.png", "__MACOSX/._a.png", "my set/.DS_Store"]
    got, said = unpacked(work, packed(*((name, b"x") for name in litter)))
    assert set(got) == {"a.png", "b/c.png"} and "Left out" not in said
    windows = packed(("sub_a.png", PICTURE), ("b.png", PICTURE))
    got, _ = unpacked(work, windows.replace(b"sub_a.png", b"sub\\a.png"))
    assert set(got) == {"sub/a.png", "b.png"}
    alike = ["a.png", "A.png", "sub/a?.png", "sub/a*.png"]
    got, _ = unpacked(work, packed(*((name, name.encode()) for name in alike)))
    assert set(got) == {"a.png", "A-2.png", "sub/a_.png", "sub/a_-2.png"}


def test_a_name_that_leads_out_refuses_the_archive(work: Workplace) -> None:
    for name in (
        *("../x.png", "a/../../x.png", "..\\x.png", "/etc/x.png", "//host/s/x.png"),
        *("C:\\x.png", "C:x.png", "\\x.png", "..", "/", "a/..", "a//x.png", "file:///x.png"),
        *("....//../x.png", "b\0.png"),
    ):
        stand_in = "q" * len(name)
        data = packed(("a.png", PICTURE), (stand_in, PICTURE))
        assert "leads out of it" in refused(work, data.replace(stand_in.encode(), name.encode()))
    for kind in (stat.S_IFLNK, stat.S_IFIFO, stat.S_IFBLK):
        link = zipfile.ZipInfo("link.png")
        link.create_system, link.external_attr = 3, (kind | 0o777) << 16
        linked = packed(("a.png", PICTURE), (link, b"/etc/passwd"))
        assert "a link or a device" in refused(work, linked)


def test_a_bomb_is_refused_before_it_is_unpacked_and_a_full_disk_leaves_nothing(
    work: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    bomb = packed(("a.png", bytes(20 * 2**20)))
    assert len(bomb) * 900 < 20 * 2**20
    assert "as a bomb does" in refused(work, bomb)
    # Many files, none of them larger than 1 MiB; the name is what its owner calls it.
    scattered = packed(*((f"{n}.png", bytes(2**20 - 1)) for n in range(17)))
    assert "set.zip unpacks to more than 200 times its size, as a bomb does" in refused(
        work, scattered
    )
    huge = packed(("a.png", os.urandom(2**21)))
    assert "holds a file of" in refused(work, huge, file_bytes=2**20)
    many = packed(*((f"{n}.png", os.urandom(1000)) for n in range(5)))
    assert "unpacks to 5,000 bytes" in refused(work, many, total_bytes=4000)
    small = packed(("a.png", bytes(100_000)))
    size = struct.pack("<I", 100_000)
    understated = refused(work, small.replace(size, struct.pack("<I", 10)))
    assert "is not a zip that can be unpacked" in understated
    data = packed(("a.png", PICTURE))
    entry, end = data.index(b"PK\1\2"), data.index(b"PK\5\6")
    listed = data[entry:end] * 100_000  # written one by one it would take most of the test's time
    ending = data[end : end + 12] + struct.pack("<II", len(listed), entry) + data[end + 20 :]
    crowded = refused(work, data[:entry] + listed + ending)
    assert "holds 100,000 files, 20,000 are allowed" in crowded
    monkeypatch.setattr(archives, "_DIRECTORY_MAX_BYTES", 2**12)
    endless = packed(*((f"{'n' * 200}{number}.png", b"") for number in range(50)))
    assert "its list of files is too long" in refused(work, endless)

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(archives, "_chunks", full)
        with pytest.raises(MachineError, match="No space left"):
            unpacked(work, packed(("a.png", PICTURE)))
    monkeypatch.setattr(archives, "_FREE_AFTERWARDS_BYTES", 2**62)
    with pytest.raises(MachineError, match="do not fit"):
        unpacked(work, packed(("a.png", PICTURE)))
    assert tree(work.own / "uploads") == {}
    with pytest.raises(InputError, match=r"^set\.zip unpacks to more than 200 times"):
        unpacked(work, scattered)


def test_what_is_no_plain_zip_of_pictures_is_refused(work: Workplace) -> None:
    data = packed(("a.png", PICTURE))
    at = data.index(b"PK\1\2")
    locked, unusual = bytearray(data), bytearray(data)
    locked[at + 8] |= 1
    unusual[at + 10] = 97
    assert "is encrypted" in refused(work, bytes(locked))
    assert "an unusual method" in refused(work, bytes(unusual))
    checksum = struct.pack("<I", zlib.crc32(PICTURE))
    assert "Bad CRC" in refused(work, data.replace(checksum, b"\1\2\3\4"))
    for empty in (packed(("a.txt", b"x")), packed()):
        assert "holds no pictures" in refused(work, empty)
    for none in (b"", b"PK", b"Rar!" + bytes(100), b"PK\5\6" + bytes(18)[:-4]):
        refused(work, none)
    whole = packed(("a.png", os.urandom(300)), ("b.txt", b"caption " * 50))
    for at in range(0, len(whole), 23):
        for damaged in (whole[:at], whole[:at] + b"\xff" + whole[at + 1 :]):
            before = tree(work.own / "uploads")
            try:
                unpacked(work, damaged)
            except LoraTrainError as error:
                assert "\n" not in str(error)  # noqa: PT017 - either outcome is right
                assert tree(work.own / "uploads") == before


def names(answer: dict[str, Any]) -> list[str]:
    return [row["name"] for row in answer["rows"]]


def test_folders_and_models_are_listed_from_where_the_last_choice_was(tmp_path: Path) -> None:
    models = tmp_path / "data" / "models"
    (models / "whole").mkdir(parents=True)
    (models / "whole" / "model_index.json").write_text("{}", encoding="utf-8")
    for name, size in (("Pony.safetensors", 2048), ("flux.gguf", 1), ("old.ckpt", 1), ("a.png", 1)):
        (models / name).write_bytes(b"x" * size)
    for folder in (models / ".hidden", tmp_path / "secret"):
        folder.mkdir()
    (models / "out").symlink_to(tmp_path / "secret")
    (models / "nowhere").symlink_to(tmp_path / "gone")
    work = Workplace(runs=models.parent / "runs")
    answer = browse.listing(work, "base", str(models))
    assert names(answer) == ["out", "whole", "flux.gguf", "Pony.safetensors"]
    assert [row["said"] for row in answer["rows"] if row["file"]] == ["1 B", "2.0 KiB"]
    assert (answer["can"], answer["above"]) == (False, str(models.parent))
    assert browse.listing(work, "base", str(models / "whole"))["can"], "a whole model"
    typed = browse.listing(work, "base", str(models / "flux.gguf"))
    assert (typed["folder"], typed["chosen"]) == (str(models), str(models / "flux.gguf"))
    assert browse.listing(work, "base", str(models))["chosen"] == ""
    answer = browse.listing(work, "dataset", str(models))
    assert (names(answer), answer["said"]) == (["out", "whole"], "1 image here") and answer["can"]
    browse.remember(work, "base", str(models / "Pony.safetensors"))
    browse.remember(work, "dataset", str(models))
    assert browse.listing(work, "base", "")["folder"] == str(models)
    assert browse.listing(work, "dataset", "")["folder"] == str(models.parent)
    (work.own / "browsed.json").write_text("{", encoding="utf-8")
    assert browse.listing(work, "base", "")["folder"] == str(Path.home())
    with pytest.raises(InputError, match="cannot be opened"):
        browse.listing(work, "dataset", str(models / "gone"))
    # A server for others lists nothing outside of its folders.
    work = Workplace(runs=models.parent / "runs", roots=(models,))
    answer = browse.listing(work, "base", "")
    assert (answer["folder"], answer["above"]) == (str(models), "")
    assert "out" not in names(answer)
    for path in (models.parent, models / "out", models / "..", Path("/")):
        for ask in (browse.listing, browse.remember):
            with pytest.raises(InputError, match="outside of the folders"):
                ask(work, "base", str(path))
