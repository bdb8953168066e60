"""The output of `plan`: tables for people, plain values for scripts, and warnings about the planned run.

Input is a prepared run. Cells are printed unchanged, without rich's markup and emoji codes. The warnings are of the
base, the processes, the GPU and the exported file; those of the dataset are in its report.
"""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.table import Table
from rich.text import Text

from lora_trainer.common.event_kinds import SEVERITIES
from lora_trainer.common.events import Finding, shown
from lora_trainer.common.processes import share
from lora_trainer.common.wording import bytes_text, duration_text, gib
from lora_trainer.config.config import all_settings, flatten
from lora_trainer.config.inputs import NO_ASSISTANT
from lora_trainer.dataset.records import finding
from lora_trainer.families.base.traits import FileFormat
from lora_trainer.families.files.assistants import assistant_bytes, local_assistant
from lora_trainer.hardware.machine import tier_problem
from lora_trainer.lora_file.key_formats import format_notes, planned_contents
from lora_trainer.planning.memory import MemoryItem
from lora_trainer.planning.optimizer_facts import optimizer_remarks
from lora_trainer.planning.plan import Plan
from lora_trainer.planning.run_time import MOST_HOURS
from lora_trainer.planning.scaling import scaling_of, scaling_text
from lora_trainer.planning.timesteps import ASCII, BLOCKS, shares_text, timestep_shares
from lora_trainer.reporting.plan_record import (
    HostMemoryRecord,
    MemoryItemRecord,
    MemoryRecord,
    PlanRecord,
    ProcessesRecord,
    RemarkRecord,
    SamplingRecord,
    SettingRecord,
    TimeRecord,
)
from lora_trainer.run.prepare import Prepared

STYLES = {"note": "dim", "warning": "yellow", "error": "bold red"}


def add_row(table: Table, *cells: str | Text, style: str = "") -> None:
    """Add cells unchanged: brackets in a name or caption stay brackets, `:cat:` stays text."""
    texts = [cell if isinstance(cell, Text) else Text(cell) for cell in cells]
    table.add_row(*texts, style=style or None)


def key_table() -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def finding_line(finding: Finding) -> str:
    where = f"{finding.file}: " if finding.file else ""
    return shown(f"{finding.severity}: {where}{finding.what}. {finding.advice}")


# Below this, `adapter.noise_rank` is proposed: its paper is about one image and a few more.
FEW_IMAGES = 10
# Parts of a run that take less than this share of its time are not listed.
LEAST_PART = 0.01


def plan_record(prepared: Prepared) -> PlanRecord:
    """Return the plan as scripts, the GUI and run.json have it."""
    plan = prepared.plan
    settings = {
        key: SettingRecord(
            value=value, origin=plan.origins[key].layer, reason=plan.origins[key].reason
        )
        for key, value in flatten(prepared.config).items()
    }
    remarks = [
        RemarkRecord(kind=remark.kind, what=remark.what, advice=remark.advice)
        for remark in run_warnings(prepared)
    ]
    return PlanRecord(
        family=prepared.family.name,
        base=prepared.facts.source,
        tier=prepared.resolved.tier,
        priority=prepared.resolved.priority,
        preset=prepared.resolved.preset,
        settings=settings,
        memory=_memory_record(prepared),
        time=_time_record(prepared),
        sampling=SamplingRecord(prompts=prepared.sample_prompts),
        disk=plan.disk_bytes,
        processes=ProcessesRecord(count=prepared.inputs.processes, images=list(shares(prepared))),
        remarks=remarks,
        images=image_counts(prepared),
        timesteps=_timesteps(prepared),
    )


def _timesteps(prepared: Prepared) -> tuple[float, ...]:
    sizes_px = prepared.inputs.buckets
    return timestep_shares(prepared.facts, prepared.config.objective, sizes_px)


@dataclass(frozen=True, kw_only=True)
class _Timesteps:
    """The timesteps that are drawn, as bars of the signs that the terminal has."""

    shares: tuple[float, ...]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        yield Text(shares_text(self.shares, signs=ASCII if options.ascii_only else BLOCKS))


