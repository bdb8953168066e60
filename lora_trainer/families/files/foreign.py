"""What a file is that has the name of a weight file and holds something else: by its first bytes, in plain words.

Downloads leave such files behind: the login page of a gated repository, the pointer of Git LFS, the error message of a
server. Torch-free.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

# So much is looked at.
FIRST_BYTES = 512
_AGAIN = "download it again, signed in where the page asks for it"
_SAFE = "get it as .safetensors, or convert it where it was made"
_PICKLE = "is a pickle, which can run code when opened"
GGUF_MAGIC = b"GGUF"


class ForeignFileError(ValueError):
    """A file that is not a weight file: what it is (`fault`, the predicate of a sentence), and what to do."""

    def __init__(self, fault: str, *, fix: str) -> None:
        super().__init__(fault)
        self.fault, self.fix = fault, fix


def _matches(pattern: bytes) -> Callable[[bytes], object]:
    return re.compile(pattern, re.IGNORECASE | re.DOTALL).match


_TEXT = rb"(?:\xef\xbb\xbf)?\s*"
# What the first bytes are, what the file then is, and what to do.
_KINDS: tuple[tuple[Callable[[bytes], object], str, str], ...] = (
    (
        _matches(rb"version https://git-lfs"),
        "is a pointer of Git LFS, a text in place of the file",
        "run `git lfs pull` where it was cloned, or download the file itself",
    ),
    (_matches(_TEXT + rb"<(?:!doctype html|html|head|\?xml|!--)"), "is a web page", _AGAIN),
    (_matches(_TEXT + rb'[{\[]\s*["{\[\]}]'), "is JSON text, as servers send messages", _AGAIN),
    (_matches(rb"PK\x03\x04.{,120}data\.pkl|\x80[\x02-\x05]"), _PICKLE, _SAFE),
    (
        _matches(rb"PK\x03\x04|\x1f\x8b|7z\xbc\xaf|Rar!|BZh|\xfd7zXZ"),
        "is a compressed archive",
        "unpack it first",
    ),
    (_matches(rb"\x89PNG|\xff\xd8\xff|RIFF....WEBP|GIF8"), "is a picture", _AGAIN),
    (
        _matches(rb"\0\x05\x16\x07"),
        "is what macOS writes beside a file (its name begins with ._)",
        "give the file without ._ in its name",
    ),
    (_matches(rb"\0{64}"), "begins with zeros, as a download that never wrote does", _AGAIN),
    # Last, as others are text too. Fewer bytes may be the beginning of a file of weights, such as "GGUF".
    (
        _matches(rb"[\t\r\n\x20-\x7e\x80-\xff]{8,}\Z"),
        'is text, as servers send refusals ("Entry not found", "Access ... is restricted")',
        _AGAIN,
    ),
)


def check_first_bytes(first: bytes, *, name: str) -> None:
    """Raise ForeignFileError for the first bytes of a file of that name that is not a weight file."""
    if not first:
        raise ForeignFileError("is empty", fix=_AGAIN)
    wants_gguf, stem = name.endswith(".gguf"), Path(name).stem
    # A safetensors file has its header's length, then the header, JSON; a header of millions of bytes is none.
    is_safetensors = first[8:9] == b"{" and first[4:8] == bytes(4)
    if is_safetensors and not wants_gguf:
        return
    for is_it, fault, fix in _KINDS:
        if is_it(first):
            raise ForeignFileError(fault, fix=fix)
    if first.startswith(GGUF_MAGIC) and not wants_gguf:
        raise ForeignFileError("is a GGUF under another name", fix=f"rename it to {stem}.gguf")
    if not wants_gguf:
        raise ForeignFileError("is a file of another kind", fix=_AGAIN)
    if not first.startswith(GGUF_MAGIC):
        if is_safetensors:
            fix = f"rename it to {stem}.safetensors"
            raise ForeignFileError("is a safetensors file under another name", fix=fix)
        raise ForeignFileError("is not a GGUF", fix=_AGAIN)
