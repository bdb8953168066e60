"""What goes wrong around a page that is open: the connection is cut, the server ends, the disk hangs.

Nothing that was typed is lost, and a page goes on by itself once what was missing is back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from lora_trainer.gui import drafts
from lora_trainer.gui.workplace import Workplace

from tests.fakes.gui_server import ROOT, GuiServer
from tests.fakes.live_runs import until as cut_at
from tests.fakes.live_runs import write_status
from tests.fakes.queues import until
from tests.fakes.run_folder import fake_run
from tests.fakes.runs import write_dataset
from tests.gui.conftest import NO_SERVER, StartGui

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@dataclass
class Desk:
    """A runs folder with a run that trains, a dataset, a draft, and the server, which may be another later."""

    runs: Path
    dataset: Path
    server: GuiServer
    start: StartGui

    def open(self, page: Any, path: str, ready: str) -> None:
        self.server.open(page, path)
        page.locator(ready).first.wait_for()

    @contextmanager
    def connection_cut(self, page: Any) -> Iterator[None]:
        page.context.set_offline(True)
        yield
        page.context.set_offline(False)

    @contextmanager
    def server_killed(self, page: Any) -> Iterator[None]:
        self.server.kill()
        yield
        self.server = self.start(self.runs, port=self.server.port)


@pytest.fixture(scope="module")
def desk(gui_server: StartGui, tmp_path_factory: pytest.TempPathFactory) -> Desk:
    folder = tmp_path_factory.mktemp("faults")
    cut_at(fake_run(folder / "runs" / "live", steps=30), 12)
    write_dataset(folder / "toy", images=3)
    server = gui_server(folder / "runs")
    return Desk(runs=folder / "runs", dataset=folder / "toy", server=server, start=gui_server)


def test_every_page_goes_on_when_what_was_missing_is_back(
    page: Any, desk: Desk, expected: list[str]
) -> None:
    """The page of a run follows again; a setting and a caption that were typed meanwhile are saved."""
    expected.extend(NO_SERVER)
    work, run = Workplace(runs=desk.runs), desk.runs / "live"
    draft = drafts.new(work, dataset=str(desk.dataset))
    write_status(run)
    desk.open(page, "/run?run=live", "text=Training.")
    settings, captions = page.context.new_page(), page.context.new_page()
    desk.open(settings, f"/settings?draft={draft.id}", ".memory .fit")
    folder = quote(str(desk.dataset))
    desk.open(captions, f"/datasets?folder={folder}", "img[src*='/media/thumb']")
    rank, away = settings.locator("[id='set-adapter.rank']"), "The interface does not answer."
    for image, (fault, value) in enumerate(((desk.connection_cut, 8), (desk.server_killed, 4)), 1):
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
        assert (desk.dataset / "p0.txt").read_text() == text
    write_status(run, state="stopped", exit_code=143)
    page.get_by_text("Stopped at step 12 of 30").wait_for()


def test_an_upload_that_breaks_off_says_so_and_is_sent_again(
    page: Any, desk: Desk, expected: list[str]
) -> None:
    expected.extend(NO_SERVER)
    desk.open(page, "/train?draft=new", ".drop")
    files = sorted(desk.dataset.iterdir())
    with desk.connection_cut(page):
        page.locator("input[name=files]").set_input_files(files)
        page.get_by_text("The upload broke off").wait_for()
    page.locator("input[name=files]").set_input_files(files)
    page.locator(".go-on").get_by_role("button").wait_for()


def test_a_disk_that_hangs_holds_up_only_what_needs_it(
    page: Any, gui_server: StartGui, tmp_path: Path
) -> None:
    images, go = tmp_path / "slow-disk", tmp_path / "go"
    write_dataset(images, images=3)
    server = gui_server(
        tmp_path / "runs", env={"PYTHONPATH": f"{ROOT / 'tests' / 'fakes' / 'slow_disk'}:{ROOT}"}
    )
    server.open(page, f"/datasets?folder={quote(str(images))}")
    page.get_by_text("Opening the folder").wait_for()
    other = page.context.new_page()
    for path, ready in (("/", ".drop"), ("/queue", "#queue .empty"), ("/doctor", "h2")):
        other.goto(server.url(path))
        other.locator(ready).first.wait_for()
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
