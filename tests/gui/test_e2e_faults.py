"""What happens around a page that is open: the queue moves, the connection is cut, the server ends, the disk hangs.

Nothing that was typed is lost, and a page goes on by itself once what was missing is back. The queue's worker is
real and lives outside of the server; its trainer is the fake one, so that a training takes as long as the test wants.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from lora_trainer.gui import drafts
from lora_trainer.gui.workplace import Workplace

from lora_trainer.queue import commands
from tests.fakes.gui_server import ROOT, GuiServer
from tests.fakes.live_runs import until as cut_at
from tests.fakes.live_runs import write_status
from tests.fakes.queues import Place, until
from tests.fakes.run_folder import fake_run
from tests.fakes.runs import write_dataset
from tests.gui.conftest import NO_SERVER, StartGui

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

NAMED = "document.activeElement.getAttribute('aria-label')"
SLOW_DISK = {"PYTHONPATH": f"{ROOT / 'tests' / 'fakes' / 'slow_disk'}:{ROOT}"}
"""For a server to whom folders named `slow-disk` are on a disk that hangs until a file `go` lies beside them."""


@dataclass
class Setup:
    """A runs folder with a run that trains, a dataset, a draft, and the server, which may be another later."""

    runs: Path
    dataset: Path
    server: GuiServer
    start: StartGui

    @contextmanager
    def connection_cut(self, page: Any) -> Iterator[None]:
        page.context.set_offline(True)
        yield
        page.context.set_offline(False)

    @contextmanager
    def server_killed(self, _: Any) -> Iterator[None]:
        self.server.kill()
        yield
        self.server = self.start(self.runs, port=self.server.port, env=SLOW_DISK)


@pytest.fixture(scope="module")
def setup(gui_server: StartGui, tmp_path_factory: pytest.TempPathFactory) -> Setup:
    folder = tmp_path_factory.mktemp("faults")
    cut_at(fake_run(folder / "runs" / "live", steps=30), 12)
    write_dataset(folder / "toy", images=3)
    server = gui_server(folder / "runs", env=SLOW_DISK)
    return Setup(runs=folder / "runs", dataset=folder / "toy", server=server, start=gui_server)


@pytest.fixture
def place(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A queue in which one training runs until `let("first")` exists, and three wait."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    place = Place(folder=setup.runs.parent)
    first = place.add("first", until=str(place.let("first")))
    for name in ("cats", "dogs <img src=x onerror=alert(1)>", "owls"):
        place.add(name)
    with place.worker_process() as worker:
        until(lambda: place.item(first.id).run is not None)
        yield place
        place.let("first").touch()
        worker.wait()


def waiting(place: Place) -> list[str]:
    return [label for label, state in place.states().items() if state == "waiting"]


def test_a_queue_is_ordered_by_keyboard_and_what_is_open_in_another_tab_stays_so(
    page: Any, setup: Setup, place: Place
) -> None:
    setup.server.open(page, "/queue", "text=Training now")
    other = page.context.new_page()
    setup.server.open(other, "/queue", "text=Training now")
    command = other.locator("li", has_text="owls").locator("details")
    command.locator("summary").click()
    page.get_by_role("button", name="Later cats").focus()
    page.keyboard.press("Enter")
    until(lambda: waiting(place)[1] == "cats")
    until(
        lambda: page.evaluate(
            "document.querySelector('.queue ol h3').textContent.startsWith('dogs')"
        )
    )
    until(lambda: page.evaluate(f"{NAMED} === 'Later cats'"))
    page.keyboard.press("Enter")
    until(lambda: waiting(place)[2] == "cats")
    until(lambda: page.evaluate(f"{NAMED} === 'Earlier cats'"))
    assert page.get_by_role("button", name="Later cats").is_disabled()
    until(
        lambda: other.evaluate(
            "document.querySelector('.queue ol h3').textContent.startsWith('dogs')"
        )
    )
    assert command.get_attribute("open") is not None
    assert other.evaluate(NAMED) == "More for owls"
    other.keyboard.press("Escape")
    assert command.get_attribute("open") is None and other.evaluate(NAMED) == "More for owls"
    command.locator("summary").click()
    other.get_by_role("button", name="Remove owls").focus()
    assert command.get_attribute("open") is None, "a menu is open only while it is used"
    page.reload()
    titles = page.locator(".queue ol h3").all_inner_texts
    page.get_by_role("button", name="Earlier cats").wait_for()
    assert titles() == waiting(place)
    # By the mouse: what is let go above another one comes before it.
    entries = {name: page.locator("li.waiting", has_text=name) for name in ("cats", "dogs")}
    entries["cats"].drag_to(entries["dogs"], target_position={"x": 300, "y": 5})
    until(lambda: waiting(place)[0] == "cats")
    page.wait_for_function("() => document.querySelector('.queue ol h3').textContent === 'cats'")
    remove = page.get_by_role("button", name="Remove owls")
    remove.click()
    until(lambda: "owls" not in waiting(place))
    page.get_by_role("button", name="Put owls back").click()
    until(lambda: "owls" in waiting(place))
    other.get_by_role("button", name="Remove owls").wait_for()
    remove.click()
    until(lambda: "owls" not in waiting(place))
    remove.wait_for(state="detached")
    # One that failed says why, and is started again.
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
    until(lambda: waiting(place) == ["poor"])
    assert place.item(last.id).state == "running"
    place.let("last").touch()
    page.locator("section", has_text="Training now").get_by_text("poor", exact=True).wait_for()
    place.let("again").touch()
    until(lambda: place.item(failing.id).has_ended)


def test_every_page_goes_on_when_what_was_missing_is_back(
    page: Any, setup: Setup, expected: list[str]
) -> None:
    """The page of a run follows again; a setting and a caption that were typed meanwhile are saved."""
    expected.extend(NO_SERVER)
    work, run = Workplace(runs=setup.runs), setup.runs / "live"
    draft = drafts.new(work, dataset=str(setup.dataset))
    write_status(run)
    setup.server.open(page, "/run?run=live", "text=Training.")
    settings, captions = page.context.new_page(), page.context.new_page()
    setup.server.open(settings, f"/settings?draft={draft.id}", ".memory .fit")
    folder = quote(str(setup.dataset))
    setup.server.open(captions, f"/datasets?folder={folder}", "img[src*='/media/thumb']")
    rank, away = settings.locator("[id='set-adapter.rank']"), "The interface does not answer."
    for image, (fault, value) in enumerate(
        ((setup.connection_cut, 8), (setup.server_killed, 4)), 1
    ):
        text = f"typed while {fault.__name__}"
        with fault(page):
            write_status(run, phase="sample", done=image, total=3)
            page.wait_for_event("requestfailed")
            rank.fill(str(value))
            settings.get_by_text(away).wait_for()
            captions.get_by_label("Caption of p0.png", exact=True).fill(text)
            captions.locator(".ds-state", has_text="Not saved").wait_for()
        page.get_by_text(f"Making sample images {image} of 3.").wait_for()
        settings.get_by_text(away).wait_for(state="hidden")
        until(lambda value=value: drafts.read(work, draft.id).settings == {"adapter.rank": value})
        assert rank.input_value() == str(value)
        captions.get_by_role("button", name="Try again").click()
        captions.locator(".ds-state", has_text="Saved in").wait_for()
        assert (setup.dataset / "p0.txt").read_text() == text
    write_status(run, state="stopped", exit_code=143)
    page.get_by_text("Stopped at step 12 of 30").wait_for()


def test_an_upload_that_breaks_off_says_so_and_is_sent_again(
    page: Any, setup: Setup, expected: list[str]
) -> None:
    expected.extend(NO_SERVER)
    setup.server.open(page, "/train?draft=new", ".drop")
    files = sorted(setup.dataset.iterdir())
    # Without a connection its script could not come any more.
    page.wait_for_function("() => document.querySelector('input[name=files]').onchange !== null")
    with setup.connection_cut(page):
        page.locator("input[name=files]").set_input_files(files)
        page.get_by_text("The upload broke off").wait_for()
    page.locator("input[name=files]").set_input_files(files)
    page.locator(".go-on").get_by_role("button").wait_for()


def test_a_disk_that_hangs_holds_up_only_what_needs_it(
    page: Any, setup: Setup, tmp_path: Path
) -> None:
    images, go = tmp_path / "slow-disk", tmp_path / "go"
    write_dataset(images, images=3)
    setup.server.open(page, f"/datasets?folder={quote(str(images))}")
    page.get_by_text("Opening the folder").wait_for()
    other = page.context.new_page()
    for path, ready in (
        ("/", ".home img"),
        ("/queue", "#queue .nothing-here, #queue .entry"),
        ("/doctor", "h2"),
    ):
        setup.server.open(other, path, ready)
    go.touch()
    caption = page.get_by_label("Caption of p0.png", exact=True)
    caption.wait_for()
    page.get_by_text("Opening the folder").wait_for(state="hidden")
    go.unlink()
    caption.fill("first")
    page.locator(".ds-state", has_text="Saving").wait_for()
    caption.fill("first, and more")  # typed on while the first text is on its way
    go.touch()
    page.locator(".ds-state", has_text="Saved in").wait_for()
    until(lambda: (images / "p0.txt").read_text() == "first, and more")
