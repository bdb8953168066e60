"""Small pages in a real browser: the printed link, the page Machine, folders and files chosen without typing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.common.files import CappedFolder
from tests.fakes.gui_server import GuiServer
from tests.fakes.runs import write_dataset
from tests.gui.conftest import NewPage, StartGui

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def server(gui_server: StartGui, place: Path) -> GuiServer:
    return gui_server(place / "runs", env={"XDG_CACHE_HOME": str(place / "cache")})


def test_only_the_printed_link_opens_the_pages_and_a_restart_knows_its_browser(
    new_page: NewPage, server: GuiServer, gui_server: StartGui, tmp_path: Path, expected: list[str]
) -> None:
    expected.append("403 (Forbidden)")
    stranger, page = new_page(), new_page()
    stranger.goto(server.url("/"))
    stranger.get_by_text("Open the link that lora-train-gui printed").wait_for()
    mine = gui_server(tmp_path / "runs")
    page.goto(mine.link)
    page.get_by_role("link", name="Machine").first.wait_for()
    assert "key" not in page.url
    page.goto("about:blank")  # a page that is still loading its parts would miss them
    mine.kill()
    assert gui_server(tmp_path / "runs", port=mine.port).link == mine.link
    page.goto(mine.url("/doctor"))
    page.get_by_role("link", name="Datasets").first.wait_for()


def test_the_cache_is_cleared_after_a_question(page: Any, server: GuiServer, place: Path) -> None:
    folder = CappedFolder(root=place / "cache" / "lora-train", limit_bytes=1)
    folder.create()
    entry = folder.root / "text" / "aa" / f"{'a' * 64}.safetensors"
    entry.parent.mkdir(parents=True)
    entry.write_bytes(b"x" * 2048)
    page.goto(server.link)
    page.goto(server.url("/doctor"))
    page.get_by_text("2.0 KiB in 1 entries").wait_for()
    page.get_by_role("button", name="Clear the cache").click()
    page.get_by_role("button", name="Keep it").click()
    page.get_by_role("button", name="Keep it").wait_for(state="hidden")
    assert entry.exists()
    page.get_by_role("button", name="Clear the cache").click()
    page.get_by_role("button", name="Clear it").click()
    page.get_by_text("Removed 1 entries").wait_for()
    page.get_by_text("0 B in 0 entries").wait_for()
    assert not entry.exists()


def test_folder_and_model_are_chosen_by_clicks_and_keys(
    page: Any, server: GuiServer, tmp_path: Path, expected: list[str]
) -> None:
    from playwright.sync_api import expect  # the tests are skipped where it is not installed

    write_dataset(tmp_path / "data" / "toys", images=3)
    model = tmp_path / "data" / "mine.safetensors"
    model.write_bytes(b"no model")
    page.goto(server.link)
    page.goto(server.url("/train?draft=new"))
    page.get_by_role("button", name="Images that are already").click()
    page.get_by_role("button", name="Browse").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Folder").fill(str(tmp_path))
    page.keyboard.press("Enter")
    dialog.get_by_role("button", name="data", exact=True).press("Enter")
    dialog.get_by_role("button", name="toys", exact=True).click()
    dialog.get_by_text("3 images here").wait_for()
    dialog.get_by_role("button", name="Up").click()
    dialog.get_by_role("button", name="toys", exact=True).click()
    dialog.get_by_text("3 images here").wait_for()
    dialog.get_by_role("button", name="Choose this folder").click()
    images = tmp_path / "data" / "toys"
    expected.append("default-src 'none'")  # Chromium's own style of a page that is an image
    with page.context.expect_page() as large:
        page.get_by_role("link", name="Enlarge p1.png").click()
    large.value.close()
    page.get_by_label("Caption of p1.png", exact=True).fill("a toy on a shelf")
    page.get_by_label("Caption of p0.png", exact=True).click()
    page.locator(".ds-card", has_text="p1.png").get_by_text("Saved in p1.txt").wait_for()
    assert (images / "p1.txt").read_text() == "a toy on a shelf"
    page.get_by_role("button", name="Exclude p2.png").click()
    page.get_by_role("heading", name="2 images").wait_for()
    assert not (images / "p2.png").exists()
    page.get_by_role("button", name="Undo").click()
    page.get_by_role("heading", name="3 images").wait_for()
    assert (images / "p2.png").is_file()
    page.get_by_role("button", name=re.compile("Looks good|Continue anyway")).click()
    page.locator(".base-card", has_text="Your own model").click()
    dialog.get_by_role("button", name="Choose", exact=True).click()
    dialog.get_by_text("Choose one of the model files").wait_for()
    dialog.get_by_label("Folder").fill(str(model.parent))
    page.keyboard.press("Enter")
    dialog.get_by_role("button", name="mine.safetensors").click()
    dialog.get_by_role("button", name="Choose", exact=True).click()
    dialog.wait_for(state="detached")
    page.locator(".base-card[aria-pressed=true]", has_text=str(model)).wait_for()
    page.get_by_role("button", name="Show all base models").click()
    expect(page.get_by_label("Or another one")).to_have_value(str(model))
