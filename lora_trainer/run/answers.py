"""Output of `check`, `presets`, `inspect` and `doctor`: text for people, plain values for scripts.

Functions take finished results and return rich renderables or JSON-ready values; nothing is computed here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lora_trainer.cache.lease import Cleared
from lora_trainer.common.wording import bytes_text
from lora_trainer.config.choices import PRIORITIES
from lora_trainer.config.layers import TIERS, load_presets, preset_families
from lora_trainer.dataset.quality import DatasetReport
from lora_trainer.hardware.machine import Hardware, package_notes
from lora_trainer.lora_file.inspect import Inspection, Spread
from lora_trainer.run.plan_text import STYLES, add_row, finding_line, key_table

BLOCKS_SHOWN = 12
"""Number of blocks of an adapter that are listed with their norm."""


def check_text(report: DatasetReport) -> RenderableType:
    """Return the dataset report for people: score with its parts, buckets, every finding with advice."""
    parts = ", ".join(f"{name} {value:.2f}" for name, value in report.parts.items())
    buckets = ", ".join(f"{name} x{count}" for name, count in report.buckets.items())
    head = key_table("")
    add_row(head, "images", str(report.images))
    add_row(head, "score", f"{report.score:.2f} of 1 ({parts})")
    add_row(head, "buckets", buckets)
    findings = [Text(finding_line(each), style=STYLES[each.severity]) for each in report.findings]
    return Group(head, *(findings or [Text("no findings")]))


def inspect_text(inspection: Inspection) -> RenderableType:
    """Return the description of an adapter file for people."""
    table = key_table("")
    add_row(table, "family", inspection.family)
    add_row(table, "format", inspection.format)
    add_row(table, "kind", ", ".join(inspection.kinds))
    for key, spread in (("rank", inspection.rank), ("alpha", inspection.alpha)):
        add_row(table, key, _spread_text(spread))
    add_row(table, "modules", str(inspection.modules))
    for key, (tokens, width) in inspection.embeddings.items():
        add_row(table, key, f"{tokens} new tokens of {width} numbers")
    for key, value in inspection.metadata.items():
        add_row(table, key, value if len(value) <= 100 else value[:97] + "...")
    problems = [
        Text(
            f"{problem.severity}: {problem.what}. {problem.advice}", style=STYLES[problem.severity]
        )
        for problem in inspection.problems
    ]
    return Group(table, *_norms_text(inspection.norms), *problems)


def _spread_text(spread: Spread | None) -> str:
    if spread is None:
        return "not stated"
    return f"{spread.low:g}" if spread.low == spread.high else f"{spread.low:g} to {spread.high:g}"


def _norms_text(norms: Mapping[str, float]) -> Iterable[RenderableType]:
    """Yield a table of the blocks with the largest norms, with their share of the sum of squared norms."""
    if not norms:
        return
    table = Table("block", "norm", "share", box=None, pad_edge=False)
    largest = sorted(norms, key=lambda block: norms[block], reverse=True)
    whole = math.fsum(norm**2 for norm in norms.values()) or 1.0
    for block in largest[:BLOCKS_SHOWN]:
        numbers = f"{norms[block]:.4g}", f"{norms[block] ** 2 / whole:.1%}"
        add_row(table, block, *(Text(number, justify="right") for number in numbers))
    yield ""
    yield table
    rest = largest[BLOCKS_SHOWN:]
    if rest:
        yield Text(f"and {len(rest)} blocks with norms up to {norms[rest[0]]:.4g}", style="dim")
    yield ""


def presets_text() -> RenderableType:
    """Return the table of presets: the settings of each family, tier and priority."""
    table = Table("family", "tier", "priority", "sets", box=None, pad_edge=False)
    for family in preset_families():
        presets = load_presets(family)
        for tier in TIERS:
            for priority in PRIORITIES:
                reason = presets.unsupported(tier, priority)
                cell = presets.cells.get(f"{tier}/{priority}", {})
                values = {**presets.tiers[tier], **presets.priorities[priority], **cell}
                sets = ", ".join(f"{key}={value}" for key, value in values.items())
                text = f"unsupported: {reason}" if reason else sets
                add_row(table, family, tier, priority, text)
    return table


def doctor_json(hardware: Hardware) -> dict[str, Any]:
    """Return the facts about this machine as plain values, each with its reason."""
    return {
        "gpus": [
            {name: getattr(gpu, name) for name in ("name", "total_bytes", "free_bytes", "driver")}
            for gpu in hardware.gpus
        ],
        "gpu_reason": hardware.gpu_reason,
        "accelerator": hardware.accelerator().reason,
        **{
            name: {"value": fact.value, "reason": fact.reason}
            for name, fact in hardware.facts().items()
        },
        "packages": dict(hardware.packages),
        "package_notes": package_notes(hardware.packages),
    }


def cleared_text(cleared: Cleared) -> str:
    """Return the sentence about a cache that was emptied."""
    return (
        f"removed {cleared.files:,} entries, {bytes_text(cleared.bytes)}, from {cleared.folder}; "
        "the next trainings encode their images and captions again"
    )
