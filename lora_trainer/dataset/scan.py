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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing.pool import ThreadPool
from pathlib import Path

from lora_trainer.common.caption_markup import has_choice
from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.common.events import Finding, by_severity, shown
from lora_trainer.common.files import CappedFolder, json_bytes, sha256_bytes, user_cache_folder
from lora_trainer.common.processes import gc_disabled
from lora_trainer.config.inputs import DataSettings
from lora_trainer.config.running import Config
from lora_trainer.dataset.buckets import Place, buckets_for, placing
from lora_trainer.dataset.captions import FILE_NAME, FOLDER_NAME, caption_of_name
from lora_trainer.dataset.images import ImageDecodeError, background_rgb
from lora_trainer.dataset.inspect_image import (
    IMAGE_TEXT,
    DatasetMemo,
    Inspected,
    Inspector,
    read_image_text,
)
from lora_trainer.dataset.listing import ImageFile, list_dataset
from lora_trainer.dataset.records import Dataset, ImageRecord, finding, finding_of_all
from lora_trainer.families.facts import BaseFacts
from lora_trainer.hardware.machine import GIB

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
    dataset = _scan_folder(folder, settings, memo, place_image)
    findings, fingerprint = list(dataset.findings), dataset.fingerprint
    learned = tuple(one for one in dataset.records if not settings.is_regularisation(one.folder))
    if not learned:
        raise InputError(
            f"all images in {folder} are for regularisation, none is left to learn",
            fix="add the images to learn, or unmark a folder",
        )
    others = [one for one in dataset.records if settings.is_regularisation(one.folder)]
    if others:
        fingerprint = _joined(fingerprint, *sorted(record.name for record in others))
    if settings.regularisation_dir is not None:
        elsewhere = _scan_elsewhere(folder, settings, memo, place_image)
        others += elsewhere.records
        findings += elsewhere.findings
        fingerprint = _joined(fingerprint, elsewhere.fingerprint)
    regularisation = _numbered([replace(one, regularisation=True, mask=None) for one in others])
    original = {record.content_hash: record.name for record in learned}
    findings += [
        finding("regularisation", record.name, original=original[record.content_hash])
        for record in regularisation
        if record.content_hash in original
    ]
    return replace(
        dataset,
        records=learned,
        regularisation=regularisation,
        findings=by_severity(findings),
        fingerprint=fingerprint,
    )


def _scan_elsewhere(
    folder: Path, settings: DataSettings, memo: DatasetMemo, place_image: Place
) -> Dataset:
    """Scan `data.regularisation_dir`; names of its images begin with `REGULARISATION`."""
    other_folder = Path(settings.regularisation_dir or "").expanduser()
    if other_folder.resolve().is_relative_to(folder.resolve()):
        raise RequestError(
            f"data.regularisation_dir={other_folder} lies in the dataset",
            fix=f"--set data.folders.{other_folder.name}.regularisation=true, or move it elsewhere",
        )
    plain = settings.model_copy(update={"trigger": None, "folders": {}, "masks": "none"})
    dataset = _scan_folder(other_folder, plain, memo, place_image)
    records = (
        replace(record, name=REGULARISATION + record.name, folder=REGULARISATION + record.folder)
        for record in dataset.records
    )
    findings = (
        replace(finding, file=finding.file and REGULARISATION + finding.file)
        for finding in dataset.findings
    )
    return replace(dataset, records=tuple(records), findings=tuple(findings))


def _joined(*fingerprints: str) -> str:
    return sha256_bytes(json_bytes(fingerprints))


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
        results = {image.file: inspector.inspect(image) for image in images}
    new = [image for image in images if results[image.file] is None]
    reader = replace(inspector, may_read=True)
    # Hashing and decoding release the GIL; only a few images at a time, to bound the memory.
    with ThreadPool(min(4, os.cpu_count() or 1)) as pool:
        read = pool.map(reader.inspect, new, chunksize=4)
    results.update(zip((image.file for image in new), read, strict=True))
    return [result for result in results.values() if result is not None]


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


