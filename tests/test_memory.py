"""The predicted peak: its parts, its phases, and how it compares with published measurements."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.adapter_size import adapter_parameters
from lora_trainer.config import AdapterSettings, Precision
from lora_trainer.families.base import BaseFacts, PartFacts
from lora_trainer.families.costs import SampleCost, Workload
from lora_trainer.memory import GIB, Load, Prediction, RememberedCosts, predict
from tests.fakes.stable_diffusion import UNetCosts, mini_facts, sd15_facts

LOAD = Load(
    device="cuda",
    precision="bf16",
    adapter=AdapterSettings(rank=16, targets="attention"),
    text_precision="fp32",
    optimizer="adamw",
    micro_batch=1,
    checkpointing=False,
    bucket_px=(512, 512),
    samples=False,
    sample_side_px=512,
    prepared_samples=4,
)
OUTSIDE_THE_ALLOCATOR = ("runtime", "allocator slack")
COSTS = RememberedCosts(family=UNetCosts())


def adapter(**settings: Any) -> AdapterSettings:
    return AdapterSettings(**{"rank": 16, "targets": "attention", **settings})


def predicted(**changes: Any) -> Prediction:
    return predict(replace(LOAD, **changes), facts=sd15_facts(), family=COSTS)


def items(prediction: Prediction) -> dict[str, int]:
    return {item.name: item.bytes for item in prediction.items}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("samples", [False, True])
def test_the_items_of_the_highest_phase_add_up_to_the_peak(
    checkpointing: bool, samples: bool
) -> None:
    made = predicted(checkpointing=checkpointing, samples=samples)
    assert sum(items(made).values()) == made.peak_bytes == max(made.phases.values())
    assert ("sampling" in made.phases) == samples
    assert all(item.note and item.bytes > 0 for item in made.items if item.name != "adapter inputs")
    assert len(items(made)) == len(made.items), "names are unique"


@pytest.mark.parametrize(
    ("checkpointing", "traced_gib", "published_gib"), [(False, 2.66, 2.87), (True, 1.87, 1.98)]
)
def test_sd15_agrees_with_a_tracer_and_with_a_published_measurement(
    checkpointing: bool, traced_gib: float, published_gib: float
) -> None:
    """512 px, batch 1, rank 16 on attention: a meta-tensor tracer, and another trainer on an H100.

    Both count what the allocator hands out, so the CUDA context and the slack stay out.
    """
    made = items(predicted(checkpointing=checkpointing))
    in_use_gib = sum(made[name] for name in made if name not in OUTSIDE_THE_ALLOCATOR) / GIB
    assert in_use_gib == pytest.approx(traced_gib, rel=0.05)
    assert in_use_gib == pytest.approx(published_gib, rel=0.2)
    assert predicted(checkpointing=checkpointing).peak_bytes / GIB > published_gib


def test_bytes_per_parameter_of_weights_adapter_and_optimizer() -> None:
    parameters = LOAD.adapter_parameters(sd15_facts(), COSTS)
    adamw, eight_bit = items(predicted()), items(predicted(optimizer="adamw8bit"))
    assert adamw["denoiser weights"] == 2 * 859_520_964
    assert items(predicted(precision="fp32"))["denoiser weights"] == 4 * 859_520_964
    assert adamw["adapter weights"] == adamw["adapter gradients"] == 4 * parameters
    assert adamw["optimizer states"] == 8 * parameters
    assert eight_bit["optimizer states"] == pytest.approx(2 * parameters, rel=0.05)


def test_activations_scale_with_the_micro_batch_and_weights_do_not() -> None:
    one, four = items(predicted()), items(predicted(micro_batch=4))
    for name in ("activations", "adapter inputs", "largest temporary"):
        assert four[name] == 4 * one[name]
    for name in ("denoiser weights", "adapter weights", "optimizer states"):
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
    assert predicted(**{**asked, "checkpointing": True}).peak_bytes < base
    assert predicted(**{**asked, "optimizer": "adamw8bit"}).peak_bytes < base


def test_caching_may_be_the_highest_phase() -> None:
    small = replace(mini_facts(), parts={**sd15_facts().parts, "denoiser": PartFacts(parameters=1)})
    load = replace(LOAD, bucket_px=(512, 512), checkpointing=True)
    made = predict(load, facts=small, family=UNetCosts())
    assert max(made.phases, key=lambda phase: made.phases[phase]) == "caching"
    assert items(made)["image encoding"] == 4 * 640 * 512 * 512
    assert items(made)["VAE weights"] == 4 * 83_653_863


def test_vae_and_text_encoders_are_never_loaded_together() -> None:
    """The caching phase is the larger of the two, the text encoders in their own dtype."""
    facts = replace(
        mini_facts(),
        parts={**sd15_facts().parts, "text_encoder": PartFacts(parameters=2_000_000_000)},
    )
    full = predict(LOAD, facts=facts, family=UNetCosts()).phases["caching"]
    half = predict(replace(LOAD, text_precision="bf16"), facts=facts, family=UNetCosts())
    assert full == pytest.approx(8e9 * 1.05 + 0.6 * GIB, rel=1e-3)
    assert half.phases["caching"] == pytest.approx(4e9 * 1.05 + 0.6 * GIB, rel=1e-3)


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
    assert made.phases["caching"] == without.phases["caching"]
    assert not [name for name in items(predicted(precision=precision)) if "text" in name]


@pytest.mark.parametrize("kind", ["loha", "lokr"])
def test_rebuilt_weights_are_kept_whole_or_piece_by_piece(kind: str) -> None:
    """Both build the change of every adapted weight in fp32, and autograd keeps what it is made of."""
    shapes = COSTS.adapter_shapes(sd15_facts(), targets="attention")
    elements = sum(fan_in * out for fan_in, out in shapes.values())
    kept = items(predicted(adapter=adapter(kind=kind)))
    again = items(predicted(adapter=adapter(kind=kind), micro_batch=2))
    recomputed = items(predicted(adapter=adapter(kind=kind), checkpointing=True))
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
    shapes = COSTS.adapter_shapes(sd15_facts(), targets=changed.targets)
    parameters = adapter_parameters(shapes, changed)
    assert parameters != adapter_parameters(shapes, adapter(targets=changed.targets))
    made = items(predicted(adapter=changed))
    assert made["adapter weights"] == made["adapter gradients"] == 4 * parameters
    assert made["optimizer states"] == 8 * parameters


def test_sampling_keeps_the_training_in_place() -> None:
    made = predicted(samples=True, checkpointing=True, sample_side_px=1024)
    found = items(made)
    assert {"denoiser weights", "optimizer states", "sample image"} <= set(found)
    assert found["sample image"] == 4 * 768 * 1024 * 1024
    assert found["VAE weights"] == 4 * 83_653_863
    assert "activations" not in found


def test_fits_compares_with_the_limit() -> None:
    peak = predicted().peak_bytes
    for limit, fits in ((peak, True), (peak - 1, False), (None, True)):
        made = predict(LOAD, facts=sd15_facts(), family=COSTS, limit_bytes=limit)
        assert made.fits is fits
        assert made.limit_bytes == limit


def test_the_processor_has_another_runtime_than_the_card() -> None:
    assert items(predicted(device="cpu"))["runtime"] != items(predicted())["runtime"]


def test_a_workload_is_computed_once() -> None:
    class Counting(UNetCosts):
        calls = 0

        def sample_cost(self, facts: BaseFacts, workload: Workload) -> SampleCost:
            self.calls += 1
            return super().sample_cost(facts, workload)

    counting = Counting()
    remembered = RememberedCosts(family=counting)
    for micro_batch in (1, 2, 3):
        load = replace(LOAD, micro_batch=micro_batch)
        predict(load, facts=sd15_facts(), family=remembered)
    assert counting.calls == 1
