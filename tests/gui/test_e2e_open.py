"""The link that the program prints opens the pages in a real browser, and nothing else does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.fakes.run_folder import fake_run

pytestmark = pytest.mark.e2e


def test_the_printed_link_opens(page: Any, gui_server: Any, tmp_path: Path) -> None:
    fake_run(tmp_path / "runs" / "blue owl", steps=3).write()
    server = gui_server(tmp_path / "runs")
    page.goto(server.link)
    page.get_by_role("link", name="Machine").first.wait_for()
    assert "key" not in page.url
    page.goto(server.url("/doctor"))
    page.get_by_role("link", name="Datasets").first.wait_for()


def test_a_killed_and_restarted_interface_knows_its_browser(
    page: Any, gui_server: Any, tmp_path: Path
) -> None:
    server = gui_server(tmp_path / "runs")
    page.goto(server.link)
    page.goto(server.url("/doctor"))
    page.goto("about:blank")  # a page that is still loading its parts would miss them
    server.kill()
    again = gui_server(tmp_path / "runs", port=server.port)
    assert again.link == server.link
    page.goto(server.url("/doctor"))
    page.get_by_role("link", name="Datasets").first.wait_for()


def test_a_browser_without_the_link_is_told_where_it_is(
    page: Any, gui_server: Any, tmp_path: Path, expected: list[str]
) -> None:
    expected.append("403 (Forbidden)")
    server = gui_server(tmp_path / "runs")
    page.goto(server.url("/"))
    page.get_by_text("Open the link that lora-train-gui printed").wait_for()
