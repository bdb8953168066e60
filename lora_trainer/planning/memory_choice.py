"""The planner's memory part: the search for a load that fits, and why it was chosen. No torch.

Input is the settings so far, the base, the machine and the buckets; output a `MemoryChoice`: the load with the
lowest price, which takes at most the memory that the settings ask for, and a decision with its reason for every
setting that was changed. When no load fits, the error names the nearest setting that would.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any

from lora_trainer.common.errors import MachineError, RequestError
from lora_trainer.common.wording import GIB, gib
from lora_trainer.config.config import value_of
from lora_trainer.config.constraints import typed
from lora_trainer.config.declare import (
    CHECKPOINTING,
    QUANTIZATIONS,
    BasePrecision,
    Checkpointing,
    Precision,
    settled,
)
from lora_trainer.config.inputs import NO_ASSISTANT
from lora_trainer.config.running import Config
from lora_trainer.costs.base_costs import ELEMENT_BYTES
from lora_trainer.families.files.assistants import assistant_bytes
from lora_trainer.hardware.machine import DISPLAY_MARGIN_BYTES, spill_margin_bytes
from lora_trainer.hardware.nvml import Gpu
from lora_trainer.planning.memory import (
    CUBLAS_BYTES,
    HOPPER,
    HOPPER_CUBLAS_BYTES,
    Load,
    Prediction,
    runs_wide,
)
from lora_trainer.planning.plan_input import PlanInput, area_of
from lora_trainer.planning.run_time import Evaluator

# Quantisations that `memory.base_precision=auto` may choose; fp8 takes as much as int8 and rounds more.
AUTOMATIC: tuple[BasePrecision, ...] = ("int8", "nf4")
# Sample images are dropped if a step with room for them is longer by more than this factor, or needs fewer bits.
SAMPLES_WORTH = 1.2
# The seconds of a step are multiplied by this before they are compared: balanced takes nf4 where its steps are more
# than 1.5 times as fast as those of an unquantised base and more than 1.5 / 1.2 = 1.25 times as fast as those of
# int8. Priority quality has no row: it keeps the most precise that fits, however slow. The values rise with fewer
# bits, so a choice of fewer bits never comes with longer steps.
FEWER_BITS: Mapping[str, Mapping[BasePrecision, float]] = {
    "speed": {"int8": 1.1, "fp8": 1.1, "nf4": 1.2},
    "balanced": {"int8": 1.2, "fp8": 1.25, "nf4": 1.5},
}
_Choice = tuple[BasePrecision, Checkpointing]


@dataclass(frozen=True, kw_only=True)
class MemoryChoice:
    """The memory part of a plan: predictions are for `load`.

    `memory` is of the training device, `host` of the machine beside a GPU. `images_at_once` is the micro-batch of
    each bucket, (width, height) in pixels; `memory.micro_batch` is the largest of them.
    """

    load: Load
    memory: Prediction
    host: Prediction | None
    images_at_once: Mapping[tuple[int, int], int]


@dataclass(frozen=True, kw_only=True)
class MemoryChooser:
    """Chooses the memory settings of a run, beginning with the load that the settings ask for."""

    inputs: PlanInput
    config: Config
    gpu: Gpu | None

    @cached_property
    def evaluator(self) -> Evaluator:
        """The judge of every load that is tried."""
        return Evaluator(inputs=self.inputs, config=self.config, gpu=self.gpu)

    def choose(self) -> tuple[MemoryChoice, Iterable[tuple[str, Any, str]]]:
        """Return the choice, and (setting, value, reason) for all that were changed or filled in.

        Raises MachineError naming the nearest setting that fits when nothing does, or RequestError.
        """
        config, most_blocks = self.config, len(self.evaluator.costs.blocks)
        streamed = config.memory.streamed_blocks
        if streamed != "auto" and streamed > most_blocks:
            source = self.evaluator.costs.facts.source
            raise RequestError(
                f"memory.streamed_blocks={streamed}, but {source} has only {most_blocks} blocks",
                fix=f"use a number from 0 to {most_blocks}",
            )
        ideal_load, kept_at_once = self._ideal_load, self.inputs.kept_at_once
        # Text encoders that are trained, or that read trained tokens, run in every step and stay on the device.
        # Others are offloaded while caching where asked for, or if they alone exceed the GPU.
        if self.evaluator.has_host and not (
            config.adapter.text_encoder or config.adapter.new_tokens
        ):
            is_offloaded = (
                config.memory.text_encoder_offload is True
                or self.evaluator.predict(ideal_load).phases["texts"] > self.evaluator.limit.bytes
            )
            ideal_load = replace(ideal_load, text_offload=is_offloaded)
        # Another micro-batch sums in another order and rounds otherwise, so a resumed run keeps its own. Buckets
        # that it never had, from images added since, need a new search.
        if kept_at_once is not None and set(self._buckets) <= kept_at_once.keys():
            at_once = {size: kept_at_once[size] for size in self._buckets}
            return self._chosen(ideal_load, at_once), ()
        choices = list(product(self._base_precisions, self._checkpointing))
        # Sample images are a wish: first the best load without them, then whether they fit beside it.
        silent = replace(ideal_load, samples=False)
        compared = self._by_precision(silent, choices)
        if not compared:
            raise self._nothing_fits(silent)
        load = next(iter(compared.values()))
        if ideal_load.samples:
            drawing = self._by_precision(ideal_load, choices)
            # Room for sample images may not cost fewer bits, so the chosen base precision stays.
            most_s = SAMPLES_WORTH * self.evaluator.time(load).seconds
            with_samples = drawing.get(load.base_precision)
            if with_samples is not None and self.evaluator.time(with_samples).seconds <= most_s:
                # A precision that fits only without sample images was compared too.
                load, compared = with_samples, compared | drawing
        # The chosen load is of the largest bucket; smaller buckets may have more images at once.
        least, most = load.micro_batch, ideal_load.micro_batch
        at_once = {
            size: self._most_images(self._with_bucket(load, size), least=least, most=most)
            for size in dict.fromkeys(self._buckets)
        }
        choice = self._chosen(load, at_once)
        seconds = {
            precision: self.evaluator.time(each).seconds for precision, each in compared.items()
        }
        return choice, self._decisions(choice, seconds, wants_samples=ideal_load.samples)

    def _chosen(self, load: Load, at_once: Mapping[tuple[int, int], int]) -> MemoryChoice:
        loads = [
            replace(self._with_bucket(load, bucket), micro_batch=count)
            for bucket, count in at_once.items()
        ]
        memory = max(
            map(self.evaluator.predict, loads),
            # Loading the base can be the peak of all: then the largest step decides.
            key=lambda each: (each.peak_bytes, each.phases["training"]),
        )
        return MemoryChoice(
            load=load, memory=memory, host=self.evaluator.predict_host(load), images_at_once=at_once
        )

    # ---- the loads that may be tried

    @property
    def _buckets(self) -> Sequence[tuple[int, int]]:
        side_px = settled(self.config.data.resolution)
        return self.inputs.buckets or [(side_px, side_px)]

    def _references(self, bucket_px: tuple[int, int]) -> tuple[tuple[int, int], ...]:
        return self.inputs.references.get(bucket_px, ())

    def _with_bucket(self, load: Load, bucket_px: tuple[int, int]) -> Load:
        return replace(load, bucket_px=bucket_px, references_px=self._references(bucket_px))

    @cached_property
    def _ideal_load(self) -> Load:
        config, gpu = self.config, self.gpu
        memory, batch_size = config.memory, self.evaluator.batch_size
        regularisation = self.inputs.regularisation_per_epoch / self.inputs.epoch
        twice = 1.0 - regularisation if config.objective.preservation_weight else 0.0
        as_base = twice + (regularisation if config.objective.prior == "base" else 0.0)
        contrasted = 1.0 + twice if config.objective.contrast_scale != 1 else 0.0
        if self.inputs.directions:
            twice, as_base, contrasted = self._slider_passes
        elif self.inputs.pairs:
            # The other image of each pair, and what goes with it for class preservation.
            others = 1.0 - regularisation + twice
            as_base, twice = as_base + twice, twice + others
            contrasted += others if contrasted else 0.0
        # Of equal buckets that with the largest references: their tokens cost what the image's own do.
        largest = max(self._buckets, key=lambda size: area_of((size, *self._references(size))))
        load = Load(
            device=gpu.can.torch_type if gpu else "cpu",
            precision=settled(config.train.precision),
            base_precision=self._base_precisions[0],
            # As asked for: `alpha` takes no memory, so it may be `auto`, and equal loads stay equal.
            adapter=self.inputs.resolved.config.adapter,
            optimizer=config.optimizer.name,
            optimizer_options=config.optimizer.options,
            text_precision=settled(memory.text_encoder_precision),
            text_offload=False,  # `choose` offloads them only where they do not fit
            micro_batch=batch_size if memory.micro_batch == "auto" else memory.micro_batch,
            checkpointing=self._checkpointing[0],
            streamed_blocks=0 if memory.streamed_blocks == "auto" else memory.streamed_blocks,
            bucket_px=largest,
            references_px=self._references(largest),
            samples=bool(config.sampling.every_steps),
            sample_side_px=settled(config.data.resolution),
            prepared_samples=math.ceil(config.data.prefetch_steps * batch_size * (1 + twice)),
            averaged=config.train.ema_decay is not None,
            masked=config.data.masks != "none",
            twice=twice,
            as_base=as_base,
            contrasted=contrasted,
            further_texts=2 if self.inputs.directions else 0,
            keeps_best=config.output.keep_best,
            assistant_bytes=0
            if config.base.assistant == NO_ASSISTANT
            else assistant_bytes(config.base.assistant, self.inputs.facts),
        )
        if gpu is None:
            return load
        # A limit below the free memory leaves room for the desktop already: it is not subtracted twice.
        limit_gib = config.hardware.vram_limit_gib
        unasked_bytes = 0 if limit_gib is None else gpu.free_bytes - int(limit_gib * GIB)
        # Other programs may take more during the run.
        margin_bytes = DISPLAY_MARGIN_BYTES * gpu.display
        if gpu.spills:
            margin_bytes = spill_margin_bytes(gpu.total_bytes)
        is_recent = (gpu.compute_capability or (0, 0)) >= HOPPER
        return replace(
            load,
            expandable=self.inputs.hardware.expandable_segments,
            desktop_bytes=max(0, margin_bytes - max(0, unasked_bytes)),
            cublas_bytes=HOPPER_CUBLAS_BYTES if is_recent else CUBLAS_BYTES,
        )

    @property
    def _slider_passes(self) -> tuple[float, float, float]:
        """Return `Load.twice`, `as_base` and `contrasted` of a slider.

        A draw is trained at two strengths, and so is a prompt to keep. Each is denoised first, with guidance in two
        passes a step; its target is the base's prediction, moved by those for two more prompts.
        """
        slider, keeping = self.config.slider, self.inputs.keeping
        is_guided = self.inputs.facts.guidance.two_passes and slider.denoising_guidance > 1
        passes = slider.denoising_steps * (2 if is_guided else 1)
        samples = 2 + 2 * keeping
        return samples - 1, samples * (passes + 1), 2 * 2

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
        """Most blocks that can be streamed."""
        return len(self.evaluator.costs.blocks) if self.evaluator.has_host else 0

    @cached_property
    def _known_kinds(self) -> tuple[Checkpointing, ...]:
        adapter = self.config.adapter
        return self.evaluator.costs.known_checkpointing(
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
            and (self.evaluator.has_host or kind != "offloaded")
        ]
        return tuple(kinds) if kinds or self.evaluator.has_host else ("full",)

    # ---- the search

    def _most_images(self, load: Load, *, least: int, most: int) -> int:
        """Return the most images at once that fit, by bisection; `least` is returned untested."""

        def is_too_many(count: int) -> bool:
            return not self.evaluator.fits(replace(load, micro_batch=count))

        return least + bisect_left(range(least + 1, most + 1), True, key=is_too_many)

    def _by_precision(
        self, ideal_load: Load, choices: Sequence[_Choice]
    ) -> dict[BasePrecision, Load]:
        """Return the best load of each base precision that fits, the best of all first."""
        best: dict[BasePrecision, Load] = {}
        for load in sorted(self._fitting(ideal_load, choices), key=self._order):
            best.setdefault(load.base_precision, load)
        return best

    def _order(self, load: Load) -> tuple[Any, ...]:
        """Return the price of a load, then the number of its moving parts: the lowest wins."""
        seconds, precision = self.evaluator.time(load).seconds, load.base_precision
        bits = FEWER_BITS.get(self.inputs.resolved.priority)
        return (
            # Quality: a pair, so that seconds decide only between equal precisions.
            (self._base_precisions.index(precision), seconds)
            if bits is None
            else (seconds * bits.get(precision, 1.0),),
            # Equal prices: fewer moving parts first, so that estimates do not decide between equal runs.
            load.streamed_blocks,
            CHECKPOINTING.index(load.checkpointing),
        )

    def _fitting(self, ideal_load: Load, choices: Sequence[_Choice]) -> Iterator[Load]:
        """Yield loads that fit, for each combination of base precision and checkpointing level.

        Each combination yields its largest micro-batch. Streaming is tried only for micro-batches that do not
        fit without it: with the fewest blocks for the whole batch, half of it, and so on.
        """
        most = self._streamable
        best_of_all = set[BasePrecision]()
        for precision, kind in choices:
            if ideal_load.streamed_blocks and kind == "none":
                continue  # streamed blocks are gone after the forward pass and must be recomputed
            if precision in best_of_all:
                continue
            load = replace(ideal_load, base_precision=precision, checkpointing=kind)
            plain = self._most_images(load, least=0, most=ideal_load.micro_batch)
            if plain:
                yield replace(load, micro_batch=plain)
            # Nothing is faster than to recompute nothing; and the costs of other levels may need a trace.
            if plain == ideal_load.micro_batch and kind == "none":
                best_of_all.add(precision)
            # The device wants many streamed blocks, the host few. So the search looks for the fewest the
            # device can do with, and the host only has to agree to that number.
            count, least = load.micro_batch, load.streamed_blocks
            while kind != "none" and most > least and count > plain:
                full = replace(load, micro_batch=count, streamed_blocks=most)
                if self.evaluator.predict(full).fits:
                    on_device = partial(self._fits_streaming, full)
                    fewest = bisect_left(range(most), True, lo=least, key=on_device)
                    if self.evaluator.fits(streaming := replace(full, streamed_blocks=fewest)):
                        yield streaming
                # Halves: neighbours differ little in time, and each costs a search of its own.
                count //= 2

    def _fits_streaming(self, load: Load, count: int) -> bool:
        return self.evaluator.predict(replace(load, streamed_blocks=count)).fits

    def _nothing_fits(self, ideal_load: Load) -> MachineError:
        """Return the error for a run that fits nowhere: the missing memory, and the nearest setting that fits."""
        least = self._least(replace(ideal_load, base_precision=self._base_precisions[-1]))
        need, host = self.evaluator.predict(least), self.evaluator.predict_host(least)
        phase = need.peak_phase
        doing = f"caching {phase}" if phase in ("images", "texts") else phase
        shortage = (
            f"this run needs at least {gib(need.peak_bytes)} for {doing}, "
            f"but there are only {self.evaluator.limit}"
        )
        # One number in both halves: what smaller settings would need, which do not fit either, does not help.
        fix = f"use a GPU with {gib(need.peak_bytes)} free, or a smaller base model"
        if ideal_load.device == "cpu":
            needed = gib(need.peak_bytes)
            fix = f"use a machine with {needed} free beside that margin, or a smaller base model"
        if need.fits and host is not None:
            shortage = (
                f"this run needs at least {gib(host.peak_bytes)} of the machine's memory beside the GPU's, "
                f"but only {gib(host.limit_bytes)} are free"
            )
            fix = f"use a machine with {gib(host.peak_bytes)} free, or a smaller base model"
        for setting, load in self._smaller(ideal_load):
            # The roomiest choices tell whether a setting can fit at all; a plan with it picks better ones.
            if any(self._fitting(load, [(load.base_precision, self._checkpointing[-1])])):
                return MachineError(shortage, fix=f"use --set {setting}, which fits")
        return MachineError(shortage, fix=fix)

    def _smaller(self, ideal_load: Load) -> Iterator[tuple[str, Load]]:
        """Yield a setting and the load with it that takes less memory, the smallest change of the result first."""
        last, step_px = self._base_precisions[-1], self.evaluator.costs.facts.bucket_step_px
        if ideal_load.precision == "fp32" and self.gpu is not None:
            native = filter(self.gpu.computes, self.evaluator.costs.family.traits.precisions)
            for half in [precision for precision in native if precision != "fp32"][:1]:
                narrow = replace(ideal_load, precision=half, base_precision=half)
                yield f"train.precision={half}", narrow
        if ideal_load.device != "cpu" and last not in QUANTIZATIONS:
            for precision in AUTOMATIC:
                quantized = replace(ideal_load, base_precision=precision)
                yield f"memory.base_precision={precision}", quantized
        ideal_load = replace(ideal_load, base_precision=last)
        if ideal_load.optimizer == "adamw":
            yield "optimizer.name=adamw8bit", replace(ideal_load, optimizer="adamw8bit")
        for rank in (128, 64, 32, 16, 8, 4):
            if rank < ideal_load.adapter.rank:
                smaller = ideal_load.adapter.model_copy(update={"rank": rank})
                yield f"adapter.rank={rank}", replace(ideal_load, adapter=smaller)
        without, side_px = "", ideal_load.sample_side_px
        if ideal_load.bucket_px[0] * ideal_load.bucket_px[1] > side_px**2:
            without = "data.more_resolutions=[]"
            yield without, self._with_side(ideal_load, side_px)
            without = f" --set {without}"
        for side_px in range(ideal_load.sample_side_px - step_px, step_px - 1, -step_px):
            shrunk = replace(self._with_side(ideal_load, side_px), sample_side_px=side_px)
            yield f"data.resolution={side_px}{without}", shrunk

    def _with_side(self, load: Load, side_px: int) -> Load:
        """Return a load of square images, whose references are not larger where they follow the resolution."""
        references = load.references_px
        if self.config.data.reference_resolution is None:
            square = (side_px, side_px)
            references = tuple(min(size, square, key=math.prod) for size in references)
        return replace(load, bucket_px=(side_px, side_px), references_px=references)

    def _least(self, load: Load) -> Load:
        kind = self._checkpointing[-1]
        streamed = self._streamable if kind != "none" else 0
        least = replace(load, checkpointing=kind, streamed_blocks=streamed)
        return replace(least, micro_batch=1, samples=False)

    # ---- why

    def _decisions(
        self, choice: MemoryChoice, seconds: Mapping[BasePrecision, float], *, wants_samples: bool
    ) -> Iterator[tuple[str, Any, str]]:
        load, at_once = choice.load, max(choice.images_at_once.values())
        whole, one_more = replace(load, streamed_blocks=0), load.micro_batch + 1
        width_px, height_px = load.bucket_px
        # The question is not what one block less would take, but why blocks are streamed at all.
        why_streaming = load.streamed_blocks and (
            f"all {len(self.evaluator.costs.blocks)} blocks on the GPU would take {self._peak(whole)}"
        )
        why_micro_batch = at_once != self.evaluator.batch_size and (
            f"{one_more} of {width_px}x{height_px} px would take "
            f"{self._peak(replace(load, micro_batch=one_more))}"
        )
        texts_bytes = self.evaluator.predict(replace(load, text_offload=False)).phases["texts"]
        why_offload = load.text_offload and (
            f"text encoders would take {gib(texts_bytes)}, {self.evaluator.limit}"
        )
        for key, value, why in (
            ("memory.base_precision", load.base_precision, self._why_base(load, seconds)),
            ("memory.gradient_checkpointing", load.checkpointing, self._why_recomputing(load)),
            ("memory.streamed_blocks", load.streamed_blocks, why_streaming),
            ("memory.micro_batch", at_once, why_micro_batch),
            ("memory.text_encoder_offload", load.text_offload, why_offload),
        ):
            before = value_of(self.config, key)
            if before != value:
                reason = why or f"{gib(choice.memory.peak_bytes)} predicted, {self.evaluator.limit}"
                if before != "auto":
                    reason = f"instead of {typed(before)}: {reason}"
                yield key, value, reason
        if wants_samples and not load.samples:
            reason = f"sample images would take {self._peak(replace(load, samples=True))}"
            yield "sampling.every_steps", 0, reason

    def _peak(self, load: Load) -> str:
        return f"{gib(self.evaluator.predict(load).peak_bytes)}, {self.evaluator.limit}"

    def _why_base(self, load: Load, seconds: Mapping[BasePrecision, float]) -> str:
        """Return why a load's base precision won, empty if the user chose it; `seconds` are of those that fit."""
        tried = self._base_precisions
        if len(tried) == 1:
            return "same as train.precision" if load.base_precision == load.precision else ""
        times = ", ".join(
            f"{seconds[name]:.3g} s a step in {name}" if name in seconds else f"{name} does not fit"
            for name in tried
        )
        if len(seconds) == 1:
            return times  # no choice was left, so no rule decided
        rule = "quality: the most precise that fits"
        if bits := FEWER_BITS.get(self.inputs.resolved.priority):
            counts = (f"{bits[name]:g} times for {name}" for name in tried if name in bits)
            rule = f"{self.inputs.resolved.priority}: the fewest seconds win, counted {', '.join(counts)}"
        return f"{times}; {rule}"

    def _why_recomputing(self, load: Load) -> str:
        lighter = CHECKPOINTING[: CHECKPOINTING.index(load.checkpointing)]
        if not lighter:
            return ""
        # Compared with the next lighter level, which is the one that would be used if it fitted.
        *_, kind = ("none", *(kind for kind in lighter if kind in self._known_kinds))
        if load.streamed_blocks and kind == "none":
            return "streamed blocks must be recomputed in the backward pass"
        return f"{kind} would take {self._peak(replace(load, checkpointing=kind))}"
