"""The interface of a running ComfyUI for programs, as far as drawing with a LoRA needs it.

Inputs: an address such as http://127.0.0.1:8188. Outputs: what ComfyUI answers, read as what it should be. Written
beside server.py and execution.py of ComfyUI 0.29; the paths used here are the same since 2023.
"""

from __future__ import annotations

import http.client
import io
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from PIL import Image

from lora_trainer.common.errors import InputError, MachineError, RequestError, first_line

ADDRESS = "http://127.0.0.1:8188"
LOOK_EVERY_S = 0.5
# With what is drawn for this program, so that the next LoRA is not put on top of the last.
_MARK = "lora_train"
_LOOKED_THROUGH = 200
# Of one answer: a history of many large workflows has a few megabytes.
_MAX_ANSWER_BYTES = 256_000_000
# ComfyUI answers from the thread that also loads files, so it can be silent for some time.
_WITHIN_S = 60.0
_PORTS = {"http": 80, "https": 443}

Graph = Mapping[str, Any]
"""A workflow as ComfyUI's "Export (API)" writes it: by the number of a node its class and inputs."""


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """One picture that ComfyUI has drawn, as it names it."""

    filename: str
    subfolder: str
    type: str


class ComfyUI:
    """A running ComfyUI. Each method raises MachineError where it cannot be reached or answers nonsense."""

    def __init__(self, address: str = ADDRESS) -> None:
        """Take its address; raises RequestError for one that is not of a server."""
        text = address.strip()
        parts = urlsplit(text if "://" in text else f"http://{text}")
        try:
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme not in _PORTS or not parts.hostname or port == 0 or parts.username:
            raise RequestError(
                f"{address!r} is not the address of a ComfyUI", fix=f"use one such as {ADDRESS}"
            )
        self.host: str = parts.hostname
        self._port = port or _PORTS[parts.scheme]
        self._secure = parts.scheme == "https"
        self._path = parts.path.rstrip("/")
        self.address = f"{parts.scheme}://{parts.netloc}{self._path}"

    def loras(self) -> list[str]:
        """Return the names of the LoRA files that it finds now, with their folders."""
        answer = self._json("GET", "/models/loras")
        if not isinstance(answer, list):
            raise self._nonsense("its list of LoRAs")
        return [str(name) for name in answer]

    def drawn_last(self) -> list[Graph]:
        """Return the workflows of its users that it finished since it was started, the newest first."""
        history = self._json("GET", f"/history?max_items={_LOOKED_THROUGH}")
        if not isinstance(history, dict):
            raise self._nonsense("its history")
        found = []
        for entry in history.values():
            try:
                number, graph, told = (entry["prompt"][at] for at in (0, 2, 3))
                succeeded = entry["status"]["status_str"] == "success"
            except (KeyError, IndexError, TypeError):
                continue
            if succeeded and isinstance(graph, dict) and _MARK not in told:
                # A workflow that was put in front of the queue has a negative number.
                found.append((abs(float(number)), graph))
        return [graph for _, graph in sorted(found, key=lambda pair: pair[0], reverse=True)]

    def node_class(self, name: str) -> Mapping[str, Any]:
        """Return what a class of nodes takes and gives, an empty mapping where it has none of that name."""
        answer = self._json("GET", f"/object_info/{quote(name, safe='')}")
        if not isinstance(answer, dict):
            raise self._nonsense(f"what the node {name} is")
        found = answer.get(name, {})
        return found if isinstance(found, dict) else {}

    def queue(self, graph: Graph) -> str:
        """Put a workflow behind those that wait; return the id under which it runs.

        Raises InputError with ComfyUI's own words where it refuses the workflow.
        """
        body = {"prompt": graph, "extra_data": {_MARK: True}}
        answer = self._json("POST", "/prompt", body, refusal=_refused)
        try:
            return str(answer["prompt_id"])
        except (KeyError, TypeError):
            raise self._nonsense("under which number it draws") from None

    def drawings(
        self, prompt_id: str, *, sleep: Callable[[float], None] = time.sleep
    ) -> list[Drawing]:
        """Wait until a workflow has ended; return its pictures. Raises InputError where it failed or was stopped."""
        while (entry := self._ended(prompt_id)) is None:
            # Asked once more where it does not wait: it may have ended between the two looks.
            if not self._waits(prompt_id):
                entry = self._ended(prompt_id)
                if entry is not None:
                    break
                raise InputError(
                    "ComfyUI no longer has the workflow: it was removed from its queue",
                    fix="start it again",
                )
            sleep(LOOK_EVERY_S)
        status = entry.get("status")
        if isinstance(status, dict) and status.get("status_str") == "error":
            raise InputError(
                f"ComfyUI could not draw: {_why(status)}", fix="mend the workflow there"
            )
        return _pictures(entry.get("outputs"))

    def cancel(self, prompt_id: str) -> None:
        """Take a workflow out of the queue, and end it where it runs."""
        self._json("POST", "/queue", {"delete": [prompt_id]})
        self._json("POST", "/interrupt", {"prompt_id": prompt_id})

    def picture(self, drawing: Drawing) -> Image.Image:
        """Return a picture as RGB."""
        data = self._ask("GET", f"/view?{urlencode(vars(drawing))}")
        try:
            with Image.open(io.BytesIO(data)) as opened:
                return opened.convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
            raise self._nonsense(f"the picture {drawing.filename}") from None

    def _ended(self, prompt_id: str) -> dict[str, Any] | None:
        """Return the entry of a workflow in the history, None while it runs or waits."""
        history = self._json("GET", f"/history/{quote(prompt_id, safe='')}")
        entry = history.get(prompt_id) if isinstance(history, dict) else None
        return entry if isinstance(entry, dict) else None

    def _waits(self, prompt_id: str) -> bool:
        """Return whether a workflow runs or waits."""
        queue = self._json("GET", "/queue")
        if not isinstance(queue, dict):
            raise self._nonsense("its queue")
        entries = [
            entry for name in ("queue_running", "queue_pending") for entry in queue.get(name, [])
        ]
        return any(isinstance(entry, list) and entry[1:2] == [prompt_id] for entry in entries)

    def _json(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        refusal: Callable[[Any], InputError] | None = None,
    ) -> Any:
        data = self._ask(method, path, body, refusal=refusal)
        if not data and method == "POST":
            return None
        try:
            return json.loads(data)
        except ValueError:
            raise self._nonsense(f"an answer to {path.partition('?')[0]}") from None

    def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        refusal: Callable[[Any], InputError] | None = None,
    ) -> bytes:
        connect = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        connection = connect(self.host, self._port, timeout=_WITHIN_S)
        headers = {"content-type": "application/json"} if body is not None else {}
        try:
            content = json.dumps(body) if body is not None else None
            connection.request(method, f"{self._path}{path}", content, headers)
            answer = connection.getresponse()
            data = answer.read(_MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException) as error:
            raise MachineError(
                f"ComfyUI cannot be reached at {self.address}: {first_line(error)}",
                fix="start it, or name its address",
            ) from None
        finally:
            connection.close()
        if answer.status == 400 and refusal is not None:
            try:
                raise refusal(json.loads(data))
            except ValueError:
                raise self._nonsense("why it refuses the workflow") from None
        if answer.status != 200:
            raise MachineError(
                f"{self.address}{path.partition('?')[0]} answers {answer.status} {answer.reason}",
                fix="see whether that is ComfyUI's address, and bring ComfyUI up to date",
            )
        return data

    def _nonsense(self, what: str) -> MachineError:
        return MachineError(
            f"{self.address} does not say {what} as ComfyUI does",
            fix="see whether that is ComfyUI's address, and bring ComfyUI up to date",
        )


