"""From a folder of images to checked records, with the images for regularisation told apart.

Every image is decoded once, unless the memo has its bytes; captions are read and the trigger is put in. The
memo answers for files that have not changed, so that a second start opens none of them. Nothing is written to
the folder. The output is a `Dataset`, the same for any order of the files.

Images for regularisation are other images of the class, trained along so that training does not change the class.
They lie in a folder of their own (`data.regularisation_dir`) or in a subfolder of the dataset that is marked
(`data.folders.NAME.regularisation`). They get no trigger and no mask, are not held out for validation, and do not
count in the dataset's score.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import PIL
from pydantic import TypeAdapter

from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.common.events import Finding, by_severity, shown
from lora_trainer.common.files import (
    CappedFolder,
    json_bytes,
    sha256_bytes,
    user_cache_folder,
    user_path,
)
from lora_trainer.common.memo import HashMemo, MemoTable
from lora_trainer.common.processes import gc_disabled
from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset.buckets import (
    Place,
    Placement,
    PlaceReference,
    placing,
    placing_references,
)
from lora_trainer.dataset.caption_rules import TRIGGER_PLACEHOLDER, plain_text
from lora_trainer.dataset.captions import (
    IMAGE_TEXT,
    JSON_SIDECAR,
    MAX_CAPTION_BYTES,
    CaptionText,
    is_json,
    read_caption_file,
)
from lora_trainer.dataset.crops import Crop
from lora_trainer.dataset.images import (
    ImageDecodeError,
    Measures,
    background_rgb,
    decode,
    max_pixels,
    measure,
    read_image_text,
)
from lora_trainer.dataset.listing import ImageFile, list_dataset
from lora_trainer.dataset.masks import Mask, MaskFacts, facts_of
from lora_trainer.dataset.quality import findings_of
from lora_trainer.dataset.records import (
    REGULARISATION,
    Dataset,
    ImageRecord,
    Reference,
    finding,
)
from lora_trainer.dataset.reference_files import ReferenceFile
from lora_trainer.dataset.slider_file import is_slider_file, read_sliders
from lora_trainer.dataset.slider_pairs import paired
from lora_trainer.families.base.facts import BaseFacts
from lora_trainer.hardware.machine import GIB

MAX_REASONS = 100
# What sides rounded to pixels make of a ratio, at most.
MASK_ASPECT_TOLERANCE = 0.02
# Raise the number when what is kept of an image changes. Rows made with another Pillow are forgotten.
_MEMO_VERSION = f"8, Pillow {PIL.__version__}"
Value = TypeVar("Value")


class VerifiedImage(NamedTuple):
    """Facts of an image that decoded."""

    width_px: int
    height_px: int
    notes: tuple[str, ...]
    measures: Measures
    background: str
    """The colour behind its transparent parts; "" for an opaque image."""


class Remembered(Generic[Value]):
    """Values of a kind by the SHA-256 of the bytes that they were read from, in a table of the memo.

    Kept as JSON texts: of a hundred thousand, the lists in them would take 200 MB.
    """

    def __init__(self, kind: Any, folder: Path | None, name: str) -> None:
        self.kind: TypeAdapter[Value] = TypeAdapter(kind)
        self.table = MemoTable.load(folder, name, version=_MEMO_VERSION)

    def get(self, key: str) -> Value | None:
        """Return a value; None for one that must be read from the file."""
        text = self.table.get(key)
        return None if text is None else self.kind.validate_json(text)

    def put(self, key: str, value: Any) -> None:
        """Remember a value: a tuple of plain values."""
        self.table.put(key, json.dumps(value))


class DatasetMemo:
    """Hashes of files by name, and images, captions and masks by hash: of a cache folder, or in memory only."""

    @gc_disabled()
    def __init__(self, folder: Path | None = None) -> None:
        self.hashes = HashMemo(folder)
        self.images = Remembered[VerifiedImage](VerifiedImage, folder, "images")
        self.captions = Remembered[CaptionText](CaptionText, folder, "caption files")
        self.masks = Remembered[MaskFacts](MaskFacts, folder, "masks")

    def save(self) -> None:
        """Write the new rows; raises MachineError."""
        for table in (self.hashes.table, self.images.table, self.captions.table, self.masks.table):
            table.save()


# Kind of the findings about masks that cannot be used, which nobody wants to train without.
BAD_MASK = "bad-mask"
# Ends the memo's key of a caption inside an image, after the hash of the image's bytes.
_OF_IMAGE = " image text"

# The record of an image that can be used, and the findings about it; None and an error for others.
Inspected = tuple[ImageRecord | None, list[Finding]]


@dataclass(frozen=True, kw_only=True)
class Inspector:
    """Reads the images of a dataset: by its settings, with a memo, into the buckets of a base."""

    settings: DataSettings
    memo: DatasetMemo
    place_image: Place
    place_reference: PlaceReference

    def inspect(self, image: ImageFile) -> Inspected:
        """Hash and, unless these bytes are known, decode one image; read its caption file."""
        kind, name = "unusable", image.name
        try:
            content_hash = self.memo.hashes.sha256(image.file)
            whole = self._facts(image.path, content_hash)
            facts = self._facts(image.path, content_hash, image.crop) if image.crop else whole
            inside = self._caption_inside(image, content_hash)
            kind, name = BAD_MASK, image.mask_name or image.name
            mask = self._mask(image, whole, content_hash)
            placements = self.place_image(facts.width_px, facts.height_px)
            references, notes = [], []
            for file in image.references:
                kind, name = "unusable", file.name
                reference, about_it = self._reference(file, beside=placements)
                references.append(reference)
                notes += about_it
        except ImageDecodeError as error:
            words = {"what": error.reason, "advice": error.fix, "code": error.code}
            return None, [finding(kind, name, **words)]
        except OSError as error:
            return None, [finding(f"{kind}.unreadable", name, reason=error.strerror or error)]
        sidecar = self._sidecar(image)
        # The caption that counts is of its file, a table, the text inside the image, or a name.
        tables = [stand_in for stand_in in image.stand_ins if not stand_in.of_name]
        names = [stand_in for stand_in in image.stand_ins if stand_in.of_name]
        captions = (sidecar, *tables, inside, *names)
        caption = next((one for one in captions if one.text), CaptionText())
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
            recoloured=_is_recoloured(facts),
            crop=image.crop,
            whole_px=(whole.width_px, whole.height_px) if image.crop else None,
            measures=facts.measures,
            mask=mask,
            references=tuple(references),
            placements=placements,
        )
        findings = [
            finding(kind, image.name, what=what)
            for kind, _, what in (note.partition(": ") for note in facts.notes)
        ]
        findings += notes
        kind = "caption-text.json" if is_json(sidecar.source) else "caption-text"
        findings += [finding(kind, sidecar.source, problem=problem) for problem in sidecar.problems]
        if TRIGGER_PLACEHOLDER in caption.text and not settings.trigger:
            findings.append(finding("no-trigger", image.name))
        if caption is sidecar and any(table.text != caption.text for table in tables):
            words = {"used": caption.source, "unused": tables[0].source}
            findings.append(finding("two-captions.table", image.name, **words))
        return record, findings

    def _reference(
        self, file: ReferenceFile, *, beside: tuple[Placement, ...]
    ) -> tuple[Reference, list[Finding]]:
        """Hash and decode a reference image; raises OSError and ImageDecodeError for one that cannot be used."""
        content_hash = self.memo.hashes.sha256(file.file)
        facts = self._facts(Path(file.file), content_hash)
        reference = Reference(
            file=file.file,
            name=file.name,
            content_hash=content_hash,
            width_px=facts.width_px,
            height_px=facts.height_px,
            transparent=bool(facts.background),
            recoloured=_is_recoloured(facts),
            placements=self.place_reference(facts.width_px, facts.height_px, beside),
        )
        parts = (note.partition(": ") for note in facts.notes)
        return reference, [finding(kind, file.name, what=what) for kind, _, what in parts]

    def _facts(self, path: Path, content_hash: str, crop: Crop | None = None) -> VerifiedImage:
        key = content_hash if crop is None else f"{content_hash} {crop.name}"
        facts = self.memo.images.get(key)
        backgrounds, most = ("", self.settings.alpha_background), max_pixels(self.settings)
        if facts and facts.background in backgrounds and facts.width_px * facts.height_px <= most:
            return facts
        decoded = decode(path, settings=self.settings, content_hash=content_hash, crop=crop)
        background = "" if decoded.alpha is None else self.settings.alpha_background
        facts = VerifiedImage(
            *decoded.image.size, decoded.notes, measure(decoded.image), background
        )
        self.memo.images.put(key, facts)
        return facts

    def _caption_inside(self, image: ImageFile, content_hash: str) -> CaptionText:
        """Return the caption inside an image, if the settings ask for it."""
        if self.settings.caption_fallback != "metadata":
            return CaptionText()
        text = self.memo.captions.get(content_hash + _OF_IMAGE)
        if text is None:
            text = read_image_text(image.path, settings=self.settings, content_hash=content_hash)
            self.memo.captions.put(content_hash + _OF_IMAGE, text)
        return text._replace(source=IMAGE_TEXT)

    def _mask(self, image: ImageFile, facts: VerifiedImage, content_hash: str) -> Mask | None:
        """Return an image's mask, if it has one; raises OSError and ImageDecodeError for one that cannot be used."""
        if image.mask is not None:
            mask_hash = self.memo.hashes.sha256(image.mask)
            mask = Mask(path=image.mask, content_hash=mask_hash, of_alpha=False)
        elif self.settings.masks == "alpha" and facts.background:
            mask = Mask(path=image.path, content_hash=content_hash, of_alpha=True)
        else:
            return None
        of_whole = self._facts_of_mask(mask)
        width_px, height_px = of_whole.width_px, of_whole.height_px
        mask = replace(mask, crop=image.crop, image_px=(facts.width_px, facts.height_px))
        of_part = self._facts_of_mask(mask) if image.crop else of_whole
        _, _, brightest, meaning, is_framed = of_part
        allowed = MASK_ASPECT_TOLERANCE + 1 / min(width_px, height_px)
        if brightest == 0:
            reason = (
                "is transparent everywhere: nothing would be learned"
                if mask.of_alpha
                else "is black everywhere: nothing would be learned"
            )
            fix = "make visible what is to be learned, or remove it"
            if of_whole.brightest:
                reason = "shows nothing inside the crop of its image: nothing would be learned"
                fix = "move the crop to what the mask shows, or change the mask"
        elif abs(math.log(width_px * facts.height_px / (height_px * facts.width_px))) > allowed:
            shape = f"{facts.width_px}x{facts.height_px}"
            reason = f"is {width_px}x{height_px}, not of the shape of its image, {shape}"
            fix = "make it of the image as it is"
        else:
            return replace(mask, meaning=meaning, brightest=brightest, is_framed=is_framed)
        raise ImageDecodeError(mask.path, reason, code="IMG-04", fix=fix)

    def _facts_of_mask(self, mask: Mask) -> MaskFacts:
        key = mask.content_hash + " alpha" if mask.of_alpha else mask.content_hash
        if mask.crop is not None:
            key = f"{key} {mask.crop.name} of {mask.image_px}"
        facts = self.memo.masks.get(key)
        if facts is None:
            facts = facts_of(mask, settings=self.settings)
            self.memo.masks.put(key, facts)
        return facts

    def _sidecar(self, image: ImageFile) -> CaptionText:
        """Return the text of an image's caption file, an empty one without; its source is the file's name."""
        file, source = image.sidecar_file, image.sidecar_name or ""
        if file is None:
            return CaptionText()
        # The same bytes say another thing as JSON than as text.
        ending = JSON_SIDECAR if is_json(source) else ""
        try:
            text = self.memo.captions.get(self.memo.hashes.sha256(file) + ending)
            if text is None:
                with Path(file).open("rb") as opened:
                    data = opened.read(MAX_CAPTION_BYTES + 1)
                text = read_caption_file(source, data)
                # Under the hash of what was read: the file may have changed since it was hashed.
                self.memo.captions.put(sha256_bytes(data) + ending, text)
        except OSError as error:
            text = CaptionText(problems=(f"cannot be read ({error.strerror or error})",))
        return text._replace(source=source)


