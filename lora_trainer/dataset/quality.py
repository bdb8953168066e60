"""How good a dataset is for training: a score in [0, 1] from named parts, advice per image, what is odd about all.

The score is of the numbers the preflight took (`measures`) and opens no file. Each part is a documented
formula in [0, 1]. Shares of a dataset that are worth nothing (broken images, copies, images without
a caption) are factors of the score, and how good the rest is takes something off: no amount of sharp
images makes up for half of them being copies. Nothing here changes a run.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from lora_trainer.common.caption_markup import has_choice
from lora_trainer.common.events import Finding, by_severity
from lora_trainer.common.processes import gc_disabled
from lora_trainer.common.whole_words import words_in
from lora_trainer.common.wording import one_line
from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset.caption_rules import words_beside
from lora_trainer.dataset.captions import FILE_NAME, FOLDER_NAME, IMAGE_TEXT, caption_of_name
from lora_trainer.dataset.images import (
    PRINT_LENGTH_BITS,
    ImageDecodeError,
    Measures,
    read_image_text,
)
from lora_trainer.dataset.masks import DARK_BELOW as DARK_MASK_BELOW
from lora_trainer.dataset.masks import WHITE
from lora_trainer.dataset.records import (
    REGULARISATION,
    Dataset,
    ImageRecord,
    bucket_counts,
    finding,
    finding_of_all,
)

# Parts that the score is multiplied by.
FACTORS = ("usable", "near_duplicates", "captions")
# What each of the other parts takes off where it is 0.
WEIGHTS: Mapping[str, float] = {
    "resolution": 0.25,
    "sharpness": 0.2,
    "exposure": 0.1,
    "aspect": 0.05,
    "trigger": 0.05,
}
# Share of each part in the score of an image.
PICTURE_WEIGHTS: Mapping[str, float] = {
    **{name: weight for name, weight in WEIGHTS.items() if name != "trigger"},
    "near_duplicates": 0.2,
    "captions": 0.15,
}
UNCAPTIONED_COST = 1.5
# What of a caption a folder's name or the trigger lacks: among captions, and where no image has one.
STAND_IN_LACK, LONE_STAND_IN_LACK = 0.5, 0.1
CRISP_FROM, CRISP_FULL, CRISP_ADVISED = 0.3, 0.6, 0.4
# Natural logarithm of the ratio of two aspect ratios: 10 % apart, more than cropping to multiples of pixels makes.
RESHAPED = math.log(1.1)
# Share of an image's area: where more is cut off, it is another image that is trained.
MOSTLY_CROPPED = 0.5
DARK_BELOW, BRIGHT_ABOVE, CONTRAST_BELOW = 0.25, 0.85, 0.12
PRINT_BITS, PRINT_COLOUR = 8, 12.0
# A small thing on a plain background sets few bits of a print, and another thing in its place few others. Of 80
# drawings of a shape, saved as JPEG, made smaller or brighter, at most 0.15 of the bits set in either differ.
PRINT_SHARE = 0.2
_BAND_BITS = -(-PRINT_LENGTH_BITS // (PRINT_BITS + 1))
# A band shared by more images than this (a plain background, say) tells none from another.
_BAND_CROWD = 32
_COMMON_WORDS = frozenset(("a", "an", "and", "at", "by", "for", "in", "of", "on", "the", "with"))


@dataclass(frozen=True, kw_only=True)
class DatasetReport:
    """The report of `check`: score and its parts in [0, 1], findings, images per bucket, images in plain values."""

    images: int
    score: float
    parts: Mapping[str, float]
    findings: tuple[Finding, ...]
    buckets: Mapping[str, int]
    pictures: tuple[Mapping[str, Any], ...]

    @property
    def rounded(self) -> DatasetReport:
        """The report with the score and its parts as they are written."""
        parts = {name: round(value, 4) for name, value in self.parts.items()}
        return replace(self, score=round(self.score, 4), parts=parts)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `check --json`, without the single images."""
        rounded = self.rounded
        return {
            "images": self.images,
            "score": rounded.score,
            "parts": rounded.parts,
            "findings": [asdict(finding) for finding in self.findings],
            "buckets": dict(self.buckets),
        }


