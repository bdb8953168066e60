"""Texts made to be read: numbers with their units, and texts without secrets and folders.

Numbers become short ASCII text, used by the console, the status file and the report, so that the three never
disagree. Texts that are printed, logged or shared lose tokens of well-known forms, passwords in addresses, the
values of environment variables with names such as TOKEN or SECRET, and the names of folders.
"""

from __future__ import annotations

import json
import math
import os
import re
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

GIB = 2**30
_DAY_S = 24 * 3600.0
_WEEK_DAYS = 7
# From here on a time in weeks says too little.
_MONTHS_DAYS = 90
# Exit codes of a run that stopped because somebody asked for it, its state saved.
INTERRUPTED_EXIT_CODES = frozenset({0, 130, 143})


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


def span_text(ends_s: tuple[float, float]) -> str:
    """Return how long something takes, from its shortest and longest time: `about 20 to 35 min`.

    The unit is said once where both have the same. From ten hours on it is said coarser and coarser: nobody plans by
    the difference of 14 and 55 days.
    """
    low_days, high_days = (end / _DAY_S for end in ends_s)
    middle_days = (low_days + high_days) / 2
    if high_days >= _WEEK_DAYS and middle_days < 1.5 * _WEEK_DAYS:
        return "about a week"
    if high_days >= _WEEK_DAYS:
        return "several weeks" if middle_days < _MONTHS_DAYS else "several months"
    if high_days < 2:
        low, high = (_coarse(end_s, longest_s=ends_s[1]) for end_s in ends_s)
        if low != high and low.split()[1] == high.split()[1]:
            low = low.split()[0]
    elif max(1, round(low_days)) == round(high_days):
        low = high = f"{round(high_days)} days"
    else:
        low, high = f"{max(1, round(low_days))}", f"{round(high_days)} days"
    return f"about {low}" if low == high else f"about {low} to {high}"


def _coarse(seconds: float, *, longest_s: float) -> str:
    """Return a duration as somebody says it who does not know it better, of something that may take `longest_s`."""
    if longest_s < 90 or seconds < 50:
        return f"{max(10, 10 * round(seconds / 10))} s"
    if longest_s < 5400 or seconds < 3600:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.{0 if longest_s >= 36_000 else 1}f} h"


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


def gib(size_bytes: int) -> str:
    """Return a size in GiB with two decimals and the unit."""
    return f"{size_bytes / GIB:.2f} GiB"


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
    return _compared(
        loss,
        base_loss,
        below="{} % below the base's",
        above="{} % above the base's",
        same="the same as the base's",
        unknown="not comparable with the base's",
    )


def better_than_base(loss: float, base_loss: float) -> str:
    """Return `41 % better than the base`, `3 % worse than the base` or `as good as the base`.

    The figure is that of `against_base`; these are the words for who does not know what a loss is.
    """
    return _compared(
        loss,
        base_loss,
        below="{} % better than the base",
        above="{} % worse than the base",
        same="as good as the base",
        unknown="not comparable with the base",
    )


def _compared(
    loss: float, base_loss: float, *, below: str, above: str, same: str, unknown: str
) -> str:
    """Return the words for how a loss compares with the base's; `{}` in them is the percentage."""
    change = loss / base_loss - 1 if base_loss > 0 else math.nan
    if not math.isfinite(change):
        return unknown
    percent = _percent(change)
    if float(percent) == 0:
        return same
    return (below if change < 0 else above).format(percent)


def _percent(change: float) -> str:
    """Return the size of a change as `41`, below ten as `3.4`."""
    return f"{abs(change) * 100:.0f}" if abs(change) >= 0.0995 else f"{abs(change) * 100:.1f}"


def one_line(message: str) -> str:
    """Return `message` without the line breaks and control characters that could forge output."""
    words = " ".join(message.split())
    return "".join(character if character.isprintable() else "?" for character in words)


# Join letters in Persian, in scripts of India and in emoji, and are in names for that.
_JOINERS = "\u200c\u200d"


def escaped(text: str, *, keep: str = "") -> str:
    """Return a text from elsewhere fit for a terminal, a log or a page: what controls them is escaped.

    Those are control characters, signs that turn the direction of the words after them, and odd bytes. `keep`
    are those that stay, such as line breaks between whole lines.
    """
    if text.isprintable():
        return text
    return "".join(
        character
        if _is_shown(character) or character in keep
        # Half a character has no other form in ASCII.
        else character.encode("unicode_escape").decode()
        for character in text
    )


