"""What a plan says of time and memory, in words and in the parts of a bar, for all pages that show a plan.

Input: the time and the memory of a plan. Outputs: texts and sizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lora_trainer.common.wording import bytes_text, span_text
from lora_trainer.reporting.plan_record import MemoryItemRecord, MemoryRecord, TimeRecord

from .server.translation import Words

_PARTS = (
    ("program", "program {size}", ("runtime", "library workspaces")),
    ("base", "base model {size}", ("base weights", "VAE weights", "text encoder weights")),
    (
        "adapter",
        "LoRA and optimizer {size}",
        ("adapter weights", "adapter gradients", "optimizer states"),
    ),
    ("margin", "reserve {size}", ("desktop", "allocator slack")),
)
_REST = ("work", "working memory {size}")
# How much longer the bar is than what it shows.
_ROOM = 1.04
_PHASES = {
    "loading": "loading the base model",
    "images": "preparing images",
    "texts": "preparing captions",
    "training": "training",
    "sampling": "drawing samples",
}
# Where a value comes from in words, by the first word of its layer in the plan; a file is named.
_ORIGINS = {
    "default": "usual",
    "command line": "changed by you",
    "planner": "chosen automatically",
    "family": "usual for this model",
    "tier": "usual for this much memory",
    "cell": "usual for this much memory",
    "priority": "usual for what matters most to you",
    "concept": "usual for such a subject",
    "slider": "usual for a slider",
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
    """Return how long something takes, from its shortest and longest time; `begins` a sentence or goes on in one."""
    text = said.message(span_text(ends_s))
    return text[:1].upper() + text[1:] if begins else text


def from_now_s(time: TimeRecord) -> tuple[float, float] | None:
    """Return the shortest and the longest time of a training that starts now, beside the programs that run now."""
    pair, slower = time.range_s, load_of(time)
    return None if pair is None else (pair[0] * slower, pair[1] * slower)


def load_of(time: TimeRecord) -> float:
    """Return how many times as long a training takes beside the programs that run now."""
    return max(1.0, time.beside_others)


def origin_said(layer: str, said: Words) -> str:
    """Return where a value comes from in words."""
    known = _ORIGINS.get(layer) or _ORIGINS.get(layer.partition(" ")[0])
    return said("from {}", layer) if known is None else said(known)


def bar_bytes(memory: MemoryRecord) -> float:
    """Return how many bytes the bar is long: all that may be used, or what is needed where that is more.

    A bar of what is needed alone is full whatever the machine has, and looks as though it were about to burst.
    """
    limit = memory.limit_bytes if math.isfinite(memory.limit_bytes) else 0.0
    return max(memory.peak_bytes, limit) * _ROOM or 1.0


def limit_share(memory: MemoryRecord) -> float | None:
    """Return where in the bar the limit is, as a share of it; None where none is known."""
    share = memory.limit_bytes / bar_bytes(memory)
    return share if share <= 1 else None


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