def _is_recoloured(facts: VerifiedImage) -> bool:
    """Say whether the image has other colours than it had before files' own spaces and depths were heeded."""
    return any(note.startswith(("icc: ", "depth: 12 ")) for note in facts.notes)


def _nowhere(
    _width_px: int, _height_px: int, _beside: tuple[Placement, ...] = ()
) -> tuple[Placement, ...]:
    """Return no place: no base is known."""
    return ()


def scan(
    folder: Path,
    *,
    settings: DataSettings,
    memo: DatasetMemo | None = None,
    place_image: Place = _nowhere,
    place_reference: PlaceReference = _nowhere,
) -> Dataset:
    """Read and check the dataset in `folder`; the caller saves `memo`.

    Raises InputError when a folder is missing, holds no images, or more than `data.max_bad_fraction` of them
    are unusable (the message names them all, each with its fix), and RequestError for a folder of regularisation
    images inside the dataset.
    """
    memo = memo or DatasetMemo()
    records, findings, fingerprint = _scan_folder(
        folder, settings, memo, place_image, place_reference
    )
    learned = tuple(one for one in records if not settings.is_regularisation(one.folder))
    if not learned:
        raise InputError(
            f"all images in {folder} are for regularisation, none is left to learn",
            fix="add the images to learn, or unmark a folder",
        )
    others = [one for one in records if settings.is_regularisation(one.folder)]
    if others:
        fingerprint = _joined(fingerprint, *sorted(record.name for record in others))
    if settings.regularisation_dir is not None:
        other_folder = Path(user_path(settings.regularisation_dir))
        if other_folder.resolve().is_relative_to(folder.resolve()):
            marking = f"--set data.folders.{other_folder.name}.regularisation=true"
            raise RequestError(
                f"data.regularisation_dir={other_folder} is inside the dataset folder",
                fix=f"{marking}, or move it elsewhere",
            )
        plain = settings.model_copy(
            update={"trigger": None, "folders": {}, "masks": "none", "references": "none"}
        )
        elsewhere, about_them, other = _scan_folder(other_folder, plain, memo, place_image)
        others += (
            replace(one, name=REGULARISATION + one.name, folder=REGULARISATION + one.folder)
            for one in elsewhere
        )
        findings += (
            replace(one, file=one.file and REGULARISATION + one.file) for one in about_them
        )
        fingerprint = _joined(fingerprint, other)
    regularisation = _numbered(
        [replace(one, regularisation=True, mask=None, references=()) for one in others]
    )
    original = {record.content_hash: record.name for record in learned}
    findings += [
        finding("regularisation", record.name, original=original[record.content_hash])
        for record in regularisation
        if record.content_hash in original
    ]
    return Dataset(
        folder=folder,
        records=learned,
        regularisation=regularisation,
        findings=by_severity(findings),
        fingerprint=fingerprint,
    )


