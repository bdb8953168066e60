"""A checked dataset: its usable images with their captions and masks, findings about it, samples of an epoch.

`scan` makes it from a folder; planning, encoding, training and reports read it. The findings' severity,
code (docs/faults.md), sentence and advice are in finding_texts.toml.

Which samples an epoch holds, and in which order, are pure functions of the seed and the epoch's number. Every sample
of the dataset is in every epoch once. Of the regularisation samples each epoch takes the next few of an endless
stream: all of them shuffled, then all shuffled anew, so that none comes a second time before every other has come.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from lora_trainer.common.events import Finding, named
from lora_trainer.common.randomness import Stream, shuffled
from lora_trainer.config.inputs import OWN_FOLDER, DataSettings
from lora_trainer.dataset.buckets import Placement
from lora_trainer.dataset.crops import Crop
from lora_trainer.dataset.images import Measures
from lora_trainer.dataset.masks import Mask
from lora_trainer.dataset.slider_file import Direction

# Begins the names of images in a folder of their own, so that none is like one of the dataset.
REGULARISATION = "regularisation:"
# Of an image in an epoch; copies of the same bytes number their samples from multiples of it.
MAX_REPEATS = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """A usable reference image of an image to learn: what its caption says to change."""

    file: str
    name: str
    content_hash: str
    width_px: int
    height_px: int
    transparent: bool
    recoloured: bool
    placements: tuple[Placement, ...] = ()
    """Its size beside the image at each of the image's resolutions; empty if no base is known."""
    mask: None = None
    crop: None = None

    @property
    def path(self) -> Path:
        """Where it is."""
        return Path(self.file)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageRecord:
    """One usable image.

    (content_hash, copy_index, repeat) names a sample.
    """

    file: str
    name: str
    content_hash: str
    width_px: int
    height_px: int
    """Of the part that is trained, as `height_px` is."""
    measures: Measures
    written: tuple[str, ...]
    """Its captions as they are written."""
    caption: str
    """The caption that it is shown and validated with."""
    caption_source: str | None
    repeats: int
    copy_index: int = 0
    """Number among files with identical bytes, ordered by name."""
    folder: str = OWN_FOLDER
    """Its subfolder, `.` for none; `data.folders` may have settings for it."""
    transparent: bool = False
    """Whether its pixels depend on `data.alpha_background`."""
    recoloured: bool = False
    """Whether its pixels were converted from its colour profile to sRGB."""
    crop: Crop | None = None
    """The part of it that is trained, None for the whole image."""
    whole_px: tuple[int, int] | None = None
    """Width and height of the whole image where a part of it is trained."""
    mask: Mask | None = None
    references: tuple[Reference, ...] = ()
    strength: float = 1.0
    """Strength of the adapter that it is trained at."""
    pair: str | None = None
    """Of a slider from pairs of images: the name of its pair, the first sample of the image at strength 1."""
    regularisation: bool = False
    placements: tuple[Placement, ...] = ()
    """Its place at `data.resolution`, then at each of `data.more_resolutions`; empty if no base is known."""

    @property
    def path(self) -> Path:
        """Where the image is; kept as text, as `Path` objects are large."""
        return Path(self.file)

    @property
    def goes_along(self) -> bool:
        """Whether it is trained with the other image of its pair, and is not a sample of an epoch by itself."""
        return self.pair is not None and self.strength < 0

    @property
    def placement(self) -> Placement:
        """Bucket and crop at `data.resolution`."""
        return self.placements[0]

    def settings(self, data: DataSettings) -> DataSettings:
        """Return the settings of its folder; an image for regularisation has no trigger."""
        settings = data.of_folder(self.folder)
        return settings.model_copy(update={"trigger": None}) if self.regularisation else settings

    def sample_ids(self) -> list[str]:
        """Return one id per repeat, unique in the dataset and independent of file order."""
        first, kind = self.copy_index * MAX_REPEATS, "r" if self.regularisation else ""
        name = self.content_hash[:32]
        return [f"{name}-{kind}{first + repeat}" for repeat in range(self.repeats)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Dataset:
    """The usable images of a folder by name, and the findings."""

    folder: Path
    records: tuple[ImageRecord, ...]
    findings: tuple[Finding, ...]
    fingerprint: str
    """Hash of everything that training reads of the dataset."""
    regularisation: tuple[ImageRecord, ...] = ()
    """Images of the class, trained along so that training does not change the class."""
    directions: tuple[Direction, ...] = ()
    """Of a slider from words, which has no images."""

    @property
    def pairs(self) -> int:
        """How many pairs of images a slider has; 0 for everything else."""
        return sum(record.goes_along for record in self.records)

    @property
    def is_slider(self) -> bool:
        """Whether a slider is trained on it, from words or from pairs of images."""
        return bool(self.directions or self.pairs)


def hold_out(
    records: Sequence[ImageRecord], *, fraction: float, seed: int
) -> tuple[tuple[ImageRecord, ...], tuple[ImageRecord, ...]]:
    """Split records into (trained, held out), the second `fraction` of all, rounded down.

    Drawn by content, so file names do not matter, and files with identical bytes stay on one side: no held-out
    image is ever trained. The images of a pair stay together. Held-out images are measured at `data.resolution` only.
    """

    def unit(record: ImageRecord) -> str:
        return record.content_hash if record.pair is None else record.pair.rpartition("-")[0]

    units = shuffled({unit(record) for record in records}, seed, Stream.VALIDATION_SPLIT)
    chosen = frozenset(units[: int(fraction * len(units))])
    trained = tuple(record for record in records if unit(record) not in chosen)
    held_out = (record for record in records if unit(record) in chosen)
    return trained, tuple(replace(one, placements=one.placements[:1]) for one in held_out)


def bucket_counts(records: Sequence[ImageRecord]) -> dict[str, int]:
    """Return images per epoch, repeats included, by "WIDTHxHEIGHT"."""
    counts: Counter[str] = Counter()
    for record in records:
        counts[str(record.placement.bucket)] += record.repeats
    return dict(sorted(counts.items()))


def mean_aspect_error(records: Sequence[ImageRecord]) -> float | None:
    """Return the mean over images of |width / height - that of the image's bucket|; None without images."""
    pairs = ((record, record.placement.bucket) for record in records)
    errors = [
        abs(one.width_px / one.height_px - bucket.width_px / bucket.height_px)
        for one, bucket in pairs
    ]
    return sum(errors) / len(errors) if errors else None


_ROUND = "#"


def regularisation_count(sample_count: int, *, pool: int, ratio: float) -> int:
    """Return how many regularisation samples go with an epoch of `sample_count` samples, from a pool of them."""
    return max(1, round(sample_count * ratio)) if pool else 0


def epoch_order(
    learned_ids: Iterable[str], regularisation: Sequence[str], *, count: int, seed: int, epoch: int
) -> list[str]:
    """Return the samples of an epoch, `count` of them regularisation samples, shuffled together.

    One of these is named by its id and the round of the stream it comes in, as it may come twice in an
    epoch with other draws; `sample_id` takes the name apart.
    """
    # The positions of this epoch in the endless stream, each in a round of all samples.
    size = len(regularisation)
    positions = range(epoch * count, (epoch + 1) * count if size else epoch * count)
    places = [divmod(position, size) for position in positions]
    orders = {
        turn: shuffled(regularisation, seed, Stream.REGULARISATION, turn)
        for turn in sorted({turn for turn, _ in places})
    }
    names = [f"{orders[turn][index]}{_ROUND}{turn}" for turn, index in places]
    return shuffled([*learned_ids, *names], seed, Stream.ORDER, epoch)


def sample_id(name: str) -> str:
    """Return the id of the sample that stands under a name in an epoch."""
    return name.partition(_ROUND)[0]


def finding(name: str, file: str | None = None, /, **words: object) -> Finding:
    """Return the finding of this name about a file, or about the dataset; `words` fill its sentence."""
    row = _texts()
    for part in name.split("."):
        row = row[part]
    what, advice, code = (row.get(key, "").format(**words) for key in ("what", "advice", "code"))
    kind = name.partition(".")[0]
    return Finding(
        kind=kind, severity=row["severity"], file=file, what=what, advice=advice, code=code
    )


def finding_of_all(name: str, names: Collection[str], /, **words: object) -> list[Finding]:
    """Return one finding that counts and names some files; none where there are no such files."""
    return [finding(name, count=len(names), names=named(names), **words)] if names else []


@cache
def _texts() -> dict[str, Any]:
    return tomllib.loads(files(__package__).joinpath("finding_texts.toml").read_text("utf-8"))