def _memory_record(prepared: Prepared) -> MemoryRecord:
    memory, host = prepared.plan.memory, prepared.plan.host
    return MemoryRecord(
        items=_item_records(memory.items),
        phase=memory.peak_phase,
        phases={str(phase): size for phase, size in memory.phases.items()},
        by_phase={phase: _item_records(items) for phase, items in memory.by_phase.items()},
        peak_bytes=memory.peak_bytes,
        limit_bytes=memory.limit_bytes,
        fits=memory.fits,
        images_at_once=prepared.at_once_by_size,
        host=None
        if host is None
        else HostMemoryRecord(
            items=_item_records(host.items), bytes=host.peak_bytes, limit_bytes=host.limit_bytes
        ),
    )


def _item_records(items: Iterable[MemoryItem]) -> list[MemoryItemRecord]:
    return [MemoryItemRecord(name=item.name, bytes=item.bytes, note=item.note) for item in items]


def _time_record(prepared: Prepared) -> TimeRecord:
    plan = prepared.plan
    return TimeRecord(
        steps=plan.steps,
        epochs=plan.epochs,
        images=len(prepared.trained),
        held_out=len(prepared.held_out),
        seconds_per_step=plan.seconds_per_step,
        run_s=(plan.run_time.low_s, plan.run_time.high_s),
        parts_s=plan.run_time.parts,
        note=plan.time_note,
        source=plan.time_source,
        corrections=plan.time_corrections,
        beside_others=plan.beside_others,
        regularisation_per_epoch=prepared.inputs.regularisation_per_epoch,
    )


def image_counts(prepared: Prepared) -> dict[str, int]:
    """Return how many images there are, of how many each warning is, and how many have no caption.

    Each is judged for the planned size.
    """
    kinds = Counter(
        found.kind
        for found in prepared.report.findings
        if found.file is not None and found.severity != "note"
    )
    records = (*prepared.trained, *prepared.held_out)
    without = sum(record.caption_source is None for record in records)
    counts = kinds | ({"no-caption": without} if without else {})
    return {"all": len(records), **counts}


def _references_row(prepared: Prepared) -> dict[str, str]:
    """Return how many images have references, and what these cost; nothing for a dataset without any."""
    records = (*prepared.trained, *prepared.held_out)
    counts = [len(record.references) for record in records if record.references]
    if not counts:
        return {}
    each = str(counts[0]) if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"
    load, costs = prepared.plan.load, prepared.inputs.costs
    with_them, without = (
        costs.sample_cost(one.workload()).step_flops
        for one in (load, replace(load, references_px=()))
    )
    return {
        "references": f"{len(counts)} of {len(records)} images have {each}; a step computes "
        f"{with_them / without:.2f} times as much as from text alone"
    }


def plan_text(prepared: Prepared, *, everything: bool = False) -> RenderableType:
    """Return the plan for people: the run's facts, time and disk, memory item by item, settings with origins.

    It lists the dozen settings that decide a training and those the user set; with `everything` all of them.
    """
    plan, config, resolved, facts = (
        prepared.plan,
        prepared.config,
        prepared.resolved,
        prepared.facts,
    )
    buckets = ", ".join(f"{name} x{count}" for name, count in prepared.report.buckets.items())
    pool, count = len(prepared.dataset.regularisation), prepared.inputs.regularisation_per_epoch
    regularisation = f", {pool} for regularisation ({count} an epoch)" if pool else ""
    data = f"{len(prepared.trained)} images trained, {len(prepared.held_out)} held out"
    data = f"{data}{regularisation}; {buckets}"
    if pairs := prepared.dataset.pairs:
        data = f"a slider of {pairs} pairs of images: {data}"
    if directions := prepared.dataset.directions:
        words = "direction" if len(directions) == 1 else "directions"
        data = f"a slider of {len(directions)} {words} in words, without images"
    download = ""
    if facts.layout is None:
        absent = ", ".join(filter(None, (facts.missing, gib(facts.download_bytes))))
        download = f"; not on this machine: {absent} to download"
    images = list(shares(prepared))
    split = f"{min(images)} to {max(images)}" if len(images) > 8 else " + ".join(map(str, images))
    sizes = (f"{count} of {size}" for size, count in prepared.at_once_by_size.items())
    rows = {
        "base": f"{facts.source} ({prepared.family.name}){download}",
        "device": f"{config.hardware.device}: {plan.origins['hardware.device'].reason}",
        "preset": f"{resolved.preset}, priority {resolved.priority}",
        "data": data,
        **_references_row(prepared),
        "check": _check_text(prepared),
        "length": f"{plan.steps:,} steps of {config.train.batch_size} = {plan.epochs:.1f} epochs",
        "micro-batch": f"images by bucket: {', '.join(sizes)}",
        "processes": f"{len(images)}: {split} of {sum(images)} images a step"
        if len(images) > 1
        else "",
        "time": _time_text(plan),
        "more GPUs": scaling_text([*scaling_of(plan, prepared.inputs)])
        if everything or len(images) > 1
        else "",
        "disk": ", ".join(f"{name} {gib(size)}" for name, size in plan.disk_bytes.items()),
    }
    table = key_table()
    for name, text in rows.items():
        if text:
            add_row(table, name, text)
    table.add_row(Text("timesteps"), _Timesteps(shares=_timesteps(prepared)))
    remarks = [
        Text(finding_line(remark), style=STYLES[remark.severity])
        for remark in run_warnings(prepared)
    ]
    settings = _settings_table(prepared, everything=everything)
    lines: list[RenderableType] = ["", *remarks] if remarks else []
    return Group(table, "", *_memory_tables(plan), "", *settings, *lines)


