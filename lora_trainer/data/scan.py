"""The preflight: from a dataset folder to checked records, with everything odd about it named.

Every picture is decoded once, unless its bytes were before; captions are read and the trigger is
put in. The folder is never written to. The output is a `Dataset`, the same whatever the file order.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path

from lora_trainer.caption_markup import has_choice
from lora_trainer.config import OWN_FOLDER, DataSettings
from lora_trainer.data.caption_rules import plain_text
from lora_trainer.data.captions import (
    MAX_CAPTION_BYTES,
    TRIGGER_PLACEHOLDER,
    CaptionText,
    read_caption,
)
from lora_trainer.data.faults import ImageFault
from lora_trainer.data.findings import Finding as Finding
from lora_trainer.data.findings import (
    Severity,
    by_severity,
    named,
    note,
    shown,
    unusable,
    warning,
)
from lora_trainer.data.images import VerifiedImage, VerifiedImages, background_rgb, verify
from lora_trainer.data.listing import (
    FOLDER_NAME,
    MAX_REPEATS,
    GivenCaption,
    ListedPicture,
    list_dataset,
)
from lora_trainer.data.masks import Mask, check_mask
from lora_trainer.data.measures import Measures
from lora_trainer.errors import InputError
from lora_trainer.files import HashMemo, json_bytes, sha256_bytes

# What decoding had to do to a picture: severity, case in FAULTS, advice.
_NOTES: Mapping[str, tuple[Severity, str, str]] = {
    "alpha": ("note", "IMG-04", "set data.alpha_background if another colour suits the subject"),
    "animated": ("warning", "IMG-06", "export the frames you want as single pictures"),
    "cmyk": ("note", "IMG-05", "nothing to do"),
    "cmyk-profile": ("warning", "IMG-05", "compare the colours, or save it as RGB"),
    "depth": ("note", "IMG-05", "nothing to do"),
    "exif": ("note", "IMG-03", "check that it stands upright"),
}
MAX_REASONS = 100
BAD_MASK = "bad-mask"
"""Kind of the findings about masks that cannot be used, which nobody wants to train without."""


@dataclass(frozen=True, kw_only=True)
class ImageRecord:
    """One usable picture: its captions as they are written, and the one it is shown and validated with.

    `folder` is the subfolder it lies in, `.` for none: `data.folders` may say more of it. `copy_index`
    numbers files with identical bytes by name, so that (content_hash, copy_index, repeat) names a
    sample. `transparent`: its pixels depend on `data.alpha_background`.
    """

    path: Path
    name: str
    content_hash: str
    width_px: int
    height_px: int
    written: tuple[str, ...]
    caption: str
    caption_source: str | None
    repeats: int
    copy_index: int
    folder: str = OWN_FOLDER
    transparent: bool = False
    measures: Measures | None = None
    mask: Mask | None = None
    regularisation: bool = False

    def settings(self, data: DataSettings) -> DataSettings:
        """Return the settings of its folder; a picture for regularisation has no trigger."""
        own = data.of_folder(self.folder)
        return own.model_copy(update={"trigger": None}) if self.regularisation else own

    def sample_ids(self) -> list[str]:
        """Return one id per repeat, unique in the dataset and independent of file order."""
        first, kind = self.copy_index * MAX_REPEATS, "r" if self.regularisation else ""
        name = self.content_hash[:32]
        return [f"{name}-{kind}{first + repeat}" for repeat in range(self.repeats)]


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """The usable pictures of a folder by name, what is odd, and a hash of what is trained.

    `regularisation` are those beside them that keep the class as it is.
    """

    folder: Path
    records: tuple[ImageRecord, ...]
    findings: tuple[Finding, ...]
    fingerprint: str
    regularisation: tuple[ImageRecord, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Examined:
    picture: ListedPicture
    content_hash: str
    image: VerifiedImage
    sidecar: CaptionText | None
    mask: Mask | None


def scan(
    folder: Path, *, settings: DataSettings, memo: HashMemo, verified: VerifiedImages | None = None
) -> Dataset:
    """Read and check the dataset in `folder`; the caller saves `memo` and `verified`.

    Raises InputError when the folder is missing, holds no pictures, or more than
    `data.max_bad_fraction` of them are unusable (the message names them all, each with its fix).
    """
    background_rgb(settings)
    listing = list_dataset(folder, settings=settings)
    known = VerifiedImages() if verified is None else verified
    work = partial(_examine, settings=settings, memo=memo, verified=known)
    # Hashing and decoding release the GIL; only a few pictures at a time, to bound the memory.
    with ThreadPool(min(4, os.cpu_count() or 1)) as pool:
        results = pool.map(work, listing.pictures, chunksize=4)
    examined = [result for result in results if isinstance(result, _Examined)]
    findings = [*listing.findings, *(result for result in results if isinstance(result, Finding))]
    _refuse_too_many_bad(folder, findings, good=len(examined), settings=settings)
    records = tuple(_records(examined, settings))
    findings += _image_findings(examined)
    findings += _caption_findings(examined, settings)
    findings += _duplicates(records)
    findings += _without_caption(records)
    findings += _unread_marks(records, settings)
    findings += _without_mask(records, settings)
    return Dataset(
        folder=folder,
        records=records,
        findings=by_severity(findings),
        fingerprint=_fingerprint(records),
    )


def _examine(
    picture: ListedPicture, *, settings: DataSettings, memo: HashMemo, verified: VerifiedImages
) -> _Examined | Finding:
    """Hash and, unless these bytes are known, decode one picture; read its caption file."""
    try:
        content_hash = memo.sha256(picture.path)
        image = verified.image(content_hash, settings=settings)
        if image is None:
            image = verify(picture.path, settings=settings, content_hash=content_hash)
            verified.add_image(content_hash, image)
    except ImageFault as fault:
        return unusable(picture.name, fault.reason, advice=fault.fix, code=fault.code)
    except OSError as error:
        reason = f"cannot be read ({error.strerror or error})"
        return unusable(picture.name, reason, advice="make it readable", code="IMG-09")
    try:
        mask = _mask(picture, image, content_hash=content_hash, settings=settings, memo=memo)
        if mask is not None:
            check_mask(mask, image, settings=settings, verified=verified)
    except ImageFault as fault:
        return _bad_mask(picture, fault.reason, advice=fault.fix, code=fault.code)
    except OSError as error:
        reason = f"cannot be read ({error.strerror or error})"
        return _bad_mask(picture, reason, advice="make it readable or remove it", code="IMG-09")
    sidecar = None if picture.sidecar is None else _sidecar(picture.sidecar, memo, verified)
    return _Examined(
        picture=picture, content_hash=content_hash, image=image, sidecar=sidecar, mask=mask
    )


def _mask(
    picture: ListedPicture,
    image: VerifiedImage,
    *,
    content_hash: str,
    settings: DataSettings,
    memo: HashMemo,
) -> Mask | None:
    """Return where a picture's mask is, if it has one; raises OSError for a file that cannot be read."""
    if picture.mask is not None:
        return Mask(path=picture.mask, content_hash=memo.sha256(picture.mask), of_alpha=False)
    if settings.masks == "alpha" and image.background:
        return Mask(path=picture.path, content_hash=content_hash, of_alpha=True)
    return None


