"""The planner's memory part: which loads may be tried, how they are judged, and why one was chosen.

Input is the settings so far, the base, the machine and the buckets; output a `MemoryChoice`: the load that
fits, its predictions, its time, and a decision with its reason for every setting it changed or filled in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from lora_trainer.common.errors import RequestError
from lora_trainer.config.config import (
    CHECKPOINTING,
    AdapterSettings,
    Checkpointing,
    Config,
    settled,
    value_of,
)
from lora_trainer.families.base import BaseFacts
from lora_trainer.hardware.machine import Gpu, Hardware
from lora_trainer.planning.host_memory import HostPrediction, predict_host
from lora_trainer.planning.loads import Load, RememberedCosts, runs_wide, surroundings
from lora_trainer.planning.memory import Prediction, predict
from lora_trainer.planning.oom_history import OomRecord
from lora_trainer.planning.precisions import (
    Matmul,
    against_products,
    base_precisions,
    choose_matmul,
    in_16_bits,
    price,
    why_base_precision,
)
from lora_trainer.planning.search import (
    Evaluator,
    Limit,
    SearchResult,
    SearchSpace,
    fit,
    gib,
    gpu_limit,
    images_at_once,
)
from lora_trainer.planning.step_time import StepTime, step_time, step_work
from lora_trainer.planning.weight_bytes import ELEMENT_BYTES

NEWER_SETTINGS: Mapping[str, Any] = {
    "memory.base_matmul": "dequantized",
}
"""Settings that older runs were planned without, and the values that change nothing for such a run."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A value the planner set; `bytes` is the predicted peak that decided it, 0 where memory did not."""

    key: str
    value: Any
    reason: str
    bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class MemoryChoice:
    """The memory part of a plan; `images_at_once` is the micro-batch by bucket, (width, height) in pixels."""

    load: Load
    memory: Prediction
    host: HostPrediction | None
    time: StepTime
    images_at_once: Mapping[tuple[int, int], int]
    decisions: tuple[Decision, ...]


