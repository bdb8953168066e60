"""Regularisation images: other images of the class, trained along so that training does not change the class.

They lie in a folder of their own (`data.regularisation_dir`) or in a subfolder of the dataset that is marked
(`data.folders.NAME.regularisation`). They get no trigger and no mask, are not held out for validation, and do not
count in the dataset's score.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.common.files import json_bytes, sha256_bytes
from lora_trainer.common.findings import Finding, by_severity, warning
from lora_trainer.common.memo import HashMemo
from lora_trainer.config.config import DataSettings
from lora_trainer.dataset.decode_memo import DecodeMemo
from lora_trainer.dataset.scan import Dataset, ImageRecord, scan

PREFIX = "regularisation:"
"""Begins the names of images in a folder of their own, so that none is like one of the dataset."""


def scan_all(
    folder: Path, *, settings: DataSettings, memo: HashMemo, verified: DecodeMemo | None = None
) -> Dataset:
    """Return the dataset with its regularisation images told apart; raises as `scan`.

    Raises RequestError for a folder of regularisation images inside the dataset.
    """
    dataset = _told_apart(scan(folder, settings=settings, memo=memo, verified=verified), settings)
    if settings.regularisation_dir is not None:
        regularisation_dir = Path(settings.regularisation_dir).expanduser()
        if regularisation_dir.resolve().is_relative_to(folder.resolve()):
            raise RequestError(
                f"data.regularisation_dir={regularisation_dir} lies in the dataset",
                fix=f"--set data.folders.{regularisation_dir.name}.regularisation=true, or move it elsewhere",
            )
        plain = settings.model_copy(update={"trigger": None, "folders": {}, "masks": "none"})
        other = scan(regularisation_dir, settings=plain, memo=memo, verified=verified)
        dataset = _joined(dataset, other)
    twice = _trained_too(dataset)
    return replace(dataset, findings=by_severity((*dataset.findings, *twice)))


def _told_apart(dataset: Dataset, settings: DataSettings) -> Dataset:
    regularisation = [
        record for record in dataset.records if settings.is_regularisation(record.folder)
    ]
    if not regularisation:
        return dataset
    learned = tuple(
        record for record in dataset.records if not settings.is_regularisation(record.folder)
    )
    if not learned:
        raise InputError(
            f"all images in {dataset.folder} are for regularisation, none is left to learn",
            fix="add the images to learn, or unmark a folder",
        )
    return replace(
        dataset,
        records=learned,
        regularisation=_numbered(regularisation),
        fingerprint=_combined(
            dataset.fingerprint, sorted(record.name for record in regularisation)
        ),
    )


def _joined(dataset: Dataset, other: Dataset) -> Dataset:
    more = [
        replace(record, name=f"{PREFIX}{record.name}", folder=f"{PREFIX}{record.folder}")
        for record in other.records
    ]
    findings = [
        replace(finding, file=None if finding.file is None else f"{PREFIX}{finding.file}")
        for finding in other.findings
    ]
    return replace(
        dataset,
        regularisation=_numbered([*dataset.regularisation, *more]),
        findings=(*dataset.findings, *findings),
        fingerprint=_combined(dataset.fingerprint, [other.fingerprint]),
    )


def _numbered(records: Sequence[ImageRecord]) -> tuple[ImageRecord, ...]:
    """Mark records as regularisation and number those of equal bytes, so that each has ids of its own."""
    copies: Counter[str] = Counter()
    numbered = []
    for record in records:
        copy = copies[record.content_hash]
        numbered.append(replace(record, regularisation=True, copy_index=copy, mask=None))
        copies[record.content_hash] += 1
    return tuple(numbered)


def _trained_too(dataset: Dataset) -> list[Finding]:
    learned = {record.content_hash: record.name for record in dataset.records}
    advice = "remove one: it is learned and held back at once"
    return [
        warning(
            "regularisation",
            record.name,
            f"is for regularisation and the same file as {learned[record.content_hash]}",
            advice=advice,
        )
        for record in dataset.regularisation
        if record.content_hash in learned
    ]


def _combined(fingerprint: str, more: Sequence[str]) -> str:
    return sha256_bytes(json_bytes([fingerprint, *more]))
