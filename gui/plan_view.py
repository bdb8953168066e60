"""What a plan says of memory, in words and in the parts of a bar, for the pages that show a plan.

Input: the JSON of `lora-train plan --json`. Outputs: texts in English and sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lora_trainer.common.wording import bytes_text
from lora_trainer.reporting.history import number

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


def memory_parts(items: Sequence[Any]) -> Iterator[MemoryPart]:
    """Yield the pieces of the bar that a plan's memory items make."""
    rows = [row for row in items if isinstance(row, dict)]
    named = {name for _, _, names in _PARTS for name in names}
    for css, label, names in (*_PARTS[:-1], (*_REST, None), _PARTS[-1]):
        size = sum(
            number(row, "bytes")
            for row in rows
            if (row.get("name") in names if names is not None else row.get("name") not in named)
        )
        if size:
            yield MemoryPart(css=css, label=label, size_bytes=size)


def fit_sentence(memory: Mapping[str, Any]) -> str:
    """Return in a sentence whether it fits."""
    peak = bytes_text(number(memory, "peak_bytes"))
    phase = _PHASES.get(str(memory.get("phase")), str(memory.get("phase")))
    if memory.get("limit_bytes") is None:
        return f"Needs {peak} at most, while {phase}; no limit is known."
    limit = bytes_text(number(memory, "limit_bytes"))
    if memory.get("fits"):
        return f"Fits: needs {peak} of {limit} at most, while {phase}."
    return f"Does not fit: needs {peak}, and {limit} may be used."
