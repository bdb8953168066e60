"""Whether compiled blocks and CUDA graphs can be used, and whether they pay within the run. No torch.

Input is what a step does and how long the run is; output a verdict with its reason. The model errs
towards leaving them out: it takes what is saved at the low end of what others have measured, what it
costs at the high end, and asks for twice the cost back.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lora_trainer.costs.sample_cost import KEEP_ATTENTION
from lora_trainer.families.base import BaseFacts
from lora_trainer.hardware.machine import Gpu, Hardware
from lora_trainer.planning.allocation import Allocation
from lora_trainer.planning.loads import RememberedCosts
from lora_trainer.planning.memory import ACTIVATIONS, SLACK, MemoryItem, Prediction
from lora_trainer.planning.search import gib
from lora_trainer.planning.step_time import (
    ARITHMETIC,
    LAUNCHES,
    StepTime,
    card,
    gpu_bounds,
    step_work,
)

MOST_SHAPES = 16
"""Shapes with a compiled graph, or a recording, of their own; more are computed as without."""
COMPILE_S = 40.0
"""One kind of block at one shape, forwards and backwards, on a few cores; from the cache a second or two."""
COMPILED_SAVES = 0.15
"""Of a step: measured elsewhere 5 to 37 % (musubi-tuner, OneTrainer, Krea 2), more with 4-bit bases."""
RECORDING_STEPS = 5
"""What a recording costs, in steps: the warm-ups run on a stream of their own, the capture runs in Python."""
RECORDING_S = 2.0
REPLAYED_KERNEL_S = 3e-6
"""Time between two kernels of a graph."""
LAUNCHES_SAVED = 0.5
"""Share of the predicted waiting for launches that is counted on: how fast a host is, is not known."""
PAYS_FROM = 2.0
"""What is saved in the steps of the run over what it costs, from which on it is done."""
TRITON_CAPABILITY = (7, 0)
PixelShape = tuple[int, int, int]
"""(width, height) in pixels, images at once."""


@dataclass(frozen=True, kw_only=True)
class SpeedupDecision:
    """Whether something is used, and why."""

    use: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What is known of a run when it is decided: settings without `auto` but for these two.

    `launch_s` is how long starting the kernels of a step takes, `work_s` what they do; `kinds` how many
    different blocks the base has, `shapes` how many shapes its passes have; `recorded` is the memory
    that graphs would take.
    """

    values: Mapping[str, Any]
    gpu: Gpu | None
    priority: str
    one_text_length: bool
    has_triton: bool
    steps: int
    time: StepTime
    launch_s: float
    work_s: float
    kernels: int
    kinds: int
    shapes: int
    recorded: Prediction


def run_facts(
    values: Mapping[str, Any],
    *,
    allocation: Allocation,
    facts: BaseFacts,
    costs: RememberedCosts,
    hardware: Hardware,
    gpu: Gpu | None,
    priority: str,
    processes: int,
) -> RunFacts:
    """Return what is known of a run whose memory is settled."""
    load, linear = allocation.load, costs.linear_shapes(facts)
    share = math.ceil(int(values["train.batch_size"]) / processes)
    work = step_work(
        load,
        facts=facts,
        costs=costs,
        batch_size=share,
        pinnable_bytes=hardware.pinnable_bytes,
    )
    bounds: Mapping[str, tuple[float, float]] = {}
    if gpu is not None:
        found = card(gpu.name, total_bytes=gpu.total_bytes)
        bounds = gpu_bounds(work, found, precision=load.precision)
    shapes = len(
        pass_shapes(
            allocation.images_at_once,
            batch_size=int(values["train.batch_size"]),
            processes=processes,
        )
    )
    forward_bytes = costs.sample_cost(facts, load.workload()).forward_bytes
    return RunFacts(
        values=values,
        gpu=gpu,
        priority=priority,
        one_text_length=costs.family.one_text_length,
        has_triton=hardware.packages.get("triton") is not None,
        steps=int(values["train.steps"]),
        time=allocation.time,
        launch_s=_middle(bounds.get(LAUNCHES, (0.0, 0.0))),
        work_s=_middle(bounds.get(ARITHMETIC, (0.0, 0.0))),
        kernels=work.kernels,
        kinds=_count_kinds(linear, {costs.block_of(name) for name in linear} - {""}),
        shapes=shapes,
        recorded=with_recordings(
            allocation.memory,
            shapes=shapes,
            beside_bytes=load.micro_batch * forward_bytes,
        ),
    )


