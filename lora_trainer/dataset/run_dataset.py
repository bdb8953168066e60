"""A dataset as a run uses it: scanned with the help of the memo, each image assigned to its bucket.

Inputs: the folder, the settings, the facts of the base. Outputs: the dataset, placements by record name,
and the cache folder. Only the memo is written, which saves time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from lora_trainer.common.files import CappedFolder, user_cache_folder
from lora_trainer.common.gc_control import gc_disabled
from lora_trainer.common.memo import HashMemo
from lora_trainer.config.config import Config
from lora_trainer.dataset.buckets import Placement, buckets_for, place
from lora_trainer.dataset.decode_memo import DecodeMemo
from lora_trainer.dataset.regularisation import scan_all
from lora_trainer.dataset.scan import Dataset, ImageRecord
from lora_trainer.families.base import BaseFacts
from lora_trainer.hardware.machine import GIB


def cache_folder(config: Config) -> Path:
    """Return the cache root from the setting, or the platform's folder for caches."""
    if config.data.cache_dir != "auto":
        return Path(config.data.cache_dir).expanduser()
    return user_cache_folder()


def cache_in(config: Config) -> CappedFolder:
    """Return the cache with its size cap."""
    limit_bytes = int(config.data.cache_max_gib * GIB)
    return CappedFolder(root=cache_folder(config), limit_bytes=limit_bytes)


def scan_with_memo(folder: Path, config: Config, cache_root: Path) -> Dataset:
    """Scan a dataset, skipping images whose hash and check the cache folder's memo has already."""
    with gc_disabled():
        memo = HashMemo.load(cache_root)
        verified = DecodeMemo.load(cache_root)
    dataset = scan_all(folder, settings=config.data, memo=memo, verified=verified)
    memo.save()
    verified.save()
    return dataset


def place_all(dataset: Dataset, config: Config, facts: BaseFacts) -> dict[str, Placement]:
    """Return the bucket and crop of each image at `data.resolution`, by record name."""
    resolution = config.data.resolution
    resolution_px = facts.resolution_px if resolution == "auto" else resolution
    records = (*dataset.records, *dataset.regularisation)
    return _place_at(resolution_px, records, config, facts)


def place_more(
    records: Sequence[ImageRecord], config: Config, facts: BaseFacts
) -> tuple[dict[str, Placement], ...]:
    """Return the placements of these records at each of `data.more_resolutions`."""
    return tuple(
        _place_at(side_px, records, config, facts, setting="data.more_resolutions")
        for side_px in config.data.more_resolutions
    )


def _place_at(
    resolution_px: int,
    records: Sequence[ImageRecord],
    config: Config,
    facts: BaseFacts,
    *,
    setting: str = "data.resolution",
) -> dict[str, Placement]:
    buckets = buckets_for(
        resolution_px=resolution_px,
        step_px=facts.bucket_step_px,
        max_aspect=config.data.max_aspect if config.data.buckets else 1.0,
        setting=setting,
    )
    # A dataset has many images but few sizes: one placement per size saves time and memory.
    sizes = {(record.width_px, record.height_px) for record in records}
    placed = {size: place(*size, buckets=buckets) for size in sizes}
    return {record.name: placed[record.width_px, record.height_px] for record in records}


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


def mean_aspect_error(
    records: Sequence[ImageRecord], placements: Mapping[str, Placement]
) -> float | None:
    """Return the mean over images of |width / height - that of the image's bucket|; None without images."""
    errors = [
        abs(
            record.width_px / record.height_px
            - placements[record.name].bucket.width_px / placements[record.name].bucket.height_px
        )
        for record in records
    ]
    return sum(errors) / len(errors) if errors else None


def bucket_counts(
    records: tuple[ImageRecord, ...], placements: Mapping[str, Placement]
) -> dict[str, int]:
    """Return images per epoch, repeats included, by "WIDTHxHEIGHT"."""
    counts: Counter[str] = Counter()
    for record in records:
        counts[str(placements[record.name].bucket)] += record.repeats
    return dict(sorted(counts.items()))