def _check_text(prepared: Prepared) -> str:
    """Return how much `check` finds wrong with the images, and the command that lists it; empty for nothing."""
    counts = Counter(found.severity for found in prepared.report.findings)
    named = [
        f"{counts[severity]:,} {severity}{'s' if counts[severity] > 1 else ''}"
        for severity in SEVERITIES
        if counts[severity] and severity != "note"
    ]
    if not named:
        return ""
    command = ["lora-train", "check", str(prepared.dataset.folder)]
    if prepared.plan.origins["base.model"].is_users:
        command += ["--base", str(prepared.config.base.model)]
    return f"{' and '.join(named)} about the images: {shown(shlex.join(command))}"


def _settings_table(prepared: Prepared, *, everything: bool) -> list[RenderableType]:
    table = Table(box=None, pad_edge=False)
    table.add_column("setting", no_wrap=True)  # users copy the name, so it must not be wrapped
    for title in ("value", "origin", "reason"):
        table.add_column(title, overflow="fold")
    values, origins = flatten(prepared.config), prepared.plan.origins
    for info in all_settings():
        origin = origins[info.key]
        if everything or info.headline or origin.is_users:
            value_text = f"{values[info.key]} {info.unit}".rstrip()
            style = "dim" if origin.layer == "default" else ""
            add_row(table, info.key, value_text, origin.layer, origin.reason, style=style)
    hidden = len(values) - table.row_count
    return [table, Text(f"{hidden} more settings: --all", style="dim")] if hidden else [table]


def shares(prepared: Prepared) -> Iterator[int]:
    """Yield for each process its number of images in an optimizer step."""
    batch, count = prepared.config.train.batch_size, prepared.inputs.processes
    for rank in range(count):
        yield len(share(batch, rank=rank, count=count))


