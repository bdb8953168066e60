"""What a step allocates, traced: the same bytes as the tracer counts, in an order that a run has too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from lora_trainer.costs.trace import TracedNetwork
from lora_trainer.families import family, known_base
from lora_trainer.planning.loads import RememberedCosts
from lora_trainer.planning.memory import predict
from scripts.replay.allocations import Passes, PassShape, Stays, built, passes, stays
from scripts.replay.caching_allocator import CachingAllocator, Event, Replay, highest_sum
from tests.fakes.plans import LOAD as TRAINED

SD15 = known_base("stable-diffusion-v1-5/stable-diffusion-v1-5")
LOAD = replace(TRAINED, bucket_px=(256, 256), samples=True, sample_side_px=256)
SHAPES = [PassShape(width_px=256, height_px=256), PassShape(width_px=320, height_px=192)]


def prompt(text_tokens: int | None) -> Mapping[str, tuple[int, ...]]:
    assert SD15 is not None
    return family("sd15").prompt_shapes(SD15.architecture, text_tokens=SD15.max_tokens)


@pytest.fixture(scope="module")
def network() -> TracedNetwork:
    assert SD15 is not None
    return built(LOAD, family=family("sd15"), facts=SD15, prompt=prompt)


@pytest.fixture(scope="module")
def traced(network: TracedNetwork) -> Passes:
    lying = PassShape(width_px=192, height_px=320)
    return passes(LOAD, network, prompt=prompt, shapes=[*SHAPES, lying])


@pytest.fixture(scope="module")
def kept(network: TracedNetwork) -> Stays:
    return stays(LOAD, network)


def left(events: tuple[Event, ...]) -> set[int]:
    """Return the numbers of what is alive at the end."""
    alive: set[int] = set()
    for number, size in events:
        if size:
            assert number not in alive
            alive.add(number)
        else:
            alive.remove(number)
    return alive


def test_a_step_frees_what_it_makes_once(traced: Passes) -> None:
    for events in (*traced.steps.values(), traced.sampling):
        assert events and not left(events)


def test_shapes_that_lie_down_take_what_those_standing_take(traced: Passes) -> None:
    _, standing, lying = traced.steps.values()
    assert standing is lying
    assert traced.steps[SHAPES[0]] != standing


def test_a_pass_between_two_sizes_is_what_it_is_traced_as(network: TracedNetwork) -> None:
    sizes = [(192, 192), (256, 192), (320, 256)]
    shapes = [PassShape(width_px=width, height_px=height) for width, height in sizes]
    three = passes(LOAD, network, prompt=prompt, shapes=shapes)
    alone = passes(LOAD, network, prompt=prompt, shapes=shapes[1:2])
    assert three.steps[shapes[1]] == alone.steps[shapes[1]]


def test_all_tensors_are_what_the_plan_predicts(traced: Passes, kept: Stays) -> None:
    """Weights, adapter, states and a step: within 3 % of the items that are tensors."""
    assert SD15 is not None
    made = predict(LOAD, RememberedCosts(family=family("sd15"), facts=SD15))
    items = {item.name: item.bytes for item in made.by_phase["training"]}
    planned = sum(items.values()) - sum(
        items[name] for name in ("runtime", "library workspaces", "allocator slack")
    )
    assert sum(kept.sizes) + highest_sum(traced.steps[SHAPES[0]]) == pytest.approx(
        planned, rel=0.03
    )


@pytest.mark.parametrize("expandable", [True, False])
def test_replayed_over_its_buckets_a_run_takes_no_more_each_epoch(
    traced: Passes, kept: Stays, expandable: bool
) -> None:
    replay = Replay(allocator=CachingAllocator(expandable=expandable))
    replay.hold(kept.sizes)
    replay.run(traced.sampling)
    reserved = []
    for _ in range(4):
        for events in traced.steps.values():
            replay.run(events)
        reserved.append(replay.allocator.reserved_bytes)
    assert reserved[1] == reserved[-1]


@pytest.mark.parametrize("kind", ["light", "full", "offloaded"])
def test_recomputing_takes_less_and_more_events(
    traced: Passes, network: TracedNetwork, kind: Any
) -> None:
    load = replace(LOAD, checkpointing=kind)
    again = passes(load, network, prompt=prompt, shapes=SHAPES[:1])
    plain = traced.steps[SHAPES[0]]
    assert highest_sum(again.steps[SHAPES[0]]) < highest_sum(plain)
    assert len(again.steps[SHAPES[0]]) > len(plain)
    assert again.sampling == traced.sampling


def test_a_base_in_int8_stays_so_and_is_dequantised_layer_by_layer(kept: Stays) -> None:
    assert SD15 is not None
    load = replace(LOAD, base_precision="int8", checkpointing="full")
    network = built(load, family=family("sd15"), facts=SD15, prompt=prompt)
    found = stays(load, network)
    assert SD15.parts["denoiser"].parameters * 1.5 < sum(found.sizes) < 0.9 * sum(kept.sizes)
    assert found.loading and not left(found.loading)
    assert not left(passes(load, network, prompt=prompt, shapes=SHAPES[:1]).steps[SHAPES[0]])


def test_streamed_blocks_have_two_buffers_instead(network: TracedNetwork, kept: Stays) -> None:
    load = replace(LOAD, checkpointing="full", streamed_blocks=12)
    streamed = stays(load, network)
    assert len(streamed.sizes) < len(kept.sizes)
    buffer = max(streamed.sizes)
    assert streamed.sizes.count(buffer) == 2
    assert sum(streamed.sizes) < sum(kept.sizes)