def pass_shapes(
    images_at_once: Mapping[tuple[int, int], int], *, batch_size: int, processes: int = 1
) -> list[PixelShape]:
    """Return the shapes that passes may have, those with all images of their bucket's cap first.

    A step takes what comes, whatever its bucket, so smaller groups occur too; in a single bucket only
    what is left over.
    """
    counts = {size: set(range(1, cap + 1)) for size, cap in images_at_once.items()}
    if len(counts) == 1 and batch_size % processes == 0:
        ((size, cap),) = images_at_once.items()
        counts[size] = {cap, batch_size // processes % cap} - {0}
    missing = {
        (*size, count): images_at_once[size] - count
        for size, found in counts.items()
        for count in found
    }
    return sorted(missing, key=lambda shape: (missing[shape], -shape[0] * shape[1], shape))


# ---- compiled blocks


def compiling(told: RunFacts) -> SpeedupDecision:
    """Say what `hardware.compile` becomes: blocks if `use`."""
    asked = told.values["hardware.compile"]
    obstacle = "" if asked == "none" else _why_not_compiled(told)
    if asked == "auto":
        obstacle = obstacle or _why_not_unasked(told)
    else:
        reason = f"blocks was asked for, but {obstacle}" if obstacle else ""
        return SpeedupDecision(use=asked == "blocks" and not obstacle, reason=reason)
    return _automatic(told, obstacle) or _pays(
        told,
        cost_s=COMPILE_S * told.kinds * told.shapes,
        saved_s=COMPILED_SAVES * told.time.seconds,
        what=f"compiling {told.kinds} kinds of blocks for {told.shapes} shapes",
    )


def _why_not_compiled(told: RunFacts) -> str:
    """Return what stands against it, tried on every family's network; empty: nothing."""
    values = told.values
    kind = "DoRA" if values["adapter.dora"] else values["adapter.kind"]
    if kind in ("DoRA", "loha", "lokr"):
        return f"{kind} layers of peft are no code that can be compiled in one piece"
    if values["adapter.init"] == "pissa":
        return "adapter.init=pissa computes its layers in hooks"
    if any(values[f"adapter.{name}"] for name in ("dropout", "rank_dropout", "module_dropout")):
        return "masks of adapter dropout are named by layer: each block would be code of its own"
    if not told.one_text_length:
        return "texts of this base have lengths of their own: each would be code of its own"
    if values["objective.prior"] == "base" or values["objective.preservation_weight"]:
        return "what the base says itself is asked for varying numbers of samples: each would be code of its own"
    if values["base.assistant"] is not None:
        return "base.assistant computes its part in hooks"
    if values["memory.gradient_checkpointing"] in KEEP_ATTENTION or values["memory.kept_share"]:
        return "blocks keep results of kernels (memory.gradient_checkpointing), which compiled code has no more"
    if values["memory.modulation_cache"]:
        return "memory.modulation_cache looks up what parts of the blocks give"
    if values["memory.attention"] == "xformers":
        return "memory.attention=xformers is not torch's own"
    return ""


def _why_not_unasked(told: RunFacts) -> str:
    """Return why a card would have no use of code, or get none; asked for, it is tried all the same."""
    if told.values["memory.streamed_blocks"]:
        return "blocks are streamed: steps wait for copies"
    if not told.has_triton:
        return "triton, which makes code for cards, is missing (pip install triton)"
    capability = told.gpu.compute_capability if told.gpu is not None else None
    if capability is None or capability < TRITON_CAPABILITY:
        return "triton makes code for cards of compute capability 7.0 and above"
    return ""


# ---- CUDA graphs


def graphing(told: RunFacts) -> SpeedupDecision:
    """Say what `hardware.cuda_graphs` becomes."""
    asked = told.values["hardware.cuda_graphs"]
    obstacle = "" if asked is False else _why_not_graphed(told)
    if not obstacle and asked is not False and not told.recorded.fits:
        obstacle = f"recorded steps keep their memory: {gib(told.recorded.peak_bytes)} predicted"
    if asked != "auto":
        reason = f"true was asked for, but {obstacle}" if obstacle else ""
        return SpeedupDecision(use=asked is True and not obstacle, reason=reason)
    waiting_s = told.launch_s - max(told.work_s, told.kernels * REPLAYED_KERNEL_S)
    return _automatic(told, obstacle) or _pays(
        told,
        cost_s=told.shapes * (RECORDING_S + RECORDING_STEPS * told.time.high_s),
        saved_s=LAUNCHES_SAVED * max(0.0, waiting_s),
        what=f"recording {told.shapes} shapes",
    )


def _why_not_graphed(told: RunFacts) -> str:
    values = told.values
    obstacles = {
        "there is no card": told.gpu is None,
        "only NVIDIA's cards are known to record steps": told.gpu is not None
        and not told.gpu.can.graphs,
        "train.deterministic promises bits": values["train.deterministic"],
        "blocks are streamed from host memory": values["memory.streamed_blocks"],
        "inputs of blocks wait in host memory": values["memory.gradient_checkpointing"]
        == "offloaded",
        "bitsandbytes' nf4 is not known to be recordable": values["memory.base_precision"] == "nf4",
        "what the modulation layers give lies elsewhere in each step": values[
            "memory.modulation_cache"
        ],
        "text encoders run in every step": values["adapter.text_encoder"]
        or values["adapter.new_tokens"],
        "texts of this base have lengths of their own": not told.one_text_length,
        "what the base says itself is asked for some samples only": values["objective.prior"]
        == "base"
        or values["objective.preservation_weight"],
    }
    return next((reason for reason, holds in obstacles.items() if holds), "")


def with_recordings(memory: Prediction, *, shapes: int, beside_bytes: int) -> Prediction:
    """Return what recorded steps take: their memory stays theirs while anything else is computed.

    With several shapes that is a step of another one, which is not recorded yet; else a validation,
    which takes `beside_bytes`.
    """
    kept = (*ACTIVATIONS, SLACK)  # a pool of its own has holes of its own
    step = sum(item.bytes for item in memory.by_phase["training"] if item.name in kept)
    beside = step if shapes > 1 else min(step, beside_bytes)
    extra = {"training": beside, "sampling": step}
    return replace(
        memory,
        by_phase={
            phase: (*items, _recorded_item(extra[phase])) if phase in extra else items
            for phase, items in memory.by_phase.items()
        },
    )


def _recorded_item(size: int) -> MemoryItem:
    note = "CUDA graphs: what a recorded step keeps for itself"
    return MemoryItem(name="recorded steps", bytes=size, note=note)


# ---- both


def _automatic(told: RunFacts, obstacle: str) -> SpeedupDecision | None:
    """Return why it is not even weighed; None: it is."""
    if told.priority != "speed":
        return SpeedupDecision(use=False, reason="tried by priority speed only")
    if told.gpu is None:
        return SpeedupDecision(use=False, reason="for a card")
    if obstacle:
        return SpeedupDecision(use=False, reason=obstacle)
    if told.shapes > MOST_SHAPES:
        many = f"{told.shapes} shapes of passes, more than {MOST_SHAPES}"
        return SpeedupDecision(use=False, reason=many)
    return None


def _pays(told: RunFacts, *, cost_s: float, saved_s: float, what: str) -> SpeedupDecision:
    saved = saved_s * told.steps
    sums = f"{what} takes {cost_s:.0f} s, {told.steps} steps save {saved:.0f} s (both estimates)"
    return SpeedupDecision(use=saved > PAYS_FROM * cost_s, reason=sums)


def _middle(ends: tuple[float, float]) -> float:
    return math.sqrt(ends[0] * ends[1])


def _count_kinds(shapes: Mapping[str, tuple[int, int]], blocks: Collection[str]) -> int:
    """Return how many different blocks there are; `shapes` are those of linear layers by name."""
    found = {
        frozenset(
            (name[len(block) :], shape)
            for name, shape in shapes.items()
            if name.startswith(f"{block}.")
        )
        for block in blocks
    }
    return max(1, len(found))
