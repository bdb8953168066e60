"""Files of runs and small copies of pictures: what is served, what is not, and what is kept."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest

from lora_trainer.common.errors import InputError, LoraTrainError, RequestError
from lora_trainer.dataset.images import ImageDecodeError
from tests.fakes.run_folder import fake_run

pytest.importorskip("starlette", reason="starlette comes with gradio (extra `gui`)")

from lora_trainer.gui import media  # noqa: E402 - needs starlette
from lora_trainer.gui.thumbs import Thumbnails  # noqa: E402 - Pillow beside it
from lora_trainer.gui.workplace import Workplace  # noqa: E402 - as above
from PIL import Image  # noqa: E402 - as above

NAME = "blue owl #1"


@pytest.fixture
def work(tmp_path: Path) -> Workplace:
    """A run with all kinds of files, a dataset, and a secret beside both."""
    run = fake_run(tmp_path / "runs" / NAME, steps=3).write()
    (run / "report.html").write_text("<p>report</p>")
    (run / "states" / "step-00000003").mkdir(parents=True)
    (run / "states" / "step-00000003" / "x.png").write_bytes(b"x")
    (run / "control").mkdir()
    (run / "control" / "stop.txt").write_bytes(b"x")
    (run / ".hidden.png").write_bytes(b"x")
    (run / "script.js").write_bytes(b"x")
    (run / "page.html").write_bytes(b"x")
    (run / "vector.svg").write_bytes(b"x")
    (tmp_path / "secret.png").write_bytes(b"secret")
    (run / "out.png").symlink_to(tmp_path / "secret.png")
    (run / "state.png").symlink_to(run / "states" / "step-00000003" / "x.png")
    images = tmp_path / "images"
    images.mkdir()
    for number in range(2):
        Image.new("RGB", (400, 300), (number, 0, 0)).save(images / f"{number}.png")
    (images / "broken.png").write_bytes(b"<html>")
    (images / "notes.txt").write_bytes(b"x")
    os.mkfifo(run / "pipe.png")
    return Workplace(runs=tmp_path / "runs")


@pytest.mark.parametrize(
    ("file", "kind", "download"),
    [
        ("samples/step-00000003/00.png", "image/png", False),
        ("report.html", "text/html", False),
        ("zorble.safetensors", "application/octet-stream", True),
        ("run.json", "text/plain", False),
        ("events.jsonl", "text/plain", False),
    ],
)
def test_files_of_a_run_are_served_as_what_they_are(
    work: Workplace, file: str, kind: str, download: bool
) -> None:
    served = media.served_file(work, NAME, file)
    assert (served.kind, served.download) == (kind, download)
    assert served.path == work.runs / NAME / file
    assert "sandbox" in served.policy
    assert "script" not in served.policy


@pytest.mark.parametrize(
    "file",
    ["states/step-00000003/x.png", "control/stop.txt", ".hidden.png", "script.js", "page.html"]
    + ["vector.svg", "out.png", "state.png", "pipe.png", "", "samples", "samples/", "none.png"]
    + ["samples/report.html", "../../secret.png", "..", ".", "/etc/passwd", "a\0.png"],
)
def test_nothing_else_of_a_run_is(work: Workplace, file: str) -> None:
    with pytest.raises(RequestError):
        media.served_file(work, NAME, file)


def test_addresses_lead_back_to_the_file(work: Workplace) -> None:
    url = media.run_url(NAME, "samples", "a?b.png")
    assert unquote(urlsplit(url).path) == f"/media/run/{NAME}/samples/a?b.png"
    assert "size=384" in media.thumb_url(Path("/a b"), "c&d.png")


def test_a_picture_may_lie_where_folders_may_be_named(work: Workplace, tmp_path: Path) -> None:
    images = tmp_path / "images"
    assert media.dataset_file(work, str(images), "0.png") == images / "0.png"
    (images / "link.png").symlink_to(tmp_path / "secret.png")
    assert media.dataset_file(work, str(images), "link.png").name == "secret.png"
    bounded = Workplace(runs=work.runs, roots=(images,))
    assert media.dataset_file(bounded, str(images), "0.png")
    with pytest.raises(LoraTrainError):
        media.dataset_file(bounded, str(images), "link.png")
    with pytest.raises(InputError):
        media.dataset_file(bounded, str(tmp_path), "secret.png")


@pytest.mark.parametrize("file", ["../secret.png", "notes.txt", "", ".", "a/../0.png", "none.png"])
def test_nothing_but_pictures_is_shown_of_a_dataset(
    work: Workplace, tmp_path: Path, file: str
) -> None:
    with pytest.raises(LoraTrainError):
        media.dataset_file(work, str(tmp_path / "images"), file)


# ---- over HTTP


def get(work: Workplace, path: str, query: str = "", **headers: str) -> tuple[int, Any, bytes]:
    """Ask the routes for something; return status, headers and body."""
    from starlette.applications import Starlette

    sent: list[Any] = []

    async def receive() -> Any:  # the browser stays, and sends nothing more
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "GET",
        "path": path,
        "query_string": query.encode(),
        "headers": [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()],
        "extensions": {},
    }
    asyncio.run(Starlette(routes=media.routes(work))(scope, receive, send))
    answered = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], answered, b"".join(part.get("body", b"") for part in sent[1:])


def thumb(work: Workplace, folder: Path, file: str, size: str = "96") -> tuple[int, Any, bytes]:
    return get(
        work,
        "/media/thumb",
        media.thumb_url(folder, file).partition("?")[2].replace("size=384", f"size={size}"),
    )


def test_a_browser_that_has_a_file_gets_no_copy(work: Workplace) -> None:
    path = f"/media/run/{NAME}/report.html"
    status, headers, body = get(work, path)
    assert (status, body) == (200, b"<p>report</p>")
    assert headers["cache-control"] == "private, no-cache"
    assert "sandbox" in headers["content-security-policy"]
    assert headers["x-frame-options"] == "SAMEORIGIN"
    assert get(work, path, if_none_match=headers["etag"])[0] == 304
    (work.runs / NAME / "report.html").write_text("<p>new report</p>")
    assert get(work, path, if_none_match=headers["etag"])[0] == 200


def test_all_samples_of_a_run_are_one_zip_of_its_name_and_leave_no_file(work: Workplace) -> None:
    run = work.runs / NAME
    made = {
        path.relative_to(run / "samples").as_posix(): path.read_bytes()
        for path in run.glob("samples/*/*.png")
    }
    before = sorted(work.runs.rglob("*"))
    status, headers, body = get(work, unquote(media.samples_url(NAME)))
    assert status == 200
    assert headers["content-disposition"].endswith("blue%20owl%20%231.zip")
    with zipfile.ZipFile(io.BytesIO(body)) as archive:
        assert archive.testzip() is None
        assert {name: archive.read(name) for name in archive.namelist()} == made != {}
    assert sorted(work.runs.rglob("*")) == before
    assert get(work, "/media/samples/nobody.zip")[0] == 404
    shutil.rmtree(run / "samples")
    assert get(work, unquote(media.samples_url(NAME)))[0] == 404


def test_a_lora_is_saved_and_not_shown(work: Workplace) -> None:
    _, headers, _ = get(work, f"/media/run/{NAME}/zorble.safetensors")
    assert headers["content-disposition"] == 'attachment; filename="zorble.safetensors"'


def test_a_small_copy_is_made_once(work: Workplace, tmp_path: Path) -> None:
    status, headers, body = thumb(work, tmp_path / "images", "0.png")
    assert (status, headers["content-type"]) == (200, "image/jpeg")
    (kept,) = (work.own / "thumbs").glob("*/*.jpg")
    assert kept.read_bytes() == body
    with Image.open(kept) as image:
        assert image.size == (96, 72)
    kept.write_bytes(b"as it was")
    assert thumb(work, tmp_path / "images", "0.png")[2] == b"as it was"
    Image.new("RGB", (40, 300)).save(tmp_path / "images" / "0.png")
    assert thumb(work, tmp_path / "images", "0.png")[1]["etag"] != headers["etag"]


@pytest.mark.parametrize("size", ["", "97", "96.0", "-96", "99999999", "０"])
def test_only_a_few_sizes_are_made(work: Workplace, tmp_path: Path, size: str) -> None:
    status, _, body = thumb(work, tmp_path / "images", "0.png", size)
    assert status == 404
    assert b"96, 192" in body


def test_a_picture_that_cannot_be_read_says_why(work: Workplace, tmp_path: Path) -> None:
    status, headers, body = thumb(work, tmp_path / "images", "broken.png")
    assert status == 404
    assert headers["content-type"].startswith("text/plain")
    assert b"broken.png" in body
    assert b"looks like HTML" in body


def test_a_picture_that_claims_too_much_is_not_decoded(tmp_path: Path) -> None:
    bomb = tmp_path / "bomb.png"
    Image.new("1", (16_000, 16_000)).save(bomb)
    with pytest.raises(ImageDecodeError, match="too large"):
        Thumbnails.under(tmp_path).of(bomb, 96)
    assert not (tmp_path / "thumbs").exists()


def test_kept_copies_have_a_limit(work: Workplace, tmp_path: Path) -> None:
    thumbs = Thumbnails.under(work.own, limit_bytes=1)
    thumbs = Thumbnails(kept=thumbs.kept, made=iter([1, 200]))
    first = thumbs.of(tmp_path / "images" / "0.png", 96)
    second = thumbs.of(tmp_path / "images" / "1.png", 96)
    assert not first.exists()
    assert second.exists()
