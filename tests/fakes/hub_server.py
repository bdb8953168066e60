"""A Hugging Face Hub on 127.0.0.1 as far as downloads and publishing a folder need it.

It keeps the files that it is sent and offers those of `folders`; the bytes from `held_from` on wait for `go_on`.

with hub_server() as hub:
    env = {"HF_ENDPOINT": hub.address, "HF_TOKEN": TOKEN}
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from pytest import MonkeyPatch

REVISION = "a" * 40
TOKEN = "hf_" + "t" * 34


@dataclass
class HubServer:
    """What was asked of it: repositories with their privacy, files by repository, tokens, files fetched."""

    address: str = ""
    private: dict[str, bool] = field(default_factory=dict)
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    tokens: set[str] = field(default_factory=set)
    refuses: int = 0
    """The status of every answer but the user's name: 403 as for a token that may only read."""
    answers: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Status and error code of every answer about a repository."""
    folders: dict[str, Path] = field(default_factory=dict)
    fetched: list[str] = field(default_factory=list)
    held_from: int | None = None
    go_on: threading.Event = field(default_factory=threading.Event)

    def listing(self, repository: str) -> list[dict[str, Any]]:
        """Return the rows of a repository's files, as the Hub lists a tree."""
        folder = self.folders[repository]
        return [
            {
                "type": "file",
                "path": path.relative_to(folder).as_posix(),
                "size": path.stat().st_size,
                "oid": hashlib.sha1(path.read_bytes()).hexdigest(),
            }
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        ]


@contextmanager
def hub_in_process(patch: MonkeyPatch) -> Iterator[HubServer]:
    """Serve to this process too, whose library has read its environment."""
    with hub_server() as hub:
        constants = "huggingface_hub.constants"
        patch.setattr(f"{constants}.ENDPOINT", hub.address)
        pages = f"{hub.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        patch.setattr(f"{constants}.HUGGINGFACE_CO_URL_TEMPLATE", pages)
        patch.setattr(f"{constants}.HF_HUB_OFFLINE", False)
        yield hub


@contextmanager
def hub_server() -> Iterator[HubServer]:
    """Serve until the end of the block."""
    hub = HubServer()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *words: Any) -> None:
            pass

        def do_HEAD(self) -> None:
            self._refused() or self._file() or self._answer(404, {})

        def do_GET(self) -> None:
            self._refused() or self._file() or self._listed() or self._answer(*self._asked(b""))

        def _refused(self) -> bool:
            for repository, (status, code) in hub.answers.items():
                if f"/{repository}/" in self.path:
                    self._answer(status, b"<html>please log in</html>", code=code)
                    return True
            return False

        def _file(self) -> bool:
            """Send a file of a repository: /owner/name/resolve/REVISION/PATH."""
            owner, name, verb, _, *rest = [*self.path.partition("?")[0].split("/")[1:], "", "", ""]
            repository, path = f"{owner}/{name}", "/".join(rest).rstrip("/")
            rows = hub.listing(repository) if repository in hub.folders else []
            row = next((row for row in rows if row["path"] == path), None)
            if verb != "resolve" or row is None:
                return False
            content = (hub.folders[repository] / path).read_bytes()
            first = int((self.headers.get("range") or "bytes=0-")[6:].partition("-")[0])
            self.send_response(206 if first else 200)
            self.send_header("x-repo-commit", REVISION)
            self.send_header("etag", f'"{row["oid"]}"')
            self.send_header("content-length", str(len(content) - first))
            self.end_headers()
            if self.command == "GET":
                hub.fetched.append(path)
                held = len(content) if hub.held_from is None else hub.held_from
                self.wfile.write(content[first : max(first, held)])
                self.wfile.flush()
                if held < len(content):
                    hub.go_on.wait(60)
                    with suppress(ConnectionError):  # who asked for it was ended meanwhile
                        self.wfile.write(content[max(first, held) :])
            return True

        def _listed(self) -> bool:
            """Send the facts or the list of a repository: /api/models/owner/name."""
            path = self.path.partition("?")[0]
            repository = "/".join(path.split("/")[3:5])
            if not path.startswith("/api/models/") or repository not in hub.folders:
                return False
            rows = hub.listing(repository)
            siblings = [{"rfilename": row["path"], "size": row["size"]} for row in rows]
            facts = {"id": repository, "sha": REVISION, "siblings": siblings}
            self._answer(200, rows if "/tree/" in path else facts)
            return True

        def do_POST(self) -> None:
            self._answer(*self._asked(self.rfile.read(int(self.headers["content-length"]))))

        def _asked(self, body: bytes) -> tuple[int, Any]:
            hub.tokens.add(self.headers.get("authorization", "").removeprefix("Bearer "))
            path = self.path.partition("?")[0]
            if path == "/api/whoami-v2":
                return 200, {"name": "jane", "type": "user", "orgs": []}
            if hub.refuses:
                return hub.refuses, {"error": "no"}
            if path == "/api/repos/create":
                asked = json.loads(body)
                name = f"{asked.get('organization') or 'jane'}/{asked['name']}"
                status = 409 if name in hub.private else 200
                hub.private[name] = asked.get("private", asked.get("visibility") == "private")
                return status, {"url": f"{hub.address}/{name}"}
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

        def _answer(self, status: int, content: Any, *, code: str = "") -> None:
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            if not code and status == 404:
                code = "EntryNotFound"
            if code:
                self.send_header("x-error-code", code)
                self.send_header("x-repo-commit", REVISION)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
