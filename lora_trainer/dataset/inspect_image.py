"""Inspection of one listed image: its hash, its size and numbers, its mask and its caption, as a record.

The memo answers for files that have not changed, so that a second start opens none of them. A caption can lie inside
the image: the first text that describes it, that of generators cut to its prompt; a workflow in JSON is no caption.
Sources: PNG specification 11.3.3 (keywords), EXIF 2.32 (UserComment), and the "parameters" text of AUTOMATIC1111's
web UI.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import PIL
from PIL import ExifTags, Image
from pydantic import TypeAdapter

from lora_trainer.common.events import Finding
from lora_trainer.common.files import sha256_bytes
from lora_trainer.common.memo import HashMemo, MemoTable
from lora_trainer.common.processes import gc_disabled
from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset.buckets import Place
from lora_trainer.dataset.caption_rules import plain_text
from lora_trainer.dataset.captions import (
    JSON_SIDECAR,
    MAX_CAPTION_BYTES,
    TRIGGER_PLACEHOLDER,
    CaptionText,
    caption_of,
    clean,
    decoded,
    is_json,
    read_caption_file,
)
from lora_trainer.dataset.images import ImageDecodeError, VerifiedImage, loaded, verify
from lora_trainer.dataset.listing import ImageFile
from lora_trainer.dataset.masks import Mask, MaskSize, mask_size, refuse_unfit
from lora_trainer.dataset.records import ImageRecord, finding

IMAGE_TEXT = "image metadata"
"""Source of a caption that lies inside the image."""
_PNG_KEYS = ("caption", "description", "prompt", "parameters", "comment", "title")
# What AUTOMATIC1111 and its forks write after the prompt.
_GENERATOR_TAIL = re.compile(r"\n(Negative prompt: |Steps: \d).*", re.DOTALL)


def read_image_text(path: Path, *, settings: DataSettings, content_hash: str) -> CaptionText:
    """Return the caption inside an image file, an empty one where there is none.

    Raises ImageDecodeError for a damaged image and for a file that no longer has this SHA-256.
    """
    # PNG may have its text behind the pixels, so the image is loaded first.
    with loaded(path, settings, content_hash, []) as (image, _):
        texts = (_prompt_of(text) for text in _texts(image))
        return caption_of([next(filter(None, texts), "")])


def _texts(image: Image.Image) -> Iterator[str]:
    """Yield the texts of an image that may describe it, the most explicit first."""
    fields = {key.casefold(): value for key, value in image.info.items() if isinstance(key, str)}
    for key in _PNG_KEYS:
        yield _plain_text(fields.get(key))
    try:
        exif = image.getexif()
        yield _plain_text(exif.get(ExifTags.Base.ImageDescription))
        details = exif.get_ifd(ExifTags.IFD.Exif)
        yield _user_comment(details.get(ExifTags.Base.UserComment))
    except Exception:  # noqa: BLE001 - damaged EXIF is named by the check of the image itself
        pass


def _plain_text(value: object) -> str:
    return decoded(value)[0] if isinstance(value, bytes) else str(value or "")


def _user_comment(value: object) -> str:
    """Return the text of a UserComment, whose first eight bytes name its encoding."""
    if not isinstance(value, bytes):
        return _plain_text(value)
    head, body = value[:8], value[8:]
    if head == b"UNICODE\0":
        # EXIF leaves the byte order open: of the two, Latin text has its zero bytes on one side.
        is_big = body[:2] == b"\xfe\xff" or body[0:200:2].count(0) > body[1:200:2].count(0)
        return body.decode("utf-16-be" if is_big else "utf-16-le", "replace")
    if head == b"JIS\0\0\0\0\0":
        return body.decode("shift_jis", "replace")
    return _plain_text(body if head in (b"ASCII\0\0\0", bytes(8)) else value)


def _prompt_of(text: str) -> str:
    """Return the prompt in the text of a generator, other text as it is, and nothing for JSON."""
    prompt = clean(_GENERATOR_TAIL.sub("", text))
    return "" if prompt.startswith(("{", "[{")) else prompt


# Raise the number when what is kept of an image changes. Rows made with another Pillow are forgotten.
_MEMO_VERSION = f"4, Pillow {PIL.__version__}"
Value = TypeVar("Value")


@dataclass(frozen=True)
class Remembered(Generic[Value]):
    """Values by the SHA-256 of the bytes that they were read from.

    Kept as JSON texts: of a hundred thousand, the lists in them would take 200 MB.
    """

    kind: TypeAdapter[Value]
    table: MemoTable

    def get(self, key: str) -> Value | None:
        """Return a value; None for one that must be read from the file."""
        text = self.table.get(key)
        return None if text is None else self.kind.validate_json(text)

    def put(self, key: str, value: Any) -> None:
        """Remember a value: a tuple of plain values."""
        self.table.put(key, json.dumps(value))


def _table(folder: Path | None, name: str) -> MemoTable:
    return MemoTable.load(folder, name, version=_MEMO_VERSION)


class DatasetMemo:
    """Hashes of files by name, and images, captions and masks by hash: of a cache folder, or in memory only."""

    @gc_disabled()
    def __init__(self, folder: Path | None = None) -> None:
        self.hashes = HashMemo.load(folder)
        self.images = Remembered(TypeAdapter(VerifiedImage), _table(folder, "images"))
        self.captions = Remembered(TypeAdapter(CaptionText), _table(folder, "caption files"))
        self.masks = Remembered(TypeAdapter(MaskSize), _table(folder, "masks"))

    def save(self) -> None:
        """Write the new rows; raises MachineError."""
        for table in (self.hashes.table, self.images.table, self.captions.table, self.masks.table):
            table.save()


BAD_MASK = "bad-mask"
"""Kind of the findings about masks that cannot be used, which nobody wants to train without."""
_OF_IMAGE = " image"
"""Ends the memo's key of a caption inside an image, after the hash of the image's bytes."""

Inspected = tuple[ImageRecord | None, list[Finding]]
"""The record of an image that can be used, and the findings about it; None and an error for others."""


class _NotRememberedError(Exception):
    """The memo lacks a file's hash or content: it must be read."""


