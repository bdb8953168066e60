"""Numbers as people read them: durations, bytes, losses, rates, comparisons with the base.

Inputs: plain numbers with their unit in the name. Output: short ASCII text, used by the console,
the status file and the report, so that the three never disagree.
"""

from __future__ import annotations

import math

INTERRUPTED_EXIT_CODES = frozenset({0, 130, 143})
"""Exit codes of a run that stopped because somebody asked for it, its state saved."""


def duration_text(seconds: float) -> str:
    """Return `8.4 s`, `4 min 12 s` or `2 h 05 min`."""
    if not math.isfinite(seconds):
        return "unknown"
    if seconds < 59.95:
        return f"{max(0.0, seconds):.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return (
        f"{minutes} min {rest:02d} s"
        if minutes < 60
        else f"{minutes // 60} h {minutes % 60:02d} min"
    )


def clock_text(seconds: float) -> str:
    """Return `0:38` or `2:05:09`, for a figure that changes in place."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    return (
        f"{minutes}:{rest:02d}"
        if minutes < 60
        else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
    )


def bytes_text(size_bytes: float) -> str:
    """Return `812 B`, `3.2 MiB`, `11.1 GiB`."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1023.95:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


def loss_text(loss: float) -> str:
    """Return four decimals, or a power of ten where four decimals would hide the value."""
    if not math.isfinite(loss):
        return "not a number"
    return f"{loss:.4f}" if loss == 0 or abs(loss) >= 0.001 else f"{loss:.1e}"


def rate_text(rate: float) -> str:
    """Return a learning rate as `1.9e-4`."""
    if not math.isfinite(rate):
        return "not a number"
    mantissa, exponent = f"{rate:.2e}".split("e")
    return f"{mantissa.rstrip('0').rstrip('.')}e{int(exponent)}" if rate else "0"


def step_seconds_text(seconds: float) -> str:
    """Return `0.21 s` or `38 ms`."""
    return f"{seconds * 1000:.0f} ms" if seconds < 0.0995 else f"{seconds:.2f} s"


def against_base(loss: float, base_loss: float) -> str:
    """Return `41 % below the base's`, `3 % above the base's` or `the same as the base's`."""
    change = loss / base_loss - 1 if base_loss > 0 else math.nan
    if not math.isfinite(change):
        return "not comparable with the base's"
    percent = f"{abs(change) * 100:.0f}" if abs(change) >= 0.0995 else f"{abs(change) * 100:.1f}"
    if float(percent) == 0:
        return "the same as the base's"
    return f"{percent} % below the base's" if change < 0 else f"{percent} % above the base's"


def one_line(message: str) -> str:
    """Return `message` without the line breaks and control characters that could forge output."""
    words = " ".join(message.split())
    return "".join(character if character.isprintable() else "?" for character in words)
