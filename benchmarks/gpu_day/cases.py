"""What is measured in which slice, most valuable first. No torch: the command itself does not import it.

Sizes are NAME:PX:BATCH:DTYPE of `random_bases.py`; with `--tiny` those of `mid_size_base.py`, which a
processor computes in a moment. A case is the unit that is done or not; its seconds are an estimate for
a fast GPU, without compiling anything for the first time where that is not what it is about.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lora_trainer.config.declare import Checkpointing

REFERENCE = "as it is"
"""All weights on the device, nothing recomputed, adapters fused with their layers, kernels one by one."""
Promise = Literal["bits", "bound"]


@dataclass(frozen=True, kw_only=True)
class Way:
    """One way to compute the same training.

    promise: the same bits as the way it is held `against`, where torch computes deterministically, or the
    same but for rounding: losses within `loss_bound` of them, updates of the adapter within `update_bound`
    of their length, both with a base in 16 bits. streamed: the share of the blocks whose weights lie in
    host memory; `beside`: copied beside the computation. base: how frozen weights are kept.
    """

    promise: Promise = "bits"
    against: str = REFERENCE
    loss_bound: float = 0.02
    update_bound: float = 0.05
    checkpointing: Checkpointing = "none"
    streamed: float = 0.0
    beside: bool = True
    adapter: Literal["fused", "peft"] = "fused"
    compiled: bool = False
    base: Literal["whole", "int8"] = "whole"


WAYS: Mapping[str, Way] = {
    REFERENCE: Way(),
    "the same again": Way(),
    "light": Way(checkpointing="light"),
    "selective": Way(checkpointing="selective"),
    "full": Way(checkpointing="full"),
    "offloaded": Way(checkpointing="offloaded"),
    "full, half streamed": Way(checkpointing="full", streamed=0.5),
    "full, streamed": Way(checkpointing="full", streamed=1.0),
    "full, streamed in turn": Way(checkpointing="full", streamed=1.0, beside=False),
    "peft's adapters": Way(promise="bound", adapter="peft"),
    "compiled": Way(promise="bound", compiled=True),
    # Random networks magnify what 8 bits round more than trained ones.
    "int8": Way(
        promise="bound",
        checkpointing="full",
        base="int8",
        against="full",
        loss_bound=0.05,
        update_bound=0.25,
    ),
    "int8, compiled": Way(
        promise="bound", checkpointing="full", base="int8", compiled=True, against="int8"
    ),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measurement of a slice; `values` are what its module is called with.

    `later`: once the other cases of all slices are done. `needs_gpu` is why a processor cannot do it.
    """

    name: str
    values: Mapping[str, Any]
    seconds: float
    later: bool = False
    needs_gpu: str = ""


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Cases that `measure` of a module here does in a process of their own, with these variables set."""

    name: str
    module: str
    title: str
    cases: Sequence[Case]
    tiny: Sequence[Case]
    environment: Mapping[str, str] = field(default_factory=dict)

    def of(self, *, tiny: bool) -> Sequence[Case]:
        """Return the cases of a size."""
        return self.tiny if tiny else self.cases


DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Read when CUDA starts; cuBLAS is deterministic with it alone."""


def _ways(
    sizes: Sequence[str],
    names: Sequence[str],
    *,
    seconds: float,
    after: int = 1,
) -> Iterator[Case]:
    """Yield a case for each size and way; those of sizes after the first few come later."""
    for number, size in enumerate(sizes):
        for name in names:
            way = WAYS[name]
            yield Case(
                name=f"{size} {name}",
                values={"size": size, "way": name},
                seconds=seconds + (60.0 if way.compiled else 0.0),
                later=number >= after,
            )


EXACT = [name for name, way in WAYS.items() if way.promise == "bits" and name != REFERENCE]


def _capped(base: str, gib: int, *, later: bool = False, steps: int = 12) -> Case:
    values = {"base": base, "gib": gib, "steps": steps}
    return Case(name=f"{base} {gib} GiB", values=values, seconds=60.0, later=later)


LADDER: Mapping[str, float] = {
    "sdxl:1024:1:bf16": 110.0,
    "sd15:512:1:bf16": 90.0,
    "zimage:512:1:bf16": 110.0,
    "sdxl:1024:4:bf16": 150.0,
    "zimage:1024:1:bf16": 150.0,
    "sd15:512:4:bf16": 90.0,
    "zimage:512:4:bf16": 150.0,
    "zimage:1024:4:bf16:full": 200.0,
}
"""Sizes of the step ladder and their seconds; the last would not fit a GPU of 80 GB without recomputing."""
LADDER_FIRST = 3
NCCL = "NCCL joins GPUs; processes on a processor are joined by gloo"
PAIR = (
    Case(name="gloo", values={"backend": "gloo"}, seconds=90.0),
    Case(name="nccl", values={"backend": "nccl"}, seconds=40.0, later=True, needs_gpu=NCCL),
)
SLICES: Sequence[Slice] = (
    Slice(
        name="bits",
        module="ways",
        title="the same training computed in other ways: bits, steps, memory",
        cases=[
            *_ways(
                ("sdxl:1024:1:bf16", "zimage:512:1:bf16", "sd15:512:1:bf16"),
                [*EXACT, "peft's adapters", "compiled"],
                seconds=8.0,
            ),
            *_ways(
                ("zimage:1024:1:bf16", "sdxl:1024:1:bf16"), ("int8", "int8, compiled"), seconds=12.0
            ),
        ],
        tiny=[
            *_ways(("sd15:64:2:fp32",), [*EXACT, "peft's adapters", "compiled"], seconds=0),
            *_ways(("zimage:64:2:bf16",), ["full, streamed", "peft's adapters", "int8"], seconds=0),
        ],
        environment=DETERMINISTIC,
    ),
    Slice(
        name="capped",
        module="capped",
        title="predicted and measured memory of whole trainings at capped sizes",
        cases=[
            *(_capped("sdxl", gib) for gib in (8, 12)),
            *(_capped("zimage", gib) for gib in (8, 12)),
            _capped("sd15", 6),
            *(_capped("sdxl", gib, later=True) for gib in (6, 24, 16)),
            *(_capped("zimage", gib, later=True) for gib in (16, 24)),
            _capped("sd15", 8, later=True),
        ],
        tiny=[_capped("sd15", 8, steps=4)],
    ),
    Slice(
        name="ladder",
        module="ladder",
        title="a step: bare, the way of other trainers, ours, compiled",
        cases=[
            Case(name=size, values={"size": size}, seconds=seconds, later=number >= LADDER_FIRST)
            for number, (size, seconds) in enumerate(LADDER.items())
        ],
        tiny=[Case(name="sd15:64:1:bf16", values={"size": "sd15:64:1:bf16"}, seconds=0)],
    ),
    Slice(
        name="pair",
        module="pair",
        title="two processes on one device against one process",
        cases=PAIR,
        tiny=[
            Case(name=case.name, values=case.values, seconds=0, needs_gpu=case.needs_gpu)
            for case in PAIR
        ],
        environment=DETERMINISTIC,
    ),
)
"""In the order they are done."""
