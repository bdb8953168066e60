"""Puts a made table between its two markers in a page: `<!-- NAME:begin -->` and `<!-- NAME:end -->`."""

from __future__ import annotations


def with_table(page: str, mark: str, table: str) -> str:
    """Return the text of a page with a new table; raises ValueError where the page lacks a marker."""
    begin_mark, end_mark = f"<!-- {mark}:begin -->\n", f"<!-- {mark}:end -->\n"
    before, begin, rest = page.partition(begin_mark)
    _, end, after = rest.partition(end_mark)
    if not (begin and end):
        raise ValueError(f"the page lacks {begin_mark.strip()} or, after it, {end_mark.strip()}")
    return before + begin + table + end + after
