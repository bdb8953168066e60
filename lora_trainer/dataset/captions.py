"""Caption text: reading a caption file, finding the caption file of an image, and putting the trigger in.

Inputs are bytes of caption files; outputs are one-line texts and the problems met in reading. Files with the
captions of many images are read in `caption_tables`; the rules that arrange a text are in `caption_rules`.
"""

from __future__ import annotations

import codecs
import json
import re
import unicodedata
from collections.abc import Iterable
from typing import Any, NamedTuple

MAX_CAPTION_BYTES = 16 << 20
MAX_CAPTION_CHARACTERS = 10_000
CAPTION_KEYS = (
    *("text", "caption", "prompt", "captions", "caption_long", "long_caption"),
    *("description", "main_prompt", "tags", "tag_string"),
)
"""Keys of a caption in JSON and columns of a table, the first that holds text counts. Sources: the imagefolder of
Hugging Face (`text`), sd-scripts and ai-toolkit (`caption`), SimpleTuner (`prompt`), EveryDream2 (`main_prompt`)."""
TAG_KEYS = ("tags", "tag_string")
JSON_SIDECAR = ".json"
"""Extension of a caption file with fields; it counts where an image has no caption file of plain text."""
FOLDER_NAME = "folder name"
FILE_NAME = "file name"
"""Sources of captions that nobody wrote as captions."""
TRIGGER_PLACEHOLDER = "[trigger]"
# A number that only tells files apart: `cat_003`, `cat (2)`, or the whole name.
_COUNTER = re.compile(r"(^|[\s_-]+)(\(\d+\)|\d+)$")
# UTF-32 first: its little-endian mark begins with that of UTF-16.
_BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
    (codecs.BOM_UTF8, "utf-8"),
)


class CaptionText(NamedTuple):
    """One caption as a single line. `problems`: guesses and cuts made in reading it. `source` names its file or kind.

    `lines`: the lines of a file that has several, or the captions of a list; each can be a caption of its own.
    """

    text: str = ""
    problems: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    source: str = ""

    @property
    def of_name(self) -> bool:
        """Whether the name of the file or of its folder is the caption; no caption was written then."""
        return self.source in (FOLDER_NAME, FILE_NAME)


def read_caption_file(name: str, data: bytes) -> CaptionText:
    """Turn the bytes of a caption file into one line of text: `NAME.json` as fields, any other as text; never raises.

    UTF-8 with or without mark, UTF-16 and UTF-32 by mark, else Windows-1252 with the byte named.
    """
    if len(data) > MAX_CAPTION_BYTES:
        return CaptionText(problems=(f"is {len(data):,} bytes long, too long for a caption",))
    text, problems = decoded(data)
    if not is_json(name):
        lost = len(clean(text)) - MAX_CAPTION_CHARACTERS
        if lost > 0:
            length = lost + MAX_CAPTION_CHARACTERS
            problems.append(f"has {length:,} characters; the last {lost:,} are left out")
        return caption_of(text.splitlines(), problems)
    try:
        lines = caption_lines(json.loads(text))
    except (ValueError, RecursionError) as error:
        return CaptionText(problems=(*problems, f"is not JSON ({error})"))
    if not lines:
        problems.append(f"holds no caption under {', '.join(CAPTION_KEYS)}")
    return caption_of(lines, problems)


def is_json(name: str) -> bool:
    """Return whether a caption file holds fields instead of plain text."""
    return split_name(name)[1] == JSON_SIDECAR


def caption_lines(value: Any) -> tuple[str, ...]:
    """Return the captions in a JSON value: a text, a list of texts, or an object with one of `CAPTION_KEYS`.

    Tags in a list, or in an object by tag, become one caption, with commas between them.
    """
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list):
        return tuple(value) if is_text(value) else ()
    if not isinstance(value, dict):
        return ()
    for key in CAPTION_KEYS:
        entry = value.get(key)
        if key in TAG_KEYS and isinstance(entry, list | dict):
            # Taggers write {"tag": probability}, booru downloaders a list or lists by category.
            entry = ", ".join(tag for tag in entry if isinstance(tag, str))
        lines = caption_lines(entry) if isinstance(entry, str | list) else ()
        if any(map(clean, lines)):
            return lines
    return ()


