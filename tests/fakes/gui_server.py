"""The graphical interface as a user starts it: a process of its own that serves a runs folder.

Input: the runs folder and more words of the command line. Output: the link that the program printed.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urljoin, urlsplit
from urllib.request import Request as UrlRequest
from urllib.request import urlopen

from lora_trainer.gui.server.access import KeyAccess
from lora_trainer.gui.server.door import own_host

from scripts.reliability.kill import free_port

ROOT = Path(__file__).resolve().parents[2]
_START_WITHIN_S = 90
_LINK = re.compile(r"https?://\S+")


@dataclass(frozen=True, kw_only=True)
class GuiServer:
    """A running server; `link` is what the user would open, with the key in it."""

    process: subprocess.Popen[bytes]
    port: int
    link: str
    log: Path

    @property
    def access(self) -> KeyAccess:
        """Who may come in, as the server knows it."""
        return KeyAccess.of(dict(parse_qsl(urlsplit(self.link).query))["key"])

    @property
    def host(self) -> str:
        """The Host header of the pages."""
        return f"{own_host(self.access.key)}:{self.port}"

    @property
    def cookie(self) -> str:
        """The Cookie header of a browser that has opened `link`."""
        return "=".join(self.access.cookie(self.port))

    def url(self, path: str = "/") -> str:
        """Return the link to a page; the browser has to have opened `link` before."""
        return urljoin(f"http://{self.host}", path)

    def open(self, page: Any, path: str, ready: str = "body") -> Any:
        """Open a page in a tab of a browser profile that may not have the key yet; return it once `ready` is there."""
        if not any(cookie["name"].endswith(f"_{self.port}") for cookie in page.context.cookies()):
            name, value = self.access.cookie(self.port)  # no page has to be drawn for it
            page.context.add_cookies([{"name": name, "value": value, "url": self.url()}])
        page.goto(self.url(path))
        page.locator(ready).first.wait_for()
        return page

    def said(self) -> str:
        """Return all that the program has printed."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def kill(self) -> None:
        """End it as `kill -9` does; nothing it was doing is finished."""
        self.process.kill()
        self.process.wait(timeout=30)

    def stop(self) -> None:
        """End it as closing its terminal does."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=15)
            except subprocess.TimeoutExpired:
                self.kill()


def start_gui(
    runs: Path,
    *options: str,
    port: int | None = None,
    env: Mapping[str, str] | None = None,
    until_opened: bool = True,
) -> GuiServer:
    """Start the interface and wait until it has printed its link, and answers.

    Raises AssertionError.
    """
    port = port or free_port()
    program = "tests.fakes.late_answers" if os.environ.get("LATE_ANSWERS") else "lora_trainer"
    command = [sys.executable, "-m", program, "gui", f"--runs={runs}", "--no-browser"]
    with tempfile.NamedTemporaryFile(prefix="gui-", suffix=".log", delete=False) as output:
        log = Path(output.name)
        process = subprocess.Popen(
            [*command, f"--port={port}", *options],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, **(env or {})},
        )
    deadline = time.monotonic() + _START_WITHIN_S
    while time.monotonic() < deadline and process.poll() is None:
        if found := _LINK.search(log.read_text(encoding="utf-8", errors="replace")):
            server = GuiServer(process=process, port=port, link=found[0], log=log)
            if not until_opened:
                return server
            while time.monotonic() < deadline and process.poll() is None:
                if is_opened(server):
                    return server
                time.sleep(0.1)  # between looks; the condition above ends the wait
            break
        time.sleep(0.05)  # between looks; the condition above ends the wait
    process.kill()
    process.wait(timeout=30)
    raise AssertionError(f"the interface did not open: {log.read_text()}")


def is_opened(server: GuiServer) -> bool:
    """Whether the server answers, asked as a browser would that has the link."""
    headers = {"Accept": "text/html", "Host": server.host, "Cookie": server.cookie}
    try:
        asked = UrlRequest(urljoin(server.link, "/live"), headers=headers)
        with urlopen(asked, timeout=30) as answer:
            status = answer.status
    except OSError:  # refused, or ended
        return False
    return bool(status == 200)
