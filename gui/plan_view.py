"""What a plan says of time and memory, in words and in the parts of a bar, for all pages that show a plan.

Input: the time and the memory of a plan. Outputs: texts and sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lora_trainer.common.wording import bytes_text
from lora_trainer.reporting.plan_record import MemoryItemRecord, MemoryRecord

from .server.translation import Words

_DAY_S = 24 * 3600.0
_WEEK_DAYS = 7
# From here on a time in weeks says too little.
_MONTHS_DAYS = 90
_PARTS = (
    ("program", "program {size}", ("runtime", "library workspaces")),
    ("base", "base model {size}", ("base weights", "VAE weights", "text encoder weights")),
    (
        "adapter",
        "LoRA and optimizer {size}",
        ("adapter weights", "adapter gradients", "optimizer states"),
    ),
    ("margin", "room for others and holes {size}", ("desktop", "allocator slack")),
)
_REST = ("work", "working memory {size}")
_PHASES = {
    "loading": "loading the base model",
    "images": "preparing images",
    "texts": "preparing captions",
    "training": "training",
    "sampling": "drawing samples",
}


@dataclass(frozen=True, kw_only=True)
class MemoryPart:
    """One piece of the memory bar."""

    css: str
    label: str
    size_bytes: float

    @property
    def text(self) -> str:
        """What it is and its size."""
        return self.label.format(size=bytes_text(self.size_bytes))


def span(ends_s: tuple[float, float], said: Words, *, begins: bool = False) -> str:
    """Return how long something takes, from its shortest and longest time; `begins` a sentence or goes on in one.

    From two days on it is said in one unit, coarser and coarser: nobody plans by the difference of 14 and 55 days.
    """
    low_days, high_days = (end / _DAY_S for end in ends_s)
    middle_days = (low_days + high_days) / 2
    if high_days >= _WEEK_DAYS and middle_days < 1.5 * _WEEK_DAYS:
        return said("About a week") if begins else said("about a week")
    if high_days >= _WEEK_DAYS and middle_days < _MONTHS_DAYS:
        return said("Several weeks") if begins else said("several weeks")
    if high_days >= _WEEK_DAYS:
        return said("Several months") if begins else said("several months")
    if high_days < 2:
        low, high = map(_coarse, ends_s)
    elif max(1, round(low_days)) == round(high_days):
        low = high = f"{round(high_days)} days"
    else:
        low, high = f"{max(1, round(low_days))}", f"{round(high_days)} days"
    if low == high:
        return said("About {#}", low) if begins else said("about {#}", low)
    return said("About {#} to {#}", low, high) if begins else said("about {#} to {#}", low, high)


def _coarse(seconds: float) -> str:
    """Return a duration as somebody says it who does not know it better."""
    if seconds < 90:
        return f"{max(10, 10 * round(seconds / 10))} s"
    if seconds < 5400:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h"


def memory_parts(items: Sequence[MemoryItemRecord]) -> Iterator[MemoryPart]:
    """Yield the pieces of the bar that a plan's memory items make."""
    named = {name for _, _, names in _PARTS for name in names}
    for css, label, names in (*_PARTS[:-1], (*_REST, None), _PARTS[-1]):
        size = sum(
            item.bytes
            for item in items
            if (item.name in names if names is not None else item.name not in named)
        )
        if size:
            yield MemoryPart(css=css, label=label, size_bytes=size)


def fit_sentence(memory: MemoryRecord) -> str:
    """Return in a sentence whether it fits."""
    peak = bytes_text(memory.peak_bytes)
    phase = _PHASES.get(memory.phase, memory.phase)
    if not math.isfinite(memory.limit_bytes):
        return f"Needs {peak} at most, while {phase}; no limit is known."
    limit = bytes_text(memory.limit_bytes)
    if memory.fits:
        return f"Fits: needs {peak} of {limit} at most, while {phase}."
    return f"Does not fit: needs {peak}, and {limit} may be used."
