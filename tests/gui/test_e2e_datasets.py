"""Captions are edited in a real browser: saved by themselves, undone, changed in bulk, after a kill too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from PIL import Image

from tests.fakes.gui_server import GuiServer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

ODD = "q'\"<b>x<&\U0001f600 ${value}.png"
SCRIPT = "<img src=x onerror=alert(1)> {{value}}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "set"
    root.mkdir()
    for index, name in enumerate(("a.png", "b.png", "c.png", ODD)):
        Image.effect_noise((96, 64 + 16 * index), 60).convert("RGB").save(root / name)
    (root / "a.txt").write_text("a cat, big")
    (root / "b.txt").write_text("\u05d7\u05ea\u05d5\u05dc")
    (root / ODD).with_suffix(".txt").write_text(SCRIPT)
    return root


@pytest.fixture(scope="module")
def server(gui_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuiServer]:
    return gui_server(tmp_path_factory.mktemp("gui") / "runs")


def open_folder(page: Any, server: GuiServer, folder: Path) -> None:
    page.goto(server.link)
    page.goto(server.url(f"/datasets?folder={quote(str(folder))}"))
    caption(page, "a.png").wait_for()


def caption(page: Any, name: str) -> Any:
    return page.get_by_label(f"Caption of {name}", exact=True)


def shows(page: Any, name: str, text: str) -> None:
    """Wait until the caption of a card is that text."""
    page.wait_for_function(
        "([label, text]) => [...document.querySelectorAll('textarea')].some("
        "(area) => area.getAttribute('aria-label') === label && area.value === text)",
        arg=[f"Caption of {name}", text],
    )


def said(page: Any, text: str) -> None:
    page.locator(".ds-message", has_text=text).wait_for()


def press(page: Any, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).click()


def test_edit_undo_reload_bulk_exclude(
    page: Any, gui_server: Any, folder: Path, tmp_path: Path
) -> None:
    server = gui_server(tmp_path / "runs")
    open_folder(page, server, folder)
    assert caption(page, ODD).input_value() == SCRIPT
    # Saved after a pause, without a button and without leaving the field.
    caption(page, "c.png").fill("a bird")
    page.locator(".ds-state", has_text="saved").wait_for()
    assert (folder / "c.txt").read_text() == "a bird"
    caption(page, "a.png").fill("a dog, big")
    caption(page, "a.png").press("Tab")  # or at once when the field is left
    page.locator(".ds-state", has_text="saved").nth(1).wait_for()
    assert (folder / "a.txt").read_text() == "a dog, big"
    # The history is that of the folder: a killed and a new interface go on with it.
    server.kill()
    caption(page, "b.png").fill("typed while nobody listened")
    page.locator(".ds-state", has_text="Not saved").wait_for()
    again = gui_server(tmp_path / "runs", port=server.port)
    press(page, "Try again")
    page.locator(".ds-state", has_text="saved").nth(2).wait_for()
    assert (folder / "b.txt").read_text() == "typed while nobody listened"
    open_folder(page, again, folder)
    press(page, "Undo")
    shows(page, "b.png", "\u05d7\u05ea\u05d5\u05dc")
    page.locator("h1").click()
    page.keyboard.press("Control+z")
    shows(page, "a.png", "a cat, big")
    page.keyboard.press("Control+y")
    shows(page, "a.png", "a dog, big")
    # A bulk edit shows what it will do before it does it.
    page.get_by_label("Select a.png", exact=True).check()
    page.get_by_label("Select c.png", exact=True).check()
    page.get_by_label("Words", exact=True).fill("zibbo")
    press(page, "Preview")
    rows = page.locator(".ds-rows tbody tr")
    rows.nth(1).wait_for()
    assert rows.all_inner_texts() == [
        "a.png\ta dog, big\tzibbo, a dog, big",
        "c.png\ta bird\tzibbo, a bird",
    ]
    assert (folder / "a.txt").read_text() == "a dog, big"
    press(page, "Apply to 2 captions")
    shows(page, "c.png", "zibbo, a bird")
    assert (folder / "a.txt").read_text() == "zibbo, a dog, big"
    # Excluding moves; putting back brings the caption along.
    press(page, "Exclude a.png")
    said(page, "exclude a.png")
    assert (folder / "_excluded" / "a.txt").read_text() == "zibbo, a dog, big"
    press(page, "excluded 1")
    press(page, "Put a.png back")
    said(page, "put a.png back")
    assert (folder / "a.txt").read_text() == "zibbo, a dog, big"
    for step in ("put a.png back", "exclude a.png", "put \u201czibbo\u201d in front"):
        press(page, "Undo")
        said(page, f"Undone: {step}")
    shows(page, "c.png", "a bird")


def test_a_newer_text_on_the_disk_is_shown_and_nothing_overwritten(
    page: Any, server: GuiServer, folder: Path
) -> None:
    open_folder(page, server, folder)
    (folder / "a.txt").write_text("theirs")
    caption(page, "a.png").fill("mine")
    page.locator(".ds-state", has_text="Changed on the disk meanwhile").wait_for()
    page.locator("blockquote", has_text="theirs").wait_for()
    assert (folder / "a.txt").read_text() == "theirs"
    assert caption(page, "a.png").input_value() == "mine"
    press(page, "Keep mine")
    page.locator(".ds-state", has_text="saved").wait_for()
    assert (folder / "a.txt").read_text() == "mine"


def test_where_a_picture_goes_is_drawn(page: Any, server: GuiServer, folder: Path) -> None:
    open_folder(page, server, folder)
    page.locator(".ds-size", has_text="goes to").first.wait_for(timeout=60_000)
    assert page.locator(".ds-frame").first.is_hidden()
    press(page, "Show crop")
    assert page.locator(".ds-frame").first.is_visible()


def test_many_pictures_are_drawn_in_parts(page: Any, server: GuiServer, tmp_path: Path) -> None:
    root = tmp_path / "many"
    root.mkdir()
    Image.new("RGB", (16, 16)).save(root / "a.png")
    data = (root / "a.png").read_bytes()
    for index in range(1_999):
        (root / f"p{index:04}.png").write_bytes(data)
    open_folder(page, server, root)
    page.get_by_text("all 2000 shown", exact=True).wait_for()
    assert page.locator(".ds-card").count() < 300
    page.get_by_label("Find", exact=True).fill("p1998")
    page.get_by_text("1 of 2000 shown").wait_for()
    caption(page, "p1998.png").wait_for()


def test_uploaded_images_open_as_a_dataset(page: Any, server: GuiServer, folder: Path) -> None:
    page.goto(server.link)
    page.goto(server.url("/datasets"))
    page.get_by_role("button", name="Upload images or a zip").wait_for()
    files = [str(folder / name) for name in ("a.png", "a.txt", "b.png")]
    page.locator("input[type=file]").first.set_input_files(files)
    shows(page, "a.png", "a cat, big")
    page.get_by_text("2 images and 1 caption are in").wait_for()
    assert "/uploads/dataset" in page.get_by_label("Folder on this machine").input_value()
