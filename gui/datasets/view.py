"""What the page shows of each picture of a dataset: caption, badges, and where it would be trained.

Inputs: the pictures as the trainer lists them, their captions, the answer of `check --json`.
Outputs: plain values for the page's script. What a caption lacks is said here, from its text as it
is now; what a picture lacks is what the check found.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from lora_trainer.common.errors import InputError
from lora_trainer.dataset.caption_rules import (
    TRIGGER_PLACEHOLDER,
    count_tokens,
    has_trigger,
    words_beside,
)
from lora_trainer.dataset.listing import ImageFile
from lora_trainer.reporting.history import mapping, number, sequence

from .caption_edit import Caption, caption_of

# Kinds of findings by what their badge says; the finding's own sentence where there is None.
_BADGES: Mapping[str, tuple[str, str | None]] = {
    "alpha": ("transparent", "transparent"),
    "ambiguous-caption": ("shared caption", "shared caption"),
    "animated": ("animated", "first frame only"),
    "blurred": ("blurry", "blurry"),
    "cmyk": ("colours", "CMYK"),
    "cmyk-profile": ("colours", "CMYK, colours may shift"),
    "cropped": ("extreme aspect", "extreme aspect"),
    "depth": ("colours", "16 bit"),
    "duplicate": ("duplicate", "duplicate"),
    "exif": ("turned", "turned upright"),
    "exposure": ("exposure", None),
    "low-resolution": ("small", "small"),
    "near-duplicate": ("near-duplicate", "near-duplicate"),
    "two-captions": ("two captions", "two captions"),
    "unusable": ("unreadable", "unreadable"),
}
# Kinds of findings about an image that is there again: the sign before the name of the other.
ALIKE: Mapping[str, str] = {"duplicate": "=", "near-duplicate": "\u2248"}
_OTHER = re.compile(r"^(?:is the same file as|looks the same as) (?P<name>.+)$", re.DOTALL)
FROM_THE_TEXT = frozenset({"bare-caption", "caption-text", "no-caption", "no-trigger"})
# Said of all images together: no card has a badge of it.
_OF_ALL = frozenset({"same-caption"})
# That `_excluded/` is not read is what pressing Exclude is for; the page counts what is in it.
DONE_HERE = frozenset({"excluded"})
# Said by the verdict itself, or done on these pages.
NOT_JUDGED = frozenset({"score"}) | DONE_HERE
_GOOD, _FAIR = 0.8, 0.6
_SAID_OTHERWISE = FROM_THE_TEXT | DONE_HERE


@dataclass(frozen=True, kw_only=True)
class Badge:
    """A remark on a card; `kind` is what one filters by, `title` the whole sentence with advice."""

    kind: str
    text: str
    title: str = ""
    severity: str = "warning"

    def to_json(self) -> dict[str, str]:
        return {
            "kind": self.kind,
            "text": self.text,
            "title": self.title,
            "severity": self.severity,
        }


@dataclass(frozen=True, kw_only=True)
class CheckedPictures:
    """The answer of the check, by picture."""

    pictures: Mapping[str, Mapping[str, Any]]
    findings: Mapping[str, Sequence[Mapping[str, Any]]]
    alike: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """By picture and kind of finding, which of those that are alike it belongs to: the name of the first of them."""

    @classmethod
    def of(cls, values: Mapping[str, Any], *, names: frozenset[str]) -> CheckedPictures:
        """Sort an answer; what is not of the expected kind is left out."""
        pictures = {
            str(picture["file"]): picture
            for picture in sequence(values, "pictures")
            if isinstance(picture, dict) and "file" in picture
        }
        findings: defaultdict[str, list[Mapping[str, Any]]] = defaultdict(list)
        for finding in sequence(values, "findings"):
            if not isinstance(finding, dict) or finding.get("kind") in _SAID_OTHERWISE:
                continue
            if finding.get("file") in names:
                findings[str(finding["file"])].append(finding)
        alike: defaultdict[str, dict[str, str]] = defaultdict(dict)
        for finding in [each for rows in findings.values() for each in rows]:
            kind, first = str(finding.get("kind")), other_of(finding)
            if not first or first not in names:
                continue
            name = str(finding["file"])
            alike[name][kind] = first
            # The first says which it is there again as, or nobody would find it.
            if kind not in alike[first]:
                alike[first][kind] = first
                what = str(finding["what"]).removesuffix(first) + name
                findings[first].append({**finding, "file": first, "what": what})
        return cls(pictures=pictures, findings=findings, alike=alike)

    def is_unreadable(self, name: str) -> bool:
        """Whether the check found that a file cannot be read: it is not trained on."""
        return any(finding.get("kind") == "unusable" for finding in self.findings.get(name, ()))


@dataclass(frozen=True, kw_only=True)
class Reader:
    """Makes the cards of one dataset folder."""

    root: Path
    extensions: Sequence[str]
    trigger: str = ""
    counter: Tokenizer | None = None
    room_tokens: int = 0
    checked: CheckedPictures = field(
        default_factory=lambda: CheckedPictures(pictures={}, findings={})
    )

    def card(self, picture: ImageFile) -> dict[str, Any]:
        """Return the card of a picture as plain values."""
        caption = self.caption(picture)
        found = self.checked.findings.get(picture.name, ())
        # What cannot be read needs no caption.
        of_text = () if self.is_unreadable(picture) else self._caption_badges(caption)
        badges = [*of_text, *map(_badge, found)]
        if picture.mask is not None:
            title = f"{picture.mask_name} says what of it counts"
            badges.append(Badge(kind="mask", text="has a mask", title=title, severity="note"))
        if picture.crop is not None:
            title = "a part of it is trained, as you chose it"
            badges.append(Badge(kind="crop", text="cropped", title=title, severity="note"))
        return {
            "file": picture.name,
            "crop": picture.crop and list(picture.crop),
            "repeats": picture.repeats,
            "references": self.references(picture),
            "caption": caption.text,
            "where": caption.file,
            "stand_in": caption.stand_in,
            "locked": caption.locked,
            "unreadable": self.is_unreadable(picture),
            "alike": dict(self.checked.alike.get(picture.name, {})),
            "badges": [badge.to_json() for badge in badges],
            **placed(self.checked.pictures.get(picture.name, {})),
        }

    def references(self, picture: ImageFile) -> list[str]:
        """Return its references that lie in the folder: what lies elsewhere is not served as a picture of it."""
        return [
            reference.name
            for reference in picture.references
            if Path(reference.file).is_relative_to(self.root)
        ]

    def is_unreadable(self, picture: ImageFile) -> bool:
        """Whether the check found that a file cannot be read: it is not trained on."""
        return self.checked.is_unreadable(picture.name)

    def lacks_caption(self, picture: ImageFile) -> bool:
        """Whether an image could have a caption and has none."""
        caption = self.caption(picture)
        return not (caption.text.strip() or caption.locked or self.is_unreadable(picture))

    def caption(self, picture: ImageFile) -> Caption:
        """Return the caption of a picture; one that cannot be read is locked and says why."""
        try:
            return caption_of(picture, root=self.root, extensions=self.extensions)
        except InputError as error:
            return Caption(text="", file=picture.sidecar_name or picture.name, locked=str(error))

    def _caption_badges(self, caption: Caption) -> list[Badge]:
        badges = []
        if caption.locked:
            badges.append(Badge(kind="caption file", text="caption file", title=caption.locked))
        if caption.problem:
            title = f"{caption.file}: {caption.problem}"
            badges.append(Badge(kind="caption file", text="odd encoding", title=title))
        trained = caption.text.strip() or caption.stand_in
        if not caption.text.strip() and not caption.locked:
            title = (
                f"trained with \u201c{trained}\u201d"
                if trained
                else "trained with an empty caption"
            )
            badges.append(Badge(kind="no caption", text="no caption", title=title))
        elif not words_beside(trained, self.trigger):
            title = "say in it what else is to be seen"
            badges.append(Badge(kind="says nothing", text="says nothing", title=title))
        elif self.trigger and not _has_trigger(trained, self.trigger):
            title = f"\u201c{self.trigger}\u201d does not stand in the caption"
            badges.append(Badge(kind="trigger missing", text="trigger missing", title=title))
        length = count_tokens(self.counter, [trained])[0] if self.counter else 0
        if length > self.room_tokens:
            title = "the end of the caption is not read: say less"
            text = f"{length} of {self.room_tokens} tokens"
            badges.append(Badge(kind="caption too long", text=text, title=title))
        return badges


def _has_trigger(caption: str, trigger: str) -> bool:
    return TRIGGER_PLACEHOLDER in caption or has_trigger(caption, trigger)


def badge_kind(finding: str) -> str:
    """Return the kind of badge, by which the page filters, for a kind of finding."""
    if finding in FROM_THE_TEXT:
        kinds = {
            "bare-caption": "says nothing",
            "no-caption": "no caption",
            "no-trigger": "trigger missing",
        }
        return kinds.get(finding, "")
    return "" if finding in _OF_ALL else _BADGES.get(finding, (finding, None))[0]


def _badge(finding: Mapping[str, Any]) -> Badge:
    kind, what = str(finding.get("kind")), str(finding.get("what", ""))
    label, text = _BADGES.get(kind, (kind, None))
    severity = str(finding.get("severity"))
    if other := other_of(finding):
        text = f"{ALIKE[kind]} {other}"
    return Badge(
        kind=label,
        text=text or what.removeprefix("is "),
        title=f"{what}: {finding.get('advice', '')}",
        severity=severity if severity in ("note", "warning", "error") else "note",
    )


def other_of(finding: Mapping[str, Any]) -> str:
    """Return the name of the image that this one is there again as; "" of any other finding."""
    found = _OTHER.match(str(finding.get("what", "")))
    return found["name"] if found and finding.get("kind") in ALIKE else ""


def placed(picture: Mapping[str, Any]) -> dict[str, Any]:
    """Return the size of a picture and where it goes, empty before it was checked."""
    if not picture:
        return {}
    edges = [edge for edge in sequence(picture, "kept") if isinstance(edge, int | float)]
    return {
        "width_px": _finite(picture, "width_px"),
        "height_px": _finite(picture, "height_px"),
        "score": _finite(picture, "score"),
        "bucket": str(picture.get("bucket", "")),
        "cropped_fraction": _finite(picture, "cropped_fraction"),
        "upscaled": picture.get("upscaled") is True,
        "kept": edges if len(edges) == 4 else [0, 0, 1, 1],
    }


def is_warned_of(findings: Sequence[Mapping[str, Any]]) -> bool:
    """Whether one of the findings is more than a note."""
    return any(row.get("severity") in ("warning", "error") for row in findings)


def verdict(score: float, findings: Sequence[Mapping[str, Any]]) -> str:
    """Return what the check says of the images in words, "" of images without a score.

    What is warned of is not good to train on, whatever the score.
    """
    if not math.isfinite(score):
        return ""
    if not findings:
        return "all good to train on"
    if score >= _GOOD and not is_warned_of(findings):
        return "good to train on"
    return "usable, with weak points" if score >= _FAIR else "worth improving first"


def summary(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the check says of the whole dataset: verdict, score and buckets."""
    findings = [
        row
        for row in sequence(values, "findings")
        if isinstance(row, dict) and row.get("kind") not in NOT_JUDGED
    ]
    return {
        "verdict": verdict(number(values, "score"), findings),
        "score": _finite(values, "score"),
        "buckets": {str(name): count for name, count in mapping(values, "buckets").items()},
    }


def _finite(row: Mapping[str, Any], key: str) -> float | None:
    found = number(row, key)
    return found if math.isfinite(found) else None
