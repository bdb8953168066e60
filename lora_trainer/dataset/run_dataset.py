"""A dataset as a run uses it: scanned with the memo of the cache folder, each image placed in its buckets."""

from __future__ import annotations

from pathlib import Path

from lora_trainer.common.files import CappedFolder, user_cache_folder
from lora_trainer.config.running import Config
from lora_trainer.dataset.buckets import buckets_for, placing
from lora_trainer.dataset.decode_memo import DatasetMemo
from lora_trainer.dataset.records import Dataset
from lora_trainer.dataset.scan import scan
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


def read_dataset(folder: Path, config: Config, facts: BaseFacts) -> Dataset:
    """Scan a dataset for a base, skipping images whose check the cache folder's memo has already."""
    memo = DatasetMemo(cache_folder(config))
    place_image = placing(
        config.data, resolution_px=facts.resolution_px, step_px=facts.bucket_step_px
    )
    dataset = scan(folder, settings=config.data, memo=memo, place_image=place_image)
    memo.save()
    return dataset


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