@gc_disabled()
def inspect_images(
    dataset: Dataset, *, settings: DataSettings, more: Sequence[Finding] = (), each: bool = False
) -> DatasetReport:
    """Score a dataset for the buckets it is placed in; `more` are findings to list, too.

    The images in plain values are in the report with `each` only: they take 44 MiB for 100,000 images.

    The score is usable * near_duplicates * captions * (1 - sum of w (1 - p) over the other parts).
    `usable`: share of the images in the folder that can be read and show something.
    `near_duplicates`: distinct images over images. `captions`: 1 / (1 + 1.5 u), u the share without
    a caption, see `_lack`. `resolution`: 1 over the enlargement needed, at most 1. `sharpness`:
    crispness at the trained size, 0.3 counting as 0 and 0.6 as 1. `exposure`: share of images neither
    dark, washed out nor flat. `aspect`: share of area kept by the crop. `trigger`: share of captions
    with the trigger, which is all of them, or without one with the commonest word. `buckets` counts repeats.
    """
    records = dataset.records
    twins = near_duplicates(records)
    shares: dict[str, list[float]] = {name: [] for name in PICTURE_WEIGHTS}
    pictures: list[Mapping[str, Any]] = []
    of_images: list[Finding] = []
    for record in records:
        own_parts, own_findings = _judged(record, is_twin=record.name in twins)
        for name, part in own_parts.items():
            shares[name].append(part)
        of_images += own_findings
        if each:
            pictures.append(_in_plain_values(record, own_parts))
    # Images that can be read and are not of one colour all over.
    broken = sum(
        finding.severity == "error" and not (finding.file or "").startswith(REGULARISATION)
        for finding in dataset.findings
    )
    contrasts = [one.measures.brightest - one.measures.darkest for one in records]
    blank = sum(contrast < 0.03 for contrast in contrasts)
    total = len(records) + broken
    means = {name: fmean(values) for name, values in shares.items()}
    parts = {
        "usable": (total - broken - blank) / total,
        "near_duplicates": means["near_duplicates"],
        "captions": 1 / (1 + UNCAPTIONED_COST * _lack(records, settings)),
        **{name: means[name] for name in WEIGHTS if name != "trigger"},
        "trigger": _trigger_share(records, settings),
    }
    score = math.prod(parts[name] for name in FACTORS)
    score *= 1 - sum(_loss(name, parts[name]) for name in WEIGHTS)
    contents = {record.name: record.content_hash for record in records}
    findings = [*dataset.findings, *more]
    findings += (
        finding("near-duplicate", name, original=original)
        for name, original in twins.items()
        if contents[name] != contents[original]  # identical files are reported by the scan
    )
    if score < settings.min_score:
        lost = sorted(parts, key=lambda name: -_loss(name, parts[name]))
        worst = [f"{name} {parts[name]:.2f}" for name in lost[:3] if parts[name] < 1]
        words = {"least": settings.min_score, "worst": ", ".join(worst)}
        findings.append(finding("score", score=score, **words))
    findings += of_images
    return DatasetReport(
        images=len(records),
        score=score,
        parts=parts,
        findings=by_severity(findings),
        buckets=bucket_counts(records),
        pictures=tuple(pictures),
    )


