"""The tables of models on the front page are what the planner finds now."""

from __future__ import annotations

from scripts.model_table import PAGE, with_model_tables


def test_the_front_page_has_the_planners_tables() -> None:
    """After a change of the planner, of costs or of presets run `python -m scripts.model_table`."""
    page = PAGE.read_text(encoding="utf-8")
    assert with_model_tables(page) == page
