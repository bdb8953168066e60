"""Whether compiled blocks and CUDA graphs can be used, and whether they pay within the run. No torch.

Input is the work of a step and the length of the run; output a verdict with its reason. The model errs
towards leaving them out: it assumes the lowest savings that others have measured and the highest cost, and
wants the savings to be twice the cost.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from lora_trainer.config.config import KEEP_ATTENTION, Config, settled
from lora_trainer.costs.cost_table import texts_vary
from lora_trainer.families.base import BaseFacts
from lora_trainer.hardware.machine import Gpu, Hardware
from lora_trainer.planning.loads import RememberedCosts
from lora_trainer.planning.memory import ACTIVATIONS, SLACK, MemoryItem, Prediction
from lora_trainer.planning.memory_choice import MemoryChoice
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
"""Most shapes that are compiled or recorded; further shapes run as usual."""
COMPILE_S = 40.0
"""Compiling one kind of block for one shape, both passes, on a few cores; from the cache a second or two."""
COMPILED_SAVES = 0.15
"""Share of a step saved: measured elsewhere 5 to 37 % (musubi-tuner, OneTrainer, Krea 2), more with 4-bit bases."""
RECORDING_STEPS = 5
"""Cost of a recording in steps: warm-up steps on a side stream, then the capture, which runs in Python."""
RECORDING_S = 2.0
REPLAYED_KERNEL_S = 3e-6
"""Time between two kernels of a graph."""
LAUNCHES_SAVED = 0.5
"""Share of the predicted waiting for kernel launches that counts as saved, as the host's speed is unknown."""
PAYS_FROM = 2.0
"""Seconds saved within the run over seconds it costs, from which on a speed-up is used."""
TRITON_CAPABILITY = (7, 0)
PixelShape = tuple[int, int, int]
"""(width, height) in pixels, images at once."""


