"""A dataset folder and a model file are chosen in a real browser without typing their paths."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.runs import write_dataset
from tests.gui.conftest import StartGui

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


def test_folder_and_model_are_chosen_by_clicks_and_keys(
    page: Any, gui_server: StartGui, tmp_path: Path, expected: list[str]
) -> None:
    from playwright.sync_api import expect  # the tests are skipped where it is not installed

    write_dataset(tmp_path / "data" / "toys", images=3)
    model = tmp_path / "data" / "mine.safetensors"
    model.write_bytes(b"no model")
    server = gui_server(tmp_path / "runs")
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
    page.locator(".ds-card", has_text="p1.png").get_by_text("saved").wait_for()
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