@dataclass(frozen=True, kw_only=True)
class Inspector:
    """Reads the images of a dataset: by its settings, with a memo, into the buckets of a base.

    Without `may_read` it opens no file, and what the memo does not hold is None.
    """

    settings: DataSettings
    memo: DatasetMemo
    place_image: Place
    may_read: bool

    def inspect(self, image: ImageFile) -> Inspected | None:
        """Hash and, unless these bytes are known, decode one image; read its caption file."""
        try:
            return self._inspect(image)
        except _NotRememberedError:
            return None

    def _inspect(self, image: ImageFile) -> Inspected:
        try:
            content_hash = self._hash(image.path)
            facts = self._facts(image.path, content_hash)
            inside = self._caption_inside(image, content_hash)
        except (ImageDecodeError, OSError) as error:
            return _refused("unusable", image.name, error)
        try:
            mask = self._mask(image, facts, content_hash)
        except (ImageDecodeError, OSError) as error:
            return _refused(BAD_MASK, image.mask_name or image.name, error)
        sidecar = self._sidecar(image)
        caption = _first_caption(image, sidecar, inside)
        settings = self.settings.of_folder(image.folder)
        several = settings.caption_lines == "one" and caption.lines
        written = caption.lines if several else (caption.text,)
        record = ImageRecord(
            file=image.file,
            name=image.name,
            content_hash=content_hash,
            width_px=facts.width_px,
            height_px=facts.height_px,
            folder=image.folder,
            written=written,
            caption=plain_text(written, settings=settings),
            caption_source=caption.source or None,
            repeats=image.repeats,
            transparent=bool(facts.background),
            measures=facts.measures,
            mask=mask,
            placements=self.place_image(facts.width_px, facts.height_px),
        )
        findings = [
            finding(kind, image.name, what=what)
            for kind, _, what in (note.partition(": ") for note in facts.notes)
        ]
        return record, [*findings, *_caption_findings(image, sidecar, caption, settings)]

    def _must_read(self) -> None:
        if not self.may_read:
            raise _NotRememberedError

    def _hash(self, path: Path) -> str:
        known = self.memo.hashes.known(str(path))
        if known is None:
            self._must_read()
        return known or self.memo.hashes.sha256(path)

    def _facts(self, path: Path, content_hash: str) -> VerifiedImage:
        facts = self.memo.images.get(content_hash)
        if facts is None or not facts.holds_with(self.settings):
            self._must_read()
            facts = verify(path, settings=self.settings, content_hash=content_hash)
            self.memo.images.put(content_hash, facts)
        return facts

    def _caption_inside(self, image: ImageFile, content_hash: str) -> CaptionText:
        """Return the caption inside an image, if the settings ask for it."""
        if self.settings.caption_fallback != "metadata":
            return CaptionText()
        text = self.memo.captions.get(content_hash + _OF_IMAGE)
        if text is None:
            self._must_read()
            text = read_image_text(image.path, settings=self.settings, content_hash=content_hash)
            self.memo.captions.put(content_hash + _OF_IMAGE, text)
        return text._replace(source=IMAGE_TEXT)

    def _mask(self, image: ImageFile, facts: VerifiedImage, content_hash: str) -> Mask | None:
        """Return an image's mask, if it has one; raises OSError and ImageDecodeError for one that cannot be used."""
        if image.mask is not None:
            mask_hash = self._hash(image.mask)
            mask = Mask(path=image.mask, content_hash=mask_hash, of_alpha=False)
        elif self.settings.masks == "alpha" and facts.background:
            mask = Mask(path=image.path, content_hash=content_hash, of_alpha=True)
        else:
            return None
        key = content_hash + " alpha" if mask.of_alpha else mask.content_hash
        size = self.memo.masks.get(key)
        if size is None:
            self._must_read()
            size = mask_size(mask, settings=self.settings)
            self.memo.masks.put(key, size)
        refuse_unfit(mask, size, facts)
        return mask

    def _sidecar(self, image: ImageFile) -> CaptionText:
        """Return the text of an image's caption file, an empty one without; its source is the file's name."""
        path, source = image.sidecar, image.sidecar_name or ""
        if path is None:
            return CaptionText()
        # The same bytes say another thing as JSON than as text.
        ending = JSON_SIDECAR if is_json(source) else ""
        try:
            text = self.memo.captions.get(self._hash(path) + ending)
            if text is None:
                self._must_read()
                with path.open("rb") as file:
                    data = file.read(MAX_CAPTION_BYTES + 1)
                text = read_caption_file(source, data)
                # Under the hash of what was read: the file may have changed since it was hashed.
                self.memo.captions.put(sha256_bytes(data) + ending, text)
        except OSError as error:
            text = CaptionText(problems=(f"cannot be read ({error.strerror or error})",))
        return text._replace(source=source)


