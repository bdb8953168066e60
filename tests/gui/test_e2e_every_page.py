"""What holds of every page: axe-core finds nothing, a phone needs no scrolling sideways, and a page on which
nothing happens asks nothing.

axe looks at each page and the report once, once more at its colours in the dark, and at a phone's width at the names
of what is there: a style sheet or a script shows other parts of a page on it. The runs are fakes, so nothing is
trained; only the plan of the example is a real one.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from lora_trainer.gui import drafts
from lora_trainer.gui.trash import store as trash
from lora_trainer.gui.workplace import Workplace

from lora_trainer.common.files import json_bytes
from lora_trainer.reporting.report import write_report
from tests.fakes.gui_server import GuiServer
from tests.fakes.live_runs import until, write_status
from tests.fakes.lora_library import finished_run
from tests.fakes.queues import Place
from tests.fakes.queues import until as eventually
from tests.fakes.run_folder import fake_run
from tests.fakes.runs import ROOT
from tests.gui.conftest import LAPTOP, NewPage, StartGui, page_script

axe_core = pytest.importorskip("axe_playwright_python.base", reason="axe-core is not installed")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

PHONE = {"width": 390, "height": 844}
WIDE = {"width": 1920, "height": 1080}
COLOURS = {"runOnly": {"type": "rule", "values": ["color-contrast", "link-in-text-block"]}}
NAMES = {
    "runOnly": {
        "type": "rule",
        "values": [
            *("link-name", "button-name", "label", "select-name", "nested-interactive"),
            *("aria-hidden-focus", "scrollable-region-focusable"),
        ],
    }
}
"""What a narrow window can break: parts that are hidden, put into a menu, or scroll in themselves."""


class Shown(NamedTuple):
    """A page of the interface, and what stands on it once it is complete."""

    path: str
    ready: str


TABLES = tomllib.loads(Path(__file__).with_name("pages.toml").read_text(encoding="utf-8"))
EMPTY, LIVE, STARTING, ENDED, MISSING = (
    [
        Shown(path.format(example=ROOT / "datasets" / "example"), ready)
        for path, ready in TABLES[name].items()
    ]
    for name in ("empty", "live", "starting", "ended", "missing")
)


def test_axe_finds_nothing_on_any_page_and_one_at_rest_asks_nothing(
    new_page: NewPage, gui_server: StartGui, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # for the fake trainer
    place = Place(folder=tmp_path)
    server = gui_server(place.runs)
    page = new_page()
    page.add_init_script(axe_core.AXE_SCRIPT)
    page.clock.install()
    faults: list[str] = []
    asked: dict[str, list[str]] = {}
    for shown in EMPTY:
        asked[f"{shown.path}, empty"] = asked_at_rest(page, shown, server)
        faults += scanned(page, shown)
    with filled(place):
        for shown in (*LIVE, *STARTING):
            opened(page, shown, server)
            faults += scanned(page, shown)
    # All of it has ended now.
    for shown in LIVE:
        asked[shown.path] = asked_at_rest(page, shown, server)
    for shown in ENDED:
        asked[shown.path] = asked_at_rest(page, shown, server)
        faults += scanned(page, shown)
    for shown in MISSING:
        opened(page, shown, server)
        faults += scanned(page, shown)
    faults += workbench(page, server)
    faults += drawn(page, server)
    faults += too_wide_in_german(page, server)
    page.goto("about:blank")  # as it is served it may run no script, not even axe
    page.set_content((place.runs / "done" / "report.html").read_text(encoding="utf-8"))
    faults += scan(page, "report", in_the_dark=True)
    assert not faults, "\n".join(faults)
    assert {name: urls for name, urls in asked.items() if urls} == {}


def opened(page: Any, shown: Shown, server: GuiServer) -> None:
    """Open a page and wait until it is complete."""
    page.set_viewport_size(LAPTOP)
    server.open(page, shown.path, shown.ready)
    page.locator("main:not([inert])").wait_for()  # its script is there


def asked_at_rest(page: Any, shown: Shown, server: GuiServer) -> list[str]:
    """Open a page and return what it asks in ten seconds of its clock; it has five tries to ask nothing."""
    under_way: set[Any] = set()
    asked: list[str] = []

    def begun(request: Any) -> None:
        under_way.add(request)
        asked.append(request.url)

    def pass_s(seconds: int) -> None:
        page.clock.fast_forward(1000 * seconds)
        # A look at the page lets the events of its requests come in.
        eventually(lambda: page.evaluate("document.readyState") and not under_way)

    def ended(request: Any) -> None:
        under_way.discard(request)

    listeners = {"request": begun, "requestfinished": ended, "requestfailed": ended}
    for event, listener in listeners.items():
        page.on(event, listener)
    opened(page, shown, server)
    eventually(
        lambda: page.evaluate("document.title.endsWith('lora-train')")
    )  # what all pages ask is here
    for _ in range(5):  # an answer may lead to a further question, on a busy machine long after it
        asked.clear()
        pass_s(10)
        if not asked:
            break
    for event, listener in listeners.items():
        page.remove_listener(event, listener)
    return asked


@contextmanager
def filled(place: Place) -> Iterator[None]:
    """Fill the runs folder: a run that trains, one that finished, one that failed; a queue of each."""
    done = finished_run(place.runs / "done")
    write_report(done)
    finished_run(place.runs / "thrown", saves=())
    trash.throw_away(Workplace(runs=place.runs), kind="run", ref="thrown")
    failed = until(fake_run(place.runs / "failed", steps=30), 12)
    write_status(failed, state="failed", exit_code=3, message="out of memory. Fix: a smaller batch")
    bad = place.add("bad", exit=3, say="error: no images. Fix: add some.")
    first = place.add("first", until=str(place.let("first")))
    second = place.add("second")
    example = str(ROOT / "datasets" / "example")
    draft = drafts.Draft(id="a" * 12, dataset=example, started_as=second.id)
    drafts.save(Workplace(runs=place.runs), draft)
    members = [
        {"item": "0009-x", "name": name, "values": {"adapter.rank": rank}}
        for name, rank in (("done", 16), ("failed", 8))
    ]
    series = {"id": "a" * 12, "label": "done", "keys": ["adapter.rank"], "members": members}
    record = place.runs / ".gui" / "series" / f"{series['id']}.json"
    record.parent.mkdir(parents=True)
    record.write_bytes(json_bytes(series))
    place.add("third")
    live = place.runs / "live"
    with place.worker_process() as worker:
        try:
            eventually(lambda: place.item(bad.id).has_ended and place.item(first.id).run)
            until(fake_run(live, steps=30), 12)
            write_status(live)  # not before: the queue waits for what was started outside of it
            yield
        finally:  # else the worker waits for ever, and the session for it
            if live.exists():
                write_status(live, state="stopped", exit_code=0)
            place.let("first").touch()
            worker.wait()


def scanned(page: Any, shown: Shown) -> list[str]:
    """Return what axe says of the page that is open, of its dialogs, and of its other tabs."""
    faults = scan(page, shown.path, in_the_dark=True)
    dialog = page.locator("dialog[open]")
    for press in TABLES["presses"].get(shown.path, ()):
        page.locator(press).first.click()
        dialog.wait_for()
        name = f"{shown.path}, {press}"
        faults += scan(page, name, "dialog[open]", in_the_dark=True)
        page.keyboard.press("Escape")
        dialog.wait_for(state="hidden")
    for tab in page.locator("[role=tab]:enabled:visible").all()[1:]:
        tab.click()
        faults += scan(page, f"{shown.path}, {tab.inner_text()}", "[role=tabpanel]")
    return faults


def workbench(page: Any, server: GuiServer) -> list[str]:
    """Return what axe says of the dialog of one image, and of its crop and its mask."""
    folder = ROOT / "datasets" / "example"
    opened(page, Shown(f"/datasets?folder={folder}", "img[src*='/media/thumb']"), server)
    page.get_by_role("button", name="Mask and crop of").first.click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("img", name="Mask of").wait_for()
    faults = scan(page, "the mask of an image", "dialog[open]", in_the_dark=True)
    dialog.get_by_role("button", name="Cancel").click()
    dialog.get_by_role("button", name="Crop", exact=True).click()
    dialog.get_by_role("img", name="Crop of").wait_for()
    faults += scan(page, "the crop of an image", "dialog[open]", in_the_dark=True)
    dialog.get_by_role("button", name="Cancel").click()
    dialog.get_by_role("textbox").first.wait_for()
    return faults + scan(page, "one image", "dialog[open]", in_the_dark=True)


def drawn(page: Any, server: GuiServer) -> list[str]:
    """Return what is wrong with the queue on a phone, in a wide window, and before its style sheet is there."""
    faults = []
    opened(page, Shown("/queue", ".entry.finished .state"), server)
    page.set_viewport_size(PHONE)
    state = page.evaluate(page_script("lines"), ".entry.finished .state span:first-child")
    if set(state) != {1}:
        faults.append(f"the state of what has ended goes over {state} lines")
    page.set_viewport_size(WIDE)
    width_px = page.locator(".frame").bounding_box()["width"]
    if width_px < 0.8 * WIDE["width"]:
        faults.append(f"{width_px} of {WIDE['width']} px are used")
    gutter = page.evaluate("getComputedStyle(document.documentElement).scrollbarGutter")
    if gutter != "auto":
        faults.append(f"scrollbar-gutter {gutter} leaves a strip beside the header")
    head, _, _ = page.evaluate("fetch('/queue').then(a => a.text())").partition("stylesheet")
    if '<meta name="color-scheme" content="light dark">' not in head:
        faults.append(
            "a white flash in a dark scheme: the style sheet is the first to say the scheme"
        )
    return faults


def scan(page: Any, name: str, part: str = "html", *, in_the_dark: bool = False) -> list[str]:
    """Return what axe says of a part of the page that is open, and whether a phone has to scroll it sideways."""
    page.emulate_media(color_scheme="light", reduced_motion="reduce")
    faults = violations(page, name, {}, part)
    for size in (PHONE, LAPTOP):  # a phone has some of the tabs in a menu
        page.set_viewport_size(size)
        if size is PHONE:
            faults += violations(page, f"{name}, phone", NAMES, part)
        width_px = page.evaluate("document.documentElement.scrollWidth")
        if width_px > size["width"]:
            faults.append(f"{name}: {width_px} px wide on {size['width']}")
    if in_the_dark:
        page.emulate_media(color_scheme="dark", reduced_motion="reduce")
        faults += violations(page, f"{name}, dark", COLOURS, part)
    return faults


def too_wide_in_german(page: Any, server: GuiServer) -> list[str]:
    """Return where the header, whose words are longer in German, is wider than the window."""
    faults = []
    page.evaluate("document.cookie = 'lora_train_language=de; path=/'")
    server.open(page, "/", ready="text=Warteschlange")
    for width_px in (320, 1024, 1100):
        page.set_viewport_size({"width": width_px, "height": 768})
        found_px = page.evaluate("document.documentElement.scrollWidth")
        if found_px > width_px:
            faults.append(f"Home in German: {found_px} px wide on {width_px}")
    page.evaluate("document.cookie = 'lora_train_language=; path=/; max-age=0'")
    return faults


def violations(page: Any, name: str, options: dict[str, Any], part: str) -> list[str]:
    """Return what axe says, one line for each element."""
    return [f"{name}: {row}" for row in page.evaluate(page_script("violations"), [part, options])]
