"""The search for what fits: base precision, recomputation, streaming, micro-batch, sample images. No torch.

Input is the load as wanted, what may be changed about it, and how loads are judged; output is the load
that costs the least, nothing in it above what was wanted. When none fits, the error names the nearest
setting that would.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from lora_trainer.common.errors import MachineError
from lora_trainer.config.base_precision import QUANTIZATIONS, BasePrecision
from lora_trainer.config.config import Checkpointing, Precision
from lora_trainer.planning.host_memory import HostPrediction
from lora_trainer.planning.loads import Load
from lora_trainer.planning.memory import GIB, Prediction

SHARES = 100
"""A share of blocks is chosen in hundredths."""
SAMPLES_WORTH = 1.2
"""Sample images are kept where they make a step at most this much longer, and never by fewer bits."""


PRODUCTS_PAY_FROM = 1.1
"""How many times faster int8 products have to make a step: both predictions are estimates."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """Bytes that may be used, and what sets them, to follow a size in a sentence."""

    bytes: int
    reason: str

    def __str__(self) -> str:
        return f"{gib(self.bytes)} {self.reason}"


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """What may be chosen, each with the most precise or the fastest first; `streamed` is (least, most).

    `kept_share` is by kind of checkpointing the largest share of blocks that may keep more. With
    `int8_products` a base in int8 may be multiplied so.
    """

    base_precisions: tuple[BasePrecision, ...]
    checkpointing: tuple[Checkpointing, ...]
    kept_share: Mapping[Checkpointing, float]
    streamed: tuple[int, int]
    text_offload: tuple[bool, ...]
    modulation_cache: tuple[bool, ...] = (False,)
    int8_products: bool = False
    in_16_bits: Precision | None = None
    """The best 16-bit precision that this base can be trained in on this card; None: only fp32 can."""

    @property
    def roomiest(self) -> SearchSpace:
        """What takes the least memory."""
        return replace(
            self,
            base_precisions=self.base_precisions[-1:],
            checkpointing=self.checkpointing[-1:],
            text_offload=self.text_offload[-1:],
            modulation_cache=self.modulation_cache[-1:],
        )


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """How a load is judged: its memory on the device and beside it, its seconds a step, its price.

    `price` turns a precision and seconds into something to compare; the lowest is taken.
    """

    predict: Callable[[Load], Prediction]
    predict_host: Callable[[Load], HostPrediction | None]
    seconds: Callable[[Load], float]
    price: Callable[[BasePrecision, float], tuple[float, ...]]

    def fits(self, load: Load) -> bool:
        """Say whether the device and the machine can hold a load."""
        host = self.predict_host(load)
        return self.predict(load).fits and (host is None or host.fits)


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """What fits.

    `sampling_bytes` is the peak for which sample images were dropped, else 0; `seconds` are those of
    a step, by base precision of the best load of each that fits at all.
    """

    load: Load
    prediction: Prediction
    sampling_bytes: int = 0
    seconds: Mapping[BasePrecision, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    load: Load
    seconds: float
    price: tuple[float, ...]


def fit(
    wanted: Load, *, choices: SearchSpace, judge: Evaluator, limit: Limit, step_px: int
) -> SearchResult:
    """Return the load that fits at the lowest price; ties go to the simpler one.

    `step_px` are the steps a resolution can take. Raises MachineError when nothing fits, even without
    sample images.
    """
    wanted = replace(wanted, text_offload=_text_offload(wanted, choices, judge))
    silent = replace(wanted, samples=False)
    plain = replace(choices, int8_products=False)
    best = _best(silent, plain, judge)
    if best is None:
        raise _nothing_fits(silent, choices, judge=judge, limit=limit, step_px=step_px)
    if best.load.base_precision not in QUANTIZATIONS:
        choices = plain  # they make no base int8 that would be kept whole
    elif choices.int8_products:
        best = _best(silent, choices, judge) or best
    load, dropped_bytes = best.load, 0
    if wanted.samples:
        same = replace(choices, base_precisions=(best.load.base_precision,))
        drawing = _best(wanted, same, judge)
        if drawing is not None and drawing.seconds <= SAMPLES_WORTH * best.seconds:
            load = drawing.load
        else:
            dropped_bytes = judge.predict(replace(best.load, samples=True)).peak_bytes
    return SearchResult(
        load=load,
        prediction=judge.predict(load),
        sampling_bytes=dropped_bytes,
        seconds=_seconds_by_precision(load, wanted, choices, judge),
    )


def images_at_once(
    load: Load, buckets: Sequence[tuple[int, int]], *, most: int, judge: Evaluator
) -> dict[tuple[int, int], int]:
    """Return how many images of each bucket go through the network together: `most`, or what fits.

    `load` is of the largest bucket and fits.
    """
    if load.micro_batch >= most:
        return dict.fromkeys(buckets, most)
    return {
        bucket: _most(
            lambda count, bucket=bucket: judge.fits(  # type: ignore[misc]
                replace(load, bucket_px=bucket, micro_batch=count)
            ),
            least=load.micro_batch,
            most=most,
        )
        for bucket in dict.fromkeys(buckets)
    }


def _text_offload(wanted: Load, choices: SearchSpace, judge: Evaluator) -> bool:
    """Text encoders stay on the device while caching, unless they alone are too large for it."""
    for offload in choices.text_offload:
        prediction = judge.predict(replace(wanted, text_offload=offload))
        limit_bytes = prediction.limit_bytes
        if limit_bytes is None or prediction.phases["texts"] <= limit_bytes:
            return offload
    return choices.text_offload[-1]


def _seconds_by_precision(
    found: Load, wanted: Load, choices: SearchSpace, judge: Evaluator
) -> dict[BasePrecision, float]:
    wanted = replace(wanted, samples=found.samples)
    best = {
        precision: _best(wanted, replace(choices, base_precisions=(precision,)), judge)
        for precision in choices.base_precisions
    }
    return {precision: each.seconds for precision, each in best.items() if each is not None}


def _best(wanted: Load, choices: SearchSpace, judge: Evaluator) -> _Candidate | None:
    def candidate(load: Load) -> _Candidate:
        seconds = judge.seconds(load)
        doubted = PRODUCTS_PAY_FROM if load.base_matmul != wanted.base_matmul else 1.0
        return _Candidate(
            load=load, seconds=seconds, price=judge.price(load.base_precision, doubted * seconds)
        )

    def multiplied(load: Load) -> Iterator[Load]:
        yield load
        codes = replace(load, base_matmul="int8")
        if choices.int8_products and load.base_precision == "int8" and judge.fits(codes):
            yield codes

    def order(each: _Candidate) -> tuple[object, ...]:
        load = each.load
        kind = choices.checkpointing.index(load.checkpointing)
        return (
            each.price,
            load.streamed_blocks,
            kind,
            -load.kept_share,
            -load.micro_batch,
            load.modulation_cache,
        )

    return min(
        (
            candidate(load)
            for found in _fitting(wanted, choices, judge)
            for load in multiplied(found)
        ),
        key=order,
        default=None,
    )


def _fitting(wanted: Load, choices: SearchSpace, judge: Evaluator) -> Iterator[Load]:
    """Yield loads that fit: for each way of keeping the base and of recomputing the largest micro-batch.

    And for this one, half of it, and so on the largest share of blocks that keep more. Streaming starts
    where nothing less helps: with the fewest blocks for the whole batch, half of it, and so on.
    """
    least, most = choices.streamed
    ways = product(choices.base_precisions, choices.checkpointing, choices.modulation_cache)
    for precision, kind, cached in ways:
        load = replace(
            wanted,
            base_precision=precision,
            checkpointing=kind,
            kept_share=0.0,
            modulation_cache=cached,
            streamed_blocks=least,
        )
        if least and not load.recomputes_all:
            continue
        plain = _most(
            lambda count, load=load: judge.fits(replace(load, micro_batch=count)),  # type: ignore[misc]
            least=0,
            most=wanted.micro_batch,
        )
        if plain:
            yield replace(load, micro_batch=plain)
        share = choices.kept_share.get(kind, 0.0)
        yield from _keeping_more(load, most=share, up_to=plain, judge=judge)
        if load.recomputes_all and most > least:
            yield from _streaming(load, above=plain, most=most, judge=judge)


def _keeping_more(load: Load, *, most: float, up_to: int, judge: Evaluator) -> Iterator[Load]:
    count = up_to
    while count and most:
        alone = replace(load, micro_batch=count)
        share = _largest_share(alone, most=most, judge=judge)
        mixed = replace(alone, kept_share=share)
        if share and (mixed.recomputes_all or not mixed.streamed_blocks):
            yield mixed
        count //= 2


def _largest_share(load: Load, *, most: float, judge: Evaluator) -> float:
    """Return the largest share up to `most` of the blocks that can keep more; 0.0 fits."""
    if judge.fits(replace(load, kept_share=most)):
        return most
    hundredths = _most(
        lambda parts: judge.fits(replace(load, kept_share=parts / SHARES)),
        least=0,
        most=math.ceil(most * SHARES) - 1,
    )
    return hundredths / SHARES


def _streaming(load: Load, *, above: int, most: int, judge: Evaluator) -> Iterator[Load]:
    count = load.micro_batch
    while count > above:
        full = replace(load, micro_batch=count, streamed_blocks=most)
        if judge.predict(full).fits:
            # The fewest blocks the device needs are also what the machine's memory has to hold.
            kept = _most(
                lambda kept, full=full: (
                    judge.predict(  # type: ignore[misc]
                        replace(full, streamed_blocks=most - kept)
                    ).fits
                ),
                least=0,
                most=most - load.streamed_blocks,
            )
            fewest = replace(full, streamed_blocks=most - kept)
            if judge.fits(fewest):
                yield fewest
        count //= 2


def _most(fits: Callable[[int], bool], *, least: int, most: int) -> int:
    """Return the largest number up to `most` that fits, all below it fitting too; at least `least`."""
    low, high = least, most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _nothing_fits(
    wanted: Load, choices: SearchSpace, *, judge: Evaluator, limit: Limit, step_px: int
) -> MachineError:
    """Say what is missing, of the device or of the machine beside it, and what would fit."""
    least = _least(wanted, choices)
    need, host = judge.predict(least), judge.predict_host(least)
    how = f" ({_how(least)})" if need.peak_phase == "training" else ""
    found = (
        f"this run needs at least {gib(need.peak_bytes)} for {PHASE_NAMES[need.peak_phase]}{how}, "
        f"and there are {limit}"
    )
    place = "a card" if wanted.device != "cpu" else "a machine"
    smallest = need.peak_bytes
    if need.fits and host is not None:
        found = (
            f"this run needs at least {gib(host.bytes)} of the machine's memory beside the card, "
            f"and there are {gib(host.limit_bytes)} free"
        )
        place, smallest = "a machine", host.bytes
    for setting, load, allowed in _smaller(wanted, choices, step_px=step_px):
        if _best(load, allowed.roomiest, judge) is not None:
            return MachineError(found, fix=f"use --set {setting}, which fits")
        if not need.fits:
            smallest = min(smallest, judge.predict(_least(load, allowed)).peak_bytes)
    return MachineError(
        found, fix=f"use {place} with {gib(smallest)} free, or a smaller base model"
    )


PHASE_NAMES: Mapping[str, str] = {
    "images": "caching images",
    "texts": "caching texts",
    "training": "training",
    "sampling": "sampling",
}


def _how(load: Load) -> str:
    parts = ["micro-batch 1"]
    if load.base_precision in QUANTIZATIONS:
        parts.append(f"base in {load.base_precision}")
    if load.checkpointing != "none":
        parts.append("everything recomputed")
    if load.modulation_cache:
        parts.append("modulation made ahead")
    if load.streamed_blocks:
        parts.append("all blocks streamed")
    return ", ".join(parts)


def _least(wanted: Load, choices: SearchSpace) -> Load:
    kind = choices.checkpointing[-1]
    return replace(
        wanted,
        base_precision=choices.base_precisions[-1],
        checkpointing=kind,
        kept_share=0.0,
        streamed_blocks=choices.streamed[1] if kind != "none" else 0,
        modulation_cache=choices.modulation_cache[-1],
        micro_batch=1,
        samples=False,
    )


def _smaller(
    wanted: Load, choices: SearchSpace, *, step_px: int
) -> Iterator[tuple[str, Load, SearchSpace]]:
    """Yield settings that take less memory, those that change the result least first."""
    if wanted.precision == "fp32" and choices.in_16_bits is not None:
        half = choices.in_16_bits
        kept = replace(choices, base_precisions=(half,))
        yield f"train.precision={half}", replace(wanted, precision=half), kept
    if wanted.device != "cpu" and choices.base_precisions[-1] not in QUANTIZATIONS:
        for precision in ("int8", "nf4"):
            kept = replace(choices, base_precisions=(precision,))
            yield f"memory.base_precision={precision}", wanted, kept
    if wanted.optimizer == "adamw":
        yield "optimizer.name=adamw8bit", replace(wanted, optimizer="adamw8bit"), choices
    for rank in (128, 64, 32, 16, 8, 4):
        if rank < wanted.adapter.rank:
            smaller = wanted.adapter.model_copy(update={"rank": rank})
            yield f"adapter.rank={rank}", replace(wanted, adapter=smaller), choices
    without, side_px = "", wanted.sample_side_px
    if wanted.bucket_px[0] * wanted.bucket_px[1] > side_px**2:
        without = "data.more_resolutions=[]"
        yield without, replace(wanted, bucket_px=(side_px, side_px)), choices
        without = f" --set {without}"
    for side_px in range(wanted.sample_side_px - step_px, step_px - 1, -step_px):
        shrunk = replace(wanted, bucket_px=(side_px, side_px), sample_side_px=side_px)
        yield f"data.resolution={side_px}{without}", shrunk, choices


def gib(size: int) -> str:
    """Return a size as people read it."""
    return f"{size / GIB:.2f} GiB"