def _is_shown(character: str) -> bool:
    return (
        character.isprintable()
        or character in _JOINERS
        or unicodedata.category(character) == "Zs"  # blanks of other widths
    )


def json_text(value: Any, *, indent: int | None = None) -> str:
    """Return a value as readable JSON, with escapes for what controls a terminal."""
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    return "".join(
        character if _is_shown(character) or character == "\n" else json.dumps(character)[1:-1]
        for character in text
    )


# ---- without secrets

STRUCK = "[token]"
# Shorter values of secret variables are not removed: they may be ordinary words of any text.
_MIN_LENGTH = 8
_FORMS = (
    (re.compile(r"\b(?:hf|ghp|gho|github_pat|glpat|wandb_v1)[_-]\w{16,}"), STRUCK),
    (re.compile(r"\bsk-[\w-]{20,}"), STRUCK),
    (re.compile(r"(?<=://)[^/\s@]+@"), ""),
    (re.compile(r"(?i)([?&](?:token|access_token|api_?key|key)=)[^&\s]+"), rf"\1{STRUCK}"),
    (re.compile(r"(?i)\b(bearer\s+)[\w.~+/-]{16,}"), rf"\1{STRUCK}"),
)
_SECRET_NAME = re.compile(
    r"(?i)(?:^|_)(?:token|secret|password|passwd|pass|key|credentials?)(?:_|$)"
)


def without_secrets(text: str) -> str:
    """Return `text` with all tokens and passwords removed."""
    return _struck(text, _environment_secrets())


def _environment_secrets() -> list[str]:
    """Return the values of secret variables, the longest first."""
    values = {value.strip() for name, value in os.environ.items() if _SECRET_NAME.search(name)}
    long = (value for value in values if len(value) >= _MIN_LENGTH)
    # A short secret may be part of a longer one, which must be replaced before it.
    return sorted(long, key=len, reverse=True)


def _struck(text: str, secrets: Iterable[str]) -> str:
    for pattern, substitute in _FORMS:
        text = pattern.sub(substitute, text)
    for value in secrets:
        text = text.replace(value, STRUCK)
    return text


def secret_keys(values: Mapping[str, Any]) -> list[str]:
    """Return the keys whose value contains a secret at any depth."""
    secrets = _environment_secrets()
    return [
        key
        for key, value in values.items()
        if any(_struck(text, secrets) != text for text in _texts(value))
    ]


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts([*value, *value.values()])
    elif isinstance(value, Iterable):
        for inner in value:
            yield from _texts(inner)


_START = r"(?:file:/+|/(?=[^/\s]+/)|~[\\/]|[A-Za-z]:[\\/](?!/)|\\\\|\.\.[\\/])"
_WHOLE_PATH = re.compile(_START)
_PATH_IN_TEXT = re.compile(rf"(?<![\w:/.~\\-]){_START}[^\s\"'<>|]*")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WEIGHTS = (".safetensors", ".ckpt", ".pt", ".gguf")


def public_text(value: str) -> str:
    """Reduce a path to its last name, strike paths and tokens out of text, make it valid UTF-8."""
    text = without_secrets(value.encode("utf-8", "replace").decode("utf-8"))
    if _WHOLE_PATH.match(text):
        return re.split(r"[\\/]+", text.rstrip("\\/"))[-1]
    return _PATH_IN_TEXT.sub("[path]", text)


def public_source(value: str) -> str:
    """Reduce a setting that names a model: a Hub id stays, of a file or folder the name is left.

    "owner/name" could be a folder too; it is taken for a Hub id. Of a file in a repository the file's name is left.
    """
    text = public_text(value)
    if is_hub_id(text) and not text.endswith(_WEIGHTS):
        return text
    return re.split(r"[\\/]+", text.rstrip("\\/"))[-1]


def is_hub_id(text: str) -> bool:
    """Say whether a text has the form of a Hub id, "owner/name", which could be a folder's, too."""
    return _HUB_ID.fullmatch(text) is not None


def reach_text(reach: Sequence[float]) -> str:
    """Return how far the strengths 1 and -1 of a slider go along their goals, in words."""
    more, less = reach
    return f"strength 1 goes {more:.0%} of the way to its goal, -1 {less:.0%}"
