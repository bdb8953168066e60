"""What a run needs of the machine beside the GPU: the largest of its phases, item by item."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lora_trainer.config.base_precision import BasePrecision
from lora_trainer.config.config import AdapterSettings
from lora_trainer.families import family, known_base
from lora_trainer.families.base import BaseFacts
from lora_trainer.hardware.torch_allocator import RESERVED_BYTES
from lora_trainer.lora.adapter_size import total_elements
from lora_trainer.planning.host_memory import HOST_RUNTIME_BYTES, HostPrediction, predict_host
from lora_trainer.planning.loads import Load, RememberedCosts
from lora_trainer.planning.memory import GIB
from lora_trainer.planning.weight_bytes import copied_bytes

LOAD = Load(
    device="cuda",
    precision="bf16",
    base_precision="bf16",
    adapter=AdapterSettings(rank=16, targets="attention"),
    text_precision="bf16",
    text_offload=False,
    optimizer="adamw8bit",
    micro_batch=2,
    checkpointing="full",
    streamed_blocks=0,
    bucket_px=(1024, 1024),
    samples=False,
    sample_side_px=1024,
    prepared_samples=4,
)


def facts() -> BaseFacts:
    found = known_base("black-forest-labs/FLUX.1-dev")
    assert found is not None
    return found


COSTS = RememberedCosts(family=family("flux"), facts=facts())


def host(**changes: Any) -> HostPrediction:
    load = replace(LOAD, **changes)
    return predict_host(load, COSTS, limit_bytes=16 * GIB, pinnable_bytes=None)


def pinned_within(pinnable_bytes: int | None, **changes: Any) -> HostPrediction:
    return predict_host(
        replace(LOAD, **changes),
        COSTS,
        limit_bytes=64 * GIB,
        pinnable_bytes=pinnable_bytes,
    )


def test_blocks_are_pinned_before_offloaded_inputs_and_room_is_left_for_batches() -> None:
    changes: dict[str, Any] = {"streamed_blocks": 20, "checkpointing": "offloaded"}
    streamed, inputs = (items(host(**changes))[name] for name in PINNED_ITEMS)
    bound = RESERVED_BYTES + streamed + inputs // 4
    notes = {
        pinnable: {item.name: item.note for item in pinned_within(pinnable, **changes).items}
        for pinnable in (None, bound, GIB // 2)
    }
    assert [", pinned" in notes[None][name] for name in PINNED_ITEMS] == [True, True]
    assert notes[bound]["streamed blocks"].endswith(", pinned")
    assert ", 25% of it pinned" in notes[bound]["offloaded activations"]
    share = (GIB // 2 - RESERVED_BYTES) / streamed
    assert notes[GIB // 2]["streamed blocks"].endswith(f", {share:.0%} of it pinned")
    assert ", 0% of it pinned" in notes[GIB // 2]["offloaded activations"]
    assert pinned_within(0, **changes).bytes == host(**changes).bytes, "it waits there all the same"


PINNED_ITEMS = ("streamed blocks", "offloaded activations")


def items(made: HostPrediction) -> dict[str, int]:
    return {item.name: item.bytes for item in made.items}


def test_items_add_up_and_the_runtime_is_always_there() -> None:
    for made in (host(), host(text_offload=True), host(streamed_blocks=20)):
        assert sum(items(made).values()) == made.bytes
        assert items(made)["runtime"] == HOST_RUNTIME_BYTES
        assert all(item.note for item in made.items)


def test_the_vae_of_the_sample_images_waits_here() -> None:
    assert items(host(samples=True))["VAE weights"] == 4 * facts().parts["vae"].parameters
    assert "VAE weights" not in items(host())


def test_streamed_blocks_are_pinned_in_the_dtype_they_are_kept_in() -> None:
    blocks = {
        kind: items(host(streamed_blocks=57, base_precision=kind)) for kind in ("bf16", "int8")
    }
    assert blocks["bf16"]["streamed blocks"] == pytest.approx(23.66e9, rel=1e-3)
    assert "streamed blocks" not in items(host())


@pytest.mark.parametrize("kind", ["int8", "nf4"])
def test_a_streamed_base_is_quantised_whole_beside_the_card(kind: BasePrecision) -> None:
    few = items(host(streamed_blocks=10, base_precision=kind))
    assert few["base while it is quantised"] > 0.5 * 11.9e9
    assert "base while it is quantised" not in items(host(base_precision=kind))


def test_offloaded_inputs_wait_for_all_images_of_a_pass() -> None:
    one, two = (
        items(host(checkpointing="offloaded", micro_batch=count))["offloaded activations"]
        for count in (1, 2)
    )
    cost = COSTS.sample_cost(replace(LOAD, checkpointing="offloaded").workload())
    assert two == 2 * 2 * cost.host_bytes, "two images, each tensor up to the next power of two"
    assert two == pytest.approx(2 * one, rel=0.01)


def test_text_encoders_are_there_only_while_they_are_offloaded() -> None:
    assert items(host(text_offload=True))["text encoders"] == 2 * 4_885_371_136
    assert "text encoders" not in items(host())
    both = items(host(text_offload=True, streamed_blocks=57))
    assert "text encoders" not in both, "never at the same time as streamed blocks"


def test_large_paged_states_may_have_to_lie_here() -> None:
    wide = AdapterSettings(rank=64, targets="attention")
    paged = items(host(optimizer="paged_adamw8bit", adapter=wide))
    parameters = total_elements(COSTS.adapter_tensors(wide))
    assert paged["optimizer states"] == 2 * parameters, "all of them, without their scales"
    assert "optimizer states" not in items(host(adapter=wide))
    assert "optimizer states" not in items(host(optimizer="paged_adamw8bit")), "too small to page"


def test_what_is_prepared_waits_here() -> None:
    four, eight = (items(host(prepared_samples=count))["prepared batches"] for count in (4, 8))
    assert eight == 2 * four > 0


def test_copies_for_saving_are_pinned_in_powers_of_two() -> None:
    """Masters, two moments of a byte with their scales, and the export."""
    tensors = COSTS.adapter_tensors(LOAD.adapter)
    exact = copied_bytes(tensors, "adamw8bit", pissa=False, pinned=False)
    made = items(host())["copies for saving"]
    assert exact > 10 * total_elements(tensors)
    assert exact < made < 2 * exact


def test_what_is_read_through_the_file_cache_is_not_needed() -> None:
    made = host()
    assert made.loading_bytes > made.limit_bytes
    assert made.fits and made.loads_slowly
    assert not replace(made, limit_bytes=made.bytes - 1).fits
