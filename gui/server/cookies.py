"""The cookies of a request, read so that no other program's cookie can spoil them.

All programs on this machine's ports share the cookies of a host. The parser of the standard library drops
every cookie of a header that holds one it dislikes; here each stands alone. Input: a Cookie header.
"""

from __future__ import annotations

from collections.abc import Iterator


def cookies(header: str, name: str) -> Iterator[str]:
    """Yield the values of all cookies of exactly this name: a browser may send several, for other paths."""
    for part in header.split(";"):
        found, is_pair, value = part.strip().partition("=")
        if is_pair and found.strip() == name:
            yield value.strip().strip('"')
