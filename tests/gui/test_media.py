"""Files of runs and of tries, and small copies of pictures: what is served, what is not, what is kept."""

from __future__ import annotations

import io
import os
import shutil
import zipfile
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlencode

import pytest

from tests.fakes.run_folder import fake_run
from tests.gui.conftest import answered, tree

pytest.importorskip("starlette", reason="starlette comes with gradio (extra `gui`)")

from lora_trainer.gui import media  # noqa: E402 - needs starlette
from lora_trainer.gui.workplace import Workplace  # noqa: E402 - as above
from PIL import Image  # noqa: E402 - as above

NAME = "blue owl #1"
NOT_SERVED = """states/step-00000003/x.png control/stop.png .hidden.png script.js page.html vector.svg
samples/report.html export/x.html export/deep/x.safetensors"""


@pytest.fixture
def work(tmp_path: Path) -> Workplace:
    """A run with all kinds of files, a dataset, a try, and a secret beside them."""
    run = fake_run(tmp_path / "runs" / NAME, steps=3).write()
    work = Workplace(runs=tmp_path / "runs")
    (run / "report.html").write_text("<p>report</p>")
    for name in (*NOT_SERVED.split(), "export/x.safetensors", "export/x.json"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_bytes(b"x")
    (tmp_path / "secret.png").write_bytes(b"secret")
    (run / "out.png").symlink_to(tmp_path / "secret.png")
    (run / "state.png").symlink_to(run / "states" / "step-00000003" / "x.png")
    os.mkfifo(run / "pipe.png")
    tried = work.own / "tries" / "1"
    tried.mkdir(parents=True)
    (work.own / "secret.png").write_bytes(b"secret")
    for name in ("a b.png", "log.txt"):
        (tried / name).write_bytes(b"x")
    (tried / "out.png").symlink_to(work.own / "secret.png")
    images = tmp_path / "images"
    images.mkdir()
    for number in range(2):
        Image.new("RGB", (400, 300), (number, 0, 0)).save(images / f"{number}.png")
    Image.new("1", (16_000, 16_000)).save(images / "bomb.png")
    (images / "broken.png").write_bytes(b"<html>")
    (images / "notes.txt").write_bytes(b"x")
    (images / "link.png").symlink_to(images / "1.png")
    return work


def get(work: Workplace, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Ask the routes for a quoted address; return status, headers and body."""
    from starlette.applications import Starlette

    plain, _, query = path.partition("?")
    return answered(Starlette(routes=media.routes(work)), unquote(plain), query=query, **headers)


def test_files_of_a_run_and_of_a_try_are_served_as_what_they_are_and_nothing_else_is(
    work: Workplace,
) -> None:
    octets, plain = "application/octet-stream", "text/plain; charset=utf-8"
    for url, kind, is_saved in (
        (media.run_url(NAME, "samples", "step-00000003", "00.png"), "image/png", False),
        (media.run_url(NAME, "report.html"), "text/html; charset=utf-8", False),
        (media.run_url(NAME, "zorble.safetensors"), octets, True),
        (media.run_url(NAME, "export", "x.safetensors"), octets, True),
        (media.run_url(NAME, "export", "x.json"), octets, True),
        (media.run_url(NAME, "run.json"), plain, False),
        (media.run_url(NAME, "events.jsonl"), plain, False),
        (media.try_url("1", "a b.png"), "image/png", False),
    ):
        status, headers, _ = get(work, url)
        assert (status, headers["content-type"]) == (200, kind), url
        assert ("attachment" in headers.get("content-disposition", "")) is is_saved
        policy = headers["content-security-policy"]
        assert "sandbox" in policy and "script" not in policy
    report = media.run_url(NAME, "report.html")
    _, headers, body = get(work, report)
    assert body == b"<p>report</p>" and headers["x-frame-options"] == "SAMEORIGIN"
    assert headers["cache-control"] == "private, no-cache"
    assert get(work, report, if_none_match=headers["etag"])[0] == 304
    (work.runs / NAME / "report.html").write_text("<main><p>new report</p>")
    status, _, body = get(work, report, if_none_match=headers["etag"])
    back = f'<main><nav><a href="/run?run={quote(NAME, safe="")}">'
    assert status == 200 and body.decode().startswith(back), "the way back is not in the file"
    run = f"/media/run/{quote(NAME)}"
    more = ("out.png", "state.png", "pipe.png", "", "samples", "samples/", "none.png", "..")
    for file in (*NOT_SERVED.split(), *more, "../../secret.png", "/etc/passwd", "a%00.png"):
        assert get(work, f"{run}/{file}")[0] == 404, file
    for try_ in ("../key", "../secret.png", "1/log.txt", "1/out.png", "1/", "./x.png", "1/%00.png"):
        assert get(work, f"/media/own/tries/{try_}")[0] == 404, try_


def thumb(work: Workplace, folder: Path, file: str, size: str = "96", **headers: str) -> Any:
    asked = urlencode({"folder": folder, "file": file, "size": size})
    return get(work, f"/media/thumb?{asked}", **headers)


def test_all_samples_of_a_run_are_one_zip_of_its_name_and_leave_no_file(work: Workplace) -> None:
    run = work.runs / NAME
    samples = run / "samples"
    made = {name: data for name, data in tree(samples).items() if name.endswith(".png")}
    before = sorted(work.runs.rglob("*"))
    status, headers, body = get(work, media.samples_url(NAME))
    assert status == 200
    assert headers["content-disposition"].endswith("blue%20owl%20%231.zip")
    with zipfile.ZipFile(io.BytesIO(body)) as archive:
        assert archive.testzip() is None
        assert {name: archive.read(name) for name in archive.namelist()} == made != {}
    assert sorted(work.runs.rglob("*")) == before
    shutil.rmtree(samples)
    for name in (NAME, "nobody"):
        assert get(work, media.samples_url(name))[0] == 404


def test_a_small_copy_is_made_once_and_a_few_are_kept(
    work: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = tmp_path / "images"
    assert media.thumb_url(images, "0.png").endswith("size=384")
    status, headers, body = thumb(work, images, "0.png")
    assert (status, headers["content-type"]) == (200, "image/jpeg")
    (kept,) = (work.own / "thumbs").glob("*/*.jpg")
    assert kept.read_bytes() == body
    with Image.open(kept) as image:
        assert image.size == (96, 72)
    kept.write_bytes(b"as it was")
    assert thumb(work, images, "0.png")[2] == b"as it was"
    Image.new("RGB", (40, 300)).save(images / "0.png")
    assert thumb(work, images, "0.png")[1]["etag"] != headers["etag"]
    for size in ("", "97", "96.0", "99999999", "\uff10"):
        status, _, said = thumb(work, images, "0.png", size)
        assert status == 404 and b"96, 192" in said
    for file, why in (("broken.png", b"looks like HTML"), ("bomb.png", b"too large")):
        status, headers, said = thumb(work, images, file)
        assert status == 404 and headers["content-type"].startswith("text/plain")
        assert file.encode() in said and why in said
        in_a_page = thumb(work, images, file, sec_fetch_dest="image")
        assert (in_a_page[0], in_a_page[2]) == (204, b""), "no error in the console at each visit"
    monkeypatch.setattr("lora_trainer.gui.thumbs._PRUNE_EVERY", 1)
    monkeypatch.setattr("lora_trainer.gui.thumbs.LIMIT_BYTES", 1)
    assert thumb(work, images, "1.png")[0] == 200
    assert len(list((work.own / "thumbs").glob("*/*.jpg"))) == 1
    # A picture may lie where folders may be named.
    for file in ("../secret.png", "notes.txt", "", ".", "a/../0.png", "none.png"):
        assert thumb(work, images, file)[0] == 404, file
    assert [thumb(work, images, file)[0] for file in ("0.png", "link.png")] == [200, 200]
    (images / "link.png").unlink()
    (images / "link.png").symlink_to(tmp_path / "secret.png")
    bounded = Workplace(runs=work.runs, roots=(images,))
    assert thumb(bounded, images, "0.png")[0] == 200
    assert b"does not exist" in thumb(bounded, images, "link.png")[2]
    assert thumb(bounded, tmp_path, "secret.png")[0] == 404
