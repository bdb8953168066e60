"""Predicted memory, item by item, on the device and beside it: what each setting takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.config.declare import CHECKPOINTING
from lora_trainer.costs.base_costs import BaseCosts
from lora_trainer.families import family
from lora_trainer.families.base import PartFacts
from lora_trainer.hardware.devices import RESERVED_BYTES
from lora_trainer.hardware.machine import GIB
from lora_trainer.planning.memory import predict, predict_host
from tests.fakes.plans import (
    FLUX,
    MACHINE,
    bytes_by_name,
    costs_of,
    load_of,
    machine,
    planned,
)
from tests.fakes.stable_diffusion import WideCosts, mini_facts, sd15_facts

SD15 = family("sd15")
MIB = 2**20
LORA = 3_188_736
"""Parameters of rank 16 on the attention of SD1.5: its four attention matrices of 16 blocks."""
CHANGES = 4 * 93_511_680
"""Bytes in fp32 of whole weight changes of these layers."""
TEXT_LORA = 16 * 12 * (4 * 2 * 768 + 2 * (768 + 3072))
"""Parameters of its text encoder: 12 layers of four 768 x 768 and two 768 x 3072."""
OUTSIDE_THE_ALLOCATOR = ("runtime", "library workspaces", "allocator slack")


def predicted(**changes: Any) -> Any:
    return predict(load_of(**changes), costs_of())


def items(phase: str = "training", **changes: Any) -> dict[str, int]:
    return bytes_by_name(predicted(**changes).by_phase[phase])


def flux(phase: str = "training", **changes: Any) -> dict[str, int]:
    same = {"checkpointing": "full", "bucket_px": (1024, 1024), "sample_side_px": 1024}
    made = predict(load_of(**{**same, **changes}), costs_of(FLUX))
    return bytes_by_name(made.by_phase[phase])  # type: ignore[index]


def test_sd15_agrees_with_a_tracer_and_with_a_published_measurement() -> None:
    """512 px, batch 1, rank 16 on attention: a meta-tensor tracer, and another trainer on an H100.

    Both count what the allocator hands out, so the CUDA context and the slack stay out; and both run
    the adapter as peft does. Ours takes less.
    """
    for level, traced_gib, published_gib in (("none", 2.66, 2.87), ("full", 1.87, 1.98)):
        wide = predict(load_of(checkpointing=level), WideCosts(family=SD15, facts=sd15_facts()))
        sizes = bytes_by_name(wide.items)
        in_use_gib = sum(sizes[name] for name in sizes if name not in OUTSIDE_THE_ALLOCATOR) / GIB
        assert in_use_gib == pytest.approx(traced_gib, rel=0.05)
        assert in_use_gib == pytest.approx(published_gib, rel=0.2)
        assert predicted(checkpointing=level).peak_bytes < wide.peak_bytes


FP32 = {"precision": "fp32", "base_precision": "fp32"}


@pytest.mark.parametrize(
    ("changes", "name", "size"),
    [
        ({}, "base weights", 2 * 859_520_964),
        (FP32, "base weights", 4 * 859_520_964),
        ({}, "adapter weights", 4 * LORA),
        ({}, "optimizer states", 8 * LORA),
        ({"averaged": True}, "adapter average", 4 * LORA),
        ({"keeps_best": True}, "best adapter", 4 * LORA),
        ({"optimizer": "schedulefree_adamw"}, "averaged weights", 4 * LORA),
        ({"text_encoder": True}, "adapter weights", 4 * (LORA + TEXT_LORA)),
        ({"text_encoder": True}, "text encoder weights", 2 * 123_060_480),
        ({"text_encoder": True, "micro_batch": 3}, "text encoder activations", 3 * 123_060_480),
        ({"new_tokens": 2}, "adapter gradients", 4 * (LORA + 2 * 768)),
        ({"kind": "loha"}, "adapter weights", 2 * 4 * LORA),
        ({"kind": "loha", "micro_batch": 2}, "rebuilt weights", CHANGES),
        ({"kind": "lokr", "checkpointing": "full"}, "rebuilt weights", CHANGES // 8),
        (
            {"kind": "loha", "text_encoder": True},
            "rebuilt weights",
            CHANGES + 4 * 12 * (4 * 768 * 768 + 2 * 768 * 3072),
        ),
        ({"as_base": 0.5, "micro_batch": 2}, "base's prediction", 2 * 4 * 4 * 64 * 64),
        ({"device": "cpu"}, "copies for saving", (4 + 8 + 4) * LORA),
        ({"device": "cpu", "keeps_best": True}, "copies for saving", (4 + 8 + 4 + 8) * LORA),
        ({"device": "cpu", "samples": True}, "VAE weights", 4 * 83_653_863),
    ],
    ids=str,
)
def test_bytes_of_an_item_of_training(changes: dict[str, Any], name: str, size: int) -> None:
    assert items(**changes)[name] == size


def test_nothing_else_is_counted_in_a_plain_training() -> None:
    plain = {
        *("base weights", "adapter weights", "adapter gradients", "optimizer states"),
        *("activations", "adapter inputs", "largest temporary", "inputs", *OUTSIDE_THE_ALLOCATOR),
    }
    for changes in ({}, {"dora": True}, {"rslora": True}, {"kind": "oft"}):
        assert items(**changes).keys() == plain
    assert items(samples=True).keys() == plain, "the VAE waits in the machine's memory"
    on_processor = {"prepared batches", "copies for saving", "runtime", "allocator slack"}
    beside = plain - {"inputs", *OUTSIDE_THE_ALLOCATOR}
    assert items(device="cpu").keys() == beside | on_processor


@given(
    micro_batch=st.integers(1, 8),
    rank=st.sampled_from([4, 16, 64]),
    side_px=st.sampled_from([256, 320, 512]),
)
def test_more_of_anything_takes_more(micro_batch: int, rank: int, side_px: int) -> None:
    asked = {"micro_batch": micro_batch, "rank": rank, "bucket_px": (side_px, side_px)}
    base = predicted(**asked).peak_bytes
    assert predicted(**{**asked, "micro_batch": micro_batch + 1}).peak_bytes > base
    assert predicted(**{**asked, "rank": rank * 2}).peak_bytes > base
    assert predicted(**{**asked, "bucket_px": (side_px, side_px + 64)}).peak_bytes > base
    assert predicted(**{**asked, "checkpointing": "full"}).peak_bytes < base
    assert predicted(**{**asked, "optimizer": "adamw8bit"}).peak_bytes < base
    one, more = items(**{**asked, "micro_batch": 1}), items(**asked)
    for name in ("activations", "adapter inputs", "largest temporary", "inputs"):
        assert more[name] == micro_batch * one[name]


def test_phases_before_training() -> None:
    text = {**sd15_facts().parts, "text_encoder": PartFacts(parameters=2_000_000_000)}
    costs = BaseCosts(family=SD15, facts=replace(sd15_facts(), parts=text))
    for precision, size in (("fp32", 8e9), ("bf16", 4e9)):
        made = predict(load_of(text_precision=precision), costs)
        alone = bytes_by_name(made.by_phase["texts"])
        assert (alone["text encoder weights"], alone["text encoding"]) == (size, int(size / 24))
        assert alone.keys() - {"text encoder weights", "text encoding"} == {*OUTSIDE_THE_ALLOCATOR}
    offloaded = predict(load_of(text_offload=True), costs)
    assert bytes_by_name(offloaded.by_phase["texts"])["text encoder layer"] == 1_000_000_000
    assert offloaded.phases["training"] == predict(load_of(), costs).phases["training"]
    small = {**sd15_facts().parts, "denoiser": PartFacts(parameters=1)}
    tiny = BaseCosts(family=SD15, facts=replace(mini_facts(), parts=small))
    made = predict(load_of(checkpointing="full"), tiny)
    assert made.peak_phase == "images"
    sizes = bytes_by_name(made.items)
    assert (sizes["image encoding"], sizes["VAE weights"]) == (4 * 640 * 512**2, 4 * 83_653_863)


def test_a_processor_reads_the_base_into_the_memory_it_trains_in() -> None:
    loading = items("loading", device="cpu")
    assert loading["base weights"] == 2 * 859_520_964
    assert loading.keys() - items(device="cpu").keys() == {"file being read"}
    assert "loading" not in predicted().phases
    assert loading["runtime"] != items()["runtime"]


def test_drawing_keeps_the_training_in_place_and_has_its_own_size() -> None:
    made = items("sampling", samples=True, sample_side_px=1024, checkpointing="full")
    assert {"base weights", "optimizer states", "VAE weights"} <= made.keys()
    assert "activations" not in made
    assert made["sample image"] == 4 * 768 * 1024**2
    for device, elements in (("cpu", 960), ("mps", 768)):  # oneDNN lays tensors out anew
        sizes = items("sampling", samples=True, device=device)
        assert sizes["sample image"] == 4 * elements * 512**2
    wide = items("sampling", samples=True, bucket_px=(1024, 1024), micro_batch=4)
    assert wide["sample image"] == items("sampling", samples=True)["sample image"]


def test_memory_outside_of_tensors_is_named() -> None:
    """R5: libraries, a desktop that grows and the allocator's holes, not a share of everything."""
    for capability, cublas_bytes in (((8, 6), 8320 * 2**10), ((9, 0), 32 * MIB)):
        made = planned(hardware=machine(24, compute_capability=capability)).memory
        libraries = bytes_by_name(made.items)["library workspaces"]
        assert libraries == 2 * cublas_bytes + 64 * MIB
    resting = items(micro_batch=8, optimizer="adamw8bit")
    assert resting["allocator slack"] == items(micro_batch=8)["allocator slack"]
    segments = planned(hardware=replace(MACHINE, expandable_segments=False)).load.beside
    for kind in CHECKPOINTING:
        sizes = flux(checkpointing=kind)
        names = ("activations", "largest temporary", "inputs", "adapter gradients")
        holes = min(sum(sizes[name] for name in names) // 10, sizes["largest temporary"])
        assert sizes["allocator slack"] == 128 * MIB + holes
        assert flux(checkpointing=kind, beside=segments)["allocator slack"] > 128 * MIB + holes


def test_dropout_and_wide_adapters_copy_inputs() -> None:
    plain = items()
    assert plain["adapter inputs"] == 0
    for changes in ({"dora": True}, {"kind": "loha"}, {"kind": "oft"}):
        made = items(**changes)
        assert made["adapter inputs"] > made["activations"] / 4
    copies = items(dora=True)
    assert items(dora=True, dropout=0.1) == copies, "dropout replaces the fp32 copies"
    assert items(dora=True, dropout=0.1, **FP32)["dropped inputs"] > 0
    for precision, share in (("bf16", 0.5), ("fp32", 1.0)):
        same = {"dropout": 0.1, "precision": precision, "base_precision": precision}
        one, two = (items(micro_batch=count, **same)["dropped inputs"] for count in (1, 2))
        assert one == pytest.approx(share * copies["adapter inputs"], rel=0.2)
        assert two == pytest.approx(2 * one, rel=1e-6)
        assert 0 < items(checkpointing="full", **same)["dropped inputs"] < one / 4


def test_masks_are_inputs_and_a_processor_keeps_all_that_waits() -> None:
    one = items()["inputs"]
    assert one > 3 * 4 * 4 * 64 * 64, "latents, noise and target of one sample, and its text"
    assert items(masked=True)["inputs"] == one + 4 * 64 * 64
    assert items(micro_batch=2, prepared_samples=8)["inputs"] == 2 * one
    assert items(device="cpu", prepared_samples=8)["prepared batches"] == 8 * one


def test_large_paged_states_lie_in_the_machine() -> None:
    """bitsandbytes pages tensors of 100,000 elements and more: at rank 16 none of SD1.5's."""
    for device, rank, any_paged in (("cuda", 16, False), ("cuda", 128, True), ("cpu", 128, False)):
        same: dict[str, Any] = {"device": device, "rank": rank}
        paged, eight = (
            items(optimizer=name, **same)["optimizer states"]
            for name in ("paged_adamw8bit", "adamw8bit")
        )
        tensors = costs_of().adapter_tensors(load_of(rank=rank).adapter)
        large = sum(a * b * count for (a, b), count in tensors.items() if a * b >= 100_000)
        assert bool(large and device == "cuda") is any_paged
        assert eight - paged == (2 * large if any_paged else 0)
        assert paged > 0
    wide = {"optimizer": "paged_adamw8bit", "rank": 64}
    parameters = flux(**wide)["adapter weights"] // 4
    assert beside(**wide)["optimizer states"] == 2 * parameters, "all, without their scales"


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_a_pass_without_gradients_peaks_below_training(checkpointing: Any) -> None:
    """So the base's own prediction, which is made first, needs no room but its result's."""
    cost = costs_of().sample_cost(load_of(checkpointing=checkpointing).workload())
    assert cost.forward_bytes <= cost.saved_bytes + cost.temporary_bytes


# ---- a large base


def test_a_quantised_base_keeps_what_is_not_in_blocks() -> None:
    """99.4 % of FLUX.1 is in linear layers of blocks, half a byte each and a thirty-second more."""
    whole, int8, nf4 = (flux(base_precision=kind) for kind in ("bf16", "int8", "nf4"))
    assert whole["base weights"] == 2 * 11_901_408_320
    assert int8["base blocks"] == pytest.approx(11.83e9, rel=2e-3)
    assert nf4["base blocks"] == pytest.approx(11.83e9 * 4.13 / 8, rel=2e-3)
    assert int8["rest of the base"] == nf4["rest of the base"] == pytest.approx(134e6, rel=0.01)
    assert int8["dequantised layer"] == 2 * 3072 * 6 * 3072, "a modulation, in bf16"
    assert "dequantised layer" not in whole


def test_streaming_and_each_level_of_checkpointing_take_less() -> None:
    for kind, name in (("bf16", "base weights"), ("nf4", "base blocks")):
        made = [flux(base_precision=kind, streamed_blocks=count) for count in (0, 10, 30, 57)]
        sizes = [sum(each.values()) for each in made]
        assert sizes == sorted(set(sizes), reverse=True) and len(sizes) == 4
        left = made[-1][name] + made[-1]["streaming buffers"]
        assert left < 0.07 * made[0][name], "two of 57 blocks, and weights outside of blocks"
    peaks = [sum(flux(checkpointing=kind).values()) for kind in CHECKPOINTING]
    assert peaks == sorted(set(peaks), reverse=True) and len(peaks) == len(CHECKPOINTING)


# ---- beside the GPU


def host(*, pinnable_bytes: int | None = None, limit_bytes: int = 16 * GIB, **changes: Any) -> Any:
    plain: dict[str, Any] = {
        "checkpointing": "full",
        "bucket_px": (1024, 1024),
        "text_precision": "bf16",
        "optimizer": "adamw8bit",
        "micro_batch": 2,
    }
    load = load_of(**{**plain, **changes})
    limits = {"limit_bytes": limit_bytes, "pinnable_bytes": pinnable_bytes}
    return predict_host(load, costs_of(FLUX), **limits)


def beside(**how: Any) -> dict[str, int]:
    return bytes_by_name(host(**how).items)


ALWAYS = {"runtime", "cached latents and texts", "prepared batches", "copies for saving"}
OFFLOADED = {"streamed_blocks": 20, "checkpointing": "offloaded"}


def test_what_waits_beside_the_gpu() -> None:
    for changes, more in (
        ({"optimizer": "paged_adamw8bit"}, set()),  # all are too small to page
        ({"samples": True}, {"VAE weights"}),
        (OFFLOADED, {"streamed blocks", "offloaded activations"}),
        ({"streamed_blocks": 57, "text_offload": True}, {"streamed blocks"}),
    ):
        made = host(**changes)
        assert bytes_by_name(made.items).keys() == ALWAYS | more
        assert made.items == made.by_phase["training"], "the highest phase"
        assert sum(beside(**changes).values()) == made.peak_bytes


def test_bytes_of_what_waits_beside_the_gpu() -> None:
    assert beside()["runtime"] == 2 * GIB
    assert beside(samples=True)["VAE weights"] == 4 * 83_819_683
    assert beside(streamed_blocks=57)["streamed blocks"] == pytest.approx(23.66e9, rel=1e-3)
    eight = beside(prepared_samples=8)["prepared batches"]
    assert eight == 2 * beside()["prepared batches"] > 0
    one, two = (
        beside(checkpointing="offloaded", micro_batch=count)["offloaded activations"]
        for count in (1, 2)
    )
    offloading = load_of(checkpointing="offloaded", bucket_px=(1024, 1024), micro_batch=2)
    cost = costs_of(FLUX).sample_cost(offloading.workload())
    assert two == 2 * 2 * cost.host_bytes, "two images, each tensor up to the next power of two"
    assert two == pytest.approx(2 * one, rel=0.01)
    saved, parameters = beside()["copies for saving"], flux()["adapter weights"] // 4
    assert 10 * parameters < saved < 2 * 11 * parameters, "masters, two moments, export, rounded up"


def test_texts_and_quantising_have_the_machine_to_themselves() -> None:
    assert beside(text_offload=True)["text encoders"] == 2 * 4_885_371_136
    for kind in ("int8", "nf4"):
        few = beside(streamed_blocks=10, base_precision=kind)
        assert few.keys() == {"runtime", "base while it is quantised"}
        assert few["base while it is quantised"] > 0.5 * 11.9e9
        assert "base while it is quantised" not in beside(base_precision=kind)


def test_blocks_are_pinned_before_offloaded_inputs_and_room_is_left_for_batches() -> None:
    names = ("streamed blocks", "offloaded activations")
    streamed, inputs = (beside(**OFFLOADED)[name] for name in names)
    share = (GIB // 2 - RESERVED_BYTES) / streamed
    for pinnable_bytes, shares in (
        (None, (", pinned", ", pinned")),
        (RESERVED_BYTES + streamed + inputs // 4, (", pinned", ", 25% of it pinned")),
        (GIB // 2, (f", {share:.0%} of it pinned", ", 0% of it pinned")),
    ):
        made = host(pinnable_bytes=pinnable_bytes, **OFFLOADED)
        notes = {item.name: item.note for item in made.items}
        for name, words in zip(names, shares, strict=True):
            assert words in notes[name]
        assert made.peak_bytes == host(**OFFLOADED).peak_bytes, "it waits there all the same"


def test_files_pass_through_the_cache_of_the_system() -> None:
    made = host()
    assert made.loading_bytes == 2 * 11_901_408_320 > made.limit_bytes
    assert made.fits and made.loads_slowly
    assert not host(limit_bytes=made.peak_bytes - 1).fits
    assert not host(limit_bytes=28 * GIB).loads_slowly
