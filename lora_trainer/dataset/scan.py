"""From a folder of images to checked records, with the images for regularisation told apart.

Every image is decoded once, unless the memo has its bytes; captions are read and the trigger is put in. Nothing is
written to the folder. The output is a `Dataset`, the same for any order of the files.

Images for regularisation are other images of the class, trained along so that training does not change the class.
They lie in a folder of their own (`data.regularisation_dir`) or in a subfolder of the dataset that is marked
(`data.folders.NAME.regularisation`). They get no trigger and no mask, are not held out for validation, and do not
count in the dataset's score.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.pool import ThreadPool
from pathlib import Path

from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.common.events import Finding, by_severity, shown
from lora_trainer.common.files import json_bytes, sha256_bytes
from lora_trainer.common.processes import gc_disabled
from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset.buckets import Place
from lora_trainer.dataset.dataset_checks import findings_of
from lora_trainer.dataset.decode_memo import DatasetMemo
from lora_trainer.dataset.finding_texts import finding
from lora_trainer.dataset.images import background_rgb
from lora_trainer.dataset.inspect_image import Inspected, Inspector
from lora_trainer.dataset.listing import ImageFile, list_dataset
from lora_trainer.dataset.records import Dataset, ImageRecord

REGULARISATION = "regularisation:"
"""Begins the names of images in a folder of their own, so that none is like one of the dataset."""
MAX_REASONS = 100


def scan(
    folder: Path,
    *,
    settings: DataSettings,
    memo: DatasetMemo | None = None,
    place_image: Place = lambda _width_px, _height_px: (),
) -> Dataset:
    """Read and check the dataset in `folder`; the caller saves `memo`.

    Raises InputError when a folder is missing, holds no images, or more than `data.max_bad_fraction` of them
    are unusable (the message names them all, each with its fix), and RequestError for a folder of regularisation
    images inside the dataset.
    """
    memo = memo or DatasetMemo()
    dataset = _told_apart(_scan_folder(folder, settings, memo, place_image), settings)
    if settings.regularisation_dir is not None:
        other_folder = Path(settings.regularisation_dir).expanduser()
        if other_folder.resolve().is_relative_to(folder.resolve()):
            raise RequestError(
                f"data.regularisation_dir={other_folder} lies in the dataset",
                fix=f"--set data.folders.{other_folder.name}.regularisation=true, or move it elsewhere",
            )
        plain = settings.model_copy(update={"trigger": None, "folders": {}, "masks": "none"})
        dataset = _joined(dataset, _scan_folder(other_folder, plain, memo, place_image))
    learned = {record.content_hash: record.name for record in dataset.records}
    twice = [
        finding("regularisation", record.name, original=learned[record.content_hash])
        for record in dataset.regularisation
        if record.content_hash in learned
    ]
    return replace(dataset, findings=by_severity((*dataset.findings, *twice)))


def _scan_folder(
    folder: Path, settings: DataSettings, memo: DatasetMemo, place_image: Place
) -> Dataset:
    background_rgb(settings)
    listing = list_dataset(folder, settings=settings)
    findings, inspected = list(listing.findings), list[ImageRecord]()
    for record, about_it in _inspected(listing.pictures, settings, memo, place_image):
        findings += about_it
        inspected += [record] if record else []
    _refuse_too_many_bad(folder, findings, good=len(inspected), settings=settings)
    with gc_disabled():
        records = _numbered(inspected)
        findings += findings_of(records, settings)
    return Dataset(
        folder=folder,
        records=records,
        findings=by_severity(findings),
        fingerprint=_fingerprint(records),
    )


def _inspected(
    images: Sequence[ImageFile], settings: DataSettings, memo: DatasetMemo, place_image: Place
) -> list[Inspected]:
    """Return each image's record and findings, in their order."""
    inspector = Inspector(settings=settings, memo=memo, place_image=place_image, may_read=False)
    with gc_disabled():
        results = [inspector.inspect(image) for image in images]
    to_read = [index for index, result in enumerate(results) if result is None]
    reader = replace(inspector, may_read=True)
    # Hashing and decoding release the GIL; only a few images at a time, to bound the memory.
    with ThreadPool(min(4, os.cpu_count() or 1)) as pool:
        read = pool.map(reader.inspect, [images[index] for index in to_read], chunksize=4)
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


def _numbered(records: Sequence[ImageRecord]) -> tuple[ImageRecord, ...]:
    """Number the copies of equal bytes, in the order of their names, so that each has sample ids of its own."""
    copies: Counter[str] = Counter()
    numbered = []
    for record in records:
        copy = copies[record.content_hash]
        numbered.append(record if record.copy_index == copy else replace(record, copy_index=copy))
        copies[record.content_hash] += 1
    return tuple(numbered)


def _told_apart(dataset: Dataset, settings: DataSettings) -> Dataset:
    """Move images of folders that are marked out of the images to learn."""
    marked = [one for one in dataset.records if settings.is_regularisation(one.folder)]
    if not marked:
        return dataset
    learned = tuple(one for one in dataset.records if not settings.is_regularisation(one.folder))
    if not learned:
        raise InputError(
            f"all images in {dataset.folder} are for regularisation, none is left to learn",
            fix="add the images to learn, or unmark a folder",
        )
    names = sorted(record.name for record in marked)
    return replace(
        dataset,
        records=learned,
        regularisation=_for_regularisation(marked),
        fingerprint=sha256_bytes(json_bytes([dataset.fingerprint, *names])),
    )


def _joined(dataset: Dataset, other: Dataset) -> Dataset:
    """Add the images of a folder of their own."""
    more = [
        replace(record, name=REGULARISATION + record.name, folder=REGULARISATION + record.folder)
        for record in other.records
    ]
    findings = [
        replace(finding, file=None if finding.file is None else REGULARISATION + finding.file)
        for finding in other.findings
    ]
    return replace(
        dataset,
        regularisation=_for_regularisation([*dataset.regularisation, *more]),
        findings=(*dataset.findings, *findings),
        fingerprint=sha256_bytes(json_bytes([dataset.fingerprint, other.fingerprint])),
    )


def _for_regularisation(records: Sequence[ImageRecord]) -> tuple[ImageRecord, ...]:
    return _numbered([replace(record, regularisation=True, mask=None) for record in records])


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
