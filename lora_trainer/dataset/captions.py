"""Caption text: reading caption files, finding the caption of an image, and putting the trigger in.

Inputs are bytes of caption files, of one image or of many, as datasets for other trainers have them; outputs are
one-line texts and the problems met in reading. A damaged row of a file costs its own caption only. The rules that
arrange a text are in `caption_rules`.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import os
import re
import tomllib
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from lora_trainer.common.errors import InputError

MAX_CAPTION_BYTES = 16 << 20
MAX_CAPTION_CHARACTERS = 10_000
NAMES: Mapping[str, Any] = tomllib.loads(
    files(__package__).joinpath("names.toml").read_text("utf-8")
)
CAPTION_KEYS: tuple[str, ...] = (*NAMES["caption_keys"],)
# Extension of a caption file with fields; it counts where an image has no caption file of plain text.
JSON_SIDECAR = ".json"
FOLDER_NAME = "folder name"
# Sources of captions that nobody wrote as captions.
FILE_NAME = "file name"
# Source of a caption that lies inside the image.
IMAGE_TEXT = "image metadata"
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
    """One caption as a single line."""

    text: str = ""
    problems: tuple[str, ...] = ()
    """Guesses and cuts made in reading it."""
    lines: tuple[str, ...] = ()
    """The lines of a file with several lines, or the captions of a list; each can be a caption of its own."""
    source: str = ""
    """The file that the caption is from, or the kind of source."""

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
        # Some bases are trained with such captions; a line of one is not a caption of its own.
        value = json_object(text.replace("\0", "").replace("\ufeff", ""))
        if value is not None and len(whole := compact(value)) <= MAX_CAPTION_CHARACTERS:
            return CaptionText(whole, tuple(problems))
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


def json_object(text: str) -> dict[str, Any] | None:
    """Return the one JSON object that a text is, None for any other text."""
    if not text.lstrip().startswith("{"):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def compact(value: Mapping[str, Any]) -> str:
    """Return a caption in JSON on one line, as the programs of bases that are trained with such captions write it."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    # Lone surrogates can be written as escapes, and are not text.
    return text.encode("utf-8", "replace").decode()


def is_json(name: str) -> bool:
    """Return whether a caption file holds fields instead of plain text."""
    return split_name(name)[1] == JSON_SIDECAR


def caption_lines(value: Any, *, keys: Sequence[str] = CAPTION_KEYS) -> tuple[str, ...]:
    """Return the captions in a JSON value: a text, a list of texts, or an object with one of `keys`.

    Tags in a list, or in an object by tag, become one caption, with commas between them.
    """
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list):
        return tuple(value) if is_text(value) else ()
    if not isinstance(value, dict):
        return ()
    for key in keys:
        entry = value.get(key)
        if key in NAMES["tag_keys"] and isinstance(entry, list | dict):
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


def caption_of(lines: Iterable[str], problems: Iterable[str] = ()) -> CaptionText:
    """Return one or several lines of text as a caption; each line and the whole are cut at the limit."""
    texts = [line for line in map(clean, lines) if line]
    several = tuple(map(_cut, texts)) if len(texts) > 1 else ()
    return CaptionText(_cut(" ".join(texts)), tuple(problems), several)


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


METADATA_NAME = "metadata.jsonl"
TABLE_NAMES: tuple[str, ...] = (*NAMES["table_names"],)
FILE_KEYS: tuple[str, ...] = (*NAMES["file_keys"],)
INSTRUCTION_KEYS: tuple[str, ...] = (*NAMES["instruction_keys"],)
_REFERENCE_KEY = re.compile(
    rf"(?:{NAMES['reference_keys']})(?:[-_]?(?P<number>[0-9]{{1,4}}))?", re.VERBOSE
)
_MAX_PROBLEMS_NAMED = 5
# A file name, then a colon, bar, tab or comma; Flickr's lists number the captions of an image with #0, #1.
_TEXT_ROW = re.compile(r"([^:|\t,]+\.[A-Za-z0-9]{2,5})(?:#[0-9])?\s*[:|\t,]\s*(\S.*)")


