"""The shipped cost table against fresh traces of true-size networks, and what is not in it."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from diffusers import Flux2Transformer2DModel, UNet2DConditionModel

from lora_trainer import families
from lora_trainer.costs.base_costs import BaseCosts
from lora_trainer.costs.sample_cost import Workload
from lora_trainer.families.base.family import Family
from tests.fakes.family_bases import facts_of

WORKLOAD = Workload(
    height_px=1024,
    width_px=1024,
    element_bytes=2,
    rank=16,
    targets="transformer",
    checkpointing="full",
)
SMALLEST = "black-forest-labs/FLUX.2-klein-base-4B"
UNPADDED = "Tongyi-MAI/Z-Image"
BASES: Mapping[str, Family] = {
    source: family
    for family in map(families.family, families.NAMES)
    for source, facts in family.releases.items()
    # Of the releases of one architecture the first.
    if source
    == next(
        key
        for key, each in family.releases.items()
        if each.release.architecture == facts.release.architecture
    )
}
SD15 = next(iter(families.family("sd15").releases))


def base(source: str, **changes: Any) -> BaseCosts:
    """Return the costs of a release, or of one whose facts differ."""
    facts = BASES[source].releases[source]
    return BaseCosts(family=BASES[source], facts=replace(facts, **changes))


def peak(cost: Any) -> Any:
    return cost.saved_bytes + cost.temporary_bytes


# ---- known architectures


PLAN = """
import sys
from lora_trainer import families
from lora_trainer.costs.base_costs import BaseCosts
from lora_trainer.costs.sample_cost import Workload
for source in sys.argv[1:]:
    facts = families.known_base(source)
    costs = BaseCosts(family=families.family(facts.family), facts=facts)
    for element_bytes in (2, 4):
        for targets in ("attention", "transformer", "all"):
            plain = dict(element_bytes=element_bytes, targets=targets)
            for level in costs.known_checkpointing(wide_adapter=False, **plain):
                costs.sample_cost(
                    Workload(height_px=768, width_px=1344, rank=32, checkpointing=level, **plain)
                )
            costs.adapter_shapes(targets)
