"""The page Doctor in a real browser: its report, and a cache that is cleared after a question."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lora_trainer.common.files import CappedFolder

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("doctor")


@pytest.fixture(scope="module")
def server(gui_server: Any, place: Path) -> Any:
    return gui_server(place / "runs", env={"XDG_CACHE_HOME": str(place / "cache")})


def test_the_cache_is_cleared_after_a_question(page: Any, server: Any, place: Path) -> None:
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


def test_a_phone_needs_no_scrolling_sideways(new_page: Any, server: Any) -> None:
    page = new_page(viewport={"width": 390, "height": 844}, color_scheme="dark")
    page.goto(server.link)
    page.goto(server.url("/doctor"))
    page.get_by_role("heading", name="Versions").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
