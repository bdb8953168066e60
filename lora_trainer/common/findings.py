"""Findings about a dataset: rows for console, report and `check --json`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

MAX_FILES_NAMED = 5

Severity = Literal["note", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
"""Most severe first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing found; `file` is relative to the dataset folder, `code` a case in FAULTS.

    `what` continues the file's name ("is empty"), or is a sentence of its own when `file` is None.
    Severity "error" is an image that is left out.
    """

    kind: str
    severity: Severity
    file: str | None
    what: str
    advice: str
    code: str = ""


def unusable(file: str, what: str, *, advice: str, code: str) -> Finding:
    """Return the finding for an image that is left out."""
    return Finding(
        kind="unusable", severity="error", file=file, what=what, advice=advice, code=code
    )


def note(kind: str, file: str | None, what: str, *, advice: str, code: str = "") -> Finding:
    """Return a finding of severity "note"."""
    return Finding(kind=kind, severity="note", file=file, what=what, advice=advice, code=code)


def warning(kind: str, file: str | None, what: str, *, advice: str, code: str = "") -> Finding:
    """Return a finding of severity "warning"."""
    return Finding(kind=kind, severity="warning", file=file, what=what, advice=advice, code=code)


def by_severity(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """Order findings: most severe first, then by file and kind."""

    def order(finding: Finding) -> tuple[int, str, str]:
        return SEVERITIES.index(finding.severity), finding.file or "", finding.kind

    return tuple(sorted(findings, key=order))


def named(names: Iterable[str]) -> str:
    """Return the first few of many names for a sentence."""
    ordered = sorted(names)
    rest = len(ordered) - MAX_FILES_NAMED
    return ", ".join(ordered[:MAX_FILES_NAMED]) + (f" and {rest} more" if rest > 0 else "")


def shown(text: str) -> str:
    """Return a file name fit for one line of a log: control characters and odd bytes escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
