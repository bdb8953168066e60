"""Warnings about a planned run beside its dataset: the base, the processes, the GPU, the exported file."""

from __future__ import annotations

from collections.abc import Iterator

from lora_trainer.common.events import Finding, note, warning
from lora_trainer.common.processes import full_batch
from lora_trainer.config.choices import has_int8_product
from lora_trainer.config.learning import AdapterSettings
from lora_trainer.costs.cost_table import adapter_shapes, linear_shapes
from lora_trainer.families.base import FileFormat
from lora_trainer.hardware.machine import tier_problem
from lora_trainer.lora_file.formats import format_notes, planned_contents
from lora_trainer.planning.optimizer_facts import optimizer_remarks
from lora_trainer.planning.run_time import MOST_HOURS
from lora_trainer.run.prepare import Prepared


def run_warnings(prepared: Prepared) -> tuple[Finding, ...]:
    """Return warnings about the base, the GPU and the exported file; the dataset's are in `prepared.report`."""
    config, facts = prepared.config, prepared.facts
    return (
        *_base(prepared),
        *_processes(prepared),
        *_enlarged(prepared),
        *_long(prepared),
        *_wide(config.adapter),
        *_dequantized(prepared),
        *optimizer_remarks(
            config, shapes=adapter_shapes(prepared.family, facts, targets=config.adapter.targets)
        ),
        *_card_and_file(prepared),
    )


def _base(prepared: Prepared) -> Iterator[Finding]:
    facts = prepared.facts
    if facts.assumed is not None:
        yield warning("release", None, facts.assumed.sentence, advice=facts.assumed.setting)
    if facts.distilled and prepared.config.base.assistant is None:
        what = f"{facts.source} is distilled: training weakens its ability to draw in few steps"
        advice = (
            "train on the undistilled release, "
            "or give an assistant adapter with --set base.assistant=FILE"
        )
        yield warning("distilled", None, what, advice=advice)


def _processes(prepared: Prepared) -> Iterator[Finding]:
    batch, processes = prepared.config.train.batch_size, prepared.processes
    if batch % processes:
        busy, full = min(batch, processes), full_batch(batch, count=processes)
        idle = f"only {busy} have work" if busy < processes else "some wait for the others"
        what = f"train.batch_size={batch} does not divide by {processes} processes: {idle}"
        advice = f"train.batch_size={full} would use all of them in every step"
        yield warning("processes", None, what, advice=advice)


def _card_and_file(prepared: Prepared) -> Iterator[Finding]:
    card = prepared.hardware.accelerator(sharing=prepared.sharing).value
    if too_small := tier_problem(card.total_bytes if card else None):
        advice = "lower data.resolution or adapter.rank if the run does not fit"
        yield warning("card", None, too_small, advice=advice)
    format: FileFormat = prepared.config.output.format
    advice = "choose another output.format or adapter if that matters to you"
    for missed in format_notes(format, planned_contents(prepared.config.adapter)):
        yield warning("format", None, f"output.format={format}: {missed}", advice=advice)


def _long(prepared: Prepared) -> Iterator[Finding]:
    """Yield a note if the run takes longer than its priority promises, as on a GPU slower than its tier's."""
    priority, hours = prepared.resolved.priority, prepared.plan.run_time.seconds / 3600
    if hours <= MOST_HOURS[priority] or prepared.plan.memory.limit_bytes is None:
        return
    advice = "train.steps, data.resolution and sampling.every_steps shorten it"
    if priority != "speed":
        advice = f"--priority speed shortens it most; so do {advice.partition(' shorten')[0]}"
    what = (
        f"about {hours:.1f} hours are predicted; priority {priority} is meant for "
        f"{MOST_HOURS[priority]:g} with 20 images on an ordinary GPU"
    )
    yield note("time", None, what, advice=advice)


def _wide(adapter: AdapterSettings) -> Iterator[Finding]:
    slow = {"adapter.dora": adapter.dora, "adapter.init=pissa": adapter.init == "pissa"}
    for name in (name for name, used in slow.items() if used):
        what = (
            f"{name} runs in fp32 beside each layer instead of fused with it, "
            "so a step takes more time, and in 16 bits more memory"
        )
        yield warning("adapter", None, what, advice="use a plain LoRA if time or memory is short")


def _dequantized(prepared: Prepared) -> Iterator[Finding]:
    if prepared.config.memory.base_matmul != "int8":
        return
    shapes = linear_shapes(prepared.family, prepared.facts)
    if count := sum(not has_int8_product(*shape) for shape in shapes.values()):
        what = (
            f"{count} of {len(shapes)} layers of the base are dequantized in spite of "
            "memory.base_matmul=int8, because int8 products need sizes that are multiples of 8"
        )
        yield warning("matmul", None, what, advice="no action needed")


def _enlarged(prepared: Prepared) -> Iterator[Finding]:
    sides_px = prepared.config.data.more_resolutions
    records = (*prepared.trained, *prepared.dataset.regularisation)
    for index, side_px in enumerate(sides_px, start=1):
        count = sum(record.placements[index].upscaled for record in records)
        if side_px > prepared.config.data.resolution and count:
            what = (
                f"{count} of {len(records)} images are enlarged for data.more_resolutions={side_px}"
            )
            advice = f"use larger originals, or leave {side_px} out of data.more_resolutions"
            yield warning("enlarged", None, what, advice=advice)