def _refused(kind: str, name: str, error: ImageDecodeError | OSError) -> Inspected:
    if isinstance(error, ImageDecodeError):
        words = {"what": error.reason, "advice": error.fix, "code": error.code}
        return None, [finding(kind, name, **words)]
    return None, [finding(f"{kind}.unreadable", name, reason=error.strerror or error)]


def _first_caption(image: ImageFile, sidecar: CaptionText, inside: CaptionText) -> CaptionText:
    """Return the caption that counts: of its file, a table, the text inside the image, a name, or none."""
    tables = [stand_in for stand_in in image.stand_ins if not stand_in.of_name]
    names = [stand_in for stand_in in image.stand_ins if stand_in.of_name]
    captions = (sidecar, *tables, inside, *names)
    return next((caption for caption in captions if caption.text), CaptionText())


def _caption_findings(
    image: ImageFile, sidecar: CaptionText, caption: CaptionText, settings: DataSettings
) -> Iterator[Finding]:
    kind = "caption-text.json" if is_json(sidecar.source) else "caption-text"
    for problem in sidecar.problems:
        yield finding(kind, sidecar.source, problem=problem)
    if TRIGGER_PLACEHOLDER in caption.text and not settings.trigger:
        yield finding("no-trigger", image.name)
    tables = [stand_in for stand_in in image.stand_ins if not stand_in.of_name]
    if caption is sidecar and any(table.text != caption.text for table in tables):
        words = {"used": caption.source, "unused": tables[0].source}
        yield finding("two-captions.table", image.name, **words)
