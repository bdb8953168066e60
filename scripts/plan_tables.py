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

from lora_trainer.common.errors import LoraTrainError
from lora_trainer.common.wording import gib
from lora_trainer.config import PRIORITIES, Priority
from lora_trainer.config.layers import AskedFor, lowered_to, resolve
from lora_trainer.families import NAMES, family, known_base
from lora_trainer.families.base.family import Family
from lora_trainer.families.base.tables import family_table
from lora_trainer.hardware.machine import GIB, Hardware, tier
from lora_trainer.hardware.nvml import Gpu
from lora_trainer.planning.memory import MemoryItem
from lora_trainer.planning.plan import Plan, plan
from lora_trainer.planning.plan_input import PlanInput
from lora_trainer.planning.run_time import middle
from scripts.preset_table import views_of_families

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
IMAGES = TRAINED + HELD_OUT
DESKTOP_GIB = 0.5
SIDES_PX = (512, 640, 768, 1024)
"""The sizes that a transformer may be trained at."""
RAM_GIB, MACHINE_GIB = 32, 28
"""The machine's memory, and how much of it is free."""
HEADS = {"images": "encoding images", "texts": "encoding texts"}
"""How the table of a plan calls a phase, where its name alone says too little."""
TEXT = """# Plans

This page shows what `lora-train plan` chooses and predicts for four GPUs. `scripts/plan_tables.py` writes the page
without downloading or loading a base model. It assumes:

* a GPU that is empty except for half a GiB that the desktop takes;
* 28 GiB of free RAM (60 GiB for FLUX.2 dev);
* 20 images that already have the training resolution (18 to train on, 2 held out);
* default settings.

The predictions have **not yet been checked by measurements** on these GPUs. They are calculated from the sizes and
operations of the networks, and were compared with published measurements (tests/planning/test_memory.py). Times are
estimates. The page shows the time of a step as a range. For a whole run it shows the middle of the range; the run may
take anywhere from half to twice as long.

## How the planner chooses

The planner tries combinations of four settings:

* the precision of the base: unquantised, 8 bits (int8) or 4 bits (nf4);
* gradient checkpointing, from `none` to `offloaded` ([memory.md](memory.md#gradient-checkpointing));
* the number of streamed blocks: blocks of the base that wait in host memory and are copied to the GPU for each use;
* the number of images of a batch that go through the network at once.

The planner never changes the batch size. If you set the precision of the base, that precision stays. If you set one of
the other three settings, the planner may replace your value with one that needs less memory, never with one that needs
more. `planning/memory_choice.py` does this search.

The priority decides between the combinations that fit:

* `speed` and `balanced` take the combination with the shortest estimated time per step. They also favour a more precise
  base: before the comparison, the time of a base in 8 or 4 bits is multiplied by the factor below.
* `quality` takes the most precise base that fits, and then the fastest combination for this base.

| priority | factor for 8 bits | factor for 4 bits |
| --- | ---: | ---: |
| `speed` | 1.1 | 1.2 |
| `balanced` | 1.2 | 1.5 |

Drawing sample images during training also needs memory, so a combination that leaves room for them may be slower per
step. The planner takes such a combination if it keeps the base in the same precision and a step takes at most a fifth
longer. Otherwise the run draws no sample images. If no combination fits at all, the run is refused, and the error
message names the smallest change of another setting that would fit.

## How long a run takes

The time of a run is the time from entering the command to the finished file. It includes startup, caching, all steps,
validation and sample images. After that, lora-train measures how much of each image the finished LoRA has learned; this
adds about 1 % to the time. With 20 images, a run on these GPUs takes at most:

| priority | hours |
| --- | ---: |
| `speed` | 1 |
| `balanced` | 3 |
| `quality` | 8 |

tests/scripts/test_tables.py checks these limits for every public base model. They leave out the previews, which the
table below includes and which take a few hundredths of the time. Three things decide the time: the size of the images,
the number of updates and the sample images.

**The size of the images.** A U-Net is always trained at its native resolution. A transformer can be trained at four
sizes: its native resolution (1024 px), three quarters of it (768 px), five eighths (640 px) and half (512 px). The
planner takes the largest of these sizes that fits the GPU and with which a run of 20 images finishes within the hours
above, on a machine that does nothing else. If you set `data.resolution`, your value stays.

`plan` shows the larger sizes and the time that they would take. For example, with `balanced` at 1024 px, FLUX.1 would
train for 9 hours on 12 GB and for 8 hours on 16 GB. If no size is fast enough, the planner takes the fastest one, and
`plan` prints a warning. Other trainers use the same sizes:

* OneTrainer's presets for 8 and 16 GB: 512 px for Chroma, FLUX.2 klein, Qwen-Image and Z-Image; 768 px in 4 bits for
  FLUX.1;
* the FLUX.1 preset of kohya_ss: 512 px;
* ai-toolkit: a mixture of sizes that begins at 512 px.

**The number of updates.** It is the same on all GPUs ([presets.md](presets.md)). The table shows it for up to 20 images
and a batch size of 1. ai-toolkit's FLUX.1 example has 2,000 updates and says "500 - 4000 is a good range".
"""
SAMPLES = """\
**Sample images.** They are drawn before the first step and at every save. If they would take more than 15 % of the time
of the steps and more than three minutes, they are drawn at every second save, or only at the last. With `speed`, a run
on a transformer draws two sample images instead of four. Exceptions are Lumina-Image 2.0 on GPUs of the tier `10-12`
([presets.md](presets.md)), which draws one with `speed`, and Ideogram 4 (see below).

A larger dataset takes longer: the number of steps grows with the number of images, up to 160 images. A slower GPU also
takes longer. `plan` shows the time of each part of the run, and warns if the whole run takes longer than the hours
above.

FLUX.2 dev, with its 32 billion parameters, is an exception. On GPUs below 24 GiB, it takes longer than these hours: a
step takes half a minute even at the smallest size, because the base model is copied from RAM block by block. On 24 GiB,
`quality` takes a little over 8 hours. `plan` prints a warning in both cases.

With Ideogram 4, the sample images take a fifth to two fifths of the time of a run. Its guidance needs a second network,
which is read again for each step of an image: from RAM if its 19 GB (9 GB in fp8) fit there, otherwise from disk. Its
presets draw one sample image with `speed`, two with `balanced` and four with `quality`, in the release's recommended 20
steps (`speed`: 12). With `sampling.guidance_scale=1`, images are drawn without the second network; with
`sampling.every_steps=0`, none are drawn.

The table shows the hours of a run, and the size of its images in px. The RTX 3060 has more memory than the RTX 4060,
but computes more slowly, so it trains some bases at a smaller size:
"""
EDITS = """\
A base that edits images also has to process the tokens of the reference images, so its runs take longer. The next table
shows `balanced` with one reference image of the same size as the training image. The runs without reference images are
in the table above (for FLUX.1 Kontext, see FLUX.1-dev). If a run takes longer than the hours above, `plan` prints a
warning; a smaller `data.reference_resolution` shortens the run:
"""
TIMES = """\
On a CPU, the miniature base that comes with lora-train is trained in minutes, but a full-size base takes days. So the
tier `cpu` has no time limit.
"""


