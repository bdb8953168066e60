"""Compares predicted costs of every public release with traces of its true-size network.

`python scripts/check_costs.py [FAMILY ...]` prints the largest deviation of each release as a table in
Markdown, for docs/memory.md. Takes a few minutes a release; nothing is
loaded.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from lora_trainer import families
from lora_trainer.config.declare import CHECKPOINTING
from lora_trainer.costs.base_costs import BaseCosts
from lora_trainer.costs.sample_cost import SampleCost, Workload
from lora_trainer.families.base.facts import BaseFacts
from lora_trainer.families.base.family import Family
from lora_trainer.families.base.flow import FlowFamily

SIZES_PX = ((640, 384), (704, 704), (896, 640), (1024, 1024), (1344, 768))
MICRO_BATCHES = (1, 4)
USUAL = Workload(
    height_px=1024,
    width_px=1024,
    element_bytes=2,
    rank=16,
    targets="transformer",
    checkpointing="none",
)
OTHERS = (
    replace(USUAL, rank=64),
    replace(USUAL, rank=64, targets="all", height_px=768, width_px=1344),
    replace(USUAL, targets="attention", checkpointing="full", height_px=704, width_px=704),
    replace(USUAL, element_bytes=4, checkpointing="full", height_px=896, width_px=640),
)
Quantity = Callable[[SampleCost], int]
QUANTITIES: dict[str, Quantity] = {
    "saved": lambda cost: cost.saved_bytes,
    "peak": lambda cost: cost.saved_bytes + cost.temporary_bytes,
    "forward": lambda cost: cost.forward_bytes,
    "host": lambda cost: cost.host_bytes,
    "step FLOPs": lambda cost: cost.step_flops,
}


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """Predicted over traced, less 1, of one quantity of one workload."""

    share: float
    workload: Workload

    def __str__(self) -> str:
        load = self.workload
        size = f"{load.width_px}x{load.height_px}"
        return f"{self.share:+.1%} ({size} px, {load.checkpointing}, {load.micro_batch})"


def main() -> None:
    """Print the table."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("family", nargs="*", default=list(families.NAMES))
    print(f"| release | traces | {' | '.join(QUANTITIES)} |")
    print("|---|" + "---|" * (len(QUANTITIES) + 1))
    for name in arguments.parse_args().family:
        family = families.family(name)
        for facts in releases(family):
            found = deviations(family, facts)
            worst = [str(found[quantity]) if quantity in found else "-" for quantity in QUANTITIES]
            count = len(list(workloads(facts)))
            print(f"| {facts.source} | {count} | {' | '.join(worst)} |", flush=True)


def releases(family: Family) -> Iterator[BaseFacts]:
    """Yield one release of each architecture."""
    seen = []
    ids = [next(iter(family.releases))]
    if isinstance(family, FlowFamily):
        ids += [name for release in family.published for name in release.ids]
    for facts in map(family.releases.__getitem__, ids):
        if facts.release.architecture not in seen:
            seen.append(facts.release.architecture)
            yield facts


def workloads(facts: BaseFacts) -> Iterator[Workload]:
    """Yield all sizes, micro-batches and kinds of checkpointing, and a few other settings."""
    for (width_px, height_px), micro_batch, kind in itertools.product(
        SIZES_PX, MICRO_BATCHES, CHECKPOINTING
    ):
        yield replace(
            USUAL,
            width_px=width_px,
            height_px=height_px,
            micro_batch=micro_batch,
            checkpointing=kind,
        )
    yield from OTHERS


def deviations(family: Family, facts: BaseFacts) -> dict[str, Deviation]:
    """Return the largest deviation of each quantity."""
    worst: dict[str, Deviation] = {}
    costs = BaseCosts(family=family, facts=facts)
    for workload in workloads(facts):
        predicted, fresh = costs.sample_cost(workload), costs.traced(workload)
        for name, quantity in QUANTITIES.items():
            if not (truth := quantity(fresh)):
                assert not quantity(predicted)
                continue
            found = Deviation(share=quantity(predicted) / truth - 1, workload=workload)
            if name not in worst or abs(found.share) > abs(worst[name].share):
                worst[name] = found
    return worst


if __name__ == "__main__":
    main()
