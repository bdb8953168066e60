"""A Hugging Face Hub on 127.0.0.1 as far as publishing a folder needs it; it keeps what it is sent.

with hub_server() as hub:
    env = {"HF_ENDPOINT": hub.address, "HF_TOKEN": TOKEN}
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TOKEN = "hf_" + "t" * 34


@dataclass
class HubServer:
    """What was asked of it: repositories with their privacy, files by repository, tokens."""

    address: str = ""
    private: dict[str, bool] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    tokens: set[str] = field(default_factory=set)
    refuses: bool = False


@contextmanager
def hub_server() -> Iterator[HubServer]:
    """Serve until the end of the block."""
    hub = HubServer()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *words: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(404, {})

        def do_GET(self) -> None:
            self._answer(*self._asked(b""))

        def do_POST(self) -> None:
            self._answer(*self._asked(self.rfile.read(int(self.headers["content-length"]))))

        def _asked(self, body: bytes) -> tuple[int, Any]:
            hub.tokens.add(self.headers.get("authorization", "").removeprefix("Bearer "))
            path = self.path.partition("?")[0]
            if path == "/api/whoami-v2":
                return 200, {"name": "jane", "type": "user", "orgs": []}
            if hub.refuses:  # as for a token that may only read
                return 403, {"error": "no"}
            if path == "/api/repos/create":
                asked = json.loads(body)
                name = f"{asked.get('organization') or 'jane'}/{asked['name']}"
                hub.private[name] = asked.get("private", asked.get("visibility") == "private")
                return 200, {"url": f"{hub.address}/{name}"}
            repository = "/".join(path.split("/")[3:5])
            if path.endswith("/preupload/main"):
                named = [file["path"] for file in json.loads(body)["files"]]
                modes = [
                    {"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in named
                ]
                return 200, {"files": modes}
            if path.endswith("/commit/main"):
                rows = [json.loads(line) for line in body.splitlines() if line.strip()]
                hub.files[repository] = {
                    row["value"]["path"]: base64.b64decode(row["value"]["content"])
                    for row in rows
                    if row["key"] == "file"
                }
                url = f"{hub.address}/{repository}/commit/{'a' * 40}"
                return 200, {"success": True, "commitOid": "a" * 40, "commitUrl": url}
            return 200, {"id": repository, "sha": "a" * 40, "siblings": []}

        def _answer(self, status: int, content: Any) -> None:
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            if status == 404:
                self.send_header("x-error-code", "EntryNotFound")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
