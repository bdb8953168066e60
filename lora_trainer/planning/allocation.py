"""The planner's memory part: which loads may be tried, how they are judged, and why one was taken.

Input is the settings so far and what they are planned for; output an `Allocation`: the load that fits,
its predictions, its time, and a decision with its reason for every setting it changed or filled in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from lora_trainer.common.errors import MachineError, RequestError
from lora_trainer.config.base_precision import BasePrecision
from lora_trainer.config.config import CHECKPOINTING, MIXABLE, Checkpointing, build_config
from lora_trainer.families.base import BaseFacts
from lora_trainer.hardware.machine import GIB, Gpu, Hardware
from lora_trainer.planning.device_overhead import surroundings
from lora_trainer.planning.host_memory import HostPrediction, predict_host
from lora_trainer.planning.loads import Load, RememberedCosts, before, runs_wide
from lora_trainer.planning.matmul import (
    Matmul,
    against_modulation,
    against_products,
    choose_matmul,
    refuse_matmul,
)
from lora_trainer.planning.memory import Prediction, predict
from lora_trainer.planning.oom_history import OomRecord
from lora_trainer.planning.precisions import in_16_bits
from lora_trainer.planning.search import (
    SHARES,
    Evaluator,
    Limit,
    SearchResult,
    SearchSpace,
    fit,
    gib,
    images_at_once,
)
from lora_trainer.planning.step_time import StepTime, card, cpu_step_time, gpu_step_time, step_work
from lora_trainer.planning.weight_bytes import ELEMENT_BYTES

AUTOMATIC: tuple[BasePrecision, ...] = ("int8", "nf4")
"""What `auto` may keep a base in; fp8 takes what int8 takes and rounds more."""
# What a priority would rather take than fewer bits: a step that is so many times longer. Quality
# takes any. Where one asks for more than the next, its steps are never longer.
FEWER_BITS: Mapping[str, Mapping[BasePrecision, float]] = {
    "speed": {"int8": 1.1, "fp8": 1.1, "nf4": 1.2},
    "balanced": {"int8": 1.2, "fp8": 1.25, "nf4": 1.5},
}
RANK: Mapping[BasePrecision, int] = {"int8": 1, "fp8": 2, "nf4": 3}
"""Order of precision; what is kept whole comes first."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """One value the planner set; `bytes` is the predicted peak it was decided by, 0 if none was."""

    key: str
    value: Any
    reason: str
    bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """What was decided about memory; `images_at_once` is by bucket, (width, height) in pixels."""

    load: Load
    memory: Prediction
    host: HostPrediction | None
    time: StepTime
    images_at_once: Mapping[tuple[int, int], int]
    decisions: tuple[Decision, ...]


@dataclass(frozen=True, kw_only=True)
class Allocator:
    """Settings without `auto` but for memory's, and what they are planned for; `gpu` None: the processor."""

    values: Mapping[str, Any]
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
    """Share of the samples that are there to keep the class as it is."""
    kept: Mapping[tuple[int, int], int] | None = None
    """Images at once by bucket of a run that goes on, whose settings are in `values`: nothing is decided."""

    def allocate(self) -> Allocation:
        """Raise MachineError naming the nearest setting that fits when nothing does, or RequestError."""
        self._refuse_impossible()
        if self.kept is not None and set(self._all_buckets) <= self.kept.keys():
            made = self._allocated(
                self._wanted, {size: self.kept[size] for size in self._all_buckets}
            )
            return replace(made, decisions=tuple(self._of_older_runs()))
        wanted, judge = self._wanted, self._judge
        found = fit(
            wanted,
            choices=self._choices,
            judge=judge,
            limit=self.limit,
            step_px=self.facts.bucket_step_px,
        )
        matmul = choose_matmul(found.load, gpu=self.gpu, priority=self.priority, judge=judge)
        if self.values["memory.base_matmul"] == "auto":
            found = replace(found, load=replace(found.load, base_matmul=matmul.value))
        at_once = images_at_once(
            found.load, self._all_buckets, most=wanted.micro_batch, judge=judge
        )
        made = self._allocated(found.load, at_once)
        decisions = self._decisions(found, matmul, max(at_once.values()), made.memory.peak_bytes)
        return replace(made, decisions=tuple(decisions))

    def _allocated(self, load: Load, at_once: Mapping[tuple[int, int], int]) -> Allocation:
        loads = [
            replace(load, bucket_px=bucket, micro_batch=count) for bucket, count in at_once.items()
        ]
        memory = max(map(self._judge.predict, loads), key=lambda made: made.peak_bytes)
        return Allocation(
            load=load,
            memory=memory,
            host=self._judge.predict_host(load),
            time=self._time(load),
            images_at_once=at_once,
            decisions=(),
        )

    # ---- what may be tried

    @property
    def _share(self) -> int:
        """Images of a step that one process does at most."""
        return math.ceil(int(self.values["train.batch_size"]) / self.processes)

    @property
    def _all_buckets(self) -> Sequence[tuple[int, int]]:
        side_px = int(self.values["data.resolution"])
        return self.buckets or [(side_px, side_px)]

    @cached_property
    def _wanted(self) -> Load:
        values = self.values
        micro_batch, batch_size = values["memory.micro_batch"], self._share
        return Load(
            device=self.gpu.can.torch_type if self.gpu else "cpu",
            precision=values["train.precision"],
            base_precision=self._choices.base_precisions[0],
            adapter=build_config(values).adapter,
            optimizer=values["optimizer.name"],
            text_precision=values["memory.text_encoder_precision"],
            text_offload=False,
            micro_batch=batch_size if micro_batch == "auto" else micro_batch,
            checkpointing=self._choices.checkpointing[0],
            kept_share=_number(values["memory.kept_share"])
            if self._choices.checkpointing[0] in MIXABLE
            else 0.0,
            streamed_blocks=self._choices.streamed[0],
            modulation_cache=self._choices.modulation_cache[0],
            bucket_px=max(self._all_buckets, key=lambda size: size[0] * size[1]),
            samples=bool(values["sampling.every_steps"]),
            sample_side_px=int(values["data.resolution"]),
            prepared_samples=math.ceil(
                values["data.prefetch_steps"] * batch_size * (1 + self._twice)
            ),
            averaged=values["train.ema_decay"] is not None,
            masked=values["data.masks"] != "none",
            twice=self._twice,
            as_base=self._twice + self._learned_from_base,
            keeps_best=values["output.keep_best"],
            base_matmul="int8" if values["memory.base_matmul"] == "int8" else "dequantized",
            beside=surroundings(
                self.gpu,
                expandable=self.hardware.expandable_segments,
                limit_gib=values["hardware.vram_limit_gib"],
            ),
        )

    @property
    def _twice(self) -> float:
        return 1.0 - self.regularisation if self.values["objective.preservation_weight"] else 0.0

    @property
    def _learned_from_base(self) -> float:
        return self.regularisation if self.values["objective.prior"] == "base" else 0.0

    @cached_property
    def _choices(self) -> SearchSpace:
        kind, streamed = (
            self.values["memory.gradient_checkpointing"],
            self.values["memory.streamed_blocks"],
        )
        first = 0 if kind == "auto" else CHECKPOINTING.index(kind)
        offload = self.values["memory.text_encoder_offload"]
        runs = self.values["adapter.text_encoder"] or self.values["adapter.new_tokens"]
        may_offload = self._has_host and not runs
        kinds = self._kinds(CHECKPOINTING[first:])
        return SearchSpace(
            base_precisions=self._base_precisions(),
            checkpointing=kinds,
            kept_share=self._shares(kinds),
            streamed=(0 if streamed == "auto" else streamed, self._streamable),
            text_offload=((True,) if offload is True else (False, True))
            if may_offload
            else (False,),
            modulation_cache=self._modulation_choices(),
            int8_products=self.values["memory.base_matmul"] == "auto"
            and not against_products(gpu=self.gpu, priority=self.priority),
            in_16_bits=in_16_bits(self.costs.family.precisions, self.gpu),
        )

    def _modulation_choices(self) -> tuple[bool, ...]:
        """On the processor nothing is saved: it is done there only where it was asked for."""
        asked = self.values["memory.modulation_cache"]
        if asked != "auto":
            return (asked,)
        return (False, True) if self._has_host and not self._against_modulation else (False,)

    @cached_property
    def _against_modulation(self) -> str:
        return against_modulation(self.values, facts=self.facts, costs=self.costs)

    def _of_older_runs(self) -> Iterator[Decision]:
        """Yield what a run that goes on had no choice of when it was planned."""
        without = {
            "memory.modulation_cache": False,
            "memory.kept_share": 0.0,
            "memory.base_matmul": "dequantized",
        }
        for key, value in without.items():
            if self.values[key] == "auto":
                yield Decision(key=key, value=value, reason="the run began without it")

    def _shares(self, kinds: tuple[Checkpointing, ...]) -> dict[Checkpointing, float]:
        """Blocks that keep more take what is free; a kind that somebody chose is not raised unasked."""
        chosen, share = (
            self.values["memory.gradient_checkpointing"],
            self.values["memory.kept_share"],
        )
        known = self._known
        most = {kind: 1 - 1 / SHARES for kind in kinds if kind in MIXABLE and before(kind) in known}
        if share != "auto" and chosen == "auto":
            return dict.fromkeys(most, share)
        if chosen in MIXABLE:
            most[chosen] = _number(share)
        return most

    @cached_property
    def _known(self) -> tuple[Checkpointing, ...]:
        return self.costs.family.known_checkpointing(
            self.facts,
            element_bytes=ELEMENT_BYTES[self.values["train.precision"]],
            targets=self.values["adapter.targets"],
            wide_adapter=runs_wide(build_config(self.values).adapter),
        )

    def _kinds(self, allowed: tuple[Checkpointing, ...]) -> tuple[Checkpointing, ...]:
        """On the processor there is nowhere to offload to; what only a trace could judge is not tried unasked."""
        known = self._known
        asked = allowed[0] if self.values["memory.gradient_checkpointing"] != "auto" else None
        found = (kind for kind in allowed if kind in known or kind == asked)
        if self._has_host:
            return tuple(found)
        return tuple(kind for kind in found if kind != "offloaded") or ("full",)

    def _base_precisions(self) -> tuple[BasePrecision, ...]:
        """A precision somebody chose stays: it changes the result."""
        asked, whole = self.values["memory.base_precision"], self.values["train.precision"]
        if asked != "auto":
            return (asked,)
        if self.values["memory.base_matmul"] == "int8":
            return ("int8",)
        if self.gpu is None:
            return (whole,)
        return (whole, *(kind for kind in AUTOMATIC if kind != "nf4" or self._has_bitsandbytes))

    @property
    def _has_bitsandbytes(self) -> bool:
        can = not self.gpu or not self.gpu.can.against("memory.base_precision", "nf4")
        return can and self.hardware.packages.get("bitsandbytes") is not None

    @property
    def _has_host(self) -> bool:
        """Whether something can wait for the device in other memory than its own."""
        return self.gpu is not None and self.gpu.can.own_memory

    @property
    def _here(self) -> str:
        return (
            "this run is on the processor" if self.gpu is None else "this GPU shares the machine's"
        )

    @property
    def _streamable(self) -> int:
        """What an assistant adds to a layer does not follow its weights."""
        return self._blocks if self._has_host and self.values["base.assistant"] is None else 0

    @cached_property
    def _blocks(self) -> int:
        shapes = self.costs.linear_shapes(self.facts)
        return len({name for name in map(self.costs.block_of, shapes) if name})

    def _refuse_impossible(self) -> None:
        streamed, offload = (
            self.values["memory.streamed_blocks"],
            self.values["memory.text_encoder_offload"],
        )
        if streamed not in ("auto", 0) and self.values["base.assistant"] is not None:
            raise RequestError(
                "memory.streamed_blocks and base.assistant cannot be combined: an assistant runs "
                "beside blocks that stay on the card",
                fix="leave one of them out",
            )
        if streamed not in ("auto", 0) and not self._has_host:
            raise RequestError(
                f"memory.streamed_blocks={streamed} is for a card with memory of its own, and {self._here}",
                fix="leave it out",
            )
        if streamed != "auto" and streamed > self._blocks:
            raise RequestError(
                f"memory.streamed_blocks={streamed}, and {self.facts.source} has {self._blocks} blocks",
                fix=f"use a number from 0 to {self._blocks}",
            )
        if self.values["memory.modulation_cache"] is True and self._against_modulation:
            raise RequestError(
                f"memory.modulation_cache=true, but {self._against_modulation}",
                fix="leave it out",
            )
        if offload is True and not self._has_host:
            raise RequestError(
                f"memory.text_encoder_offload is for a card with memory of its own, and {self._here}",
                fix="leave it out",
            )
        if self.values["memory.base_matmul"] == "int8":
            refuse_matmul(self.gpu)
        if self.values["memory.base_precision"] == "nf4" and not self._has_bitsandbytes:
            raise MachineError(
                "memory.base_precision=nf4 needs bitsandbytes, which is not installed",
                fix="pip install bitsandbytes, or use --set memory.base_precision=int8",
            )

    # ---- how it is judged

    @cached_property
    def limit(self) -> Limit:
        """What may be used of the device, and what says so."""
        if self.gpu is None:
            return Limit(
                bytes=self.hardware.ram_usable_bytes // self.sharing,
                reason="of memory free but for a margin",
            )
        size, reason = self.gpu.free_bytes, f"free on {self.gpu.name}"
        asked_gib = self.values["hardware.vram_limit_gib"]
        if asked_gib is not None and asked_gib * GIB < size:
            size, reason = int(asked_gib * GIB), "allowed by hardware.vram_limit_gib"
        if self.full_card is None:
            return Limit(bytes=size, reason=reason)
        usable = int(size * self.full_card.share)
        return Limit(bytes=usable, reason=f"({gib(size)} {reason}; {self.full_card})")

    @cached_property
    def _judge(self) -> Evaluator:
        return Evaluator(
            predict=lambda load: predict(
                load, facts=self.facts, costs=self.costs, limit_bytes=self.limit.bytes
            ),
            predict_host=self._predict_host,
            seconds=lambda load: self._time(load).seconds,
            price=self._price,
        )

    def _predict_host(self, load: Load) -> HostPrediction | None:
        if not self._has_host:
            return None  # everything is in the machine's memory: that is the prediction
        return predict_host(
            load,
            facts=self.facts,
            costs=self.costs,
            limit_bytes=self.hardware.ram_usable_bytes // self.sharing,
            pinnable_bytes=self._pinnable_bytes,
        )

    @property
    def _pinnable_bytes(self) -> int | None:
        """What each process of this training may pin."""
        return self.hardware.pinnable_by_each(sharing=self.sharing)

    def _time(self, load: Load) -> StepTime:
        batch_size = self._share
        work = step_work(
            load,
            facts=self.facts,
            costs=self.costs,
            batch_size=batch_size,
            pinnable_bytes=self._pinnable_bytes,
        )
        if self.gpu is None:
            return cpu_step_time(work, threads=self.values["hardware.threads"])
        found = card(self.gpu.name, total_bytes=self.gpu.total_bytes)
        return gpu_step_time(work, found, precision=load.precision)

    def _price(self, precision: BasePrecision, seconds: float) -> tuple[float, ...]:
        if self.priority in FEWER_BITS:
            return (seconds * FEWER_BITS[self.priority].get(precision, 1.0),)
        return (RANK.get(precision, 0), seconds)

    # ---- why

    def _decisions(
        self, found: SearchResult, matmul: Matmul, at_once: int, peak_bytes: int
    ) -> Iterator[Decision]:
        load, limit = found.load, self.limit
        against = f"{gib(peak_bytes)} predicted, {limit}"
        chosen = {
            "memory.base_precision": (load.base_precision, self._why_precision(found)),
            "memory.base_matmul": (load.base_matmul, matmul.reason),
            "memory.gradient_checkpointing": (load.checkpointing, self._why_recomputing(load)),
            "memory.kept_share": (load.kept_share, self._why_keeping_more(load)),
            "memory.streamed_blocks": (load.streamed_blocks, self._why_streaming(load)),
            "memory.modulation_cache": (load.modulation_cache, self._why_modulation(load)),
            "memory.micro_batch": (at_once, self._why_micro_batch(load, at_once)),
            "memory.text_encoder_offload": (load.text_offload, self._why_offload(load)),
        }
        for key, (value, why) in chosen.items():
            before = self.values[key]
            if before != value:
                asked = "" if before == "auto" else f"asked for {_said(before)}: "
                reason = f"{asked}{why or against}"
                yield Decision(key=key, value=value, reason=reason, bytes=peak_bytes)
        if found.sampling_bytes:
            reason = f"sample images would take {gib(found.sampling_bytes)}, {limit}"
            yield Decision(
                key="sampling.every_steps", value=0, reason=reason, bytes=found.sampling_bytes
            )

    def _peak(self, load: Load) -> str:
        return gib(self._judge.predict(load).peak_bytes)

    def _why_precision(self, found: SearchResult) -> str:
        load = found.load
        others = [
            f"{precision} {found.seconds[precision]:.3g} s"
            if precision in found.seconds
            else f"{precision} does not fit"
            for precision in self._choices.base_precisions
            if precision != load.base_precision
        ]
        if self.values["memory.base_matmul"] == "int8":
            return "memory.base_matmul=int8 multiplies what is kept so"
        if not others:
            return "the dtype it is computed in" if load.base_precision == load.precision else ""
        here = f"about {self._time(load).seconds:.3g} s a step"
        return f"{here}; {', '.join(others)}; {self._taste()}"

    def _taste(self) -> str:
        if self.priority not in FEWER_BITS:
            return "quality: the most precise that fits"
        return f"{self.priority}: fewer bits only where clearly faster"

    def _why_recomputing(self, load: Load) -> str:
        if load.checkpointing == "none":
            return ""
        more = [
            kind
            for kind in CHECKPOINTING[: CHECKPOINTING.index(load.checkpointing)]
            if kind in self._known
        ]
        other = replace(load, checkpointing=more[-1] if more else "none", kept_share=0.0)
        if load.streamed_blocks and not other.recomputes_all:
            return "streamed blocks have to be recomputed"
        return f"{other.checkpointing} would take {self._peak(other)}, {self.limit}"

    def _why_keeping_more(self, load: Load) -> str:
        if load.checkpointing not in MIXABLE:
            return f"{load.checkpointing} has no blocks that could keep more"
        mixture = ""
        if load.kept_share:
            mixture = f"as much as {before(load.checkpointing)} would be kept of these blocks; "
        return f"{mixture}a step takes {self._longer(load)} longer than without recomputing"

    def _longer(self, load: Load) -> str:
        """Say how much of a step's time recomputing is."""
        plain = replace(load, checkpointing="none", kept_share=0.0, streamed_blocks=0)
        everything = replace(plain, checkpointing="full")
        seconds = self._time(plain).seconds
        share, most = (self._time(each).seconds / seconds - 1 for each in (load, everything))
        return f"{share:.0%}" if load == everything else f"{share:.0%} (full: {most:.0%})"

    def _why_streaming(self, load: Load) -> str:
        if not load.streamed_blocks:
            return "all blocks fit on the device" if self._has_host else self._here
        whole = self._peak(replace(load, streamed_blocks=0))
        return f"of {self._blocks}: all on the card would take {whole}, {self.limit}"

    def _why_modulation(self, load: Load) -> str:
        if not load.modulation_cache:
            if not self._has_host:
                return f"it would save nothing: {self._here}"
            return self._against_modulation or "all layers fit on the device, which is as fast"
        other = replace(load, modulation_cache=False)
        here, there = (self._time(each).seconds for each in (load, other))
        return (
            f"about {here:.3g} s a step in {self._peak(load)}; without, {there:.3g} s and "
            f"{self._peak(other)}, {self.limit}"
        )

    def _why_micro_batch(self, load: Load, at_once: int) -> str:
        if at_once == self._share:
            return ""
        more = self._peak(replace(load, micro_batch=load.micro_batch + 1))
        width_px, height_px = load.bucket_px
        return (
            f"{load.micro_batch + 1} of {width_px}x{height_px} px would take {more}, {self.limit}"
        )

    def _why_offload(self, load: Load) -> str:
        if not load.text_offload:
            return "they fit on the device alone" if self._has_host else self._here
        whole = self._judge.predict(replace(load, text_offload=False)).phases["texts"]
        return f"whole they would take {gib(whole)}, {self.limit}"


def _number(share: Any) -> float:
    return 0.0 if share == "auto" else float(share)


def _said(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
