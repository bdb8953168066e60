"""What is known about a run, or about a file made from others, when an adapter is exported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lora_trainer.families.base import Prediction


@dataclass(frozen=True, kw_only=True)
class SubsetSummary:
    """One folder of training images: its name, repeats of each image, one caption per image."""

    folder: str
    repeats: int
    captions: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ExportInfo:
    """What is known about a run when a file is exported; the same info gives the same bytes.

    `settings` is the planned configuration as `config.flatten` gives it (no `auto` left but where a
    value follows the base: `zero_terminal_snr` is what was used). `rank` and `alpha` are those of
    most modules; `buckets` counts images per epoch by "WIDTHxHEIGHT"; times are Unix seconds.
    """

    title: str
    rank: int
    alpha: float
    base_name: str
    base_identity: str
    base_model_version: str
    architecture: str
    prediction: Prediction
    settings: Mapping[str, Any]
    subsets: tuple[SubsetSummary, ...]
    buckets: Mapping[str, int]
    step: int
    images_seen: int
    started_at_s: float
    saved_at_s: float
    trigger: str | None = None
    description: str = ""
    author: str = ""
    license: str = ""
    thumbnail_jpeg: bytes | None = None
    zero_terminal_snr: bool = False
    regularisation_per_epoch: int = 0
    merged_from: tuple[str, ...] = ()

    @property
    def images_per_epoch(self) -> int:
        """Images seen in one epoch, repeats included."""
        return sum(len(subset.captions) * subset.repeats for subset in self.subsets)