@dataclass(frozen=True, kw_only=True)
class SpeedupDecision:
    """Whether a speed-up is used, and why."""

    use: bool
    reason: str


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Facts about a run that decide its speed-ups; `config` has `auto` only in these two settings.

    `launch_s` are seconds to start all kernels of a step, `work_s` seconds the GPU computes; `kinds` counts
    the different blocks of the base, `shapes` the shapes of its passes; `recorded` is the memory of a run
    with CUDA graphs.
    """

    config: Config
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
    config: Config,
    *,
    memory_choice: MemoryChoice,
    facts: BaseFacts,
    costs: RememberedCosts,
    hardware: Hardware,
    gpu: Gpu | None,
    priority: str,
    processes: int,
) -> RunFacts:
    """Return the facts about a run whose memory is decided."""
    load, linear = memory_choice.load, costs.linear_shapes(facts)
    share = math.ceil(config.train.batch_size / processes)  # the slowest process sets the pace
    work = step_work(
        load,
        facts=facts,
        costs=costs,
        batch_size=share,
        pinnable_bytes=hardware.pinnable_bytes,
    )
    bounds: Mapping[str, tuple[float, float]] = {}
    if gpu is not None:
        rates = card(gpu.name, total_bytes=gpu.total_bytes)
        bounds = gpu_bounds(work, rates, precision=load.precision)
    shapes = len(
        pass_shapes(
            memory_choice.images_at_once,
            batch_size=config.train.batch_size,
            processes=processes,
        )
    )
    forward_bytes = costs.sample_cost(facts, load.workload()).forward_bytes
    return RunFacts(
        config=config,
        gpu=gpu,
        priority=priority,
        one_text_length=not texts_vary(costs.family, facts),
        has_triton=hardware.packages.get("triton") is not None,
        steps=settled(config.train.steps),
        time=memory_choice.time,
        launch_s=_middle(bounds.get(LAUNCHES, (0.0, 0.0))),
        work_s=_middle(bounds.get(ARITHMETIC, (0.0, 0.0))),
        kernels=work.kernels,
        kinds=_count_kinds(linear, {costs.block_of(name) for name in linear} - {""}),
        shapes=shapes,
        recorded=with_recordings(
            memory_choice.memory,
            shapes=shapes,
            beside_bytes=load.micro_batch * forward_bytes,
        ),
    )


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
    # The shapes that are recorded first are those that most steps have: full ones, and large ones.
    return sorted(missing, key=lambda shape: (missing[shape], -shape[0] * shape[1], shape))


# ---- compiled blocks


def compiling(run_facts: RunFacts) -> SpeedupDecision:
    """Return whether `hardware.compile` becomes `blocks`, and why."""
    setting = run_facts.config.hardware.compile
    obstacle = "" if setting == "none" else _why_not_compiled(run_facts)
    if setting == "auto":
        obstacle = obstacle or _why_not_unasked(run_facts)
    else:
        reason = f"instead of blocks: {obstacle}" if obstacle else ""
        return SpeedupDecision(use=setting == "blocks" and not obstacle, reason=reason)
    return _automatic(run_facts, obstacle) or _pays(
        run_facts,
        cost_s=COMPILE_S * run_facts.kinds * run_facts.shapes,
        saved_s=COMPILED_SAVES * run_facts.time.seconds,
        what=f"compiling {run_facts.kinds} kinds of blocks for {run_facts.shapes} shapes",
    )


def _why_not_compiled(run_facts: RunFacts) -> str:
    """Return why blocks cannot be compiled, empty if they can; each reason was tried on every family."""
    config = run_facts.config
    adapter = config.adapter
    kind = "DoRA" if adapter.dora else adapter.kind
    if kind in ("DoRA", "loha", "lokr"):
        return f"peft's {kind} layers cannot be compiled in one piece"
    if config.adapter.init == "pissa":
        return "adapter.init=pissa computes its layers in hooks, which cannot be compiled"
    if adapter.dropout or adapter.rank_dropout or adapter.module_dropout:
        return "adapter dropout differs by layer, so each block would be compiled separately"
    if not run_facts.one_text_length:
        return "text lengths vary with this base, and each length would be compiled separately"
    if config.objective.prior == "base" or config.objective.preservation_weight:
        return "the base's own prediction is computed for a varying number of samples, each compiled separately"
    if config.base.assistant is not None:
        return "base.assistant computes its part in hooks, which cannot be compiled"
    if config.memory.gradient_checkpointing in KEEP_ATTENTION:
        return "this gradient checkpointing keeps results of single kernels, which compiled code merges"
    if config.memory.attention == "xformers":
        return "memory.attention=xformers cannot be compiled"
    return ""


def _why_not_unasked(run_facts: RunFacts) -> str:
    """Return why `auto` does not compile on this GPU, empty if it may; the user may still ask for it."""
    if run_facts.config.memory.streamed_blocks:
        return "blocks are streamed, so steps wait for copies, not for kernels"
    if not run_facts.has_triton:
        return "triton, which compiles for GPUs, is missing (pip install triton)"
    capability = run_facts.gpu.compute_capability if run_facts.gpu is not None else None
    if capability is None or capability < TRITON_CAPABILITY:
        return "triton needs a GPU of compute capability 7.0 or higher"
    return ""


# ---- CUDA graphs


def graphing(run_facts: RunFacts) -> SpeedupDecision:
    """Return whether `hardware.cuda_graphs` becomes true, and why."""
    setting = run_facts.config.hardware.cuda_graphs
    obstacle = "" if setting is False else _why_not_graphed(run_facts)
    if not obstacle and setting is not False and not run_facts.recorded.fits:
        peak = gib(run_facts.recorded.peak_bytes)
        obstacle = f"CUDA graphs keep memory for themselves: {peak} predicted, which does not fit"
    if setting != "auto":
        reason = f"instead of true: {obstacle}" if obstacle else ""
        return SpeedupDecision(use=setting is True and not obstacle, reason=reason)
    # Kernel launches overlap with the GPU's work, and a graph still needs a little time between kernels,
    # so a graph saves only the launch time beyond both.
    waiting_s = run_facts.launch_s - max(run_facts.work_s, run_facts.kernels * REPLAYED_KERNEL_S)
    return _automatic(run_facts, obstacle) or _pays(
        run_facts,
        cost_s=run_facts.shapes * (RECORDING_S + RECORDING_STEPS * run_facts.time.high_s),
        saved_s=LAUNCHES_SAVED * max(0.0, waiting_s),
        what=f"recording {run_facts.shapes} shapes",
    )


def _why_not_graphed(run_facts: RunFacts) -> str:
    config = run_facts.config
    obstacles = {
        "there is no GPU": run_facts.gpu is None,
        "CUDA graphs work on NVIDIA GPUs only": run_facts.gpu is not None
        and not run_facts.gpu.can.graphs,
        "train.deterministic promises equal bits": config.train.deterministic,
        "blocks are streamed from host memory": config.memory.streamed_blocks,
        "inputs of blocks wait in host memory": config.memory.gradient_checkpointing == "offloaded",
        "bitsandbytes' nf4 is not known to work in CUDA graphs": config.memory.base_precision
        == "nf4",
        "text encoders run in every step": config.adapter.text_encoder or config.adapter.new_tokens,
        "text lengths vary with this base": not run_facts.one_text_length,
        "the base's own prediction is computed for some samples only": config.objective.prior
        == "base"
        or config.objective.preservation_weight,
    }
    return next((reason for reason, holds in obstacles.items() if holds), "")


def with_recordings(memory: Prediction, *, shapes: int, beside_bytes: int) -> Prediction:
    """Return `memory` with CUDA graphs, whose recorded steps keep their memory between replays.

    So it comes on top of whatever else runs: with several shapes a step of a shape that is not recorded
    yet, with one shape a validation pass, which takes `beside_bytes`.
    """
    # The graphs' own pool has its own holes, so the slack counts a second time as well.
    recorded_names = (*ACTIVATIONS, SLACK)
    step = sum(item.bytes for item in memory.by_phase["training"] if item.name in recorded_names)
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
    note = "CUDA graphs: memory that recorded steps keep for themselves"
    return MemoryItem(name="recorded steps", bytes=size, note=note)


# ---- both


def _automatic(run_facts: RunFacts, obstacle: str) -> SpeedupDecision | None:
    """Return a verdict against a speed-up without computing whether it pays; None: compute it."""
    if run_facts.priority != "speed":
        return SpeedupDecision(use=False, reason="chosen with priority speed only")
    if run_facts.gpu is None:
        return SpeedupDecision(use=False, reason="chosen on a GPU only")
    if obstacle:
        return SpeedupDecision(use=False, reason=obstacle)
    if run_facts.shapes > MOST_SHAPES:
        many = f"{run_facts.shapes} shapes of passes, more than {MOST_SHAPES}"
        return SpeedupDecision(use=False, reason=many)
    return None


def _pays(run_facts: RunFacts, *, cost_s: float, saved_s: float, what: str) -> SpeedupDecision:
    saved = saved_s * run_facts.steps
    sums = (
        f"{what} takes {cost_s:.0f} s, {run_facts.steps} steps save {saved:.0f} s (both estimates)"
    )
    return SpeedupDecision(use=saved > PAYS_FROM * cost_s, reason=sums)


def _middle(ends: tuple[float, float]) -> float:
    return math.sqrt(ends[0] * ends[1])  # geometric: the ends differ by factors


def _count_kinds(shapes: Mapping[str, tuple[int, int]], blocks: Collection[str]) -> int:
    """Return how many different blocks there are; `shapes` maps linear layers to (fan_in, out)."""
    # Blocks with the same layers in the same sizes share compiled code.
    kinds = {
        frozenset(
            (name[len(block) :], shape)
            for name, shape in shapes.items()
            if name.startswith(f"{block}.")
        )
        for block in blocks
    }
    return max(1, len(kinds))
