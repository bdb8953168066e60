"""Where the tensors of samples are, and cache entries as tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lora_trainer.config import OWN_FOLDER
from lora_trainer.data.cache import Cache
from lora_trainer.data.cache_keys import CacheKey
from lora_trainer.errors import MachineError
from lora_trainer.families.base import Conditioning

RESIDENT_LIMIT_BYTES = 1 << 30  # entries kept in RAM; a small dataset is read from disk once


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where a sample's tensors are: its latent as is and mirrored (or None), one text entry per variant.

    The first of `texts` is the plain one to validate with; where there are others, these are trained
    with; `of_class` are the same with the class in place of the trigger, None for those without it, and
    empty where that is not asked for. `folder` is the key of `data.folders` that may say more. `size_px`
    is (width, height) of its bucket, `geometry` what the denoiser is told about its crop; what is cut
    away on the left is on the right of the mirrored one. Without a `mask` all of the picture counts.
    `others` are the same picture at other resolutions; they have none themselves.
    """

    plain: CacheKey
    mirrored: CacheKey | None
    texts: tuple[CacheKey, ...]
    size_px: tuple[int, int]
    geometry: Conditioning
    mirrored_geometry: Conditioning
    others: tuple[Source, ...] = ()
    folder: str = OWN_FOLDER
    mask: CacheKey | None = None
    mirrored_mask: CacheKey | None = None
    of_class: tuple[CacheKey | None, ...] = ()
    regularisation: bool = False


@dataclass(kw_only=True)
class Entries:
    """Cache entries as tensors; the first `limit_bytes` of them stay in RAM."""

    cache: Cache
    limit_bytes: int = RESIDENT_LIMIT_BYTES
    used_bytes: int = 0
    resident: dict[str, Mapping[str, Tensor]] = field(default_factory=dict)

    def read(self, key: CacheKey) -> Mapping[str, Tensor]:
        """Return an entry; raises MachineError when it vanished or was damaged after caching."""
        known = self.resident.get(key.digest)
        if known is not None:
            return known
        arrays = self.cache.read(key)
        if arrays is None:
            raise MachineError(
                f"cache entry {key.digest[:12]} vanished or was damaged during training",
                fix="run the same command with --resume: it is encoded again",
            )
        entry = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if self.used_bytes < self.limit_bytes:
            self.resident[key.digest] = entry
            self.used_bytes += sum(tensor.nbytes for tensor in entry.values())
        return entry