def _memory_tables(plan: Plan) -> list[RenderableType]:
    """Return the tables of memory: the device's with a row per item and a column per phase, and the host's."""
    memory = plan.memory
    table = Table("predicted memory", box=None, pad_edge=False)
    for phase in memory.by_phase:
        table.add_column(phase, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    sizes = {phase: {item.name: item for item in items} for phase, items in memory.by_phase.items()}
    # An item has the same row whichever phase begins it; the allocator's slack is the last one.
    names = dict.fromkeys(item.name for items in memory.by_phase.values() for item in items)
    for name in sorted(names, key="allocator slack".__eq__):
        row_items = [items.get(name) for items in sizes.values()]
        note = next(item.note for item in row_items if item is not None and item.note)
        cells = [gib(item.bytes) if item is not None else "" for item in row_items]
        add_row(table, name, *cells, "" if name == "allocator slack" else note, style="dim")
    add_row(table, "sum", *(gib(size) for size in memory.phases.values()))
    peak = f"{gib(memory.peak_bytes)} of {gib(memory.limit_bytes)}, while {memory.peak_phase}"
    lines: list[RenderableType] = [table, Text(f"predicted peak: {peak}")]
    if (host := plan.host) is None:
        return lines
    table = Table("in host memory", "size", "", box=None, pad_edge=False)
    for item in host.items:
        add_row(table, item.name, Text(gib(item.bytes), justify="right"), item.note, style="dim")
    of = f"of {gib(host.limit_bytes)} free"
    add_row(table, "sum", Text(gib(host.peak_bytes), justify="right"), of)
    return [*lines, "", table]


def _time_text(plan: Plan) -> str:
    whole, (low, high) = plan.run_time, plan.seconds_per_step
    # The geometric middle: a range of 1 to 4 hours is a factor of 2 either way around 2 hours.
    middles = {part: math.sqrt(one * other) for part, (one, other) in whole.parts.items()}
    parts = ", ".join(
        f"{part} {duration_text(seconds)}"
        for part, seconds in middles.items()
        if seconds > LEAST_PART * whole.seconds
    )
    ends = f"{duration_text(whole.low_s)} to {duration_text(whole.high_s)}"
    return (
        f"about {duration_text(whole.seconds)} ({ends}): {parts}; "
        f"{low:.3g} to {high:.3g} s a step ({plan.time_note})"
    )


def run_warnings(prepared: Prepared) -> Iterator[Finding]:
    """Yield warnings about the base, the GPU and the exported file; the dataset's are in `prepared.report`."""
    config, facts, processes = prepared.config, prepared.facts, prepared.inputs.processes
    for assumed in facts.release.assumed:
        yield finding("release", what=assumed.sentence, setting=assumed.advice)
    assistant = config.base.assistant
    if facts.release.distilled and assistant == NO_ASSISTANT:
        yield finding("distilled", source=facts.source)
    if assistant != NO_ASSISTANT:
        absent_bytes = 0 if local_assistant(assistant) else assistant_bytes(assistant, facts)
        yield finding(
            "assisted",
            source=facts.source,
            assistant=assistant,
            download=f"; {bytes_text(absent_bytes)} to download" if absent_bytes else "",
        )
    family, sampling = prepared.family, config.sampling
    is_drawn = sampling.every_steps and sampling.guidance_scale > 1
    needed = family.pipeline.unguided
    if needed and is_drawn and not family.unguided_bytes(facts):
        yield finding("guided-alone", source=facts.source, part=needed)
    batch = config.train.batch_size
    if batch % processes:
        name = "processes.idle" if batch < processes else "processes.wait"
        full = -(-batch // processes) * processes
        yield finding(name, batch=batch, processes=processes, full=full)
    records = (*prepared.trained, *prepared.dataset.regularisation)
    for index, side_px in enumerate(config.data.more_resolutions, start=1):
        count = sum(record.placements[index].upscaled for record in records)
        if side_px > config.data.resolution and count:
            yield finding("enlarged", count=count, images=len(records), side_px=side_px)
    # As on a GPU slower than its tier's.
    priority = prepared.resolved.priority
    if prepared.plan.run_time.seconds / 3600 > MOST_HOURS[priority]:
        yield finding("time.speed" if priority == "speed" else "time.other")
    adapter, count = config.adapter, len(prepared.trained)
    if adapter.dora:
        yield finding("adapter")
    elif adapter.kind == "lora" and adapter.noise_rank is None and 0 < count < FEW_IMAGES:
        yield finding("few-images", count=count, half=max(1, adapter.rank // 2))
    shapes = prepared.inputs.costs.adapted(config.adapter)
    yield from optimizer_remarks(config, shapes=shapes)
    card, _ = prepared.hardware.accelerator(sharing=prepared.inputs.sharing)
    if too_small := tier_problem(card.total_bytes if card else None):
        yield finding("card", what=too_small)
    format: FileFormat = config.output.format
    for missed in format_notes(prepared.family, format, planned_contents(config.adapter)):
        # Of the format that most programs read there is nothing to choose.
        is_best = missed == prepared.family.formats.unread.get(format) and (
            format == prepared.family.formats.written[0]
        )
        yield finding("readers" if is_best else "format", format=format, missed=missed)
