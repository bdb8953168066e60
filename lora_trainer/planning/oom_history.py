"""Cards on which a run that was planned to fit did not, so that the next one there is planned below it.

A prediction cannot see what a driver or an allocator adds. Input is a file in the cache folder; output
the share of its free memory a card may be planned to fill. It is kept by card, family and version of
torch, since any other of these may do better, and only ever makes a plan smaller: never wrong.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from lora_trainer.common.files import disk_error, write_atomic
from lora_trainer.hardware.machine import Hardware

FILE_NAME = ".full-cards.json"
BELOW = 0.95
"""The next plan stays below this much of one that did not fit."""
PLAUSIBLE = 0.7
"""A plan for less of the limit than this did not fail by its prediction: something else was there too."""


@dataclass(frozen=True, kw_only=True)
class OomRecord:
    """What is known of a card: plans may fill `share` of what is free, because of what was seen `on`."""

    share: float
    on: str

    def __str__(self) -> str:
        return f"{self.share:.0%} of it, as a run planned to fit ran out of memory on {self.on}"


@dataclass(frozen=True, kw_only=True)
class OomHistory:
    """The memo of this machine; a damaged file is the same as none."""

    file: Path

    @classmethod
    def of(cls, cache_root: Path) -> OomHistory:
        return cls(file=cache_root / FILE_NAME)

    def known(self, hardware: Hardware, family: str) -> OomRecord | None:
        """Return what is known of the card that would be used; never raises."""
        if not hardware.gpus:
            return None
        match self._entries().get(_key(hardware, family)):
            case [float(share), str(on)] if 0.0 < share < 1.0:
                return OomRecord(share=share, on=on)
            case _:
                return None

    def remember(
        self, hardware: Hardware, family: str, *, planned_bytes: int, limit_bytes: int
    ) -> OomRecord | None:
        """Note that a plan for `planned_bytes` of `limit_bytes` ran out of memory; raises MachineError.

        `limit_bytes` is all that was free or allowed. Returns what later plans will go by, None when
        the plan was too far below its limit to be at fault.
        """
        if planned_bytes < PLAUSIBLE * limit_bytes:
            return None
        found = OomRecord(
            share=round(BELOW * min(planned_bytes / limit_bytes, 1.0), 4),
            on=datetime.now(UTC).date().isoformat(),
        )
        known = self.known(hardware, family)
        if known is not None and known.share <= found.share:
            return known
        entries = {**self._entries(), _key(hardware, family): [found.share, found.on]}
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise disk_error(self.file, error) from error
        write_atomic(self.file, json.dumps(entries, indent=1).encode(), durable=False)
        return found

    def _entries(self) -> dict[str, object]:
        try:
            found = json.loads(self.file.read_bytes())
        except (OSError, ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


def _key(hardware: Hardware, family: str) -> str:
    card = (hardware.usable() or hardware.gpus)[0]
    return f"{card.name}, {card.total_bytes}, {family}, torch {hardware.packages.get('torch')}"
