"""What is in a folder of images, at a glance: how many, how good, what is odd about them.

Input: the JSON of `lora-train check --json`. Output: what report.html shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lora_trainer.reporting.charts import Html
from lora_trainer.reporting.history import mapping, number, sequence

from ..datasets.findings import IN_SIGHT, all_are_pairs, remarks
from ..datasets.view import NOT_JUDGED, is_warned_of, verdict
from ..server.templates import render
from ..server.translation import Words


def report(values: Mapping[str, Any], said: Words, *, assumed: str = "") -> tuple[Html, bool]:
    """Return the report of a dataset, and whether it warns of nothing.

    `assumed` is the base that the images are judged for where nobody has chosen one.
    """
    findings = [
        row
        for row in sequence(values, "findings")
        if isinstance(row, dict) and row.get("kind") not in NOT_JUDGED
    ]
    is_good = not is_warned_of(findings)
    # The heading says that.
    others = [row for row in findings if not all_are_pairs(row)]
    shown = render(
        "train/report.html",
        said,
        count=int(number(values, "images")),
        of_pairs=len(others) < len(findings),
        unreadable=sum(row.get("kind") == "unusable" for row in findings),
        verdict=verdict(number(values, "score"), findings),
        is_good=is_good,
        assumed=assumed,
        remarks=remarks(others, said, of_pairs=len(others) < len(findings)),
        most=IN_SIGHT,
        buckets=mapping(values, "buckets"),
    )
    return shown, is_good