def page() -> str:
    """Return the whole page."""
    memory = (line for name in BASES for line in _base(name))
    return "\n".join([TEXT, *_updates(), SAMPLES, *_times(), EDITS, *_edits(), TIMES, *memory])


def releases() -> Iterator[str]:
    """Yield a name of each public release that is computed otherwise than the others, family by family."""
    for name in NAMES:
        named = family(name)
        sources = [
            next(iter(named.releases)),
            *(found for each in _known(named) for found in each.ids),
        ]
        different: dict[str, str] = {}
        for source in sources:
            different.setdefault(network_of(source), source)
        yield from different.values()


def network_of(source: str) -> str:
    """Return the configuration of a release's denoiser as text: equal ones are computed alike."""
    facts = known_base(source)
    assert facts is not None
    return json.dumps(dict(facts.release.architecture), sort_keys=True)


def _known(named: Family) -> Sequence[Any]:
    return getattr(named, "published", ())


@cache
def planned(
    source: str, card: str, priority: Priority = "balanced", *, references: int = 0
) -> Plan:
    """Plan a base on one of the GPUs; `references` of an image are as large as it."""
    facts = known_base(source)
    assert facts is not None
    hardware = machine(card, ram_gib=ram_gib_of(source))
    resolved = resolve(
        AskedFor(),
        family=facts.family,
        tier=tier(hardware.gpus[0].total_bytes),
        priority=priority,
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
            references={(side, side): ((side, side),) * references for side in SIDES_PX}
            if references
            else {},
            latents=(TRAINED + HELD_OUT) * (1 + references),
            texts=TRAINED + HELD_OUT,
            prompts=resolved.config.sampling.prompts_from_captions,
        )
    )


