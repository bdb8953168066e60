"""A real server and a real browser for the tests of the interface that are marked `e2e`.

    server = gui_server(tmp_path / "runs", "--datasets=/more/words/of/the/command/line")
    server.open(page, "/doctor", ready="h1")
    server.kill()                                            # kill -9
    again = gui_server(tmp_path / "runs", port=server.port)  # as the user starts it again

A server takes 5 to 10 s: start one in a module fixture and share it. `page` is a new tab of a laptop's window, in a
profile that the module's tests share, because a new one takes a while to open; `new_page`
opens more, each in a profile of its own: `new_page(color_scheme="dark")`. A test FAILS at its end when any of its tabs
had a JavaScript error, wrote an error into the console, asked anything of another host, opened an alert or a
websocket, or was stopped by the content security policy. Who ends a server or cuts the connection adds to the list
`expected` a part of the message that this brings about.

`page.wait_for_function` gets a function, `() => ...`. The text of an expression is evaluated again at each later look,
which the content security policy refuses: such a wait passes only where what it waits for is there already.

`LATE_ANSWERS=SEED python -m pytest ...` holds back each answer of the server up to 0.7 s (fakes/late_answers.py).

The browser is the system's `chromium`, one for each module: playwright's event loop keeps a thread busy, so a module
that uses it cannot call `asyncio.run`.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from lora_trainer.gui.workplace import Workplace

from tests.fakes.gui_server import ROOT, GuiServer, start_gui

LOOPBACK = ("127.0.0.1", "localhost", "[::1]", "::1")
BROWSER_FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
NO_SERVER = ("net::ERR_", "Failed to fetch")
"""What the console says of each request while a server is away: a test ended it, or cut the connection."""
PORT = 7860
LAPTOP = {"width": 1280, "height": 800}
WITHIN_MS = 90_000
"""How long a page may take where nothing else is said: two cores may be busy with other tests."""
_IN_THE_PAGE = ("about", "blob", "data")

MARKER = "pwned-marker"
"""A file of this name anywhere means that a text was run as a command."""
COMMANDS = (
    f"; touch {MARKER}",
    f"$(touch {MARKER})",
    f"`touch {MARKER}`",
    f"x\ntouch {MARKER}\n",
    f"'; touch {MARKER}; '",
    "--config=/etc/passwd",
)
MARKUP = tuple((ROOT / "tests" / "fakes" / "markup.txt").read_text(encoding="utf-8").splitlines())
"""Texts that run a script, or ask another host for something, where they are taken for markup."""

_PAGES = pytest.StashKey[list[Any]]()
_SERVERS = pytest.StashKey[list[GuiServer]]()

StartGui = Callable[..., GuiServer]
NewPage = Callable[..., Any]


@pytest.fixture
def work(tmp_path: Path) -> Workplace:
    """Return an empty runs folder to work in, of somebody alone at this machine."""
    (tmp_path / "runs").mkdir()
    return Workplace(runs=tmp_path / "runs")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return an empty folder for the images of a dataset."""
    folder = tmp_path / "set"
    folder.mkdir()
    return folder


def skip_without_gradio() -> None:
    """Skip what needs the extra `gui`; gradio is not imported for it, which takes 4 s of each test process."""
    if find_spec("gradio") is None:
        pytest.skip("gradio is not installed (extra `gui`)", allow_module_level=True)


