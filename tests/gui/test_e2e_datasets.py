"""Captions are edited in a real browser: saved by themselves, undone, changed in bulk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from PIL import Image

from tests.fakes.gui_server import GuiServer
from tests.fakes.queues import until

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

ODD = "q'\"<b>x<&\U0001f600 ${value}.png"
CHUNK = 60
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


def test_edit_undo_reload_bulk_exclude(page: Any, server: GuiServer, folder: Path) -> None:
    open_folder(page, server, folder)
    assert caption(page, ODD).input_value() == SCRIPT
    page.get_by_text("Click into a caption to change it; it saves itself.").wait_for()
    caption(page, "c.png").focus()
    page.locator(".ds-state", has_text="Saves itself").wait_for()
    # Saved after a pause, without a button and without leaving the field.
    caption(page, "c.png").fill("a bird")
    page.locator(".ds-state", has_text="Saved in").wait_for()
    assert (folder / "c.txt").read_text() == "a bird"
    caption(page, "a.png").fill("a dog, big")
    caption(page, "a.png").press("Tab")  # or at once when the field is left
    page.locator(".ds-state", has_text="Saved in").nth(1).wait_for()
    assert (folder / "a.txt").read_text() == "a dog, big"
    # The history is that of the folder: a page that is opened again goes on with it.
    open_folder(page, server, folder)
    page.locator("h1").click()
    page.keyboard.press("Control+z")
    shows(page, "a.png", "a cat, big")
    page.keyboard.press("Control+y")
    shows(page, "a.png", "a dog, big")
    page.locator(".ds-size", has_text="goes to").first.wait_for(timeout=60_000)
    assert page.locator(".ds-frame").first.is_hidden()
    press(page, "Show crop")
    assert page.locator(".ds-frame").first.is_visible()
    # A bulk edit shows what it will do before it does it.
    page.get_by_label("Select a.png", exact=True).check()
    page.get_by_label("Select c.png", exact=True).check()
    page.get_by_text("Change many captions").click()
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
    (folder / "a.txt").write_text("theirs")
    caption(page, "a.png").fill("mine")
    page.locator(".ds-state", has_text="Changed on the disk meanwhile").wait_for()
    page.locator("blockquote", has_text="theirs").wait_for()
    assert (folder / "a.txt").read_text() == "theirs"
    assert caption(page, "a.png").input_value() == "mine"
    press(page, "Keep mine")
    page.locator(".ds-state", has_text="Saved in").first.wait_for()
    until(lambda: (folder / "a.txt").read_text() == "mine")


def test_ten_thousand_images_are_a_few_cards_at_a_time(
    page: Any, server: GuiServer, tmp_path: Path
) -> None:
    root = tmp_path / "many"
    root.mkdir()
    Image.new("RGB", (16, 16)).save(root / "p0000.png")
    for index in range(1, 10_000):
        (root / f"p{index:04}.png").hardlink_to(root / "p0000.png")
    page.goto(server.link)
    page.goto(server.url(f"/datasets?folder={quote(str(root))}"))
    page.get_by_text("all 10000 shown", exact=True).wait_for()
    for name in ("p5000.png", "p9999.png", "p0000.png"):
        scroll_to(page, int(name[1:5]) / 9_999)
        caption(page, name).wait_for()
        assert page.locator(".ds-card").count() <= 4 * CHUNK
        assert page.evaluate("document.querySelectorAll('*').length") < 8_000
    # A caption that is typed stays where it is when its card leaves the screen and comes back.
    caption(page, "p0000.png").fill("typed")
    scroll_to(page, 1)
    caption(page, "p9999.png").wait_for()
    scroll_to(page, 0)
    shows(page, "p0000.png", "typed")
    page.get_by_label("Find", exact=True).fill("p9998")
    page.get_by_text("1 of 10000 shown").wait_for()
    caption(page, "p9998.png").wait_for()
    assert page.locator(".ds-card").count() == 1


def scroll_to(page: Any, share: float) -> None:
    """Scroll to a share of the list of cards; of parts that come on the way, heights change."""
    page.evaluate("share => scrollTo(0, share * document.documentElement.scrollHeight)", share)


def test_a_mask_is_painted_saved_and_undone(page: Any, server: GuiServer, folder: Path) -> None:
    open_folder(page, server, folder)
    mask = folder / "a-masklabel.png"
    press(page, "Mask and crop of a.png")
    dialog = page.get_by_role("dialog")
    canvas = dialog.get_by_role("img", name="Mask of a.png")
    canvas.focus()
    dialog.get_by_role("button", name="Save the mask").click()
    dialog.get_by_text("nothing is painted").wait_for()
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.2, box["y"] + box["height"] * 0.5)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + box["height"] * 0.5, steps=4)
    page.mouse.up()
    dialog.get_by_role("button", name="Save the mask").click()
    dialog.wait_for(state="detached")
    said(page, "the mask of a.png")
    with Image.open(mask) as drawn:
        assert drawn.size == (96, 64)
        assert drawn.getpixel((28, 32)) == 255 and drawn.getpixel((80, 32)) == 0
    written = mask.read_bytes()
    press(page, "Mask and crop of a.png")
    canvas.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Space")
    page.keyboard.press("Tab")
    dialog.get_by_role("button", name="Save the mask").click()
    dialog.wait_for(state="detached")
    page.wait_for_function(
        "document.querySelector('.ds-badges').textContent.includes('has a mask')"
    )
    with Image.open(mask) as drawn:
        assert drawn.getpixel((28, 32)) == 255 and drawn.getpixel((53, 32)) == 255
    press(page, "Undo")
    said(page, "mask of a.png")
    assert mask.read_bytes() == written
