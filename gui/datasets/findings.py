"""What is odd about the images of a folder, in plain words, each with what mends it.

Inputs: the folder and the findings of `lora-train check --json`. Output: remarks, which findings.html shows on the
pages Train and Datasets. Remarks of a kind stand together.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from lora_trainer.dataset.caption_rules import words_beside
from lora_trainer.dataset.quality import SAME_FROM, SAME_SHARE
from lora_trainer.reporting.history import sequence

from ..messages import sentence
from ..server.translation import Words
from .open_dataset import OpenDataset
from .view import DONE_HERE, FROM_THE_TEXT, NOT_JUDGED, badge_kind

# "masks are not used (2): a.png, b.png"
_COUNTED = re.compile(r"\((?P<count>[\d,]+)\): (?P<names>.*)")
# "holds reference images, of 2 of 5 images: the captions say what changes"
_PAIRED = re.compile(r"of (?P<pairs>[\d,]+) of (?P<images>[\d,]+) images:")
_NAMED = 4
# Remarks that are in sight; the others are folded.
IN_SIGHT = 3


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of remark: what it says of some images, and of one; why it matters (in other words of one); the button."""

    some: str
    one: str
    why: str
    why_of_one: str = ""
    button: str = "Show"


KINDS = {
    "no-caption": Kind(
        some="{#} images have no caption",
        one="1 image has no caption",
        why="A caption says what is in an image; what it names can be left out or changed later.",
        button="Write captions",
    ),
    "bare-caption": Kind(
        some="{#} captions say nothing but the trigger word or a number",
        one="1 caption says nothing but the trigger word or a number",
        why="A caption says what is in an image; what it names can be left out or changed later.",
        button="Show",
    ),
    "same-caption": Kind(
        some="{#} captions say the same",
        one="1 caption says the same as others",
        why="Captions that are all alike teach everything as one: place, pose and light cannot be asked for later.",
    ),
    "unusable": Kind(
        some="{#} files cannot be read as images",
        one="1 file cannot be read as an image",
        why="They are left out of the training.",
        why_of_one="It is left out of the training.",
    ),
    "duplicate": Kind(
        some="{#} images are there twice",
        one="1 image is there twice",
        why="What is there twice counts twice, and is learned by heart.",
    ),
    "near-duplicate": Kind(
        some="{#} images are nearly the same as another",
        one="1 image is nearly the same as another",
        why="Different views teach more than many alike.",
    ),
    "low-resolution": Kind(
        some="{#} images are small and would be enlarged",
        one="1 image is small and would be enlarged",
        why="Enlarged images are soft, and so is what is learned from them.",
    ),
    "no-mask": Kind(
        some="{#} images have no mask, so the whole image counts",
        one="1 image has no mask, so the whole image counts",
        why="Give them one, or leave it if the whole image is meant.",
    ),
    "exposure": Kind(
        some="{#} images are too dark, too bright or flat",
        one="1 image is too dark, too bright or flat",
        why="The look of the photograph is learned with what it shows.",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Remark:
    """What is said of some images, why it matters, and the link to where it is mended."""

    severity: str
    text: str
    names: str = ""
    about: str = ""
    """Of which images it is said, where no names are known."""
    more: int = 0
    found: str = ""
    advice: str = ""
    why: str = ""
    label: str
    address: str
    filter: str = ""
    """The kind of badge that these images have on the page Datasets."""
    find: str = ""
    """What finds these images on the page Datasets, where they have no badge."""
    is_written: bool = False
    """Mended by captions that are written here."""
    sets: str = ""
    """Mended by this setting of the draft, which the button makes `value`."""
    value: str = ""


def of_dataset(opened: OpenDataset) -> list[Mapping[str, Any]]:
    """Return the findings on a folder: on its files from the last check, on its captions as they are now."""
    found: list[Mapping[str, Any]] = [
        row
        for row in sequence(opened.known.values, "findings")
        if isinstance(row, dict)
        and row.get("kind") not in NOT_JUDGED | FROM_THE_TEXT | {"same-caption"}
    ]
    if not opened.known.values:
        found = [
            asdict(finding) for finding in opened.listing.findings if finding.kind not in DONE_HERE
        ]
    return [*found, *_of_captions(opened)]


def _of_captions(opened: OpenDataset) -> Iterator[Mapping[str, Any]]:
    """Yield the captions that are missing, say nothing, or say all the same."""
    reader = opened.reader
    words: dict[str, tuple[str, ...]] = {}
    texts: dict[str, str] = {}
    for picture in opened.pictures:
        caption = reader.caption(picture)
        text = caption.text.strip()
        if reader.lacks_caption(picture):
            yield {"kind": "no-caption", "severity": "warning", "file": picture.name}
        elif text and not caption.locked:
            texts[picture.name] = text
            words[picture.name] = words_beside(text, reader.trigger)
            if not words[picture.name]:
                yield {"kind": "bare-caption", "severity": "warning", "file": picture.name}
    said, count = next(iter(Counter(filter(None, words.values())).most_common(1)), ((), 0))
    if count >= SAME_FROM and count >= SAME_SHARE * len(words):
        for name in (name for name, each in words.items() if each == said):
            row = {"kind": "same-caption", "severity": "warning", "file": name}
            yield {**row, "find": texts[name]}


def remarks(folder: Path, findings: Sequence[Mapping[str, Any]], said: Words) -> list[Remark]:
    """Return what findings say, those of a kind together, the gravest kind first."""
    return [_remark(folder, rows, said) for rows in _groups(findings)]


def all_are_pairs(finding: Mapping[str, Any]) -> bool:
    """Whether a finding says that each image of the dataset comes with a reference image."""
    paired = _PAIRED.search(str(finding.get("what", "")))
    return (
        finding.get("kind") == "references"
        and paired is not None
        and paired["pairs"] == paired["images"]
    )


def _groups(findings: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """Return the findings by kind, the gravest kind first."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for row in findings:
        kind = str(row.get("kind"))
        # Files that cannot be read have different reasons, each with its own cure.
        group = f"{kind}: {row.get('what')}" if kind == "unusable" else kind
        kinds.setdefault(group, []).append(row)
    order = {"error": 0, "warning": 1}
    return sorted(kinds.values(), key=lambda rows: order.get(str(rows[0].get("severity")), 2))


def _remark(folder: Path, rows: Sequence[Mapping[str, Any]], said: Words) -> Remark:
    first = rows[0]
    kind, severity = str(first.get("kind")), str(first.get("severity", "note"))
    address = _datasets_url(folder, kind)
    named = KINDS.get(kind)
    counted = _COUNTED.search(str(first.get("what", "")))
    if kind == "unused-mask" and severity == "note" and counted:
        return _unused_masks(counted["count"], counted["names"], said)
    if kind == "references" and (paired := _PAIRED.search(str(first.get("what", "")))):
        return Remark(
            severity=severity,
            text=said("{#} of {#} images come with a reference image", *paired.groups()),
            why=said("They are trained as pairs: the caption says what changes."),
            label=said("Show"),
            address=address,
        )
    if named is None:
        return _own_words(rows, said, severity=severity, address=address)
    count = _count(rows)
    names = [str(row["file"]) for row in rows if row.get("file")]
    what = str(first.get("what", ""))
    of_reading = kind == "unusable"
    return Remark(
        severity=severity,
        text=said(named.one) if count == 1 else said(named.some, f"{count:,}"),
        names=", ".join(names[:_NAMED]),
        about="" if names or kind == "no-caption" else sentence(what, said),
        more=max(0, len(names) - _NAMED),
        found=sentence(what, said) if of_reading else "",
        advice=sentence(str(first.get("advice", "")), said) if of_reading else "",
        why=said(named.why_of_one if count == 1 and named.why_of_one else named.why),
        label=said(named.button),
        address=address,
        filter=badge_kind(kind),
        find=str(first.get("find", "")),
        is_written=kind == "no-caption",
    )


def _unused_masks(count: str, names: str, said: Words) -> Remark:
    """Return the remark on masks that are there while the setting leaves them out, with the button that uses them."""
    some = "{#} masks are here and not used"
    return Remark(
        severity="warning",
        text=said("1 mask is here and not used") if count == "1" else said(some, count),
        names=names,
        why=said("With them only what is white in them counts."),
        label=said("Use it") if count == "1" else said("Use them"),
        address="",
        sets="data.masks",
        value="files",
    )


def _own_words(
    rows: Sequence[Mapping[str, Any]], said: Words, *, severity: str, address: str
) -> Remark:
    """Return a remark of a kind that the page has no words for, in those of the command."""
    first = rows[0]
    name = f"{first['file']} " if first.get("file") else ""
    return Remark(
        severity=severity,
        text=sentence(f"{name}{first.get('what', '')}", said),
        about=sentence(str(first.get("advice", "")), said),
        why=said("And {} more like it.", f"{len(rows) - 1:,}") if len(rows) > 1 else "",
        label=said("Show"),
        address=address,
        filter=badge_kind(str(first.get("kind"))),
    )


def _count(rows: Sequence[Mapping[str, Any]]) -> int:
    """Return of how many images a remark is: one that is about several of them begins with their number."""
    said = (str(row.get("what", "")).partition(" ")[0].replace(",", "") for row in rows)
    return sum(
        int(first) if first.isdecimal() and not row.get("file") else 1
        for first, row in zip(said, rows, strict=True)
    )


def _datasets_url(folder: Path, kind: str = "") -> str:
    of_kind = {"kind": badge_kind(kind)} if kind else {}
    return "/datasets?" + urlencode({"folder": folder} | of_kind)
