"""Whether blocks are compiled: where that is possible, and pays within the run. No torch.

Input is the time of a step and the length of the run; output a decision with its reason. The model errs
towards leaving it out: it assumes the lowest savings that others have measured and the highest cost, and
wants the savings to be twice the cost.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

from lora_trainer.config.constraints import typed
from lora_trainer.config.declare import KEEP_ATTENTION, settled
from lora_trainer.config.running import Config
from lora_trainer.costs.base_costs import BaseCosts
from lora_trainer.hardware.nvml import Gpu
from lora_trainer.planning.memory_choice import MemoryChoice
from lora_trainer.planning.plan_input import PlanInput

MOST_SHAPES = 16
"""Most shapes that are compiled; further shapes run as usual."""
COMPILE_S = 40.0
"""Compiling one kind of block for one shape, both passes, on a few cores; from the cache a second or two."""
COMPILED_SAVES = 0.15
"""Share of a step saved: measured elsewhere 5 to 37 % (musubi-tuner, OneTrainer, Krea 2), more with 4-bit bases."""
PAYS_FROM = 2.0
"""Seconds saved within the run over seconds it costs, from which on compiling is used."""
TRITON_CAPABILITY = (7, 0)
PixelShape = tuple[int, int, int]
"""(width, height) in pixels, images at once."""


def choose_compile(
    inputs: PlanInput, config: Config, *, gpu: Gpu | None, memory_choice: MemoryChoice
) -> tuple[Literal["none", "blocks"], str]:
    """Return the value of `hardware.compile` and its reason, for a run whose memory is decided."""
    setting = config.hardware.compile
    if setting == "none":
        return "none", ""
    if setting == "auto" and inputs.resolved.priority != "speed":
        return "none", "chosen with priority speed only"
    if setting == "auto" and gpu is None:
        return "none", "chosen on a GPU only"
    obstacle = next(_obstacles(inputs, config, gpu), "")
    if setting != "auto":
        return ("none" if obstacle else "blocks"), f"instead of {typed(setting)}: {obstacle}"
    if obstacle:
        return "none", obstacle
    shapes = len(
        pass_shapes(
            memory_choice.images_at_once,
            batch_size=config.train.batch_size,
            processes=inputs.processes,
        )
    )
    if shapes > MOST_SHAPES:
        return "none", f"{shapes} shapes of passes, more than {MOST_SHAPES}"
    kinds, steps = _count_kinds(inputs.costs), settled(config.train.steps)
    cost_s = COMPILE_S * kinds * shapes
    saved_s = COMPILED_SAVES * memory_choice.time.seconds * steps
    sums = (
        f"compiling {kinds} kinds of blocks for {shapes} shapes takes {cost_s:.0f} s, {steps} steps save "
        f"{saved_s:.0f} s (both estimates)"
    )
    return ("blocks" if saved_s > PAYS_FROM * cost_s else "none"), sums


def _obstacles(inputs: PlanInput, config: Config, gpu: Gpu | None) -> Iterator[str]:
    """Yield the reasons against compiling; each was tried on every family."""
    adapter, memory, objective = config.adapter, config.memory, config.objective
    kind = "DoRA" if adapter.dora else adapter.kind
    drops = adapter.dropout or adapter.rank_dropout or adapter.module_dropout
    capability = gpu.compute_capability if gpu is not None else None
    impossible = {
        f"peft's {kind} layers cannot be compiled in one piece": kind in ("DoRA", "loha", "lokr"),
        "adapter dropout differs by layer, so each block would be compiled separately": drops,
        "text lengths vary with this base, and each length would be compiled separately": (
            inputs.costs.texts_vary
        ),
        "the base's own prediction is computed for a varying number of samples, each compiled separately": (
            objective.prior == "base" or objective.preservation_weight
        ),
        "base.assistant computes its part in hooks, which cannot be compiled": config.base.assistant,
        "this gradient checkpointing keeps results of single kernels, which compiled code merges": (
            memory.gradient_checkpointing in KEEP_ATTENTION
        ),
        "memory.attention=xformers cannot be compiled": memory.attention == "xformers",
    }
    slow = {
        "blocks are streamed, so steps wait for copies, not for kernels": memory.streamed_blocks,
        "triton, which compiles for GPUs, is missing (pip install triton)": (
            inputs.hardware.packages.get("triton") is None
        ),
        "triton needs a GPU of compute capability 7.0 or higher": (
            capability is None or capability < TRITON_CAPABILITY
        ),
    }
    # What only makes it slow the user may still ask for.
    reasons = {**impossible, **slow} if config.hardware.compile == "auto" else impossible
    yield from (reason for reason, holds in reasons.items() if holds)


def _count_kinds(costs: BaseCosts) -> int:
    """Return how many different blocks the base has."""
    # Blocks with the same layers in the same sizes share compiled code.
    layers: dict[str, set[tuple[str, tuple[int, int]]]] = {}
    for name, shape in costs.linear_shapes.items():
        if block := costs.block_of(name):
            layers.setdefault(block, set()).add((name.removeprefix(block), shape))
    return max(1, len(set(map(frozenset, layers.values()))))


def pass_shapes(
    images_at_once: Mapping[tuple[int, int], int], *, batch_size: int, processes: int = 1
) -> list[PixelShape]:
    """Return the shapes that passes may have, full micro-batches first.

    A step draws images from all buckets, so any smaller number of images of a bucket occurs too; with a
    single bucket only the rest of the division does.
    """
    counts = {size: set(range(1, cap + 1)) for size, cap in images_at_once.items()}
    # Equal shares of one bucket: each step has the same full micro-batches and the same rest.
    if len(counts) == 1 and batch_size % processes == 0:
        ((size, cap),) = images_at_once.items()
        counts[size] = {cap, batch_size // processes % cap} - {0}
    missing = {
        (*size, count): images_at_once[size] - count
        for size, batch_counts in counts.items()
        for count in batch_counts
    }
    # The shapes that are compiled first are those that most steps have: full ones, and large ones.
    return sorted(missing, key=lambda shape: (missing[shape], -shape[0] * shape[1], shape))
