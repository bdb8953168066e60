"""The emblem of a family of base models: a sketch of what it is chosen for, coming out of dots.

Inputs: the name of a family and of a subject. Output: an SVG, the same for the same words. It is a drawing and
pretends to be nothing else: no sample of a model that did not run here is shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256

WIDTH, HEIGHT, CELL = 320, 160, 16
_SHARE = 0.7  # of the width that has dots
# The sketches are drawn 180 high.
_SKETCHES = {
    "people": '<circle cx="212" cy="78" r="34"/><path d="M142 180c4-44 30-58 70-58s66 14 70 58z"/>',
    "anime": '<path d="M212 34c-34 0-52 26-50 60l-12 30 26-14c8 18 22 26 36 26s28-8 36-26l26 14-12-30'
    'c2-34-16-60-50-60z"/>'
    '<path d="M160 180c4-24 24-34 52-34s48 10 52 34z"/>'
    '<g fill="#1c1b19" opacity=".8"><ellipse cx="196" cy="92" rx="8" ry="11"/>'
    '<ellipse cx="228" cy="92" rx="8" ry="11"/></g>',
    "photos": '<circle cx="256" cy="52" r="20"/><path d="M96 180l66-88 38 50 28-34 72 72z"/>',
    "text": '<path d="M150 150l36-100h20l36 100h-19l-9-27h-37l-9 27zm32-43h27l-13-40z"/>'
    '<path d="M256 150v-62h16v8c6-7 26-14 26 14v40h-16v-34c0-14-10-12-10-2v36z"/>',
    "": '<rect x="150" y="50" width="56" height="56" rx="8"/><circle cx="252" cy="112" r="34"/>'
    '<path d="M168 160l30-46 30 46z"/>',
}


# How the picture of a family is built, so that a person finds a base again by its picture: where its sketch stands, and
# what it comes out of. The left is free for the tags of a card.
_PLACES = (
    "translate(37 0) scale(.888)",
    "translate(20 0) scale(.888)",
    "translate(413 0) scale(-.888 .888)",
    "translate(12 -16) scale(1.02)",
)
_GROUNDS = ("dots", "rings", "stripes", "hills", "tiles")


def emblem(family: str, subject: str) -> str:
    """Return the SVG; an unknown subject has plain shapes."""
    digest = sha256(family.encode(errors="replace")).digest()
    hue = digest[18] * 360 // 256
    other = (hue + 40 + digest[1] % 80) % 360
    sketch = _SKETCHES.get(subject, _SKETCHES[""])
    # A letter reads from the left alone.
    place = _PLACES[digest[21] % len(_PLACES)] if subject != "text" else _PLACES[digest[21] % 2]
    ground = "".join(_ground(_GROUNDS[digest[15] % len(_GROUNDS)]))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}">'
        f'<defs><linearGradient id="g" x2="1" y2="1"><stop stop-color="hsl({hue} 55% 26%)"/>'
        f'<stop offset="1" stop-color="hsl({other} 62% 56%)"/></linearGradient>'
        f'<linearGradient id="s" x2="0" y2="1"><stop stop-color="#fff"/>'
        f'<stop offset="1" stop-color="hsl({other} 90% 88%)"/></linearGradient></defs>'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="url(#g)"/>'
        f'<g fill="#fff" stroke="none" opacity=".16">{ground}</g>'
        f'<g fill="hsl({hue} 60% 14%)" opacity=".3" transform="translate(5 6) {place}">{sketch}</g>'
        f'<g fill="url(#s)" transform="{place}">{sketch}</g></svg>'
    )


def _ground(kind: str) -> Iterator[str]:
    """Yield the shapes behind the sketch."""
    if kind == "rings":
        for r in range(24, 300, 32):
            yield f'<circle cx="250" cy="40" r="{r}" fill="none" stroke="#fff" stroke-width="9"/>'
    elif kind == "stripes":
        for x in range(-HEIGHT, WIDTH, 44):
            yield f'<path d="M{x} {HEIGHT}l{HEIGHT} -{HEIGHT}h18l-{HEIGHT} {HEIGHT}z"/>'
    elif kind == "hills":
        for x, r in ((30, 100), (120, 72), (215, 112), (300, 80)):
            yield f'<circle cx="{x}" cy="{HEIGHT + 14}" r="{r}"/>'
    elif kind == "tiles":
        for at, x in enumerate(range(0, WIDTH, 40)):
            yield f'<rect x="{x}" y="{40 * (at % 2)}" width="40" height="40"/>'
    else:
        yield from _dots()


def _dots() -> Iterator[str]:
    """Yield dots in rows, large at the left edge and ever smaller towards the picture."""
    last = WIDTH * _SHARE
    for y in range(CELL // 2, HEIGHT, CELL):
        for x in range(CELL // 2, int(last), CELL):
            yield f'<circle cx="{x}" cy="{y}" r="{CELL / 2 * (1 - x / last):.1f}"/>'