sys.exit("torch" in sys.modules)
"""


def test_the_table_needs_no_torch() -> None:
    command = [sys.executable, "-c", PLAN, *BASES]
    assert subprocess.run(command, check=False, timeout=20).returncode == 0


@pytest.mark.parametrize(
    ("source", "changes"),
    [
        (SMALLEST, {"height_px": 640, "width_px": 416, "checkpointing": "none", "micro_batch": 3}),
        (SMALLEST, {"height_px": 896, "width_px": 640, "rank": 4, "targets": "attention"}),
        (UNPADDED, {"height_px": 832, "width_px": 832, "checkpointing": "offloaded"}),
        (UNPADDED, {"height_px": 768, "width_px": 512, "micro_batch": 4}),
        (SD15, {"height_px": 832, "width_px": 640, "checkpointing": "selective"}),
        (SD15, {"height_px": 384, "width_px": 320, "wide_adapter": True, "targets": "all"}),
        (SD15, {"height_px": 512, "width_px": 512, "element_bytes": 4, "micro_batch": 3}),
        (SD15, {"height_px": 640, "width_px": 512, "chunks": 2}),
    ],
)
def test_the_table_agrees_with_a_fresh_trace_of_the_true_size(
    source: str, changes: Mapping[str, Any]
) -> None:
    """Bytes and FLOPs within 3 %, between the sizes, ranks, batches and texts that were traced."""
    chunks, changes = changes.get("chunks", 1), {**changes}
    changes.pop("chunks", None)
    costs, workload = base(source, chunks=chunks), replace(WORKLOAD, **changes)
    found, fresh = costs.sample_cost(workload), costs.traced(workload)
    assert peak(found) == pytest.approx(peak(fresh), rel=0.03)
    rest = dict.fromkeys(("forward_flops", "step_flops", "host_bytes"), 0.01) | {"kernels": 0.02}
    sizes = dict.fromkeys(("saved_bytes", "adapter_saved_bytes", "forward_bytes"), 0.03)
    for name, rel in (sizes | rest).items():
        assert getattr(found, name) == pytest.approx(getattr(fresh, name), rel=rel), name


@pytest.mark.parametrize("family", ["flux3", "qwen", "qwen21"])
@pytest.mark.parametrize("side_px", [512, 1024])
def test_a_pass_without_gradients_takes_what_its_references_do(family: str, side_px: int) -> None:
    """Of one, two and as many references as are read, within 5 %; its peak lies in a block, so few are traced."""
    known = families.family(family)
    facts = next(
        each for each in known.releases.values() if each.references and each.references.most > 2
    ).for_references()
    assert facts.references is not None
    whole = facts.release.architecture
    few = {key: min(count, 2) for key, count in whole.items() if re.fullmatch("num.*layers", key)}
    release = replace(facts.release, architecture={**whole, **few})
    traced = BaseCosts(family=known, facts=replace(facts, release=release)).traced
    tabled = BaseCosts(family=known, facts=facts).sample_cost
    for count in (1, 2, min(4, facts.references.most)):
        sizes = ((side_px, side_px),) * count
        workload = replace(
            WORKLOAD, height_px=side_px, width_px=side_px, checkpointing="none", references_px=sizes
        )
        fresh = traced(workload).forward_bytes
        assert tabled(workload).forward_bytes == pytest.approx(fresh, rel=0.05), count


# ---- what makes an architecture the same


def is_known(**changes: Any) -> bool:
    """Return whether the table has the smallest release with changes; it has few levels of wide adapters."""
    release = replace(BASES[SMALLEST].releases[SMALLEST].release, **changes)
    costs = base(SMALLEST, release=release)
    plain: Any = {"element_bytes": 2, "targets": "transformer", "wide_adapter": True}
    return costs.known_checkpointing(**plain) == ("none", "full")


def test_defaults_may_be_left_out_or_written_and_another_network_is_not_taken_for_it() -> None:
    facts = base(SMALLEST).facts
    parameters = inspect.signature(Flux2Transformer2DModel.__init__).parameters
    defaults = {name: each.default for name, each in parameters.items() if name != "self"}
    written = {**defaults, **facts.release.architecture, "_diffusers_version": "0.30.0"}
    left_out = {key: value for key, value in written.items() if defaults.get(key, ...) != value}
    assert len(left_out) < len(facts.release.architecture) < len(written)
    for architecture in (written, left_out):
        assert is_known(architecture=architecture)
    for changes in ({"num_layers": 6}, {"a_key_of_a_later_version": 1}, {"guidance_embeds": True}):
        assert not is_known(architecture={**facts.release.architecture, **changes})
    assert not is_known(max_tokens=facts.release.max_tokens - 1)
    parameters = inspect.signature(UNet2DConditionModel.__init__).parameters
    defaults = json.loads(
        (Path(families.__file__).parent / "base" / "unet_defaults.json").read_text()
    )
    assert defaults == json.loads(json.dumps({key: parameters[key].default for key in defaults}))


# ---- unknown architectures


def test_an_unknown_architecture_is_traced_once_on_a_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = facts_of("flux2")
    workload = replace(WORKLOAD, height_px=128, width_px=144, element_bytes=4)

    def costs() -> BaseCosts:
        return BaseCosts(family=families.family("flux2"), facts=facts)

    first = costs().sample_cost(workload)
    assert costs().conditioning_bytes == 4 * facts.release.max_tokens * int(
        facts.release.architecture["joint_attention_dim"]
    )
    more = costs().sample_cost(replace(workload, rank=32))
    assert more.saved_bytes > first.saved_bytes * 0.99
    shapes = costs().adapter_shapes("all")
    monkeypatch.setattr("lora_trainer.costs.trace.traced_network", None)
    monkeypatch.setattr(type(families.family("flux2")), "empty_denoiser", None)
    assert costs().sample_cost(workload) == first, "it is remembered"
    assert costs().adapter_shapes("all") == shapes
