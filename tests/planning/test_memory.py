"""The predicted peak: its parts, its phases, and how it compares with published measurements."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.config.base_precision import BasePrecision
from lora_trainer.config.config import CHECKPOINTING, AdapterSettings, Checkpointing, Precision
from lora_trainer.costs.cost_table import sample_cost
from lora_trainer.costs.sample_cost import SampleCost, Workload
from lora_trainer.families import family as load_family
from lora_trainer.families import known_base
from lora_trainer.families.base import BaseFacts, Family, PartFacts
from lora_trainer.families.base_files.base_folder import READ_BYTES
from lora_trainer.lora.adapter_size import adapter_parameters, total_elements
from lora_trainer.planning.loads import (
    CUBLAS_BYTES,
    HOPPER_CUBLAS_BYTES,
    KERNELS_BYTES,
    MIB,
    PAGES_BYTES,
    DeviceSurroundings,
    Load,
    RememberedCosts,
)
from lora_trainer.planning.memory import GIB, Prediction, predict
from tests.fakes.stable_diffusion import SD15, WideCosts, mini_facts, sd15_facts

LOAD = Load(
    device="cuda",
    precision="bf16",
    base_precision="bf16",
    adapter=AdapterSettings(rank=16, targets="attention"),
    text_precision="fp32",
    text_offload=False,
    optimizer="adamw",
    micro_batch=1,
    checkpointing="none",
    streamed_blocks=0,
    bucket_px=(512, 512),
    samples=False,
    sample_side_px=512,
    prepared_samples=4,
)
OUTSIDE_THE_ALLOCATOR = ("runtime", "library workspaces", "allocator slack")
COSTS = RememberedCosts(family=SD15, facts=sd15_facts())


def adapter(**settings: Any) -> AdapterSettings:
    return AdapterSettings(**{"rank": 16, "targets": "attention", **settings})


def predicted(**changes: Any) -> Prediction:
    return predict(replace(LOAD, **changes), COSTS)


def items(prediction: Prediction) -> dict[str, int]:
    return {item.name: item.bytes for item in prediction.items}


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("samples", [False, True])
def test_the_items_of_the_highest_phase_add_up_to_the_peak(
    checkpointing: Checkpointing, samples: bool
) -> None:
    made = predicted(checkpointing=checkpointing, samples=samples)
    assert sum(items(made).values()) == made.peak_bytes == max(made.phases.values())
    assert ("sampling" in made.phases) == samples
    assert all(item.note and item.bytes >= 0 for item in made.items)
    assert len(items(made)) == len(made.items), "names are unique"


@pytest.mark.parametrize(
    ("checkpointing", "traced_gib", "published_gib"), [("none", 2.66, 2.87), ("full", 1.87, 1.98)]
)
def test_sd15_agrees_with_a_tracer_and_with_a_published_measurement(
    checkpointing: Checkpointing, traced_gib: float, published_gib: float
) -> None:
    """512 px, batch 1, rank 16 on attention: a meta-tensor tracer, and another trainer on an H100.

    Both count what the allocator hands out, so the CUDA context and the slack stay out; and both run
    the adapter as peft does. Ours takes less.
    """
    load = replace(LOAD, checkpointing=checkpointing)
    wide = predict(load, WideCosts(family=SD15, facts=sd15_facts()))
    made = items(wide)
    in_use_gib = sum(made[name] for name in made if name not in OUTSIDE_THE_ALLOCATOR) / GIB
    assert in_use_gib == pytest.approx(traced_gib, rel=0.05)
    assert in_use_gib == pytest.approx(published_gib, rel=0.2)
    assert wide.peak_bytes / GIB > published_gib
    assert predicted(checkpointing=checkpointing).peak_bytes < wide.peak_bytes


def test_bytes_per_parameter_of_weights_adapter_and_optimizer() -> None:
    parameters = total_elements(COSTS.adapter_tensors(LOAD.adapter))
    adamw, eight_bit = items(predicted()), items(predicted(optimizer="adamw8bit"))
    assert adamw["base weights"] == 2 * 859_520_964
    assert (
        items(predicted(precision="fp32", base_precision="fp32"))["base weights"] == 4 * 859_520_964
    )
    assert adamw["adapter weights"] == adamw["adapter gradients"] == 4 * parameters
    assert adamw["optimizer states"] == 8 * parameters
    assert eight_bit["optimizer states"] == pytest.approx(2 * parameters, rel=0.05)


def test_activations_scale_with_the_micro_batch_and_weights_do_not() -> None:
    one, four = items(predicted()), items(predicted(micro_batch=4))
    for name in ("activations", "adapter inputs", "largest temporary"):
        assert four[name] == 4 * one[name]
    for name in ("base weights", "adapter weights", "optimizer states"):
        assert four[name] == one[name]


@given(
    micro_batch=st.integers(1, 8),
    rank=st.sampled_from([4, 16, 64]),
    side_px=st.sampled_from([256, 320, 512]),
)
def test_more_of_anything_never_takes_less(micro_batch: int, rank: int, side_px: int) -> None:
    asked = {
        "micro_batch": micro_batch,
        "adapter": adapter(rank=rank),
        "bucket_px": (side_px, side_px),
    }
    base = predicted(**asked).peak_bytes
    assert predicted(**{**asked, "micro_batch": micro_batch + 1}).peak_bytes > base
    assert predicted(**{**asked, "adapter": adapter(rank=rank * 2)}).peak_bytes > base
    assert predicted(**{**asked, "bucket_px": (side_px, side_px + 64)}).peak_bytes > base
    assert predicted(**{**asked, "checkpointing": "full"}).peak_bytes < base
    assert predicted(**{**asked, "optimizer": "adamw8bit"}).peak_bytes < base


def test_encoding_images_may_be_the_highest_phase() -> None:
    small = replace(mini_facts(), parts={**sd15_facts().parts, "denoiser": PartFacts(parameters=1)})
    load = replace(LOAD, bucket_px=(512, 512), checkpointing="full")
    made = predict(load, RememberedCosts(family=SD15, facts=small))
    assert made.peak_phase == "images"
    assert items(made)["image encoding"] == 4 * 640 * 512 * 512
    assert items(made)["VAE weights"] == 4 * 83_653_863


def with_text(parameters: int) -> BaseFacts:
    text = PartFacts(parameters=parameters)
    return replace(mini_facts(), parts={**sd15_facts().parts, "text_encoder": text})


def test_text_encoders_are_alone_on_the_device_in_their_own_dtype() -> None:
    facts = with_text(2_000_000_000)
    full = predict(LOAD, RememberedCosts(family=SD15, facts=facts))
    half = predict(
        replace(LOAD, text_precision="bf16"),
        RememberedCosts(family=SD15, facts=facts),
    )
    for made, size in ((full, 8e9), (half, 4e9)):
        found = {item.name: item.bytes for item in made.by_phase["texts"]}
        assert found["text encoder weights"] == size
        assert found["text encoding"] == int(size / 24)
        assert not {"base weights", "adapter weights"} & found.keys()
    assert "text encoder weights" not in {item.name for item in full.by_phase["images"]}


def test_offloaded_text_encoders_take_the_room_of_their_largest_layer() -> None:
    costs = RememberedCosts(family=SD15, facts=with_text(2_000_000_000))
    whole = predict(LOAD, costs)
    offloaded = predict(replace(LOAD, text_offload=True), costs)
    layers = [item.bytes for item in offloaded.by_phase["texts"] if "layer" in item.name]
    assert layers == [8_000_000_000 // 8]
    assert offloaded.phases["training"] == whole.phases["training"]


@pytest.mark.parametrize(("precision", "element_bytes"), [("bf16", 2), ("fp32", 4)])
def test_trained_text_encoders_stay_and_keep_activations_per_image(
    precision: Precision, element_bytes: int
) -> None:
    parameters = sd15_facts().parts["text_encoder"].parameters
    along = adapter(text_encoder=True)
    one = items(predicted(adapter=along, precision=precision))
    three = items(predicted(adapter=along, precision=precision, micro_batch=3))
    assert one["text encoder weights"] == three["text encoder weights"]
    assert one["text encoder weights"] == element_bytes * parameters, "in the base's dtype"
    assert one["text encoder activations"] > 0
    assert three["text encoder activations"] == 3 * one["text encoder activations"]
    made = predicted(adapter=along, precision=precision, samples=True)
    without = predicted(precision=precision, samples=True)
    for phase in ("training", "sampling"):
        assert made.phases[phase] - without.phases[phase] > one["text encoder weights"]
    assert made.phases["texts"] == without.phases["texts"]
    assert not [name for name in items(predicted(precision=precision)) if "text" in name]


def test_text_encoders_whose_words_are_learned_stay_too() -> None:
    words = items(predicted(adapter=adapter(new_tokens=2)))
    none, along = items(predicted()), items(predicted(adapter=adapter(text_encoder=True)))
    for name in ("text encoder weights", "text encoder activations"):
        assert words[name] == along[name] > 0
    for name in ("adapter weights", "adapter gradients"):
        assert words[name] - none[name] == 4 * 2 * 768, "two vectors as wide as the encoder"


@pytest.mark.parametrize("kind", ["loha", "lokr"])
def test_rebuilt_weights_are_kept_whole_or_piece_by_piece(kind: str) -> None:
    """Both build the change of every adapted weight in fp32, and autograd keeps what it is made of."""
    shapes = COSTS.adapter_shapes("attention")
    elements = sum(fan_in * out for fan_in, out in shapes.values())
    kept = items(predicted(adapter=adapter(kind=kind)))
    again = items(predicted(adapter=adapter(kind=kind), micro_batch=2))
    recomputed = items(predicted(adapter=adapter(kind=kind), checkpointing="full"))
    assert kept["rebuilt weights"] == again["rebuilt weights"] == 4 * elements
    assert recomputed["rebuilt weights"] == 4 * elements // 8
    assert predicted(adapter=adapter(kind=kind)).peak_bytes > predicted().peak_bytes


@pytest.mark.parametrize("settings", [{}, {"dora": True}, {"rslora": True}, {"kind": "oft"}])
def test_other_kinds_rebuild_nothing(settings: dict[str, Any]) -> None:
    made = items(predicted(adapter=adapter(**settings)))
    assert not {"rebuilt weights", "adapter's start"} & made.keys()


def test_pissa_keeps_where_it_began() -> None:
    plain, pissa = items(predicted()), items(predicted(adapter=adapter(init="pissa")))
    assert pissa["adapter's start"] == plain["adapter weights"]
    assert pissa["adapter weights"] == plain["adapter weights"]
    assert pissa["optimizer states"] == plain["optimizer states"], "what is frozen has no moments"


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "loha"},
        {"kind": "lokr"},
        {"kind": "oft"},
        {"dora": True},
        {"rank_pattern": {"attn2": 4}},
        {"targets": "all", "conv_rank": 2},
    ],
    ids=str,
)
def test_every_kind_counts_its_own_parameters(settings: dict[str, Any]) -> None:
    changed = adapter(**settings)
    shapes = COSTS.adapter_shapes(changed.targets)
    parameters = adapter_parameters(shapes, changed)
    assert parameters != adapter_parameters(shapes, adapter(targets=changed.targets))
    made = items(predicted(adapter=changed))
    assert made["adapter weights"] == made["adapter gradients"] == 4 * parameters
    assert made["optimizer states"] == 8 * parameters


def test_sampling_keeps_the_training_in_place() -> None:
    made = predicted(samples=True, checkpointing="full", sample_side_px=1024)
    found = items(made)
    assert {"base weights", "optimizer states", "sample image"} <= set(found)
    assert found["sample image"] == 4 * 768 * 1024 * 1024
    assert found["VAE weights"] == 4 * 83_653_863
    assert "activations" not in found


def test_what_is_no_tensor_is_named() -> None:
    """R5: libraries, a desktop that grows and the allocator's holes, not a share of everything."""
    screen = DeviceSurroundings(desktop_bytes=400 * MIB, cublas_bytes=HOPPER_CUBLAS_BYTES)
    plain, beside = items(predicted()), items(predicted(beside=screen))
    assert plain["library workspaces"] == 2 * CUBLAS_BYTES + KERNELS_BYTES
    assert beside["library workspaces"] == 2 * HOPPER_CUBLAS_BYTES + KERNELS_BYTES
    assert "desktop" not in plain and beside["desktop"] == 400 * MIB
    more = replace(LOAD, micro_batch=8, optimizer="adamw8bit")
    assert (
        items(predicted(micro_batch=8))["allocator slack"]
        == predict(more, COSTS).by_phase["training"][-1].bytes
    ), "what only lies there makes no holes"


