"""Write docs/plans.md: what `plan` finds on four GPUs: how long runs of all bases take, memory of two.

`python scripts/plan_tables.py`. The machine is assumed: four known GPUs, empty but for a desktop, 28 GiB
of memory free beside them, 20 images. tests/scripts/test_tables.py fails when the page is old.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from lora_trainer.common.wording import gib
from lora_trainer.config import PRIORITIES, Priority
from lora_trainer.config.layers import lowered_to, resolve
from lora_trainer.config.running import MemorySettings
from lora_trainer.families import MODULES, family, known_base
from lora_trainer.families.base import Family
from lora_trainer.hardware.machine import GIB, Hardware, tier
from lora_trainer.hardware.nvml import Gpu
from lora_trainer.planning.memory import MemoryItem
from lora_trainer.planning.plan import Plan, plan
from lora_trainer.planning.plan_input import PlanInput

PAGE = Path(__file__).resolve().parents[1] / "docs" / "plans.md"
CARDS = {
    "8 GiB (RTX 4060)": 8,
    "12 GiB (RTX 3060)": 12,
    "16 GiB (RTX 4060 Ti)": 16,
    "24 GiB (RTX 4090)": 24,
}
BASES = {
    "SDXL": "stabilityai/stable-diffusion-xl-base-1.0",
    "FLUX.1-dev": "black-forest-labs/FLUX.1-dev",
}
TRAINED, HELD_OUT = 18, 2
DESKTOP_GIB = 0.5
MACHINE_GIB = 28
TEXT = """# Plans

What `lora-train plan` chooses and predicts on four GPUs, before anything is downloaded or loaded, made by
`scripts/plan_tables.py`. Assumed: the GPU is empty but for half a GiB of desktop, 28 GiB of the machine's memory
are free, 20 images as large as is trained (18 trained, 2 held out), everything left to the presets and the plan.

No GPU was at hand: the predictions follow from the networks' own arithmetic, checked against published
measurements (tests/planning/test_memory.py); on these GPUs they are **not yet
measured**. Times are estimates: a step is given as a range, a whole run by the middle of its range (half to
twice as long is possible).

How it is decided. The batch is never changed; what somebody set is never raised. Of all that fits (base whole,
in 8 or in 4 bits; nothing recomputed, or blocks with or without their dear results,
with inputs in host memory where needed; blocks streamed from host memory; images at once),
`speed` and `balanced` take the fewest seconds a step by the estimate, where the seconds of 8 bits count 1.1
(`speed`) or 1.2 times (`balanced`) and those of 4 bits 1.2 or 1.5 times; `quality` takes the most precise, then
the fastest. Sample images are kept where they make a step at most a fifth longer. Nothing fits: the run is
refused with the nearest setting that does.

## How long a run takes

From the command to the file: start, caching, all steps, validation, sample images. On these GPUs a run of 20
images takes at most **1 hour with `speed`, 3 with `balanced`, 8 with `quality`**
(tests/scripts/test_tables.py, for every release). What decides it:

* **The size of the images.** Where nobody sets `data.resolution`, a transformer is trained at the largest of its own
  size, three quarters, five eighths and half of it (1024, 768, 640 and 512 px) that fits the GPU and ends within these
  hours with 20 images on an idle machine; `plan` names the sizes it passed over and what they would take. Where none
  does, it is the fastest, and `plan` warns. At 1024 px FLUX.1 would train for 9 hours on 12 GB with `balanced` and for
  8 on 16 GB. Others have the same sizes: OneTrainer's presets for 8 and 16 GB (512 px: Chroma, FLUX.2 klein,
  Qwen-Image, Z-Image; FLUX.1 768 px in 4 bits), kohya_ss' for FLUX.1 (512 px), ai-toolkit's mixture that begins at
  512. The U-Nets are trained at their own size everywhere.
