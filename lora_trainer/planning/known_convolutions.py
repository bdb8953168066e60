"""Which way of computing convolutions was the fastest on a card, as runs have found it. No torch.

A table of the memo in the cache folder has an entry for each card, family and version of torch, with a way for each
size of the images and precision: other sizes have other algorithms. An entry that cannot be read is as none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import get_args

from lora_trainer.common.memo import MemoTable
from lora_trainer.config.declare import ConvolutionWay, settled
from lora_trainer.config.running import Config, RunConfig
from lora_trainer.hardware.machine import Hardware
from lora_trainer.hardware.nvml import Gpu

# A turn of a way in the comparison ends after so many timed steps, or after so many steps; every way has two turns.
TIMED_STEPS, TURN_STEPS = 3, 8
MOST_STEPS = 2 * TURN_STEPS * len(get_args(ConvolutionWay))
"""Steps that a comparison takes at most."""
_TABLE = "convolutions"


@dataclass(frozen=True, kw_only=True)
class FastestWay:
    """The fastest way, the share of a plain step that it saves, and the day on which that was measured."""

    way: ConvolutionWay
    saves: float
    on: str

    def __str__(self) -> str:
        if self.way == "plain":
            return f"no other way was faster on this card, measured on {self.on}"
        return f"saved {self.saves:.1%} of a step on this card, measured on {self.on}"


def steps_alike(config: Config | RunConfig) -> str:
    """Return what tells the steps of a base apart for its convolutions, as the key of a way."""
    return f"{settled(config.data.resolution)} px, {config.train.precision}"


def known_ways(
    cache_root: Path, hardware: Hardware, *, gpu: Gpu | None, family: str
) -> Mapping[str, FastestWay]:
    """Return the fastest ways of a family on this card by `steps_alike`; never raises."""
    if gpu is None:
        return {}
    entry = MemoTable.load(cache_root, _TABLE).get(_key(hardware, gpu, family))
    with suppress(ValueError, TypeError, AttributeError, KeyError):
        rows = json.loads(entry or "{}").items()
        found = {
            alike: FastestWay(way=row["way"], saves=float(row["saves"]), on=str(row["on"]))
            for alike, row in rows
        }
        if all(each.way in get_args(ConvolutionWay) for each in found.values()):
            return found
    return {}


def remember_way(
    cache_root: Path,
    hardware: Hardware,
    way: ConvolutionWay,
    saves: float,
    *,
    gpu: Gpu,
    family: str,
    alike: str,
) -> None:
    """Note the fastest way of steps; raises MachineError for a disk that refuses."""
    found = dict(known_ways(cache_root, hardware, gpu=gpu, family=family))
    found[alike] = FastestWay(way=way, saves=saves, on=datetime.now(UTC).date().isoformat())
    rows = {
        each: {"way": row.way, "saves": round(row.saves, 4), "on": row.on}
        for each, row in found.items()
    }
    table = MemoTable.load(cache_root, _TABLE)
    table.put(_key(hardware, gpu, family), json.dumps(rows))
    table.save()


def _key(hardware: Hardware, gpu: Gpu, family: str) -> str:
    # Another driver may have other kernels, too.
    torch = hardware.packages.get("torch")
    return f"{gpu.name}, {gpu.total_bytes}, {family}, torch {torch}, driver {gpu.driver}"