@pytest.mark.parametrize("kind", CHECKPOINTING)
def test_holes_are_bounded_by_what_moves_and_in_growing_segments_by_what_a_block_makes(
    kind: Checkpointing,
) -> None:
    sizes = trained(flux(checkpointing=kind))
    names = ("activations", "largest temporary", "inputs", "adapter gradients")
    moved = sum(sizes[name] for name in names)
    assert sizes["allocator slack"] <= PAGES_BYTES + sizes["largest temporary"]
    assert sizes["allocator slack"] <= PAGES_BYTES + 0.1 * moved
    segments = trained(flux(checkpointing=kind, beside=DeviceSurroundings(expandable=False)))
    assert segments["allocator slack"] > sizes["allocator slack"]


def test_fits_compares_with_the_limit() -> None:
    peak = predicted().peak_bytes
    for limit, fits in ((peak, True), (peak - 1, False), (None, True)):
        made = predict(LOAD, COSTS, limit_bytes=limit)
        assert made.fits is fits
        assert made.limit_bytes == limit


def test_the_processor_has_another_runtime_than_the_card() -> None:
    assert items(predicted(device="cpu"))["runtime"] != items(predicted())["runtime"]


def test_a_processor_loads_and_keeps_what_a_card_has_the_machine_for() -> None:
    """The base's file is read in parts; the VAE of the sample images stays between them."""
    card, processor = (predicted(device=device, samples=True) for device in ("cuda", "cpu"))
    assert "loading" not in card.phases
    loading = {item.name: item.bytes for item in processor.by_phase["loading"]}
    assert loading["file being read"] == READ_BYTES
    assert loading["base weights"] == 2 * sd15_facts().parts["denoiser"].parameters
    assert "VAE weights" not in loading.keys() | trained(card).keys()
    assert trained(processor)["VAE weights"] == 4 * sd15_facts().parts["vae"].parameters
    assert "VAE weights" not in trained(predicted(device="cpu", samples=False))