def _refused(answer: Any) -> InputError:
    """Return why ComfyUI takes no workflow: what it says of each node, or of the whole."""
    words = []
    try:
        for node, told in answer["node_errors"].items():
            said = "; ".join(f"{each['message']}: {each['details']}" for each in told["errors"])
            words.append(f"node {node} ({told['class_type']}): {said}")
        if not words:
            words.append(f"{answer['error']['message']} {answer['error']['details']}".strip())
    except (KeyError, TypeError, AttributeError):
        words = [json.dumps(answer)[:300]]
    return InputError(
        f"ComfyUI refuses the workflow: {', '.join(words)}",
        fix="draw with it there first, then again here",
    )


def _why(status: Mapping[str, Any]) -> str:
    """Return the last thing that a workflow that failed said."""
    for message in reversed(status.get("messages") or []):
        try:
            kind, told = message
            if kind == "execution_error":
                return f"node {told['node_id']} ({told['node_type']}): {told['exception_message'].strip()}"
            if kind == "execution_interrupted":
                return "it was stopped there"
        except (KeyError, TypeError, ValueError, AttributeError):
            continue
    return "it does not say why"


def _pictures(outputs: Any) -> list[Drawing]:
    """Return the pictures among what the nodes of a workflow put out: saved ones, else previews."""
    found = []
    for output in outputs.values() if isinstance(outputs, dict) else ():
        images = output.get("images") if isinstance(output, dict) else None
        for image in images if isinstance(images, list) else ():
            try:
                names = {name: str(image[name]) for name in ("filename", "subfolder", "type")}
            except (KeyError, TypeError):
                continue
            found.append(Drawing(**names))
    return [each for each in found if each.type == "output"] or found