@pytest.fixture(scope="module")
def gui_server(request: pytest.FixtureRequest) -> Iterator[StartGui]:
    """Return a function that starts the interface on a runs folder; all are stopped at the end."""
    skip_without_gradio()
    started = request.config.stash.setdefault(_SERVERS, [])

    def start(runs: Path, *options: str, **more: Any) -> GuiServer:
        started.append(start_gui(runs, *options, **more))
        return started[-1]

    yield start
    while started:
        server = started.pop()
        server.stop()
        sys.stdout.write(server.said())  # shown where the teardown fails
        server.log.unlink(missing_ok=True)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Return a headless Chromium."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = shutil.which("chromium")
    if program is None:
        pytest.skip("no chromium on this machine (Debian: apt-get install chromium)")
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=program, args=BROWSER_FLAGS)
        yield running
        running.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Add to the report of a failed test what its pages showed and the servers printed."""
    report = yield
    if report.failed:
        servers = item.config.stash.get(_SERVERS, [])
        report.sections += [(f"server {server.port}", server.said()) for server in servers]
    if report.when == "call" and report.failed:
        tabs = [tab for page in item.stash.get(_PAGES, []) for tab in page.context.pages]
        for number, page in enumerate(tabs, 1):
            with contextlib.suppress(Exception):  # a page that is gone must not hide the failure
                text = page.inner_text("body", timeout=9000)
                report.sections.append((f"page {number}: {page.url}", text))
    return report


@pytest.fixture
def expected() -> list[str]:
    """Return the list of what the console may say in this test: parts of messages, none at first."""
    return []


@pytest.fixture(scope="module")
def offences() -> list[str]:
    """Return the list of what no page of ours may do; what is in it fails the test that is going on."""
    return []


@pytest.fixture(scope="module")
def open_profile(browser: Any, offences: list[str]) -> NewPage:
    """Return a function that opens a browser profile; what no page of ours may do in its tabs is an offence."""

    def refuse_alert(dialog: Any) -> None:
        if dialog.type == "alert":
            offences.append(f"an alert opened: {dialog.message}")
        dialog.dismiss()

    def request(asked: Any) -> None:
        parts = urlsplit(asked.url)
        here = str(parts.hostname).endswith(".localhost") or parts.hostname in LOOPBACK
        if parts.scheme not in _IN_THE_PAGE and not here:
            offences.append(f"a request left this machine: {asked.url}")

    def console(message: Any) -> None:
        if "Content Security Policy" in message.text:
            offences.append(f"stopped by the content security policy: {message.text}")
        elif message.type == "error":
            offences.append(f"an error in the console: {message.text} ({message.location['url']})")

    def tab(opened: Any) -> None:
        opened.on("websocket", lambda it: offences.append(f"a websocket was opened: {it.url}"))

    def open_profile(**options: Any) -> Any:
        context = browser.new_context(**{"viewport": LAPTOP, **options})
        context.set_default_timeout(WITHIN_MS)
        context.on("weberror", lambda error: offences.append(f"JavaScript error: {error.error}"))
        for event, look in {"request": request, "console": console, "page": tab}.items():
            context.on(event, look)
        context.on("dialog", refuse_alert)
        return context

    return open_profile


@pytest.fixture(scope="module")
def profile(open_profile: NewPage) -> Any:
    """Return the profile that the module's tests share."""
    return open_profile()


@pytest.fixture
def new_page(
    open_profile: NewPage, offences: list[str], expected: list[str], request: pytest.FixtureRequest
) -> Iterator[NewPage]:
    """Return a function that opens a tab, in a new profile unless one is given; fails the test for what tabs did."""
    offences.clear()
    pages = request.node.stash.setdefault(_PAGES, [])

    own_profiles: list[Any] = []

    def open_page(profile: Any = None, **options: Any) -> Any:
        if profile is None:
            profile = open_profile(**options)
            own_profiles.append(profile)
        pages.append(profile.new_page())
        return pages[-1]

    yield open_page
    for tab in {tab for page in pages for tab in page.context.pages}:
        tab.close()
    for own in own_profiles:
        own.close()
    unexpected = [said for said in offences if not any(part in said for part in expected)]
    assert not unexpected, "\n".join(unexpected)


@pytest.fixture
def page(profile: Any, new_page: NewPage) -> Any:
    """Return a new tab of a laptop's size; see the top of this file for what fails a test."""
    return new_page(profile)


def page_script(name: str) -> str:
    """Return a script that tests run in a page."""
    return Path(__file__).with_name("page_scripts").joinpath(f"{name}.js").read_text("utf-8")


def as_names(texts: tuple[str, ...]) -> list[str]:
    """Return the texts as names of files: without a separator or what no file name holds."""
    names = [text.replace("/", "\u2215").replace("\0", "").strip()[:120] for text in texts]
    return [name for name in dict.fromkeys(names) if name not in ("", ".", "..")]


def tree(folder: Path) -> dict[str, bytes]:
    """Return the content of each file in a folder by its name there.

    What a running program removes between the listing and the reading is left out.
    """
    content = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with contextlib.suppress(FileNotFoundError):
            content[path.relative_to(folder).as_posix()] = path.read_bytes()
    return content


def answered(
    application: Any,
    path: str,
    *,
    query: str = "",
    method: str = "GET",
    body: Sequence[bytes] = (),
    client: str = "127.0.0.1",
    **headers: str,
) -> tuple[int, dict[str, str], bytes]:
    """Ask an ASGI application what a server would; return status, headers and body of its answer."""
    sent: list[Any] = []
    parts = list(body)

    async def receive() -> Any:
        if not parts:  # the browser stays, and sends nothing more
            await asyncio.Event().wait()
        return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

    async def send(message: Any) -> None:
        sent.append(message)

    fields = {"host": "localhost", **headers}
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": query.encode(),
        "headers": [(k.replace("_", "-").encode(), v.encode()) for k, v in fields.items()],
        "client": (client, 1),
        "server": ("localhost", PORT),
        "extensions": {},
    }
    asyncio.run(application(scope, receive, send))
    told = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
    return sent[0]["status"], told, b"".join(part.get("body", b"") for part in sent[1:])