class TableRow(NamedTuple):
    """What a table says of one image: its captions and the names of its reference images, the first one first."""

    image: str
    lines: tuple[str, ...]
    references: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Table:
    """A file with captions, by the name of the image as the file writes it, with forward slashes."""

    captions: dict[str, CaptionText] = field(default_factory=dict)
    references: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The names of reference images, of those images that have some."""
    problems: tuple[str, ...] = ()


@dataclass(kw_only=True)
class CaptionTables:
    """The captions of all tables of a dataset, found by the name of an image."""

    captions: dict[str, CaptionText] = field(default_factory=dict)
    second: list[tuple[str, str, str]] = field(default_factory=list)
    """(image, table that counts, later table with a different caption for the image)."""
    _alike: dict[str, str] = field(default_factory=dict)
    _elsewhere: dict[str, list[str]] = field(default_factory=dict)
    """Keys of `captions` that are not files of the table's folder, by the `same_name` of their last part."""

    def add(self, table: Table, *, source: str, folder: Path, prefix: str) -> list[str]:
        """Add a table that lies in `folder`, called `prefix` in the dataset ("x/" or ""); return the new keys."""
        new: list[str] = []
        for name, caption in table.captions.items():
            key = prefix + name
            first = self.captions.setdefault(key, caption._replace(source=source))
            if first.source != source:
                if first.text != caption.text:
                    self.second.append((key, first.source, source))
                continue
            new.append(key)
            self._alike[same_name(key)] = key
            # Tables from other machines hold other paths: only the end of a path is left to go by.
            if not os.path.lexists(folder / name):
                self._elsewhere.setdefault(same_name(PurePosixPath(name).name), []).append(key)
        return new

    def find(self, image_name: str) -> str | None:
        """Return the key of an image's caption: its name in the dataset, with or without extension."""
        if not self.captions:
            return None
        names = (image_name, split_name(image_name)[0])
        exact = next((name for name in names if name in self.captions), None)
        similar = exact or next(
            filter(None, (self._alike.get(same_name(one)) for one in names)), None
        )
        if similar is not None:
            return similar
        for name in names:
            keys = self._elsewhere.get(same_name(PurePosixPath(name).name), [])
            whole = [key for key in keys if key.endswith(f"/{name}")]
            if len(whole or keys) == 1:
                return (whole or keys)[0]
        return None


def read_table(name: str, data: bytes) -> Table:
    """Read a file called `name`, one of `TABLE_NAMES`, with the problems met in reading.

    Raises InputError for a Parquet file where pyarrow is not installed.
    """
    extension = split_name(name)[1]
    text, problems = ("", list[str]()) if extension == ".parquet" else decoded(data)
    captions: dict[str, CaptionText] = {}
    references: dict[str, tuple[str, ...]] = {}
    bad_rows: list[str] = []
    rows: Iterable[TableRow]
    try:
        match extension:
            case ".jsonl" if _is_one_json_value(text):
                rows = _json_rows(json.loads(text))
            case ".jsonl":
                rows = _jsonl_rows(text, bad_rows)
            case ".csv":
                text = text.lstrip("\ufeff")
                # Spreadsheets of half of Europe write semicolons; the heading has no other use for either mark.
                delimiter = max(",;\t", key=text.partition("\n")[0].count)
                table = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter)
                rows = _of_columns(table)
            case ".parquet":
                rows = _of_columns(_parquet_rows(name, data))
            case ".json":
                rows = _json_rows(json.loads(text))
            case _:
                matches = (_TEXT_ROW.fullmatch(line.strip()) for line in text.splitlines())
                rows = (TableRow(match[1].strip(), (match[2],)) for match in matches if match)
        for row in rows:
            image = _as_posix(row.image)
            if image in captions:
                bad_rows.append(f"{image} occurs again; the last row counts")
            captions[image] = caption_of(row.lines)
            references[image] = tuple(map(_as_posix, row.references))
    except (ValueError, RecursionError, csv.Error, OSError) as error:
        return Table(problems=(*problems, f"cannot be read ({error})"))
    if not captions and not bad_rows:
        problems.append(f"has no row with {FILE_KEYS[0]} and {' or '.join(CAPTION_KEYS[:3])}")
    rest = len(bad_rows) - _MAX_PROBLEMS_NAMED
    more = [f"{rest} more lines like these"] if rest > 0 else []
    return Table(
        captions=captions,
        references={image: names for image, names in references.items() if names},
        problems=(*problems, *bad_rows[:_MAX_PROBLEMS_NAMED], *more),
    )


def read_metadata_row(line: str) -> tuple[dict[str, Any], str, str]:
    """Return the object in a line of a `metadata.jsonl`, its image's name and its caption's key; raises ValueError."""
    try:
        values: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None
    name = _file_name(values) if isinstance(values, dict) else None
    if name is None:
        raise ValueError('no {"file_name": "..."}')
    key = next((key for key in _caption_keys(values) if key in values), None)
    if key is None or not is_text(values[key]):
        raise ValueError(f"no text under {', '.join(CAPTION_KEYS[:3])}")
    return values, _as_posix(name), key


