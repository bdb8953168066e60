"""What a browser would show wrongly, found in the style sheets without one."""

from __future__ import annotations

import re

from tests.gui.conftest import ROOT

# Dialogs are placed by the browser.
PLACED = frozenset({".decisions"})


def test_what_scrolls_holds_the_words_for_screen_readers() -> None:
    """They are placed absolutely: outside of what scrolls they would make a phone's page wider than the phone."""
    loose = []
    for sheet in sorted((ROOT / "gui").rglob("*.css")):
        text = re.sub(r"/\*.*?\*/", "", sheet.read_text(encoding="utf-8"), flags=re.DOTALL)
        for selector, rule in re.findall(r"([^{}]+)\{([^{}]*)\}", text):
            scrolls = re.search(r"overflow(-x)?:\s*(auto|scroll)", rule)
            if scrolls and "position:" not in rule and selector.strip() not in PLACED:
                loose.append(f"{sheet.name}: {selector.strip()}")
    assert loose == []