_STAND_INS = {
    FOLDER_NAME: "their folder's name",
    FILE_NAME: "their file's name",
    IMAGE_TEXT: "the text inside the image",
}
_MARKS: Mapping[str, tuple[Callable[[str], bool], Callable[[DataSettings], bool], str]] = {
    "{a|b}": (has_choice, lambda data: data.wildcards, "data.wildcards=true"),
    "|||": (
        lambda text: "|||" in text,
        lambda data: data.keep_tokens_separator is not None,
        "'data.keep_tokens_separator=|||'",
    ),
}
"""Marks that other trainers read: whether a text has one, whether the settings read it, the setting."""
_MAX_IMAGES_READ = 5
_EXAMPLE_CHARACTERS = 60


def findings_of(records: Sequence[ImageRecord], settings: DataSettings) -> Iterator[Finding]:
    """Yield what is odd about the images together."""
    first: dict[str, str] = {}
    for record in records:
        original = first.setdefault(record.content_hash, record.name)
        if original != record.name:
            yield finding("duplicate", record.name, original=original)
    names = [record.name for record in records if record.caption_source is None]
    others = _other_captions(records, settings) if len(names) == len(records) else ""
    yield from finding_of_all("no-caption", names, all=len(records), others=others)
    for source, words in _STAND_INS.items():
        names = [record.name for record in records if record.caption_source == source]
        yield from finding_of_all("no-caption.stand-in", names, all=len(records), source=words)
    # Marks that are trained as words, because no setting reads them.
    for mark, (is_in, is_read, setting) in _MARKS.items():
        names = [
            record.name
            for record in records
            if any(map(is_in, record.written)) and not is_read(settings.of_folder(record.folder))
        ]
        yield from finding_of_all("unread-marks", names, mark=mark, setting=setting)
    if settings.masks != "none":
        learned = [one for one in records if not settings.is_regularisation(one.folder)]
        names = [record.name for record in learned if record.mask is None]
        lack = "no mask" if settings.masks == "files" else "no transparent part"
        yield from finding_of_all("no-mask", names, all=len(learned), lack=lack)


def _other_captions(records: Sequence[ImageRecord], settings: DataSettings) -> str:
    """Return the setting that finds captions where nobody wrote any, with an example; "" if none does."""
    if settings.caption_fallback != "none":
        return ""
    for record in records[:_MAX_IMAGES_READ]:
        try:
            text = read_image_text(record.path, settings=settings, content_hash=record.content_hash)
        except ImageDecodeError:  # it has changed since it was checked; training will name it
            continue
        if text.text:
            example = f'(in {record.name}: "{text.text[:_EXAMPLE_CHARACTERS]}")'
            return f", or --set data.caption_fallback=metadata for the text inside them {example}"
    words = next((caption_of_name(one.name) for one in records), "")
    if " " in words and not any(character.isdigit() for character in words):
        example = f'("{words[:_EXAMPLE_CHARACTERS]}")'
        return f", or --set data.caption_fallback=file_name for their names {example}"
    return ""


def cache_folder(config: Config) -> Path:
    """Return the cache root from the setting, or the platform's folder for caches."""
    if config.data.cache_dir != "auto":
        return Path(config.data.cache_dir).expanduser()
    return user_cache_folder()


def cache_in(config: Config) -> CappedFolder:
    """Return the cache with its size cap."""
    limit_bytes = int(config.data.cache_max_gib * GIB)
    return CappedFolder(root=cache_folder(config), limit_bytes=limit_bytes)


def read_dataset(folder: Path, config: Config, facts: BaseFacts) -> Dataset:
    """Scan a dataset for a base, skipping images whose check the cache folder's memo has already."""
    memo = DatasetMemo(cache_folder(config))
    place_image = placing(
        config.data, resolution_px=facts.resolution_px, step_px=facts.bucket_step_px
    )
    dataset = scan(folder, settings=config.data, memo=memo, place_image=place_image)
    memo.save()
    return dataset


def bucket_bounds(config: Config, facts: BaseFacts) -> tuple[int, int] | None:
    """Return the shortest and the longest side in pixels of all buckets at `data.resolution`; None without buckets."""
    if not config.data.buckets:
        return None
    resolution = config.data.resolution
    buckets = buckets_for(
        resolution_px=facts.resolution_px if resolution == "auto" else resolution,
        step_px=facts.bucket_step_px,
        max_aspect=config.data.max_aspect,
    )
    sides = [side for bucket in buckets for side in (bucket.width_px, bucket.height_px)]
    return min(sides), max(sides)