def _judged(record: ImageRecord, *, is_twin: bool) -> tuple[dict[str, float], list[Finding]]:
    """Return the parts of the score that an image has by itself, without the trigger's, and findings about it."""
    placed, bucket = record.placement, record.placement.bucket
    # How many times larger the image is trained than it is.
    enlargement = max(1.0, bucket.width_px / record.width_px, bucket.height_px / record.height_px)
    # What was measured nearest to the size of the bucket.
    side_px = math.sqrt(bucket.width_px * bucket.height_px)
    crispness = _crispness(record.measures.crispness, side_px=side_px)
    fault = exposure_fault(record.measures)
    parts = {
        "resolution": 1 / enlargement,
        "sharpness": min(1.0, max(0.0, (crispness - CRISP_FROM) / (CRISP_FULL - CRISP_FROM))),
        "near_duplicates": float(not is_twin),
        "captions": _captioned(record),
        "exposure": float(fault is None),
        "aspect": 1 - placed.cropped_fraction,
    }
    findings = []
    if enlargement > 1.25:
        size = f"{record.width_px}x{record.height_px}"
        words: dict[str, Any] = {"size": size, "enlargement": enlargement, "bucket": bucket}
        findings.append(finding("low-resolution", record.name, **words))
    if fault is not None:
        findings.append(finding("exposure", record.name, fault=fault))
    elif crispness < CRISP_ADVISED:
        findings.append(finding("blurred", record.name))
    if placed.cropped_fraction > 0.25:
        words = {"cropped": placed.cropped_fraction, "bucket": bucket}
        kind = "cropped" if placed.cropped_fraction <= MOSTLY_CROPPED else "cropped.most"
        findings.append(finding(kind, record.name, **words))
    return parts, findings


def _crispness(levels: Sequence[tuple[int, float]], *, side_px: float) -> float:
    """Return how crisp an image is at about this size, from what was measured at some.

    What is blurred when it is small is blurred when it is large. Measured there alone, a strong blur looks crisp: it
    leaves slopes of less than a level a pixel, and their rounding has sharp steps.
    """
    nearest_px = min(levels, key=lambda pair: abs(math.log(pair[0] / side_px)))[0]
    return min(value for px, value in levels if px <= nearest_px)


def _in_plain_values(record: ImageRecord, parts: Mapping[str, float]) -> dict[str, Any]:
    """Return an image in plain values.

    Of them, `score` is the mean of the parts of its score, weighted alike, and `kept` is left, top, right,
    bottom of what is trained as fractions of the whole image, whose size is said.
    """
    placed, bucket = record.placement, record.placement.bucket
    score = sum(PICTURE_WEIGHTS[name] * value for name, value in parts.items())
    left, top = placed.left_px / placed.scaled_width_px, placed.top_px / placed.scaled_height_px
    right = left + bucket.width_px / placed.scaled_width_px
    bottom = top + bucket.height_px / placed.scaled_height_px
    width_px, height_px = record.whole_px or (record.width_px, record.height_px)
    if record.crop is not None:
        left, right = (
            (record.crop.left_px + edge * record.width_px) / width_px for edge in (left, right)
        )
        top, bottom = (
            (record.crop.top_px + edge * record.height_px) / height_px for edge in (top, bottom)
        )
    return {
        "file": record.name,
        "width_px": width_px,
        "height_px": height_px,
        "score": round(score / sum(PICTURE_WEIGHTS.values()), 4),
        "bucket": str(bucket),
        "kept": [round(edge, 5) for edge in (left, top, right, bottom)],
        "cropped_fraction": round(placed.cropped_fraction, 5),
        "upscaled": placed.upscaled,
    }


def _loss(name: str, part: float) -> float:
    """Return the share of the score, or of its factor, that a part takes off."""
    return WEIGHTS.get(name, 1.0) * (1 - part)


def _lack(records: Sequence[ImageRecord], settings: DataSettings) -> float:
    """Return the share of images without a caption; some with and some without are not a caption style.

    Where no image has one of its own, a folder's name or a trigger is nearly as good.
    """
    if all(_adds_nothing(record, settings) for record in records):
        return fmean(
            LONE_STAND_IN_LACK if one.caption_source or one.settings(settings).trigger else 1.0
            for one in records
        )
    return fmean(1 - _captioned(record) for record in records)


def _adds_nothing(record: ImageRecord, settings: DataSettings) -> bool:
    """Whether an image has no caption, or one that is only the folder's name, the trigger or a number."""
    if record.caption_source in (None, FOLDER_NAME):
        return True
    return _is_described(record) and not _own_words(record, settings)


