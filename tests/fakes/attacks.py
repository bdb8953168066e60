"""What somebody sends who wants more than the pages offer, and a client that sends it as it stands.

Inputs: the address of a running interface and the key of its user. Outputs: spellings of a path that
leads out of a folder, texts that are markup or commands, and answers with their whole body. The
client uses raw connections: browsers and HTTP libraries tidy a path up before they send it.
"""

from __future__ import annotations

import http.client
import json
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from tests.fakes.gui_server import GuiServer

MARKER = "pwned-marker"
"""A file of this name anywhere means that a text was run as a command."""


def climbing(target: Path) -> list[str]:
    """Return spellings of the path of a file, absolute and out of any folder up to six levels deep."""
    plain = target.as_posix()
    rest = plain.lstrip("/")
    up = [f"{'../' * levels}{rest}" for levels in (1, 2, 3, 6, 12)]
    back = [step.replace("/", "\\") for step in up]
    nested = "../" * 6 + rest
    return [
        plain,
        *up,
        *back,
        f"/{nested}",
        f"//{rest}",
        f"./{nested}",
        f"x/../{nested}",
        nested.replace("../", "....//"),
        nested.replace("../", "..;/"),
        nested.replace("../", "..%2f"),
        nested.replace("../", "%2e%2e/"),
        nested.replace("../", "%2e%2e%2f"),
        nested.replace("../", "..%252f"),
        nested.replace("../", "%252e%252e%252f"),
        nested.replace("../", "..%5c"),
        nested.replace("../", "..%c0%af"),
        nested.replace("../", "..%ef%bc%8f"),
        nested.replace("../", "\uff0e\uff0e/"),
        f"{nested}\0.png",
        f"{nested}%00.png",
        f"C:{plain}",
        f"C:\\{rest}",
        f"\\\\localhost\\{rest}",
        f"//localhost/{rest}",
        f"file://{plain}",
        f"~/../../{rest}",
        f"{plain}/.",
        f"{plain}\n",
    ]


COMMANDS = (
    f"; touch {MARKER}",
    f"$(touch {MARKER})",
    f"`touch {MARKER}`",
    f"x\ntouch {MARKER}\n",
    f"'; touch {MARKER}; '",
    "--config=/etc/passwd",
)
MARKUP = tuple(Path(__file__).with_name("markup.txt").read_text(encoding="utf-8").splitlines())
"""Texts that run a script, or ask another host for something, where they are taken for markup."""


def as_names(texts: tuple[str, ...]) -> list[str]:
    """Return the texts as names of files: without a separator or what no file name holds."""
    names = [text.replace("/", "\u2215").replace("\0", "").strip()[:120] for text in texts]
    return [name for name in dict.fromkeys(names) if name not in ("", ".", "..")]


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What the server answered."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(kw_only=True)
class Attacker:
    """A client that counts its requests and keeps what any of them was answered.

    `secret` is a word that stands in files outside of the served folders, and in no request.
    """

    server: GuiServer
    secret: bytes
    cookie: str = ""
    asked: int = 0
    escapes: list[str] = field(default_factory=list)

    def enter(self) -> None:
        """Take the cookie that the printed link gives."""
        reply = self.ask("GET", f"/?{urlsplit(self.server.link).query}")
        self.cookie = reply.headers["set-cookie"].partition(";")[0]

    def ask(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
    ) -> Reply:
        """Send one request as it stands; a header of the value "" is left out."""
        connection = http.client.HTTPConnection("127.0.0.1", self.server.port, timeout=30)
        fields = {"Host": f"127.0.0.1:{self.server.port}", "Cookie": self.cookie, **(headers or {})}
        if body or method == "POST":
            fields.setdefault("Content-Length", str(len(body)))
        try:
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            for name, value in fields.items():
                if value:
                    connection.putheader(name, value.encode())
            connection.endheaders(body or None)
            answer = connection.getresponse()
            known = {name.lower(): value for name, value in answer.getheaders()}
            reply = Reply(status=answer.status, headers=known, body=answer.read())
        finally:
            connection.close()
        self.asked += 1
        if self.secret in reply.body:
            self.escapes.append(f"{method} {path} {body[:300]!r}")
        return reply

    def get(self, path: str, **headers: str) -> Reply:
        return self.ask("GET", path, headers=headers)

    def post(self, path: str, value: Any, **headers: str) -> Reply:
        """Send JSON."""
        fields = {"Content-Type": "application/json", **headers}
        return self.ask("POST", path, headers=fields, body=json.dumps(value).encode())

    def upload(self, names: list[str], data: bytes = b"x", **headers: str) -> Reply:
        """Send files as a form of a page does, under any names."""
        mark = uuid.uuid4().hex
        parts = [
            f'--{mark}\r\nContent-Disposition: form-data; name="files"; filename="'.encode()
            + name.encode(errors="replace")
            + b'"\r\nContent-Type: image/png\r\n\r\n'
            + data
            + b"\r\n"
            for name in names
        ]
        body = b"".join(parts) + f"--{mark}--\r\n".encode()
        fields = {"Content-Type": f"multipart/form-data; boundary={mark}", **headers}
        return self.ask("POST", "/gradio_api/upload", headers=fields, body=body)

    def trigger(self, events: Iterable[tuple[int, list[Any], Any]], *, query: str = "") -> None:
        """Call handlers of events, each (function, fields, event), as the pages do; wait for all answers."""
        session = uuid.uuid4().hex[:11]
        joined = 0
        for function, fields, event in events:
            body = {
                "data": fields,
                "fn_index": function,
                "session_hash": session,
                "event_data": event,
            }
            joined += self.post(f"/gradio_api/queue/join?{query}", body).status == 200
        if joined:
            self.get(f"/gradio_api/queue/data?session_hash={session}")


def quoted(texts: list[str]) -> Iterator[str]:
    """Yield texts for a place in an address, as they are where that is possible, and quoted."""
    for text in texts:
        if text.isascii() and text.isprintable() and not set(text) & set(" #?"):
            yield text
        yield quote(text, safe="")