def is_text(value: Any) -> bool:
    """Return whether a JSON value is a text or a list of texts."""
    texts = value if isinstance(value, list) else [value]
    return bool(texts) and all(isinstance(text, str) for text in texts)


def caption_of(
    lines: Iterable[str], problems: Iterable[str] = (), *, source: str = ""
) -> CaptionText:
    """Return one or several lines of text as a caption; each line and the whole are cut at the limit."""
    texts = [line for line in map(clean, lines) if line]
    several = tuple(map(_cut, texts)) if len(texts) > 1 else ()
    return CaptionText(_cut(" ".join(texts)), tuple(problems), several, source)


def _cut(line: str) -> str:
    return line[:MAX_CAPTION_CHARACTERS].rstrip()


def clean(text: str) -> str:
    """Return `text` on one line, single-spaced, without NUL, byte order marks, lone surrogates."""
    whole = text.replace("\0", "").replace("\ufeff", "").encode("utf-8", "replace").decode()
    return " ".join(whole.split())


def decoded(data: bytes) -> tuple[str, list[str]]:
    """Return bytes as text, by their mark, as UTF-8 or as Windows-1252, and the guesses made."""
    mark_and_encoding = next((pair for pair in _BYTE_ORDER_MARKS if data.startswith(pair[0])), None)
    mark, encoding = mark_and_encoding or (b"", "utf-8")
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


def same_name(name: str) -> str:
    """Return the form in which names that differ only in case or Unicode composition are equal."""
    return name.lower() if name.isascii() else unicodedata.normalize("NFC", name).casefold()


def split_name(name: str) -> tuple[str, str]:
    """Return a file's name without its extension, and that from the dot on, in lower case.

    As `PurePath` does it, which is too slow to ask several times for each of 100,000 files.
    """
    stem, dot, extension = name.rpartition(".")
    return (stem, dot + extension.casefold()) if stem and extension else (name, "")


def caption_of_name(name: str) -> str:
    """Return the words of a file's name: without extension, folder, underscores and a number at its end.

    As EveryDream and SimpleTuner read captions from names: `a red cat_003.png` is "a red cat".
    """
    stem = split_name(name.rpartition("/")[2])[0]
    return clean(_COUNTER.sub("", stem).replace("_", " "))


def extension_names(extensions: Iterable[str]) -> tuple[str, ...]:
    """Return extensions as `split_name` gives them, however they were written."""
    return tuple(f".{extension.lstrip('.').casefold()}" for extension in extensions)


class Sidecars:
    """The caption files of one folder, by the name of an image: exactly, else by `same_name`."""

    def __init__(self, names: Iterable[str], *, extensions: Iterable[str]) -> None:
        self._extensions = (*extension_names(extensions), JSON_SIDECAR)
        self._exact: dict[str, str] = {}
        self._alike: dict[str, str] = {}
        for name in sorted(names):
            stem, extension = split_name(name)
            self._exact.setdefault(stem + extension, name)
            self._alike.setdefault(same_name(stem) + extension, name)

    def find(self, file_name: str) -> list[str]:
        """Return the caption files of an image, the one that counts first.

        In the order of the extensions, JSON last, and `NAME.txt` before `NAME.png.txt`.
        """
        stem = split_name(file_name)[0]
        return [
            sidecar
            for extension in self._extensions
            for base in (stem, file_name)
            if (sidecar := self._with(base, extension)) is not None
        ]

    def _with(self, stem: str, extension: str) -> str | None:
        return self._exact.get(stem + extension) or self._alike.get(same_name(stem) + extension)


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
