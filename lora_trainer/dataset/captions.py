"""Caption text: reading it, finding the file of an image, and putting the trigger in.

Inputs are bytes of caption files and `metadata.jsonl`; outputs are one-line texts and sentences
about what had to be guessed or cut. What is made of a text is said in `caption_rules`.
"""

from __future__ import annotations

import codecs
import json
import re
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePosixPath
from typing import Any

MAX_CAPTION_BYTES = 16 << 20
MAX_CAPTION_CHARACTERS = 10_000
METADATA_KEYS = ("text", "caption", "prompt")
TRIGGER_PLACEHOLDER = "[trigger]"
_MAX_LINES_NAMED = 5
# UTF-32 first: its little-endian mark begins with that of UTF-16.
_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
    (codecs.BOM_UTF8, "utf-8"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptionText:
    """One caption as a single line, and what was guessed or cut while reading it.

    `lines` are those of a file that has several; each can be a caption of its own.
    """

    text: str
    problems: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Metadata:
    """A `metadata.jsonl`: captions by file name relative to its folder, and what was wrong."""

    captions: Mapping[str, CaptionText]
    problems: tuple[str, ...] = ()


def read_caption(data: bytes) -> CaptionText:
    """Turn the bytes of a caption file into one line of text; never raises.

    UTF-8 with or without mark, UTF-16 and UTF-32 by mark, else Windows-1252 with the byte named.
    """
    if len(data) > MAX_CAPTION_BYTES:
        return CaptionText(
            text="", problems=(f"is {len(data):,} bytes long, too long for a caption",)
        )
    text, problems = decoded(data)
    caption = caption_of(text.splitlines())
    length = len(clean(text))
    if length > MAX_CAPTION_CHARACTERS:
        lost = length - MAX_CAPTION_CHARACTERS
        problems.append(f"has {length:,} characters; the last {lost:,} are left out")
    return replace(caption, problems=tuple(problems))


def caption_of(lines: Iterable[str]) -> CaptionText:
    """Return what one or several lines of text say, each of them and all together cut where too long."""
    found = [line for line in map(clean, lines) if line]
    return CaptionText(
        text=_cut(" ".join(found)), lines=tuple(map(_cut, found)) if len(found) > 1 else ()
    )


def _cut(line: str) -> str:
    return line[:MAX_CAPTION_CHARACTERS].rstrip()


def clean(text: str) -> str:
    """Return `text` on one line, single-spaced, without NUL, byte order marks, lone surrogates."""
    whole = text.replace("\0", "").replace("\ufeff", "").encode("utf-8", "replace").decode()
    return " ".join(whole.split())


def decoded(data: bytes) -> tuple[str, list[str]]:
    """Return bytes as text, by their mark, as UTF-8 or as Windows-1252, and what was guessed."""
    found = next((pair for pair in _BYTE_ORDER_MARKS if data.startswith(pair[0])), None)
    mark, encoding = found or (b"", "utf-8")
    problems = []
    try:
        text = data[len(mark) :].decode(encoding)
    except UnicodeDecodeError as error:
        offset = len(mark) + error.start
        problem = f"byte {offset} (0x{data[offset]:02x}) is not {encoding.upper()}"
        encoding = encoding if mark else "cp1252"
        text = data[len(mark) :].decode(encoding, "replace")
        problems.append(f"{problem}; " + ("shown as \ufffd" if mark else "read as Windows-1252"))
    if "\0" in text:
        offset = len(mark) + len(text[: text.index("\0")].encode(encoding, "replace"))
        problems.append(f"byte {offset} is NUL; {text.count(chr(0))} such characters left out")
    return text, problems


def read_metadata(data: bytes) -> Metadata:
    """Read lines {"file_name": ..., "text" | "caption" | "prompt": ...}; bad ones are named."""
    text, problems = decoded(data)
    captions: dict[str, CaptionText] = {}
    bad_lines: list[str] = []
    # Not splitlines(): JSON strings may hold U+2028 and the like.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip(" \t\r\ufeff\0"):
            problem = _add_metadata_line(line, captions)
            bad_lines += [f"line {number}: {problem}"] if problem else []
    if len(bad_lines) > _MAX_LINES_NAMED:
        rest = len(bad_lines) - _MAX_LINES_NAMED
        bad_lines = [*bad_lines[:_MAX_LINES_NAMED], f"{rest} more lines like these"]
    return Metadata(captions=captions, problems=(*problems, *bad_lines))


@dataclass(frozen=True, kw_only=True)
class MetadataRow:
    """One line of a `metadata.jsonl`: its object, and under which key of it the caption stands."""

    values: Mapping[str, Any]
    name: str
    key: str

    @property
    def texts(self) -> tuple[str, ...]:
        """The caption as it is written, or those of a list."""
        value = self.values[self.key]
        return tuple(value) if isinstance(value, list) else (str(value),)


def read_metadata_row(line: str) -> MetadataRow:
    """Read one line; raises ValueError with what is wrong with it."""
    try:
        values: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(values, dict) or not isinstance(values.get("file_name"), str):
        raise ValueError('no {"file_name": "..."}')
    key = next((key for key in METADATA_KEYS if key in values), None)
    if key is None or not _is_text(values[key]):
        raise ValueError(f"no text under {', '.join(METADATA_KEYS)}")
    name = PurePosixPath(values["file_name"].replace("\\", "/")).as_posix()
    return MetadataRow(values=values, name=name, key=key)


def _is_text(value: Any) -> bool:
    """Say whether a JSON value is a text or a list of texts."""
    texts = value if isinstance(value, list) else [value]
    return bool(texts) and all(isinstance(text, str) for text in texts)


def _add_metadata_line(line: str, captions: dict[str, CaptionText]) -> str | None:
    try:
        row = read_metadata_row(line)
    except ValueError as error:
        return str(error)
    repeated = row.name in captions
    captions[row.name] = caption_of(row.texts)
    return f"{row.name} occurs again; the last line counts" if repeated else None


def same_name(name: str) -> str:
    """Return the form in which names that differ only in case or Unicode composition are equal."""
    return name.lower() if name.isascii() else unicodedata.normalize("NFC", name).casefold()


def split_name(name: str) -> tuple[str, str]:
    """Return a file's name without its extension, and that from the dot on, in lower case.

    As `PurePath` does it, which is too slow to ask several times for each of 100,000 files.
    """
    stem, dot, extension = name.rpartition(".")
    return (stem, dot + extension.casefold()) if stem and extension else (name, "")


def extension_names(extensions: Iterable[str]) -> tuple[str, ...]:
    """Return extensions as `split_name` gives them, however they were written."""
    return tuple(f".{extension.lstrip('.').casefold()}" for extension in extensions)


class Sidecars:
    """The caption files of one folder, found by an image's stem: exactly, else by `same_name`."""

    def __init__(self, names: Iterable[str], *, extensions: Iterable[str]) -> None:
        self._extensions = extension_names(extensions)
        self._exact: dict[str, str] = {}
        self._alike: dict[str, str] = {}
        for name in sorted(names):
            stem, extension = split_name(name)
            self._exact.setdefault(stem + extension, name)
            self._alike.setdefault(same_name(stem) + extension, name)

    def find(self, stem: str) -> str | None:
        """Return the caption file of the image with this stem; the first extension wins."""
        for extension in self._extensions:
            name = self._exact.get(stem + extension) or self._alike.get(same_name(stem) + extension)
            if name is not None:
                return name
        return None


def has_trigger(caption: str, trigger: str) -> bool:
    """Say whether `trigger` stands in `caption` as a word of its own, in any case."""
    return _as_word(trigger.strip()).search(caption) is not None


def with_trigger(caption: str, trigger: str | None) -> str:
    """Put the trigger where the caption says `[trigger]`, else in front unless it has it."""
    word = "" if trigger is None else trigger.strip()
    if not word:
        return caption
    if TRIGGER_PLACEHOLDER in caption:
        return caption.replace(TRIGGER_PLACEHOLDER, word)
    if has_trigger(caption, word):
        return caption
    return f"{word}, {caption}" if caption else word


def of_class(caption: str, *, trigger: str | None, class_word: str) -> str | None:
    """Return the caption with the class in place of the trigger; None for one without the trigger."""
    word = "" if trigger is None else trigger.strip()
    if not word or not has_trigger(caption, word):
        return None
    return _as_word(word).sub(lambda _: class_word.strip(), caption)


def _as_word(word: str) -> re.Pattern[str]:
    return re.compile(rf"(?<!\w){re.escape(word)}(?!\w)", re.IGNORECASE)
