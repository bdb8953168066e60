"""What `plan`, `check`, `presets`, `inspect` and `doctor` say: as text for people, as plain values for scripts.

Functions take finished results and return rich renderables or JSON-ready values; nothing is computed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lora_trainer.config import all_settings, flatten
from lora_trainer.data.quality import DatasetReport
from lora_trainer.fitting import gib
from lora_trainer.hardware import Hardware
from lora_trainer.output.inspect import Inspection
from lora_trainer.prepare import Prepared
from lora_trainer.resolve import PRIORITIES, TIERS, load_presets, preset_families

STYLES = {"note": "dim", "warning": "yellow", "error": "bold red"}


def plan_json(prepared: Prepared) -> dict[str, Any]:
    """Return the machine-readable plan that scripts rely on (DESIGN section 3)."""
    plan = prepared.plan
    return {
        "family": prepared.family.name,
        "base": prepared.facts.source,
        "tier": prepared.resolved.tier,
        "priority": prepared.resolved.priority,
        "preset": prepared.resolved.preset,
        "settings": {
            key: {
                "value": value,
                "origin": plan.origins[key].layer,
                "reason": plan.origins[key].reason,
            }
            for key, value in flatten(prepared.config).items()
        },
        "memory": {
            "items": [
                {"name": item.name, "bytes": item.bytes, "note": item.note}
                for item in plan.memory.items
            ],
            "phases": dict(plan.memory.phases),
            "peak_bytes": plan.memory.peak_bytes,
            "limit_bytes": plan.memory.limit_bytes,
            "fits": plan.memory.fits,
        },
        "time": {
            "steps": plan.steps,
            "epochs": plan.epochs,
            "seconds_per_step": list(plan.seconds_per_step) if plan.seconds_per_step else None,
            "note": plan.time_note,
        },
        "disk": dict(plan.disk_bytes),
    }


def plan_text(prepared: Prepared) -> RenderableType:
    """Return the plan for people: what will run, memory item by item, time, disk, every setting with its origin."""
    plan, config = prepared.plan, prepared.config
    buckets = ", ".join(f"{name} x{count}" for name, count in prepared.report.buckets.items())
    facts = _table("")
    _row(facts, "base", f"{prepared.facts.source} ({prepared.family.name}){_download(prepared)}")
    _row(facts, "device", f"{config.hardware.device}: {plan.origins['hardware.device'].reason}")
    _row(facts, "preset", f"{prepared.resolved.preset}, priority {prepared.resolved.priority}")
    _row(
        facts,
        "data",
        f"{len(prepared.trained)} images trained, {len(prepared.held_out)} held out; {buckets}",
    )
    _row(
        facts,
        "length",
        f"{plan.steps:,} steps of {config.train.batch_size} = {plan.epochs:.1f} epochs",
    )
    _row(facts, "time", _time_text(prepared))
    _row(facts, "disk", ", ".join(f"{name} {gib(size)}" for name, size in plan.disk_bytes.items()))
    memory = Table("memory at the peak", "size", "", box=None, pad_edge=False)
    for item in plan.memory.items:
        _row(memory, item.name, Text(gib(item.bytes), justify="right"), item.note, style="dim")
    limit = f"of {gib(plan.memory.limit_bytes)}" if plan.memory.limit_bytes else "no limit known"
    _row(memory, "predicted peak", Text(gib(plan.memory.peak_bytes), justify="right"), limit)
    settings = Table("setting", "value", "origin", "reason", box=None, pad_edge=False)
    units = {info.key: info.unit for info in all_settings()}
    for key, value in flatten(config).items():
        origin = plan.origins[key]
        shown = f"{value} {units[key]}".rstrip()
        _row(
            settings,
            key,
            shown,
            origin.layer,
            origin.reason,
            style="dim" if origin.layer == "default" else "",
        )
    return Group(facts, "", memory, "", settings)


def check_text(report: DatasetReport) -> RenderableType:
    """Return the dataset report for people: score with its parts, buckets, every finding with advice."""
    parts = ", ".join(f"{name} {value:.2f}" for name, value in report.parts.items())
    buckets = ", ".join(f"{name} x{count}" for name, count in report.buckets.items())
    head = _table("")
    _row(head, "images", str(report.images))
    _row(head, "score", f"{report.score:.2f} of 1 ({parts})")
    _row(head, "buckets", buckets)
    lines: list[RenderableType] = [head]
    for finding in report.findings:
        where = f"{finding.file}: " if finding.file else ""
        lines.append(
            Text(
                f"{finding.severity}: {where}{finding.what}. {finding.advice}",
                style=STYLES[finding.severity],
            )
        )
    if not report.findings:
        lines.append(Text("nothing to remark"))
    return Group(*lines)


def inspect_text(inspection: Inspection) -> RenderableType:
    """Return what an adapter file is, for people."""
    table = _table("")
    values = inspection.to_json()
    for key in ("family", "format", "rank", "alpha"):
        _row(table, key, str(values[key]))
    _row(table, "modules", str(_count(values["modules"])))
    for key, value in values["metadata"].items():
        _row(table, key, value if len(value) <= 100 else value[:97] + "...")
    problems = [
        Text(
            f"{problem.severity}: {problem.what}. {problem.advice}", style=STYLES[problem.severity]
        )
        for problem in inspection.problems
    ]
    return Group(table, *problems)


def presets_text() -> RenderableType:
    """Return every preset cell: what each tier and priority sets."""
    table = Table("family", "tier", "priority", "sets", box=None, pad_edge=False)
    for family in preset_families():
        presets = load_presets(family)
        for tier in TIERS:
            for priority in PRIORITIES:
                reason = presets.unsupported(tier, priority)
                cell = presets.cells.get(f"{tier}/{priority}", {})
                values = {**presets.tiers[tier], **presets.priorities[priority], **cell}
                text = (
                    f"unsupported: {reason}"
                    if reason
                    else ", ".join(f"{k}={v}" for k, v in values.items())
                )
                _row(table, family, tier, priority, text)
    return table


def doctor_json(hardware: Hardware) -> dict[str, Any]:
    """Return what was found on this machine, each fact with its reason."""
    return {
        "gpus": [
            {
                "name": gpu.name,
                "total_bytes": gpu.total_bytes,
                "free_bytes": gpu.free_bytes,
                "driver": gpu.driver,
            }
            for gpu in hardware.gpus
        ],
        "gpu_reason": hardware.gpu_reason,
        "accelerator": hardware.accelerator().reason,
        **{
            name: {"value": fact.value, "reason": fact.reason}
            for name, fact in hardware.facts().items()
        },
        "packages": dict(hardware.packages),
    }


def doctor_text(hardware: Hardware) -> RenderableType:
    """Return the same for people."""
    table = _table("")
    for gpu in hardware.gpus:
        _row(
            table,
            "GPU",
            f"{gpu.name}, {gib(gpu.free_bytes)} free of {gib(gpu.total_bytes)}, driver {gpu.driver}",
        )
    _row(table, "trains on", hardware.accelerator().reason)
    for name, fact in hardware.facts().items():
        shown = gib(fact.value) if name.endswith("_bytes") else str(fact.value)
        _row(table, name, f"{shown} ({fact.reason})")
    for name, version in hardware.packages.items():
        _row(table, name, version or f"not installed: pip install {name}")
    return table


def _row(table: Table, *cells: str | Text, style: str = "") -> None:
    """Add cells as they are: brackets in a name or caption are no markup, `:cat:` is no picture."""
    texts = [cell if isinstance(cell, Text) else Text(cell) for cell in cells]
    table.add_row(*texts, style=style or None)


def _table(title: str) -> Table:
    table = Table(title=title or None, box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _download(prepared: Prepared) -> str:
    facts = prepared.facts
    if facts.layout is not None:
        return ""
    return f", not on this machine: {gib(facts.download_bytes)} to download"


def _time_text(prepared: Prepared) -> str:
    plan = prepared.plan
    if plan.seconds_per_step is None:
        return plan.time_note
    low, high = (seconds * plan.steps / 60 for seconds in plan.seconds_per_step)
    return f"about {low:.0f} to {high:.0f} minutes (estimate: {plan.time_note})"


def _count(modules: Any) -> int:
    return (
        modules
        if isinstance(modules, int)
        else len(list(modules if isinstance(modules, Iterable | Mapping) else ()))
    )
