"""HTML and SVG in which text cannot become markup: every plain string is escaped where it enters.

Inputs: tag names of this package, texts and attribute values from anywhere. Output: `Html`, the
only kind of string that is inserted as it stands. Control characters and lone surrogates, which
no document may hold, become the replacement character, and so do the signs that turn the direction
of what follows them: a caption must not rearrange the sentence it stands in.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

_FORBIDDEN = re.compile(
    "[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff\u202a-\u202e\u2066-\u2069]"
)
_VOID = frozenset({"br", "img", "meta"})


class Html(str):
    """Text that is markup already."""

    __slots__ = ()


def text(value: object) -> Html:
    """Return `value` as text that is safe in an element and in a quoted attribute."""
    return (
        value
        if isinstance(value, Html)
        else Html(html.escape(_FORBIDDEN.sub("\ufffd", str(value))))
    )


def tag(name: str, /, *children: str | None, **attributes: str | float | None) -> Html:
    """Return `<name ...>children</name>`; None is left out, of children and of attributes.

    A trailing underscore of an attribute is dropped (`class_`), the others become hyphens.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Html(f"<{name}{given}>")
    return Html(f"<{name}{given}>{join(children)}</{name}>")


def join(parts: Iterable[str | None]) -> Html:
    """Return the parts one after another, each escaped unless it is markup."""
    return Html("".join(text(part) for part in parts if part is not None))


def table(head: Iterable[str], rows: Iterable[Iterable[str | None]], *, class_: str = "") -> Html:
    """Return a table that scrolls sideways where it does not fit; a None cell is empty."""
    header = tag("tr", *(tag("th", cell, scope="col") for cell in head))
    body = (tag("tr", *(tag("td", cell or "") for cell in row)) for row in rows)
    grid = tag("table", tag("thead", header), tag("tbody", *body), class_=class_ or None)
    return tag("div", grid, class_="scroll")
