"""The shipped cost table against fresh traces of true-size networks, and what is not in it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_trainer import families
from lora_trainer.config.declare import CHECKPOINTING, TARGETS
from lora_trainer.costs import cost_table
from lora_trainer.costs.cost_table import (
    FILE,
    Grid,
    adapter_shapes,
    bytes_at,
    case_of,
    entry,
    flops_at,
    known_checkpointing,
    linear_shapes,
    sample_cost,
    traced,
    traced_cost,
)
from lora_trainer.costs.sample_cost import SampleCost, Workload
from lora_trainer.families.base import BaseFacts, Family
from lora_trainer.families.flow import FlowFamily
from tests.fakes.family_bases import denoiser_of, facts_of

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
RELEASES: Mapping[str, FlowFamily] = {
    source: family
    for family in map(families.family, families.MODULES)
    if isinstance(family, FlowFamily)
    for release in family.published
    for source in release.ids
}
SDXL = "stabilityai/stable-diffusion-xl-base-1.0"
U_NETS: Mapping[str, Family] = {
    next(iter(family.releases)): family for family in map(families.family, ("sd15", "sd2", "sdxl"))
}
SD15 = next(iter(U_NETS))
BASES: Mapping[str, Family] = {**U_NETS, **RELEASES}


def facts_by_name(source: str) -> BaseFacts:
    facts = BASES[source].releases.get(source)
    assert facts is not None
    return facts


def cost(source: str, **changes: Any) -> SampleCost:
    return sample_cost(BASES[source], facts_by_name(source), replace(WORKLOAD, **changes))


def peak(cost: SampleCost) -> int:
    return cost.saved_bytes + cost.temporary_bytes


# ---- known architectures


@pytest.mark.parametrize("source", RELEASES)
def test_every_public_release_is_in_the_table(source: str) -> None:
    found = cost(source)
    assert traced.cache_info().currsize == traced.cache_info().misses  # nothing is evicted here
    assert 2**28 < found.saved_bytes < peak(found) < 2**33
    assert 5e12 < found.forward_flops < found.step_flops / 3 < 2e14
    assert found.forward_bytes < peak(found)


PLAN = """
import sys
from lora_trainer import families
from lora_trainer.costs.cost_table import adapter_shapes, known_checkpointing, sample_cost
from lora_trainer.costs.sample_cost import Workload
for source in sys.argv[1:]:
    facts = families.known_base(source)
    family = families.family(facts.family)
    for element_bytes in (2, 4):
        for targets in ("attention", "transformer", "all"):
            for level in known_checkpointing(
                family, facts, element_bytes=element_bytes, targets=targets, wide_adapter=False
            ):
                sample_cost(family, facts, Workload(height_px=768, width_px=1344, rank=32,
                    element_bytes=element_bytes, targets=targets, checkpointing=level))
            adapter_shapes(family, facts, targets=targets)