def _bad_mask(picture: ListedPicture, reason: str, *, advice: str, code: str) -> Finding:
    return Finding(
        kind=BAD_MASK,
        severity="error",
        file=picture.mask_name or picture.name,
        what=reason,
        advice=advice,
        code=code,
    )


def _sidecar(path: Path, memo: HashMemo, verified: VerifiedImages) -> CaptionText:
    try:
        known = verified.caption(memo.sha256(path))
        if known is not None:
            return known
        with path.open("rb") as file:
            data = file.read(MAX_CAPTION_BYTES + 1)
    except OSError as error:
        return CaptionText(text="", problems=(f"cannot be read ({error.strerror or error})",))
    caption = read_caption(data)
    # Under the hash of what was read: the file may have changed since the memo looked.
    verified.add_caption(sha256_bytes(data), caption)
    return caption


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
        f"{len(bad)} of {total} pictures in {shown(str(folder))} cannot be used, {limit}: "
        + "; ".join(reasons[:MAX_REASONS])
        + (f"; and {rest} more" if rest > 0 else ""),
        fix="replace or remove them, or raise data.max_bad_fraction to go on without them",
    )


def _records(examined: Sequence[_Examined], settings: DataSettings) -> Iterator[ImageRecord]:
    copies: Counter[str] = Counter()
    for item in examined:  # sorted by name, so copies are numbered by name
        own = settings.of_folder(item.picture.folder)
        given = _caption(item)
        written = given.lines if own.caption_lines == "one" and given.lines else (given.text,)
        yield ImageRecord(
            path=item.picture.path,
            name=item.picture.name,
            content_hash=item.content_hash,
            width_px=item.image.width_px,
            height_px=item.image.height_px,
            folder=item.picture.folder,
            written=written,
            caption=plain_text(written, settings=own),
            caption_source=given.source or None,
            repeats=item.picture.repeats,
            copy_index=copies[item.content_hash],
            transparent=bool(item.image.background),
            measures=item.image.measures,
            mask=item.mask,
        )
        copies[item.content_hash] += 1