def test_convolutions_of_a_processor_lay_their_tensors_out_anew() -> None:
    """oneDNN: decoding then takes 960 elements a pixel instead of 768 (tests/families/test_vae_memory.py)."""
    card, processor, apple = (
        {
            item.name: item.bytes
            for item in predicted(device=device, samples=True).by_phase["sampling"]
        }
        for device in ("cuda", "cpu", "mps")
    )
    side_px = LOAD.sample_side_px
    assert card["sample image"] == apple["sample image"] == 4 * 768 * side_px**2
    assert processor["sample image"] == 4 * 960 * side_px**2


def test_a_workload_is_computed_once_alone_and_once_in_company(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[Workload] = []

    def counting(family: Family, facts: BaseFacts, workload: Workload) -> SampleCost:
        calls.append(workload)
        return sample_cost(family, facts, workload)

    monkeypatch.setattr("lora_trainer.planning.loads.sample_cost", counting)
    remembered = RememberedCosts(family=SD15, facts=sd15_facts())
    for micro_batch in (1, 2, 3):
        load = replace(LOAD, micro_batch=micro_batch)
        predict(load, remembered)
    assert len(calls) == 2


# ---- how the base is kept

FLUX = known_base("black-forest-labs/FLUX.1-dev")
assert FLUX is not None
FLUX_COSTS = RememberedCosts(family=load_family("flux"), facts=FLUX)


def trained(made: Prediction) -> dict[str, int]:
    return {item.name: item.bytes for item in made.by_phase["training"]}


def flux(**changes: Any) -> Prediction:
    load = replace(LOAD, checkpointing="full", bucket_px=(1024, 1024), sample_side_px=1024)
    return predict(replace(load, **changes), FLUX_COSTS)


def test_a_quantised_base_keeps_what_is_not_in_blocks() -> None:
    """99.4 % of FLUX.1 is in linear layers of blocks, half a byte each and a thirty-second more."""
    whole, int8, nf4 = (trained(flux(base_precision=kind)) for kind in ("bf16", "int8", "nf4"))
    assert whole["base weights"] == 2 * 11_901_408_320
    assert int8["base blocks"] == pytest.approx(11.83e9, rel=2e-3)
    assert nf4["base blocks"] == pytest.approx(11.83e9 * 4.13 / 8, rel=2e-3)
    assert int8["rest of the base"] == nf4["rest of the base"] == pytest.approx(134e6, rel=0.01)
    assert int8["dequantised layer"] == 2 * 3072 * 6 * 3072, "a modulation, in bf16"
    assert "dequantised layer" not in whole


@pytest.mark.parametrize("kind", ["bf16", "int8", "nf4"])
def test_streamed_blocks_leave_two_buffers_behind(kind: BasePrecision) -> None:
    name = "base weights" if kind == "bf16" else "base blocks"
    peaks = [flux(base_precision=kind, streamed_blocks=count) for count in (0, 10, 30, 57)]
    sizes = [made.phases["training"] for made in peaks]
    assert sizes == sorted(sizes, reverse=True) and len(set(sizes)) == 4
    whole, all_streamed = trained(peaks[0]), trained(peaks[-1])
    left = all_streamed[name] + all_streamed["streaming buffers"]
    assert left < 0.07 * whole[name], "two of 57 blocks, and what is in none"


def test_every_second_step_of_recomputing_takes_less() -> None:
    peaks = [flux(checkpointing=kind).phases["training"] for kind in CHECKPOINTING]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == len(CHECKPOINTING)


def test_large_paged_states_are_not_on_the_card() -> None:
    """bitsandbytes pages tensors of 100,000 elements and more: at rank 16 none of SD1.5's."""
    for rank, any_paged in ((16, False), (128, True)):
        chosen = adapter(rank=rank)
        paged, eight = (
            items(predicted(optimizer=name, adapter=chosen))["optimizer states"]
            for name in ("paged_adamw8bit", "adamw8bit")
        )
        tensors = COSTS.adapter_tensors(chosen)
        sizes = ((math.prod(shape), count) for shape, count in tensors.items())
        large = sum(size * count for size, count in sizes if size >= 100_000)
        assert eight - paged == 2 * large
        assert bool(large) is any_paged
        assert paged > 0


def test_nothing_is_paged_without_a_card() -> None:
    """The optimizer is then the plain one, and all its states lie where everything does."""
    wide = adapter(rank=128)
    paged, eight = (
        items(predicted(device="cpu", optimizer=name, adapter=wide))["optimizer states"]
        for name in ("paged_adamw8bit", "adamw8bit")
    )
    assert paged == eight


def test_a_card_gets_the_inputs_of_one_pass_and_a_processor_has_all_that_wait() -> None:
    card, processor = (
        {
            (count, ahead): trained(
                predicted(device=device, micro_batch=count, prepared_samples=ahead)
            )
            for count, ahead in ((1, 4), (2, 4), (2, 8))
        }
        for device in ("cuda", "cpu")
    )
    one = card[1, 4]["inputs"]
    assert one > 3 * 4 * 4 * 64 * 64, "latents, noise and target of one sample, and its text"
    assert card[2, 4]["inputs"] == card[2, 8]["inputs"] == 2 * one
    assert "prepared batches" not in card[2, 8]
    assert processor[2, 8]["prepared batches"] == 8 * one
    assert processor[1, 4]["prepared batches"] == 4 * one


def test_a_processor_keeps_the_copies_for_saving_beside_everything_else() -> None:
    parameters = total_elements(COSTS.adapter_tensors(LOAD.adapter))
    made = trained(predicted(device="cpu"))
    assert made["copies for saving"] == (4 + 8 + 4) * parameters
    assert "copies for saving" not in trained(predicted())


@pytest.mark.parametrize("kind", ["lora", "loha"])
def test_adapters_of_text_encoders_count_like_those_of_the_denoiser(kind: str) -> None:
    """SD1.5: 12 layers of four 768 x 768 and two 768 x 3072."""
    alone, along = (
        items(predicted(adapter=adapter(kind=kind, text_encoder=text))) for text in (False, True)
    )
    pairs = 2 if kind == "loha" else 1
    text = pairs * 16 * 12 * (4 * 2 * 768 + 2 * (768 + 3072))
    for name, element_bytes in (
        ("adapter weights", 4),
        ("adapter gradients", 4),
        ("optimizer states", 8),
    ):
        assert along[name] - alone[name] == element_bytes * text
    if kind == "loha":
        elements = 12 * (4 * 768 * 768 + 2 * 768 * 3072)
        assert along["rebuilt weights"] - alone["rebuilt weights"] == 4 * elements


def test_a_sample_image_has_its_own_size() -> None:
    """A pass without gradients over the sample's size, whatever the largest bucket is."""
    small, large = (
        predicted(samples=True, sample_side_px=512, bucket_px=(side, side)) for side in (512, 1024)
    )
    assert small.phases["sampling"] == large.phases["sampling"]


def test_a_running_average_is_as_large_as_the_masters() -> None:
    made = items(predicted(averaged=True))
    assert made["adapter average"] == made["adapter weights"] > 0
    assert "adapter average" not in items(predicted())


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_dropped_inputs_are_copies_in_the_dtype_of_the_base(precision: Precision) -> None:
    kept = {"precision": precision, "base_precision": precision}
    dropping = adapter(dropout=0.1)
    made = items(predicted(adapter=dropping, **kept))
    copies = items(predicted(adapter=adapter(dora=True)))["adapter inputs"]
    share = 1.0 if precision == "fp32" else 0.5
    assert made["dropped inputs"] == pytest.approx(share * copies, rel=0.2)
    assert "dropped inputs" not in items(predicted(**kept))
    two = items(predicted(adapter=dropping, micro_batch=2, **kept))
    assert two["dropped inputs"] == pytest.approx(2 * made["dropped inputs"], rel=1e-6)
    full = items(predicted(adapter=dropping, checkpointing="full", **kept))
    assert 0 < full["dropped inputs"] < made["dropped inputs"] / 4


def test_a_wide_adapter_reads_copies_and_drops_in_their_place() -> None:
    plain = items(predicted())
    assert plain["adapter inputs"] == 0
    for values in ({"dora": True}, {"init": "pissa"}, {"kind": "loha"}, {"kind": "oft"}):
        made = items(predicted(adapter=adapter(**values)))
        assert made["adapter inputs"] > made["activations"] / 4
    dora = items(predicted(adapter=adapter(dora=True)))
    assert items(predicted(adapter=adapter(dora=True, dropout=0.1))) == dora
    fp32 = {"precision": "fp32", "base_precision": "fp32"}
    assert items(predicted(adapter=adapter(dora=True, dropout=0.1), **fp32))["dropped inputs"] > 0


def test_masks_and_priors_add_what_they_hold() -> None:
    plain, latent_area = predicted(), 64 * 64
    masked = items(predicted(masked=True))
    assert masked["inputs"] == items(plain)["inputs"] + 4 * latent_area
    held = items(predicted(as_base=0.5, micro_batch=2))
    assert held["base's prediction"] == 2 * 4 * 4 * latent_area
    assert "base's prediction" not in items(plain)


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
def test_a_pass_without_gradients_peaks_below_training(checkpointing: Checkpointing) -> None:
    """So the base's own prediction, which is made first, needs no room but its result's."""
    cost = COSTS.sample_cost(replace(LOAD, checkpointing=checkpointing).workload())
    assert cost.forward_bytes <= cost.saved_bytes + cost.temporary_bytes