* **The number of updates**, the same on all GPUs ([presets.md](presets.md)): 500, 1,500 and 3,000 of one image for
  transformers (ai-toolkit's FLUX.1 example: 2,000, "500 - 4000 is a good range"). Qwen-Image, the dearest, has
  440, 1,200 and 3,000.
* **Sample images** are drawn at every save, or at every second or the last one where they would take more than 15 %
  of the steps' time and three minutes; transformers draw two instead of four with `speed`.

A larger set takes longer: steps grow with the images, up to 160 of them. So does a slower GPU. `plan` says what the
run takes, by parts, and warns where it is more than these hours.
"""
TIMES = """On a processor alone the embedded miniature base ends in minutes; a base of true size takes days there. The
tier `cpu` is not bounded for that reason.
"""


def page() -> str:
    """Return the whole page."""
    memory = (line for name in BASES for line in _base(name))
    return "\n".join([TEXT, *_times(), TIMES, *memory])


def releases() -> Iterator[str]:
    """Yield a name of each public release that is computed otherwise than the others, family by family."""
    for name in MODULES:
        named = family(name)
        sources = [
            next(iter(named.releases)),
            *(found for each in _known(named) for found in each.ids),
        ]
        different = {}
        for source in sources:
            facts = known_base(source)
            assert facts is not None
            different.setdefault(json.dumps(dict(facts.architecture), sort_keys=True), source)
        yield from different.values()


def _known(named: Family) -> Sequence[Any]:
    return getattr(named, "published", ())


@cache
def planned(source: str, card: str, priority: Priority = "balanced") -> Plan:
    """Plan a base on one of the GPUs."""
    facts = known_base(source)
    assert facts is not None
    hardware = machine(card)
    resolved = resolve(
        family=facts.family,
        tier=tier(hardware.gpus[0].total_bytes),
        priority=priority,
        preset="auto",
        config_file=None,
        overrides={},
    )
    return plan(
        PlanInput(
            decided={"output.format": ("kohya", "known before")},
            resolved=lowered_to(resolved, resolution_px=facts.resolution_px),
            facts=facts,
            family=family(facts.family),
            hardware=hardware,
            images=TRAINED,
            held_out_count=HELD_OUT,
            samples_per_epoch=TRAINED,
            buckets=[],
            latents=TRAINED + HELD_OUT,
            texts=TRAINED + HELD_OUT,
            prompts=resolved.config.sampling.prompts_from_captions,
        )
    )


def machine(card: str) -> Hardware:
    """Return a machine with that GPU."""
    size = CARDS[card]
    gpu = Gpu(
        index=0,
        name=f"NVIDIA GeForce {card.partition('(')[2].rstrip(')')}",
        total_bytes=size * GIB,
        free_bytes=int((size - DESKTOP_GIB) * GIB),
        compute_capability=(8, 6),
        driver="",
        display=True,
    )
    return Hardware(
        gpus=(gpu,),
        gpu_reason="assumed",
        cpu_name="",
        cpu_threads=8,
        ram_total_bytes=32 * GIB,
        ram_free_bytes=MACHINE_GIB * GIB,
        packages={"bitsandbytes": "assumed"},
        reasons={"cpu_threads": "assumed"},
        expandable_segments=True,
    )


def _times() -> Iterator[str]:
    yield _line(["hours, px", *(f"{card}, {name}" for card in CARDS for name in PRIORITIES)])
    yield _line(["---", *("---:" for _ in CARDS for _ in PRIORITIES)])
    for source in releases():
        plans = [planned(source, card, name) for card in CARDS for name in PRIORITIES]
        hours = (
            f"{made.run_time.seconds / 3600:.1f}, {made.config.data.resolution}" for made in plans
        )
        yield _line([source.partition("/")[2], *hours])
    yield ""


def _base(name: str) -> Iterator[str]:
    plans = {card: planned(BASES[name], card) for card in CARDS}
    yield f"## {name}\n"
    yield _line(["", *plans])
    yield _line(["---", *("---:" for _ in plans)])
    for label, cells in _rows(list(plans.values())):
        yield _line([label, *cells])
    yield ""
    for card, made in plans.items():
        yield from _items(f"{name} on {card}", made)


def _rows(plans: list[Plan]) -> Iterator[tuple[str, list[str]]]:
    memories = [made.config.memory for made in plans]
    yield "image size", [f"{made.config.data.resolution} px" for made in plans]
    yield "base kept in", [str(memory.base_precision) for memory in memories]
    yield "blocks streamed", [str(memory.streamed_blocks) for memory in memories]
    yield "recomputed", [_recomputed(memory) for memory in memories]
    yield (
        "batch, images at once",
        [f"{made.config.train.batch_size}, {made.config.memory.micro_batch}" for made in plans],
    )
    yield (
        "text encoders while caching",
        [
            f"{memory.text_encoder_precision}, {'offloaded' if memory.text_encoder_offload else 'on the GPU'}"
            for memory in memories
        ],
    )
    yield (
        "optimizer, rank, targets",
        [
            f"{made.config.optimizer.name}, {made.config.adapter.rank}, {made.config.adapter.targets}"
            for made in plans
        ],
    )
    yield (
        "sample images",
        ["yes" if made.config.sampling.every_steps else "no room" for made in plans],
    )
    yield (
        "**predicted peak**",
        [f"**{gib(made.memory.peak_bytes)}** ({made.memory.peak_phase})" for made in plans],
    )
    yield (
        "memory of the machine",
        [gib(made.host.peak_bytes) if made.host else "" for made in plans],
    )
    yield (
        "seconds a step",
        [" to ".join(f"{seconds:.2g}" for seconds in made.seconds_per_step) for made in plans],
    )


def _recomputed(memory: MemorySettings) -> str:
    return str(memory.gradient_checkpointing)


def _items(title: str, made: Plan) -> Iterator[str]:
    phases = made.memory.by_phase
    sizes = {phase: {item.name: item for item in items} for phase, items in phases.items()}
    yield f"**{title}**, GiB\n"
    yield _line(["", *phases, ""])
    yield _line(["---", *("---:" for _ in phases), "---"])
    for name in _names(phases.values()):
        found = [items.get(name) for items in sizes.values()]
        note = next((item.note for item in found if item is not None and item.note), "")
        yield _line([name, *(_size(item) for item in found), note])
    sums = [f"**{size / GIB:.2f}**" for size in made.memory.phases.values()]
    yield _line(["**sum**", *sums, ""])
    yield ""


def _names(phases: Iterable[Sequence[MemoryItem]]) -> list[str]:
    names = dict.fromkeys(item.name for items in phases for item in items)
    return sorted(names, key=lambda name: name == "allocator slack")


def _size(item: MemoryItem | None) -> str:
    return "" if item is None else f"{item.bytes / GIB:.2f}"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Rewrite docs/plans.md."""
    PAGE.write_text(page().rstrip() + "\n", encoding="utf-8")
    sys.stderr.write(f"wrote {PAGE.name}\n")


if __name__ == "__main__":
    main()
