"""Findings about the usable images of a dataset: decoding, captions, duplicates, masks.

Inputs: inspected images, or the records made of them. Outputs: findings; none of them changes a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from lora_trainer.common.caption_markup import has_choice
from lora_trainer.common.findings import Finding, Severity, named, note, warning
from lora_trainer.config.config import DataSettings
from lora_trainer.dataset.captions import (
    FILE_NAME,
    FOLDER_NAME,
    TRIGGER_PLACEHOLDER,
    caption_of_name,
    is_json,
)
from lora_trainer.dataset.image_text import IMAGE_TEXT, read_image_text
from lora_trainer.dataset.images import ImageDecodeError
from lora_trainer.dataset.inspect_image import InspectedImage
from lora_trainer.dataset.records import ImageRecord

# What decoding had to do to an image: severity, case in FAULTS, advice.
_NOTES: Mapping[str, tuple[Severity, str, str]] = {
    "alpha": ("note", "IMG-04", "set data.alpha_background if another colour suits the subject"),
    "animated": ("warning", "IMG-06", "export the frames you want as single images"),
    "cmyk": ("note", "IMG-05", "nothing to do"),
    "cmyk-profile": ("warning", "IMG-05", "compare the colours, or save it as RGB"),
    "depth": ("note", "IMG-05", "nothing to do"),
    "exif": ("note", "IMG-03", "check that it stands upright"),
}

_MAX_IMAGES_READ = 5
_EXAMPLE_CHARACTERS = 60


def image_findings(examined: Sequence[InspectedImage]) -> Iterator[Finding]:
    for item in examined:
        for note_text in item.image.notes:
            kind, _, what = note_text.partition(": ")
            severity, code, advice = _NOTES[kind]
            yield Finding(
                kind=kind,
                severity=severity,
                file=item.picture.name,
                what=what,
                advice=advice,
                code=code,
            )


def caption_findings(
    examined: Sequence[InspectedImage], settings: DataSettings
) -> Iterator[Finding]:
    for item in examined:
        name, sidecar_name = item.picture.name, item.picture.sidecar_name
        for problem in item.sidecar.problems if item.sidecar else ():
            advice = "save it as readable UTF-8 text of moderate length"
            if is_json(sidecar_name or ""):
                advice = 'write JSON with the caption under a known key, such as {"caption": "..."}'
            yield warning("caption-text", sidecar_name, problem, advice=advice, code="CAP-02")
        counted, trigger = item.caption, settings.of_folder(item.picture.folder).trigger
        caption, source = counted.text, counted.source
        if TRIGGER_PLACEHOLDER in caption and not trigger:
            what = f"is captioned with {TRIGGER_PLACEHOLDER}, and there is no trigger"
            yield warning("no-trigger", name, what, advice="--set data.trigger=WORD")
        unused = [stand_in for stand_in in item.picture.stand_ins if not stand_in.of_name]
        if source == sidecar_name and any(stand_in.text != caption for stand_in in unused):
            what = f"has two captions; {source} is used, {unused[0].source} is not"
            yield warning("two-captions", name, what, advice="keep one of them")


def duplicates(records: Sequence[ImageRecord]) -> Iterator[Finding]:
    first: dict[str, str] = {}
    for record in records:
        original = first.setdefault(record.content_hash, record.name)
        if original != record.name:
            what = f"is the same file as {original}"
            advice = "remove one; for more weight use an N_name folder"
            yield warning("duplicate", record.name, what, advice=advice, code="IMG-08")


def without_caption(records: Sequence[ImageRecord], settings: DataSettings) -> Iterator[Finding]:
    for source, severity, what in _NO_CAPTION:
        captioned = [record for record in records if record.caption_source == source]
        names = [record.name for record in captioned]
        if names:
            advice = "write a .txt file of the same name beside each"
            if source is None and len(names) == len(records):
                advice += _other_captions(records, settings)
            yield Finding(
                kind="no-caption",
                severity=severity,
                file=None,
                what=f"{len(names)} of {len(records)} images {what}: {named(names)}",
                advice=advice,
                code="CAP-01",
            )


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


def unread_marks(records: Sequence[ImageRecord], settings: DataSettings) -> Iterator[Finding]:
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


def without_mask(records: Sequence[ImageRecord], settings: DataSettings) -> Iterator[Finding]:
    learned = [one for one in records if not settings.is_regularisation(one.folder)]
    names = [record.name for record in learned if record.mask is None]
    if settings.masks != "none" and names:
        kind = "no mask" if settings.masks == "files" else "no transparent part"
        what = f"{len(names)} of {len(learned)} images have {kind}, all of them counts: "
        advice = "give them one, or leave it at that"
        yield warning("no-mask", None, what + named(names), advice=advice)


_NO_CAPTION: tuple[tuple[str | None, Severity, str], ...] = (
    (FOLDER_NAME, "note", "have no caption but their folder's name"),
    (FILE_NAME, "note", "have no caption but their file's name"),
    (IMAGE_TEXT, "note", "have no caption but the text inside the image"),
    (None, "warning", "have no caption but the trigger, if one is set"),
)
