"""What is in a folder of images, at a glance: count, thumbnails, findings in plain words.

Inputs: the folder and the JSON of `lora-train check --json`. Output: escaped markup. The thumbnails
come from our own route, which makes them when they are first asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lora_trainer.reporting.charts import Html, tag
from lora_trainer.reporting.history import mapping, number, sequence

from .media import thumb_url

SHOWN = 24
_SHOWN_FINDINGS = 12
_GOOD, _FAIR = 0.8, 0.6


def summary(folder: Path, values: Mapping[str, Any], files: list[str]) -> Html:
    """Return the report of a dataset; `files` are the names of its images, in their order."""
    count = int(number(values, "images"))
    findings = [row for row in sequence(values, "findings") if isinstance(row, dict)]
    return tag(
        "div",
        tag("h3", f"{count:,} {'image' if count == 1 else 'images'}, {_verdict(values, findings)}"),
        tag("div", *(_thumbnail(folder, name) for name in files[:SHOWN]), class_="thumbnails"),
        _more(len(files) - SHOWN),
        tag("ul", *_findings(findings), class_="problems") if findings else None,
        tag("p", _buckets(values), class_="quiet"),
        class_="summary",
    )


def _verdict(values: Mapping[str, Any], findings: Sequence[Mapping[str, Any]]) -> str:
    score = number(values, "score")
    if not findings:
        return "nothing to remark"
    if score >= _GOOD:
        return f"good to train on (score {score:.2f} of 1)"
    if score >= _FAIR:
        return f"usable, with weak points (score {score:.2f} of 1)"
    return f"worth improving first (score {score:.2f} of 1)"


def _thumbnail(folder: Path, name: str) -> Html:
    return tag(
        "img", src=thumb_url(folder, name, size_px=192), alt=name, title=name, loading="lazy"
    )


def _more(count: int) -> Html | None:
    return tag("p", f"and {count:,} more.", class_="quiet") if count > 0 else None


def _findings(findings: Sequence[Mapping[str, Any]]) -> Iterator[Html]:
    for row in findings[:_SHOWN_FINDINGS]:
        yield tag(
            "li",
            tag("b", f"{row['file']}: ") if row.get("file") else None,
            f"{row.get('what', '')}. ",
            tag("span", str(row.get("advice", "")), class_="quiet"),
            class_=str(row.get("severity", "note")),
        )
    if len(findings) > _SHOWN_FINDINGS:
        yield tag("li", f"and {len(findings) - _SHOWN_FINDINGS} more; the page Datasets has all.")


def _buckets(values: Mapping[str, Any]) -> str:
    sizes = [f"{count} in {name}" for name, count in mapping(values, "buckets").items()]
    return f"Trained in these sizes: {', '.join(sizes)}." if sizes else ""
