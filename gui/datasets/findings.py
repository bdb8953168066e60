"""What is odd about the images of a folder, in plain words, each with what mends it.

Inputs: the folder and the findings of `lora-train check --json`. Output: remarks, which findings.html shows on the
pages Train and Datasets. Remarks of a kind stand together.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any

from lora_trainer.dataset.caption_rules import words_beside
from lora_trainer.dataset.listing import ImageFile
from lora_trainer.dataset.quality import SAME_FROM, SAME_SHARE
from lora_trainer.reporting.charts import Html
from lora_trainer.reporting.charts import text as escaped_text
from lora_trainer.reporting.history import number, sequence

from ..messages import message, sentence
from ..server.translation import Words
from .open_dataset import OpenDataset
from .view import ALIKE, DONE_HERE, FROM_THE_TEXT, NOT_JUDGED, badge_kind, other_of

# "masks are not used (2): a.png, b.png"
_COUNTED = re.compile(r"\((?P<count>[\d,]+)\): (?P<names>.*)")
# "holds reference images, of 2 of 5 images: the captions say what changes"
_PAIRED = re.compile(r"of (?P<pairs>[\d,]+) of (?P<images>[\d,]+) images:")
# Kinds of which each sentence has a cure of its own, by what it begins with.
_SENTENCES = {
    "references of another shape": "references.shape",
    "images that equal their reference": "references.equal",
    "images without a reference image": "references.missing",
}
# '18 of 18 captions say the same, "a photo of a cat": a.png, b.png, ...'
_SAME = re.compile(r'captions say the same, "(?P<text>.*)": ', re.DOTALL)
_MASK_ENDS = re.compile(r"([-_.]mask(label)?)?\.\w+$", re.IGNORECASE)
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
    "no-instruction": Kind(
        some="{#} pairs have no instruction",
        one="1 pair has no instruction",
        why="It says what changes from before to after, as you will ask for it later.",
        button="Write one for all",
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
    "blurred": Kind(
        some="{#} images look blurred at the size they are trained in",
        one="1 image looks blurred at the size it is trained in",
        why="A blur is learned like everything else: sharper ones are better, or fewer.",
    ),
    "references.shape": Kind(
        some="{#} pairs differ in shape before and after",
        one="1 pair differs in shape before and after",
        why="Give both the same width and height, or the edit also learns to move what it keeps.",
    ),
    "references.equal": Kind(
        some="{#} pairs are the same before and after",
        one="1 pair is the same before and after",
        why="They teach to change nothing: replace or leave them out, unless that is meant.",
        why_of_one="It teaches to change nothing: replace or leave it out, unless that is meant.",
    ),
    "references.missing": Kind(
        some="{#} images have nothing that they were before",
        one="1 image has nothing that it was before",
        why="They are trained as plain images, beside the pairs.",
        why_of_one="It is trained as a plain image, beside the pairs.",
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
    """What is said of some images, why it matters, and the button that mends or shows them."""

    severity: str
    text: str
    names: str = ""
    about: str = ""
    """Of which images it is said, where no names are known."""
    more: int = 0
    found: str = ""
    advice: str = ""
    why: str = ""
    label: str = ""
    """What its button says; it has none where there is nothing to show or to press."""
    filter: str = ""
    """The kind of badge that these images have on the page Datasets."""
    find: str = ""
    """What finds these images on the page Datasets, where they have no badge."""
    keeps: str = ""
    """Mended by leaving out all but one of those alike: the kind of finding; `keep` is what the button says."""
    keep: str = ""
    is_written: bool = False
    """Mended by captions that are written here."""
    is_instructed: bool = False
    """Mended by one instruction for all pairs, which is typed here."""
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
    # Captions first, as on the step Images: what is missing there harms the training most.
    return [*_of_captions(opened), *found]


def extra_of(opened: OpenDataset, kind: str) -> list[str]:
    """Return which images to leave out so that one of each stays that are alike: one with a caption, else the largest,
    else the one with the shortest name, which is not "IMG_1 (1).jpg"."""
    alike: dict[str, list[ImageFile]] = {}
    for picture in opened.pictures:
        if first := opened.reader.checked.alike.get(picture.name, {}).get(kind):
            alike.setdefault(first, []).append(picture)
    extra: set[str] = set()
    for pictures in alike.values():
        kept = min(pictures, key=lambda each: _rank(opened, each))
        extra |= {each.name for each in pictures if each is not kept}
    return [picture.name for picture in opened.pictures if picture.name in extra]


def _rank(opened: OpenDataset, picture: ImageFile) -> tuple[bool, float, int, str]:
    size = opened.reader.checked.pictures.get(picture.name, {})
    area_px = number(size, "width_px") * number(size, "height_px")
    return (
        opened.reader.lacks_caption(picture),
        -area_px if math.isfinite(area_px) else 0.0,
        len(picture.name),
        picture.name,
    )


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


def remarks(
    findings: Sequence[Mapping[str, Any]], said: Words, *, of_pairs: bool = False
) -> list[Remark]:
    """Return what findings say, those of a kind together, the gravest kind first; `of_pairs`: a caption says what
    changes, which no model can see in an image."""
    return [_remark(rows, said, of_pairs=of_pairs) for rows in _groups(findings)]


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
        group = f"{kind}: {row.get('what')}" if kind == "unusable" else _kind_of(row)
        kinds.setdefault(group, []).append(row)
    order = {"error": 0, "warning": 1}
    return sorted(kinds.values(), key=lambda rows: order.get(str(rows[0].get("severity")), 2))


def _kind_of(row: Mapping[str, Any]) -> str:
    what = str(row.get("what", ""))
    return next(
        (kind for start, kind in _SENTENCES.items() if what.startswith(start)), str(row.get("kind"))
    )


def _remark(rows: Sequence[Mapping[str, Any]], said: Words, *, of_pairs: bool) -> Remark:
    first = rows[0]
    kind, severity = _kind_of(first), str(first.get("severity", "note"))
    named = KINDS.get("no-instruction" if of_pairs and kind == "no-caption" else kind)
    counted = _COUNTED.search(str(first.get("what", "")))
    if kind == "unused-mask" and severity == "note" and counted:
        return _unused_masks(counted["count"], counted["names"], said)
    if kind == "references" and (paired := _PAIRED.search(str(first.get("what", "")))):
        return Remark(
            severity=severity,
            text=said("{#} of {#} images come with a reference image", *paired.groups()),
            why=said("They are trained as pairs: the caption says what changes."),
        )
    if named is None:
        return _own_words(rows, said, severity=severity)
    if counted and kind in _SENTENCES.values():
        names = counted["names"].split(", ")
        return Remark(
            severity=severity,
            text=said(named.one) if counted["count"] == "1" else said(named.some, counted["count"]),
            names=", ".join(names[:_NAMED]),
            more=max(0, int(counted["count"].replace(",", "")) - _NAMED),
            why=said(
                named.why_of_one if counted["count"] == "1" and named.why_of_one else named.why
            ),
        )
    count = _count(rows)
    names = [_named(row) for row in rows if row.get("file")]
    what, find = str(first.get("what", "")), str(first.get("find", ""))
    unnamed = max(0, len(names) - _NAMED)
    if same := _SAME.search(what):
        # The heading says how many; which they are is what they all say.
        find = same["text"]
        names = [f"\u201c{find}\u201d"]
    elif not names and kind != "no-caption" and ": " in what:
        # Of all images together: the heading has the number and the words of the page, and here are the names.
        # The command itself names a few, "a.png, ... and 13 more".
        names = what.rpartition(": ")[2].split(", ")
        unnamed = max(0, count - _NAMED)
    of_reading = kind == "unusable"
    return Remark(
        severity=severity,
        text=said(named.one) if count == 1 else said(named.some, f"{count:,}"),
        names=", ".join(names[:_NAMED]),
        about="" if names or kind == "no-caption" else sentence(what, said),
        more=unnamed,
        found=sentence(what, said) if of_reading else "",
        advice=sentence(str(first.get("advice", "")), said) if of_reading else "",
        why=said(named.why_of_one if count == 1 and named.why_of_one else named.why),
        label=said(named.button),
        filter=badge_kind(kind),
        find=find,
        keeps=kind if kind in ALIKE else "",
        keep=said("Keep one") if count == 1 else said("Keep one of each"),
        is_written=kind == "no-caption" and not of_pairs,
        is_instructed=kind == "no-caption" and of_pairs,
    )


def _named(row: Mapping[str, Any]) -> str:
    """Return the name of an image, with that of the one that it is there again as."""
    other = other_of(row)
    return f"{other} {ALIKE[str(row['kind'])]} {row['file']}" if other else str(row["file"])


def _unused_masks(count: str, names: str, said: Words) -> Remark:
    """Return the remark on masks that are there while the setting leaves them out, with the button that uses them."""
    some = "{#} masks are here and not used"
    return Remark(
        severity="warning",
        text=said("1 mask is here and not used") if count == "1" else said(some, count),
        names=names,
        why=said("With them only what is white in them counts."),
        label=said("Use it") if count == "1" else said("Use them"),
        sets="data.masks",
        value="files",
    )


def _own_words(rows: Sequence[Mapping[str, Any]], said: Words, *, severity: str) -> Remark:
    """Return a remark of a kind that the page has no words for, in those of the command."""
    first = rows[0]
    what, name = str(first.get("what", "")), first.get("file")
    # The language knows the sentence without the name in front, which stands escaped beside it.
    text = (
        Html(f"{escaped_text(str(name))} {message(what, said)}") if name else sentence(what, said)
    )
    # A mask is shown with its image, which is called so, too.
    find = _MASK_ENDS.sub("", PurePath(str(name)).name) if first.get("kind") == "bad-mask" else ""
    return Remark(
        severity=severity,
        text=text,
        find=find,
        about=sentence(str(first.get("advice", "")), said),
        why=said("And {} more like it.", f"{len(rows) - 1:,}") if len(rows) > 1 else "",
        label=said("Show"),
        filter=badge_kind(str(first.get("kind"))),
    )


def _count(rows: Sequence[Mapping[str, Any]]) -> int:
    """Return of how many images a remark is: one that is about several of them begins with their number."""
    said = (str(row.get("what", "")).partition(" ")[0].replace(",", "") for row in rows)
    return sum(
        int(first) if first.isdecimal() and not row.get("file") else 1
        for first, row in zip(said, rows, strict=True)
    )