def _joined(*fingerprints: str) -> str:
    return sha256_bytes(json_bytes(fingerprints))


@gc_disabled()
def _scan_folder(
    folder: Path,
    settings: DataSettings,
    memo: DatasetMemo,
    place_image: Place,
    place_reference: PlaceReference = _nowhere,
) -> tuple[tuple[ImageRecord, ...], list[Finding], str]:
    """Return the records of one folder, the findings about it and its fingerprint."""
    background_rgb(settings)
    listing = list_dataset(folder, settings=settings)
    findings, inspected = list(listing.findings), list[ImageRecord]()
    inspector = Inspector(
        settings=settings, memo=memo, place_image=place_image, place_reference=place_reference
    )
    # Hashing and decoding release the GIL; only a few images at a time, to bound the memory. Handing over
    # an image that the memo knows takes as long as the memo's answer, so many are handed over together,
    # and not neighbours: new images often have neighbouring names, which one thread would decode alone.
    pictures = listing.pictures
    count = -(-len(pictures) // max(1, min(64, len(pictures) // 16)))
    parts = [pictures[at::count] for at in range(count)]
    with ThreadPool(min(4, os.cpu_count() or 1)) as pool:
        results = pool.map(lambda part: list(map(inspector.inspect, part)), parts, chunksize=1)
    for at in range(len(pictures)):
        record, about_it = results[at % count][at // count]
        findings += about_it
        inspected += [record] if record else []
    bad = [finding for finding in findings if finding.severity == "error"]
    total = len(inspected) + len(bad)
    allowed = int(settings.max_bad_fraction * total + 1e-9)  # 0.29 * 100 is 28.999...
    if not inspected or len(bad) > allowed:
        reasons = [f"{shown(one.file or '')} {one.what}: {one.advice}" for one in bad]
        rest = len(bad) - MAX_REASONS
        limit = f"data.max_bad_fraction={settings.max_bad_fraction:g} allows {allowed}"
        # A training refuses a mask that cannot be used whatever that setting says.
        by_masks = any(one.kind == "bad-mask" for one in bad)
        raise InputError(
            f"{len(bad)} of {total} images in {shown(str(folder))} cannot be used, {limit}: "
            + "; ".join(reasons[:MAX_REASONS])
            + (f"; and {rest} more" if rest > 0 else ""),
            fix="replace or remove them"
            if by_masks
            else "replace or remove them, or raise data.max_bad_fraction to go on without them",
        )
    records, about_pairs = paired(_numbered(inspected), settings)
    findings += [*about_pairs, *findings_of(records, settings)]
    return records, findings, _fingerprint(records)


def _numbered(records: Sequence[ImageRecord]) -> tuple[ImageRecord, ...]:
    """Number the copies of equal bytes, in the order of their names, so that each has sample ids of its own."""
    copies: Counter[str] = Counter()
    numbered = []
    for record in records:
        copy = copies[record.content_hash]
        numbered.append(record if record.copy_index == copy else replace(record, copy_index=copy))
        copies[record.content_hash] += 1
    return tuple(numbered)


def _fingerprint(records: Sequence[ImageRecord]) -> str:
    """Return the SHA-256 of everything that training reads, equal to the one of `json_bytes` of the sorted rows."""
    rows = sorted(
        (
            *(record.content_hash, record.copy_index, record.caption, record.repeats),
            # A caption's text beyond the plain one: other lines, other alternatives, marks.
            *record.written,
            *(_name_of_mask(record.mask) if record.mask else ()),
            *([f"crop {record.crop.name}"] if record.crop else []),
            *(f"reference {one.content_hash}" for one in record.references),
            *([f"at {record.strength:g} of {record.pair}"] if record.pair else []),
        )
        for record in records
    )
    digest, encode = hashlib.sha256(), json.JSONEncoder(ensure_ascii=False).encode
    # Row by row: one text of all rows of a large dataset takes hundreds of megabytes. The lines are those of
    # `json_bytes`, whose indenting encoder takes four times as long.
    for index, row in enumerate(rows):
        lines = ",\n    ".join(map(encode, row))
        digest.update(f"{',' if index else '['}\n  [\n    {lines}\n  ]".encode())
    digest.update(b"\n]\n")
    return digest.hexdigest()


def _name_of_mask(mask: Mask) -> Iterator[str]:
    """Yield what names a mask and, where that is not its brightness, how it is read."""
    yield mask.content_hash
    if mask.channel not in ("alpha", "brightness"):
        yield mask.channel


def cache_folder(data: DataSettings) -> Path:
    """Return the cache root from the setting, or the platform's folder for caches."""
    return user_cache_folder() if data.cache_dir == "auto" else Path(user_path(data.cache_dir))


def cache_in(data: DataSettings) -> CappedFolder:
    """Return the cache with its size cap."""
    return CappedFolder(root=cache_folder(data), limit_bytes=int(data.cache_max_gib * GIB))


def read_dataset(
    folder: Path, data: DataSettings, facts: BaseFacts, *, checks_only: bool = False
) -> Dataset:
    """Scan a dataset for a base, skipping images whose check the cache folder's memo has already.

    Reference images are left aside for a base that reads none, unless the dataset is only checked. A file of a slider
    is a dataset without images.
    """
    if is_slider_file(folder):
        words = read_sliders(folder)
        fingerprint = sha256_bytes(json_bytes([asdict(each) for each in words.directions]))
        return Dataset(
            folder=folder,
            records=(),
            findings=tuple(
                finding("foreign-slider", trainer=words.trainer, what=note) for note in words.notes
            ),
            fingerprint=fingerprint,
            directions=words.directions,
        )
    memo = DatasetMemo(cache_folder(data))
    if facts.references is None and not checks_only:
        data = data.model_copy(update={"references": "none"})
    dataset = scan(
        folder,
        settings=data,
        memo=memo,
        place_image=placing(data, resolution_px=facts.resolution_px, step_px=facts.bucket_step_px),
        place_reference=placing_references(data, facts=facts),
    )
    memo.save()
    return dataset
