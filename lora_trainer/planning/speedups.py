"""Whether compiled blocks and CUDA graphs can be used, and whether they pay within the run. No torch.

Input is the time of a step and the length of the run; output decisions with their reasons. The model errs
towards leaving them out: it assumes the lowest savings that others have measured and the highest cost, and
wants the savings to be twice the cost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from lora_trainer.config.constraints import typed
from lora_trainer.config.declare import KEEP_ATTENTION, settled
from lora_trainer.config.running import Config
from lora_trainer.costs.cost_table import texts_vary
from lora_trainer.hardware.nvml import Gpu
from lora_trainer.planning.loads import RememberedCosts
from lora_trainer.planning.memory import ACTIVATIONS, SLACK, MemoryItem, Prediction, sum_bytes
from lora_trainer.planning.memory_choice import MemoryChoice
from lora_trainer.planning.plan_input import Decision, PlanInput
from lora_trainer.planning.search import gib
from lora_trainer.planning.step_time import ARITHMETIC, LAUNCHES, middle

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
class SpeedupChooser:
    """Decides the speed-ups of a run whose memory is decided; `config` has `auto` in these two settings only."""

    inputs: PlanInput
    config: Config
    gpu: Gpu | None
    memory_choice: MemoryChoice

    def choose(self) -> Iterator[Decision]:
        """Yield the speed-ups that differ from the settings."""
        hardware = self.config.hardware
        compiles, why_compiled = self._verdict(hardware.compile, self._compiling)
        graphs, why_graphed = self._verdict(hardware.cuda_graphs, self._graphing)
        for key, before, value, reason in (
            ("compile", hardware.compile, "blocks" if compiles else "none", why_compiled),
            ("cuda_graphs", hardware.cuda_graphs, graphs, why_graphed),
        ):
            if before != value:
                yield Decision(key=f"hardware.{key}", value=value, reason=reason)

    def _verdict(
        self, setting: str | bool, speedup: Callable[[], tuple[str, str, float, float]]
    ) -> tuple[bool, str]:
        """Return whether a speed-up is used, and why.

        `speedup` returns the reason against it, its name, the seconds it costs, and those it saves a step.
        """
        if setting in ("none", False):
            return False, ""
        if setting == "auto" and self.inputs.resolved.priority != "speed":
            return False, "chosen with priority speed only"
        if setting == "auto" and self.gpu is None:
            return False, "chosen on a GPU only"
        obstacle, name, cost_s, saved_s = speedup()
        if setting != "auto":
            return not obstacle, f"instead of {typed(setting)}: {obstacle}"
        if obstacle:
            return False, obstacle
        count, steps = len(self._shapes), settled(self.config.train.steps)
        if count > MOST_SHAPES:
            return False, f"{count} shapes of passes, more than {MOST_SHAPES}"
        sums = (
            f"{name} takes {cost_s:.0f} s, {steps} steps save {saved_s * steps:.0f} s "
            "(both estimates)"
        )
        return saved_s * steps > PAYS_FROM * cost_s, sums

    @cached_property
    def _shapes(self) -> list[PixelShape]:
        return pass_shapes(
            self.memory_choice.images_at_once,
            batch_size=self.config.train.batch_size,
            processes=self.inputs.processes,
        )

    @property
    def _predicts_twice(self) -> bool:
        """Whether the base's own prediction is computed, for a number of samples that varies."""
        objective = self.config.objective
        return objective.prior == "base" or bool(objective.preservation_weight)

    @property
    def _texts_vary(self) -> bool:
        return texts_vary(self.inputs.family, self.inputs.facts)

    def _compiling(self) -> tuple[str, str, float, float]:
        config, gpu, adapter = self.config, self.gpu, self.config.adapter
        kind = "DoRA" if adapter.dora else adapter.kind
        # Each was tried on every family.
        obstacles: dict[str, object] = {
            f"peft's {kind} layers cannot be compiled in one piece": kind
            in ("DoRA", "loha", "lokr"),
            "adapter.init=pissa computes its layers in hooks, which cannot be compiled": adapter.init
            == "pissa",
            "adapter dropout differs by layer, so each block would be compiled separately": (
                adapter.dropout or adapter.rank_dropout or adapter.module_dropout
            ),
            "text lengths vary with this base, and each length would be compiled separately": (
                self._texts_vary
            ),
            "the base's own prediction is computed for a varying number of samples, each compiled "
            "separately": self._predicts_twice,
            "base.assistant computes its part in hooks, which cannot be compiled": (
                config.base.assistant is not None
            ),
            "this gradient checkpointing keeps results of single kernels, which compiled code "
            "merges": config.memory.gradient_checkpointing in KEEP_ATTENTION,
            "memory.attention=xformers cannot be compiled": config.memory.attention == "xformers",
        }
        if config.hardware.compile == "auto":  # the user may still ask for it
            capability = gpu.compute_capability if gpu is not None else None
            obstacles |= {
                "blocks are streamed, so steps wait for copies, not for kernels": (
                    config.memory.streamed_blocks
                ),
                "triton, which compiles for GPUs, is missing (pip install triton)": (
                    self.inputs.hardware.packages.get("triton") is None
                ),
                "triton needs a GPU of compute capability 7.0 or higher": (
                    capability is None or capability < TRITON_CAPABILITY
                ),
            }
        kinds, shapes = _count_kinds(self.inputs.costs), len(self._shapes)
        return (
            _first(obstacles),
            f"compiling {kinds} kinds of blocks for {shapes} shapes",
            COMPILE_S * kinds * shapes,
            COMPILED_SAVES * self.memory_choice.time.seconds,
        )

    def _graphing(self) -> tuple[str, str, float, float]:
        config, time = self.config, self.memory_choice.time
        memory, recorded = config.memory, self.recorded
        obstacles = {
            "there is no GPU": self.gpu is None,
            "CUDA graphs work on NVIDIA GPUs only": self.gpu is not None
            and not self.gpu.can.graphs,
            "train.deterministic promises equal bits": config.train.deterministic,
            "blocks are streamed from host memory": memory.streamed_blocks,
            "inputs of blocks wait in host memory": memory.gradient_checkpointing == "offloaded",
            "bitsandbytes' nf4 is not known to work in CUDA graphs": memory.base_precision == "nf4",
            "text encoders run in every step": config.adapter.text_encoder
            or config.adapter.new_tokens,
            "text lengths vary with this base": self._texts_vary,
            "the base's own prediction is computed for some samples only": self._predicts_twice,
            f"CUDA graphs keep memory for themselves: {gib(recorded.peak_bytes)} predicted, which "
            "does not fit": not recorded.fits,
        }
        # Kernel launches overlap with the GPU's work, and a graph still needs a little time between kernels,
        # so a graph saves only the launch time beyond both.
        launching_s, work_s = (
            middle(time.parts.get(part, (0.0, 0.0))) for part in (LAUNCHES, ARITHMETIC)
        )
        waiting_s = launching_s - max(work_s, time.kernels * REPLAYED_KERNEL_S)
        return (
            _first(obstacles),
            f"recording {len(self._shapes)} shapes",
            len(self._shapes) * (RECORDING_S + RECORDING_STEPS * time.high_s),
            LAUNCHES_SAVED * max(0.0, waiting_s),
        )

    @cached_property
    def recorded(self) -> Prediction:
        """The memory of the run with CUDA graphs, whose recorded steps keep their memory between replays.

        So it comes on top of whatever else runs: with several shapes a step of a shape that is not recorded
        yet, with one shape a validation pass.
        """
        memory, load = self.memory_choice.memory, self.memory_choice.load
        # The graphs' own pool has its own holes, so the slack counts a second time as well.
        step = sum_bytes(
            item for item in memory.by_phase["training"] if item.name in (*ACTIVATIONS, SLACK)
        )
        forward_bytes = self.inputs.costs.sample_cost(load.workload()).forward_bytes
        beside = step if len(self._shapes) > 1 else min(step, load.micro_batch * forward_bytes)
        note = "CUDA graphs: memory that recorded steps keep for themselves"
        by_phase = dict(memory.by_phase)
        for phase, size in (("training", beside), ("sampling", step)):
            if phase in by_phase:
                by_phase[phase] = (*by_phase[phase], MemoryItem("recorded steps", size, note))
        return Prediction(by_phase=by_phase, limit_bytes=memory.limit_bytes)


def _first(obstacles: Mapping[str, object]) -> str:
    """Return the first reason that holds, empty if none does."""
    return next((reason for reason, holds in obstacles.items() if holds), "")


def _count_kinds(costs: RememberedCosts) -> int:
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
    # The shapes that are recorded first are those that most steps have: full ones, and large ones.
    return sorted(missing, key=lambda shape: (missing[shape], -shape[0] * shape[1], shape))
