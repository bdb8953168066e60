"""The search for a load that fits: base precision, checkpointing, streaming, micro-batch, samples. No torch.

Input is the ideal load (what the settings ask for) and the values that may be tried instead; output is the load
with the lowest price, which never takes more memory than the ideal one. When no load fits, the error names the
nearest setting that would.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from typing import Any

from lora_trainer.common.errors import MachineError
from lora_trainer.config.choices import QUANTIZATIONS, BasePrecision
from lora_trainer.config.declare import Checkpointing, Precision, settled
from lora_trainer.config.running import Config, RunConfig
from lora_trainer.costs.base_costs import BaseCosts
from lora_trainer.hardware.devices import GIB
from lora_trainer.hardware.nvml import Gpu
from lora_trainer.planning.load import Load
from lora_trainer.planning.memory import HostPrediction, Prediction, predict, predict_host
from lora_trainer.planning.plan_input import PlanInput
from lora_trainer.planning.step_time import StepTime, StepWork, step_time, step_work

AUTOMATIC: tuple[BasePrecision, ...] = ("int8", "nf4")
"""Quantisations that `memory.base_precision=auto` may choose; fp8 takes as much as int8 and rounds more."""
SAMPLES_WORTH = 1.2
"""Sample images are dropped if room for them makes a step longer than this factor, or needs fewer bits."""
# The seconds of a step are multiplied by this before they are compared: balanced takes nf4 where its steps are more
# than 1.5 times as fast as those of an unquantised base and more than 1.5 / 1.2 = 1.25 times as fast as those of
# int8. Priority quality has no row: it keeps the most precise that fits, however slow. The values rise with fewer
# bits, so a choice of fewer bits never comes with longer steps.
FEWER_BITS: Mapping[str, Mapping[BasePrecision, float]] = {
    "speed": {"int8": 1.1, "fp8": 1.1, "nf4": 1.2},
    "balanced": {"int8": 1.2, "fp8": 1.25, "nf4": 1.5},
}
RANK: Mapping[BasePrecision, int] = {"int8": 1, "fp8": 2, "nf4": 3}
"""Order by precision, the most precise first; an unquantised base has rank 0."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Bytes that may be used, and the reason, worded to follow a size in a sentence."""

    bytes: int
    reason: str

    def __str__(self) -> str:
        return f"{gib(self.bytes)} {self.reason}"


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """Values the search may try, the most precise or the fastest first; `streamed` is (fewest, most) blocks."""

    base_precisions: tuple[BasePrecision, ...]
    checkpointing: tuple[Checkpointing, ...]
    streamed: tuple[int, int]
    text_offload: tuple[bool, ...]
    in_16_bits: Precision | None = None
    """Best 16-bit precision for this base on this GPU; None: only fp32 works."""

    @property
    def roomiest(self) -> SearchSpace:
        """The choices that take the least memory."""
        # Each list is in order, so its last value alone answers whether anything fits.
        return replace(
            self,
            base_precisions=self.base_precisions[-1:],
            checkpointing=self.checkpointing[-1:],
            text_offload=self.text_offload[-1:],
        )

    def with_base(self, precision: BasePrecision) -> SearchSpace:
        """Return the choices with one base precision."""
        return replace(self, base_precisions=(precision,))


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Judges a load on this machine: device memory, host memory, time of a step, and the price to compare by.

    Of `config` only memory's settings may be `auto`; `gpu` None is the processor.
    """

    inputs: PlanInput
    config: Config | RunConfig
    gpu: Gpu | None

    @property
    def costs(self) -> BaseCosts:
        return self.inputs.costs

    @property
    def priority(self) -> str:
        return self.inputs.resolved.priority

    @property
    def batch_size(self) -> int:
        """The most images of a step that one process trains on: the slowest process sets the pace."""
        return math.ceil(self.config.train.batch_size / self.inputs.processes)

    @property
    def has_host(self) -> bool:
        """Whether the device has memory of its own, so that weights can wait in the machine's memory."""
        return self.gpu is not None and self.gpu.can.own_memory

    @cached_property
    def limit(self) -> Limit:
        """Memory of the device that the run may use: free memory or the user's limit, whichever is less.

        With an out-of-memory record of this GPU, only the recorded share of it.
        """
        limit_gib, full_card = self.config.hardware.vram_limit_gib, self.inputs.full_card
        if self.gpu is None:
            return Limit(bytes=self.inputs.ram_bytes, reason="of memory free, less a margin")
        size, reason = self.gpu.free_bytes, f"free on {self.gpu.name}"
        if limit_gib is not None and limit_gib * GIB < size:
            size, reason = int(limit_gib * GIB), "allowed by hardware.vram_limit_gib"
        if full_card is None:
            return Limit(bytes=size, reason=reason)
        usable_bytes = int(size * full_card.share)
        return Limit(bytes=usable_bytes, reason=f"({gib(size)} {reason}; {full_card})")

    def predict(self, load: Load) -> Prediction:
        return predict(load, self.costs, limit_bytes=self.limit.bytes)

    def predict_host(self, load: Load) -> HostPrediction | None:
        if not self.has_host:
            return None  # `predict` counts everything already
        limit_bytes, pinnable_bytes = self.inputs.ram_bytes, self.inputs.pinnable_bytes
        return predict_host(
            load, self.costs, limit_bytes=limit_bytes, pinnable_bytes=pinnable_bytes
        )

    def time(self, load: Load) -> StepTime:
        pinnable_bytes = self.inputs.pinnable_bytes
        work = step_work(
            load, self.costs, batch_size=self.batch_size, pinnable_bytes=pinnable_bytes
        )
        return self.time_of(work, load.precision)

    def time_of(self, work: StepWork, precision: Precision) -> StepTime:
        threads = settled(self.config.hardware.threads)
        return step_time(work, gpu=self.gpu, threads=threads, precision=precision)

    def fits(self, load: Load) -> bool:
        """Say whether the device and the machine can hold a load."""
        host = self.predict_host(load)
        return self.predict(load).fits and (host is None or host.fits)


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The load that was found.

    `sampling_bytes` is the peak for which sample images were dropped, 0 if they were not. `seconds` maps
    each base precision that fits to the seconds a step of its best load.
    """

    load: Load
    sampling_bytes: int
    seconds: Mapping[BasePrecision, float]


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    load: Load
    seconds: float
    order: tuple[Any, ...]
    """The price, then the number of moving parts: the candidate with the lowest order wins."""


@dataclass(frozen=True, kw_only=True)
class Search(Evaluator):
    """Looks for the load that fits at the lowest price, beginning with `ideal_load`."""

    ideal_load: Load
    choices: SearchSpace

    def fit(self) -> SearchResult:
        """Return the load that fits at the lowest price; ties go to the simpler one.

        Raises MachineError when nothing fits, even without sample images.
        """
        ideal_load = replace(self.ideal_load, text_offload=self._text_offload())
        # Sample images are a wish: first the best load without them, then whether they fit beside it.
        silent = replace(ideal_load, samples=False)
        compared = self._by_precision(silent, self.choices)
        if not compared:
            raise self._nothing_fits(silent)
        best, dropped_bytes = min(compared.values(), key=lambda each: each.order), 0
        if ideal_load.samples:
            drawing = self._by_precision(ideal_load, self.choices)
            # Room for sample images may not cost fewer bits, so the chosen base precision stays.
            with_samples = drawing.get(best.load.base_precision)
            if with_samples is not None and with_samples.seconds <= SAMPLES_WORTH * best.seconds:
                best, compared = with_samples, drawing
            else:
                dropped_bytes = self.predict(replace(best.load, samples=True)).peak_bytes
        return SearchResult(
            load=best.load,
            sampling_bytes=dropped_bytes,
            seconds={precision: each.seconds for precision, each in compared.items()},
        )

    def images_at_once(
        self, load: Load, buckets: Sequence[tuple[int, int]]
    ) -> dict[tuple[int, int], int]:
        """Return the micro-batch of each bucket: that of the ideal load, or fewer images where no more fit.

        `load` is of the largest bucket and must fit; smaller buckets may have more images at once.
        """
        least, most = load.micro_batch, self.ideal_load.micro_batch
        # The largest bucket has the whole batch at once, so all others have too: no prediction is needed.
        if least >= most:
            return dict.fromkeys(buckets, most)
        return {
            size: self._most_images(replace(load, bucket_px=size), least=least, most=most)
            for size in dict.fromkeys(buckets)
        }

    def _most_images(self, load: Load, *, least: int, most: int) -> int:
        return _most(
            lambda count: self.fits(replace(load, micro_batch=count)), least=least, most=most
        )

    def _text_offload(self) -> bool:
        """Say whether text encoders must be offloaded while caching: only if they alone exceed the device."""
        for offload in self.choices.text_offload[:-1]:
            prediction = self.predict(replace(self.ideal_load, text_offload=offload))
            if prediction.phases["texts"] <= self.limit.bytes:
                return offload
        return self.choices.text_offload[-1]

    def _by_precision(
        self, ideal_load: Load, choices: SearchSpace
    ) -> dict[BasePrecision, _Candidate]:
        """Return the best load of each base precision that fits."""
        best: dict[BasePrecision, _Candidate] = {}
        for load in self._fitting(ideal_load, choices):
            seconds, precision = self.time(load).seconds, load.base_precision
            order = (
                price(self.priority, precision, seconds),
                # Equal prices: fewer moving parts first, so that estimates do not decide between equal runs.
                load.streamed_blocks,
                choices.checkpointing.index(load.checkpointing),
                -load.micro_batch,
            )
            if precision not in best or order < best[precision].order:
                best[precision] = _Candidate(load=load, seconds=seconds, order=order)
        return best

    def _fitting(self, ideal_load: Load, choices: SearchSpace) -> Iterator[Load]:
        """Yield loads that fit, for each combination of base precision and checkpointing level.

        Each combination yields its largest micro-batch. Streaming is tried only for micro-batches that do not
        fit without it: with the fewest blocks for the whole batch, half of it, and so on.
        """
        least, most = choices.streamed
        for precision, kind in product(choices.base_precisions, choices.checkpointing):
            if least and kind == "none":
                continue  # streamed blocks are gone after the forward pass and must be recomputed
            load = replace(
                ideal_load, base_precision=precision, checkpointing=kind, streamed_blocks=least
            )
            plain = self._most_images(load, least=0, most=ideal_load.micro_batch)
            if plain:
                yield replace(load, micro_batch=plain)
            if kind != "none" and most > least:
                yield from self._streaming(load, above=plain, most=most)

    def _streaming(self, load: Load, *, above: int, most: int) -> Iterator[Load]:
        least, count = load.streamed_blocks, load.micro_batch
        while count > above:
            full = replace(load, micro_batch=count, streamed_blocks=most)
            if self.predict(full).fits:
                # The device wants many streamed blocks, the host few. So the search looks for the fewest
                # the device can do with, and the host only has to agree to that number.
                resident = _most(partial(self._fits_beside, full), least=0, most=most - least)
                fewest = replace(full, streamed_blocks=most - resident)
                if self.fits(fewest):
                    yield fewest
            # Halves: neighbours differ little in time, and each costs a search of its own.
            count //= 2

    def _fits_beside(self, load: Load, resident: int) -> bool:
        """Say whether the device can hold so many of the streamed blocks."""
        blocks = load.streamed_blocks - resident
        return self.predict(replace(load, streamed_blocks=blocks)).fits

    def _nothing_fits(self, ideal_load: Load) -> MachineError:
        """Return the error for a run that fits nowhere: the missing memory, and the nearest setting that fits."""
        least = _least(ideal_load, self.choices)
        need, host = self.predict(least), self.predict_host(least)
        how = f" ({_how(least)})" if need.peak_phase == "training" else ""
        phase = (
            f"caching {need.peak_phase}"
            if need.peak_phase in ("images", "texts")
            else need.peak_phase
        )
        shortage = (
            f"this run needs at least {gib(need.peak_bytes)} for {phase}{how}, "
            f"but there are only {self.limit}"
        )
        machine = "a GPU" if ideal_load.device != "cpu" else "a machine"
        smallest = need.peak_bytes
        if need.fits and host is not None:
            shortage = (
                f"this run needs at least {gib(host.peak_bytes)} of the machine's memory beside the GPU's, "
                f"but only {gib(host.limit_bytes)} are free"
            )
            machine, smallest = "a machine", host.peak_bytes
        for setting, load, allowed in self._smaller(ideal_load):
            # The roomiest choices tell whether a setting can fit at all; a plan with it picks better ones.
            if self._by_precision(load, allowed.roomiest):
                return MachineError(shortage, fix=f"use --set {setting}, which fits")
            if not need.fits:
                smallest = min(smallest, self.predict(_least(load, allowed)).peak_bytes)
        return MachineError(
            shortage, fix=f"use {machine} with {gib(smallest)} free, or a smaller base model"
        )

    def _smaller(self, ideal_load: Load) -> Iterator[tuple[str, Load, SearchSpace]]:
        """Yield (setting, load, choices) that take less memory; the smallest change of the result comes first."""
        choices, step_px = self.choices, self.costs.facts.bucket_step_px
        if ideal_load.precision == "fp32" and choices.in_16_bits is not None:
            half = choices.in_16_bits
            narrowed = choices.with_base(half)
            yield f"train.precision={half}", replace(ideal_load, precision=half), narrowed
        if ideal_load.device != "cpu" and choices.base_precisions[-1] not in QUANTIZATIONS:
            for precision in AUTOMATIC:
                setting = f"memory.base_precision={precision}"
                yield setting, ideal_load, choices.with_base(precision)
        if ideal_load.optimizer == "adamw":
            yield "optimizer.name=adamw8bit", replace(ideal_load, optimizer="adamw8bit"), choices
        for rank in (128, 64, 32, 16, 8, 4):
            if rank < ideal_load.adapter.rank:
                smaller = ideal_load.adapter.model_copy(update={"rank": rank})
                yield f"adapter.rank={rank}", replace(ideal_load, adapter=smaller), choices
        without, side_px = "", ideal_load.sample_side_px
        if ideal_load.bucket_px[0] * ideal_load.bucket_px[1] > side_px**2:
            without = "data.more_resolutions=[]"
            yield without, replace(ideal_load, bucket_px=(side_px, side_px)), choices
            without = f" --set {without}"
        for side_px in range(ideal_load.sample_side_px - step_px, step_px - 1, -step_px):
            shrunk = replace(ideal_load, bucket_px=(side_px, side_px), sample_side_px=side_px)
            yield f"data.resolution={side_px}{without}", shrunk, choices


def price(priority: str, precision: BasePrecision, seconds: float) -> tuple[float, ...]:
    """Return the key by which base precisions are compared, the lowest wins; `seconds` are of a step."""
    if priority in FEWER_BITS:
        return (seconds * FEWER_BITS[priority].get(precision, 1.0),)
    # Quality: a pair, so that seconds decide only between equal precisions.
    return (RANK.get(precision, 0), seconds)


def _most(fits: Callable[[int], bool], *, least: int, most: int) -> int:
    """Return the largest number from `least` to `most` that fits, by bisection.

    Every number below one that fits must fit too; `least` is returned untested.
    """
    return least + bisect_left(range(least + 1, most + 1), True, key=lambda count: not fits(count))


def _how(load: Load) -> str:
    parts = ["micro-batch 1"]
    if load.base_precision in QUANTIZATIONS:
        parts.append(f"base in {load.base_precision}")
    if load.checkpointing != "none":
        parts.append("full checkpointing")
    if load.streamed_blocks:
        parts.append("all blocks streamed")
    return ", ".join(parts)


def _least(ideal_load: Load, choices: SearchSpace) -> Load:
    kind = choices.checkpointing[-1]
    return replace(
        ideal_load,
        base_precision=choices.base_precisions[-1],
        checkpointing=kind,
        streamed_blocks=choices.streamed[1] if kind != "none" else 0,
        micro_batch=1,
        samples=False,
    )


def gib(size: int) -> str:
    """Return a size in GiB with two decimals and the unit."""
    return f"{size / GIB:.2f} GiB"
