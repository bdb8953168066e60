"""What plan, doctor and the pages say of one machine and one training is the same: 200 drafts, 0 contradictions.

Each place that shows needed or free memory, time or a count of images is read as text, as a person reads it, and
compared with the plan's own values.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lora_trainer.gui import plan_view
from lora_trainer.gui.drafts import Draft
from lora_trainer.gui.machine import report
from lora_trainer.gui.server.language import ENGLISH
from lora_trainer.gui.server.templates import render
from lora_trainer.gui.server.translation import Words
from lora_trainer.gui.server.translation import words as words_of
from lora_trainer.gui.train import plan as plan_page
from lora_trainer.gui.workplace import Workplace
from rich.console import Console

from lora_trainer.common.errors import MachineError
from lora_trainer.common.records import as_json, of_json
from lora_trainer.common.wording import bytes_text, duration_text, gib
from lora_trainer.hardware.machine import Hardware
from lora_trainer.planning.known_pace import PastRun, RunKind, others_text
from lora_trainer.planning.plan import plan
from lora_trainer.reporting.plan_record import PlanRecord
from lora_trainer.run.machine_report import checks, doctor_text
from lora_trainer.run.plan_text import plan_record, plan_text
from lora_trainer.run.prepare import Prepared
from tests.fakes.nvml import GIB
from tests.fakes.plans import FLUX, QWEN, SDXL, WITHOUT_CARD, machine, mini_facts, request

ANY_BASE = 0  # `prepared` puts the size of its base here


def past_run(factor: float, side_px: int) -> PastRun:
    """Return a finished run that took so many times as long as predicted."""
    kind = RunKind(priority="balanced", resolution_px=side_px, parameters=ANY_BASE)
    return PastRun(kind=kind, slower={"steps": factor, "start": factor / 2}, load=1.0)


BASES: tuple[Any, ...] = (None, SDXL, FLUX, QWEN, "Tongyi-MAI/Z-Image", mini_facts())
MACHINES = {
    **{f"{size} GiB GPU": machine(size) for size in (6, 8, 12, 24)},
    "24 GiB GPU, little memory": machine(24, ram_gib=6),
    "processor, 28 GiB": WITHOUT_CARD,
    "processor, 8 GiB": replace(WITHOUT_CARD, ram_total_bytes=8 * GIB, ram_free_bytes=5 * GIB),
    "busy processor": replace(WITHOUT_CARD, processors=6, busy_processors=9.0),
    "busy 24 GiB GPU": machine(24, busy_fraction=0.6),
}
IMAGES = (3, 60)
# The finished runs that a plan knows: none, some of its own kind, one of another size.
PAST = {
    "none": (),
    "its own": tuple(
        past_run(factor, side_px) for factor in (2.0, 2.4) for side_px in (64, 512, 1024)
    ),
}
SIZE = r"(\d[\d,]*(?:\.\d+)? [KMG]iB)"


def prepared(
    base: Any, hardware: Hardware, images: int, past: tuple[PastRun, ...] = ()
) -> Prepared:
    """Return a planned run over images that nobody has to read."""
    held_out = images // 10
    inputs = request(
        base,
        hardware,
        images=images - held_out,
        samples_per_epoch=images - held_out,
        latents=images,
        texts=images,
        held_out_count=held_out,
    )
    parameters = inputs.facts.parts["denoiser"].parameters
    of_base = (replace(run, kind=replace(run.kind, parameters=parameters)) for run in past)
    inputs = inputs.changed(past_runs=tuple(of_base))
    record: Any = SimpleNamespace(caption="a cat", caption_source="file", references=())
    dataset: Any = SimpleNamespace(regularisation=(), directions=(), is_slider=False, pairs=0)
    return Prepared(
        inputs=inputs,
        plan=plan(inputs),
        dataset=dataset,
        report=SimpleNamespace(buckets={"512x512": images}, findings=()),  # type: ignore[arg-type]
        trained=(record,) * (images - held_out),
        held_out=(record,) * held_out,
        cache_root=Path(),
    )


def printed(renderable: Any) -> str:
    """Return what a terminal shows."""
    console = Console(file=io.StringIO(), width=400)
    console.print(renderable)
    return " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]


def words(markup: str) -> str:
    """Return what a page shows."""
    return " ".join(re.sub(r"<[^>]*>", " ", markup).split())


def usable(hardware: Hardware) -> int:
    gpu, _ = hardware.accelerator()
    return hardware.usable_ram_bytes if gpu is None else gpu.free_bytes


def contradictions(run: Prepared) -> Iterator[tuple[str, str, str]]:
    """Yield (place, what it says, what the plan says) where the two differ."""
    written, text = json.dumps(as_json(plan_record(run))), printed(plan_text(run))
    values = of_json(PlanRecord, json.loads(written))
    if json.dumps(as_json(values)) != written:
        yield "json: read", json.dumps(as_json(values)), written
    memory, time = values.memory, values.time
    peak, limit = memory.peak_bytes, memory.limit_bytes
    whole = run.plan.run_time
    said_in_english = words_of(ENGLISH)
    page = words(str(plan_page.plan(values, said_in_english)))
    filled, length_of = plan_page.filled(values), plan_page.length(values, Draft(id="a"))

    def said(
        place: str, pattern: str, found_in: str, wanted: str
    ) -> Iterator[tuple[str, str, str]]:
        found = re.findall(pattern, found_in)
        if not found or {found_one.replace(",", "") for found_one in found} != {wanted}:
            yield place, str(found), wanted

    yield from said("plan: peak", rf"predicted peak: {SIZE} of", text, gib(peak))
    yield from said("plan: limit", rf"predicted peak: .*? of {SIZE}, while", text, gib(limit))
    yield from said("page: peak", rf"needs {SIZE}", page, bytes_text(peak))
    yield from said("page: limit", rf"needs {SIZE[1:-1]} of {SIZE}", page, bytes_text(limit))
    yield from said("plan: images", r"(\d+) images trained", text, str(time.images))
    yield from said("plan: held out", r"(\d+) held out", text, str(time.held_out))
    yield from said("plan: steps", r"length ([\d,]+) steps", text, str(time.steps))
    if (length_of.images, length_of.held_out, filled["train.steps"]) != (
        *(len(run.trained), len(run.held_out)),
        str(time.steps),
    ):
        yield "fields", f"{length_of} {filled}", str(time)
    if filled["data.resolution"] != str(run.config.data.resolution):
        yield "fields: size", filled["data.resolution"], str(run.config.data.resolution)
    ends = f"({duration_text(whole.low_s)} to {duration_text(whole.high_s)})"
    if ends not in text:
        yield "plan: time", text, ends
    if time.range_s != (whole.low_s, whole.high_s):
        yield "json: time", str(time.run_s), ends
    parts = [sum(ends) for ends in zip(*time.parts_s.values(), strict=True)]
    if parts != pytest.approx(list(time.run_s)):
        yield "json: parts of the time", str(parts), str(time.run_s)
    pace = plan_page.pace(values, said_in_english).time
    shown = plan_page.duration(values, said_in_english)
    length, is_slowed = shown.text, any("beside them" in each for each in time.corrections)
    if pace.lower() not in (shown.now or length).lower():
        yield "card: time", pace, length
    source = run.plan.time_source
    beside = words(str(plan_page.beside(values, said_in_english)))
    # The bar beside Train says what it takes now, the page what it would take without other programs.
    if is_slowed != bool(shown.now) or (shown.now or length).lower() not in beside.lower():
        yield "beside Train: time", beside, str(shown)
    if shown.now and shown.now != shown.alone and shown.alone.lower() not in page.lower():
        yield "page: time without other programs", page, str(shown)
    # Of several trainings the bar says the time of each as of one, and together as many times as much.
    one_s = plan_view.from_now_s(time)
    three = words(str(plan_page.beside(values, said_in_english, every=[values] * 3))).lower()
    together = plan_view.span((3 * one_s[0], 3 * one_s[1]), said_in_english) if one_s else ""
    if (shown.now or length).lower() not in three or f"{together} together" not in three:
        yield "beside Train: of three", three, f"{shown} {together}"
    yield from said("beside Train: steps", r"([\d,]+) steps", beside, str(time.steps))
    for place, said_there in {"plan": text, "page": page}.items():
        if source not in said_there:
            yield f"{place}: where the time comes from", said_there, source
    if any(busy not in text or busy not in page for busy in run.plan.time_corrections):
        yield "load", text, str(run.plan.time_corrections)
    for item in (*memory.items, *(memory.host.items if memory.host is not None else ())):
        if gib(item.bytes) not in text:
            yield "plan: item", item.name, gib(item.bytes)
    if sum(item.bytes for item in memory.items) != peak:
        yield "json: items", str(memory.items), str(peak)
    if limit != usable(run.hardware):
        yield "limit", str(limit), str(usable(run.hardware))


def refusal_faults(error: MachineError, hardware: Hardware) -> Iterator[str]:
    """Yield what a refusal says against itself or against doctor."""
    need, free = re.findall(SIZE, error.found)[:2]
    (cure,) = re.findall(SIZE, error.fix) or [need]
    host = "beside the GPU's" in error.found
    here = gib(hardware.usable_ram_bytes if host else usable(hardware))
    if cure != need:
        yield f"needs {need}, cured by {cure}"
    if free != here:
        yield f"{free} here, {here} of doctor"
    if float(need.split()[0]) <= float(free.split()[0]):
        yield f"needs {need} of {free}, which fits"


def test_200_drafts_show_no_two_numbers_for_one_thing(tmp_path: Path) -> None:
    faults: list[Any] = []
    refused = counted = 0
    for name, hardware in MACHINES.items():
        facts = printed(doctor_text(list(checks(hardware, cache=Path(), environment={}))))
        looked = report.shown(
            Workplace(runs=tmp_path), hardware, report.cache_state(), report.hub()
        )
        page = words(str(render("machine/report.html", Words("en"), **looked)))
        if gib(hardware.usable_ram_bytes) not in facts:
            faults.append((name, "doctor: usable memory", facts))
        if f"A training may use {bytes_text(hardware.usable_ram_bytes)}" not in page:
            faults.append((name, "Machine: usable memory", page))
        load = others_text(hardware, hardware.accelerator()[0])
        if load != "other programs do not slow it now":
            assert "Close them if you can: a training takes longer beside them." in page, (
                "a sentence"
            )
        if load not in facts or load not in page:
            faults.append((name, "what other programs use", facts, page))
        for gpu in hardware.gpus:
            if gib(gpu.free_bytes) not in facts or bytes_text(gpu.free_bytes) not in page:
                faults.append((name, "free memory of the GPU", gpu.free_bytes))
        for base, images, past in product(BASES, IMAGES, PAST.values()):
            counted += 1
            try:
                run = prepared(base, hardware, images, past)
            except MachineError as error:
                refused += 1
                faults += [(name, base, images, fault) for fault in refusal_faults(error, hardware)]
            else:
                faults += [(name, base, images, *fault) for fault in contradictions(run)]
                told = bool(past) and load == "other programs do not slow it now"
                if told and run.plan.time_corrections != (run.plan.time_source,):
                    faults.append((name, base, images, run.plan.time_corrections, load))
                if bool(past) != run.plan.time_source.startswith("from "):
                    faults.append((name, base, images, run.plan.time_source, len(past)))
    assert counted >= 200 and 5 < refused < counted - 50
    assert faults == []
