"""From a folder of images to checked records, some of them held out for validation.

Every image is decoded once, unless the memo has its bytes; captions are read and the trigger is put in. Nothing is
written to the folder. The output is a `Dataset`, the same for any order of the files. The images held out for the
validation loss are drawn by content, so file names do not matter.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path

from lora_trainer.common.errors import InputError
from lora_trainer.common.findings import Finding as Finding
from lora_trainer.common.findings import by_severity, shown
from lora_trainer.common.gc_control import gc_disabled
from lora_trainer.common.memo import HashMemo
from lora_trainer.common.randomness import Stream, shuffled
from lora_trainer.config.config import DataSettings
from lora_trainer.dataset.caption_rules import plain_text
from lora_trainer.dataset.dataset_checks import (
    caption_findings,
    duplicates,
    image_findings,
    unread_marks,
    without_caption,
    without_mask,
)
from lora_trainer.dataset.decode_memo import DecodeMemo
from lora_trainer.dataset.images import background_rgb
from lora_trainer.dataset.inspect_image import BAD_MASK as BAD_MASK
from lora_trainer.dataset.inspect_image import InspectedImage, inspect_image, known
from lora_trainer.dataset.listing import ImageFile, list_dataset
from lora_trainer.dataset.records import Dataset as Dataset
from lora_trainer.dataset.records import ImageRecord as ImageRecord

MAX_REASONS = 100


def scan(
    folder: Path, *, settings: DataSettings, memo: HashMemo, verified: DecodeMemo | None = None
) -> Dataset:
    """Read and check the dataset in `folder`; the caller saves `memo` and `verified`.

    Raises InputError when the folder is missing, holds no images, or more than
    `data.max_bad_fraction` of them are unusable (the message names them all, each with its fix).
    """
    background_rgb(settings)
    listing = list_dataset(folder, settings=settings)
    remembered = DecodeMemo() if verified is None else verified
    results = _looked_into(listing.pictures, settings=settings, memo=memo, verified=remembered)
    usable = [result for result in results if isinstance(result, InspectedImage)]
    findings = [*listing.findings, *(result for result in results if isinstance(result, Finding))]
    _refuse_too_many_bad(folder, findings, good=len(usable), settings=settings)
    with gc_disabled():
        records = tuple(_records(usable, settings))
        findings += image_findings(usable)
        findings += caption_findings(usable, settings)
        findings += duplicates(records)
        findings += without_caption(records, settings)
        findings += unread_marks(records, settings)
        findings += without_mask(records, settings)
    return Dataset(
        folder=folder,
        records=records,
        findings=by_severity(findings),
        fingerprint=_fingerprint(records),
    )


def _looked_into(
    pictures: Sequence[ImageFile],
    *,
    settings: DataSettings,
    memo: HashMemo,
    verified: DecodeMemo,
) -> list[InspectedImage | Finding]:
    """Return each image's facts, or the finding in place of an unusable image, in their order."""
    with gc_disabled():
        results: list[InspectedImage | Finding | None] = [
            known(picture, settings=settings, memo=memo, verified=verified) for picture in pictures
        ]
    to_read = [index for index, result in enumerate(results) if result is None]
    work = partial(inspect_image, settings=settings, memo=memo, verified=verified)
    # Hashing and decoding release the GIL; only a few images at a time, to bound the memory.
    with ThreadPool(min(4, os.cpu_count() or 1)) as pool:
        read = pool.map(work, [pictures[index] for index in to_read], chunksize=4)
    for index, result in zip(to_read, read, strict=True):
        results[index] = result
    return [result for result in results if result is not None]


def _refuse_too_many_bad(
    folder: Path, findings: Sequence[Finding], *, good: int, settings: DataSettings
) -> None:
    bad = [finding for finding in findings if finding.severity == "error"]
    total = good + len(bad)
    allowed = int(settings.max_bad_fraction * total + 1e-9)  # 0.29 * 100 is 28.999...
    if good and len(bad) <= allowed:
        return
    reasons = [f"{shown(finding.file or '')} {finding.what}: {finding.advice}" for finding in bad]
    rest = len(bad) - MAX_REASONS
    limit = f"data.max_bad_fraction={settings.max_bad_fraction:g} allows {allowed}"
    raise InputError(
        f"{len(bad)} of {total} images in {shown(str(folder))} cannot be used, {limit}: "
        + "; ".join(reasons[:MAX_REASONS])
        + (f"; and {rest} more" if rest > 0 else ""),
        fix="replace or remove them, or raise data.max_bad_fraction to go on without them",
    )


def _records(usable: Sequence[InspectedImage], settings: DataSettings) -> Iterator[ImageRecord]:
    copies: Counter[str] = Counter()
    for item in usable:  # sorted by name, so copies are numbered by name
        folder_settings = settings.of_folder(item.picture.folder)
        caption = item.caption
        written = (
            caption.lines
            if folder_settings.caption_lines == "one" and caption.lines
            else (caption.text,)
        )
        yield ImageRecord(
            file=item.picture.file,
            name=item.picture.name,
            content_hash=item.content_hash,
            width_px=item.image.width_px,
            height_px=item.image.height_px,
            folder=item.picture.folder,
            written=written,
            caption=plain_text(written, settings=folder_settings),
            caption_source=caption.source or None,
            repeats=item.picture.repeats,
            copy_index=copies[item.content_hash],
            transparent=bool(item.image.background),
            measures=item.image.measures,
            mask=item.mask,
        )
        copies[item.content_hash] += 1


def _fingerprint(records: Sequence[ImageRecord]) -> str:
    """Return the SHA-256 of everything that training reads, equal to the one of `json_bytes` of the sorted rows.

    Hashed row by row: one text of all rows of a large dataset takes longer and hundreds of megabytes.
    """
    rows = sorted(
        (
            *(record.content_hash, record.copy_index, record.caption, record.repeats),
            # A caption's text beyond the plain one: other lines, other alternatives, marks.
            *record.written,
            *([record.mask.content_hash] if record.mask else ()),
        )
        for record in records
    )
    encoded = json.JSONEncoder(ensure_ascii=False).encode
    digest, opening = hashlib.sha256(), "[\n"
    for row in rows:
        values = ",\n    ".join(map(encoded, row))
        digest.update(f"{opening}  [\n    {values}\n  ]".encode())
        opening = ",\n"
    digest.update(b"\n]\n")
    return digest.hexdigest()


def hold_out(
    records: Sequence[ImageRecord], *, fraction: float, seed: int
) -> tuple[tuple[ImageRecord, ...], tuple[ImageRecord, ...]]:
    """Split records into (trained, held out), the second `fraction` of all, rounded down.

    Files with identical bytes stay on one side, so that no held-out image is ever trained.
    """
    contents = shuffled({record.content_hash for record in records}, seed, Stream.VALIDATION_SPLIT)
    held_out = frozenset(contents[: int(fraction * len(contents))])
    trained = tuple(record for record in records if record.content_hash not in held_out)
    return trained, tuple(record for record in records if record.content_hash in held_out)
