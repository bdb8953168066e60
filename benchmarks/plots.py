"""Bars of measurements as an SVG that a page of documentation can show, light and dark."""

from __future__ import annotations

from collections.abc import Mapping
from xml.sax.saxutils import escape

ROW_PX, GAP_PX, LABEL_PX, BAR_PX, VALUE_PX = 18, 12, 170, 420, 90
COLOURS = ("#7a869a", "#c98a2b", "#b05c8f", "#2f7fd1", "#2a9d7c", "#6a5acd")
STYLE = """text { font: 12px sans-serif; fill: #222 } .head { font-weight: bold }
@media (prefers-color-scheme: dark) { text { fill: #ddd } }"""


def bars(groups: Mapping[str, Mapping[str, float]], *, unit: str) -> str:
    """Return horizontal bars, a group under each title, all to one scale from zero.

    Bars of one name have one colour.
    """
    names = list(dict.fromkeys(name for group in groups.values() for name in group))
    longest = max(value for group in groups.values() for value in group.values())
    parts, y = [], 4
    for title, group in groups.items():
        y += ROW_PX
        parts.append(f'<text class="head" x="4" y="{y - 5}">{escape(title)}</text>')
        for name, value in group.items():
            width = BAR_PX * value / longest
            colour = COLOURS[names.index(name) % len(COLOURS)]
            parts += [
                f'<text x="{LABEL_PX - 8}" y="{y + 13}" text-anchor="end">{escape(name)}</text>',
                f'<rect x="{LABEL_PX}" y="{y + 2}" width="{width:.1f}" height="{ROW_PX - 4}" fill="{colour}"/>',
                f'<text x="{LABEL_PX + width + 6:.1f}" y="{y + 13}">{value:.3g} {escape(unit)}</text>',
            ]
            y += ROW_PX
        y += GAP_PX
    width_px = LABEL_PX + BAR_PX + VALUE_PX
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width_px} {y}" role="img">',
            f"<style>{STYLE}</style>",
            *parts,
            "</svg>",
        ]
    )
