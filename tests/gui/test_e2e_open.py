"""The link that the program prints opens in a real browser, and the page asks nobody else."""

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
    page.get_by_role("link", name="Doctor").first.wait_for()
    assert "key" not in page.url
    page.goto(server.url("/doctor"))
    page.get_by_role("link", name="Datasets").first.wait_for()