def near_duplicates(records: Sequence[ImageRecord]) -> dict[str, str]:
    """Return, for each record that looks like an earlier one, the earlier one's name.

    Prints that differ in at most n bits agree in one of n + 1 bands, so only those are compared. The two images of a
    pair of a slider are not.
    """
    hexadecimal = "".join(record.measures.structure for record in records)
    prints = np.frombuffer(bytes.fromhex(hexadecimal), np.uint8).reshape(-1, PRINT_LENGTH_BITS // 8)
    bits, words = np.unpackbits(prints, axis=1)[:, ::-1], prints.view(np.uint64)
    colours = [bytes.fromhex(record.measures.colours) for record in records]
    starts = range(0, PRINT_LENGTH_BITS, _BAND_BITS)
    bands = (bits[:, start : start + _BAND_BITS] for start in starts)
    # For each image and band a number that those share whose band is equal.
    keys = np.stack(
        [
            number << _BAND_BITS | band @ (1 << np.arange(band.shape[1]))
            for number, band in enumerate(bands)
        ],
        axis=1,
    )
    # Arrays, whose bytes are joined at once, as each image has a hundred candidates.
    images_of: dict[int, array[int]] = {}
    twins: dict[str, str] = {}
    for index, own_keys in enumerate(map(np.ndarray.tolist, keys)):
        crowds = (images_of[key] for key in own_keys if key in images_of)
        candidates = np.frombuffer(b"".join(crowds), np.int64)
        # All at once, as a hundred others are looked at for each image.
        halves = np.bitwise_count(words[candidates] ^ words[index])
        differing = halves[:, 0] + halves[:, 1]
        is_near = differing <= PRINT_BITS
        candidates, differing = candidates[is_near], differing[is_near]
        either = np.bitwise_count(words[candidates] | words[index])
        is_close = differing <= PRINT_SHARE * (either[:, 0] + either[:, 1])
        for other in sorted(candidates[is_close].tolist()):
            if (pair := records[index].pair) is not None and pair == records[other].pair:
                continue  # they are to differ in one property
            differences = (abs(a - b) for a, b in zip(colours[other], colours[index], strict=True))
            if sum(differences) <= PRINT_COLOUR * len(colours[index]):
                twins[records[index].name] = records[other].name
                break
        else:  # a twin's own twins are found through the first
            for key in own_keys:
                crowd = images_of.setdefault(key, array("q"))
                if len(crowd) < _BAND_CROWD:
                    crowd.append(index)
    return twins


def exposure_fault(measures: Measures) -> str | None:
    """Return "is nearly black", "is washed out" or "has hardly any contrast", else None."""
    if measures.brightest < DARK_BELOW:
        return "is nearly black"
    if measures.darkest > BRIGHT_ABOVE:
        return "is washed out"
    if measures.brightest - measures.darkest < CONTRAST_BELOW:
        return "has hardly any contrast"
    return None


def _captioned(record: ImageRecord) -> float:
    if record.caption_source == FOLDER_NAME:
        return 1 - STAND_IN_LACK
    return 0.0 if record.caption_source is None else 1.0


def _trigger_share(records: Sequence[ImageRecord], settings: DataSettings) -> float:
    if any(settings.of_folder(record.folder).trigger for record in records):
        return 1.0  # captions that lack it get it
    words = Counter(
        word for record in records for word in set(words_in(record.caption)) - _COMMON_WORDS
    )
    return max(words.values(), default=0) / len(records)


_STAND_INS = {
    FOLDER_NAME: "their folder's name",
    FILE_NAME: "their file's name",
    IMAGE_TEXT: "the text inside the image",
}
# Marks that other trainers read: whether a text has one, whether the settings read it, the setting.
_MARKS: Mapping[str, tuple[Callable[[str], bool], Callable[[DataSettings], bool], str]] = {
    "{a|b}": (has_choice, lambda data: data.wildcards, "data.wildcards=true"),
    "|||": (
        lambda text: "|||" in text,
        lambda data: data.keep_tokens_separator is not None,
        "'data.keep_tokens_separator=|||'",
    ),
}
_EXAMPLE_CHARACTERS = 60
# From how many captions, and from which share of them, those that say the same are remarked on.
SAME_FROM, SAME_SHARE = 4, 0.75


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
    yield from _findings_about_words(records, settings)
    # Marks that are trained as words, because no setting reads them.
    for mark, (is_in, is_read, setting) in _MARKS.items():
        names = [
            record.name
            for record in records
            if any(map(is_in, record.written)) and not is_read(settings.of_folder(record.folder))
        ]
        yield from finding_of_all("unread-marks", names, mark=mark, setting=setting)
    # Where most are so, they are what is to be learned: silhouettes, signs.
    names = [record.name for record in records if record.measures.is_like_a_mask]
    if 2 * len(names) <= len(records):
        yield from finding_of_all("looks-like-mask", names)
    if settings.masks != "none":
        learned = [one for one in records if not settings.is_regularisation(one.folder)]
        names = [record.name for record in learned if record.mask is None]
        lack = "no mask" if settings.masks == "files" else "no transparent part"
        yield from finding_of_all("no-mask", names, all=len(learned), lack=lack)
    yield from _findings_about_masks(records)
    yield from _findings_about_references(records)


def _findings_about_words(
    records: Sequence[ImageRecord], settings: DataSettings
) -> Iterator[Finding]:
    """Yield the captions that tell no image from another: those without words of their own, and those all alike."""
    described = [one for one in records if _is_described(one)]
    named = [(one, _own_words(one, settings)) for one in described]
    bare = [one.name for one, words in named if not words]
    yield from finding_of_all("bare-caption", bare, all=len(records))
    (same, count), *_ = [*Counter(words for _, words in named if words).most_common(1), ((), 0)]
    if count >= SAME_FROM and count >= SAME_SHARE * len(described):
        alike = [one for one, words in named if words == same]
        text = one_line(alike[0].written[0])[:_EXAMPLE_CHARACTERS]
        names = [one.name for one in alike]
        yield from finding_of_all("same-caption", names, all=len(records), text=text)


def _is_described(record: ImageRecord) -> bool:
    """Whether somebody wrote a caption that is to say what is in an image: not what changes, nor only its class."""
    is_own = bool(record.written) and record.caption_source not in (None, *_STAND_INS)
    return is_own and not (record.references or record.pair or record.regularisation)


def _own_words(record: ImageRecord, settings: DataSettings) -> tuple[str, ...]:
    """Return the words of a caption beside the trigger word, without numbers."""
    return words_beside(record.written[0], record.settings(settings).trigger or "")


def _findings_about_references(records: Sequence[ImageRecord]) -> Iterator[Finding]:
    """Yield the pairs that change nothing, and those whose image has another shape than the one it was made from."""
    equal, reshaped = list[str](), list[str]()
    for record in records:
        if record.content_hash in {one.content_hash for one in record.references}:
            equal.append(record.name)
        # Of several references only one, and nobody knows which, has to be of the image's shape.
        ratios = [
            record.width_px * one.height_px / (record.height_px * one.width_px)
            for one in record.references
        ]
        if ratios and min(abs(math.log(ratio)) for ratio in ratios) > RESHAPED:
            reshaped.append(record.name)
    yield from finding_of_all("references.equal", equal)
    yield from finding_of_all("references.shape", reshaped)


def _findings_about_masks(records: Sequence[ImageRecord]) -> Iterator[Finding]:
    """Yield how masks are read that are not black and white, and which seem to say another thing than is meant."""
    masked = [(one.name, one.mask) for one in records if one.mask is not None]
    for meaning in ("labels", "lossy labels", "colours", "drawn", "8 of 16 bits"):
        names = [name for name, mask in masked if mask.meaning == meaning]
        kind = f"mask-read.{meaning.replace(' ', '-')}"
        yield from finding_of_all(kind, names, all=len(masked))
    dark = [(mask.brightest, name) for name, mask in masked if mask.brightest < DARK_MASK_BELOW]
    names = [name for _, name in dark]
    brightest = max(dark)[0] if dark else 0
    share = f"{brightest / WHITE:.0%}"
    yield from finding_of_all("dark-mask", names, brightest=brightest, share=share)
    names = [name for name, mask in masked if mask.is_framed]
    yield from finding_of_all("framed-mask", names, all=len(masked))


def _other_captions(records: Sequence[ImageRecord], settings: DataSettings) -> str:
    """Return the setting that finds captions where nobody wrote any, with an example; "" if none does."""
    if settings.caption_fallback != "none":
        return ""
    for record in records[:5]:
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
