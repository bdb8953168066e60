"""Images from pasted addresses: public ones alone, and the connection goes to what was checked."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from lora_trainer.gui import uploads, web_images

from lora_trainer.common.errors import RequestError

PUBLIC = "93.184.215.14"


def answering(*answers: bytes) -> tuple[Any, list[Any]]:
    """Return a `connect` whose connections give these answers, and the list of what was asked of whom."""
    left = list(answers)
    asked: list[Any] = []

    def connect(place: tuple[str, int], timeout: float) -> socket.socket:
        ours, theirs = socket.socketpair()

        def serve() -> None:
            with theirs:
                asked.append((place, theirs.recv(4096)))
                theirs.sendall(left.pop(0))

        threading.Thread(target=serve, daemon=True).start()
        return ours

    return connect, asked


def response(body: bytes, kind: str = "image/png", status: str = "200 OK", more: str = "") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n{more}\r\n"
    return head.encode() + body


def test_an_image_comes_by_its_address_after_a_redirection_to_another_public_host() -> None:
    moved = response(b"", status="302 Found", more="Location: /cats/A%20cat.png?x=1\r\n")
    connect, asked = answering(moved, response(b"png bytes"))
    image = web_images.fetch(
        "http://pictures.example/old", resolve=lambda *_: [PUBLIC], connect=connect
    )
    assert (image.name, image.data) == ("A cat.png", b"png bytes")
    assert [place for place, _ in asked] == [(PUBLIC, 80)] * 2
    assert b"GET /cats/A%20cat.png?x=1 HTTP/1.1\r\nHost: pictures.example\r\n" in asked[1][1]
    assert b"ookie" not in asked[1][1]


@pytest.mark.parametrize(
    "number",
    [
        "127.0.0.1", "10.0.0.8", "192.168.1.1", "172.16.0.1", "169.254.169.254", "0.0.0.0", "100.64.0.1", "224.0.0.1",
        "::1", "fe80::1%eth0", "fd00::1", "::ffff:127.0.0.1", "2002:7f00:1::",
    ],
)  # fmt: skip
def test_nothing_is_fetched_from_the_machine_s_own_network(number: str) -> None:
    def refuse(*_: object, **__: object) -> Any:
        raise AssertionError("nothing may be connected to")

    for addresses in ([number], [PUBLIC, number]):
        with pytest.raises(RequestError, match="own network"):
            web_images.fetch(
                "http://x.example/a.png", resolve=lambda *_, a=addresses: a, connect=refuse
            )
    moved = response(b"", status="307 Away", more="Location: http://inner.example/\r\n")
    connect, asked = answering(moved)

    def resolve(host: str, _: int) -> list[str]:
        return [number] if host == "inner.example" else [PUBLIC]

    with pytest.raises(RequestError, match="own network"):
        web_images.fetch("http://x.example/a.png", resolve=resolve, connect=connect)
    assert len(asked) == 1


@pytest.mark.parametrize(
    "address",
    [
        "file:///etc/passwd", "ftp://x/a.png", "http://", "//x/a", "http://u:p@x/", "gopher://x", "http://x:99999/",
        "a b", "http://x/\n",
    ],
)  # fmt: skip
def test_what_is_no_address_of_the_web_is_refused(address: str) -> None:
    with pytest.raises(RequestError, match="not an address"):
        web_images.fetch(address, resolve=lambda *_: [PUBLIC], connect=lambda *_, **__: None)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (response(b"<html>", "text/html"), "not an image"),
        (response(b"<svg/>", "image/svg+xml"), "not an image"),
        (response(b"", status="404 Gone"), "404"),
        (b"nonsense\r\n\r\n", "cannot be reached"),
    ],
)
def test_what_is_no_image_is_told(answer: bytes, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        web_images.fetch(
            "http://x/a.png", resolve=lambda *_: [PUBLIC], connect=answering(answer)[0]
        )


def test_a_circle_ends_and_a_large_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = response(b"", status="301 On", more="Location: /again\r\n")
    with pytest.raises(RequestError, match="on and on"):
        web_images.fetch(
            "http://x/", resolve=lambda *_: [PUBLIC], connect=answering(*[moved] * 5)[0]
        )
    monkeypatch.setattr(web_images, "MAX_BYTES", 3)
    with pytest.raises(RequestError, match="larger"):
        web_images.fetch(
            "http://x/", resolve=lambda *_: [PUBLIC], connect=answering(response(b"1234"))[0]
        )


def test_pasted_addresses_become_files_of_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(address: str) -> web_images.WebImage:
        if "bad" in address:
            raise RequestError("is not an image", fix="x")
        return web_images.WebImage(name="cat.png", data=address.encode())

    monkeypatch.setattr(web_images, "fetch", fetch)
    asked = ["http://a/1", " http://a/1", "http://bad", "http://a/2"]
    found = uploads.fetched(tmp_path / "batch", asked)
    assert found["files"] == ["cat.png", "cat.png"] and found["missed"] == [
        "Not fetched: http://bad: is not an image."
    ]
    assert (tmp_path / "batch/1").read_bytes() == b"http://a/2"
    with pytest.raises(RequestError, match="http://bad"):
        uploads.fetched(tmp_path / "other", ["http://bad"])
