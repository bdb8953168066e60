"""Notices of trainings that have ended: what is sent, by which way, and what is kept where."""

from __future__ import annotations

import json
import socketserver
import stat
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.common.errors import RequestError
from lora_trainer.queue import notices, worker
from lora_trainer.queue.notices import Notice, Notices, keep_notices, read_notices, send
from tests.fakes.queues import Place

ENDED = Notice(title="Katzen \u2713", message="Fertig.", item="0001-a", state="finished", run="a")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration folder of its own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("APPDATA", str(tmp_path / "config"))
    return tmp_path / "config" / "lora-train"


@pytest.fixture
def web() -> Iterator[tuple[str, list[tuple[str, dict[str, Any]]]]]:
    """A web server: its address, and the path and JSON of what it gets; /no answers 500."""
    got = list[tuple[str, dict[str, Any]]]()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            got.append((self.path, json.loads(body)))
            self.send_response(500 if self.path == "/no" else 200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", got
        server.shutdown()


@pytest.fixture
def mail() -> Iterator[tuple[int, list[str]]]:
    """A mail server without TLS: its port, and the lines that it gets."""
    got = list[str]()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.wfile.write(b"220 here\r\n")
            in_data = False
            for raw in self.rfile:
                line = raw.decode().rstrip("\r\n")
                got.append(line)
                if in_data:
                    in_data = line != "."
                    answer = b"" if in_data else b"250 kept\r\n"
                elif line.upper() == "DATA":
                    in_data, answer = True, b"354 go on\r\n"
                elif line.upper() == "QUIT":
                    self.wfile.write(b"221 bye\r\n")
                    return
                else:
                    answer = b"250 fine\r\n"
                self.wfile.write(answer)

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1], got
        server.shutdown()


def test_each_way_gets_the_notice_and_one_that_fails_is_said(
    web: tuple[str, list[tuple[str, dict[str, Any]]]], mail: tuple[int, list[str]]
) -> None:
    address, got = web
    port, lines = mail
    ways = Notices(
        ntfy=f"{address}/my-topic",
        webhook=f"{address}/no",
        email_to="me@example.org",
        smtp_server="127.0.0.1",
        smtp_port=port,
    )
    (failed,) = send(ways, ENDED)
    assert failed.startswith("no notice by the webhook") and "500" in failed
    told = {"title": ENDED.title, "message": "Fertig."}
    assert got == [
        ("/", {"topic": "my-topic", **told}),
        ("/no", {**told, "item": "0001-a", "state": "finished", "run": "a"}),
    ]
    assert "To: me@example.org" in lines and "Fertig." in lines
    assert send(Notices(), ENDED) == []


def test_what_is_kept_is_readable_by_its_owner_alone_and_wrong_addresses_are_refused(
    folder: Path,
) -> None:
    assert read_notices() == Notices() and not read_notices().is_any
    values = {"email_to": "me@example.org", "smtp_server": "s", "smtp_password": "secret"}
    assert keep_notices(values) == read_notices() == Notices(**values)
    if sys.platform != "win32":
        assert stat.S_IMODE((folder / "notices.json").stat().st_mode) == 0o600
    for wrong, why in (
        ({"ntfy": "ntfy.sh/x"}, "begins with https"),
        ({"ntfy": "https://ntfy.sh/"}, "names no topic"),
        ({"webhook": "file:///etc/passwd"}, "begins with https"),
        ({"email_to": "me@example.org"}, "a server to send with"),
        ({"smtp_port": 0}, "cannot be kept"),
    ):
        with pytest.raises(RequestError, match=why):
            keep_notices(wrong)
    assert read_notices().smtp_password == "secret"
    (folder / "notices.json").write_text("{")
    assert read_notices() == Notices()


def test_the_worker_tells_what_ended_by_itself_and_not_what_somebody_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, web: tuple[str, list[tuple[str, Any]]]
) -> None:
    address, got = web
    place = Place(folder=tmp_path)
    item = place.add("cats")
    said = list[str]()

    def tell(state: Any, error: str = "") -> None:
        ended = place.become(item, state=state, started_s=10.0, ended_s=100.0, error=error)
        worker.tell_by_notice(ended, say=said.append)
        for thread in threading.enumerate():
            if thread.name == "lora-train-notice":
                thread.join()

    tell("finished")
    assert got == [], "where nothing is set nothing is sent"
    keep_notices({"webhook": f"{address}/hook"})
    tell("finished")
    tell("failed", error="no images. Fix: add some.")
    tell("stopped")
    assert [sent["title"] for _, sent in got] == ["cats finished", "cats failed"]
    assert got[0][1]["message"] == "The training cats has finished after 1 min 30 s"
    assert got[1][1]["message"].endswith(": no images. Fix: add some.")
    keep_notices({"webhook": f"{address}/no"})
    tell("interrupted")
    (line,) = said
    assert line.startswith(f"{item.id} no notice by the webhook")
    assert notices.config_folder().is_dir()