def _caption_keys(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys of a row's caption: of an editing pair what changes, else what the image shows."""
    if references_in(values):
        return (*INSTRUCTION_KEYS, *CAPTION_KEYS)
    return (*CAPTION_KEYS, *INSTRUCTION_KEYS)


def references_in(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of image files under the keys of reference images in a row, in the order of their numbers."""
    found: list[tuple[int, str]] = []
    for key, value in values.items():
        match = _REFERENCE_KEY.fullmatch(key.casefold())
        if match:
            names = value if isinstance(value, list) else [value]
            found += [(int(match["number"] or 0), name) for name in names if _is_image_name(name)]
    return tuple(name for _, name in sorted(found, key=lambda pair: pair[0]))


def _is_image_name(value: Any) -> bool:
    """Return whether a value names an image file, and not a page of the web or a sentence."""
    return (
        isinstance(value, str)
        and "://" not in value
        and split_name(value.strip())[1] in NAMES["image_extensions"]
    )


def _jsonl_rows(text: str, bad_rows: list[str]) -> Iterator[TableRow]:
    # Not splitlines(): JSON strings may hold U+2028 and the like.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip(" \t\r\ufeff\0"):
            try:
                values, name, key = read_metadata_row(line)
            except ValueError as error:
                bad_rows.append(f"line {number}: {error}")
            else:
                texts = caption_lines(values[key])
                lines = (", ".join(texts),) if key in NAMES["tag_keys"] else texts
                yield TableRow(name, lines, references_in(values))


def _is_one_json_value(text: str) -> bool:
    """Say whether a file that should have a row a line is one list of rows, or one table over several lines."""
    first = text.lstrip("\ufeff\0 \t\r\n").partition("\n")[0].strip()
    if first.startswith("["):
        return True
    # A row in one line is a whole object: one that is not may go on in the next.
    try:
        json.loads(first)
    except ValueError:
        try:
            return first.startswith("{") and isinstance(json.loads(text.lstrip("\ufeff")), dict)
        except (ValueError, RecursionError):
            return False
    except RecursionError:
        return False
    return False


def _parquet_rows(name: str, data: bytes) -> Iterator[Mapping[str, Any]]:
    try:
        from pyarrow import (  # noqa: PLC0415 - 40 MB that only a Parquet file needs
            BufferReader,
            parquet,
        )
        from pyarrow.types import is_struct  # noqa: PLC0415 - as above
    except ImportError:
        raise InputError(
            f"{name} needs the package pyarrow, which is not installed",
            fix="`pip install pyarrow`, or save the captions as metadata.csv",
        ) from None
    file = parquet.ParquetFile(BufferReader(data))
    # Only the columns with names and texts: files of the Hub can hold the images themselves too.
    keys = {*FILE_KEYS, *CAPTION_KEYS, *INSTRUCTION_KEYS}
    columns = [
        column.name
        for column in file.schema_arrow
        if column.name.casefold() in keys
        or (_REFERENCE_KEY.fullmatch(column.name.casefold()) and not is_struct(column.type))
    ]
    for batch in file.iter_batches(columns=columns):
        yield from batch.to_pylist()


def _of_columns(rows: Iterable[Mapping[str, Any]]) -> Iterator[TableRow]:
    for row in rows:
        values = {str(key).strip().casefold(): value for key, value in row.items()}
        file, lines = _file_name(values), caption_lines(values, keys=_caption_keys(values))
        if file is not None and lines:
            yield TableRow(file, lines, references_in(values))


def _file_name(values: Mapping[str, Any]) -> str | None:
    names = (values.get(key) for key in FILE_KEYS)
    return next((name for name in names if isinstance(name, str) and name.strip()), None)


def _json_rows(content: Any) -> Iterator[TableRow]:
    """Yield the rows of {"a.png": caption}, of [{"file_name": ..., "text": ...}], or of COCO captions."""
    match content:
        case {"images": [*images], "annotations": [*annotations]}:
            yield from _coco_rows(images, annotations)
        case {"captions": rows} | {"data": rows} | {"images": rows} if isinstance(
            rows, list | dict
        ):
            yield from _json_rows(rows)
        case dict():
            for file, value in content.items():
                is_row = isinstance(value, dict)
                lines = (
                    caption_lines(value, keys=_caption_keys(value))
                    if is_row
                    else caption_lines(value)
                )
                match value:  # sd-scripts' fine-tuning puts the tags after the caption
                    case {"caption": str(text), "tags": str(tags)} if clean(text) and clean(tags):
                        lines = (f"{text}, {tags}",)
                if lines:
                    yield TableRow(file, lines, references_in(value) if is_row else ())
        case list():
            yield from _of_columns(row for row in content if isinstance(row, dict))


def _coco_rows(images: list[Any], annotations: list[Any]) -> Iterator[TableRow]:
    captions: dict[Any, list[str]] = {}
    for row in annotations:
        match row:
            case {"image_id": int() | str() as image_id, "caption": str(caption)}:
                captions.setdefault(image_id, []).append(caption)
    for row in images:
        match row:
            case {"id": int() | str() as image_id, "file_name": str(file)} if image_id in captions:
                yield TableRow(file, tuple(captions[image_id]))


def _as_posix(name: str) -> str:
    return PurePosixPath(name.replace("\\", "/")).as_posix()
