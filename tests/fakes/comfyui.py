"""A ComfyUI that draws at once: the paths that programs use, with its answers as version 0.29 writes them.

`comfyui_nodes.json` is what that version answers to /object_info for some classes, without the lists of files. A
picture is of one colour that says how strong the LoRA is: red is 100 times the strength.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, urlsplit

from PIL import Image

NODES: dict[str, Any] = json.loads(
    Path(__file__).with_name("comfyui_nodes.json").read_text(encoding="utf-8")
)
LOADERS = ("LoraLoader", "LoraLoaderModelOnly")


@dataclass(kw_only=True)
class FakeComfyUI:
    """What it has and what it was asked; `fails` is what a drawing ends with, `ignores` makes LoRAs do nothing."""

    loras: list[str] = field(default_factory=list)
    history: dict[str, Any] = field(default_factory=dict)
    queued: list[dict[str, Any]] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    refuses: dict[str, Any] | None = None
    fails: str = ""
    ignores: bool = False
    address: str = ""

    def has_drawn(self, graph: dict[str, Any], **told: Any) -> None:
        """Put a workflow into the history, as if its user had drawn with it."""
        number = len(self.history)
        self._end(f"own-{number}", number, graph, told)

    def get(self, path: str) -> Any:
        """Return an answer as a value of JSON, bytes for a picture, None for a path that it does not have."""
        parts = urlsplit(path)
        first, _, rest = parts.path.strip("/").partition("/")
        if first == "models" and rest == "loras":
            return self.loras
        if first == "object_info":
            return {rest: NODES[rest]} if rest in NODES else {}
        if first == "history":
            return (
                {rest: self.history[rest]} if rest in self.history else {} if rest else self.history
            )
        if first == "queue":
            return {"queue_running": [], "queue_pending": []}
        if first == "view":
            return self._picture(parse_qs(parts.query)["filename"][0])
        return None

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Return status and answer."""
        if path == "/prompt":
            if self.refuses is not None:
                return 400, self.refuses
            graph, number = body["prompt"], len(self.history)
            self.queued.append(graph)
            self._end(f"asked-{number}", number, graph, body.get("extra_data", {}))
            return 200, {"prompt_id": f"asked-{number}", "number": number, "node_errors": {}}
        self.cancelled += body.get("delete", [])
        return 200, None

    def _end(
        self, prompt_id: str, number: int, graph: dict[str, Any], told: dict[str, Any]
    ) -> None:
        messages: list[Any] = [["execution_start", {"prompt_id": prompt_id}]]
        if self.fails:
            error = {
                "node_id": "7",
                "node_type": "KSampler",
                "exception_message": f"{self.fails}\n",
            }
            messages.append(["execution_error", error])
        image = {"filename": f"{self._strength(graph):g}.png", "subfolder": "", "type": "output"}
        self.history[prompt_id] = {
            "prompt": [number, prompt_id, graph, told, ["9"]],
            "outputs": {} if self.fails else {"9": {"images": [image]}},
            "status": {
                "status_str": "error" if self.fails else "success",
                "completed": not self.fails,
                "messages": messages,
            },
        }

    def _strength(self, graph: dict[str, Any]) -> float:
        loaders = [node for node in graph.values() if node["class_type"] in LOADERS]
        return 0.0 if self.ignores else sum(node["inputs"]["strength_model"] for node in loaders)

    def _picture(self, name: str) -> bytes:
        red = int(100 * float(name.removesuffix(".png")))
        data = io.BytesIO()
        Image.new("RGB", (8, 8), (red, 0, 0)).save(data, format="PNG")
        return data.getvalue()


@contextmanager
def serving(fake: FakeComfyUI) -> Iterator[FakeComfyUI]:
    """Serve it on a port of this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = fake.get(self.path)
            self._send(404 if answer is None else 200, answer)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self._send(*fake.post(self.path, body))

        def _send(self, status: int, answer: Any) -> None:
            data = (
                answer
                if isinstance(answer, bytes)
                else b""
                if answer is None
                else json.dumps(answer).encode()
            )
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    fake.address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