def ram_gib_of(source: str) -> int:
    """Return the memory of the machine that a release is planned with."""
    facts = known_base(source)
    assert facts is not None
    rows = family_table(facts.family)["releases"]
    row = next((row for row in rows if source in row["ids"]), {})
    return int(row.get("ram_gib", RAM_GIB))


def machine(card: str, *, ram_gib: int = RAM_GIB) -> Hardware:
    """Return a machine with that GPU and memory."""
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
        ram_total_bytes=ram_gib * GIB,
        ram_free_bytes=(ram_gib - RAM_GIB + MACHINE_GIB) * GIB,
        packages={"bitsandbytes": "assumed"},
        reasons={"cpu_threads": "assumed"},
        expandable_segments=True,
    )


def hours_of(made: Plan) -> float:
    """Return the hours to the finished file, after which each image is measured."""
    return (made.run_time.seconds - middle(made.run_time.images)) / 3600


def _updates() -> Iterator[str]:
    yield _line(["family", *(f"`{name}`" for name in PRIORITIES)])
    yield _line(["---", *("---:" for _ in PRIORITIES)])
    for families, views in views_of_families():  # the batch size of all presets is 1 on a GPU
        yield _line([families, *(f"{count * IMAGES:,}" for count in views)])
    yield ""


def _times() -> Iterator[str]:
    yield _line(["hours, px", *(f"{card}, {name}" for card in CARDS for name in PRIORITIES)])
    yield _line(["---", *("---:" for _ in CARDS for _ in PRIORITIES)])
    for source in releases():
        plans = [planned(source, card, name) for card in CARDS for name in PRIORITIES]
        hours = (f"{hours_of(made):.1f}, {made.config.data.resolution}" for made in plans)
        yield _line([source.partition("/")[2], *hours])
    yield ""


def _edits() -> Iterator[str]:
    yield _line(["hours, px", *CARDS])
    yield _line(["---", *("---:" for _ in CARDS)])
    for source in editing_releases():
        cells = (_edit_hours(source, card) for card in CARDS)
        yield _line([source.partition("/")[2], *cells])
    yield ""


def _edit_hours(source: str, card: str) -> str:
    try:
        made = planned(source, card, references=1)
    except LoraTrainError:
        return "does not fit"
    return f"{hours_of(made):.1f}, {made.config.data.resolution}"


def editing_releases() -> Iterator[str]:
    """Yield a name of each public release that edits images and is computed otherwise than the others."""
    for name in NAMES:
        different: dict[str, str] = {}
        for each in _known(family(name)):
            facts = known_base(each.ids[0])
            if facts is not None and facts.references is not None:
                different.setdefault(network_of(each.ids[0]), each.ids[0])
        yield from different.values()


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
    yield "gradient checkpointing", [str(memory.gradient_checkpointing) for memory in memories]
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
        "RAM needed",
        [gib(made.host.peak_bytes) if made.host else "" for made in plans],
    )
    yield (
        "seconds per step",
        [" to ".join(f"{seconds:.2g}" for seconds in made.seconds_per_step) for made in plans],
    )


def _items(title: str, made: Plan) -> Iterator[str]:
    phases = made.memory.by_phase
    sizes = {phase: {item.name: item for item in items} for phase, items in phases.items()}
    yield f"**{title}**, memory in GiB\n"
    yield _line(["", *(HEADS.get(phase, phase) for phase in phases), ""])
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
