"""Pictures of tries and exports of a run are served, and nothing else of the interface's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_trainer.common.errors import RequestError
from tests.fakes.lora_library import finished_run, lora, picture

pytest.importorskip("starlette", reason="starlette comes with gradio (extra `gui`)")

from lora_trainer.gui import media  # noqa: E402 - needs starlette
from lora_trainer.gui.workplace import Workplace  # noqa: E402 - as above


@pytest.fixture
def work(tmp_path: Path) -> Workplace:
    work = Workplace(runs=tmp_path / "runs")
    run = finished_run(work.runs / "a", saves=())
    for folder in (run / "export", run / "export" / "deep", work.own / "tries" / "1"):
        folder.mkdir(parents=True)
    for name in ("export/x.safetensors", "export/deep/x.safetensors"):
        lora(run / name)
    (run / "export" / "x.json").write_text("{}")
    (run / "export" / "x.html").write_text("<p>")
    picture(work.own / "tries" / "1" / "x.png")
    (work.own / "tries" / "1" / "log.txt").write_text("x")
    (work.own / "key").write_text("secret")
    picture(work.own / "secret.png")
    (work.own / "tries" / "1" / "out.png").symlink_to(work.own / "secret.png")
    return work


def test_a_picture_of_a_try_is_served(work: Workplace) -> None:
    served = media.try_file(work, "1", "x.png")
    assert (served.path.name, served.kind, served.download) == ("x.png", "image/png", False)
    assert media.try_url("1", "a b/?.png") == "/media/own/tries/1/a%20b%2F%3F.png"


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("..", "key"), ("..", "secret.png"), ("1", "log.txt"), ("1", "out.png"), ("1", "../../secret.png"),
        ("", "x.png"), ("1", ""), (".", "x.png"), ("1", "absent.png"), ("1/..", "1/x.png"), ("1", "\0.png"),
        ("1\\..", "x.png"), ("/", "x.png"),
    ],
)  # fmt: skip
def test_nothing_else_of_the_interface_is(work: Workplace, folder: str, name: str) -> None:
    with pytest.raises(RequestError):
        media.try_file(work, folder, name)


def test_an_export_is_downloaded(work: Workplace) -> None:
    for name in ("x.safetensors", "x.json"):
        assert media.served_file(work, "a", f"export/{name}").download
    for name in ("x.html", "deep/x.safetensors", "../../.gui/key"):
        with pytest.raises(RequestError):
            media.served_file(work, "a", f"export/{name}")