def _caption(item: _Examined) -> GivenCaption:
    """Return the caption and its source: the file, else metadata, else the folder's name, else none."""
    if item.sidecar is not None and item.sidecar.text:
        name = item.picture.sidecar_name or ""
        return GivenCaption(text=item.sidecar.text, lines=item.sidecar.lines, source=name)
    given = next((given for given in item.picture.stand_ins if given.text), None)
    return given or GivenCaption(text="", source="")


def _image_findings(examined: Sequence[_Examined]) -> Iterator[Finding]:
    for item in examined:
        for said in item.image.notes:
            kind, _, what = said.partition(": ")
            severity, code, advice = _NOTES[kind]
            yield Finding(
                kind=kind,
                severity=severity,
                file=item.picture.name,
                what=what,
                advice=advice,
                code=code,
            )


def _caption_findings(examined: Sequence[_Examined], settings: DataSettings) -> Iterator[Finding]:
    for item in examined:
        name, sidecar_name = item.picture.name, item.picture.sidecar_name
        for problem in item.sidecar.problems if item.sidecar else ():
            advice = "save it as readable UTF-8 text of moderate length"
            yield warning("caption-text", sidecar_name, problem, advice=advice, code="CAP-02")
        found, trigger = _caption(item), settings.of_folder(item.picture.folder).trigger
        caption, source = found.text, found.source
        if TRIGGER_PLACEHOLDER in caption and not trigger:
            what = f"is captioned with {TRIGGER_PLACEHOLDER}, and there is no trigger"
            yield warning("no-trigger", name, what, advice="--set data.trigger=WORD")
        unused = [given for given in item.picture.stand_ins if given.source != FOLDER_NAME]
        if source == sidecar_name and any(given.text != caption for given in unused):
            what = f"has two captions; {source} is used, {unused[0].source} is not"
            yield warning("two-captions", name, what, advice="keep one of them")


def _duplicates(records: Sequence[ImageRecord]) -> Iterator[Finding]:
    first: dict[str, str] = {}
    for record in records:
        original = first.setdefault(record.content_hash, record.name)
        if original != record.name:
            what = f"is the same file as {original}"
            advice = "remove one; for more weight use an N_name folder"
            yield warning("duplicate", record.name, what, advice=advice, code="IMG-08")


def _without_caption(records: Sequence[ImageRecord]) -> Iterator[Finding]:
    for source, severity, what in _NO_CAPTION:
        names = [record.name for record in records if record.caption_source == source]
        if names:
            yield Finding(
                kind="no-caption",
                severity=severity,
                file=None,
                what=f"{len(names)} of {len(records)} pictures {what}: {named(names)}",
                advice="write a .txt file of the same name beside each",
                code="CAP-01",
            )


def _unread_marks(records: Sequence[ImageRecord], settings: DataSettings) -> Iterator[Finding]:
    """Name the captions in which marks are trained as words, because no setting reads them."""
    marks: Mapping[str, tuple[Callable[[str], bool], Callable[[DataSettings], bool], str]] = {
        "{a|b}": (has_choice, lambda own: own.wildcards, "data.wildcards=true"),
        "|||": (
            lambda text: "|||" in text,
            lambda own: own.keep_tokens_separator is not None,
            "'data.keep_tokens_separator=|||'",
        ),
    }
    for mark, (is_in, is_read, setting) in marks.items():
        names = [
            record.name
            for record in records
            if any(map(is_in, record.written)) and not is_read(settings.of_folder(record.folder))
        ]
        if names:
            what = f"{mark} in captions is trained as it is written ({len(names)}): {named(names)}"
            advice = f"--set {setting} if it is meant as a rule"
            yield note("unread-marks", None, what, advice=advice)


def _without_mask(records: Sequence[ImageRecord], settings: DataSettings) -> Iterator[Finding]:
    learned = [one for one in records if not settings.is_regularisation(one.folder)]
    names = [record.name for record in learned if record.mask is None]
    if settings.masks != "none" and names:
        kind = "no mask" if settings.masks == "files" else "no transparent part"
        what = f"{len(names)} of {len(learned)} pictures have {kind}, all of them counts: "
        advice = "give them one, or leave it at that"
        yield warning("no-mask", None, what + named(names), advice=advice)


_NO_CAPTION: tuple[tuple[str | None, Severity, str], ...] = (
    (FOLDER_NAME, "note", "have no caption but their folder's name"),
    (None, "warning", "have no caption but the trigger, if one is set"),
)


def _fingerprint(records: Sequence[ImageRecord]) -> str:
    rows = sorted(
        (
            *(record.content_hash, record.copy_index, record.caption, record.repeats),
            # What a caption says beyond its plain text: other lines, other alternatives, marks.
            *record.written,
            *([record.mask.content_hash] if record.mask else ()),
        )
        for record in records
    )
    return sha256_bytes(json_bytes(rows))
