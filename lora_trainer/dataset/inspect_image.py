"""Inspection of one listed image: its hash, its size and numbers, its mask and its caption, as a record.

The memo answers for files that have not changed, so that a second start opens none of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lora_trainer.common.events import Finding
from lora_trainer.common.files import sha256_bytes
from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset.buckets import Place
from lora_trainer.dataset.caption_rules import plain_text
from lora_trainer.dataset.captions import (
    JSON_SIDECAR,
    MAX_CAPTION_BYTES,
    TRIGGER_PLACEHOLDER,
    CaptionText,
    is_json,
    read_caption_file,
)
from lora_trainer.dataset.decode_memo import DatasetMemo
from lora_trainer.dataset.finding_texts import finding
from lora_trainer.dataset.image_text import IMAGE_TEXT, read_image_text
from lora_trainer.dataset.images import ImageDecodeError, VerifiedImage, verify
from lora_trainer.dataset.listing import ImageFile
from lora_trainer.dataset.masks import Mask, check_mask
from lora_trainer.dataset.records import ImageRecord

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
            content_hash = self._hash(image.file)
            facts = self._facts(image.path, content_hash)
            inside = self._caption_inside(image, content_hash)
        except ImageDecodeError as error:
            words = {"what": error.reason, "advice": error.fix, "code": error.code}
            return None, [finding("unusable", image.name, **words)]
        except OSError as error:
            reason = error.strerror or error
            return None, [finding("unusable.unreadable", image.name, reason=reason)]
        try:
            mask = self._mask(image, facts, content_hash)
        except ImageDecodeError as error:
            words = {"what": error.reason, "advice": error.fix, "code": error.code}
            return None, [finding(BAD_MASK, image.mask_name or image.name, **words)]
        except OSError as error:
            reason, name = error.strerror or error, image.mask_name or image.name
            return None, [finding(f"{BAD_MASK}.unreadable", name, reason=reason)]
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

    def _hash(self, file: str) -> str:
        known = self.memo.hashes.known(file)
        if known is None:
            self._must_read()
        return known or self.memo.hashes.sha256(Path(file))

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
            self.memo.captions.put(content_hash + _OF_IMAGE, text[:3])
        return text._replace(source=IMAGE_TEXT)

    def _mask(self, image: ImageFile, facts: VerifiedImage, content_hash: str) -> Mask | None:
        """Return an image's mask, if it has one; raises OSError and ImageDecodeError for one that cannot be used."""
        if image.mask is not None:
            mask_hash = self._hash(str(image.mask))
            mask = Mask(path=image.mask, content_hash=mask_hash, of_alpha=False)
        elif self.settings.masks == "alpha" and facts.background:
            mask = Mask(path=image.path, content_hash=content_hash, of_alpha=True)
        else:
            return None
        if self.memo.masks.get(mask.memo_key) is None:
            self._must_read()
        check_mask(mask, facts, settings=self.settings, sizes=self.memo.masks)
        return mask

    def _sidecar(self, image: ImageFile) -> CaptionText:
        """Return the text of an image's caption file, an empty one without; its source is the file's name."""
        if image.sidecar_file is None:
            return CaptionText()
        source = image.sidecar_name or ""
        # The same bytes say another thing as JSON than as text.
        ending = JSON_SIDECAR if is_json(source) else ""
        try:
            text = self.memo.captions.get(self._hash(image.sidecar_file) + ending)
            if text is None:
                self._must_read()
                with Path(image.sidecar_file).open("rb") as file:
                    data = file.read(MAX_CAPTION_BYTES + 1)
                text = read_caption_file(source, data)
                # Under the hash of what was read: the file may have changed since the memo looked.
                self.memo.captions.put(sha256_bytes(data) + ending, text[:3])
        except OSError as error:
            text = CaptionText(problems=(f"cannot be read ({error.strerror or error})",))
        return text._replace(source=source)


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
