"""What is in a folder of images, at a glance: how many, what is odd about them, in plain words.

Inputs: the folder and the JSON of `lora-train check --json`. Output: escaped markup. Remarks of a kind
stand together, with a link to where they are mended.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from lora_trainer.reporting.charts import Html
from lora_trainer.reporting.history import mapping, number, sequence

from .datasets.view import badge_kind
from .markup import icon, inline, link_button, tag

_NAMED = 4
_GOOD, _FAIR = 0.8, 0.6


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of remark: what it says of some images, and of one; why it matters; the button."""

    some: str
    one: str
    why: str
    button: str = "Show"


KINDS = {
    "no-caption": Kind(
        some="{count} images have no caption",
        one="1 image has no caption",
        why="A caption says what is in an image; what it names can be left out or changed later.",
        button="Caption them",
    ),
    "unusable": Kind(
        some="{count} files cannot be read as images",
        one="1 file cannot be read as an image",
        why="They are left out of the training.",
    ),
    "duplicate": Kind(
        some="{count} images are there twice",
        one="1 image is there twice",
        why="What is there twice counts twice, and is learned by heart.",
    ),
    "near-duplicate": Kind(
        some="{count} images are nearly the same as another",
        one="1 image is nearly the same as another",
        why="Different views teach more than many alike.",
    ),
    "low-resolution": Kind(
        some="{count} images are small and would be enlarged",
        one="1 image is small and would be enlarged",
        why="Enlarged images are soft, and so is what is learned from them.",
    ),
    "exposure": Kind(
        some="{count} images are too dark, too bright or flat",
        one="1 image is too dark, too bright or flat",
        why="The look of the photograph is learned with what it shows.",
    ),
}
# Said by the heading in words of its own.
_NOT_LISTED = frozenset({"score"})


def summary(folder: Path, values: Mapping[str, Any], *, assumed: str = "") -> tuple[Html, bool]:
    """Return the report of a dataset, and whether it warns of nothing.

    `assumed` is the base that the images are judged for where nobody has chosen one.
    """
    count = int(number(values, "images"))
    findings = [
        row
        for row in sequence(values, "findings")
        if isinstance(row, dict) and row.get("kind") not in _NOT_LISTED
    ]
    counted = "1 image" if count == 1 else f"{count:,} images"
    unreadable = sum(row.get("kind") == "unusable" for row in findings)
    others = f"{unreadable:,} more files that cannot be read" if unreadable > 1 else None
    is_good = not any(row.get("severity") in ("warning", "error") for row in findings)
    report = tag(
        "div",
        tag(
            "h2",
            tag("span", counted),
            ", ",
            *(
                (tag("span", others or "1 more file that cannot be read"), ", ")
                if unreadable
                else ()
            ),
            tag("span", _verdict(values, findings)),
        ),
        tag(
            "p",
            f"Judged for {assumed}, the base for ComfyUI; the next step chooses one.",
            class_="quiet",
        )
        if assumed
        else None,
        tag("ul", *_groups(folder, findings), class_="findings") if findings else None,
        tag(
            "p",
            tag(
                "span",
                "Beside each image is its caption. Click into it to change it; it saves itself.",
            ),
            " ",
            tag("a", "Change many captions at once, or have them written", href=_desk(folder)),
            class_="quiet",
        ),
        tag(
            "details",
            tag("summary", "The sizes they are trained in"),
            tag("p", _buckets(values), class_="quiet"),
        ),
        class_="summary",
    )
    return report, is_good


def _verdict(values: Mapping[str, Any], findings: Sequence[Mapping[str, Any]]) -> str:
    score = number(values, "score")
    if not findings:
        return "all good to train on"
    if score >= _GOOD:
        return "good to train on"
    if score >= _FAIR:
        return "usable, with weak points"
    return "worth improving first"


def _groups(folder: Path, findings: Sequence[Mapping[str, Any]]) -> Iterator[Html]:
    """Yield a line for each kind of remark, the gravest first."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for row in findings:
        kind = str(row.get("kind"))
        # Files that cannot be read have different reasons, each with its own cure.
        group = f"{kind}: {row.get('what')}" if kind == "unusable" else kind
        kinds.setdefault(group, []).append(row)
    order = {"error": 0, "warning": 1}
    for group, rows in sorted(
        kinds.items(), key=lambda item: order.get(str(item[1][0].get("severity")), 2)
    ):
        kind = group.partition(":")[0]
        severity = str(rows[0].get("severity", "note"))
        named = KINDS.get(kind)
        label = named.button if named else "Show"
        yield tag(
            "li",
            icon("circle-alert" if severity == "error" else "triangle-alert"),
            tag(
                "div", tag("b", _said(named, rows)), tag("p", *_about(named, rows), class_="quiet")
            ),
            link_button(label, _desk(folder, kind) + ("&write=1" if kind == "no-caption" else "")),
            class_=f"panel {severity}",
        )


def _said(kind: Kind | None, rows: Sequence[Mapping[str, Any]]) -> str:
    if kind is not None:
        count = _count(rows)
        return kind.one if count == 1 else kind.some.format(count=f"{count:,}")
    first = rows[0]
    name = f"{first['file']} " if first.get("file") else ""
    return inline(f"{name}{first.get('what', '')}")


def _count(rows: Sequence[Mapping[str, Any]]) -> int:
    """Return of how many images a remark is: one that is about all of them begins with their number."""
    first = str(rows[0].get("what", "")).partition(" ")[0].replace(",", "")
    is_of_all = len(rows) == 1 and not rows[0].get("file") and first.isdecimal()
    return int(first) if is_of_all else len(rows)


def _about(kind: Kind | None, rows: Sequence[Mapping[str, Any]]) -> Iterator[Html | str]:
    """Yield why it matters, and of which images it is said."""
    if kind is None:
        yield tag("span", inline(str(rows[0].get("advice", ""))))
        yield "."
        if len(rows) > 1:
            yield tag("span", f" And {len(rows) - 1:,} more like it.")
        return
    names = [str(row["file"]) for row in rows if row.get("file")]
    if names:
        yield tag("span", ", ".join(names[:_NAMED]), translate="no")
    else:
        yield tag("span", inline(str(rows[0].get("what", ""))))
    if len(names) > _NAMED:
        yield tag("span", f" and {len(names) - _NAMED:,} more")
    yield ". "
    if rows[0].get("kind") == "unusable":
        what = str(rows[0].get("what", ""))
        yield tag("span", inline(what[:1].upper() + what[1:]))
        yield ". "
        yield tag("b", "What to do: ")
        yield tag("span", inline(str(rows[0].get("advice", ""))))
        yield ". "
    yield tag("span", kind.why)


def _desk(folder: Path, kind: str = "") -> str:
    of_kind = {"kind": badge_kind(kind)} if kind else {}
    return "/datasets?" + urlencode({"folder": folder} | of_kind)


def _buckets(values: Mapping[str, Any]) -> str:
    sizes = [f"{count} in {name}" for name, count in mapping(values, "buckets").items()]
    return f"{', '.join(sizes)}." if sizes else "Not known yet."