sys.exit("torch" in sys.modules)
"""


def test_the_table_needs_no_torch() -> None:
    command = [sys.executable, "-c", PLAN, *BASES]
    assert subprocess.run(command, check=False, timeout=20).returncode == 0


@pytest.mark.parametrize(
    ("source", "changes"),
    [
        (SMALLEST, {"height_px": 1248, "width_px": 832, "rank": 24}),
        (SMALLEST, {"height_px": 640, "width_px": 416, "checkpointing": "none", "micro_batch": 3}),
        (UNPADDED, {"height_px": 576, "width_px": 960, "checkpointing": "selective"}),
        (UNPADDED, {"height_px": 832, "width_px": 832, "checkpointing": "offloaded"}),
        (SMALLEST, {"height_px": 896, "width_px": 640, "rank": 4, "targets": "attention"}),
        (SMALLEST, {"height_px": 704, "width_px": 704, "rank": 64, "targets": "all"}),
        (UNPADDED, {"height_px": 768, "width_px": 512, "text_tokens": 100, "micro_batch": 4}),
        *(
            (SD15, {"height_px": 832, "width_px": 640, "checkpointing": level})
            for level in CHECKPOINTING
        ),
        (SD15, {"height_px": 384, "width_px": 320, "wide_adapter": True, "targets": "all"}),
        (SD15, {"height_px": 512, "width_px": 512, "element_bytes": 4, "micro_batch": 3}),
        (SDXL, {"height_px": 832, "width_px": 640, "micro_batch": 2}),
    ],
)
def test_the_table_agrees_with_a_fresh_trace_of_the_true_size(
    source: str, changes: Mapping[str, Any]
) -> None:
    """Bytes and FLOPs within 3 %, between the sizes, ranks, batches and texts that were traced."""
    workload = replace(WORKLOAD, **changes)
    fresh = traced_cost(BASES[source], facts_by_name(source), workload)
    found = cost(source, **changes)
    assert found.saved_bytes == pytest.approx(fresh.saved_bytes, rel=0.03)
    assert found.adapter_saved_bytes == pytest.approx(fresh.adapter_saved_bytes, rel=0.03)
    assert peak(found) == pytest.approx(peak(fresh), rel=0.03)
    assert found.forward_bytes == pytest.approx(fresh.forward_bytes, rel=0.03)
    assert found.forward_flops == pytest.approx(fresh.forward_flops, rel=0.01)
    assert found.step_flops == pytest.approx(fresh.step_flops, rel=0.01)
    assert found.host_bytes == pytest.approx(fresh.host_bytes, rel=0.01)
    assert found.kernels == pytest.approx(fresh.kernels, rel=0.02)


@pytest.mark.parametrize("source", RELEASES)
def test_costs_grow_with_size_rank_and_text(source: str) -> None:
    least = cost(source, height_px=512, width_px=512, rank=4, checkpointing="none")
    for change in ({"height_px": 576}, {"rank": 8}):  # middles of ranks are made again
        more = cost(
            source, **{"height_px": 512, "width_px": 512, "rank": 4} | change, checkpointing="none"
        )
        assert least.saved_bytes <= more.saved_bytes and least.step_flops < more.step_flops


def known_kinds(source: str) -> tuple[Any, ...]:
    return known_checkpointing(
        RELEASES[source],
        facts_by_name(source),
        element_bytes=WORKLOAD.element_bytes,
        targets=WORKLOAD.targets,
        wide_adapter=False,
    )


@pytest.mark.parametrize("source", RELEASES)
def test_recomputing_trades_bytes_for_work(source: str) -> None:
    assert {"none", "full"} <= set(known_kinds(source))
    none, full = (cost(source, checkpointing=kind) for kind in ("none", "full"))
    assert peak(full) < peak(none) / 5
    assert none.step_flops < full.step_flops
    assert none.host_bytes == full.host_bytes == 0


def test_a_kind_that_is_not_in_the_table_is_not_called_known() -> None:
    facts = facts_by_name(UNPADDED)
    table = json.loads(FILE.read_text(encoding="utf-8"))[facts.family]["releases"][0]["costs"]
    for size, wide in ((2, False), (4, False), (2, True)):
        found = known_checkpointing(
            RELEASES[UNPADDED], facts, element_bytes=size, targets="transformer", wide_adapter=wide
        )
        traces = table[entry(size, wide=wide)]["transformer"]
        assert found == tuple(kind for kind in CHECKPOINTING if kind in traces)


@pytest.mark.parametrize("source", RELEASES)
def test_a_wide_adapter_is_in_the_table_and_keeps_copies(source: str) -> None:
    before = traced.cache_info().misses
    plain, wide = (cost(source, checkpointing="none", wide_adapter=wide) for wide in (False, True))
    assert wide.saved_bytes > plain.saved_bytes and peak(wide) > peak(plain)
    assert wide.adapter_saved_bytes > wide.saved_bytes / 5 > plain.adapter_saved_bytes
    assert traced.cache_info().misses == before


@pytest.mark.parametrize("source", RELEASES)
def test_each_kind_of_checkpointing_trades_bytes_for_work(source: str) -> None:
    kinds = {kind: cost(source, checkpointing=kind) for kind in CHECKPOINTING}
    none, light, selective, full, offloaded = kinds.values()
    saved = [each.saved_bytes for each in kinds.values()]
    assert saved == sorted(saved, reverse=True)
    # Nearly all arithmetic is in products, of which selective makes those again that are cheap to hold.
    assert light.step_flops < none.step_flops + 0.02 * none.forward_flops
    assert full.step_flops > none.step_flops + 0.95 * none.forward_flops
    assert selective.saved_bytes < 0.45 * none.saved_bytes
    # Two blocks keep their inputs on the device, of at least twenty-odd.
    assert offloaded.saved_bytes < full.saved_bytes / 3
    assert offloaded.saved_bytes + offloaded.host_bytes == pytest.approx(full.saved_bytes, rel=0.2)
    assert none.step_flops < selective.step_flops < full.step_flops == offloaded.step_flops
    assert none.kernels < selective.kernels < full.kernels == offloaded.kernels
    assert none.host_bytes == selective.host_bytes == full.host_bytes == 0
    assert len({kind.forward_flops for kind in kinds.values()}) == 1


def test_text_counts_where_its_length_varies() -> None:
    short, long = cost(UNPADDED, text_tokens=64), cost(UNPADDED)
    assert short.saved_bytes < long.saved_bytes
    assert short.step_flops < long.step_flops
    assert cost(UNPADDED, text_tokens=512) == cost(UNPADDED, text_tokens=9999) == long
    assert short.conditioning_bytes == 64 * (2560 * 4 + 8)
    assert cost(SMALLEST, text_tokens=64) == cost(SMALLEST)


@pytest.mark.parametrize("source", BASES)
def test_modules_of_the_table_are_those_of_the_network(source: str) -> None:
    family, facts = BASES[source], facts_by_name(source)
    for targets in TARGETS:
        built = cost_table.built_shapes(case_of(family, facts), targets)
        found = adapter_shapes(family, facts, targets=targets)
        assert list(found) == list(built)
        assert [shape[:2] for shape in found.values()] == [shape[:2] for shape in built.values()]
    linear = linear_shapes(family, facts)
    with torch.device("meta"):
        network = family.empty_denoiser(facts.architecture)
    assert linear and all(
        isinstance(network.get_submodule(name), torch.nn.Linear) for name in linear
    )


def test_chunks_of_a_prompt_cost_what_a_trace_says() -> None:
    family, facts = BASES[SD15], replace(facts_by_name(SD15), chunks=2)
    workload = replace(WORKLOAD, height_px=512, width_px=512, checkpointing="none")
    found, fresh = sample_cost(family, facts, workload), traced_cost(family, facts, workload)
    assert found.saved_bytes == pytest.approx(fresh.saved_bytes, rel=0.001)
    assert found.step_flops == pytest.approx(fresh.step_flops, rel=0.001)
    assert found.saved_bytes > sample_cost(family, facts_by_name(SD15), workload).saved_bytes
    assert found.conditioning_bytes == (77 + 75) * 768 * 4


def test_the_table_is_small() -> None:
    """It is read by every plan."""
    assert FILE.stat().st_size < 400_000


# ---- what makes an architecture the same


def test_defaults_may_be_left_out_or_written() -> None:
    facts = facts_by_name(SMALLEST)
    defaults = json.loads(FILE.read_text(encoding="utf-8"))[facts.family]["defaults"]
    written = {**defaults, **facts.architecture, "_diffusers_version": "0.30.0"}
    left_out = {key: value for key, value in written.items() if defaults.get(key, ...) != value}
    assert len(left_out) < len(facts.architecture) < len(written)
    for architecture in (written, left_out):
        assert cost_table._release(replace(facts, architecture=architecture)) is not None


@pytest.mark.parametrize(
    "changes", [{"num_layers": 6}, {"a_key_of_a_later_version": 1}, {"guidance_embeds": True}]
)
def test_another_network_is_not_taken_for_a_known_one(changes: Mapping[str, Any]) -> None:
    facts = facts_by_name(SMALLEST)
    assert cost_table._release(facts) is not None
    changed = replace(facts, architecture={**facts.architecture, **changes})
    assert cost_table._release(changed) is None
    assert cost_table._release(replace(facts, max_tokens=facts.max_tokens - 1)) is None


# ---- unknown architectures


def test_an_unknown_architecture_is_traced_once() -> None:
    facts = facts_of("flux2")
    family = families.family("flux2")
    assert isinstance(family, FlowFamily)
    workload = replace(WORKLOAD, height_px=128, width_px=128, element_bytes=4)
    first = sample_cost(family, facts, workload)
    misses = traced.cache_info().misses
    assert sample_cost(family, facts, workload) == first
    assert traced.cache_info().misses == misses
    assert (
        sample_cost(family, facts, replace(workload, rank=32)).saved_bytes
        > first.saved_bytes * 0.99
    )
    assert traced.cache_info().misses == misses + 1
    width = int(facts.architecture["joint_attention_dim"])
    assert first.conditioning_bytes == 4 * facts.max_tokens * width


def test_modules_of_an_unknown_architecture_are_read_off_the_network() -> None:
    family, network = families.family("flux2"), denoiser_of("flux2")
    shapes = adapter_shapes(family, facts_of("flux2"), targets="all")
    assert list(shapes) == family.lora_targets(network, "all")
    for name, (fan_in, out) in shapes.items():
        layer = network.get_submodule(name)
        assert isinstance(layer, torch.nn.Linear)
        assert (fan_in, out) == (layer.in_features, layer.out_features)


# ---- the curves

MAX_TOKENS = 512
GRID = Grid(sides_px=(512, 768, 1024), text_tokens=(MAX_TOKENS, 64))


def values(function: Any) -> list[float]:
    """Return a quantity at all points: a function of area, rank, copies and text tokens."""
    return [
        function(
            point.side_px**2,
            point.rank,
            float(point.micro_batch > 1),
            point.text_tokens,
        )
        for point in GRID.points
    ]


def test_points_begin_with_the_sizes_and_change_one_thing_each() -> None:
    assert [point.side_px for point in GRID.points] == [512, 768, 1024] + [512, 1024] * 3
    assert [(p.rank, p.micro_batch, p.text_tokens) for p in GRID.points[3::2]] == [
        (64, 1, 512),
        (4, 2, 512),
        (4, 1, 64),
    ]


@settings(max_examples=50)
@given(
    height=st.integers(16, 96),
    width=st.integers(16, 96),
    rank=st.integers(1, 128),
    micro_batch=st.integers(1, 8),
    text_tokens=st.integers(1, 600) | st.none(),
)
def test_what_is_linear_is_met_exactly(
    height: int, width: int, rank: int, micro_batch: int, text_tokens: int | None
) -> None:
    def linear(area: float, rank: float, copied: float, tokens: float) -> float:
        return 7 + 3e-2 * area + rank * (2 + 1e-3 * area) + copied * (5 + 1e-4 * area) + 11 * tokens

    def quadratic(area: float, rank: float, copied: float, tokens: float) -> float:
        return linear(area, rank, copied, tokens) + 2e-6 * area**2

    workload = replace(
        WORKLOAD,
        height_px=16 * height,
        width_px=16 * width,
        rank=rank,
        micro_batch=micro_batch,
        text_tokens=text_tokens,
    )
    at = (
        256.0 * height * width,
        rank,
        float(micro_batch > 1),
        MAX_TOKENS if text_tokens is None else min(text_tokens, MAX_TOKENS),
    )
    text_tokens = int(at[3])
    found = bytes_at(values(linear), workload, grid=GRID, text_tokens=text_tokens)
    assert found == pytest.approx(linear(*at))
    found = flops_at(values(quadratic), workload, grid=GRID, text_tokens=text_tokens)
    assert found == pytest.approx(quadratic(*at))


def test_a_peak_is_never_underestimated_between_sizes() -> None:
    def peaks(area: float, rank: float, copied: float, tokens: float) -> float:
        return max(1000.0, 2e-3 * area, 5e-3 * area - 1500)

    for side in range(512, 1025, 16):
        workload = replace(WORKLOAD, height_px=side, width_px=side, rank=4)
        found = bytes_at(values(peaks), workload, grid=GRID, text_tokens=MAX_TOKENS)
        assert found >= peaks(side**2, 4, 0, 0) - 1e-9


def test_texts_of_one_length_have_no_points_for_another() -> None:
    padded = replace(GRID, text_tokens=(MAX_TOKENS, 0))
    assert len(padded.points) == 7
    areas = [float(point.side_px**2) for point in padded.points]
    assert bytes_at(areas, WORKLOAD, grid=padded, text_tokens=1) == 1024 * 1024