@dataclass(frozen=True, kw_only=True)
class MemoryChooser:
    """Settings without `auto` (except memory's), the base, the data and the machine; `gpu` None: the processor."""

    config: Config
    adapter: AdapterSettings
    """As asked for: `alpha` takes no memory, so it may be `auto`, and equal loads stay equal."""
    facts: BaseFacts
    costs: RememberedCosts
    hardware: Hardware
    gpu: Gpu | None
    full_card: OomRecord | None
    processes: int
    sharing: int
    buckets: Sequence[tuple[int, int]]
    priority: str
    regularisation: float = 0.0
    """Share of the samples, 0 to 1, that come from regularisation images."""
    kept_at_once: Mapping[tuple[int, int], int] | None = None
    """Micro-batch by bucket of a resumed run, whose settings are in `config`: nothing is searched again."""

    def choose(self) -> MemoryChoice:
        """Raise MachineError naming the nearest setting that fits when nothing does, or RequestError."""
        self._refuse_more_blocks()
        # Another micro-batch sums in another order and rounds otherwise, so a resumed run keeps its own. Buckets
        # that it never had, from images added since, need a new search.
        if self.kept_at_once is not None and set(self._all_buckets) <= self.kept_at_once.keys():
            memory_choice = self._chosen(
                self._ideal_load, {size: self.kept_at_once[size] for size in self._all_buckets}
            )
            return replace(memory_choice, decisions=tuple(self._of_older_runs()))
        ideal_load, judge = self._ideal_load, self._judge
        step_px = self.facts.bucket_step_px
        best_fit = fit(
            ideal_load, choices=self._choices, judge=judge, limit=self.limit, step_px=step_px
        )
        # Decided before the buckets get more images, because int8 products need buffers of their own.
        matmul = choose_matmul(best_fit.load, gpu=self.gpu, priority=self.priority, judge=judge)
        if self.config.memory.base_matmul == "auto":
            best_fit = replace(best_fit, load=replace(best_fit.load, base_matmul=matmul.value))
        at_once = images_at_once(
            best_fit.load, self._all_buckets, most=ideal_load.micro_batch, judge=judge
        )
        memory_choice = self._chosen(best_fit.load, at_once)
        peak_bytes = memory_choice.memory.peak_bytes
        decisions = self._decisions(best_fit, matmul, max(at_once.values()), peak_bytes)
        return replace(memory_choice, decisions=tuple(decisions))

    def _chosen(self, load: Load, at_once: Mapping[tuple[int, int], int]) -> MemoryChoice:
        loads = [
            replace(load, bucket_px=bucket, micro_batch=count) for bucket, count in at_once.items()
        ]
        memory = max(
            map(self._judge.predict, loads),
            # Loading the base can be the peak of all: then the largest step decides.
            key=lambda each: (each.peak_bytes, each.phases["training"]),
        )
        return MemoryChoice(
            load=load,
            memory=memory,
            host=self._judge.predict_host(load),
            time=self._time(load),
            images_at_once=at_once,
            decisions=(),
        )

    # ---- the loads that may be tried

    @property
    def _images_per_process(self) -> int:
        """Most images of a step that one process trains on."""
        return math.ceil(self.config.train.batch_size / self.processes)

    @property
    def _all_buckets(self) -> Sequence[tuple[int, int]]:
        side_px = settled(self.config.data.resolution)
        return self.buckets or [(side_px, side_px)]

    @cached_property
    def _ideal_load(self) -> Load:
        config = self.config
        micro_batch, batch_size = config.memory.micro_batch, self._images_per_process
        return Load(
            device=self.gpu.can.torch_type if self.gpu else "cpu",
            precision=settled(config.train.precision),
            base_precision=self._choices.base_precisions[0],
            adapter=self.adapter,
            optimizer=config.optimizer.name,
            text_precision=settled(config.memory.text_encoder_precision),
            text_offload=False,  # `fit` offloads them only where they do not fit
            micro_batch=batch_size if micro_batch == "auto" else micro_batch,
            checkpointing=self._choices.checkpointing[0],
            streamed_blocks=self._choices.streamed[0],
            bucket_px=max(self._all_buckets, key=lambda size: size[0] * size[1]),
            samples=bool(config.sampling.every_steps),
            sample_side_px=settled(config.data.resolution),
            prepared_samples=math.ceil(config.data.prefetch_steps * batch_size * (1 + self._twice)),
            averaged=config.train.ema_decay is not None,
            masked=config.data.masks != "none",
            twice=self._twice,
            as_base=self._twice + self._learned_from_base,
            keeps_best=config.output.keep_best,
            base_matmul="int8" if config.memory.base_matmul == "int8" else "dequantized",
            beside=surroundings(
                self.gpu,
                expandable=self.hardware.expandable_segments,
                limit_gib=config.hardware.vram_limit_gib,
            ),
        )

    @property
    def _twice(self) -> float:
        return 1.0 - self.regularisation if self.config.objective.preservation_weight else 0.0

    @property
    def _learned_from_base(self) -> float:
        return self.regularisation if self.config.objective.prior == "base" else 0.0

    @cached_property
    def _choices(self) -> SearchSpace:
        kind = self.config.memory.gradient_checkpointing
        streamed = self.config.memory.streamed_blocks
        first = 0 if kind == "auto" else CHECKPOINTING.index(kind)
        offload = (True,) if self.config.memory.text_encoder_offload is True else (False, True)
        trains_text = self.config.adapter.text_encoder or self.config.adapter.new_tokens
        # Text encoders that are trained, or that read trained tokens, run in every step and stay on the device.
        may_offload = self._has_host and not trains_text
        kinds = self._kinds(CHECKPOINTING[first:])
        return SearchSpace(
            base_precisions=base_precisions(
                self.config, self.gpu, has_bitsandbytes=self._has_bitsandbytes
            ),
            checkpointing=kinds,
            streamed=(0 if streamed == "auto" else streamed, self._streamable),
            text_offload=offload if may_offload else (False,),
            int8_products=self.config.memory.base_matmul == "auto"
            and not against_products(gpu=self.gpu, priority=self.priority),
            in_16_bits=in_16_bits(self.costs.family.traits.precisions, self.gpu),
        )

    def _of_older_runs(self) -> Iterator[Decision]:
        """Yield values for the settings that did not exist yet when a resumed run was planned."""
        for key, value in NEWER_SETTINGS.items():
            if value_of(self.config, key) == "auto":
                yield Decision(key=key, value=value, reason="the run began without it")

    @cached_property
    def _known_kinds(self) -> tuple[Checkpointing, ...]:
        return self.costs.known_checkpointing(
            self.facts,
            element_bytes=ELEMENT_BYTES[settled(self.config.train.precision)],
            targets=self.config.adapter.targets,
            wide_adapter=runs_wide(self.config.adapter),
        )

    def _kinds(self, allowed: tuple[Checkpointing, ...]) -> tuple[Checkpointing, ...]:
        """Return the allowed levels to try; without a known cost only the user's, on the processor none offloaded."""
        known_kinds = self._known_kinds
        chosen_kind = allowed[0] if self.config.memory.gradient_checkpointing != "auto" else None
        kinds = (kind for kind in allowed if kind in known_kinds or kind == chosen_kind)
        if self._has_host:
            return tuple(kinds)
        # Without memory of its own the device would copy inputs within one and the same memory.
        return tuple(kind for kind in kinds if kind != "offloaded") or ("full",)

    @property
    def _has_bitsandbytes(self) -> bool:
        can = not self.gpu or not self.gpu.can.against("memory.base_precision", "nf4")
        return can and self.hardware.packages.get("bitsandbytes") is not None

    @property
    def _has_host(self) -> bool:
        """Whether the device has memory of its own, so that weights can wait in the machine's memory."""
        return self.gpu is not None and self.gpu.can.own_memory

    @property
    def _here(self) -> str:
        return (
            "this run is on the processor"
            if self.gpu is None
            else "this GPU shares the machine's memory"
        )

    @property
    def _streamable(self) -> int:
        """Most blocks that can be streamed: none with an assistant, whose LoRA weights stay where they are."""
        return self._blocks if self._has_host and self.config.base.assistant is None else 0

    @cached_property
    def _blocks(self) -> int:
        shapes = self.costs.linear_shapes(self.facts)
        return len({name for name in map(self.costs.block_of, shapes) if name})

    def _refuse_more_blocks(self) -> None:
        streamed = self.config.memory.streamed_blocks
        if streamed != "auto" and streamed > self._blocks:
            raise RequestError(
                f"memory.streamed_blocks={streamed}, but {self.facts.source} has only {self._blocks} blocks",
                fix=f"use a number from 0 to {self._blocks}",
            )

    # ---- how a load is judged

    @cached_property
    def limit(self) -> Limit:
        """Memory of the device that the run may use, and the reason for that limit."""
        if self.gpu is None:
            usable_bytes = self.hardware.ram_usable_bytes // self.sharing
            return Limit(bytes=usable_bytes, reason="of memory free, less a margin")
        limit_gib = self.config.hardware.vram_limit_gib
        return gpu_limit(self.gpu, limit_gib=limit_gib, full_card=self.full_card)

    @cached_property
    def _judge(self) -> Evaluator:
        return Evaluator(
            predict=self._predict,
            predict_host=self._predict_host,
            seconds=lambda load: self._time(load).seconds,
            price=lambda precision, seconds: price(self.priority, precision, seconds),
        )

    def _predict(self, load: Load) -> Prediction:
        limit_bytes = self.limit.bytes
        return predict(load, facts=self.facts, costs=self.costs, limit_bytes=limit_bytes)

    def _predict_host(self, load: Load) -> HostPrediction | None:
        if not self._has_host:
            return (
                None  # the device's memory is the machine's, so `predict` counts everything already
            )
        return predict_host(
            load,
            facts=self.facts,
            costs=self.costs,
            limit_bytes=self.hardware.ram_usable_bytes // self.sharing,
            pinnable_bytes=self._pinnable_bytes,
        )

    @property
    def _pinnable_bytes(self) -> int | None:
        """Host memory that each process of this training may pin, in bytes; None: no limit."""
        return self.hardware.pinnable_by_each(sharing=self.sharing)

    def _time(self, load: Load) -> StepTime:
        work = step_work(
            load,
            facts=self.facts,
            costs=self.costs,
            batch_size=self._images_per_process,
            pinnable_bytes=self._pinnable_bytes,
        )
        threads = settled(self.config.hardware.threads)
        return step_time(work, gpu=self.gpu, threads=threads, precision=load.precision)

    # ---- why

    def _decisions(
        self, best_fit: SearchResult, matmul: Matmul, at_once: int, peak_bytes: int
    ) -> Iterator[Decision]:
        load, limit = best_fit.load, self.limit
        default_reason = f"{gib(peak_bytes)} predicted, {limit}"
        why_precision = why_base_precision(
            load,
            best_fit.seconds,
            self._choices.base_precisions,
            config=self.config,
            priority=self.priority,
            step_s=self._time(load).seconds,
        )
        chosen = {
            "memory.base_precision": (load.base_precision, why_precision),
            "memory.base_matmul": (load.base_matmul, matmul.reason),
            "memory.gradient_checkpointing": (load.checkpointing, self._why_recomputing(load)),
            "memory.streamed_blocks": (load.streamed_blocks, self._why_streaming(load)),
            "memory.micro_batch": (at_once, self._why_micro_batch(load, at_once)),
            "memory.text_encoder_offload": (load.text_offload, self._why_offload(load)),
        }
        for key, (value, why) in chosen.items():
            before = value_of(self.config, key)
            if before != value:
                prefix = "" if before == "auto" else f"instead of {_in_words(before)}: "
                reason = f"{prefix}{why or default_reason}"
                yield Decision(key=key, value=value, reason=reason, bytes=peak_bytes)
        if best_fit.sampling_bytes:
            reason = f"sample images would take {gib(best_fit.sampling_bytes)}, {limit}"
            yield Decision(
                key="sampling.every_steps", value=0, reason=reason, bytes=best_fit.sampling_bytes
            )

    def _peak(self, load: Load) -> str:
        return gib(self._judge.predict(load).peak_bytes)

    def _why_recomputing(self, load: Load) -> str:
        if load.checkpointing == "none":
            return ""
        lighter = CHECKPOINTING[: CHECKPOINTING.index(load.checkpointing)]
        # Compared with the next lighter level, which is the one that would be used if it fitted.
        kinds = ["none", *(kind for kind in lighter if kind in self._known_kinds)]
        other = replace(load, checkpointing=kinds[-1])
        if load.streamed_blocks and other.checkpointing == "none":
            return "streamed blocks must be recomputed in the backward pass"
        would = f"{other.checkpointing} would take {self._peak(other)}, {self.limit}"
        return f"{would}; a step takes {self._longer(load)}"

    def _longer(self, load: Load) -> str:
        """Say how much longer checkpointing makes a step, compared with none and with `full`."""
        plain = replace(load, checkpointing="none", streamed_blocks=0)
        everything = replace(plain, checkpointing="full")
        seconds = self._time(plain).seconds
        share, most = (self._time(each).seconds / seconds - 1 for each in (load, everything))
        longer = f"{share:.0%} longer than without checkpointing"
        return longer if load == everything else f"{longer} (full checkpointing: {most:.0%})"

    def _why_streaming(self, load: Load) -> str:
        if not load.streamed_blocks:
            return "all blocks fit on the device" if self._has_host else self._here
        # The question is not what one block less would take, but why blocks are streamed at all.
        whole = self._peak(replace(load, streamed_blocks=0))
        return f"all {self._blocks} blocks on the GPU would take {whole}, {self.limit}"

    def _why_micro_batch(self, load: Load, at_once: int) -> str:
        if at_once == self._images_per_process:
            return ""
        more = self._peak(replace(load, micro_batch=load.micro_batch + 1))
        width_px, height_px = load.bucket_px
        return (
            f"{load.micro_batch + 1} of {width_px}x{height_px} px would take {more}, {self.limit}"
        )

    def _why_offload(self, load: Load) -> str:
        if not load.text_offload:
            return "text encoders fit on the device" if self._has_host else self._here
        whole = self._judge.predict(replace(load, text_offload=False)).phases["texts"]
        return f"text encoders would take {gib(whole)}, {self.limit}"


def _in_words(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
