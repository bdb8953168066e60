"""The planner's memory part: which loads may be tried, and why one was chosen.

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
from lora_trainer.config.choices import BasePrecision
from lora_trainer.config.config import value_of
from lora_trainer.config.constraints import typed
from lora_trainer.config.declare import CHECKPOINTING, Checkpointing, Precision, settled
from lora_trainer.costs.base_costs import ELEMENT_BYTES
from lora_trainer.planning.load import Load, runs_wide, surroundings
from lora_trainer.planning.memory import HostPrediction, Prediction
from lora_trainer.planning.search import (
    AUTOMATIC,
    FEWER_BITS,
    Evaluator,
    Search,
    SearchResult,
    SearchSpace,
    gib,
)
from lora_trainer.planning.step_time import StepTime


@dataclass(frozen=True, kw_only=True)
class MemoryChoice:
    """The memory part of a plan; `images_at_once` is the micro-batch by bucket, (width, height) in pixels.

    `decisions` has (value, reason) of every setting that was changed or filled in.
    """

    load: Load
    memory: Prediction
    host: HostPrediction | None
    time: StepTime
    images_at_once: Mapping[tuple[int, int], int]
    decisions: Mapping[str, tuple[Any, str]]


@dataclass(frozen=True, kw_only=True)
class MemoryChooser(Evaluator):
    """Chooses the memory settings of a run."""

    def choose(self) -> MemoryChoice:
        """Raise MachineError naming the nearest setting that fits when nothing does, or RequestError."""
        self._refuse_more_blocks()
        # Another micro-batch sums in another order and rounds otherwise, so a resumed run keeps its own. Buckets
        # that it never had, from images added since, need a new search.
        kept_at_once, ideal_load = self.inputs.kept_at_once, self._ideal_load
        if kept_at_once is not None and set(self._buckets) <= kept_at_once.keys():
            at_once = {size: kept_at_once[size] for size in self._buckets}
            return self._chosen(ideal_load, at_once)
        search = Search(
            inputs=self.inputs,
            config=self.config,
            gpu=self.gpu,
            ideal_load=ideal_load,
            choices=self._choices,
        )
        best_fit = search.fit()
        choice = self._chosen(best_fit.load, search.images_at_once(best_fit.load, self._buckets))
        return replace(choice, decisions=dict(self._decisions(choice, best_fit)))

    def _chosen(self, load: Load, at_once: Mapping[tuple[int, int], int]) -> MemoryChoice:
        loads = [
            replace(load, bucket_px=bucket, micro_batch=count) for bucket, count in at_once.items()
        ]
        memory = max(
            map(self.predict, loads),
            # Loading the base can be the peak of all: then the largest step decides.
            key=lambda each: (each.peak_bytes, each.phases["training"]),
        )
        return MemoryChoice(
            load=load,
            memory=memory,
            host=self.predict_host(load),
            time=self.time(load),
            images_at_once=at_once,
            decisions={},
        )

    # ---- the loads that may be tried

    @property
    def _buckets(self) -> Sequence[tuple[int, int]]:
        side_px = settled(self.config.data.resolution)
        return self.inputs.buckets or [(side_px, side_px)]

    @cached_property
    def _ideal_load(self) -> Load:
        config, choices, gpu = self.config, self._choices, self.gpu
        micro_batch, batch_size = config.memory.micro_batch, self.batch_size
        regularisation = self.inputs.regularisation_per_epoch / self.inputs.epoch
        twice = 1.0 - regularisation if config.objective.preservation_weight else 0.0
        learned_from_base = regularisation if config.objective.prior == "base" else 0.0
        return Load(
            device=gpu.can.torch_type if gpu else "cpu",
            precision=settled(config.train.precision),
            base_precision=choices.base_precisions[0],
            # As asked for: `alpha` takes no memory, so it may be `auto`, and equal loads stay equal.
            adapter=self.inputs.resolved.config.adapter,
            optimizer=config.optimizer.name,
            text_precision=settled(config.memory.text_encoder_precision),
            text_offload=False,  # `fit` offloads them only where they do not fit
            micro_batch=batch_size if micro_batch == "auto" else micro_batch,
            checkpointing=choices.checkpointing[0],
            streamed_blocks=choices.streamed[0],
            bucket_px=max(self._buckets, key=math.prod),
            samples=bool(config.sampling.every_steps),
            sample_side_px=settled(config.data.resolution),
            prepared_samples=math.ceil(config.data.prefetch_steps * batch_size * (1 + twice)),
            averaged=config.train.ema_decay is not None,
            masked=config.data.masks != "none",
            twice=twice,
            as_base=twice + learned_from_base,
            keeps_best=config.output.keep_best,
            beside=surroundings(
                gpu,
                expandable=self.inputs.hardware.expandable_segments,
                limit_gib=config.hardware.vram_limit_gib,
            ),
        )

    @cached_property
    def _choices(self) -> SearchSpace:
        memory, adapter, gpu = self.config.memory, self.config.adapter, self.gpu
        # Text encoders that are trained, or that read trained tokens, run in every step and stay on the device.
        may_offload = self.has_host and not (adapter.text_encoder or adapter.new_tokens)
        offload = (True,) if memory.text_encoder_offload is True else (False, True)
        precisions = self.costs.family.traits.precisions
        native = filter(gpu.computes, precisions) if gpu is not None else ()
        return SearchSpace(
            base_precisions=self._base_precisions,
            checkpointing=self._checkpointing,
            streamed=(
                0 if memory.streamed_blocks == "auto" else memory.streamed_blocks,
                self._streamable,
            ),
            text_offload=offload if may_offload else (False,),
            in_16_bits=next((precision for precision in native if precision != "fp32"), None),
        )

    @property
    def _base_precisions(self) -> tuple[BasePrecision, ...]:
        """The precisions of the frozen base to try, the most precise first."""
        setting = self.config.memory.base_precision
        train_precision: Precision = settled(self.config.train.precision)
        # A precision that the user chose stays the only one, because another would change the result.
        if setting != "auto":
            return (setting,)
        if self.gpu is None:
            return (train_precision,)
        has_package = self.inputs.hardware.packages.get("bitsandbytes") is not None
        has_nf4 = has_package and not self.gpu.can.against("memory.base_precision", "nf4")
        return (train_precision, *(kind for kind in AUTOMATIC if kind != "nf4" or has_nf4))

    @property
    def _streamable(self) -> int:
        """Most blocks that can be streamed: none with an assistant, whose LoRA weights stay where they are."""
        is_possible = self.has_host and self.config.base.assistant is None
        return len(self.costs.blocks) if is_possible else 0

    @cached_property
    def _known_kinds(self) -> tuple[Checkpointing, ...]:
        adapter = self.config.adapter
        return self.costs.known_checkpointing(
            element_bytes=ELEMENT_BYTES[settled(self.config.train.precision)],
            targets=adapter.targets,
            wide_adapter=runs_wide(adapter),
        )

    @property
    def _checkpointing(self) -> tuple[Checkpointing, ...]:
        """The levels to try: the user's or a heavier one, of those whose costs are known."""
        chosen_kind = self.config.memory.gradient_checkpointing
        first = 0 if chosen_kind == "auto" else CHECKPOINTING.index(chosen_kind)
        kinds = [
            kind
            for kind in CHECKPOINTING[first:]
            if (kind in self._known_kinds or kind == chosen_kind)
            # Without memory of its own the device would copy inputs within one and the same memory.
            and (self.has_host or kind != "offloaded")
        ]
        return tuple(kinds) if kinds or self.has_host else ("full",)

    def _refuse_more_blocks(self) -> None:
        streamed, most = self.config.memory.streamed_blocks, len(self.costs.blocks)
        if streamed != "auto" and streamed > most:
            source = self.costs.facts.source
            raise RequestError(
                f"memory.streamed_blocks={streamed}, but {source} has only {most} blocks",
                fix=f"use a number from 0 to {most}",
            )

    # ---- why

    def _decisions(
        self, choice: MemoryChoice, best_fit: SearchResult
    ) -> Iterator[tuple[str, tuple[Any, str]]]:
        load, limit = choice.load, self.limit
        peak_bytes, at_once = choice.memory.peak_bytes, max(choice.images_at_once.values())
        why_base = self._why_base(load, best_fit.seconds, step_s=choice.time.seconds)
        chosen = {
            "memory.base_precision": (load.base_precision, why_base),
            "memory.gradient_checkpointing": (load.checkpointing, self._why_recomputing(load)),
            "memory.streamed_blocks": (load.streamed_blocks, self._why_streaming(load)),
            "memory.micro_batch": (at_once, self._why_micro_batch(load, at_once)),
            "memory.text_encoder_offload": (load.text_offload, self._why_offload(load)),
        }
        for key, (value, why) in chosen.items():
            before = value_of(self.config, key)
            if before != value:
                reason = why or f"{gib(peak_bytes)} predicted, {limit}"
                if before != "auto":
                    reason = f"instead of {typed(before)}: {reason}"
                yield key, (value, reason)
        if size := best_fit.sampling_bytes:
            reason = f"sample images would take {gib(size)}, {limit}"
            yield "sampling.every_steps", (0, reason)

    def _peak(self, load: Load) -> str:
        return f"{gib(self.predict(load).peak_bytes)}, {self.limit}"

    def _why_base(
        self, load: Load, seconds: Mapping[BasePrecision, float], *, step_s: float
    ) -> str:
        """Return why a load's base precision won, empty if the user chose it; `seconds` are of those that fit."""
        tried = self._base_precisions
        others = [precision for precision in tried if precision != load.base_precision]
        if not others:
            return "same as train.precision" if load.base_precision == load.precision else ""
        described = (
            f"{name} {seconds[name]:.3g} s" if name in seconds else f"{name} does not fit"
            for name in others
        )
        compared = f"about {step_s:.3g} s a step; {', '.join(described)}"
        if seconds.keys().isdisjoint(others):
            return compared  # no choice was left, so no rule decided
        rule = "quality: the most precise that fits"
        if self.priority in FEWER_BITS:
            rule = f"{self.priority}: fewer bits only where clearly faster"
        return f"{compared}; {rule}"

    def _why_recomputing(self, load: Load) -> str:
        if load.checkpointing == "none":
            return ""
        lighter = CHECKPOINTING[: CHECKPOINTING.index(load.checkpointing)]
        # Compared with the next lighter level, which is the one that would be used if it fitted.
        kinds = ["none", *(kind for kind in lighter if kind in self._known_kinds)]
        other = replace(load, checkpointing=kinds[-1])
        if load.streamed_blocks and other.checkpointing == "none":
            return "streamed blocks must be recomputed in the backward pass"
        plain = replace(load, checkpointing="none", streamed_blocks=0)
        everything = replace(plain, checkpointing="full")
        plain_s, load_s, everything_s = (
            self.time(each).seconds for each in (plain, load, everything)
        )
        reason = f"{other.checkpointing} would take {self._peak(other)}; a step takes "
        reason += f"{load_s / plain_s - 1:.0%} longer than without checkpointing"
        more = f" (full checkpointing: {everything_s / plain_s - 1:.0%})"
        return reason if load == everything else reason + more

    @property
    def _shares_memory(self) -> str:
        where = "this GPU shares the machine's memory"
        return "this run is on the processor" if self.gpu is None else where

    def _why_streaming(self, load: Load) -> str:
        if not load.streamed_blocks:
            return "all blocks fit on the device" if self.has_host else self._shares_memory
        # The question is not what one block less would take, but why blocks are streamed at all.
        whole = self._peak(replace(load, streamed_blocks=0))
        return f"all {len(self.costs.blocks)} blocks on the GPU would take {whole}"

    def _why_micro_batch(self, load: Load, at_once: int) -> str:
        if at_once == self.batch_size:
            return ""
        count, (width_px, height_px) = load.micro_batch + 1, load.bucket_px
        more = self._peak(replace(load, micro_batch=count))
        return f"{count} of {width_px}x{height_px} px would take {more}"

    def _why_offload(self, load: Load) -> str:
        if not load.text_offload:
            return "text encoders fit on the device" if self.has_host else self._shares_memory
        whole = self.predict(replace(load, text_offload=False)).phases["texts"]
        return f"text encoders would take {gib(whole)}, {self.limit}"
