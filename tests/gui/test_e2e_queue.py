"""The page Queue in a real browser: reordered by keyboard, removed, started again; a second tab follows.

The worker is real and lives outside of the server; its trainer is the fake one, so that a training
takes as long as the test wants.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.queue import commands
from tests.fakes.gui_server import GuiServer
from tests.fakes.queues import Place, until
from tests.fakes.runs import ROOT
from tests.gui.conftest import StartGui

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

NAMED = "document.activeElement.getAttribute('aria-label')"


@dataclass(frozen=True, kw_only=True)
class Desk:
    """A server and a queue in which one training runs until `place.let("first")` exists."""

    server: GuiServer
    place: Place

    def open(self, page: Any) -> Any:
        self.server.open(page, "/queue")
        page.get_by_role("heading", name="Training now").wait_for()
        return page

    def waiting(self) -> list[str]:
        found = commands.items(self.place.runs)
        return [item.label for item in found if item.state == "waiting"]


@pytest.fixture
def desk(gui_server: StartGui, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    place = Place(folder=tmp_path)
    first = place.add("first", until=str(place.let("first")))
    for name in ("cats", "dogs <img src=x onerror=alert(1)>", "owls"):
        place.add(name)
    with place.worker_process() as worker:
        until(lambda: place.item(first.id).run is not None)
        yield Desk(server=gui_server(place.runs), place=place)
        place.let("first").touch()
        worker.wait()


def test_ordered_and_removed_by_keyboard_started_again_while_what_is_open_in_another_tab_stays_so(
    desk: Desk, page: Any
) -> None:
    desk.open(page)
    other = desk.open(page.context.new_page())
    command = other.locator("li", has_text="owls").locator("details")
    command.locator("summary").click()
    other.get_by_role("button", name="Remove owls").focus()
    page.get_by_role("button", name="Later cats").focus()
    page.keyboard.press("Enter")
    until(lambda: desk.waiting()[1] == "cats")
    page.wait_for_function("document.querySelector('.queue ol h3').textContent.startsWith('dogs')")
    page.wait_for_function(f"{NAMED} === 'Later cats'")
    page.keyboard.press("Enter")
    until(lambda: desk.waiting()[2] == "cats")
    page.wait_for_function(f"{NAMED} === 'Earlier cats'")
    assert page.get_by_role("button", name="Later cats").is_disabled()
    other.wait_for_function("document.querySelector('.queue ol h3').textContent.startsWith('dogs')")
    assert command.get_attribute("open") is not None
    assert other.evaluate(NAMED) == "Remove owls"
    page.reload()
    titles = page.locator(".queue ol h3").all_inner_texts
    page.get_by_role("button", name="Earlier cats").wait_for()
    assert titles() == desk.waiting()
    remove = page.get_by_role("button", name="Remove owls")
    remove.click()
    sure = page.get_by_role("button", name="Really remove? owls")
    sure.wait_for()
    sure.blur()
    remove.wait_for()
    assert "owls" in desk.waiting()
    remove.click()
    sure.click()
    until(lambda: "owls" not in desk.waiting())
    remove.wait_for(state="detached")
    # One that failed says why, and is started again.
    place = desk.place
    orders = {
        "until": str(place.let("again")),
        "exit": 3,
        "say": "error: no images. Fix: add some.",
    }
    failing = commands.add(place.runs, [json.dumps(orders)], label="poor", folder=place.folder)
    last = place.add("last", until=str(place.let("last")))  # the worker has to stay the fake one
    place.let("first").touch()
    until(lambda: place.item(failing.id).state == "running")
    place.let("again").touch()
    page.get_by_text("No images.", exact=True).wait_for()
    assert page.locator("p", has_text="What to do: add some.").is_visible()
    place.let("again").unlink()
    page.get_by_role("button", name="Train again poor").click()
    until(lambda: desk.waiting() == ["poor"])
    assert place.item(last.id).state == "running"
    place.let("last").touch()
    page.locator("section", has_text="Training now").get_by_text("poor", exact=True).wait_for()
    place.let("again").touch()
    until(lambda: place.item(failing.id).has_ended)
