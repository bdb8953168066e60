"""A checked dataset: its usable images with their captions and masks.

`scan` makes it from a folder; planning, encoding, training and reports read it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lora_trainer.common.events import Finding
from lora_trainer.common.randomness import Stream, shuffled
from lora_trainer.config.inputs import OWN_FOLDER, DataSettings
from lora_trainer.dataset.buckets import Placement
from lora_trainer.dataset.listing import MAX_REPEATS
from lora_trainer.dataset.masks import Mask
from lora_trainer.dataset.measures import Measures


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageRecord:
    """One usable image: its captions as they are written, and the one it is shown and validated with.

    `folder` is the subfolder it lies in, `.` for none: `data.folders` may say more of it. `copy_index`
    numbers files with identical bytes by name, so that (content_hash, copy_index, repeat) names a
    sample. `transparent`: its pixels depend on `data.alpha_background`. `placements`: where it goes at
    `data.resolution`, then at each of `data.more_resolutions`; empty where no base is known.
    """

    file: str
    name: str
    content_hash: str
    width_px: int
    height_px: int
    written: tuple[str, ...]
    caption: str
    caption_source: str | None
    repeats: int
    copy_index: int = 0
    folder: str = OWN_FOLDER
    transparent: bool = False
    measures: Measures | None = None
    mask: Mask | None = None
    regularisation: bool = False
    placements: tuple[Placement, ...] = ()

    @property
    def path(self) -> Path:
        """Where the image is; kept as text, as `Path` objects are large."""
        return Path(self.file)

    @property
    def placement(self) -> Placement:
        """Bucket and crop at `data.resolution`."""
        return self.placements[0]

    def settings(self, data: DataSettings) -> DataSettings:
        """Return the settings of its folder; an image for regularisation has no trigger."""
        folder_settings = data.of_folder(self.folder)
        return (
            folder_settings.model_copy(update={"trigger": None})
            if self.regularisation
            else folder_settings
        )

    def sample_ids(self) -> list[str]:
        """Return one id per repeat, unique in the dataset and independent of file order."""
        first, kind = self.copy_index * MAX_REPEATS, "r" if self.regularisation else ""
        name = self.content_hash[:32]
        return [f"{name}-{kind}{first + repeat}" for repeat in range(self.repeats)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Dataset:
    """The usable images of a folder by name, findings, and a hash of everything that training reads of it.

    `regularisation`: images of the class, trained along so that training does not change it.
    """

    folder: Path
    records: tuple[ImageRecord, ...]
    findings: tuple[Finding, ...]
    fingerprint: str
    regularisation: tuple[ImageRecord, ...] = ()


def hold_out(
    records: Sequence[ImageRecord], *, fraction: float, seed: int
) -> tuple[tuple[ImageRecord, ...], tuple[ImageRecord, ...]]:
    """Split records into (trained, held out), the second `fraction` of all, rounded down.

    Drawn by content, so file names do not matter, and files with identical bytes stay on one side: no held-out
    image is ever trained. Held-out images are measured at `data.resolution` only.
    """
    contents = shuffled({record.content_hash for record in records}, seed, Stream.VALIDATION_SPLIT)
    chosen = frozenset(contents[: int(fraction * len(contents))])
    trained = tuple(record for record in records if record.content_hash not in chosen)
    held_out = (record for record in records if record.content_hash in chosen)
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
